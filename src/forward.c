/* Owns the layer: the five steps, in the article's order.
 *
 *   1. project       Q = query·Wq + bq   [B·Lq][H·d], likewise K and V
 *   2. split         head h of Q is a column block: a stride
 *   3. attend        O_h = softmax(visible(scores))·V_g
 *   4. concatenate   O_h went into its own column block of concat [B·Lq][H·dv]: a stride again
 *   5. project out   output = concat·Wo + bo   [B·Lq][Eo]                                      */
#include "call.h"
#include "context.h"
#include "error.h"
#include "memory.h"
#include "project.h"
#include "trace.h"
#include "weights.h"

#include <string.h>

/* One call of a layer, everything checked. */
typedef struct layer_call {
  const mha_weights *weights;
  mha_context *context;
  mha_forward_args args;
  mha_rows_shape query, key, value, output; /* the caller's arrays */
  mha_call call;
  mha_workspace workspace;
  mha_rows_shape q, k, v, concat; /* ours, dense */
} layer_call;

/* ---- the five steps ---- */

/* Rows of packed input end with the last sequence, those of a batch with the length. */
static int64_t row_limit(const int64_t *starts, const mha_visibility *v, int64_t L) {
  return starts ? starts[v->B] : L;
}

/* 1. Q, K and V in one list of panels. Keys beyond their lengths are not touched. */
static mha_status project_inputs(layer_call *c) {
  const mha_visibility *v = &c->call.core.visibility;
  const mha_weights *w = c->weights;
  const int64_t query_limit = row_limit(v->query_starts, v, v->Lq);
  const int64_t key_limit = row_limit(v->key_starts, v, v->Lk);
  const mha_projecting inputs[] = {
      {&w->query, c->args.query, c->workspace.q, c->query, c->q, v->query_lengths, query_limit,
       false, false},
      {&w->key, c->args.key, c->workspace.k, c->key, c->k, v->key_lengths, key_limit, false, false},
      {&w->value, c->args.value, c->workspace.v, c->value, c->v, v->key_lengths, key_limit, false,
       false}};
  const mha_status status = mha_project(&c->context->threads, inputs, 3);
  return status;
}

static mha_heads heads_of(const float *data, const mha_rows_shape *rows, int64_t size) {
  const mha_heads heads = {data, rows->batch_stride, rows->row_stride, size};
  return heads;
}

/* 2. [B][L][heads·size] seen as [B][L][heads][size]: the head stride is the size of a head. */
static void split_heads(layer_call *c) {
  mha_core *core = &c->call.core;
  core->q = heads_of(c->workspace.q, &c->q, core->d);
  core->k = heads_of(c->workspace.k, &c->k, core->d);
  core->v = heads_of(c->workspace.v, &c->v, core->dv);
}

/* 4, said before 3 writes: each head's result goes to its own column block of concat. */
static void concatenate_heads(layer_call *c) {
  mha_core *core = &c->call.core;
  core->output = c->workspace.concat;
  core->output_batch_stride = c->concat.batch_stride;
  core->output_row_stride = c->concat.row_stride;
  core->output_head_stride = core->dv;
}

/* 3. */
static mha_status attend(layer_call *c) {
  return mha_call_run(&c->call, c->context);
}

/* 5. Rows that were not computed count as zeros: they get the bias. */
static mha_status project_output(layer_call *c) {
  const mha_visibility *v = &c->call.core.visibility;
  const mha_projecting output = {&c->weights->output,
                                 c->workspace.concat,
                                 c->args.output,
                                 c->concat,
                                 c->output,
                                 v->query_lengths,
                                 row_limit(v->query_starts, v, v->Lq),
                                 c->args.accumulate != 0,
                                 true};
  return mha_project(&c->context->threads, &output, 1);
}

/* ---- trace ---- */

/* The scratch of rows that were not computed holds what an earlier call left there. */
static void clear_rows(float *data, const mha_rows_shape *shape, const int64_t *counts,
                       int64_t limit) {
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t i = counts ? counts[b] : limit; i < shape->length; i++)
      memset(data + b * shape->batch_stride + i * shape->row_stride, 0,
             (size_t)shape->width * sizeof *data);
}

static void trace_inputs(layer_call *c) {
  const mha_visibility *v = &c->call.core.visibility;
  if (!c->context->trace)
    return;
  clear_rows(c->workspace.q, &c->q, v->query_lengths, row_limit(v->query_starts, v, v->Lq));
  clear_rows(c->workspace.k, &c->k, v->key_lengths, row_limit(v->key_starts, v, v->Lk));
  clear_rows(c->workspace.v, &c->v, v->key_lengths, row_limit(v->key_starts, v, v->Lk));
  mha_trace_rows(c->context, "Q", c->workspace.q, &c->q);
  mha_trace_rows(c->context, "K", c->workspace.k, &c->k);
  mha_trace_rows(c->context, "V", c->workspace.v, &c->v);
}

static void trace_heads(const layer_call *c) {
  const mha_core *core = &c->call.core;
  const mha_visibility *v = &core->visibility;
  if (c->call.results.weights) {
    const int64_t shape[4] = {v->B, v->H, v->Lq, v->Lk};
    const int64_t strides[4] = {v->H * v->Lq * v->Lk, v->Lq * v->Lk, v->Lk, 1};
    mha_trace_view(c->context, "weights", c->call.results.weights, shape, strides);
  }
  const int64_t shape[4] = {c->concat.batch, v->H, v->Lq, core->dv};
  const int64_t strides[4] = {core->output_batch_stride, core->output_head_stride,
                              core->output_row_stride, 1};
  mha_trace_view(c->context, "heads", core->output, shape, strides);
  mha_trace_rows(c->context, "concat", c->workspace.concat, &c->concat);
}

static void trace_output(const layer_call *c) {
  mha_trace_rows(c->context, "output", c->args.output, &c->output);
}

/* ---- the call ---- */

static mha_status run_steps(layer_call *c) {
  mha_status status = project_inputs(c);
  trace_inputs(c);
  split_heads(c);
  concatenate_heads(c);
  if (!status)
    status = attend(c);
  trace_heads(c);
  if (!status)
    status = project_output(c);
  trace_output(c);
  return status;
}

/* ---- arguments ---- */

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
static mha_status add_array(layer_call *c, const char *name, const float *data,
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

static mha_status add_arrays(layer_call *c, int64_t entries, mha_error *error) {
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
static mha_status add_projection(layer_call *c, const char *name, const mha_projection *p,
                                 mha_error *error) {
  const int64_t longest = (p->in - 1) * p->in_stride + (p->out - 1) * p->out_stride + 1;
  mha_status status = mha_ranges_add(&c->call.ranges, name, p->matrix, p->matrix ? longest : 0,
                                     sizeof(float), false, error);
  if (!status)
    status = mha_ranges_add(&c->call.ranges, name, p->bias, p->out, sizeof(float), false, error);
  return status;
}

static mha_status add_weights(layer_call *c, mha_error *error) {
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

static mha_status read_call(layer_call *c, const mha_forward_args *given, mha_error *error) {
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

static mha_status take_workspace(layer_call *c, mha_error *error) {
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

mha_status mha_forward(mha_context *context, const mha_weights *weights,
                       const mha_forward_args *args, mha_error *error) {
  layer_call c = {.weights = weights, .context = context};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(weights, "weights", error);
  if (!status)
    status = read_call(&c, args, error);
  if (!status)
    status = mha_context_enter(context, error);
  if (status)
    return status;
  if (c.args.batch > 0 && c.args.query_length > 0) {
    status = take_workspace(&c, error);
    if (!status)
      status = run_steps(&c);
  }
  mha_context_leave(context);
  return status ? status : mha_succeed(error);
}

mha_status mha_self_attention(mha_context *context, const mha_weights *weights, const float *x,
                              int64_t batch, int64_t length, float *output, mha_error *error) {
  mha_forward_args args;
  MHA_INIT(&args);
  args.batch = batch;
  args.query_length = length;
  args.query = x;
  args.output = output;
  return mha_forward(context, weights, &args, error);
}
