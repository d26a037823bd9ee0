/* Owns the translation of layers with four projections: query, key, value; wq, wk, wv, wo, each
 * [in][out]; an added or boolean attn_mask; outputs Y and attn_weights [B][H][Lq][Lk]. */
#include "core.h"
#include "families.h"

#include <string.h>

typedef struct layer_call {
  conf_sizes sizes;
  mha_config config;
  mha_matrices matrices;
  mha_rules rules;
  mha_results results;
  mha_forward_args args;
} layer_call;

static bool read_form(conf_case *c, layer_call *call) {
  static const char *const known[] = {"num_heads", "scale", NULL};
  const char *layout = conf_text(c, "weight_layout");
  mha_config *config = &call->config;
  double scale;
  if (strcmp(layout, "in_by_out") != 0)
    return conf_cannot(c, "the weight layout \"%s\" is not translated", layout);
  if (!conf_know_attributes(c, known) ||
      !conf_read_sizes(c, "num_heads", "num_heads", &call->sizes) ||
      !conf_dimension(c, "query_width", &config->query_width) ||
      !conf_dimension(c, "key_width", &config->key_width) ||
      !conf_dimension(c, "value_width", &config->value_width) ||
      !conf_dimension(c, "out_width", &config->output_width))
    return false;
  config->n_heads = call->sizes.H;
  config->head_size = call->sizes.d;
  config->value_head_size = call->sizes.dv;
  if (conf_attribute(c, "scale", &scale)) {
    config->flags = MHA_SCALE;
    config->scale = (float)scale;
  }
  return call->sizes.past == 0 || conf_cannot(c, "past keys beside projections are not translated");
}

static bool take_matrix(conf_case *c, const char *name, int64_t in, int64_t out,
                        const void **matrix) {
  const conf_array *array;
  if (!conf_floats_input(c, name, &array))
    return false;
  *matrix = array->numbers.data;
  if (array->numbers.rank == 2 && array->numbers.shape[0] == in && array->numbers.shape[1] == out)
    return true;
  return conf_fail(c, "%s is not [%lld][%lld]", name, (long long)in, (long long)out);
}

static bool take_matrices(conf_case *c, layer_call *call) {
  const conf_sizes *s = &call->sizes;
  const mha_config *config = &call->config;
  call->matrices.orientation = MHA_IN_OUT;
  return take_matrix(c, "wq", config->query_width, s->H * s->d, &call->matrices.query) &&
         take_matrix(c, "wk", config->key_width, s->H * s->d, &call->matrices.key) &&
         take_matrix(c, "wv", config->value_width, s->H * s->dv, &call->matrices.value) &&
         take_matrix(c, "wo", s->H * s->dv, config->output_width, &call->matrices.output);
}

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

static bool take_inputs(conf_case *c, layer_call *call) {
  const conf_sizes *s = &call->sizes;
  const mha_config *config = &call->config;
  mha_forward_args *args = &call->args;
  const conf_array *mask = conf_input(c, "attn_mask");
  args->batch = s->B;
  args->query_length = s->Lq;
  args->key_length = s->Lk;
  args->rules = &call->rules;
  args->results = &call->results;
  return take_rows(c, "query", s->B, s->Lq, config->query_width, &args->query) &&
         take_rows(c, "key", s->B, s->Lk, config->key_width, &args->key) &&
         take_rows(c, "value", s->B, s->Lk, config->value_width, &args->value) &&
         (!mask || conf_apply_mask(c, mask, s, &call->rules));
}

/* Runs the layer and compares Y, with the weights asked for or not. */
static bool run(conf_case *c, mha_context *context, const mha_weights *weights, layer_call *call,
                bool want_weights) {
  const conf_sizes *s = &call->sizes;
  const int64_t n_weights = s->B * s->H * s->Lq * s->Lk;
  const int64_t n = s->B * s->Lq * call->config.output_width;
  mha_error error;
  call->args.output = conf_floats(c, n);
  call->results.weights = want_weights ? conf_floats(c, n_weights) : NULL;
  if (!call->args.output || (want_weights && !call->results.weights))
    return false;
  return conf_expect(c, mha_forward(context, weights, &call->args, &error), &error) &&
         conf_compare(c, "Y", call->args.output, n) &&
         (!want_weights || conf_compare(c, "attn_weights", call->results.weights, n_weights));
}

bool conf_translate_projection(conf_case *c, mha_context *context) {
  layer_call call;
  mha_weights *weights = NULL;
  mha_error error;
  memset(&call, 0, sizeof call);
  MHA_INIT(&call.config);
  MHA_INIT(&call.matrices);
  MHA_INIT(&call.rules);
  MHA_INIT(&call.results);
  MHA_INIT(&call.args);
  if (!read_form(c, &call) || !take_matrices(c, &call) || !take_inputs(c, &call) ||
      !conf_all_taken(c) ||
      !conf_expect(c, mha_weights_create(&call.config, &call.matrices, &weights, &error), &error))
    return false;
  const bool passed =
      run(c, context, weights, &call, false) &&
      (!conf_has_output(c, "attn_weights") || run(c, context, weights, &call, true));
  mha_weights_destroy(weights);
  return passed && conf_all_compared(c);
}
