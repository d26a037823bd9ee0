/* One layer of weights for the command. */
#ifndef MHA_SRC_CLI_LAYER_H
#define MHA_SRC_CLI_LAYER_H

#include "options.h"

/* Loads the layer under --prefix from what the option `source` names. --heads and --kv-heads go
 * into *config before; without them they are left to the file. Where that says nothing of heads
 * either, *exit_status becomes that of a bad command line. Destroy *weights, which begins as NULL,
 * in any case. */
mha_status mha_layer_load(const mha_options *options, mha_option source, mha_config *config,
                          mha_weights **weights, int *exit_status, mha_error *error);

#endif
