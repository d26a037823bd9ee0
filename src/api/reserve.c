/* Owns the asking for scratch ahead of a call: mha_workspace_bytes and mha_context_reserve. */
#include "base/arguments.h"
#include "base/error.h"
#include "layer/project.h"
#include "layer/scratch.h"

static mha_status read_shape(const mha_weights *weights, const mha_shape *given,
                             mha_call_size *size, mha_error *error) {
  mha_shape shape;
  mha_status status = mha_read_struct(&shape, sizeof shape, MHA_FIRST_SHAPE, given, "shape", error);
  if (!status)
    status = mha_require_at_least(shape.batch, 0, "shape.batch", error);
  if (!status)
    status = mha_require_at_least(shape.query_length, 0, "shape.query_length", error);
  if (!status)
    status = mha_require_at_least(shape.key_length, 0, "shape.key_length", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.n_heads, 1, "shape.n_heads", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.value_head_size, 1, "shape.value_head_size", error);
  if (status)
    return status;
  const mha_size_names names = {"shape.batch", "shape.query_length", "shape.key_length"};
  mha_cut_sizes *s = &size->core;
  size->names = names;
  s->B = shape.batch;
  s->Lq = shape.query_length;
  s->span = shape.key_length ? shape.key_length : shape.query_length;
  s->H = weights ? weights->config.n_heads : shape.n_heads;
  s->dv = weights ? weights->config.value_head_size : shape.value_head_size;
  s->G = s->H; /* scratch depends on neither */
  s->d = s->dv;
  s->packed = shape.packed != 0;
  s->windowed = true; /* the more parts */
  /* a call may bring more rows of its own than queries */
  size->key_rows = shape.cached ? mha_gathered_rows(s->B, INT64_MAX) : s->span;
  return MHA_OK;
}

/* What calls up to a shape need. A call of fewer queries, cut as one of few, may need more. */
static mha_status measure_shape(const mha_context *context, const mha_weights *weights,
                                const mha_shape *shape, size_t *bytes, mha_error *error) {
  mha_call_size size;
  size_t few = 0;
  mha_status status = read_shape(weights, shape, &size, error);
  if (status)
    return status;
  status = mha_scratch_measure(weights, &size, context->threads.n, bytes, error);
  size.core.Lq = mha_cut_most_few(size.core.Lq, size.core.span);
  if (!status)
    status = mha_scratch_measure(weights, &size, context->threads.n, &few, error);
  if (few > *bytes)
    *bytes = few;
  return status;
}

mha_status mha_workspace_bytes(const mha_context *context, const mha_weights *weights,
                               const mha_shape *shape, size_t *bytes, mha_error *error) {
  size_t needed = 0;
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(bytes, "bytes", error);
  if (!status)
    status = measure_shape(context, weights, shape, &needed, error);
  if (status)
    return status;
  *bytes = needed;
  return mha_succeed(error);
}

mha_status mha_context_reserve(mha_context *context, const mha_weights *weights,
                               const mha_shape *shape, mha_error *error) {
  size_t bytes = 0;
  mha_status status = mha_context_claim(context, error);
  if (status)
    return status;
  status = measure_shape(context, weights, shape, &bytes, error);
  if (!status)
    status = mha_context_grow(context, bytes, error);
  if (!status && context->threads.pool && !context->threads.parallel_for)
    mha_pool_start(context->threads.pool, context->threads.n);
  mha_context_unclaim(context);
  return status ? status : mha_succeed(error);
}
