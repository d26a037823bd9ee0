# About how many seconds of a processor the longer tests take. ctest starts those first that cost
# most, so that none of them is left when the others are done; what it does not know costs nothing.
# package_install comes before all, since others wait for it.
set(costs
    package_install:100
    package_fast_math:45 package_layout:40 package_archive:80 package_deb:20
    properties:10 properties_tiny:12 threads:9 threads_tiny:14 process:25 generation_bits:4
    check_blas_failure:14 package_subdirectory_c:12 package_subdirectory_static_c:10
    generation_limits_tiny:3 generation_limits_plain:3 generation_limits:2 generation:2 forward:5
    forward_tiny:5 types:7 stored:8 cache_types:9 types_xsmm:6 types_xsmm_tiny:6 numbers:2 flops:5 cli:4 cli_messages:4 check_by_hand:6
    package_refuse:7 check_jansson_failure:7 package_subdirectory_cxx:7 package_pkg_config:6
    fixed_answers:4 fixed_answers_tiny:4 few:3 few_tiny:2 few_plain:3 package_static_c:3
    package_static_c+cxx:3 package_static_only_c:3 package_static_build_c+cxx:3)
foreach(pair IN LISTS costs)
  string(REGEX MATCH "^(.*):(.*)$" ignored ${pair})
  if(TEST ${CMAKE_MATCH_1})
    set_tests_properties(${CMAKE_MATCH_1} PROPERTIES COST ${CMAKE_MATCH_2})
  endif()
endforeach()
