# The same tests over other builds of the library.
#
# mha_tiny: tiles and panels of a few rows, and a second thread for every trifle, so that every
# border of a tile and every way to share out tasks is met by the small shapes of the tests.
# mha_plain: the same with plain loops in the BLAS's place, and without libxsmm: what is left is the
# library's own, for tools that cannot look into a BLAS, and a proof that all products go through the
# one interface.
# mha_xsmm: contexts that name no engine take MHA_ENGINE_XSMM, and every layer is packed, so that the
# same programs test the other engine. mha_xsmm_tiny: the same with tiny tiles.

set(tiny_definitions MHA_QUERY_TILE=8 MHA_KEY_TILE=16 MHA_EDGE_TILE=8 MHA_PANEL_ROWS=8
                     MHA_PANEL_COLUMNS=16 MHA_PART_ROWS=8 MHA_OPERATIONS_PER_THREAD=1 MHA_FEW_QUERIES=3
                     MHA_FEW_RATIO=2 MHA_PART_TILE=8 MHA_STRIP_FLOATS=8 MHA_PIECE_FLOATS=20
                     MHA_LAID_QUERIES=8 MHA_LAID_TILE=16 MHA_KEY_BLOCK=8 MHA_PACKED_PANEL_ROWS=9
                     MHA_PACKED_PANEL_COLUMNS=64 MHA_PACKED_LONGEST=16 MHA_PACKED_PIECE=8
                     MHA_FEW_STORED_ROWS=3 MHA_WIDENED_FLOATS=2048 MHA_BACK_QUERIES=8 MHA_BACK_KEYS=16
                     MHA_GRADIENT_PANEL=32 MHA_GRADIENT_ROWS=8)
set(xsmm_definitions MHA_DEFAULT_ENGINE=MHA_ENGINE_XSMM MHA_ALWAYS_PACK=1)
list(TRANSFORM MHA_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE variant_sources)
list(FILTER variant_sources EXCLUDE REGEX "/engine/(without_)?xsmm[.]c$")
# what takes long to compile and is the same in all of them
list(FILTER variant_sources EXCLUDE REGEX "/engine/rows_[a-z0-9]+[.]c$")
set(rows_sources ${PROJECT_SOURCE_DIR}/src/engine/rows_avx512.c
                 ${PROJECT_SOURCE_DIR}/src/engine/rows_avx2.c
                 ${PROJECT_SOURCE_DIR}/src/engine/rows_plain.c)
add_library(mha_rows OBJECT ${rows_sources})
target_include_directories(mha_rows PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
mha_compile_strictly(mha_rows)
set(generator ${PROJECT_SOURCE_DIR}/src/engine/without_xsmm.c)
if(has_xsmm)
  set(generator ${PROJECT_SOURCE_DIR}/src/engine/xsmm.c)
endif()

function(mha_variant name)
  add_library(${name} STATIC ${variant_sources} $<TARGET_OBJECTS:mha_rows> ${ARGN})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/include
                             PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${name} PUBLIC MHA_STATIC)
  if(has_xsmm)
    target_link_libraries(${name} PRIVATE mha::xsmm)
  endif()
  target_link_libraries(${name} PRIVATE mha::jansson Threads::Threads m)
  mha_compile_strictly(${name})
endfunction()

mha_variant(mha_tiny ${generator})
target_compile_definitions(mha_tiny PRIVATE ${tiny_definitions})
target_link_libraries(mha_tiny PRIVATE mha::cblas)
mha_variant(mha_plain support/plain_blas.c ${PROJECT_SOURCE_DIR}/src/engine/without_xsmm.c)
target_compile_definitions(mha_plain PRIVATE ${tiny_definitions})
target_include_directories(mha_plain PRIVATE ${blas_include_dir})
target_compile_options(mha_plain PRIVATE ${blas_options})

if(has_xsmm)
  mha_variant(mha_xsmm ${generator})
  target_compile_definitions(mha_xsmm PRIVATE ${xsmm_definitions})
  mha_variant(mha_xsmm_tiny ${generator})
  target_compile_definitions(mha_xsmm_tiny PRIVATE ${xsmm_definitions} ${tiny_definitions})
  foreach(variant IN ITEMS mha_xsmm mha_xsmm_tiny)
    target_link_libraries(${variant} PRIVATE mha::cblas)
  endforeach()
endif()

# mha_test_again(<folder>/<name> <variant>): test_<name> once more, linked with a variant.
function(mha_test_again path variant)
  get_filename_component(folder ${path} DIRECTORY)
  get_filename_component(name ${path} NAME)
  string(REPLACE mha_ "" suffix ${variant})
  set(program test_${name}_${suffix})
  add_executable(${program} ${folder}/test_${name}.c)
  target_link_libraries(${program} PRIVATE mha_test_support ${variant})
  target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  mha_compile_strictly(${program})
  add_test(NAME ${name}_${suffix} COMMAND ${MHA_TEST_LAUNCHER} $<TARGET_FILE:${program}>)
  set_tests_properties(${name}_${suffix} PROPERTIES LABELS "unit;${suffix}")
endfunction()

foreach(path IN ITEMS
        runtime/threads runtime/process runtime/backward_memory cache/generation cache/generation_bits
        cache/generation_limits cache/batching cache/serving cache/cache_types attention/attend attention/few attention/stored attention/dropout
        attention/attend_backward layer/backward layer/forward layer/rope layer/types api/faults api/fixed_answers api/properties
        api/backward_properties)
  mha_test_again(${path} mha_tiny)
endforeach()
# tiny tiles need no long sequences, and 400 callers need not wait for each other in so many products
set_tests_properties(few_tiny generation_tiny generation_bits_tiny generation_limits_tiny rope_tiny
                     types_tiny stored_tiny cache_types_tiny process_tiny backward_memory_tiny
                     PROPERTIES ENVIRONMENT MHA_TEST_SMALL=1)
foreach(path IN ITEMS
        runtime/threads runtime/process cache/generation cache/generation_bits
        cache/generation_limits cache/batching cache/serving cache/cache_types attention/attend attention/few attention/stored attention/dropout
        attention/attend_backward layer/backward layer/forward layer/types api/properties api/backward_properties
        api/engines)
  mha_test_again(${path} mha_plain)
  get_filename_component(name ${path} NAME)
  set_tests_properties(${name}_plain PROPERTIES ENVIRONMENT MHA_TEST_SMALL=1) # loops are slow
endforeach()
if(has_xsmm)
  foreach(path IN ITEMS
          runtime/threads runtime/allocation_failure cache/generation
          cache/generation_bits cache/generation_limits cache/batching cache/serving cache/cache_types attention/attend
          attention/few attention/stored attention/dropout attention/merge
          attention/attend_backward layer/backward layer/forward layer/norm layer/rope
          layer/types layer/convert api/faults api/fixed_answers api/properties api/backward_properties api/article
          files/real)
    mha_test_again(${path} mha_xsmm)
  endforeach()
  # kernels are generated for each layer
  set_tests_properties(types_xsmm stored_xsmm cache_types_xsmm
                       PROPERTIES ENVIRONMENT MHA_TEST_SMALL=1)
  foreach(path IN ITEMS
          runtime/threads cache/generation cache/generation_bits cache/generation_limits cache/batching cache/serving
          cache/cache_types attention/attend attention/stored attention/dropout
          attention/attend_backward layer/backward layer/forward layer/rope layer/types
          api/faults api/fixed_answers api/properties api/backward_properties)
    mha_test_again(${path} mha_xsmm_tiny)
    get_filename_component(name ${path} NAME)
    set_tests_properties(${name}_xsmm_tiny PROPERTIES ENVIRONMENT MHA_TEST_SMALL=1)
  endforeach()
endif()

# Products of many types and options: the variants take a few of them, sanitizers too.
foreach(name IN ITEMS types stored cache_types backward attend_backward backward_properties)
  foreach(suffix IN ITEMS _tiny _plain _xsmm _xsmm_tiny)
    if(TEST ${name}${suffix})
      set_tests_properties(${name}${suffix} PROPERTIES ENVIRONMENT MHA_TEST_SMALL=1)
    endif()
  endforeach()
  if(TEST ${name} AND CMAKE_C_FLAGS MATCHES "-fsanitize")
    set_tests_properties(${name} PROPERTIES ENVIRONMENT MHA_TEST_SMALL=1)
  endif()
endforeach()
