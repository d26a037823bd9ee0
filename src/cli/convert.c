/* Owns `mha convert`: one layer, its matrices in one type, as a safetensors file. */
#include "commands.h"
#include "conflicts.h"
#include "layer.h"
#include "results.h"
#include "signals.h"

/* Every matrix is converted once, from the type that the file has. Of the config the new file has
 * nothing, and no number in it depends on the epsilon, which loading wants to know. */
static mha_status load(const mha_options *options, mha_weights **weights, int *exit_status,
                       mha_error *error) {
  mha_config config;
  MHA_INIT(&config);
  config.flags = MHA_KEEP_TYPE;
  config.norm_epsilon = 1;
  return mha_layer_load(options, MHA_OPTION_PATH, &config, weights, exit_status, error);
}

static mha_status save(const mha_options *options, const mha_weights *weights, mha_error *error) {
  mha_signals_hold();
  const mha_status status = mha_weights_save(weights, options->values[MHA_OPTION_TARGET].text,
                                             options->values[MHA_OPTION_PREFIX].text, error);
  mha_signals_let_go();
  return status;
}

int mha_convert(const mha_options *options, mha_error *error) {
  const mha_result result = mha_result_of(options, MHA_OPTION_TARGET);
  mha_weights *weights = NULL;
  mha_weights *converted = NULL;
  int exit_status = MHA_EXIT_DATA;
  mha_status status = mha_conflicts_check(options->values, error);
  if (!status)
    status = mha_results_check(options, &result, 1, error);
  if (status && status != MHA_ERROR_IO)
    exit_status = MHA_EXIT_USAGE;
  if (!status)
    status = load(options, &weights, &exit_status, error);
  if (!status)
    status = mha_weights_convert(weights, options->values[MHA_OPTION_TYPE].element, NULL,
                                 &converted, error);
  if (!status)
    status = save(options, converted, error);
  mha_weights_destroy(weights);
  mha_weights_destroy(converted);
  return status ? exit_status : MHA_EXIT_OK;
}
