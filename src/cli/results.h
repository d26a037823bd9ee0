/* Where the results of a command may go. */
#ifndef MHA_SRC_CLI_RESULTS_H
#define MHA_SRC_CLI_RESULTS_H

#include "options.h"

/* Checks the paths of those of the n options that are given, before anything is read or computed: a
 * file for each, none that standard output or standard error goes to, none that the weights come
 * from (VALUE: the command line is wrong), and each can be written, as far as that shows (IO).
 * Messages name the option. */
mha_status mha_results_check(const mha_options *options, const mha_option *results, int n,
                             mha_error *error);

#endif
