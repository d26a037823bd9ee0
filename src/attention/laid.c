/* Owns the keys laid out for kernels: Kᵀ in blocks of MHA_KEY_BLOCK keys, each [d][keys], so that a
 * product reads it from end to end; V is multiplied where it lies. Keys are counted as the rules
 * count them, so what a ring holds lies in order. */
#include "laid.h"

#include "engine/vector.h"

#include <string.h>

/* ---- shapes ---- */

static mha_kernel_shape score_shape(int64_t d, int64_t q_stride, int64_t columns) {
  const mha_kernel_shape shape = {columns, d, q_stride, MHA_KEY_BLOCK, MHA_LAID_COLUMNS, false};
  return shape;
}

/* P·V for 2^step keys. */
static mha_kernel_shape value_shape(int64_t dv, int64_t v_stride, int step) {
  const mha_kernel_shape shape = {dv, (int64_t)1 << step, MHA_LAID_COLUMNS, v_stride, dv, true};
  return shape;
}

/* Heads side by side or one after the other: what a reserve can foresee. */
static bool is_dense(int64_t stride, int64_t heads, int64_t size) {
  int64_t side_by_side = 0;
  return stride == size || (mha_multiply(heads, size, &side_by_side) && stride == side_by_side);
}

int mha_laid_shapes(const mha_cut_sizes *sizes, const mha_laid_strides *strides,
                    mha_kernel_shape shapes[MHA_LAID_SHAPES]) {
  int n = 0;
  if (!is_dense(strides->q, sizes->H, sizes->d) || !is_dense(strides->v, sizes->G, sizes->dv))
    return 0;
  shapes[n++] = score_shape(sizes->d, strides->q, MHA_KEY_BLOCK);
  shapes[n++] = score_shape(sizes->d, strides->q, MHA_NARROW_BLOCK);
  for (int step = 0; step < MHA_VALUE_KERNELS; step++) {
    shapes[n++] = value_shape(sizes->dv, strides->v, step);
    shapes[n++] = value_shape(sizes->dv, sizes->dv, step);
  }
  for (int k = 0; k < n; k++)
    if (!mha_kernel_is_possible(&shapes[k]))
      return 0;
  return n;
}

int64_t mha_laid_column(const mha_core *core, mha_range keys) {
  return core->cut.laid ? keys.begin % MHA_KEY_BLOCK : 0;
}

/* ---- where keys lie ---- */

/* An entry's keys may begin and end within a block. */
static int64_t blocks_per_entry(int64_t span) {
  return span / MHA_KEY_BLOCK + 2;
}

/* Blocks of one key head; those of packed sequences are slots. */
static bool block_count(const mha_cut_sizes *s, int64_t *blocks) {
  if (s->packed && !s->cached)
    return mha_add(s->span / MHA_KEY_BLOCK, s->B, blocks);
  return mha_multiply(s->B, blocks_per_entry(s->span), blocks);
}

size_t mha_laid_plan(const mha_cut_sizes *s, mha_layout *layout) {
  int64_t blocks = 0;
  int64_t numbers = 0;
  layout->overflow |= !block_count(s, &blocks) || !mha_multiply(blocks, MHA_KEY_BLOCK, &numbers);
  return mha_layout_add(layout, sizeof(float), numbers, s->G, s->d);
}

static int64_t first_block(const mha_core *core, int64_t b) {
  const mha_visibility *v = &core->visibility;
  return v->key_starts && !v->cached ? mha_slot_first(v->key_starts, MHA_KEY_BLOCK, b)
                                     : b * blocks_per_entry(mha_key_span(v));
}

/* The block of entry b and key head g that holds key j. */
static float *block_at(const mha_core *core, int64_t b, int64_t g, int64_t j) {
  const int64_t first = mha_present_keys(&core->visibility, b).begin / MHA_KEY_BLOCK;
  const int64_t index = first_block(core, b) + j / MHA_KEY_BLOCK - first;
  return core->laid.keys + (g * core->laid.blocks + index) * MHA_KEY_BLOCK * core->d;
}

void mha_laid_use(mha_core *core, const mha_kernels *kernels, const mha_laid_strides *strides,
                  float *keys) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  const mha_kernel_shape scores = score_shape(core->d, strides->q, MHA_KEY_BLOCK);
  const mha_kernel_shape narrow = score_shape(core->d, strides->q, MHA_NARROW_BLOCK);
  mha_laid *laid = &core->laid;
  laid->keys = keys;
  (void)block_count(&sizes, &laid->blocks);
  laid->scores = mha_kernels_find(kernels, &scores);
  laid->narrow_scores = mha_kernels_find(kernels, &narrow);
  for (int step = 0; step < MHA_VALUE_KERNELS; step++) {
    const mha_kernel_shape lying = value_shape(core->dv, strides->v, step);
    const mha_kernel_shape dense = value_shape(core->dv, core->dv, step);
    laid->values[step] = mha_kernels_find(kernels, &lying);
    laid->copied_values[step] = mha_kernels_find(kernels, &dense);
  }
}

/* ---- laying out ---- */

/* Lays out at most a block of rows [keys][d]: columns of the block. */
static void lay_out_rows(float *columns, const mha_stored *rows) {
  enum { PIECE = 2 * MHA_BLOCK };
  float scratch[MHA_KEY_BLOCK * PIECE];
  for (int64_t c = 0; c < rows->columns; c += PIECE) {
    const mha_stored piece = mha_stored_columns(*rows, c, mha_min(rows->columns - c, PIECE));
    const mha_view x = mha_numbers_fetch(&piece, scratch);
    mha_vector_transpose(columns + c * MHA_KEY_BLOCK, MHA_KEY_BLOCK, x.data, x.row_stride, x.rows,
                         x.columns);
  }
}

/* Lays out the keys of one block, all of key head g. Columns without a key are 0. */
static void lay_out_block(const mha_core *core, int64_t b, int64_t g, mha_range keys) {
  const mha_visibility *v = &core->visibility;
  float *block = block_at(core, b, g, keys.begin);
  if (keys.end - keys.begin < MHA_KEY_BLOCK)
    memset(block, 0, (size_t)(MHA_KEY_BLOCK * core->d) * sizeof *block);
  for (int64_t begin = keys.begin; begin < keys.end;) {
    const int64_t n = mha_min(keys.end - begin, mha_core_run(core, begin));
    const mha_range run = {begin, begin + n};
    const mha_stored stored = mha_core_rows(core, &core->k, b, g * (v->H / core->G), run, core->d);
    lay_out_rows(block + begin % MHA_KEY_BLOCK, &stored);
    begin = run.end;
  }
}

static int64_t entry_of(const mha_core *core, int64_t block) {
  const mha_visibility *v = &core->visibility;
  return v->key_starts && !v->cached ? mha_slot_owner(v->key_starts, MHA_KEY_BLOCK, v->B, block)
                                     : block / blocks_per_entry(mha_key_span(v));
}

/* One task: a block of keys, all key heads, in the order in which rows lie. */
static mha_status lay_out_task(void *job, int64_t index, int32_t worker) {
  (void)worker;
  const mha_core *core = job;
  const int64_t b = entry_of(core, index);
  const mha_range present = mha_present_keys(&core->visibility, b);
  const int64_t first = present.begin / MHA_KEY_BLOCK + index - first_block(core, b);
  const mha_range block = {first * MHA_KEY_BLOCK, (first + 1) * MHA_KEY_BLOCK};
  const mha_range keys = mha_range_intersect(block, present);
  const bool used = !mha_range_is_empty(keys) && mha_core_serves(core, b);
  for (int64_t g = 0; used && g < core->G; g++)
    lay_out_block(core, b, g, keys);
  return MHA_OK;
}

mha_status mha_laid_keys(const mha_core *core, const mha_threads *threads) {
  mha_core job = *core;
  const double numbers = (double)core->laid.blocks * (double)(MHA_KEY_BLOCK * core->d);
  const mha_task_list list = {.work = lay_out_task,
                              .job = &job,
                              .n_tasks = core->visibility.B > 0 ? core->laid.blocks : 0,
                              .operations = MHA_OPERATIONS_PER_READ * numbers * (double)core->G};
  return mha_parallel_run(threads, &list);
}

/* ---- products ---- */

void mha_laid_scores(const mha_core *core, const mha_block *block, mha_range keys) {
  const int64_t g = block->h / (core->visibility.H / core->G);
  const mha_view q = mha_core_queries(core, block->b, block->h, block->i, block->n);
  float *scores = block->scores - mha_laid_column(core, keys);
  for (int64_t j = keys.begin - keys.begin % MHA_KEY_BLOCK; j < keys.end; j += MHA_KEY_BLOCK) {
    const bool narrow = keys.end - j <= MHA_NARROW_BLOCK;
    mha_kernel_run(narrow ? core->laid.narrow_scores : core->laid.scores, q.rows, q.data,
                   block_at(core, block->b, g, j), scores);
    scores += MHA_KEY_BLOCK;
  }
}

/* The keys of a tile as a sum of powers of two, the largest as often as it fits. */
void mha_laid_accumulate(const mha_core *core, const mha_block *block, mha_range keys,
                         const mha_stored *copy) {
  const float *scores = block->scores;
  int64_t left = keys.end - keys.begin;
  const bool lies = !copy && core->v.element == MHA_F32 && !mha_core_is_scattered(core, keys);
  const mha_kernel *const *kernels = lies ? core->laid.values : core->laid.copied_values;
  const float *values =
      copy
          ? mha_numbers_fetch(copy, block->fetched).data
          : mha_core_fetch(core, &core->v, block->b, block->h, keys, core->dv, block->fetched).data;
  for (int step = MHA_VALUE_KERNELS - 1; step >= 0; step--)
    for (const int64_t n = (int64_t)1 << step; left >= n; left -= n) {
      mha_kernel_run(kernels[step], block->n, scores, values, block->output);
      values += n * kernels[step]->shape.b_stride;
      scores += n;
    }
}
