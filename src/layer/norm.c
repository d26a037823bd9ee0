/* Owns the normalisation of Q and K: x / sqrt(mean(x²) + eps)·weight ("Root Mean Square Layer
 * Normalization", 2019). */
#include "norm.h"

#include "engine/softmax.h"
#include "engine/vector.h"

#include <math.h>

static void normalise(float *x, int64_t n, const float *weight, float epsilon) {
  const double mean = mha_vector_squares(x, n) / (double)n;
  const float factor = (float)(1.0 / sqrt(mean + (double)epsilon));
  if (weight)
    mha_vector_weigh(x, weight, factor, n);
  else
    mha_row_scale(x, n, factor);
}

void mha_norm_row(const mha_config *config, const float *weight, int64_t heads, float *row) {
  const int64_t d = config->head_size;
  if (config->norm == MHA_NORM_FULL)
    normalise(row, heads * d, weight, config->norm_epsilon);
  for (int64_t h = 0; config->norm == MHA_NORM_PER_HEAD && h < heads; h++)
    normalise(row + h * d, d, weight, config->norm_epsilon);
}
