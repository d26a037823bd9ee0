/* Owns the translation of ONNX's Attention (operator sets 23 and 24) and of FlexAttention whose
 * modifications have been reduced to a causal flag or an added mask.
 *
 * A 4-D case is [B][heads][L][size], a 3-D one [B][L][heads·size]; both are strides here. past_key
 * and past_value stand before K and V. Query i's own key is i + past, or i + n − Lq where
 * nonpad_kv_seqlen gives n valid keys; else i. qk_matmul_output shows one stage of the scores. */
#include "core.h"
#include "families.h"

#include <math.h>
#include <string.h>

typedef struct onnx_call {
  conf_sizes sizes;
  conf_layout layout;
  const conf_array *past_key, *past_value;
  mha_tensor q, k, v;
  mha_rules rules;
  mha_results results;
} onnx_call;

static bool is_given(const conf_case *c, const char *attribute) {
  size_t i;
  json_t *name;
  json_array_foreach(json_object_get(c->json, "attributes_given"), i, name) {
    if (json_is_string(name) && strcmp(json_string_value(name), attribute) == 0)
      return true;
  }
  return false;
}

static bool read_form(conf_case *c, onnx_call *call) {
  static const char *const known[] = {
      "is_causal",
      "scale",
      "q_num_heads",
      "kv_num_heads",
      "softcap",
      "qk_matmul_output_mode",
      "softmax_precision", /* the library's is float32; the tolerance says what that may cost */
      NULL};
  const char *op = conf_text(c, "op");
  const char *layout = conf_text(c, "layout");
  if (strcmp(op, "Attention") != 0 && strcmp(op, "FlexAttention") != 0)
    return conf_cannot(c, "the operator \"%s\" is not translated", op);
  if (strcmp(layout, "3D") != 0 && strcmp(layout, "4D") != 0)
    return conf_cannot(c, "the layout \"%s\" is not translated", layout);
  call->layout = layout[0] == '4' ? CONF_HEADS_FIRST : CONF_TOKENS_FIRST;
  return conf_know_attributes(c, known) &&
         conf_read_sizes(c, "q_num_heads", "kv_num_heads", &call->sizes);
}

static bool take_past(conf_case *c, onnx_call *call) {
  call->past_key = conf_input(c, "past_key");
  call->past_value = conf_input(c, "past_value");
  const bool given = call->past_key && call->past_value;
  if (given == (call->sizes.past > 0) && !call->past_key == !call->past_value)
    return true;
  return conf_fail(c, "past_len is %lld, but past_key or past_value says otherwise",
                   (long long)call->sizes.past);
}

static bool take_tensors(conf_case *c, onnx_call *call) {
  const conf_sizes *s = &call->sizes;
  const conf_array *q, *k, *v;
  if (!conf_floats_input(c, "Q", &q) || !conf_floats_input(c, "K", &k) ||
      !conf_floats_input(c, "V", &v) || !take_past(c, call))
    return false;
  if (!conf_view(c, q, call->layout, s->B, s->Lq, s->H, s->d, &call->q) ||
      !conf_view(c, k, call->layout, s->B, s->fresh, s->G, s->d, &call->k) ||
      !conf_view(c, v, call->layout, s->B, s->fresh, s->G, s->dv, &call->v))
    return false;
  if (!call->past_key)
    return true;
  const mha_tensor fresh_k = call->k;
  const mha_tensor fresh_v = call->v;
  return conf_concatenate(c, call->past_key, s->past, &fresh_k, &call->k) &&
         conf_concatenate(c, call->past_value, s->past, &fresh_v, &call->v);
}

/* Scale and softcap; where the case gives none, the library's own defaults are put to the test. */
static void take_scores(const conf_case *c, onnx_call *call) {
  double value;
  if (is_given(c, "scale") && conf_attribute(c, "scale", &value)) {
    call->rules.flags |= MHA_SCALE;
    call->rules.scale = (float)value;
  }
  if (conf_attribute(c, "softcap", &value))
    call->rules.softcap = (float)value;
}

static bool take_visibility(conf_case *c, onnx_call *call) {
  double causal;
  const conf_array *mask = conf_input(c, "attn_mask");
  const conf_array *lengths = conf_input(c, "nonpad_kv_seqlen");
  call->rules.causal = conf_attribute(c, "is_causal", &causal) && causal != 0;
  call->rules.alignment = MHA_ALIGN_OFFSET;
  call->rules.offset = call->sizes.past;
  if (lengths) {
    if (call->past_key)
      return conf_cannot(c, "nonpad_kv_seqlen stands beside past_key");
    if (!conf_check_integers(c, lengths, call->sizes.B, 0))
      return false;
    call->rules.key_lengths = lengths->numbers.data;
    call->rules.alignment = MHA_ALIGN_BOTTOM_RIGHT;
  }
  return !mask || conf_apply_mask(c, mask, &call->sizes, &call->rules);
}

/* Asks for the weights that qk_matmul_output holds: mode 0 is scale·q·k, 1 after the softcap, 2
 * after mask and bias, 3 after the softmax. */
static bool take_stage(conf_case *c, onnx_call *call, int64_t *n_weights) {
  static const int32_t stages[] = {MHA_STAGE_SCALED, MHA_STAGE_CAPPED, MHA_STAGE_FINAL,
                                   MHA_STAGE_WEIGHTS};
  const conf_sizes *s = &call->sizes;
  double mode = 0;
  conf_attribute(c, "qk_matmul_output_mode", &mode);
  *n_weights = s->B * s->H * s->Lq * s->Lk;
  if (!conf_has_output(c, "qk_matmul_output"))
    return true;
  if (!(mode >= 0 && mode <= 3) || mode != floor(mode))
    return conf_cannot(c, "qk_matmul_output_mode %g is not translated", mode);
  if (call->rules.key_lengths && mode < 2)
    return conf_cannot(c, "scores of keys beyond nonpad_kv_seqlen are not shown by the library");
  call->results.stage = stages[(size_t)mode];
  call->results.weights = conf_floats(c, *n_weights);
  return call->results.weights != NULL;
}

bool conf_translate_onnx(conf_case *c, mha_context *context) {
  onnx_call call = {0};
  int64_t n_weights = 0;
  MHA_INIT(&call.rules);
  MHA_INIT(&call.results);
  if (!read_form(c, &call) || !take_tensors(c, &call))
    return false;
  take_scores(c, &call);
  if (!take_visibility(c, &call) || !take_stage(c, &call, &n_weights) || !conf_all_taken(c))
    return false;
  if (!conf_attend(c, context, &call.q, &call.k, &call.v, &call.rules, &call.results, call.layout,
                   "Y") ||
      !conf_compare(c, "qk_matmul_output", call.results.weights, n_weights))
    return false;
  /* The past was put before the new keys here, not by the library. */
  conf_leave_out(c, "present_key");
  conf_leave_out(c, "present_value");
  return conf_all_compared(c);
}
