# The target uninstall removes what was installed, whole or by components, and nothing else.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

set(build ${WORK}/build)
# A prefix with a space, in which somebody else has a file beside ours.
set(prefix "${WORK}/a prefix")
file(REMOVE_RECURSE ${WORK})
file(WRITE "${prefix}/include/foreign.h" "")
run(ignored ${CMAKE_COMMAND} -S ${SOURCE} -B ${build} -G ${GENERATOR}
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_BUILD_TYPE=Debug -DMHA_BUILD_TESTS=OFF
    -DMHA_BUILD_BENCH=OFF -DMHA_BUILD_STATIC=OFF "-DCMAKE_INSTALL_PREFIX=${prefix}"
    "-DMHA_BLAS_LIBRARIES=${BLAS_LIBRARIES}" -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR})
run(ignored ${CMAKE_COMMAND} --build ${build} --parallel 2)

function(expect_only_foreign)
  file(GLOB_RECURSE left RELATIVE "${prefix}" LIST_DIRECTORIES FALSE "${prefix}/*")
  if(NOT left STREQUAL "include/foreign.h")
    fail("After uninstall there is: ${left}")
  endif()
  file(GLOB_RECURSE left RELATIVE "${prefix}" LIST_DIRECTORIES TRUE "${prefix}/*")
  if(left MATCHES "cmake/mha")
    fail("The package's own folder stays: ${left}")
  endif()
endfunction()

foreach(components IN ITEMS "all" "Runtime;Development;Tools")
  foreach(component IN LISTS components)
    set(which --component ${component})
    if(component STREQUAL "all")
      set(which)
    endif()
    run(ignored ${CMAKE_COMMAND} --install ${build} ${which})
  endforeach()
  file(GLOB installed "${prefix}/lib*/libmha.so" "${prefix}/lib*/*/libmha.so")
  if(NOT installed OR NOT EXISTS "${prefix}/bin/mha" OR NOT EXISTS "${prefix}/include/mha.h")
    fail("${components} were not installed")
  endif()
  run(ignored ${CMAKE_COMMAND} --build ${build} --target uninstall)
  expect_only_foreign()
endforeach()
run_failing("nothing was installed from it" ${CMAKE_COMMAND} --build ${build} --target uninstall)
