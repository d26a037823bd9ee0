/* Owns one task of step 3: a batch entry b, a head h and a tile of queries.
 *
 * Keys are walked in tiles with an online softmax ("Online normalizer calculation for softmax",
 * 2018): per query row the running maximum m and sum l are kept, and what was accumulated under an
 * older maximum is multiplied by exp(m_old - m_new). For each key tile
 *
 *   1. S = scale·Q·Kᵀ                 [rows][keys]   a product on strided views
 *   2. rules of the row, hidden keys  S -> -inf
 *   3. P = exp(S - m), l += ΣP        in place of S
 *   4. O = O·exp(m_old - m) + P·V     [rows][dv]     a product into the output's own stride
 *
 * and at the end O /= l, the sink's share in l. The tiles depend on shapes, flags and lengths
 * alone: the same bits for any number of threads. */
#include "attention.h"

#include "blas.h"
#include "softmax.h"

#include <math.h>
#include <string.h>

/* Scratch of one worker. */
typedef struct tile_scratch {
  float *scores;     /* [MHA_QUERY_TILE][score_stride] */
  float *correction; /* [MHA_QUERY_TILE], exp(m_old - m_new) of the current key tile */
  float *poison;     /* [MHA_QUERY_TILE], see remember_poison */
  float *values;     /* [MHA_KEY_TILE][dv], V with its non-finite rows replaced by 0 */
  uint8_t *kinds;    /* [MHA_KEY_TILE], what each row of V holds */
} tile_scratch;

/* One task: queries [i, i + rows) of head h of entry b, of which `live` may see keys. */
typedef struct task {
  const mha_core *core;
  tile_scratch scratch;
  int64_t b, h, i, rows, live;
  int64_t score_stride;
  float *output;  /* [rows][dv], core->output_row_stride apart */
  float *row_max; /* [rows] */
  float *row_sum; /* [rows] */
  bool replace;   /* non-finite values are replaced: the second attempt */
} task;

/* ---- layout of the work ---- */

static int64_t score_columns(int64_t Lk) {
  return mha_min(Lk, MHA_KEY_TILE);
}

/* The one place that knows how a worker's scratch is laid out. */
typedef struct scratch_offsets {
  size_t scores, correction, poison, values, kinds;
} scratch_offsets;

static scratch_offsets lay_out(int64_t Lq, int64_t Lk, int64_t dv, mha_layout *layout) {
  const int64_t rows = mha_min(Lq, MHA_QUERY_TILE);
  const int64_t columns = score_columns(Lk);
  scratch_offsets at;
  at.scores = mha_layout_add(layout, sizeof(float), rows, columns, 1);
  at.correction = mha_layout_add(layout, sizeof(float), rows, 1, 1);
  at.poison = mha_layout_add(layout, sizeof(float), rows, 1, 1);
  at.values = mha_layout_add(layout, sizeof(float), columns, dv, 1);
  at.kinds = mha_layout_add(layout, sizeof(uint8_t), columns, 1, 1);
  return at;
}

size_t mha_attention_scratch_bytes(int64_t Lq, int64_t Lk, int64_t dv, mha_layout *layout) {
  (void)lay_out(Lq, Lk, dv, layout);
  return layout->bytes;
}

static tile_scratch worker_scratch(const mha_core *core, int32_t worker) {
  const mha_visibility *v = &core->visibility;
  mha_layout layout = {0};
  const scratch_offsets at = lay_out(v->Lq, v->Lk, core->dv, &layout);
  char *base = core->scratch + (size_t)worker * core->scratch_bytes;
  const tile_scratch s = {(void *)(base + at.scores), (void *)(base + at.correction),
                          (void *)(base + at.poison), (void *)(base + at.values),
                          (void *)(base + at.kinds)};
  return s;
}

/* Query tiles of one head over all entries. Packed sequences have no common length: entry b owns
 * the slots from floor(start/T) + b on, T the tile, which are always enough for its rows. */
static bool slots_per_head(int64_t B, int64_t Lq, bool packed, int64_t *slots) {
  const int64_t tiles = Lq / MHA_QUERY_TILE;
  return packed ? mha_add(B, tiles, slots)
                : mha_multiply(B, tiles + (Lq % MHA_QUERY_TILE != 0), slots);
}

bool mha_attention_task_count(int64_t B, int64_t H, int64_t Lq, bool packed, int64_t *tasks) {
  return slots_per_head(B, Lq, packed, tasks) && mha_multiply(*tasks, H, tasks);
}

static int64_t first_slot(const mha_visibility *v, int64_t b) {
  return v->query_starts[b] / MHA_QUERY_TILE + b;
}

/* The entry that owns a slot: the last one whose first slot is not behind it. */
static int64_t packed_entry(const mha_visibility *v, int64_t slot) {
  int64_t low = 0;
  int64_t high = v->B;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first_slot(v, middle) <= slot)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Sets b, h, i and rows of a task; rows may come out as 0 or less: a slot without work. */
static void locate(task *t, int64_t index) {
  const mha_visibility *v = &t->core->visibility;
  const bool packed = v->query_starts != NULL;
  int64_t slots = 0;
  (void)slots_per_head(v->B, v->Lq, packed, &slots);
  /* from behind: under a causal mask the last tiles have most to do and should not come last */
  const int64_t slot = slots - 1 - index % slots;
  t->h = index / slots;
  if (packed) {
    t->b = packed_entry(v, slot);
    t->i = (slot - first_slot(v, t->b)) * MHA_QUERY_TILE;
    t->rows = mha_min(mha_query_count(v, t->b) - t->i, MHA_QUERY_TILE);
  } else {
    const int64_t tiles = slots / v->B;
    t->b = slot / tiles;
    t->i = slot % tiles * MHA_QUERY_TILE;
    t->rows = mha_min(v->Lq - t->i, MHA_QUERY_TILE);
  }
}

static float *output_row(const task *t, int64_t r) {
  return t->output + r * t->core->output_row_stride;
}

/* ---- scores ---- */

/* Final scores of row r for the keys it may see within the tile `keys`; returns those keys. */
static mha_range finish_scores(const task *t, int64_t r, mha_range keys, float *row) {
  const mha_visibility *v = &t->core->visibility;
  const mha_range mine = mha_range_intersect(mha_visible_keys(v, t->b, t->i + r), keys);
  if (mha_range_is_empty(mine))
    return mine;
  float *scores = row + (mine.begin - keys.begin);
  if (t->core->softcap > 0.0f)
    mha_row_softcap(scores, mine.end - mine.begin, t->core->softcap);
  mha_visibility_apply(v, t->b, t->h, t->i + r, mine, scores);
  return mine;
}

/* ---- non-finite values ----
 * A hidden key has weight 0, but the product P·V turns 0·NaN into NaN. If a row comes out
 * non-finite although its scores were not, the task is done again: in each tile the non-finite rows
 * of V are replaced by 0, the shapes staying the same and so every other bit, and rows that see one
 * of them become NaN at the end. */

/* What one row of V holds. */
enum { VALUE_FINITE = 0, VALUE_INFINITE = 1, VALUE_NAN = 2 };

static uint8_t value_kind(const float *row, int64_t n) {
  if (mha_row_is_finite(row, n))
    return VALUE_FINITE;
  for (int64_t c = 0; c < n; c++)
    if (isnan(row[c]))
      return VALUE_NAN;
  return VALUE_INFINITE;
}

/* V of one key tile with 0 in its non-finite rows; notes the kind of each. */
static mha_view replace_values(const task *t, mha_range keys) {
  const mha_view values = mha_core_values(t->core, t->b, t->h, keys);
  for (int64_t j = 0; j < values.rows; j++) {
    const float *from = values.data + j * values.row_stride;
    float *to = t->scratch.values + j * values.columns;
    t->scratch.kinds[j] = value_kind(from, values.columns);
    if (t->scratch.kinds[j] == VALUE_FINITE)
      memcpy(to, from, (size_t)values.columns * sizeof *to);
    else
      memset(to, 0, (size_t)values.columns * sizeof *to);
  }
  return mha_view_rows(t->scratch.values, values.rows, values.columns, values.columns);
}

/* poison[r] = the largest score that row r gives to an infinite value; +inf if it sees a NaN, which
 * no weight can make harmless. */
static void remember_poison(const task *t, int64_t r, const uint8_t *kinds, const float *scores,
                            int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    if (kinds[j] == VALUE_FINITE || scores[j] == -INFINITY)
      continue;
    const float score = kinds[j] == VALUE_NAN ? INFINITY : scores[j];
    if (score > t->scratch.poison[r])
      t->scratch.poison[r] = score;
  }
}

/* ---- softmax ---- */

/* Largest visible score. NaN if NaN is visible and nothing else is: such a row is not empty. */
static float visible_max(const float *scores, int64_t n) {
  const float max = mha_row_max(scores, n);
  if (max == -INFINITY)
    for (int64_t j = 0; j < n; j++)
      if (isnan(scores[j]))
        return NAN;
  return max;
}

/* Replaces the visible scores of row r by exp(score - m) and brings m, l and the correction of what
 * was accumulated before up to date. */
static void advance_row(const task *t, int64_t r, float *scores, int64_t n) {
  const float before = t->row_max[r];
  const float tile_max = visible_max(scores, n);
  const float now = tile_max > before || isnan(tile_max) ? tile_max : before;
  t->scratch.correction[r] = 1.0f;
  if (now == -INFINITY) { /* nothing visible so far: exp(-inf - -inf) would be NaN */
    memset(scores, 0, (size_t)n * sizeof *scores);
    return;
  }
  if (!(now == before))
    t->scratch.correction[r] = before == -INFINITY ? 0.0f : mha_exp(before - now);
  t->row_sum[r] = t->row_sum[r] * t->scratch.correction[r] + mha_row_exp(scores, n, now);
  t->row_max[r] = now;
}

static void clear_hidden(float *row, mha_range keys, mha_range mine) {
  if (mha_range_is_empty(mine)) {
    memset(row, 0, (size_t)(keys.end - keys.begin) * sizeof *row);
    return;
  }
  memset(row, 0, (size_t)(mine.begin - keys.begin) * sizeof *row);
  memset(row + (mine.end - keys.begin), 0, (size_t)(keys.end - mine.end) * sizeof *row);
}

/* Steps 2 and 3 of the list above for rows `rows` of the task and one key tile; their scores begin
 * at the start of the scratch. */
static void softmax_tile(const task *t, mha_range rows, mha_range keys) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    float *row = t->scratch.scores + (r - rows.begin) * t->score_stride;
    const mha_range mine = finish_scores(t, r, keys, row);
    clear_hidden(row, keys, mine);
    t->scratch.correction[r] = 1.0f;
    if (mha_range_is_empty(mine))
      continue;
    float *scores = row + (mine.begin - keys.begin);
    if (t->replace)
      remember_poison(t, r, t->scratch.kinds + (mine.begin - keys.begin), scores,
                      mine.end - mine.begin);
    advance_row(t, r, scores, mine.end - mine.begin);
  }
}

/* O /= l. A sink far above the row's maximum makes l infinite and O 0, as it should. */
static void normalise(const task *t) {
  for (int64_t r = 0; r < t->rows; r++) {
    float *row = output_row(t, r);
    if (t->row_max[r] == -INFINITY) {
      memset(row, 0, (size_t)t->core->dv * sizeof *row);
      continue;
    }
    const float sum = mha_core_denominator(t->core, t->h, t->row_max[r], t->row_sum[r]);
    mha_row_scale(row, t->core->dv, 1.0f / sum);
  }
}

/* Rows whose weight for an infinite value does not round to 0 become NaN. */
static void apply_poison(const task *t) {
  for (int64_t r = 0; r < t->live; r++) {
    const float poison = t->scratch.poison[r];
    if (poison == -INFINITY)
      continue;
    const float sum = mha_core_denominator(t->core, t->h, t->row_max[r], t->row_sum[r]);
    if (poison == INFINITY || mha_exp(poison - t->row_max[r]) / sum > 0.0f)
      for (int64_t c = 0; c < t->core->dv; c++)
        output_row(t, r)[c] = NAN;
  }
}

static bool needs_replacement(const task *t) {
  for (int64_t r = 0; r < t->live; r++)
    if (isfinite(t->row_sum[r]) && isfinite(t->row_max[r]) &&
        !mha_row_is_finite(output_row(t, r), t->core->dv))
      return true;
  return false;
}

/* ---- one task ---- */

/* Starts the rows from nothing: no key seen, output 0 for the products to add to. */
static void start_rows(const task *t) {
  for (int64_t r = 0; r < t->rows; r++) {
    t->row_max[r] = -INFINITY;
    t->row_sum[r] = 0.0f;
    t->scratch.poison[r] = -INFINITY;
    memset(output_row(t, r), 0, (size_t)t->core->dv * sizeof(float));
  }
}

static void rescale_output(const task *t, mha_range rows) {
  for (int64_t r = rows.begin; r < rows.end; r++)
    if (t->scratch.correction[r] != 1.0f)
      mha_row_scale(output_row(t, r), t->core->dv, t->scratch.correction[r]);
}

/* One key tile for the rows that see any of it. */
static mha_status attend_key_tile(const task *t, mha_range rows, mha_range keys) {
  const mha_core *core = t->core;
  const int64_t n = rows.end - rows.begin;
  float *scores = t->scratch.scores;
  const mha_status status =
      mha_core_scores(core, t->b, t->h, t->i + rows.begin, n, keys, scores, t->score_stride);
  if (status)
    return status;
  const mha_view v =
      t->replace ? replace_values(t, keys) : mha_core_values(t->core, t->b, t->h, keys);
  softmax_tile(t, rows, keys);
  rescale_output(t, rows);
  const mha_view p = mha_view_rows(scores, n, keys.end - keys.begin, t->score_stride);
  return mha_blas_multiply(1.0f, p, v, 1.0f, output_row(t, rows.begin), core->output_row_stride);
}

static mha_status attend_all_keys(const task *t) {
  mha_status status = MHA_OK;
  mha_tile_walk walk = mha_walk_visible(&t->core->visibility, t->b, t->i, t->live);
  start_rows(t);
  while (!status && mha_walk_next(&walk))
    status = attend_key_tile(t, walk.rows, walk.keys);
  return status;
}

static mha_status attend_task(void *job, int64_t index, int32_t worker) {
  const mha_core *core = job;
  const mha_visibility *v = &core->visibility;
  task t = {.core = core, .replace = false};
  locate(&t, index);
  if (t.rows <= 0)
    return MHA_OK;
  t.live = mha_min(t.rows, mha_query_count(v, t.b) - t.i);
  t.scratch = worker_scratch(core, worker);
  t.score_stride = score_columns(v->Lk);
  t.row_max = core->row_max + mha_core_row_index(core, t.b, t.h, t.i);
  t.row_sum = core->row_sum + mha_core_row_index(core, t.b, t.h, t.i);
  t.output = mha_core_output(core, t.b, t.h, t.i);
  mha_status status = attend_all_keys(&t);
  if (!status && needs_replacement(&t)) {
    t.replace = true;
    status = attend_all_keys(&t);
  }
  normalise(&t);
  if (t.replace)
    apply_poison(&t);
  return status;
}

/* Packed rows behind the last sequence belong to nobody: they see no key. */
static void clear_unowned_rows(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  const int64_t first = v->query_starts ? v->query_starts[v->B] : v->Lq;
  for (int64_t i = first; i < v->Lq; i++)
    for (int64_t h = 0; h < v->H; h++) {
      memset(core->output + i * core->output_row_stride + h * core->output_head_stride, 0,
             (size_t)core->dv * sizeof(float));
      core->row_max[h * v->Lq + i] = -INFINITY;
      core->row_sum[h * v->Lq + i] = 0.0f;
    }
}

mha_status mha_attention_run(const mha_core *core, const mha_threads *threads) {
  const mha_visibility *v = &core->visibility;
  mha_core job = *core;
  mha_task_list list = {.work = attend_task, .job = &job, .operations = mha_core_operations(core)};
  if (!mha_attention_task_count(v->B, v->H, v->Lq, v->query_starts != NULL, &list.n_tasks))
    return MHA_ERROR_OVERFLOW;
  clear_unowned_rows(core);
  return mha_parallel_run(threads, &list);
}
