/* Owns the way back through a layer: the five steps in the reverse of the article's order.
 *
 *   5. project out   dWo = concatᵀ·dy, dbo = Σ dy, dconcat = dy·Woᵀ   [B·Lq][H·dv]
 *   4. concatenate   head h of dconcat is a column block: a stride
 *   3. attend        dQ, dK, dV of every head, into their own column blocks
 *   2. split         the blocks side by side are dQ [B·Lq][H·d]: a stride again
 *   1. project       back through positions and norms; dWq = queryᵀ·dQ, dbq = Σ dQ,
 *                    dquery = dQ·Wqᵀ, likewise K and V                                        */
#include "backward.h"

#include "base/error.h"
#include "runtime/trace.h"
#include "weight_gradient.h"

/* ---- what is wanted ---- */

static bool wants_q(const mha_backward_call *c) {
  const mha_backward_args *a = &c->back;
  return a->d_query || a->d_wq || a->d_bq || a->d_query_norm;
}

static bool wants_k(const mha_backward_call *c) {
  const mha_backward_args *a = &c->back;
  return c->d_key || a->d_wk || a->d_bk || a->d_key_norm;
}

static bool wants_v(const mha_backward_call *c) {
  const mha_backward_args *a = &c->back;
  return c->d_value || a->d_wv || a->d_bv;
}

static bool wants_heads(const mha_backward_call *c) {
  const mha_backward_args *a = &c->back;
  return wants_q(c) || wants_k(c) || wants_v(c) || a->d_bias || a->d_alibi_slopes || a->d_sinks;
}

/* Where nothing lies between K and its projection, the gradient of bk is a sum that step 3 knows
 * more exactly than the rows of dK do. */
static double *key_sums(const mha_backward_call *c) {
  const mha_config *k = &c->forward.weights->config;
  const bool knows = k->norm == MHA_NORM_NONE && k->rope == MHA_ROPE_NONE;
  return c->back.d_bk && knows ? c->scratch.key_sums : NULL;
}

/* ---- the steps ---- */

/* 5. dconcat = dy·Woᵀ. */
static mha_status project_output_back(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  const mha_projection back = mha_projection_back(&f->weights->output);
  const mha_projecting d_concat = {.projection = &back,
                                   .x = c->back.dy,
                                   .y = c->scratch.d_concat,
                                   .x_shape = c->dy,
                                   .y_shape = f->concat,
                                   .live = mha_forward_live_queries(f),
                                   .fill = true};
  return mha_project(f->context, &d_concat, 1, c->scratch.widening);
}

static mha_gradient_heads split_gradient(float *data, const mha_rows_shape *rows, int64_t size) {
  const mha_gradient_heads heads = {data, rows->batch_stride, rows->row_stride, size};
  return heads;
}

/* 4., 3. and 2. */
static mha_status attend_back(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  mha_gradient g = {.core = f->core,
                    .bias = c->back.d_bias,
                    .slopes = c->back.d_alibi_slopes,
                    .sinks = c->back.d_sinks,
                    .key_sums = key_sums(c)};
  mha_core *core = &g.core;
  core->engine = f->context->engine;
  mha_forward_split(f, c->kept->q, c->kept->k, c->kept->v, c->kept->concat, core);
  core->row_max = c->kept->row_max;
  core->row_sum = c->kept->row_sum;
  g.dy = (mha_heads){c->scratch.d_concat, MHA_F32, f->concat.batch_stride, f->concat.row_stride,
                     core->dv};
  g.q = split_gradient(wants_q(c) ? c->scratch.d_q : NULL, &f->q, core->d);
  g.k = split_gradient(wants_k(c) ? c->scratch.d_k : NULL, &f->k, core->d);
  g.v = split_gradient(wants_v(c) ? c->scratch.d_v : NULL, &f->v, core->dv);
  g.accumulate = c->back.accumulate != 0;
  mha_gradient_use(&g, f->context->arena, &c->scratch.gradient);
  return mha_gradient_run(&g, &f->context->threads);
}

/* The gradient of a normalisation's weight, from its sums. */
static void deliver_sums(const mha_backward_call *c, const double *sums, int64_t n,
                         float *gradient) {
  for (int64_t j = 0; gradient && j < n; j++)
    gradient[j] = (float)(c->back.accumulate ? (double)gradient[j] + sums[j] : sums[j]);
}

/* Still between 2. and 1.: rotary positions, then RMS normalisation. */
static mha_status prepare_back(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  mha_preparing q = f->prepare_q;
  mha_preparing k = f->prepare_k;
  double *sums_q = c->back.d_query_norm ? c->scratch.sums_q : NULL;
  double *sums_k = c->back.d_key_norm ? c->scratch.sums_k : NULL;
  mha_status status = MHA_OK;
  q.data = c->scratch.d_q;
  q.raw = c->kept->raw_q;
  k.data = c->scratch.d_k;
  k.raw = c->kept->raw_k;
  if (wants_q(c))
    status = mha_prepare_back(&f->context->threads, &q, sums_q);
  if (!status && wants_k(c))
    status = mha_prepare_back(&f->context->threads, &k, sums_k);
  if (status)
    return status;
  deliver_sums(c, sums_q, mha_prepare_sums(&q) / MHA_PREPARE_PARTS, c->back.d_query_norm);
  deliver_sums(c, sums_k, mha_prepare_sums(&k) / MHA_PREPARE_PARTS, c->back.d_key_norm);
  return MHA_OK;
}

/* 1. The gradient of one input; rows that were not read get 0. */
static mha_status project_input_back(const mha_backward_call *c, const mha_projection *projection,
                                     const float *dy, const mha_rows_shape *dy_shape,
                                     mha_live_rows live, float *dx, const mha_rows_shape *shape,
                                     bool accumulate) {
  const mha_projection back = mha_projection_back(projection);
  const mha_projecting input = {.projection = &back,
                                .x = dy,
                                .y = dx,
                                .x_shape = *dy_shape,
                                .y_shape = *shape,
                                .live = live,
                                .accumulate = accumulate,
                                .fill = true};
  return dx ? mha_project(c->forward.context, &input, 1, c->scratch.widening) : MHA_OK;
}

/* What serves as two inputs gets both, one after the other. */
static mha_status project_inputs_back(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  const mha_weights *w = f->weights;
  const mha_back_scratch *s = &c->scratch;
  const mha_live_rows keys = mha_forward_live_keys(f);
  const bool adds = c->back.accumulate != 0;
  mha_status status = project_input_back(c, &w->query, s->d_q, &f->q, mha_forward_live_queries(f),
                                         c->back.d_query, &f->query, adds);
  if (!status)
    status = project_input_back(c, &w->key, s->d_k, &f->k, keys, c->d_key, &f->key,
                                adds || c->d_key == c->back.d_query);
  if (!status)
    status = project_input_back(c, &w->value, s->d_v, &f->v, keys, c->d_value, &f->value,
                                adds || c->d_value == c->d_key);
  return status;
}

/* 5. and 1., matrices and biases. */
static mha_status weights_back(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  const mha_weights *w = f->weights;
  const mha_backward_args *a = &c->back;
  const mha_live_rows queries = mha_forward_live_queries(f);
  const mha_live_rows keys = mha_forward_live_keys(f);
  const mha_back_scratch *s = &c->scratch;
  const bool in_out = w->orientation != MHA_OUT_IN;
  const mha_projection query = mha_projection_gradient(&w->query, in_out);
  const mha_projection key = mha_projection_gradient(&w->key, in_out);
  const mha_projection value = mha_projection_gradient(&w->value, in_out);
  const mha_projection output = mha_projection_gradient(&w->output, in_out);
  const mha_weight_gradient all[] = {
      {&query, f->args.query, s->d_q, f->query, f->q, queries, false, a->d_wq, a->d_bq, NULL},
      {&key, f->args.key, s->d_k, f->key, f->k, keys, false, a->d_wk, a->d_bk, key_sums(c)},
      {&value, f->args.value, s->d_v, f->value, f->v, keys, false, a->d_wv, a->d_bv, NULL},
      {&output, c->kept->concat, a->dy, f->concat, c->dy, queries, true, a->d_wo, a->d_bo, NULL}};
  return mha_weight_gradients(f->context, all, 4, a->accumulate != 0, c->scratch.panels);
}

/* ---- trace ---- */

static void trace_heads(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  const mha_rows_shape *s = &f->concat;
  const int64_t shape[4] = {s->batch, f->core.visibility.H, s->length, f->core.dv};
  const int64_t strides[4] = {s->batch_stride, f->core.dv, s->row_stride, 1};
  mha_trace_rows(f->context, "d_concat", c->scratch.d_concat, s);
  mha_trace_view(f->context, "d_heads", c->scratch.d_concat, shape, strides);
}

static void trace_split(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  if (wants_q(c))
    mha_trace_rows(f->context, "d_Q", c->scratch.d_q, &f->q);
  if (wants_k(c))
    mha_trace_rows(f->context, "d_K", c->scratch.d_k, &f->k);
  if (wants_v(c))
    mha_trace_rows(f->context, "d_V", c->scratch.d_v, &f->v);
}

static void trace_inputs(const mha_backward_call *c) {
  const mha_forward_call *f = &c->forward;
  if (c->back.d_query)
    mha_trace_rows(f->context, "d_query", c->back.d_query, &f->query);
  if (c->back.d_key)
    mha_trace_rows(f->context, "d_key", c->back.d_key, &f->key);
  if (c->back.d_value)
    mha_trace_rows(f->context, "d_value", c->back.d_value, &f->value);
}

/* ---- the call ---- */

static mha_status run_heads(const mha_backward_call *c) {
  mha_status status = project_output_back(c);
  if (status)
    return status;
  trace_heads(c);
  status = attend_back(c);
  if (status)
    return status;
  trace_split(c);
  status = prepare_back(c);
  if (!status)
    status = project_inputs_back(c);
  if (!status)
    trace_inputs(c);
  return status;
}

static mha_status run_steps(mha_backward_call *c) {
  const mha_status status = wants_heads(c) ? run_heads(c) : MHA_OK;
  return status ? status : weights_back(c);
}

/* Room, and what a tape would have kept. */
static mha_status begin(mha_backward_call *c, mha_error *error) {
  mha_forward_call *f = &c->forward;
  const bool again = !c->kept;
  const mha_call_size size = {.core = mha_core_cut_sizes(&f->core),
                              .key_rows = f->k.length,
                              .new_rows = f->k.length,
                              .strides = mha_scratch_strides(f->weights),
                              .names = f->names->sizes};
  const mha_status status =
      mha_back_scratch_take(f->context, f->weights, &size, again, &c->scratch, error);
  if (status || !again)
    return status;
  c->kept = &c->scratch.kept;
  f->kept = c->kept;
  f->before = c->scratch.before;
  return mha_forward_again(f, error);
}

mha_status mha_backward_run(mha_backward_call *c, mha_error *error) {
  mha_context *context = c->forward.context;
  mha_status status = mha_context_enter(context, error);
  if (status)
    return status;
  status = begin(c, error);
  if (!status)
    status = mha_explain(run_steps(c), error);
  mha_context_leave(context);
  return status;
}
