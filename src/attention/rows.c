/* Owns the softmax of a task's rows ("Online normalizer calculation for softmax", 2018): keys come
 * in tiles, and what was accumulated under an older maximum is multiplied by exp(m_old - m_new). */
#include "rows.h"

#include "dropout.h"
#include "engine/softmax.h"
#include "engine/vector.h"
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

/* Largest visible score, `factor` included. NaN if NaN is visible and nothing else is: such a row
 * is not empty. */
static float visible_max(const float *scores, int64_t n, float factor) {
  const float max = factor * mha_row_max(scores, n);
  if (max == -INFINITY)
    for (int64_t j = 0; j < n; j++)
      if (isnan(scores[j]))
        return NAN;
  return max;
}

/* A tile of a row in one pass takes the maximum so far as if the tile could not exceed it, and
 * looks for the tile's own on the way. If that rises, what was made is brought down to it; unless
 * it rises so far that exp may have overflowed: then the scores, of which a copy is kept, take two
 * passes. Of larger scores half a unit in the last place, by which an unrounded product may exceed
 * them, would show in exp. Under ALiBi scores rise from tile to tile. */
#define LARGEST_RISE         60.0f
#define LARGEST_FOR_ONE_PASS 1e6f

/* Replaces the visible scores of a row, of which `factor` > 0 is missing, by exp(score - m) and
 * brings m, l and the correction of what was accumulated before up to date. */
static void advance_in_two_passes(const mha_rows *rows, int64_t row, float factor, float *scores,
                                  int64_t n) {
  const float before = rows->max[row];
  const float tile_max = visible_max(scores, n, factor);
  const float now = tile_max > before || isnan(tile_max) ? tile_max : before;
  if (now == -INFINITY) { /* nothing visible so far: exp(-inf - -inf) would be NaN */
    memset(scores, 0, (size_t)n * sizeof *scores);
    return;
  }
  if (!(now == before))
    rows->correction[row] = before == -INFINITY ? 0.0f : mha_exp(before - now);
  rows->sum[row] = rows->sum[row] * rows->correction[row] + mha_row_exp(scores, n, factor, now);
  rows->max[row] = now;
}

/* The same for a finite m; false, and the scores are as they were, if it rises too far. */
static bool advance_in_one_pass(const mha_rows *rows, int64_t row, float factor, float *scores,
                                int64_t n) {
  const float before = rows->max[row];
  float largest = 0.0f;
  memcpy(rows->spare, scores, (size_t)n * sizeof *scores);
  const float sum = mha_row_exp_max(scores, n, factor, before, &largest);
  const float now = factor * largest;
  if (now - before > LARGEST_RISE) {
    memcpy(scores, rows->spare, (size_t)n * sizeof *scores);
    return false;
  }
  rows->sum[row] += sum;
  if (now > before) {
    rows->correction[row] = mha_exp(before - now);
    rows->sum[row] *= rows->correction[row];
    rows->max[row] = now;
    mha_row_lower(scores, n, rows->correction[row]);
  }
  return true;
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

static bool takes_one_pass(const mha_rows *rows, int64_t index) {
  return fabsf(rows->max[index]) <= LARGEST_FOR_ONE_PASS && !rows->core->visibility.alibi_slopes;
}

/* Drops weights of row (k, r), after their sum was taken. */
static void drop(const mha_rows *rows, int64_t k, int64_t r, mha_range keys, float *weights) {
  const mha_block *q = &rows->block;
  if (rows->core->dropout.threshold == 0)
    return;
  mha_dropout_factors(rows->core, q->b, q->h + k, q->i + r, keys, rows->spare);
  mha_vector_weigh(weights, rows->spare, 1.0f, keys.end - keys.begin);
}

/* Row (k, r) over the scores of the keys `mine` that it sees of the tile `keys`. */
static void advance_visible(const mha_rows *rows, int64_t k, int64_t r, float factor, float *scores,
                            mha_range keys, mha_range mine) {
  const int64_t index = k * rows->block.n + r;
  const int64_t n = mine.end - mine.begin;
  if (rows->kinds)
    mha_poison_remember(&rows->poison[index], rows->kinds + (mine.begin - keys.begin), factor,
                        scores, n);
  rows->correction[index] = 1.0f;
  if (!takes_one_pass(rows, index) || !advance_in_one_pass(rows, index, factor, scores, n))
    advance_in_two_passes(rows, index, factor, scores, n);
  correct_output(rows, index, output_row(rows, k, r));
  drop(rows, k, r, mine, scores);
}

static void advance_row(const mha_rows *rows, int64_t k, int64_t r, mha_range keys, float *row) {
  const mha_range mine = finish_scores(rows, k, r, keys, row);
  clear_hidden(row, keys, mine);
  if (mha_range_is_empty(mine))
    return;
  advance_visible(rows, k, r, 1.0f, row + (mine.begin - keys.begin), keys, mine);
}

/* Whether scores become nothing but weights: every row of the tile sees all of its keys, no rule
 * changes one, and the scale keeps their order. Both ends of what a row sees do not decrease. */
static bool is_plain(const mha_rows *rows, const mha_block *tile, mha_range keys) {
  const mha_visibility *v = &rows->core->visibility;
  return mha_core_scores_are_plain(rows->core) && mha_core_score_factor(rows->core) > 0.0f &&
         mha_visible_keys(v, tile->b, tile->i).end >= keys.end &&
         mha_visible_keys(v, tile->b, tile->i + tile->n - 1).begin <= keys.begin;
}

void mha_rows_advance(const mha_rows *rows, const mha_block *tile, mha_range keys) {
  const bool plain = is_plain(rows, tile, keys);
  const float factor = mha_core_score_factor(rows->core);
  for (int64_t k = 0; k < tile->heads; k++)
    for (int64_t r = 0; r < tile->n; r++) {
      const int64_t head = tile->h - rows->block.h + k;
      const int64_t query = tile->i - rows->block.i + r;
      float *row = tile->scores + (k * tile->n + r) * tile->score_stride;
      if (plain)
        advance_visible(rows, head, query, factor, row, keys, keys);
      else
        advance_row(rows, head, query, keys, row);
    }
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
      float *row = output_row(rows, k, r);
      float *place = mha_core_output(rows->core, q->b, q->h + k, q->i + r);
      mha_rows_finish_one(rows->core, q->h + k, rows->max[index], rows->sum[index],
                          rows->poison[index], row);
      if (row != place)
        memcpy(place, row, (size_t)rows->core->dv * sizeof *place);
    }
}
