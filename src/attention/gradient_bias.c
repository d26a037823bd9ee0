/* Owns the gradient of the additive bias: dF, summed over the axes that the bias is broadcast
 * along. Heads, entries and queries that share a number of the bias are walked one after the other
 * by one task, so the scores are made once more rather than kept. */
#include "gradient_bias.h"

#include "back.h"
#include "engine/vector.h"

#include <string.h>

/* Extents of the bias: 1, or the call's. Rows that are not shared are cut into tiles of queries. */
typedef struct extents {
  int64_t batch, heads, tiles;
} extents;

static extents extents_of(const mha_gradient *call) {
  const mha_visibility *v = &call->core.visibility;
  const mha_broadcast *s = &v->bias_strides;
  const int64_t T = call->core.cut.queries;
  const extents e = {s->batch_stride ? v->B : 1, s->head_stride ? v->H : 1,
                     s->row_stride ? (v->Lq + T - 1) / T : 1};
  return e;
}

/* Row i of the gradient of the bias, for head h of entry b. */
static float *bias_row(const mha_gradient *call, int64_t b, int64_t h, int64_t i) {
  const mha_broadcast *s = &call->core.visibility.bias_strides;
  return call->bias + b * s->batch_stride + h * s->head_stride + i * s->row_stride;
}

static mha_status add_tile(mha_back *back, mha_range rows, mha_range keys) {
  const mha_status status = mha_back_tile(back, rows, keys);
  for (int64_t r = rows.begin; !status && r < rows.end; r++)
    mha_vector_add(bias_row(back->call, back->b, back->h, back->i + r) + keys.begin,
                   back->gradient + r * back->stride, keys.end - keys.begin);
  return status;
}

/* Queries [i, end) of head h of entry b. */
static mha_status add_head(mha_back *back, int64_t b, int64_t h, mha_range queries) {
  const mha_core *core = &back->call->core;
  const int64_t T = core->cut.queries;
  mha_status status = MHA_OK;
  mha_back_take_keys(back, b, h / (core->visibility.H / core->G));
  for (int64_t i = queries.begin; !status && i < queries.end; i += T) {
    mha_back_take_queries(back, h, i, mha_min(T, queries.end - i));
    mha_tile_walk walk = mha_walk_visible(&core->visibility, &core->cut, b, i, back->live);
    while (!status && mha_walk_next(&walk))
      status = add_tile(back, walk.rows, walk.keys);
  }
  return status;
}

/* One number of the bias's batch and heads, one tile of its rows. */
static mha_status bias_task(void *job, int64_t index, int32_t worker) {
  const mha_gradient *call = job;
  const mha_visibility *v = &call->core.visibility;
  const extents e = extents_of(call);
  const int64_t T = call->core.cut.queries;
  const int64_t tile = index % e.tiles;
  const int64_t head = index / e.tiles % e.heads;
  const int64_t entry = index / e.tiles / e.heads;
  const bool rows_are_shared = v->bias_strides.row_stride == 0;
  mha_range queries = {tile * T, mha_min((tile + 1) * T, v->Lq)};
  mha_back back = mha_back_begin(call, MHA_BACK_FINAL, worker);
  mha_status status = MHA_OK;
  if (rows_are_shared)
    queries.end = v->Lq;
  for (int64_t i = queries.begin; !call->accumulate && i < (rows_are_shared ? 1 : queries.end); i++)
    memset(bias_row(call, entry, head, i), 0, (size_t)v->Lk * sizeof(float));
  for (int64_t b = entry; !status && b < (e.batch == 1 ? v->B : entry + 1); b++)
    for (int64_t h = head; !status && h < (e.heads == 1 ? v->H : head + 1); h++)
      status = add_head(&back, b, h, queries);
  return status;
}

mha_status mha_gradient_bias_run(mha_gradient *call, const mha_threads *threads) {
  const extents e = extents_of(call);
  if (call->core.visibility.bias_strides.is_empty)
    return MHA_OK;
  const mha_task_list list = {.work = bias_task,
                              .job = call,
                              .n_tasks = e.batch * e.heads * e.tiles,
                              .operations = mha_core_operations(&call->core)};
  return mha_parallel_run(threads, &list);
}
