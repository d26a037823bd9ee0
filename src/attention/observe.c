/* Owns what can be asked for besides the output. Weights are made after the core has run, from
 * scores computed once more, so that asking cannot change a bit of the output and costs no L×L
 * buffer but the caller's. */
#include "observe.h"

#include "attention.h"
#include "recompute.h"

#include <math.h>

/* ---- log-sum-exp ---- */

/* Both statistics and result are [B][H][Lq], or [H][rows] if packed. */
static void write_log_sum_exp(const mha_core *core, float *log_sum_exp) {
  const mha_visibility *v = &core->visibility;
  const int64_t n = (v->query_starts ? 1 : v->B) * v->H * v->Lq;
  for (int64_t r = 0; r < n; r++)
    log_sum_exp[r] =
        core->row_max[r] == -INFINITY ? -INFINITY : core->row_max[r] + logf(core->row_sum[r]);
}

/* ---- weights ---- */

/* A block of queries as the core takes it, of which `live` of each head are within the entry's
 * length; its scores are scratch for one key tile. */
typedef struct observed_tile {
  const mha_core *core;
  mha_block block;
  int64_t live;
  mha_stage stage;
} observed_tile;

/* Where the weights go: written to [heads][Lq][Lk] or, as each head's share, added to [Lq][Lk]. */
typedef struct delivery {
  float *into; /* of the block's first head and query */
  bool add;
} delivery;

/* Receives the numbers of head k and query r of the block for `keys`. */
static void deliver(const observed_tile *t, int64_t k, int64_t r, mha_range keys, const float *row,
                    const delivery *d) {
  const mha_visibility *v = &t->core->visibility;
  float *to = d->into + ((d->add ? 0 : k * v->Lq) + r) * v->Lk + keys.begin;
  const float share = 1.0f / (float)v->H;
  for (int64_t j = 0; j < keys.end - keys.begin; j++)
    to[j] = d->add ? to[j] + share * row[j] : row[j];
}

/* One key tile, for the block's queries `rows`. */
static mha_status observe_tile(const observed_tile *t, mha_range rows, mha_range keys,
                               const delivery *d) {
  const mha_block tile = mha_block_tile(t->core, &t->block, rows, keys);
  const mha_status status = mha_recompute_tile(t->core, &tile, keys, t->stage);
  for (int64_t k = 0; !status && k < tile.heads; k++)
    for (int64_t r = 0; r < tile.n; r++) {
      const mha_range shown = mha_recompute_shown(t->core, t->stage, tile.b, tile.i + r);
      const mha_range mine = mha_range_intersect(shown, keys);
      const float *row = tile.scores + (k * tile.n + r) * tile.score_stride;
      if (!mha_range_is_empty(mine))
        deliver(t, k, rows.begin + r, mine, row + (mine.begin - keys.begin), d);
    }
  return status;
}

/* Fills in the rows of a block, which hold the value of a hidden key already. */
static mha_status observe_block(const observed_tile *t, const delivery *d) {
  const mha_core *core = t->core;
  const mha_block *q = &t->block;
  mha_tile_walk walk = mha_recompute_shows_all(t->stage)
                           ? mha_walk_everything(&core->visibility, &core->cut, q->b, q->i, t->live)
                           : mha_walk_visible(&core->visibility, &core->cut, q->b, q->i, t->live);
  mha_status status = MHA_OK;
  while (!status && mha_walk_next(&walk))
    status = observe_tile(t, walk.rows, walk.keys, d);
  return status;
}

static void fill(float *to, int64_t n, float value) {
  for (int64_t j = 0; j < n; j++)
    to[j] = value;
}

/* The block's heads into the weights, each [Lq][Lk]. */
static mha_status observe_weights(observed_tile *t) {
  const mha_results *results = &t->core->results;
  const mha_visibility *v = &t->core->visibility;
  const mha_block *q = &t->block;
  const delivery d = {results->weights + ((q->b * v->H + q->h) * v->Lq + q->i) * v->Lk, false};
  t->stage = (mha_stage)results->stage;
  for (int64_t k = 0; k < q->heads; k++)
    fill(d.into + k * v->Lq * v->Lk, q->n * v->Lk, mha_recompute_hidden(t->stage));
  return observe_block(t, &d);
}

static int64_t tiles_per_entry(const mha_core *core) {
  return (core->visibility.Lq + core->cut.queries - 1) / core->cut.queries;
}

/* One task: a tile of queries of one entry, all heads in order, so that the average always adds up
 * in the same order. */
static mha_status observe_task(void *job, int64_t index, int32_t worker) {
  const mha_core *core = job;
  const mha_visibility *v = &core->visibility;
  const mha_results *results = &core->results;
  const int64_t tiles = tiles_per_entry(core);
  observed_tile t = {.core = core, .block = {.b = index / tiles}};
  mha_block *q = &t.block;
  q->i = index % tiles * core->cut.queries;
  q->n = mha_min(v->Lq - q->i, core->cut.queries);
  mha_attention_lend(core, worker, q);
  t.live = mha_min(mha_query_count(v, q->b) - q->i, q->n);
  delivery average = {NULL, true};
  if (results->average)
    average.into = results->average + (q->b * v->Lq + q->i) * v->Lk;
  if (average.into)
    fill(average.into, q->n * v->Lk, 0.0f);
  mha_status status = MHA_OK;
  for (q->h = 0; !status && q->h < v->H; q->h += q->heads) {
    q->heads = mha_min(core->cut.heads, v->H - q->h);
    if (results->weights)
      status = observe_weights(&t);
    t.stage = MHA_STAGE_WEIGHTS;
    if (!status && average.into)
      status = observe_block(&t, &average);
  }
  return status;
}

mha_status mha_observe(const mha_core *core, const mha_threads *threads) {
  const mha_results *results = &core->results;
  if (results->log_sum_exp)
    write_log_sum_exp(core, results->log_sum_exp);
  if (!results->weights && !results->average)
    return MHA_OK;
  mha_core job = *core;
  const mha_task_list list = {.work = observe_task,
                              .job = &job,
                              .n_tasks = core->visibility.B * tiles_per_entry(core),
                              .operations = mha_core_operations(core)};
  return mha_parallel_run(threads, &list);
}
