/* Conflicts between the options of `mha run`. */
#ifndef MHA_SRC_CLI_CONFLICTS_H
#define MHA_SRC_CLI_CONFLICTS_H

#include "options.h"

/* Whether options that are read can stand together; fails with MHA_ERROR_VALUE or HEADS. */
mha_status mha_conflicts_check(const mha_option_value v[MHA_N_OPTIONS], mha_error *error);

#endif
