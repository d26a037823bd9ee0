/* Owns the normalisation of Q and K: y = x·f·weight, f = 1/sqrt(mean(x²) + eps) ("Root Mean Square
 * Layer Normalization", 2019). With g = dy∘weight its way back is
 *
 *   dx = f·(g - x·f²·mean(g∘x)),  dweight = Σ dy∘x·f                                        */
#include "norm.h"

#include "engine/derivative.h"
#include "engine/softmax.h"
#include "engine/vector.h"

#include <math.h>
#include <stdbool.h>

static double find_factor(const float *x, int64_t n, float epsilon) {
  return 1.0 / sqrt(mha_vector_squares(x, n) / (double)n + (double)epsilon);
}

static void normalise(float *x, int64_t n, const float *weight, float epsilon) {
  const float factor = (float)find_factor(x, n, epsilon);
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

static bool is_zero(const float *row, int64_t n) {
  for (int64_t c = 0; c < n; c++)
    if (row[c] != 0.0f)
      return false;
  return true;
}

static void normalise_back(const float *x, int64_t n, const float *weight, float epsilon, float *dy,
                           double *sums) {
  if (is_zero(dy, n))
    return;
  const double factor = find_factor(x, n, epsilon);
  if (sums)
    mha_vector_gather_products(sums, dy, x, factor, n);
  if (weight)
    mha_vector_weigh(dy, weight, 1.0f, n);
  const double mean = mha_row_dot(dy, x, n) / (double)n;
  mha_row_scale(dy, n, (float)factor);
  mha_vector_add_scaled(dy, x, (float)(-factor * factor * factor * mean), n);
}

void mha_norm_row_back(const mha_config *config, const float *weight, int64_t heads, const float *x,
                       float *gradient, double *sums) {
  const int64_t d = config->head_size;
  if (config->norm == MHA_NORM_FULL)
    normalise_back(x, heads * d, weight, config->norm_epsilon, gradient, sums);
  for (int64_t h = 0; config->norm == MHA_NORM_PER_HEAD && h < heads; h++)
    normalise_back(x + h * d, d, weight, config->norm_epsilon, gradient + h * d, sums);
}
