/* Owns one task of step 3: a batch entry b, a head h and a tile of queries; or, for few queries
 * over many keys, a strip of heads and a part of the keys.
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
 * and at the end O /= l, the sink's share in l. Parts of the keys leave their m, l and O behind and
 * are merged by the same rule, in the order of the keys. The tiles depend on shapes, flags and
 * lengths alone: the same bits for any number of threads. */
#include "attention.h"

#include "blas.h"
#include "softmax.h"

#include <math.h>
#include <string.h>

/* Scratch of one worker; rows are those of a task, queries of all its heads. */
typedef struct tile_scratch {
  float *scores;     /* [rows][score_stride] */
  float *correction; /* [rows], exp(m_old - m_new) of the current key tile */
  float *poison;     /* [rows], see remember_poison; of a task that finishes its rows itself */
  float *values;     /* [keys][dv], V of one key head with its non-finite rows replaced by 0; rows
                        replaced_stride apart */
  uint8_t *kinds;    /* [keys], what each row of V holds */
} tile_scratch;

/* Queries [i, i + rows) of the block's heads, of which `live` may see keys. State of row (k, r),
 * head h + k and query i + r, is at index k·rows + r. */
typedef struct task {
  const mha_core *core;
  tile_scratch scratch;
  mha_block block; /* all of the task; n = rows */
  int64_t part;    /* of the entry's keys, or -1 = all */
  int64_t live;
  float *row_max; /* m */
  float *row_sum; /* l */
  float *poison;
  bool replace; /* non-finite values are replaced: the second attempt */
} task;

/* ---- layout of the work ---- */

static int64_t score_columns(const mha_cut *cut, int64_t span) {
  return mha_min(span, cut->tile_keys);
}

/* The one place that knows how a worker's scratch is laid out. Few queries: as if one task had all
 * heads, so that only the sizes that a caller can tell ahead of a call count. */
static mha_scratch_offsets lay_out(const mha_cut_sizes *s, mha_layout *layout) {
  const mha_cut cut = mha_cut_call(s);
  const int64_t heads = cut.few ? s->H : 1;
  const int64_t queries = mha_min(s->Lq, cut.queries);
  const int64_t columns = score_columns(&cut, s->span);
  int64_t value_columns = 0;
  layout->overflow |= !mha_add(s->dv, 1, &value_columns);
  mha_scratch_offsets at;
  at.scores = mha_layout_add(layout, sizeof(float), heads, queries, columns);
  at.correction = mha_layout_add(layout, sizeof(float), heads, queries, 1);
  at.poison = mha_layout_add(layout, sizeof(float), heads, queries, 1);
  at.values = mha_layout_add(layout, sizeof(float), columns, value_columns, 1);
  at.kinds = mha_layout_add(layout, sizeof(uint8_t), columns, 1, 1);
  return at;
}

static tile_scratch worker_scratch(const mha_core *core, int32_t worker) {
  const mha_scratch_offsets *at = &core->scratch_at;
  char *base = core->scratch + (size_t)worker * core->scratch_bytes;
  const tile_scratch s = {(void *)(base + at->scores), (void *)(base + at->correction),
                          (void *)(base + at->poison), (void *)(base + at->values),
                          (void *)(base + at->kinds)};
  return s;
}

float *mha_attention_scores(const mha_core *core, int32_t worker, int64_t *stride) {
  *stride = score_columns(&core->cut, mha_key_span(&core->visibility));
  return worker_scratch(core, worker).scores;
}

/* Query tiles of one head over all entries. Packed sequences have no common length: entry b owns
 * the slots from floor(start/T) + b on, T the tile, which are always enough for its rows. */
static bool slots_per_head(int64_t B, int64_t Lq, bool packed, int64_t *slots) {
  const int64_t tiles = Lq / MHA_QUERY_TILE;
  return packed ? mha_add(B, tiles, slots)
                : mha_multiply(B, tiles + (Lq % MHA_QUERY_TILE != 0), slots);
}

/* Few queries: at most one task for each head and part. */
static bool task_limit(const mha_cut_sizes *s, int64_t *tasks) {
  const int64_t parts = mha_cut_most_parts(s->Lq, s->span, s->packed);
  if (parts > 0)
    return mha_multiply(s->B, s->H, tasks) && mha_multiply(*tasks, parts, tasks);
  return slots_per_head(s->B, s->Lq, s->packed, tasks) && mha_multiply(*tasks, s->H, tasks);
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

/* Sets b, h, i and n of a task's block; n may come out as 0 or less: a slot without work. */
static void locate_tile(task *t, int64_t index) {
  const mha_visibility *v = &t->core->visibility;
  mha_block *k = &t->block;
  const bool packed = v->query_starts != NULL;
  int64_t slots = 0;
  (void)slots_per_head(v->B, v->Lq, packed, &slots);
  slots = mha_max(slots, 1); /* there is a task, so there is one */
  /* from behind: under a causal mask the last tiles have most to do and should not come last */
  const int64_t slot = slots - 1 - index % slots;
  k->h = index / slots;
  k->heads = 1;
  if (packed) {
    k->b = packed_entry(v, slot);
    k->i = (slot - first_slot(v, k->b)) * MHA_QUERY_TILE;
    k->n = mha_min(mha_query_count(v, k->b) - k->i, MHA_QUERY_TILE);
  } else {
    const int64_t tiles = slots / v->B;
    k->b = slot / tiles;
    k->i = slot % tiles * MHA_QUERY_TILE;
    k->n = mha_min(v->Lq - k->i, MHA_QUERY_TILE);
  }
}

/* ---- parts of the keys ---- */

/* Results of the parts: m, l, poison [B][parts][H][Lq] and O [B][parts][H][Lq][dv]. */
typedef struct part_results {
  float *max, *sum, *poison, *output;
} part_results;

static bool part_rows(const mha_cut_sizes *s, int64_t *rows) {
  return mha_multiply(s->B, s->H, rows) && mha_multiply(*rows, s->Lq, rows) &&
         mha_multiply(*rows, mha_cut_most_parts(s->Lq, s->span, s->packed), rows);
}

static bool parts_floats(const mha_cut_sizes *sizes, int64_t *floats) {
  int64_t row = 0;
  return part_rows(sizes, floats) && mha_add(sizes->dv, 3, &row) &&
         mha_multiply(*floats, row, floats);
}

mha_attention_scratch mha_attention_plan(const mha_cut_sizes *s, int32_t n_threads,
                                         mha_layout *layout) {
  const int64_t entries = s->packed ? 1 : s->B;
  mha_attention_scratch at;
  mha_layout worker = {0};
  int64_t tasks = 0;
  int64_t parts = 0;
  at.row_max = mha_layout_add(layout, sizeof(float), entries, s->H, s->Lq);
  at.row_sum = mha_layout_add(layout, sizeof(float), entries, s->H, s->Lq);
  (void)lay_out(s, &worker);
  at.worker_bytes = worker.bytes;
  layout->overflow |= worker.overflow || !task_limit(s, &tasks) || !parts_floats(s, &parts);
  at.parts = mha_layout_add(layout, sizeof(float), parts, 1, 1);
  at.workers = mha_layout_add(layout, 1, mha_min(tasks, n_threads), (int64_t)at.worker_bytes, 1);
  return at;
}

void mha_attention_use(mha_core *core, char *arena, const mha_attention_scratch *at) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  mha_layout layout = {0};
  core->cut = mha_cut_call(&sizes);
  core->row_max = (float *)(void *)(arena + at->row_max);
  core->row_sum = (float *)(void *)(arena + at->row_sum);
  core->parts = (float *)(void *)(arena + at->parts);
  core->scratch = arena + at->workers;
  core->scratch_bytes = at->worker_bytes;
  core->scratch_at = lay_out(&sizes, &layout);
}

static part_results part_results_of(const mha_core *core) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  int64_t rows = 0;
  (void)part_rows(&sizes, &rows);
  const part_results p = {core->parts, core->parts + rows, core->parts + 2 * rows,
                          core->parts + 3 * rows};
  return p;
}

/* Index of the first row of head h in a part of entry b. */
static int64_t part_row(const mha_core *core, int64_t b, int64_t part, int64_t h) {
  const mha_visibility *v = &core->visibility;
  return ((b * core->cut.parts + part) * v->H + h) * v->Lq;
}

/* Strips of heads, the last of which may have fewer. */
static int64_t strip_count(const mha_core *core) {
  const int64_t H = core->visibility.H;
  return H / core->cut.heads + (H % core->cut.heads != 0);
}

/* Parts follow one another within a strip, as they lie in memory. */
static void locate_part(task *t, int64_t index) {
  const mha_core *core = t->core;
  mha_block *k = &t->block;
  t->part = index % core->cut.parts;
  index /= core->cut.parts;
  k->h = index % strip_count(core) * core->cut.heads;
  k->heads = mha_min(core->cut.heads, core->visibility.H - k->h);
  k->b = index / strip_count(core);
  k->i = 0;
  k->n = core->visibility.Lq;
}

/* A single part is the whole: its task finishes its rows itself. */
static bool leaves_parts(const mha_core *core) {
  return core->cut.few && core->cut.parts > 1;
}

/* Where the rows of the task keep m, l, poison and O. */
static void place_rows(task *t) {
  const mha_core *core = t->core;
  mha_block *k = &t->block;
  if (leaves_parts(core)) {
    const part_results p = part_results_of(core);
    const int64_t row = part_row(core, k->b, t->part, k->h);
    t->row_max = p.max + row;
    t->row_sum = p.sum + row;
    t->poison = p.poison + row;
    k->output = p.output + row * core->dv;
    k->output_row_stride = core->dv;
    k->output_head_stride = k->n * core->dv;
    return;
  }
  t->row_max = core->row_max + mha_core_row_index(core, k->b, k->h, k->i);
  t->row_sum = core->row_sum + mha_core_row_index(core, k->b, k->h, k->i);
  t->poison = t->scratch.poison;
  k->output = mha_core_output(core, k->b, k->h, k->i);
  k->output_row_stride = core->output_row_stride;
  k->output_head_stride = core->output_head_stride;
}

static float *output_row(const task *t, int64_t k, int64_t r) {
  return t->block.output + k * t->block.output_head_stride + r * t->block.output_row_stride;
}

/* ---- scores ---- */

/* Final scores of row (k, r) for the keys it may see within the tile `keys`; returns those keys. */
static mha_range finish_scores(const task *t, int64_t k, int64_t r, mha_range keys, float *row) {
  const mha_visibility *v = &t->core->visibility;
  const mha_block *q = &t->block;
  const mha_range mine = mha_range_intersect(mha_visible_keys(v, q->b, q->i + r), keys);
  if (mha_range_is_empty(mine))
    return mine;
  float *scores = row + (mine.begin - keys.begin);
  if (t->core->softcap > 0.0f)
    mha_row_softcap(scores, mine.end - mine.begin, t->core->softcap);
  mha_visibility_apply(v, q->b, q->h + k, q->i + r, mine, scores);
  return mine;
}

/* ---- non-finite values ----
 * A hidden key has weight 0, but the product P·V turns 0·NaN into NaN. If a row comes out
 * non-finite although its scores were not, the task is done again: in each tile the non-finite rows
 * of V are replaced by 0, the shapes staying the same and so every other bit, and rows that see one
 * of them become NaN at the end. */

/* The BLAS must take the same way through the copy as through V itself. OpenBLAS's sgemv has one of
 * its own for matrices of at most three columns without gaps between their rows; beyond that, bits
 * do not depend on the leading dimension. So the copy has gaps where V has. */
static int64_t replaced_stride(const mha_core *core) {
  return core->v.row_stride == core->dv ? core->dv : core->dv + 1;
}

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

/* V of one key tile and the key head of query head h, with 0 in its non-finite rows; notes the kind
 * of each. */
static void replace_values(const task *t, int64_t h, mha_range keys) {
  const mha_view values = mha_core_values(t->core, t->block.b, h, keys);
  for (int64_t j = 0; j < values.rows; j++) {
    const float *from = values.data + j * values.row_stride;
    float *to = t->scratch.values + j * replaced_stride(t->core);
    t->scratch.kinds[j] = value_kind(from, values.columns);
    if (t->scratch.kinds[j] == VALUE_FINITE)
      memcpy(to, from, (size_t)values.columns * sizeof *to);
    else
      memset(to, 0, (size_t)values.columns * sizeof *to);
  }
}

/* poison = the largest score that a row gives to an infinite value; +inf if it sees a NaN, which no
 * weight can make harmless. */
static void remember_poison(float *poison, const uint8_t *kinds, const float *scores, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    if (kinds[j] == VALUE_FINITE || scores[j] == -INFINITY)
      continue;
    const float score = kinds[j] == VALUE_NAN ? INFINITY : scores[j];
    if (score > *poison)
      *poison = score;
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

/* Replaces the visible scores of a row by exp(score - m) and brings m, l and the correction of what
 * was accumulated before up to date. */
static void advance_row(const task *t, int64_t row, float *scores, int64_t n) {
  const float before = t->row_max[row];
  const float tile_max = visible_max(scores, n);
  const float now = tile_max > before || isnan(tile_max) ? tile_max : before;
  if (now == -INFINITY) { /* nothing visible so far: exp(-inf - -inf) would be NaN */
    memset(scores, 0, (size_t)n * sizeof *scores);
    return;
  }
  if (!(now == before))
    t->scratch.correction[row] = before == -INFINITY ? 0.0f : mha_exp(before - now);
  t->row_sum[row] = t->row_sum[row] * t->scratch.correction[row] + mha_row_exp(scores, n, now);
  t->row_max[row] = now;
}

static void clear_hidden(float *row, mha_range keys, mha_range mine) {
  if (mha_range_is_empty(mine)) {
    memset(row, 0, (size_t)(keys.end - keys.begin) * sizeof *row);
    return;
  }
  memset(row, 0, (size_t)(mine.begin - keys.begin) * sizeof *row);
  memset(row + (mine.end - keys.begin), 0, (size_t)(keys.end - mine.end) * sizeof *row);
}

/* Brings what was accumulated to the row's new maximum. What overflowed under a maximum that counts
 * for nothing now is gone; in the first attempt it could also be a NaN that the row sees. */
static void correct_output(const task *t, int64_t index, float *output) {
  const float correction = t->scratch.correction[index];
  if (correction == 0.0f && t->replace)
    memset(output, 0, (size_t)t->core->dv * sizeof *output);
  else if (correction != 1.0f)
    mha_row_scale(output, t->core->dv, correction);
}

/* Steps 2 and 3 of the list above for one row and one key tile, and the correction of its output.
 */
static void softmax_row(const task *t, int64_t k, int64_t r, mha_range keys, float *row) {
  const int64_t index = k * t->block.n + r;
  const mha_range mine = finish_scores(t, k, r, keys, row);
  clear_hidden(row, keys, mine);
  if (mha_range_is_empty(mine))
    return;
  float *scores = row + (mine.begin - keys.begin);
  if (t->replace)
    remember_poison(&t->poison[index], t->scratch.kinds + (mine.begin - keys.begin), scores,
                    mine.end - mine.begin);
  t->scratch.correction[index] = 1.0f;
  advance_row(t, index, scores, mine.end - mine.begin);
  correct_output(t, index, output_row(t, k, r));
}

/* The same for all rows of `tile`, a block of the task's queries from `first` on. */
static void softmax_tile(const task *t, const mha_block *tile, mha_range keys) {
  for (int64_t k = 0; k < tile->heads; k++)
    for (int64_t r = 0; r < tile->n; r++)
      softmax_row(t, tile->h - t->block.h + k, tile->i - t->block.i + r, keys,
                  tile->scores + (k * tile->n + r) * tile->score_stride);
}

/* ---- the end of a row ---- */

/* O /= l. A sink far above the row's maximum makes l infinite and O 0, as it should. A row whose
 * weight for an infinite value does not round to 0 becomes NaN. */
static void finish_row(const mha_core *core, int64_t h, float max, float sum, float poison,
                       float *row) {
  if (max == -INFINITY) {
    memset(row, 0, (size_t)core->dv * sizeof *row);
    return;
  }
  const float denominator = mha_core_denominator(core, h, max, sum);
  mha_row_scale(row, core->dv, 1.0f / denominator);
  if (poison == INFINITY || (poison > -INFINITY && mha_exp(poison - max) / denominator > 0.0f))
    for (int64_t c = 0; c < core->dv; c++)
      row[c] = NAN;
}

static void finish_rows(const task *t) {
  const mha_block *q = &t->block;
  for (int64_t k = 0; k < q->heads; k++)
    for (int64_t r = 0; r < q->n; r++) {
      const int64_t index = k * q->n + r;
      finish_row(t->core, q->h + k, t->row_max[index], t->row_sum[index], t->poison[index],
                 output_row(t, k, r));
    }
}

/* ---- one task ---- */

static bool needs_replacement(const task *t) {
  for (int64_t k = 0; k < t->block.heads; k++)
    for (int64_t r = 0; r < t->live; r++) {
      const int64_t index = k * t->block.n + r;
      if (isfinite(t->row_sum[index]) && isfinite(t->row_max[index]) &&
          !mha_row_is_finite(output_row(t, k, r), t->core->dv))
        return true;
    }
  return false;
}

/* Starts the rows from nothing: no key seen, output 0 for the products to add to. */
static void start_rows(const task *t) {
  for (int64_t k = 0; k < t->block.heads; k++)
    for (int64_t r = 0; r < t->block.n; r++) {
      const int64_t index = k * t->block.n + r;
      t->row_max[index] = -INFINITY;
      t->row_sum[index] = 0.0f;
      t->poison[index] = -INFINITY;
      memset(output_row(t, k, r), 0, (size_t)t->core->dv * sizeof(float));
    }
}

/* The second attempt, one key head after the other: its values are replaced, the products are the
 * same. */
static mha_status accumulate_replaced(const task *t, const mha_block *tile, mha_range keys) {
  mha_status status = MHA_OK;
  for (int64_t g = 0; !status && g < mha_block_groups(t->core, tile); g++) {
    const mha_block group = mha_block_group(t->core, tile, g);
    replace_values(t, group.h, keys);
    softmax_tile(t, &group, keys);
    status =
        mha_core_accumulate(t->core, &group, keys, t->scratch.values, replaced_stride(t->core));
  }
  return status;
}

/* One key tile for the rows that see any of it. */
static mha_status attend_key_tile(const task *t, mha_range rows, mha_range keys) {
  mha_block tile = t->block;
  tile.i += rows.begin;
  tile.n = rows.end - rows.begin;
  tile.output += rows.begin * tile.output_row_stride;
  const mha_status status = mha_core_scores(t->core, &tile, keys);
  if (status)
    return status;
  if (t->replace)
    return accumulate_replaced(t, &tile, keys);
  softmax_tile(t, &tile, keys);
  return mha_core_accumulate(t->core, &tile, keys, NULL, 0);
}

static mha_status attend_keys(const task *t) {
  const mha_core *core = t->core;
  const mha_block *q = &t->block;
  mha_status status = MHA_OK;
  mha_tile_walk walk =
      t->part >= 0 ? mha_walk_part(&core->visibility, &core->cut, q->b, q->i, t->live, t->part)
                   : mha_walk_visible(&core->visibility, &core->cut, q->b, q->i, t->live);
  start_rows(t);
  while (!status && mha_walk_next(&walk))
    status = attend_key_tile(t, walk.rows, walk.keys);
  return status;
}

static mha_status attend_task(void *job, int64_t index, int32_t worker) {
  const mha_core *core = job;
  const mha_visibility *v = &core->visibility;
  task t = {.core = core, .part = -1};
  mha_block *q = &t.block;
  if (core->cut.few)
    locate_part(&t, index);
  else
    locate_tile(&t, index);
  if (q->n <= 0)
    return MHA_OK;
  t.live = mha_min(q->n, mha_query_count(v, q->b) - q->i);
  t.scratch = worker_scratch(core, worker);
  q->scores = mha_attention_scores(core, worker, &q->score_stride);
  place_rows(&t);
  mha_status status = attend_keys(&t);
  if (!status && needs_replacement(&t)) {
    t.replace = true;
    status = attend_keys(&t);
  }
  if (!leaves_parts(core))
    finish_rows(&t);
  return status;
}

/* ---- merging the parts ---- */

/* m and l of row (b, h, i) over all parts; poison likewise. l is NaN if that of a part is. */
static void merge_statistics(const mha_core *core, const part_results *p, int64_t first, float *max,
                             float *sum, float *poison) {
  const int64_t step = core->visibility.H * core->visibility.Lq;
  *max = -INFINITY;
  *sum = 0.0f;
  *poison = -INFINITY;
  for (int64_t u = 0; u < core->cut.parts; u++) {
    const int64_t row = first + u * step;
    *max = p->max[row] > *max || isnan(p->max[row]) ? p->max[row] : *max;
    *poison = p->poison[row] > *poison ? p->poison[row] : *poison;
  }
  for (int64_t u = 0; u < core->cut.parts; u++) {
    const int64_t row = first + u * step;
    if (p->max[row] != -INFINITY)
      *sum += p->sum[row] * mha_exp(p->max[row] - *max);
  }
}

/* One row: O = Σ exp(m_u - m)·O_u over the parts u, in their order. */
static void merge_row(const mha_core *core, const part_results *p, int64_t b, int64_t h,
                      int64_t i) {
  const mha_visibility *v = &core->visibility;
  const int64_t first = part_row(core, b, 0, h) + i;
  const int64_t index = mha_core_row_index(core, b, h, i);
  float *row = mha_core_output(core, b, h, i);
  float poison = 0.0f;
  merge_statistics(core, p, first, &core->row_max[index], &core->row_sum[index], &poison);
  memset(row, 0, (size_t)core->dv * sizeof *row);
  for (int64_t u = 0; u < core->cut.parts; u++) {
    const int64_t part = first + u * v->H * v->Lq;
    const float factor =
        p->max[part] == -INFINITY ? 0.0f : mha_exp(p->max[part] - core->row_max[index]);
    if (factor == 0.0f) /* a sum that overflowed would still count */
      continue;
    for (int64_t c = 0; c < core->dv; c++)
      row[c] += factor * p->output[part * core->dv + c];
  }
  finish_row(core, h, core->row_max[index], core->row_sum[index], poison, row);
}

/* One task: an entry and a head. */
static mha_status merge_task(void *job, int64_t index, int32_t worker) {
  (void)worker;
  const mha_core *core = job;
  const mha_visibility *v = &core->visibility;
  const part_results p = part_results_of(core);
  for (int64_t i = 0; i < v->Lq; i++)
    merge_row(core, &p, index / v->H, index % v->H, i);
  return MHA_OK;
}

/* ---- all tasks ---- */

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

static mha_status run_parts(mha_core *core, const mha_threads *threads) {
  const mha_visibility *v = &core->visibility;
  const int64_t entries = v->B * v->H;
  const mha_task_list parts = {.work = attend_task,
                               .job = core,
                               .n_tasks = v->B * strip_count(core) * core->cut.parts,
                               .operations = mha_core_operations(core)};
  const mha_task_list merge = {.work = merge_task,
                               .job = core,
                               .n_tasks = entries,
                               .operations = 2.0 * (double)(entries * v->Lq) *
                                             (double)(core->cut.parts * core->dv)};
  const mha_status status = mha_parallel_run(threads, &parts);
  return status || !leaves_parts(core) ? status : mha_parallel_run(threads, &merge);
}

mha_status mha_attention_run(const mha_core *core, const mha_threads *threads) {
  mha_core job = *core;
  if (core->cut.few)
    return run_parts(&job, threads);
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  mha_task_list list = {.work = attend_task, .job = &job, .operations = mha_core_operations(core)};
  if (!task_limit(&sizes, &list.n_tasks))
    return MHA_ERROR_OVERFLOW;
  clear_unowned_rows(core);
  /* the slots of no sequence at all have no entry */
  return core->visibility.B > 0 ? mha_parallel_run(threads, &list) : MHA_OK;
}
