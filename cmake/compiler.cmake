# How the project's own targets are compiled and linked. Nothing here is global.
include(CheckLinkerFlag)

set(MHA_STRICT_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes
                        -Wmissing-prototypes)

# C11 without extensions, every warning. Whether a warning is an error is up to
# CMAKE_COMPILE_WARNING_AS_ERROR.
function(mha_compile_strictly target)
  set_target_properties(${target} PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON
                                             C_EXTENSIONS OFF)
  if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(${target} PRIVATE ${MHA_STRICT_WARNINGS})
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

# The row kernels: the whole speed of softmax is in their vectorisation. None of these options
# changes the treatment of NaN and infinities. To be called in each folder that compiles them.
function(mha_tune_kernels)
  if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    set_source_files_properties(
      ${PROJECT_SOURCE_DIR}/src/softmax.c
      PROPERTIES COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math;-ffp-contract=fast")
  endif()
endfunction()
