/* Owns the asking for scratch ahead of a call: mha_workspace_bytes and mha_context_reserve. */
#include "base/arguments.h"
#include "base/error.h"
#include "layer/back_scratch.h"
#include "shape.h"

#include <string.h>

/* ---- the calls that a shape stands for ---- */

/* How rows of Q and V may lie: in a layer one way; in mha_attend the heads side by side, one after
 * the other, or otherwise. For each, calls of all queries, of few, and of as many keys as make few
 * queries many: each may need more than the others. */
enum { MOST_WAYS = 3, MOST_CUTS = 3, MOST_CALLS = MOST_WAYS * MOST_CUTS };

static int list_strides(const mha_weights *weights, const mha_cut_sizes *s,
                        mha_laid_strides ways[MOST_WAYS]) {
  if (weights) {
    ways[0] = mha_scratch_strides(weights);
    return 1;
  }
  mha_laid_strides side_by_side = {0, 0};
  if (!mha_multiply(s->H, s->d, &side_by_side.q) || !mha_multiply(s->G, s->dv, &side_by_side.v))
    side_by_side.q = 0; /* too far apart for a kernel */
  const mha_laid_strides all[MOST_WAYS] = {side_by_side, {s->d, s->dv}, {0, 0}};
  memcpy(ways, all, sizeof all);
  return MOST_WAYS;
}

static int list_calls(const mha_weights *weights, const mha_call_size *size,
                      mha_call_size calls[MOST_CALLS]) {
  const mha_cut_sizes *s = &size->core;
  mha_laid_strides ways[MOST_WAYS];
  const int n_ways = list_strides(weights, s, ways);
  int n = 0;
  for (int k = 0; k < n_ways; k++)
    for (int cut = 0; cut < MOST_CUTS; cut++) {
      mha_call_size *call = &calls[n++];
      *call = *size;
      call->strides = ways[k];
      if (cut == 1)
        call->core.Lq = mha_cut_most_few(s->Lq, s->span);
      if (cut == 2)
        call->core.span = mha_cut_most_span_of_many(s->Lq, s->span);
    }
  return n;
}

static mha_status measure_calls(const mha_context *context, const mha_weights *weights,
                                const mha_call_size *calls, int n, size_t *bytes,
                                mha_error *error) {
  mha_status status = MHA_OK;
  *bytes = 0;
  for (int k = 0; !status && k < n; k++) {
    size_t needed = 0;
    status = mha_scratch_measure(context, weights, &calls[k], &needed, error);
    if (!status && needed > *bytes)
      *bytes = needed;
  }
  return status;
}

static mha_status measure_entries(const mha_context *context, const mha_weights *weights,
                                  const mha_call_size *size, bool again, int64_t entries,
                                  size_t *bytes, mha_error *error) {
  mha_call_size fewer = *size;
  size_t needed = 0;
  fewer.core.B = entries;
  const mha_status status =
      mha_back_scratch_measure(context, weights, &fewer, again, &needed, error);
  if (!status && needed > *bytes)
    *bytes = needed;
  return status;
}

/* What the way back needs, also of fewer entries, where each may need more. */
static mha_status measure_back(const mha_context *context, const mha_weights *weights,
                               const mha_call_size *size, bool again, size_t *bytes,
                               mha_error *error) {
  const int64_t few = mha_min(size->core.B, mha_gradient_most_shared_entries());
  mha_status status = measure_entries(context, weights, size, again, size->core.B, bytes, error);
  for (int64_t entries = 1; !status && entries <= few; entries++)
    status = measure_entries(context, weights, size, again, entries, bytes, error);
  return status;
}

/* What calls up to a shape need. */
static mha_status measure_shape(const mha_context *context, const mha_weights *weights,
                                const mha_shape *shape, mha_call_size calls[MOST_CALLS], int *n,
                                size_t *bytes, mha_error *error) {
  mha_shape_asked asked;
  mha_status status = mha_shape_read(weights, shape, &asked, error);
  if (status)
    return status;
  *n = list_calls(weights, &asked.size, calls);
  status = measure_calls(context, weights, calls, *n, bytes, error);
  const bool again = asked.backward == MHA_BACKWARD_ALONE;
  for (int k = 0; !status && asked.backward != MHA_BACKWARD_NONE && k < *n; k++)
    status = measure_back(context, weights, &calls[k], again, bytes, error);
  return status;
}

mha_status mha_workspace_bytes(const mha_context *context, const mha_weights *weights,
                               const mha_shape *shape, size_t *bytes, mha_error *error) {
  mha_call_size calls[MOST_CALLS];
  int n = 0;
  size_t needed = 0;
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(bytes, "bytes", error);
  if (!status)
    status = measure_shape(context, weights, shape, calls, &n, &needed, error);
  if (status)
    return status;
  *bytes = needed;
  return mha_succeed(error);
}

mha_status mha_context_reserve(mha_context *context, const mha_weights *weights,
                               const mha_shape *shape, mha_error *error) {
  mha_call_size calls[MOST_CALLS];
  int n = 0;
  size_t bytes = 0;
  mha_status status = mha_context_claim(context, error);
  if (status)
    return status;
  status = measure_shape(context, weights, shape, calls, &n, &bytes, error);
  if (!status)
    status = mha_scratch_provide(context, weights, calls, n, bytes, error);
  if (!status && context->threads.pool && !context->threads.parallel_for)
    mha_pool_start(context->threads.pool, context->threads.n);
  mha_context_unclaim(context);
  return status ? status : mha_succeed(error);
}
