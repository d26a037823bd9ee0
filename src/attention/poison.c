/* Owns values that are not finite. A hidden key has weight 0, but the product P·V turns 0·NaN into
 * NaN. If a row comes out non-finite although its scores were not, its task is done again: in each
 * tile the non-finite rows of V are replaced by 0, the shapes staying the same and so every other
 * bit, and rows that see one of them become NaN at the end. */
#include "poison.h"

#include "base/arithmetic.h"
#include "engine/softmax.h"

#include <math.h>
#include <string.h>

/* The BLAS must take the same way through the copy as through V itself. OpenBLAS's sgemv has one of
 * its own for matrices of at most three columns without gaps between their rows; beyond that, bits
 * do not depend on the leading dimension. So the copy has gaps where V has, but not where V is
 * copied as well, nor for kernels, whose bits never do. */
static int64_t copy_stride(const mha_core *core, mha_range keys) {
  const bool gathered = !core->cut.few && mha_core_is_scattered(core, keys);
  const bool by_blas = !core->cut.laid && core->v.element == MHA_F32;
  return by_blas && !gathered && core->v.row_stride != core->dv ? core->dv + 1 : core->dv;
}

static uint8_t value_kind(const float *row, int64_t n) {
  if (mha_row_is_finite(row, n))
    return MHA_VALUE_FINITE;
  for (int64_t c = 0; c < n; c++)
    if (isnan(row[c]))
      return MHA_VALUE_NAN;
  return MHA_VALUE_INFINITE;
}

/* The kind of a row of V as it is stored. */
static uint8_t stored_kind(const void *row, int32_t element, int64_t n) {
  enum { PIECE = 8 * MHA_BLOCK };
  float piece[PIECE];
  uint8_t kind = MHA_VALUE_FINITE;
  if (element == MHA_F32)
    return value_kind(row, n);
  for (int64_t c = 0; c < n; c += PIECE) {
    const int64_t m = mha_min(n - c, PIECE);
    mha_numbers_widen(piece, mha_element_at(row, element, c), element, m);
    const uint8_t here = value_kind(piece, m);
    kind = here > kind ? here : kind;
  }
  return kind;
}

/* Rows that follow one another; those of the copy are step_bytes apart. */
static void replace_rows(const mha_stored *v, char *to, size_t step_bytes, uint8_t *kinds) {
  const size_t row_bytes = mha_element_bytes(v->element, v->columns);
  for (int64_t j = 0; j < v->rows; j++, to += step_bytes) {
    const void *from = mha_element_at(v->data, v->element, j * v->row_stride);
    kinds[j] = stored_kind(from, v->element, v->columns);
    if (kinds[j] == MHA_VALUE_FINITE)
      memcpy(to, from, row_bytes);
    else
      memset(to, 0, row_bytes); /* 0 in every type */
  }
}

mha_stored mha_poison_replace(const mha_core *core, const mha_block *block, mha_range keys,
                              void *values, uint8_t *kinds) {
  const int64_t n = keys.end - keys.begin;
  const mha_stored copy = {values, core->v.element, n, core->dv, copy_stride(core, keys), 1};
  const size_t step_bytes = mha_element_bytes(copy.element, copy.row_stride);
  int64_t done = 0;
  for (mha_range run = {keys.begin, keys.begin}; run.begin < keys.end; run.begin = run.end) {
    run.end = run.begin + mha_min(keys.end - run.begin, mha_core_run(core, run.begin));
    const mha_stored v = mha_core_rows(core, &core->v, block->b, block->h, run, core->dv);
    replace_rows(&v, (char *)values + (size_t)done * step_bytes, step_bytes, kinds + done);
    done += v.rows;
  }
  return copy;
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
