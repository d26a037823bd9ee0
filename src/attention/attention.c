/* Owns one task of step 3: a batch entry b, a head h and a tile of queries; or, for few queries
 * over many keys, a strip of heads and a part of the keys.
 *
 * Keys are walked in tiles with an online softmax ("Online normalizer calculation for softmax",
 * 2018): per query row the running maximum m and sum l are kept, and what was accumulated under an
 * older maximum is multiplied by exp(m_old - m_new). For each key tile
 *
 *   1. S = scale·Q·Kᵀ                 [rows][keys]   a product on strided views
 *   2. rules of the row, hidden keys  S -> -inf
 *   3. P = exp(S - m), l += ΣP        in place of S; then, with dropout, P∘(0 or 1/(1 - p))
 *   4. O = O·exp(m_old - m) + P·V     [rows][dv]     a product into the output's own stride, or,
 *                                                    where keys are laid out, into scratch
 *
 * and at the end O /= l, the sink's share in l. Parts of the keys leave their m, l and O behind and
 * are merged by the same rule, in the order of the keys. The tiles depend on shapes, flags and
 * lengths alone: the same bits for any number of threads. */
#include "attention.h"

#include "laid.h"
#include "parts.h"
#include "poison.h"

#include <math.h>
#include <string.h>

/* ---- scratch ---- */

/* Scratch of one worker; rows are those of a task, queries of all its heads. */
typedef struct tile_scratch {
  float *scores;     /* [rows][score_stride] */
  float *correction; /* [rows], exp(m_old - m_new) of the current key tile */
  float *spare;      /* [keys], the scores of one row, or what drops its weights */
  float *poison;     /* [rows], see poison.h; of a task that finishes its rows itself */
  float *values;     /* [keys][dv], V of one key head with its non-finite rows replaced by 0, in
                        its own type; rows at most one number further apart */
  uint8_t *kinds;    /* [keys], what each row of V holds */
  float
      *fetched; /* [keys][d or dv], of keys or values that are not stored as float32, or in pages */
  float *output; /* [rows][dv], O until it is finished, where keys are laid out */
} tile_scratch;

/* Of keys that are laid out always the same: it is part of the kernels' shapes. */
static int64_t score_columns(const mha_cut *cut, int64_t span) {
  return cut->laid ? MHA_LAID_COLUMNS : mha_min(span, cut->tile_keys);
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
  at.spare = mha_layout_add(layout, sizeof(float), columns, 1, 1);
  at.poison = mha_layout_add(layout, sizeof(float), heads, queries, 1);
  at.values = mha_layout_add(layout, sizeof(float), columns, value_columns, 1);
  at.kinds = mha_layout_add(layout, sizeof(uint8_t), columns, 1, 1);
  at.fetched = mha_layout_add(layout, sizeof(float), s->stored || s->paged ? columns : 0,
                              mha_max(s->d, s->dv), 1);
  at.output = mha_layout_add(layout, sizeof(float), cut.laid ? queries : 0, s->dv, 1);
  return at;
}

static tile_scratch worker_scratch(const mha_core *core, int32_t worker) {
  const mha_scratch_offsets *at = &core->scratch_at;
  char *base = core->scratch + (size_t)worker * core->scratch_bytes;
  const tile_scratch s = {(void *)(base + at->scores),  (void *)(base + at->correction),
                          (void *)(base + at->spare),   (void *)(base + at->poison),
                          (void *)(base + at->values),  (void *)(base + at->kinds),
                          (void *)(base + at->fetched), (void *)(base + at->output)};
  return s;
}

void mha_attention_lend(const mha_core *core, int32_t worker, mha_block *block) {
  const tile_scratch scratch = worker_scratch(core, worker);
  block->scores = scratch.scores;
  block->score_stride = score_columns(&core->cut, mha_key_span(&core->visibility));
  block->fetched = scratch.fetched;
}

/* ---- the list of tasks ---- */

/* Query tiles of one head over all entries. */
static bool slots_per_head(const mha_cut_sizes *s, int64_t *slots) {
  const int64_t T = mha_cut_call(s).queries;
  const int64_t tiles = s->Lq / T;
  return s->packed ? mha_add(s->B, tiles, slots)
                   : mha_multiply(s->B, tiles + (s->Lq % T != 0), slots);
}

/* Few queries: at most one task for each head and part. */
static bool task_limit(const mha_cut_sizes *s, int64_t *tasks) {
  const int64_t parts = mha_cut_most_parts(s->Lq, s->span, s->packed);
  if (parts > 0)
    return mha_multiply(s->B, s->H, tasks) && mha_multiply(*tasks, parts, tasks);
  return slots_per_head(s, tasks) && mha_multiply(*tasks, s->H, tasks);
}

/* Sets b, h, i and n of a task's block; n may come out as 0 or less: a slot without work. */
static void locate_tile(const mha_core *core, int64_t index, mha_block *k) {
  const mha_visibility *v = &core->visibility;
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  const int64_t T = core->cut.queries;
  int64_t slots = 0;
  (void)slots_per_head(&sizes, &slots);
  slots = mha_max(slots, 1); /* there is a task, so there is one */
  /* from behind: under a causal mask the last tiles have most to do and should not come last */
  const int64_t slot = slots - 1 - index % slots;
  k->h = index / slots;
  k->heads = 1;
  if (sizes.packed) {
    k->b = mha_slot_owner(v->query_starts, T, v->B, slot);
    k->i = (slot - mha_slot_first(v->query_starts, T, k->b)) * T;
    k->n = mha_min(mha_query_count(v, k->b) - k->i, T);
  } else {
    const int64_t tiles = slots / v->B;
    k->b = slot / tiles;
    k->i = slot % tiles * T;
    k->n = mha_min(v->Lq - k->i, T);
  }
}

/* What workers and tasks of one pass need, added to what is needed so far. */
static void plan_pass(const mha_cut_sizes *s, mha_layout *layout, mha_attention_scratch *at,
                      int64_t *tasks, int64_t *parts) {
  mha_layout worker = {0};
  int64_t n = 0;
  int64_t floats = 0;
  (void)lay_out(s, &worker);
  layout->overflow |= worker.overflow || !task_limit(s, &n) || !mha_parts_floats(s, &floats);
  at->worker_bytes = worker.bytes > at->worker_bytes ? worker.bytes : at->worker_bytes;
  *tasks = mha_max(*tasks, n);
  *parts = mha_max(*parts, floats);
}

mha_attention_scratch mha_attention_plan(const mha_cut_sizes *s, int32_t n_threads,
                                         mha_layout *layout) {
  const int64_t entries = s->packed ? 1 : s->B;
  const mha_cut_sizes few = mha_cut_few_of_packed(s);
  mha_attention_scratch at = {0};
  int64_t tasks = 0;
  int64_t parts = 0;
  at.row_max = mha_layout_add(layout, sizeof(float), entries, s->H, s->Lq);
  at.row_sum = mha_layout_add(layout, sizeof(float), entries, s->H, s->Lq);
  plan_pass(s, layout, &at, &tasks, &parts);
  if (few.Lq > 0)
    plan_pass(&few, layout, &at, &tasks, &parts);
  at.parts = mha_layout_add(layout, sizeof(float), parts, 1, 1);
  at.keys = mha_cut_call(s).laid ? mha_laid_plan(s, layout) : 0;
  at.workers = mha_layout_add(layout, 1, mha_min(tasks, n_threads), (int64_t)at.worker_bytes, 1);
  return at;
}

void mha_attention_use(mha_core *core, char *arena, const mha_attention_scratch *at,
                       const mha_kernels *kernels, const mha_laid_strides *strides) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  mha_layout layout = {0};
  core->cut = mha_cut_call(&sizes);
  if (core->cut.laid)
    mha_laid_use(core, kernels, strides, (float *)(void *)(arena + at->keys));
  core->row_max = (float *)(void *)(arena + at->row_max);
  core->row_sum = (float *)(void *)(arena + at->row_sum);
  core->parts = (float *)(void *)(arena + at->parts);
  core->scratch = arena + at->workers;
  core->scratch_bytes = at->worker_bytes;
  core->scratch_at = lay_out(&sizes, &layout);
}

/* ---- one task ---- */

/* A block of queries over all keys of its entry, or over a part of them. */
typedef struct task {
  mha_rows rows;
  tile_scratch scratch;
  int64_t part; /* of the entry's keys, or -1 = all */
  int64_t live; /* of the block's queries, those that may see keys */
} task;

/* Where the rows of the task keep m, l, poison and O. */
static void place_rows(task *t) {
  const mha_core *core = t->rows.core;
  mha_block *k = &t->rows.block;
  t->rows.correction = t->scratch.correction;
  t->rows.spare = t->scratch.spare;
  if (mha_parts_are_left(core)) {
    mha_parts_place(&t->rows, t->part);
    return;
  }
  t->rows.max = core->row_max + mha_core_row_index(core, k->b, k->h, k->i);
  t->rows.sum = core->row_sum + mha_core_row_index(core, k->b, k->h, k->i);
  t->rows.poison = t->scratch.poison;
  k->output = core->cut.laid ? t->scratch.output : mha_core_output(core, k->b, k->h, k->i);
  k->output_row_stride = core->cut.laid ? core->dv : core->output_row_stride;
  k->output_head_stride = core->output_head_stride;
}

/* The second attempt, one key head after the other: its values are replaced, the products are the
 * same. */
static mha_status accumulate_replaced(const task *t, const mha_block *tile, mha_range keys) {
  const mha_core *core = t->rows.core;
  mha_status status = MHA_OK;
  for (int64_t g = 0; !status && g < mha_block_groups(core, tile); g++) {
    const mha_block group = mha_block_group(core, tile, g);
    const mha_stored copy =
        mha_poison_replace(core, &group, keys, t->scratch.values, t->scratch.kinds);
    mha_rows_advance(&t->rows, &group, keys);
    status = mha_block_accumulate(core, &group, keys, &copy);
  }
  return status;
}

/* One key tile for the rows that see any of it. */
static mha_status attend_key_tile(const task *t, mha_range rows, mha_range keys) {
  const mha_block tile = mha_block_tile(t->rows.core, &t->rows.block, rows, keys);
  const mha_status status = mha_block_scores(t->rows.core, &tile, keys);
  if (status)
    return status;
  if (t->rows.kinds)
    return accumulate_replaced(t, &tile, keys);
  mha_rows_advance(&t->rows, &tile, keys);
  return mha_block_accumulate(t->rows.core, &tile, keys, NULL);
}

static mha_status attend_keys(const task *t) {
  const mha_core *core = t->rows.core;
  const mha_block *q = &t->rows.block;
  mha_status status = MHA_OK;
  mha_tile_walk walk =
      t->part >= 0 ? mha_walk_part(&core->visibility, &core->cut, q->b, q->i, t->live, t->part)
                   : mha_walk_visible(&core->visibility, &core->cut, q->b, q->i, t->live);
  mha_rows_start(&t->rows);
  while (!status && mha_walk_next(&walk))
    status = attend_key_tile(t, walk.rows, walk.keys);
  return status;
}

static mha_status attend_task(void *job, int64_t index, int32_t worker) {
  const mha_core *core = job;
  task t = {.rows = {.core = core}, .part = -1};
  mha_block *q = &t.rows.block;
  if (core->cut.few)
    t.part = mha_parts_locate(core, index, q);
  else
    locate_tile(core, index, q);
  if (q->n <= 0 || !mha_core_serves(core, q->b))
    return MHA_OK;
  t.live = mha_min(q->n, mha_query_count(&core->visibility, q->b) - q->i);
  t.scratch = worker_scratch(core, worker);
  mha_attention_lend(core, worker, q);
  place_rows(&t);
  mha_status status = attend_keys(&t);
  if (!status && mha_rows_are_suspect(&t.rows, t.live)) {
    t.rows.kinds = t.scratch.kinds;
    status = attend_keys(&t);
  }
  if (!mha_parts_are_left(core))
    mha_rows_finish(&t.rows);
  return status;
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

/* Every entry has the same number of tasks; slots of packed rows that no sequence owns are empty.
 */
static mha_status count_tasks(const mha_core *core, int64_t *n) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  if (core->cut.few)
    *n = mha_parts_count(core);
  else if (core->visibility.B == 0) /* the slots of no sequence at all have no entry */
    *n = 0;
  else if (!task_limit(&sizes, n))
    return MHA_ERROR_OVERFLOW;
  return MHA_OK;
}

static mha_status run_pass(mha_core *core, const mha_threads *threads) {
  mha_task_list list = {.work = attend_task, .job = core, .operations = mha_core_operations(core)};
  mha_status status = count_tasks(core, &list.n_tasks);
  if (status)
    return status;
  if (core->cut.laid)
    status = mha_laid_keys(core, threads);
  if (!status)
    status = mha_parallel_run(threads, &list);
  return status || !mha_parts_are_left(core) ? status : mha_parts_merge(core, threads);
}

/* The entries with few queries, cut as a call of such entries alone would be. */
static mha_status run_few(const mha_core *core, const mha_threads *threads) {
  mha_core few = *core;
  mha_layout layout = {0};
  few.pass = MHA_PASS_FEW;
  const mha_cut_sizes sizes = mha_core_cut_sizes(&few);
  few.cut = mha_cut_call(&sizes);
  few.scratch_at = lay_out(&sizes, &layout);
  return run_pass(&few, threads);
}

mha_status mha_attention_run(const mha_core *core, const mha_threads *threads) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  mha_core rest = *core;
  mha_status status = MHA_OK;
  if (mha_cut_few_of_packed(&sizes).Lq > 0) {
    rest.pass = MHA_PASS_MANY;
    status = run_few(core, threads);
  }
  if (!status)
    status = run_pass(&rest, threads);
  if (!status) /* an output is as it was where no task could run */
    clear_unowned_rows(core);
  return status;
}
