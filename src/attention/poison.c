/* Owns values that are not finite. A hidden key has weight 0, but the product P·V turns 0·NaN into
 * NaN. If a row comes out non-finite although its scores were not, its task is done again: in each
 * tile the non-finite rows of V are replaced by 0, the shapes staying the same and so every other
 * bit, and rows that see one of them become NaN at the end. */
#include "poison.h"

#include "engine/softmax.h"

#include <math.h>
#include <string.h>

/* The BLAS must take the same way through the copy as through V itself. OpenBLAS's sgemv has one of
 * its own for matrices of at most three columns without gaps between their rows; beyond that, bits
 * do not depend on the leading dimension. So the copy has gaps where V has, but for
 * kernels, whose bits never do. */
int64_t mha_poison_stride(const mha_core *core) {
  return core->cut.laid || core->v.row_stride == core->dv ? core->dv : core->dv + 1;
}

static uint8_t value_kind(const float *row, int64_t n) {
  if (mha_row_is_finite(row, n))
    return MHA_VALUE_FINITE;
  for (int64_t c = 0; c < n; c++)
    if (isnan(row[c]))
      return MHA_VALUE_NAN;
  return MHA_VALUE_INFINITE;
}

void mha_poison_replace(const mha_core *core, const mha_block *block, mha_range keys, float *values,
                        uint8_t *kinds) {
  const mha_stored stored = mha_core_rows(core, &core->v, block->b, block->h, keys, core->dv);
  const mha_view v = mha_numbers_fetch(&stored, block->fetched);
  for (int64_t j = 0; j < v.rows; j++) {
    const float *from = v.data + j * v.row_stride;
    float *to = values + j * mha_poison_stride(core);
    kinds[j] = value_kind(from, v.columns);
    if (kinds[j] == MHA_VALUE_FINITE)
      memcpy(to, from, (size_t)v.columns * sizeof *to);
    else
      memset(to, 0, (size_t)v.columns * sizeof *to);
  }
}

void mha_poison_remember(float *poison, const uint8_t *kinds, float factor, const float *scores,
                         int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    const float score = factor * scores[j];
    if (kinds[j] == MHA_VALUE_FINITE || score == -INFINITY)
      continue;
    const float counts = kinds[j] == MHA_VALUE_NAN ? INFINITY : score;
    if (counts > *poison)
      *poison = counts;
  }
}

bool mha_poison_counts(float poison, float max, float denominator) {
  return poison == INFINITY || (poison > -INFINITY && mha_exp(poison - max) / denominator > 0.0f);
}
