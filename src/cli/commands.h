/* The commands of `mha`: each returns the command's exit status and, unless that is MHA_EXIT_OK,
 * leaves a message in `error`. */
#ifndef MHA_SRC_CLI_COMMANDS_H
#define MHA_SRC_CLI_COMMANDS_H

#include "calls.h"
#include "options.h"

/* Exit statuses of the command. */
enum { MHA_EXIT_OK = 0, MHA_EXIT_DATA = 1, MHA_EXIT_USAGE = 2 };

/* The article's example, step by step. */
int mha_demo(const mha_options *options, mha_error *error);

/* One layer over .npy files. What options forbid each other is found before any file is opened. */
int mha_run(const mha_options *options, mha_error *error);
/* The same where others than this process alone may make the calls. */
int mha_run_by(const mha_calls *calls, const mha_options *options, mha_error *error);

/* What is in a file or a folder of weights, and which layers that makes. */
int mha_inspect(const mha_options *options, mha_error *error);

/* One layer of a file, its matrices in one type, as a safetensors file. */
int mha_convert(const mha_options *options, mha_error *error);

#endif
