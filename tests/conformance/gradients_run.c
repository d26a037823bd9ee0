/* Owns the library's side of a case of gradients. */
#include "gradients_case.h"

#include <string.h>

/* A gradient of the call: where its pointer stands among the arguments. */
typedef struct slot {
  const char *name;
  float **target;
} slot;

/* Memory for every gradient that the case expects. */
static bool want(grad_case *c, const slot *slots, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const grad_array *expected = grad_expected(c, slots[i].name);
    *slots[i].target = expected ? conf_floats(&c->base, expected->n) : NULL;
    if (expected && !*slots[i].target)
      return false;
  }
  return true;
}

static bool compare(grad_case *c, const slot *slots, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const grad_array *expected = grad_expected(c, slots[i].name);
    if (expected && !grad_compare(c, slots[i].name, *slots[i].target, expected->n))
      return false;
  }
  return true;
}

static float *make_output(grad_case *c) {
  return conf_floats(&c->base, c->query->shape[0] * c->problem.Lq * c->problem.Eo);
}

static bool compare_output(grad_case *c, const float *output) {
  return grad_compare(c, "y", output, c->query->shape[0] * c->problem.Lq * c->problem.Eo);
}

/* ---- Arguments ------------------------------------------------------------------------------- */

static const float *floats_of(grad_case *c, const char *name) {
  const grad_array *array = grad_input(c, name);
  return array ? array->floats : NULL;
}

static void fill_rules(grad_case *c, mha_rules *rules) {
  const oracle_problem *p = &c->problem;
  const grad_array *attend = grad_input(c, "attend"), *bias = grad_input(c, "bias");
  MHA_INIT(rules);
  rules->flags = (p->scale_given ? MHA_SCALE : 0) | (p->windowed ? MHA_WINDOW : 0);
  rules->scale = (float)p->scale;
  rules->softcap = (float)p->softcap;
  rules->causal = p->causal;
  rules->alignment =
      p->alignment == ORACLE_BOTTOM_RIGHT ? MHA_ALIGN_BOTTOM_RIGHT : MHA_ALIGN_TOP_LEFT;
  rules->window_left = p->window_left;
  rules->window_right = p->window_right;
  rules->query_lengths = p->query_lengths;
  rules->key_lengths = p->key_lengths;
  rules->query_starts = p->query_starts;
  rules->key_starts = c->key ? p->key_starts : NULL;
  rules->alibi_slopes = floats_of(c, "alibi_slopes");
  rules->sinks = floats_of(c, "sinks");
  if (attend)
    rules->attend = (mha_mask){.data = attend->bytes,
                               .batch = attend->shape[0],
                               .heads = attend->shape[1],
                               .rows = attend->shape[2],
                               .columns = attend->shape[3]};
  if (bias)
    rules->bias = (mha_bias){.data = bias->floats,
                             .batch = bias->shape[0],
                             .heads = bias->shape[1],
                             .rows = bias->shape[2],
                             .columns = bias->shape[3]};
}

static void fill_config(const grad_case *c, mha_config *config) {
  const oracle_problem *p = &c->problem;
  mha_config_init(config, p->Eq, p->H);
  config->n_kv_heads = p->G;
  config->head_size = p->d;
  config->value_head_size = p->dv;
  config->key_width = p->Ek;
  config->value_width = p->Ev;
  config->output_width = p->Eo;
  config->norm = p->norm == ORACLE_NORM_FULL       ? MHA_NORM_FULL
                 : p->norm == ORACLE_NORM_PER_HEAD ? MHA_NORM_PER_HEAD
                                                   : MHA_NORM_NONE;
  config->norm_epsilon = (float)p->epsilon;
  config->rope = p->rope == ORACLE_ROPE_HALVES        ? MHA_ROPE_HALVES
                 : p->rope == ORACLE_ROPE_INTERLEAVED ? MHA_ROPE_INTERLEAVED
                                                      : MHA_ROPE_NONE;
  config->rotary_size = p->rotary;
  config->rope_base = p->rope_base;
}

static bool make_layer(grad_case *c, mha_weights **weights) {
  mha_config config;
  mha_matrices m;
  mha_error error;
  fill_config(c, &config);
  MHA_INIT(&m);
  m.orientation = c->out_in ? MHA_OUT_IN : MHA_IN_OUT;
  m.query = floats_of(c, "wq"), m.query_bias = floats_of(c, "bq");
  m.key = floats_of(c, "wk"), m.key_bias = floats_of(c, "bk");
  m.value = floats_of(c, "wv"), m.value_bias = floats_of(c, "bv");
  m.output = floats_of(c, "wo"), m.output_bias = floats_of(c, "bo");
  m.query_norm = floats_of(c, "q_norm"), m.key_norm = floats_of(c, "k_norm");
  return conf_expect(&c->base, mha_weights_create(&config, &m, weights, &error), &error);
}

/* ---- A layer --------------------------------------------------------------------------------- */

static bool run_backward(grad_case *c, mha_context *context, const mha_weights *weights,
                         const mha_forward_args *args, const mha_tape *tape) {
  mha_backward_args back;
  mha_error error;
  MHA_INIT(&back);
  const slot slots[] = {{"d_query", &back.d_query},
                        {"d_key", &back.d_key},
                        {"d_value", &back.d_value},
                        {"d_wq", &back.d_wq},
                        {"d_wk", &back.d_wk},
                        {"d_wv", &back.d_wv},
                        {"d_wo", &back.d_wo},
                        {"d_bq", &back.d_bq},
                        {"d_bk", &back.d_bk},
                        {"d_bv", &back.d_bv},
                        {"d_bo", &back.d_bo},
                        {"d_q_norm", &back.d_query_norm},
                        {"d_k_norm", &back.d_key_norm},
                        {"d_bias", &back.d_bias},
                        {"d_alibi_slopes", &back.d_alibi_slopes},
                        {"d_sinks", &back.d_sinks}};
  const size_t n = sizeof slots / sizeof *slots;
  back.dy = c->dy->floats;
  back.tape = tape;
  return want(c, slots, n) &&
         conf_expect(&c->base, mha_backward(context, weights, args, &back, &error), &error) &&
         compare(c, slots, n);
}

static bool run_layer(grad_case *c, mha_context *context, const mha_weights *weights,
                      mha_tape *tape) {
  mha_rules rules;
  mha_forward_args args;
  mha_error error;
  fill_rules(c, &rules);
  MHA_INIT(&args);
  args.batch = c->problem.B;
  args.query_length = c->problem.Lq;
  args.key_length = c->problem.Lk;
  args.query = c->query->floats;
  args.key = c->key ? c->key->floats : NULL;
  args.value = c->value ? c->value->floats : NULL;
  args.output = make_output(c);
  args.rules = &rules;
  args.query_position = c->query_position;
  args.tape = tape;
  if (!args.output ||
      !conf_expect(&c->base, mha_forward(context, weights, &args, &error), &error) ||
      !compare_output(c, args.output))
    return false;
  args.tape = NULL;
  args.output = NULL; /* is not looked at any more */
  return run_backward(c, context, weights, &args, NULL) &&
         run_backward(c, context, weights, &args, tape);
}

/* ---- Step 3 alone ---------------------------------------------------------------------------- */

static mha_tensor tensor_of(const grad_array *array, int64_t heads, int64_t size) {
  return (mha_tensor){.data = array->floats,
                      .batch = array->shape[0],
                      .length = array->shape[1],
                      .heads = heads,
                      .size = size};
}

static bool run_attend_backward(grad_case *c, mha_context *context, const mha_tensor tensors[3],
                                const mha_attend_args *args, const float *log_sum_exp) {
  mha_attend_backward_args back;
  mha_error error;
  MHA_INIT(&back);
  const slot slots[] = {{"d_query", &back.d_q},     {"d_key", &back.d_k},
                        {"d_value", &back.d_v},     {"d_bias", &back.d_bias},
                        {"d_sinks", &back.d_sinks}, {"d_alibi_slopes", &back.d_alibi_slopes}};
  const size_t n = sizeof slots / sizeof *slots;
  back.dy = c->dy->floats;
  back.log_sum_exp = log_sum_exp;
  return want(c, slots, n) &&
         conf_expect(&c->base,
                     mha_attend_backward(context, &tensors[0], &tensors[1], &tensors[2], args,
                                         &back, &error),
                     &error) &&
         compare(c, slots, n);
}

static bool run_core(grad_case *c, mha_context *context) {
  const oracle_problem *p = &c->problem;
  const grad_array *key = c->key ? c->key : c->query, *value = c->value ? c->value : key;
  const mha_tensor tensors[3] = {tensor_of(c->query, p->H, p->d), tensor_of(key, p->G, p->d),
                                 tensor_of(value, p->G, p->dv)};
  mha_rules rules;
  mha_results results;
  mha_attend_args args;
  mha_error error;
  if (!c->key || !c->value)
    return conf_fail(&c->base, "step 3 alone needs a query, a key and a value");
  fill_rules(c, &rules);
  MHA_INIT(&results);
  MHA_INIT(&args);
  args.n_sequences = p->query_starts ? p->B : 0;
  args.output = make_output(c);
  args.rules = &rules;
  args.results = &results;
  results.log_sum_exp = conf_floats(&c->base, p->B * p->H * p->Lq);
  return args.output && results.log_sum_exp &&
         conf_expect(&c->base,
                     mha_attend(context, &tensors[0], &tensors[1], &tensors[2], &args, &error),
                     &error) &&
         compare_output(c, args.output) && run_attend_backward(c, context, tensors, &args, NULL) &&
         run_attend_backward(c, context, tensors, &args, results.log_sum_exp);
}

bool grad_run(grad_case *c, mha_context *context) {
  mha_weights *weights = NULL;
  mha_tape *tape = NULL;
  mha_error error;
  if (c->core)
    return run_core(c, context);
  const bool passed = make_layer(c, &weights) &&
                      conf_expect(&c->base, mha_tape_create(NULL, &tape, &error), &error) &&
                      run_layer(c, context, weights, tape);
  mha_tape_destroy(tape);
  mha_weights_destroy(weights);
  return passed;
}
