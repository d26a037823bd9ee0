/* Owns the layer: the five steps, in the article's order.
 *
 *   1. project       Q = query·Wq + bq   [B·Lq][H·d], likewise K and V
 *   2. split         head h of Q is a column block: a stride
 *   3. attend        O_h = softmax(visible(scores))·V_g, into its own column block
 *   4. concatenate   the blocks side by side are concat [B·Lq][H·dv]: a stride again
 *   5. project out   output = concat·Wo + bo   [B·Lq][Eo]                                      */
#include "forward.h"

#include "attention/attention.h"
#include "attention/observe.h"
#include "base/error.h"
#include "runtime/trace.h"

#include <string.h>

/* ---- which rows are computed ---- */

mha_live_rows mha_forward_live_queries(const mha_forward_call *c) {
  const mha_visibility *v = &c->core.visibility;
  const mha_live_rows live = {v->cached ? v->cached->new_lengths : v->query_lengths,
                              v->query_starts ? v->query_starts[v->B] : v->Lq};
  return live;
}

mha_live_rows mha_forward_live_keys(const mha_forward_call *c) {
  const mha_visibility *v = &c->core.visibility;
  const mha_live_rows live = {v->cached ? v->cached->new_lengths : v->key_lengths,
                              v->key_starts ? v->key_starts[v->B] : c->args.key_length};
  return live;
}

/* ---- the five steps ---- */

/* 1. Q, K and V in one list of panels. Keys beyond their lengths are not touched; with a cache the
 * new ones go straight into their rows of it, unless they are to be rounded or it is better to
 * gather them first. */
static mha_status project_inputs(mha_forward_call *c) {
  const mha_weights *w = c->weights;
  const mha_live_rows keys = mha_forward_live_keys(c);
  float *partial = c->workspace.partial;
  const mha_projecting query = {.projection = &w->query,
                                .partial = partial,
                                .x = c->args.query,
                                .y = c->workspace.q,
                                .x_shape = c->query,
                                .y_shape = c->q,
                                .live = mha_forward_live_queries(c)};
  partial += mha_partial_floats(&w->query);
  const mha_projecting key = {.projection = &w->key,
                              .partial = partial,
                              .x = c->args.key,
                              .y = c->workspace.k,
                              .x_shape = c->key,
                              .y_shape = c->k,
                              .live = keys,
                              .cached = c->direct};
  partial += mha_partial_floats(&w->key);
  const mha_projecting value = {.projection = &w->value,
                                .partial = partial,
                                .x = c->args.value,
                                .y = c->workspace.v,
                                .x_shape = c->value,
                                .y_shape = c->v,
                                .live = keys,
                                .cached = c->direct};
  mha_projecting inputs[3];
  int n = 0;
  if (c->attends)
    inputs[n++] = query;
  if (c->append) {
    inputs[n++] = key;
    inputs[n++] = value;
  }
  return mha_project(c->context, inputs, n, c->workspace.widening);
}

/* Still 1., where the layer has them: RMS normalisation of Q and K, then rotary positions. */
static mha_status prepare_inputs(const mha_forward_call *c) {
  mha_preparing arrays[2];
  int n = 0;
  if (c->attends)
    arrays[n++] = c->prepare_q;
  if (c->append)
    arrays[n++] = c->prepare_k;
  const mha_status status = mha_prepare(&c->context->threads, arrays, n);
  if (!status && c->gather)
    return mha_cache_store(c->args.cache, &c->cached, c->args.batch, c->workspace.k, c->workspace.v,
                           &c->context->threads);
  return status;
}

/* 2. [B][L][heads·size] seen as [B][L][heads][size]: heads are `size` apart. */
static mha_heads split_heads(const float *data, const mha_rows_shape *rows, int64_t size) {
  const mha_heads heads = {data, MHA_F32, rows->batch_stride, rows->row_stride, size};
  return heads;
}

/* The same of a cache's keys or values, rows [G·size] of which `cached` knows where they lie. */
static mha_heads split_cached_heads(const mha_forward_call *c, const void *data,
                                    const mha_rows_shape *rows, int64_t size) {
  const mha_heads heads = {data, c->args.cache->sizes.type, 0, rows->width, size};
  return heads;
}

void mha_forward_split(const mha_forward_call *c, const float *q, const float *k, const float *v,
                       float *concat, mha_core *core) {
  core->q = split_heads(q, &c->q, core->d);
  core->k = split_heads(k, &c->k, core->d);
  core->v = split_heads(v, &c->v, core->dv);
  core->output = concat;
  core->output_batch_stride = c->concat.batch_stride;
  core->output_row_stride = c->concat.row_stride;
  core->output_head_stride = core->dv;
}

/* 3. Every head of every entry. O_h [Lq][dv] goes where the concatenation wants it: its rows H·dv
 * apart, the next head dv further. */
static mha_status attend(mha_forward_call *c) {
  mha_core *core = &c->core;
  mha_forward_split(c, c->workspace.q, c->workspace.k, c->workspace.v, c->workspace.concat, core);
  if (c->in_cache) {
    core->k = split_cached_heads(c, c->args.cache->numbers.keys, &c->k, core->d);
    core->v = split_cached_heads(c, c->args.cache->numbers.values, &c->v, core->dv);
  }
  const mha_status status = mha_attention_run(core, &c->context->threads);
  return status ? status : mha_observe(core, &c->context->threads);
}

/* 4. [B][Lq][H][dv] seen as [B][Lq][H·dv]: nothing to do but to look at it so. */
static const float *concatenate_heads(const mha_forward_call *c) {
  return c->core.output;
}

/* 5. Rows that were not computed count as zeros: they get the bias. */
static mha_status project_output(mha_forward_call *c, const float *concat) {
  const mha_projecting output = {
      .projection = &c->weights->output,
      .partial = c->workspace.partial,
      .x = concat,
      .y = c->args.output,
      .x_shape = c->concat,
      .y_shape = c->output,
      .live = mha_forward_live_queries(c),
      .accumulate = c->args.accumulate != 0,
      .fill = true,
  };
  return mha_project(c->context, &output, 1, c->workspace.widening);
}

/* ---- trace ---- */

/* The scratch of rows that were not computed holds what an earlier call left there. */
static void clear_rows(float *data, const mha_rows_shape *shape, mha_live_rows live) {
  for (int64_t b = 0; b < shape->batch; b++)
    for (int64_t i = live.counts ? live.counts[b] : live.limit; i < shape->length; i++)
      memset(data + b * shape->batch_stride + i * shape->row_stride, 0,
             (size_t)shape->width * sizeof *data);
}

static void trace_inputs(const mha_forward_call *c) {
  if (!c->context->trace)
    return;
  clear_rows(c->workspace.q, &c->q, mha_forward_live_queries(c));
  mha_trace_rows(c->context, "Q", c->workspace.q, &c->q);
  if (c->in_cache) /* mha_cache_view shows them */
    return;
  clear_rows(c->workspace.k, &c->k, mha_forward_live_keys(c));
  clear_rows(c->workspace.v, &c->v, mha_forward_live_keys(c));
  mha_trace_rows(c->context, "K", c->workspace.k, &c->k);
  mha_trace_rows(c->context, "V", c->workspace.v, &c->v);
}

static void trace_heads(const mha_forward_call *c) {
  const mha_core *core = &c->core;
  const mha_visibility *v = &core->visibility;
  if (c->core.results.weights) {
    const int64_t shape[4] = {v->B, v->H, v->Lq, v->Lk};
    const int64_t strides[4] = {v->H * v->Lq * v->Lk, v->Lq * v->Lk, v->Lk, 1};
    mha_trace_view(c->context, "weights", c->core.results.weights, shape, strides);
  }
  const int64_t shape[4] = {c->concat.batch, v->H, v->Lq, core->dv};
  const int64_t strides[4] = {core->output_batch_stride, core->output_head_stride,
                              core->output_row_stride, 1};
  mha_trace_view(c->context, "heads", core->output, shape, strides);
}

/* ---- the call ---- */

static mha_status run_steps(mha_forward_call *c) {
  mha_status status = project_inputs(c);
  if (!status)
    status = prepare_inputs(c);
  if (status || !c->attends)
    return status;
  trace_inputs(c);
  status = attend(c);
  if (status)
    return status;
  trace_heads(c);
  const float *concat = concatenate_heads(c);
  mha_trace_rows(c->context, "concat", concat, &c->concat);
  status = project_output(c, concat);
  if (status)
    return status;
  mha_trace_rows(c->context, "output", c->args.output, &c->output);
  return MHA_OK;
}

/* Whether there is anything to compute. */
static bool has_work(const mha_forward_call *c) {
  return c->query.batch > 0 && (c->args.query_length > 0 || (c->in_cache && c->key.length > 0));
}

/* What is kept is made where it stays. */
static void use_kept(mha_forward_call *c) {
  c->workspace.q = c->kept->q;
  c->workspace.k = c->kept->k;
  c->workspace.v = c->kept->v;
  c->workspace.concat = c->kept->concat;
  c->core.row_max = c->kept->row_max;
  c->core.row_sum = c->kept->row_sum;
  c->prepare_q.raw = c->kept->raw_q;
  c->prepare_k.raw = c->kept->raw_k;
}

static mha_status take_workspace(mha_forward_call *c, mha_error *error) {
  const int64_t key_rows = c->direct ? 0 : c->key.length;
  if (c->in_cache) /* scratch depends on it */
    c->core.k.element = c->core.v.element = c->args.cache->sizes.type;
  const mha_call_size size = {.core = mha_core_cut_sizes(&c->core),
                              .key_rows = key_rows,
                              .new_rows = c->key.length,
                              .strides = mha_scratch_strides(c->weights),
                              .names = c->names->sizes,
                              .kept = c->kept != NULL,
                              .before = c->before};
  const mha_status status =
      mha_scratch_take(c->context, c->weights, &size, &c->core, &c->workspace, error);
  if (status)
    return status;
  if (c->direct) {
    c->workspace.k = c->args.cache->numbers.keys;
    c->workspace.v = c->args.cache->numbers.values;
  }
  if (c->kept)
    use_kept(c);
  c->prepare_q.data = c->workspace.q;
  c->prepare_k.data = c->workspace.k;
  return MHA_OK;
}

/* Keys count also where there is no query, for which the forward call does not look at them. */
mha_kept_size mha_forward_kept_size(const mha_forward_call *c) {
  const mha_visibility *v = &c->core.visibility;
  const mha_kept_size size = {c->q.batch, v->B, v->Lq, v->Lk, v->query_starts != NULL};
  return size;
}

/* A call in the context may be reading the tape: it is opened by who has entered. */
static mha_status open_tape(mha_forward_call *c, mha_error *error) {
  const mha_kept_size size = mha_forward_kept_size(c);
  if (!c->args.tape)
    return MHA_OK;
  c->kept = &c->args.tape->kept;
  return mha_tape_open(c->args.tape, c->weights, &size, error);
}

mha_status mha_forward_run(mha_forward_call *c, mha_error *error) {
  mha_status status = mha_context_enter(c->context, error);
  if (status)
    return status;
  status = open_tape(c, error);
  if (!status && has_work(c)) {
    status = take_workspace(c, error);
    if (!status)
      status = mha_explain(run_steps(c), error);
  }
  if (!status && c->args.tape)
    mha_tape_close(c->args.tape, c->weights);
  mha_context_leave(c->context);
  return status;
}

mha_status mha_forward_again(mha_forward_call *c, mha_error *error) {
  if (!has_work(c))
    return MHA_OK;
  mha_status status = take_workspace(c, error);
  if (status)
    return status;
  status = project_inputs(c);
  if (!status)
    status = prepare_inputs(c);
  if (!status)
    status = attend(c);
  return mha_explain(status, error);
}

/* ---- some of the steps ---- */

mha_status mha_forward_project(mha_forward_call *c, mha_error *error) {
  mha_status status = mha_context_enter(c->context, error);
  if (status)
    return status;
  status = take_workspace(c, error);
  if (!status)
    status = mha_explain(project_inputs(c), error);
  if (!status)
    status = mha_explain(prepare_inputs(c), error);
  mha_context_leave(c->context);
  return status;
}

mha_status mha_forward_finish(mha_forward_call *c, const float *concat, mha_error *error) {
  mha_status status = mha_context_enter(c->context, error);
  if (status)
    return status;
  status = take_workspace(c, error);
  if (!status)
    status = mha_explain(project_output(c, concat), error);
  mha_context_leave(c->context);
  return status;
}
