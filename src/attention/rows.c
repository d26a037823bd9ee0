/* Owns the softmax of a task's rows ("Online normalizer calculation for softmax", 2018): keys come
 * in tiles, and what was accumulated under an older maximum is multiplied by exp(m_old - m_new). */
#include "rows.h"

#include "engine/softmax.h"
#include "poison.h"

#include <math.h>
#include <string.h>

static float *output_row(const mha_rows *rows, int64_t k, int64_t r) {
  const mha_block *q = &rows->block;
  return q->output + k * q->output_head_stride + r * q->output_row_stride;
}

void mha_rows_start(const mha_rows *rows) {
  for (int64_t k = 0; k < rows->block.heads; k++)
    for (int64_t r = 0; r < rows->block.n; r++) {
      const int64_t index = k * rows->block.n + r;
      rows->max[index] = -INFINITY;
      rows->sum[index] = 0.0f;
      rows->poison[index] = -INFINITY;
      memset(output_row(rows, k, r), 0, (size_t)rows->core->dv * sizeof(float));
    }
}

/* ---- one tile ---- */

/* Final scores of row (k, r) for the keys it may see within the tile `keys`; returns those keys. */
static mha_range finish_scores(const mha_rows *rows, int64_t k, int64_t r, mha_range keys,
                               float *row) {
  const mha_visibility *v = &rows->core->visibility;
  const mha_block *q = &rows->block;
  const mha_range mine = mha_range_intersect(mha_visible_keys(v, q->b, q->i + r), keys);
  if (mha_range_is_empty(mine))
    return mine;
  mha_core_advance_scores(rows->core, MHA_STAGE_FINAL, q->b, q->h + k, q->i + r, mine,
                          row + (mine.begin - keys.begin));
  return mine;
}

static void clear_hidden(float *row, mha_range keys, mha_range mine) {
  if (mha_range_is_empty(mine)) {
    memset(row, 0, (size_t)(keys.end - keys.begin) * sizeof *row);
    return;
  }
  memset(row, 0, (size_t)(mine.begin - keys.begin) * sizeof *row);
  memset(row + (mine.end - keys.begin), 0, (size_t)(keys.end - mine.end) * sizeof *row);
}

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
static void advance_statistics(const mha_rows *rows, int64_t row, float *scores, int64_t n) {
  const float before = rows->max[row];
  const float tile_max = visible_max(scores, n);
  const float now = tile_max > before || isnan(tile_max) ? tile_max : before;
  if (now == -INFINITY) { /* nothing visible so far: exp(-inf - -inf) would be NaN */
    memset(scores, 0, (size_t)n * sizeof *scores);
    return;
  }
  if (!(now == before))
    rows->correction[row] = before == -INFINITY ? 0.0f : mha_exp(before - now);
  rows->sum[row] = rows->sum[row] * rows->correction[row] + mha_row_exp(scores, n, now);
  rows->max[row] = now;
}

/* Brings what was accumulated to the row's new maximum. What overflowed under a maximum that counts
 * for nothing now is gone; in the first attempt it could also be a NaN that the row sees. */
static void correct_output(const mha_rows *rows, int64_t index, float *output) {
  const float correction = rows->correction[index];
  if (correction == 0.0f && rows->kinds)
    memset(output, 0, (size_t)rows->core->dv * sizeof *output);
  else if (correction != 1.0f)
    mha_row_scale(output, rows->core->dv, correction);
}

static void advance_row(const mha_rows *rows, int64_t k, int64_t r, mha_range keys, float *row) {
  const int64_t index = k * rows->block.n + r;
  const mha_range mine = finish_scores(rows, k, r, keys, row);
  clear_hidden(row, keys, mine);
  if (mha_range_is_empty(mine))
    return;
  float *scores = row + (mine.begin - keys.begin);
  if (rows->kinds)
    mha_poison_remember(&rows->poison[index], rows->kinds + (mine.begin - keys.begin), scores,
                        mine.end - mine.begin);
  rows->correction[index] = 1.0f;
  advance_statistics(rows, index, scores, mine.end - mine.begin);
  correct_output(rows, index, output_row(rows, k, r));
}

void mha_rows_advance(const mha_rows *rows, const mha_block *tile, mha_range keys) {
  for (int64_t k = 0; k < tile->heads; k++)
    for (int64_t r = 0; r < tile->n; r++)
      advance_row(rows, tile->h - rows->block.h + k, tile->i - rows->block.i + r, keys,
                  tile->scores + (k * tile->n + r) * tile->score_stride);
}

/* ---- the end ---- */

bool mha_rows_are_suspect(const mha_rows *rows, int64_t live) {
  for (int64_t k = 0; k < rows->block.heads; k++)
    for (int64_t r = 0; r < live; r++) {
      const int64_t index = k * rows->block.n + r;
      if (isfinite(rows->sum[index]) && isfinite(rows->max[index]) &&
          !mha_row_is_finite(output_row(rows, k, r), rows->core->dv))
        return true;
    }
  return false;
}

/* A sink far above the row's maximum makes l infinite and O 0, as it should. */
void mha_rows_finish_one(const mha_core *core, int64_t h, float max, float sum, float poison,
                         float *output) {
  if (max == -INFINITY) {
    memset(output, 0, (size_t)core->dv * sizeof *output);
    return;
  }
  const float denominator = mha_core_denominator(core, h, max, sum);
  mha_row_scale(output, core->dv, 1.0f / denominator);
  if (mha_poison_counts(poison, max, denominator))
    for (int64_t c = 0; c < core->dv; c++)
      output[c] = NAN;
}

void mha_rows_finish(const mha_rows *rows) {
  const mha_block *q = &rows->block;
  for (int64_t k = 0; k < q->heads; k++)
    for (int64_t r = 0; r < q->n; r++) {
      const int64_t index = k * q->n + r;
      mha_rows_finish_one(rows->core, q->h + k, rows->max[index], rows->sum[index],
                          rows->poison[index], output_row(rows, k, r));
    }
}
