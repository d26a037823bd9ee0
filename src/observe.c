/* Owns what can be asked for besides the output. Weights are made after the core has run, from
 * scores computed once more and each row's maximum and sum:
 *
 *   P = exp(S - max) / denominator       [Lq][Lk] per entry and head
 *
 * so that asking cannot change a bit of the output and costs no L×L buffer but the caller's. */
#include "observe.h"

#include "error.h"
#include "softmax.h"

#include <math.h>
#include <string.h>

mha_status mha_results_init(mha_results *results, const mha_attention *rules,
                            const mha_visibility *v, mha_address_ranges *ranges, mha_error *error) {
  if (rules->weights_stage < MHA_STAGE_WEIGHTS || rules->weights_stage > MHA_STAGE_FINAL)
    return mha_fail(error, MHA_ERROR_VALUE, "weights_stage is %d; rule: a value of mha_stage",
                    (int)rules->weights_stage);
  results->weights = rules->weights;
  results->stage = (mha_stage)rules->weights_stage;
  results->average = rules->average;
  results->log_sum_exp = rules->log_sum_exp;
  int64_t rows = 0;      /* B·Lq */
  int64_t head_rows = 0; /* B·H·Lq */
  int64_t cells = 0;     /* B·Lq·Lk */
  int64_t head_cells = 0;
  if (!mha_multiply(v->query_starts ? 1 : v->B, v->Lq, &rows) ||
      !mha_multiply(rows, v->H, &head_rows) ||
      (results->average && !mha_multiply(rows, v->Lk, &cells)) ||
      (results->weights && !mha_multiply(head_rows, v->Lk, &head_cells)))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "weights or average has %lld x %lld x %lld x %lld elements; rule: the product "
                    "must not overflow",
                    (long long)v->B, (long long)v->H, (long long)v->Lq, (long long)v->Lk);
  mha_status status =
      mha_ranges_add(ranges, "weights", results->weights, head_cells, sizeof(float), true, error);
  if (!status)
    status = mha_ranges_add(ranges, "average", results->average, cells, sizeof(float), true, error);
  if (!status)
    status = mha_ranges_add(ranges, "log_sum_exp", results->log_sum_exp, head_rows, sizeof(float),
                            true, error);
  return status;
}

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

typedef struct observation {
  const mha_core *core;
  const mha_results *results;
  int64_t tiles; /* query tiles per entry */
} observation;

/* Queries [i, i + rows) of entry b, of which `live` are within the entry's length; one head. */
typedef struct observed_tile {
  const mha_core *core;
  int64_t b, h, i, rows, live;
  mha_stage stage;
  float *scores; /* [rows][stride], scratch for one key tile */
  int64_t stride;
} observed_tile;

/* What a hidden key shows. */
static float hidden_value(mha_stage stage) {
  return stage == MHA_STAGE_WEIGHTS ? 0.0f : -INFINITY;
}

static bool shows_hidden_scores(mha_stage stage) {
  return stage == MHA_STAGE_SCALED || stage == MHA_STAGE_CAPPED;
}

/* The keys for which row r shows a number, not the value of a hidden key. */
static mha_range shown_keys(const observed_tile *t, int64_t r) {
  const mha_visibility *v = &t->core->visibility;
  if (!shows_hidden_scores(t->stage))
    return mha_visible_keys(v, t->b, t->i + r);
  const mha_range all = {0, t->i + r < mha_query_count(v, t->b) ? mha_key_count(v, t->b) : 0};
  return all;
}

static void weights_from_scores(const observed_tile *t, int64_t r, float *row, int64_t n) {
  const int64_t index = mha_core_row_index(t->core, t->b, t->h, t->i + r);
  const float max = t->core->row_max[index];
  if (max == -INFINITY) { /* an empty row, though a range of keys was left to it */
    memset(row, 0, (size_t)n * sizeof *row);
    return;
  }
  const float sum = mha_core_denominator(t->core, t->h, max, t->core->row_sum[index]);
  if (isnan(sum)) { /* a NaN or +inf score: every visible weight is NaN, hidden ones stay 0 */
    for (int64_t j = 0; j < n; j++)
      row[j] = row[j] == -INFINITY ? 0.0f : NAN;
    return;
  }
  (void)mha_row_exp(row, n, max);
  mha_row_scale(row, n, 1.0f / sum);
}

/* Brings scaled scores to the stage asked for. */
static void advance_to_stage(const observed_tile *t, int64_t r, mha_range keys, float *row) {
  const int64_t n = keys.end - keys.begin;
  if (t->stage == MHA_STAGE_SCALED)
    return;
  if (t->core->softcap > 0.0f)
    mha_row_softcap(row, n, t->core->softcap);
  if (t->stage == MHA_STAGE_CAPPED)
    return;
  mha_visibility_apply(&t->core->visibility, t->b, t->h, t->i + r, keys, row);
  if (t->stage == MHA_STAGE_WEIGHTS)
    weights_from_scores(t, r, row, n);
}

/* Receives the numbers of row r for `keys`. */
static void deliver(const observed_tile *t, int64_t r, mha_range keys, const float *row,
                    float *into, bool add) {
  const int64_t Lk = t->core->visibility.Lk;
  float *to = into + r * Lk + keys.begin;
  const float share = 1.0f / (float)t->core->visibility.H;
  for (int64_t j = 0; j < keys.end - keys.begin; j++)
    to[j] = add ? to[j] + share * row[j] : row[j];
}

/* Fills rows [rows][Lk] at `into` (or adds the head's share of the average to them). The rows hold
 * the value of a hidden key already. Visible keys are walked as the core walked them, so that the
 * scores have the bits whose maximum the core kept: a score above it would make exp overflow. */
static mha_status observe_head(const observed_tile *t, float *into, bool add) {
  const mha_visibility *v = &t->core->visibility;
  mha_tile_walk walk = shows_hidden_scores(t->stage) ? mha_walk_everything(v, t->b, t->i, t->live)
                                                     : mha_walk_visible(v, t->b, t->i, t->live);
  mha_status status = MHA_OK;
  while (!status && mha_walk_next(&walk)) {
    const mha_range keys = walk.keys;
    const mha_range rows = walk.rows;
    status = mha_core_scores(t->core, t->b, t->h, t->i + rows.begin, rows.end - rows.begin, keys,
                             t->scores, t->stride);
    for (int64_t r = rows.begin; !status && r < rows.end; r++) {
      const mha_range mine = mha_range_intersect(shown_keys(t, r), keys);
      if (mha_range_is_empty(mine))
        continue;
      float *row = t->scores + (r - rows.begin) * t->stride + (mine.begin - keys.begin);
      advance_to_stage(t, r, mine, row);
      deliver(t, r, mine, row, into, add);
    }
  }
  return status;
}

static void fill(float *to, int64_t n, float value) {
  for (int64_t j = 0; j < n; j++)
    to[j] = value;
}

/* One task: a tile of queries of one entry, all heads in order, so that the average always adds up
 * in the same order. */
static mha_status observe_task(void *job, int64_t index, int32_t worker) {
  const observation *o = job;
  const mha_core *core = o->core;
  const mha_visibility *v = &core->visibility;
  const mha_results *results = o->results;
  observed_tile t = {.core = core, .b = index / o->tiles};
  t.i = index % o->tiles * MHA_QUERY_TILE;
  t.rows = mha_min(v->Lq - t.i, MHA_QUERY_TILE);
  t.live = mha_min(mha_query_count(v, t.b) - t.i, t.rows);
  t.scores = (float *)(void *)(core->scratch + (size_t)worker * core->scratch_bytes);
  t.stride = mha_min(v->Lk, MHA_KEY_TILE);
  const int64_t cells = t.rows * v->Lk;
  float *average = results->average ? results->average + (t.b * v->Lq + t.i) * v->Lk : NULL;
  if (average)
    fill(average, cells, 0.0f);
  mha_status status = MHA_OK;
  for (t.h = 0; !status && t.h < v->H; t.h++) {
    if (results->weights) {
      float *into = results->weights + ((t.b * v->H + t.h) * v->Lq + t.i) * v->Lk;
      t.stage = results->stage;
      fill(into, cells, hidden_value(t.stage));
      status = observe_head(&t, into, false);
    }
    if (!status && average) {
      t.stage = MHA_STAGE_WEIGHTS;
      status = observe_head(&t, average, true);
    }
  }
  return status;
}

mha_status mha_observe(const mha_core *core, const mha_results *results,
                       const mha_threads *threads) {
  const mha_visibility *v = &core->visibility;
  if (results->log_sum_exp)
    write_log_sum_exp(core, results->log_sum_exp);
  if (!results->weights && !results->average)
    return MHA_OK;
  observation o = {core, results, (v->Lq + MHA_QUERY_TILE - 1) / MHA_QUERY_TILE};
  const mha_task_list list = {.work = observe_task,
                              .job = &o,
                              .n_tasks = v->B * o.tiles,
                              .operations = mha_core_operations(core)};
  return mha_parallel_run(threads, &list);
}
