/* Owns the way back to a call's scores: products and rules as before, then from each row's maximum
 * and sum
 *
 *   P = exp(S - max) / denominator       [rows][keys] of a tile */
#include "recompute.h"

#include "engine/softmax.h"

#include <math.h>
#include <string.h>

float mha_recompute_hidden(mha_stage stage) {
  return stage == MHA_STAGE_WEIGHTS ? 0.0f : -INFINITY;
}

bool mha_recompute_shows_all(mha_stage stage) {
  return stage == MHA_STAGE_SCALED || stage == MHA_STAGE_CAPPED;
}

mha_range mha_recompute_shown(const mha_core *core, mha_stage stage, int64_t b, int64_t i) {
  const mha_visibility *v = &core->visibility;
  const mha_range none = {0, 0};
  if (!mha_recompute_shows_all(stage))
    return mha_visible_keys(v, b, i);
  return i < mha_query_count(v, b) ? mha_present_keys(v, b) : none;
}

static void weights_from_scores(const mha_core *core, int64_t h, int64_t index, float *row,
                                int64_t n) {
  const float max = core->row_max[index];
  if (max == -INFINITY) { /* an empty row, though a range of keys was left to it */
    memset(row, 0, (size_t)n * sizeof *row);
    return;
  }
  const float sum = mha_core_denominator(core, h, max, core->row_sum[index]);
  if (isnan(sum)) { /* a NaN or +inf score: every visible weight is NaN, hidden ones stay 0 */
    for (int64_t j = 0; j < n; j++)
      row[j] = row[j] == -INFINITY ? 0.0f : NAN;
    return;
  }
  (void)mha_row_exp(row, n, 1.0f, max);
  mha_row_scale(row, n, 1.0f / sum);
}

/* Brings scaled scores of query r of head k of the block to a stage. */
static void advance_row(const mha_core *core, const mha_block *block, int64_t k, int64_t r,
                        mha_range keys, mha_stage stage, float *row) {
  const int64_t h = block->h + k;
  const int64_t i = block->i + r;
  mha_core_advance_scores(core, stage, block->b, h, i, keys, row);
  if (stage == MHA_STAGE_WEIGHTS)
    weights_from_scores(core, h, mha_core_row_index(core, block->b, h, i), row,
                        keys.end - keys.begin);
}

static void hide(float *row, int64_t begin, int64_t end, float value) {
  for (int64_t j = begin; j < end; j++)
    row[j] = value;
}

mha_status mha_recompute_tile(const mha_core *core, const mha_block *block, mha_range keys,
                              mha_stage stage) {
  const float hidden = mha_recompute_hidden(stage);
  const mha_status status = mha_block_scores(core, block, keys);
  for (int64_t k = 0; !status && k < block->heads; k++)
    for (int64_t r = 0; r < block->n; r++) {
      float *row = block->scores + (k * block->n + r) * block->score_stride;
      mha_range mine = mha_recompute_shown(core, stage, block->b, block->i + r);
      mine = mha_range_intersect(mine, keys);
      if (mha_range_is_empty(mine))
        mine.begin = mine.end = keys.begin;
      advance_row(core, block, k, r, mine, stage, row + (mine.begin - keys.begin));
      hide(row, 0, mine.begin - keys.begin, hidden);
      hide(row, mine.end - keys.begin, keys.end - keys.begin, hidden);
    }
  return status;
}
