/* Owns the reading of a layer call: defaults, strides, what overlaps what, and where its scratch
 * lies. Everything is checked before anything is computed. */
#include "layer.h"

#include "error.h"

/* key NULL = query, value NULL = key. */
static mha_status default_inputs(mha_forward_args *a, const mha_weights *w, mha_error *error) {
  const mha_config *c = &w->config;
  if (a->value && !a->key)
    return mha_fail(error, MHA_ERROR_NULL,
                    "key is NULL although value is given; rule: a value "
                    "needs a key");
  if (!a->key) {
    if (a->key_length != 0 && a->key_length != a->query_length)
      return mha_fail(error, MHA_ERROR_SIZE,
                      "key_length is %lld without a key; rule: 0 or query_length, %lld",
                      (long long)a->key_length, (long long)a->query_length);
    if (c->key_width != c->query_width)
      return mha_fail(error, MHA_ERROR_NULL,
                      "key is NULL and Ek is %lld; rule: the query serves as key where Ek = Eq, "
                      "%lld",
                      (long long)c->key_width, (long long)c->query_width);
    a->key = a->query;
    a->key_length = a->query_length;
    a->key_batch_stride = a->query_batch_stride;
    a->key_row_stride = a->query_row_stride;
  }
  if (!a->value) {
    if (c->value_width != c->key_width)
      return mha_fail(error, MHA_ERROR_NULL,
                      "value is NULL and Ev is %lld; rule: the key serves as value where Ev = Ek, "
                      "%lld",
                      (long long)c->value_width, (long long)c->key_width);
    a->value = a->key;
    a->value_batch_stride = a->key_batch_stride;
    a->value_row_stride = a->key_row_stride;
  }
  return MHA_OK;
}

static mha_status check_sizes(const mha_forward_args *a, mha_error *error) {
  mha_status status = mha_require_reserved(a->reserved, "args.reserved", error);
  if (!status)
    status = mha_require_at_least(a->batch, 0, "batch", error);
  if (!status)
    status = mha_require_at_least(a->query_length, 0, "query_length", error);
  if (!status)
    status = mha_require_at_least(a->key_length, 0, "key_length", error);
  return status;
}

/* Resolves the strides of one of the caller's arrays and adds it to the call's ranges. */
static mha_status add_array(mha_layer_call *c, const char *name, const float *data,
                            mha_rows_shape shape, mha_rows_shape *resolved, bool is_output,
                            mha_error *error) {
  mha_status status = mha_resolve_strides(&shape, is_output, name, error);
  if (!status && shape.batch > 0 && shape.length > 0)
    status = mha_require(data, name, error);
  if (!status)
    status = mha_ranges_add_rows(&c->call.ranges, name, data, &shape, is_output, error);
  *resolved = shape;
  return status;
}

static mha_status add_arrays(mha_layer_call *c, int64_t entries, mha_error *error) {
  const mha_forward_args *a = &c->args;
  const mha_config *w = &c->weights->config;
  const int64_t Lq = a->query_length;
  const int64_t Lk = entries > 0 && Lq > 0 ? a->key_length : 0;
  const mha_rows_shape query = {entries, Lq, w->query_width, a->query_batch_stride,
                                a->query_row_stride};
  const mha_rows_shape key = {entries, Lk, w->key_width, a->key_batch_stride, a->key_row_stride};
  const mha_rows_shape value = {entries, Lk, w->value_width, a->value_batch_stride,
                                a->value_row_stride};
  const mha_rows_shape output = {entries, Lq, w->output_width, a->output_batch_stride,
                                 a->output_row_stride};
  mha_status status = add_array(c, "query", a->query, query, &c->query, false, error);
  if (!status)
    status = add_array(c, "key", a->key, key, &c->key, false, error);
  if (!status)
    status = add_array(c, "value", a->value, value, &c->value, false, error);
  if (!status)
    status = add_array(c, "output", a->output, output, &c->output, true, error);
  return status;
}

/* The layer's matrices and biases are inputs that no output may overlap. */
static mha_status add_projection(mha_layer_call *c, const char *name, const mha_projection *p,
                                 mha_error *error) {
  const int64_t elements =
      p->matrix ? (p->in - 1) * p->in_stride + (p->out - 1) * p->out_stride + 1 : 0;
  mha_status status =
      mha_ranges_add(&c->call.ranges, name, p->matrix, elements, sizeof(float), false, error);
  if (!status)
    status = mha_ranges_add(&c->call.ranges, name, p->bias, p->out, sizeof(float), false, error);
  return status;
}

static mha_status add_weights(mha_layer_call *c, mha_error *error) {
  const mha_weights *w = c->weights;
  mha_status status = add_projection(c, "the query weights", &w->query, error);
  if (!status)
    status = add_projection(c, "the key weights", &w->key, error);
  if (!status)
    status = add_projection(c, "the value weights", &w->value, error);
  if (!status)
    status = add_projection(c, "the output weights", &w->output, error);
  return status;
}

mha_status mha_layer_read(mha_layer_call *c, const mha_forward_args *given, mha_error *error) {
  mha_attention rules;
  mha_forward_args *a = &c->args;
  const mha_config *w = &c->weights->config;
  mha_core *core = &c->call.core;
  mha_status status = mha_read_struct(a, sizeof *a, sizeof *a, given, "args", error);
  if (!status)
    status = mha_call_read_rules(&rules, a->attention, error);
  if (!status)
    status = check_sizes(a, error);
  const bool key_is_query = !status && !a->key;
  if (!status)
    status = default_inputs(a, c->weights, error);
  if (!status)
    status = add_arrays(c, rules.query_starts ? a->batch > 0 : a->batch, error);
  if (!status)
    status = add_weights(c, error);
  if (status)
    return status;
  core->visibility.B = a->batch;
  core->visibility.H = w->n_heads;
  core->visibility.Lq = a->query_length;
  core->visibility.Lk = a->key_length;
  core->G = w->n_kv_heads;
  core->d = w->head_size;
  core->dv = w->value_head_size;
  return mha_call_apply_rules(&c->call, &rules, key_is_query, c->weights->scale, w->softcap, error);
}

/* Shape of one of the workspace's dense buffers. */
static mha_rows_shape dense(int64_t entries, int64_t L, int64_t width) {
  const mha_rows_shape shape = {entries, L, width, L * width, width};
  return shape;
}

mha_status mha_layer_take_workspace(mha_layer_call *c, mha_error *error) {
  const mha_weights *w = c->weights;
  const mha_visibility *v = &c->call.core.visibility;
  const mha_call_size size = mha_call_size_of(&c->call);
  const mha_status status = mha_context_workspace(c->context, w, &size, &c->workspace, error);
  if (status)
    return status;
  c->q = dense(c->query.batch, v->Lq, w->query.out);
  c->k = dense(c->key.batch, v->Lk, w->key.out);
  c->v = dense(c->value.batch, v->Lk, w->value.out);
  c->concat = dense(c->query.batch, v->Lq, w->output.in);
  mha_call_use_workspace(&c->call, &c->workspace);
  return MHA_OK;
}

/* ---- which rows are computed ---- */

mha_live_rows mha_layer_live_queries(const mha_layer_call *c) {
  const mha_visibility *v = &c->call.core.visibility;
  const mha_live_rows live = {v->query_lengths, v->query_starts ? v->query_starts[v->B] : v->Lq};
  return live;
}

mha_live_rows mha_layer_live_keys(const mha_layer_call *c) {
  const mha_visibility *v = &c->call.core.visibility;
  const mha_live_rows live = {v->key_lengths, v->key_starts ? v->key_starts[v->B] : v->Lk};
  return live;
}
