/* The commands of `mha`. Each prints to standard output and fails with a message. */
#ifndef MHA_SRC_CLI_COMMANDS_H
#define MHA_SRC_CLI_COMMANDS_H

#include "options.h"

/* Exit statuses of the command. */
enum { MHA_EXIT_OK = 0, MHA_EXIT_DATA = 1, MHA_EXIT_USAGE = 2 };

/* The article's example, step by step. */
mha_status mha_demo(const mha_options *options, mha_error *error);

/* One layer over .npy files. */
mha_status mha_run(const mha_options *options, mha_error *error);

/* What options forbid each other, before any file is opened: an error of the command line. */
mha_status mha_run_check(const mha_options *options, mha_error *error);

/* What is in a safetensors file or a folder of .npy files, and which layers that makes. */
mha_status mha_inspect(const mha_options *options, mha_error *error);

#endif
