/* Where the results of a command may go. */
#ifndef MHA_SRC_CLI_RESULTS_H
#define MHA_SRC_CLI_RESULTS_H

#include "options.h"

/* A file that a result goes to. */
typedef struct mha_result {
  const char *name;   /* for messages: the option that asks for it */
  const char *path;   /* NULL = it is not asked for */
  const char *folder; /* the path's, where one is made that is not there; otherwise NULL */
} mha_result;

/* What an option asks for. */
mha_result mha_result_of(const mha_options *options, mha_option option);

/* Checks the paths of those of n results that are asked for, before anything is read or computed: a
 * file for each, none that standard output or standard error goes to, none that the weights come
 * from (VALUE: the command line is wrong), and each can be written, as far as that shows (IO). */
mha_status mha_results_check(const mha_options *options, const mha_result *results, int n,
                             mha_error *error);

#endif
