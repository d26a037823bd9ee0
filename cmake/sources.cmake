# The one list of sources. A file that is not named here is not built.
set(MHA_SOURCES
    src/error.c
    src/memory.c
    src/version.c
    src/weights.c
    src/context.c
    src/arguments.c
    src/project.c
    src/forward.c
    src/layer.c
    src/call.c
    src/attend.c
    src/attention.c
    src/core.c
    src/observe.c
    src/tiles.c
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
