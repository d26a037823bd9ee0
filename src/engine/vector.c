/* Owns the row kernels of a layer: sums, normalisation, turns. Plain C loops that compilers
 * vectorise, once per x86-64 level. */
#include "vector.h"

#include "clones.h"

#include <string.h>

MHA_CLONES void mha_vector_add(float *restrict y, const float *restrict x, int64_t n) {
  for (int64_t j = 0; j < n; j++)
    y[j] += x[j];
}

void mha_vector_start_rows(float beta, float *y, int64_t rows, int64_t columns, int64_t y_stride) {
  for (int64_t r = 0; beta != 1.0f && r < rows; r++) {
    float *row = y + r * y_stride;
    if (beta == 0.0f)
      memset(row, 0, (size_t)columns * sizeof *row);
    else
      for (int64_t c = 0; c < columns; c++)
        row[c] *= beta;
  }
}

MHA_CLONES void mha_vector_add_scaled(float *restrict y, const float *restrict x, float factor,
                                      int64_t n) {
  for (int64_t j = 0; j < n; j++)
    y[j] += factor * x[j];
}

MHA_CLONES void mha_vector_gather(double *restrict sums, const float *restrict x, double factor,
                                  int64_t n) {
  for (int64_t j = 0; j < n; j++)
    sums[j] += factor * (double)x[j];
}

MHA_CLONES void mha_vector_gather_products(double *restrict sums, const float *restrict x,
                                           const float *restrict y, double factor, int64_t n) {
  for (int64_t j = 0; j < n; j++)
    sums[j] += factor * (double)x[j] * (double)y[j];
}

enum { LANES = 8 };

MHA_CLONES double mha_vector_squares(const float *x, int64_t n) {
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

MHA_CLONES void mha_vector_weigh(float *restrict x, const float *restrict weight, float factor,
                                 int64_t n) {
  for (int64_t j = 0; j < n; j++)
    x[j] = x[j] * factor * weight[j];
}

MHA_CLONES void mha_vector_transpose(float *restrict y, int64_t y_stride, const float *restrict x,
                                     int64_t x_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++)
      y[c * y_stride + r] = x[r * x_stride + c];
}

MHA_CLONES void mha_vector_turn_halves(float *restrict a, float *restrict b,
                                       const float *restrict cosine, const float *restrict sine,
                                       int64_t n) {
  for (int64_t p = 0; p < n; p++) {
    const float x = a[p];
    const float y = b[p];
    a[p] = x * cosine[p] - y * sine[p];
    b[p] = y * cosine[p] + x * sine[p];
  }
}

MHA_CLONES void mha_vector_turn_neighbours(float *restrict pairs, const float *restrict cosine,
                                           const float *restrict sine, int64_t n) {
  for (int64_t p = 0; p < n; p++) {
    const float x = pairs[2 * p];
    const float y = pairs[2 * p + 1];
    pairs[2 * p] = x * cosine[p] - y * sine[p];
    pairs[2 * p + 1] = y * cosine[p] + x * sine[p];
  }
}
