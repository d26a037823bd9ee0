/* Who attends to whom in `mha run`. */
#ifndef MHA_SRC_CLI_RUN_RULES_H
#define MHA_SRC_CLI_RUN_RULES_H

#include "options.h"

#include "files/npy.h"

/* The rules and the arrays that they point into; begin with {0}. */
typedef struct mha_run_rules {
  mha_rules rules;
  mha_npy_array attend, bias, slopes, sinks;
} mha_run_rules;

/* Reads what options and the files that they name say, for a layer of n_heads and the batch and the
 * lengths in `args`, and gives it the rules, which point into `options` too. Release in any case.
 * Fails with MHA_ERROR_LENGTH if lengths on the command line do not fit the input. */
mha_status mha_run_rules_read(const mha_options *options, int64_t n_heads, mha_run_rules *r,
                              mha_forward_args *args, mha_error *error);

void mha_run_rules_release(mha_run_rules *r);

#endif
