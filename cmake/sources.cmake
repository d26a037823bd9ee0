# The one list of sources. A file that is not named here is not built.
set(MHA_SOURCES
    src/error.c
    src/memory.c
    src/version.c
    src/weights.c
    src/context.c
    src/arguments.c
    src/call.c
    src/project.c
    src/forward.c
    src/call.c
    src/attend.c
    src/attention.c
    src/core.c
    src/observe.c
    src/visibility.c
    src/softmax.c
    src/trace.c
    src/blas.c
    src/parallel.c
    src/files/npy.c
    src/files/names.c
    src/files/load.c)

# What the command needs of src/ beside the public functions.
set(MHA_READER_SOURCES src/error.c src/memory.c src/files/npy.c)

set(MHA_CLI_SOURCES
    src/cli/main.c
    src/cli/options.c
    src/cli/demo.c
    src/cli/run.c
    src/cli/article.c
    src/cli/view.c)

# TEMPORARY, until every file exists.
foreach(list IN ITEMS MHA_SOURCES MHA_READER_SOURCES MHA_CLI_SOURCES)
  set(present)
  foreach(source IN LISTS ${list})
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${source})
      list(APPEND present ${source})
    else()
      message(STATUS "MISSING SOURCE ${source}")
    endif()
  endforeach()
  set(${list} ${present})
endforeach()
if(NOT MHA_CLI_SOURCES)
  set(MHA_BUILD_CLI OFF)
endif()

# The row kernels: the whole speed of softmax is in their vectorisation. None of these options
# changes the treatment of NaN and infinities.
if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
  set_source_files_properties(
    src/softmax.c PROPERTIES COMPILE_OPTIONS
                             "-O3;-fno-math-errno;-fno-trapping-math;-ffp-contract=fast")
endif()
