/* Owns what a model's metadata means for its layers: the pairs of the rotary positions, by the
 * architecture's name, and the sizes that a config leaves 0. */
#include "model.h"

#include "base/error.h"
#include "lookup.h"
#include "path.h"

#include <string.h>

/* ---- Architectures --------------------------------------------------------------------------- */

/* Names as general.architecture has them. Not here are those whose models have learned positions or
 * none (gpt2, bert, starcoder, bloom, mpt, t5), of which some models have none (baichuan), and what
 * turns in another way (qwen2vl). */
static const char *const interleaved[] = {
    "arcee",      "arctic",    "chameleon", "chatglm",  "cohere2", "command-r",
    "deci",       "deepseek",  "deepseek2", "ernie4_5", "glm4",    "granite",
    "granitemoe", "internlm2", "llama",     "minicpm",  "olmo",    "xverse",
};
static const char *const halves[] = {
    "bitnet", "codeshell", "dbrx",    "exaone",   "falcon",   "gemma",      "gemma2",
    "gemma3", "gpt-oss",   "gptneox", "grok",     "minicpm3", "nemotron",   "nomic-bert",
    "olmo2",  "olmoe",     "openelm", "phi2",     "phi3",     "phimoe",     "qwen",
    "qwen2",  "qwen2moe",  "qwen3",   "qwen3moe", "stablelm", "starcoder2",
};

static bool is_among(const char *name, const char *const *names, size_t n) {
  for (size_t k = 0; k < n; k++)
    if (strcmp(name, names[k]) == 0)
      return true;
  return false;
}

int32_t mha_model_rope(const char *architecture) {
  if (is_among(architecture, interleaved, sizeof interleaved / sizeof interleaved[0]))
    return MHA_ROPE_INTERLEAVED;
  return is_among(architecture, halves, sizeof halves / sizeof halves[0]) ? MHA_ROPE_HALVES
                                                                          : MHA_ROPE_NONE;
}

/* ---- A layer's config ------------------------------------------------------------------------ */

static void complete_heads(const mha_model_info *model, mha_config *c) {
  const int64_t said[] = {model->n_heads, model->n_kv_heads, model->head_size,
                          model->value_head_size};
  int64_t *const given[] = {&c->n_heads, &c->n_kv_heads, &c->head_size, &c->value_head_size};
  for (int k = 0; k < 4; k++)
    if (*given[k] != 0 && said[k] != 0 && *given[k] != said[k])
      return;
  for (int k = 0; k < 4; k++)
    if (*given[k] == 0)
      *given[k] = said[k];
}

void mha_model_complete(const mha_raw_tensors *tensors, const mha_layer_names *layer,
                        mha_config *config) {
  const mha_model_info *model = &tensors->model;
  complete_heads(model, config);
  if (layer->parts[MHA_PART_QUERY_NORM] && config->norm_epsilon == 0.0F)
    config->norm_epsilon = model->norm_epsilon;
  if (config->rope == MHA_ROPE_NONE)
    return;
  if (config->rotary_size == 0)
    config->rotary_size = model->rotary_size;
  if (config->rope_base == 0.0 && !config->rope_cos)
    config->rope_base = model->rope_base;
}

mha_status mha_model_check_rope(const mha_raw_tensors *tensors, const char *path,
                                const mha_config *config, mha_error *error) {
  static const char *const names[] = {"rope_freqs.weight", "rope_factors_long.weight",
                                      "rope_factors_short.weight"};
  if (config->rope == MHA_ROPE_NONE || config->rope_cos)
    return MHA_OK;
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
    if (mha_lookup_find(tensors, "", 0, names[k]))
      return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "%s holds %s, with config.rope = %d; rule: frequencies of a file's own come "
                      "as tables, config.rope_cos and config.rope_sin",
                      mha_shown_path(path), names[k], (int)config->rope);
  if (tensors->rope_is_scaled && config->rope_base == 0.0)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "%s scales its rotary positions, with config.rope = %d; rule: they come as "
                    "tables, config.rope_cos and config.rope_sin, or from config.rope_base",
                    mha_shown_path(path), (int)config->rope);
  return MHA_OK;
}
