# How the project's own targets are compiled and linked. Nothing here is global.
include(CheckCCompilerFlag)
include(CheckLinkerFlag)

set(MHA_STRICT_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes
                        -Wmissing-prototypes)

# C11 without extensions, every warning, IEEE arithmetic. Whether a warning is an error is up to
# CMAKE_COMPILE_WARNING_AS_ERROR. Never several files in one: what is static has short names, which
# files share.
function(mha_compile_strictly target)
  set_target_properties(${target} PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON
                                             C_EXTENSIONS OFF UNITY_BUILD OFF)
  if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(${target} PRIVATE ${MHA_STRICT_WARNINGS})
    mha_compute_strictly(${target})
  endif()
endfunction()

# Takes back -ffast-math, -Ofast and the options that are parts of them, wherever they come from:
# flags of the cache or of the environment, a parent project's options. They would fold away the
# rounding inside exp and every test for NaN. src/base/ieee.h refuses what is not taken back here. Each
# set is one SHELL item, since CMake leaves out an option that it has seen before, and these have to
# come last.
function(mha_compute_strictly target)
  set(compile -fno-fast-math -fno-finite-math-only -fno-associative-math -fno-reciprocal-math
              -fsigned-zeros)
  if(CMAKE_C_COMPILER_ID MATCHES "Clang")
    # Without the first, clang warns of the contraction that -fno-fast-math takes back.
    list(PREPEND compile -ffp-contract=on)
    set(newer -fno-approx-func -fhonor-nans -fhonor-infinities -fdenormal-fp-math=ieee)
  else()
    # To clang this one would mean that each operation may trap.
    list(APPEND compile -fno-unsafe-math-optimizations)
    set(newer -fno-single-precision-constant -fno-allow-store-data-races)
  endif()
  foreach(flag IN LISTS newer)
    string(MAKE_C_IDENTIFIER "MHA_COMPILER_HAS${flag}" known)
    check_c_compiler_flag(${flag} ${known})
    if(${known})
      list(APPEND compile ${flag})
    endif()
  endforeach()

  # What is linked with these gets an initialiser that flushes subnormals in the whole program that
  # loads it. -Ofast is taken back by another -O alone, which means nothing else to the linker. They
  # stand among the libraries, since CMAKE_SHARED_LINKER_FLAGS come behind a target's link options
  # with some generators, before them with others.
  set(link -fno-fast-math -fno-unsafe-math-optimizations -O2)
  check_linker_flag(C -mno-daz-ftz MHA_LINKER_HAS_mno_daz_ftz)
  if(MHA_LINKER_HAS_mno_daz_ftz)
    list(APPEND link -mno-daz-ftz)
  endif()
  list(JOIN compile " " compile)
  target_compile_options(${target} PRIVATE "SHELL:${compile}")
  get_target_property(type ${target} TYPE)
  if(NOT type STREQUAL "STATIC_LIBRARY") # not linked, and its users would get them
    target_link_libraries(${target} PRIVATE ${link})
  endif()
endfunction()

function(mha_link_with target flag)
  string(MAKE_C_IDENTIFIER "MHA_LINKER_HAS_${flag}" known)
  check_linker_flag(C "LINKER:${flag}" ${known})
  if(${known})
    target_link_options(${target} PRIVATE "LINKER:${flag}")
  endif()
endfunction()

# No library that is not needed, no symbol that `map` does not name, none left undefined.
function(mha_link_strictly target map)
  mha_link_with(${target} --as-needed)
  mha_link_with(${target} --version-script=${map})
  # It stays in the process until its end: a context that is still there when it is unloaded has
  # threads, and so may the BLAS.
  mha_link_with(${target} -z,nodelete)
  # A sanitizer's run-time library is part of the program alone, so its symbols are missing here.
  if(NOT "${CMAKE_C_FLAGS} ${CMAKE_SHARED_LINKER_FLAGS}" MATCHES "-fsanitize")
    mha_link_with(${target} -z,defs)
  endif()
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${map})
endfunction()

# The row kernels: their whole speed is in their vectorisation. None of these options
# changes the treatment of NaN and infinities. To be called in each folder that compiles them.
function(mha_tune_kernels)
  if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    set_source_files_properties(
      ${PROJECT_SOURCE_DIR}/src/engine/softmax.c ${PROJECT_SOURCE_DIR}/src/engine/vector.c
      ${PROJECT_SOURCE_DIR}/src/engine/round.c ${PROJECT_SOURCE_DIR}/src/engine/derivative.c
      ${PROJECT_SOURCE_DIR}/src/engine/philox.c ${PROJECT_SOURCE_DIR}/src/engine/philox_avx2.c
      PROPERTIES COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math;-ffp-contract=fast")
    # These are so much inlined code that a sanitizer takes a minute for each of them at -O3.
    set(rows "-O3")
    if(CMAKE_C_FLAGS MATCHES "-fsanitize=[a-z,]*address")
      set(rows "-O1;-fno-sanitize-address-use-after-scope")
    endif()
    set_source_files_properties(
      ${PROJECT_SOURCE_DIR}/src/engine/rows_avx512.c ${PROJECT_SOURCE_DIR}/src/engine/rows_avx2.c
      ${PROJECT_SOURCE_DIR}/src/engine/rows_plain.c
      PROPERTIES COMPILE_OPTIONS "${rows};-fno-math-errno;-fno-trapping-math;-ffp-contract=fast")
  endif()
endfunction()
