/* Owns the normalisation of Q and K: x / sqrt(mean(x²) + eps)·weight ("Root Mean Square Layer
 * Normalization", 2019). */
#include "norm.h"

#include <math.h>

/* In double: squares of large floats overflow, and long rows would add up rounding errors. */
enum { LANES = 8 };

static double sum_of_squares(const float *x, int64_t n) {
  double lanes[LANES] = {0};
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES)
    for (int k = 0; k < LANES; k++)
      lanes[k] += (double)x[j + k] * (double)x[j + k];
  double sum = 0.0;
  for (; j < n; j++)
    sum += (double)x[j] * (double)x[j];
  for (int k = 0; k < LANES; k++)
    sum += lanes[k];
  return sum;
}

static void normalise(float *x, int64_t n, const float *weight, float epsilon) {
  const double mean = sum_of_squares(x, n) / (double)n;
  const float factor = (float)(1.0 / sqrt(mean + (double)epsilon));
  for (int64_t j = 0; j < n; j++)
    x[j] = x[j] * factor * (weight ? weight[j] : 1.0f);
}

void mha_norm_row(const mha_config *config, const float *weight, int64_t heads, float *row) {
  const int64_t d = config->head_size;
  if (config->norm == MHA_NORM_FULL)
    normalise(row, heads * d, weight, config->norm_epsilon);
  for (int64_t h = 0; config->norm == MHA_NORM_PER_HEAD && h < heads; h++)
    normalise(row + h * d, d, weight, config->norm_epsilon);
}
