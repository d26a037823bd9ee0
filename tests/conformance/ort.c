/* Owns the translation of ONNX Runtime's Attention (input · weight + bias, the three matrices side
 * by side in one [E][2·H·d + H·dv]) and MultiHeadAttention (query, key and value ready but for a
 * bias). Neither has an output projection.
 *
 * The layer is run as a layer, and its Q, K and V, as the trace shows them, are run through the
 * core alone; where there are past keys, only the latter, with them in front. */
#include "core.h"
#include "families.h"
#include "ort_mask.h"

#include <string.h>

typedef struct ort_call {
  conf_sizes sizes;
  mha_config config;
  mha_matrices matrices;
  mha_forward_args args;
  mha_rules rules; /* all but the mask */
  ort_mask mask;
  mha_weights *weights;
  float *projected[3]; /* Q, K, V, each [B][L][heads·size] */
  mha_tensor q, k, v;  /* the same, past keys and values included */
} ort_call;

static bool read_form(conf_case *c, ort_call *call) {
  static const char *const known[] = {
      "num_heads",
      "unidirectional",
      "scale",
      "mask_filter_value",
      "qkv_hidden_sizes", /* head_size and v_head_size say the same */
      NULL};
  double scale, unidirectional = 0;
  if (strcmp(conf_text(c, "layout"), "3D") != 0)
    return conf_cannot(c, "the layout \"%s\" is not translated", conf_text(c, "layout"));
  if (!conf_know_attributes(c, known) ||
      !conf_read_sizes(c, "num_heads", "num_heads", &call->sizes))
    return false;
  if (conf_attribute(c, "scale", &scale)) {
    call->rules.flags = MHA_SCALE;
    call->rules.scale = (float)scale;
  }
  conf_attribute(c, "unidirectional", &unidirectional);
  call->rules.causal = unidirectional != 0;
  call->rules.alignment = MHA_ALIGN_OFFSET;
  call->rules.offset = call->sizes.past;
  call->config.n_heads = call->sizes.H;
  call->config.head_size = call->sizes.d;
  call->config.value_head_size = call->sizes.dv;
  call->args.batch = call->sizes.B;
  call->args.query_length = call->sizes.Lq;
  call->args.key_length = call->sizes.fresh;
  return true;
}

/* ---- Inputs -----------------------------------------------------------------------------------
 */

static bool take_rows(conf_case *c, const char *name, int64_t batch, int64_t length, int64_t width,
                      const float **rows) {
  const conf_array *array;
  mha_tensor view;
  if (!conf_floats_input(c, name, &array) ||
      !conf_view(c, array, CONF_TOKENS_FIRST, batch, length, 1, width, &view))
    return false;
  *rows = view.data;
  return true;
}

/* Splits a bias [H·d | H·d | H·dv] into the three. */
static bool take_bias(conf_case *c, ort_call *call) {
  const int64_t width = call->sizes.H * call->sizes.d;
  const conf_array *bias;
  if (!conf_floats_input(c, "bias", &bias))
    return false;
  if (bias->numbers.n_elements != 2 * width + call->sizes.H * call->sizes.dv)
    return conf_fail(c, "bias has %lld numbers, not 2·H·d + H·dv",
                     (long long)bias->numbers.n_elements);
  call->matrices.query_bias = bias->numbers.data;
  call->matrices.key_bias = call->matrices.query_bias + width;
  call->matrices.value_bias = call->matrices.key_bias + width;
  return true;
}

static bool take_attention(conf_case *c, ort_call *call) {
  const conf_sizes *s = &call->sizes;
  const int64_t width = s->H * s->d;
  const int64_t packed = 2 * width + s->H * s->dv;
  const conf_array *weight;
  if (strcmp(conf_text(c, "weight_layout"), "in_by_out_concat_q_k_v") != 0)
    return conf_cannot(c, "the weight layout \"%s\" is not translated",
                       conf_text(c, "weight_layout"));
  if (s->Lq != s->fresh)
    return conf_fail(c, "kv_len is not q_len");
  if (!conf_dimension(c, "input_width", &call->config.query_width) ||
      !take_rows(c, "input", s->B, s->Lq, call->config.query_width, &call->args.query) ||
      !conf_floats_input(c, "weight", &weight))
    return false;
  if (weight->numbers.n_elements != call->config.query_width * packed)
    return conf_fail(c, "weight is not [E][2·H·d + H·dv]");
  call->matrices.orientation = MHA_IN_OUT;
  const float *packed_matrix = weight->numbers.data;
  call->matrices.query = packed_matrix;
  call->matrices.key = packed_matrix + width;
  call->matrices.value = packed_matrix + 2 * width;
  call->matrices.query_ld = call->matrices.key_ld = call->matrices.value_ld = packed;
  return take_bias(c, call);
}

static bool has_bias(const conf_case *c) {
  for (int i = 0; i < c->inputs.n; i++) {
    if (strcmp(c->inputs.items[i].name, "bias") == 0)
      return true;
  }
  return false;
}

static bool take_multi_head_attention(conf_case *c, ort_call *call) {
  const conf_sizes *s = &call->sizes;
  call->config.query_width = s->H * s->d;
  call->config.key_width = s->H * s->d;
  call->config.value_width = s->H * s->dv;
  return take_rows(c, "query", s->B, s->Lq, s->H * s->d, &call->args.query) &&
         take_rows(c, "key", s->B, s->fresh, s->H * s->d, &call->args.key) &&
         take_rows(c, "value", s->B, s->fresh, s->H * s->dv, &call->args.value) &&
         (!has_bias(c) || take_bias(c, call));
}

static bool take_layer(conf_case *c, ort_call *call) {
  const char *op = conf_text(c, "op");
  if (strcmp(op, "Attention") == 0)
    return take_attention(c, call);
  if (strcmp(op, "MultiHeadAttention") == 0)
    return take_multi_head_attention(c, call);
  return conf_cannot(c, "the operator \"%s\" is not translated", op);
}

static bool take_rules(conf_case *c, ort_call *call) {
  const conf_array *bias = conf_input(c, "relative_position_bias");
  if (bias && (bias->kind != MHA_NPY_FLOATS || bias->numbers.rank != 4))
    return conf_cannot(c, "relative_position_bias is not four-dimensional floats");
  return (!bias || conf_apply_mask(c, bias, &call->sizes, &call->rules)) &&
         ort_take_mask(c, &call->sizes, &call->rules, &call->mask);
}

/* ---- Projection -------------------------------------------------------------------------------
 */

/* Has the layer make Q, K and V. */
static bool project(conf_case *c, mha_context *context, ort_call *call) {
  const conf_sizes *s = &call->sizes;
  mha_error error;
  call->projected[0] = conf_floats(c, s->B * s->Lq * s->H * s->d);
  call->projected[1] = conf_floats(c, s->B * s->fresh * s->H * s->d);
  call->projected[2] = conf_floats(c, s->B * s->fresh * s->H * s->dv);
  return call->projected[0] && call->projected[1] && call->projected[2] &&
         conf_expect(c,
                     mha_project_inputs(context, call->weights, &call->args, call->projected[0],
                                        call->projected[1], call->projected[2], &error),
                     &error);
}

/* Puts the past in front and compares present_key and present_value, [B][H][Lk][size]: past ones
 * as given, the others as the library projected them. */
static bool join_past(conf_case *c, ort_call *call) {
  const conf_sizes *s = &call->sizes;
  const conf_array *past_key = conf_input(c, "past_key");
  const conf_array *past_value = conf_input(c, "past_value");
  if (!past_key != (s->past == 0) || !past_value != (s->past == 0))
    return conf_fail(c, "past_len is %lld, but past_key or past_value says otherwise",
                     (long long)s->past);
  const mha_tensor k =
      conf_tensor(call->projected[1], CONF_TOKENS_FIRST, s->B, s->fresh, s->H, s->d);
  const mha_tensor v =
      conf_tensor(call->projected[2], CONF_TOKENS_FIRST, s->B, s->fresh, s->H, s->dv);
  call->q = conf_tensor(call->projected[0], CONF_TOKENS_FIRST, s->B, s->Lq, s->H, s->d);
  return conf_concatenate(c, past_key, s->past, &k, &call->k) &&
         conf_concatenate(c, past_value, s->past, &v, &call->v) &&
         conf_compare(c, "present_key", call->k.data, s->B * s->H * s->Lk * s->d) &&
         conf_compare(c, "present_value", call->v.data, s->B * s->H * s->Lk * s->dv);
}

/* ---- Attention --------------------------------------------------------------------------------
 */

static bool run_layer(conf_case *c, mha_context *context, const ort_call *call,
                      const mha_rules *rules) {
  const conf_sizes *s = &call->sizes;
  const int64_t n = s->B * s->Lq * s->H * s->dv;
  mha_error error;
  mha_forward_args args = call->args;
  args.rules = rules;
  args.output = conf_floats(c, n);
  return args.output &&
         conf_expect(c, mha_forward(context, call->weights, &args, &error), &error) &&
         conf_compare(c, "output", args.output, n);
}

/* Every spelling of the mask, through the core and, without a past, through the layer. */
static bool run_spellings(conf_case *c, mha_context *context, ort_call *call) {
  for (int spelling = 0; spelling < ORT_N_SPELLINGS; spelling++) {
    mha_rules rules = call->rules;
    bool applies;
    if (!ort_spell_mask(c, &call->sizes, &call->mask, (ort_spelling)spelling, &rules, &applies))
      return false;
    if (!applies)
      continue;
    if (!conf_attend(c, context, &call->q, &call->k, &call->v, &rules, NULL, CONF_TOKENS_FIRST,
                     "output") ||
        (call->sizes.past == 0 && !run_layer(c, context, call, &rules)))
      return false;
  }
  return true;
}

static bool run(conf_case *c, mha_context *context, ort_call *call) {
  return project(c, context, call) && join_past(c, call) && conf_all_taken(c) &&
         run_spellings(c, context, call) && conf_all_compared(c);
}

bool conf_translate_ort(conf_case *c, mha_context *context) {
  ort_call call;
  mha_error error;
  memset(&call, 0, sizeof call);
  MHA_INIT(&call.config);
  MHA_INIT(&call.matrices);
  MHA_INIT(&call.args);
  MHA_INIT(&call.rules);
  if (!read_form(c, &call) || !take_layer(c, &call) || !take_rules(c, &call))
    return false;
  if (!conf_expect(c, mha_weights_create(&call.config, &call.matrices, &call.weights, &error),
                   &error))
    return false;
  const bool passed = run(c, context, &call);
  mha_weights_destroy(call.weights);
  return passed;
}
