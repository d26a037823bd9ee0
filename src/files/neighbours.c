/* Owns what lies beside a layer's parts under its prefix: harmless, or a tensor that would change
 * the result. */
#include "families.h"
#include "lookup.h"
#include "text.h"

#include <string.h>

/* Known from models, and not computed here; behind a prefix that ends with a dot whatever is
 * unknown is refused anyway. An entry that ends with a dot stands for all that begins so. */
static const char *const refused[] = {
    "bias_k",
    "bias_v",
    "q_layernorm.",
    "k_layernorm.",
    "q_ln.",
    "k_ln.",
    "query_layernorm.",
    "key_layernorm.",
    "q_attn.",
    "v_norm.",
    "query_norm.",
    "key_norm.",
    "inner_attn_ln.",
    "distance_embedding.",
    "relative_attention_bias.",
    "relative_position_bias_table",
};

static bool is_refused(const char *rest) {
  for (size_t k = 0; k < sizeof refused / sizeof refused[0]; k++)
    if (refused[k][strlen(refused[k]) - 1] == '.' ? mha_starts_with(rest, refused[k])
                                                  : strcmp(rest, refused[k]) == 0)
      return true;
  return false;
}

/* Of what begins as the names of a family do that shares its prefix: the normalisations before and
 * behind the layer, and frequencies. */
static const char *const outside[] = {"attn_norm.", "attn_norm_2.", "attn_output_norm.",
                                      "attn_rot_embd."};

static bool is_outside(const char *rest, const mha_name_family *family) {
  if (family->own[0] == '\0')
    return false;
  for (size_t k = 0; k < sizeof outside / sizeof outside[0]; k++)
    if (mha_starts_with(rest, outside[k]))
      return true;
  return !mha_starts_with(rest, family->own);
}

/* Behind the prefix too, but without a say in what the layer computes: frequencies, which
 * config.rope tells; the causal mask of GPT-2, GPT-Neo and GPT-J, which the call tells; and the
 * normalisation that BERT puts behind the residual. */
static bool is_harmless(const char *rest, const mha_raw_tensor *tensor) {
  return strcmp(rest, "inv_freq") == 0 || mha_ends_with(rest, ".inv_freq") ||
         strcmp(rest, "masked_bias") == 0 || (strcmp(rest, "bias") == 0 && tensor->rank == 4) ||
         mha_starts_with(rest, "output.LayerNorm.");
}

/* Whether `rest` continues a known name: "q_proj.lora_A.weight" the module of "q_proj.weight",
 * "in_proj_weight_scale" the name without a module "in_proj_weight". */
static bool continues(const char *rest, const char *name) {
  const char *dot = name ? strrchr(name, '.') : NULL;
  if (dot)
    return strncmp(rest, name, (size_t)(dot - name) + 1) == 0;
  return name && mha_starts_with(rest, name) &&
         (rest[strlen(name)] == '.' || rest[strlen(name)] == '_');
}

static bool is_of_family(const char *rest, const mha_name_family *family) {
  if (family->holder[0] != '\0' && mha_starts_with(rest, family->holder))
    return true;
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (continues(rest, family->parts[part]))
      return true;
  for (int k = 0; k < family->n_outputs; k++)
    if (continues(rest, family->outputs[k].matrix) || continues(rest, family->outputs[k].bias))
      return true;
  return false;
}

static bool is_part(const mha_layer_names *layer, const mha_raw_tensor *tensor) {
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (layer->parts[part] == tensor)
      return true;
  return false;
}

const mha_raw_tensor *mha_names_unsupported(const mha_raw_tensors *tensors,
                                            const mha_layer_names *layer) {
  const bool own = layer->family->own[0] != '\0' ||
                   (layer->prefix_bytes > 0 &&
                    layer->prefix[layer->prefix_bytes - 1] == '.'); /* all that is not outside */
  for (int64_t i = mha_lookup_lower_bound(tensors, layer->prefix, layer->prefix_bytes, "");
       i < tensors->n &&
       strncmp(tensors->items[i].name, layer->prefix, (size_t)layer->prefix_bytes) == 0;
       i++) {
    const mha_raw_tensor *tensor = &tensors->items[i];
    const char *rest = tensor->name + layer->prefix_bytes;
    if (is_part(layer, tensor) || is_harmless(rest, tensor) || is_outside(rest, layer->family))
      continue;
    if (own || is_refused(rest) || is_of_family(rest, layer->family))
      return tensor;
  }
  return NULL;
}
