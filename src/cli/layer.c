/* Owns how the command loads a layer. */
#include "layer.h"

#include "commands.h"

#include "base/error.h"
#include "files/path.h"

/* The number of heads is in no shape: without it the command line is wrong, unless the file's
 * metadata tell it. */
static mha_status check_heads(const mha_file *file, const char *path, mha_error *error) {
  mha_model_info model;
  MHA_INIT(&model);
  const mha_status status = mha_file_model(file, &model, error);
  if (status || model.n_heads > 0)
    return status;
  return mha_fail(error, MHA_ERROR_HEADS,
                  "--heads is missing; rule: --heads H, since %s does not tell it",
                  mha_shown_path(path));
}

/* The file is given back at once: the layer keeps what it needs. */
mha_status mha_layer_load(const mha_options *options, mha_option source, mha_config *config,
                          mha_weights **weights, int *exit_status, mha_error *error) {
  const mha_option_value *v = options->values;
  const char *path = v[source].text;
  mha_file *file = NULL;
  config->n_heads = v[MHA_OPTION_HEADS].integer;
  config->n_kv_heads = v[MHA_OPTION_KV_HEADS].integer;
  mha_status status = mha_file_open(path, NULL, &file, error);
  if (!status && !v[MHA_OPTION_HEADS].given) {
    status = check_heads(file, path, error);
    *exit_status = status ? MHA_EXIT_USAGE : *exit_status;
  }
  if (!status)
    status = mha_weights_load_from(config, file, v[MHA_OPTION_PREFIX].text, weights, error);
  mha_file_destroy(file);
  return status;
}
