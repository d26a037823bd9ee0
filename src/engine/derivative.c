/* Owns the row kernels of the way back: the derivatives of softmax, softcap and ALiBi. Plain C
 * loops that compilers vectorise, once per x86-64 level. */
#include "derivative.h"

#include "clones.h"

#include <float.h>
#include <math.h>

static inline float flushed(float x) {
  return fabsf(x) < FLT_MIN ? 0.0f : x; /* NaN stays */
}

enum { LANES = 8 };

static inline double add_lanes(const double lanes[LANES], double rest) {
  double sum = rest;
  for (int k = 0; k < LANES; k++)
    sum += lanes[k];
  return sum;
}

MHA_CLONES double mha_row_sum(const float *row, int64_t n) {
  double lanes[LANES] = {0};
  double rest = 0.0;
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES)
    for (int k = 0; k < LANES; k++)
      lanes[k] += (double)row[j + k];
  for (; j < n; j++)
    rest += (double)row[j];
  return add_lanes(lanes, rest);
}

MHA_CLONES void mha_row_softcap_back(float *restrict gradient, const float *restrict capped,
                                     float cap, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    const float t = capped[j] / cap;
    const float g = flushed(gradient[j] * (1.0f - t * t));
    gradient[j] = gradient[j] == 0.0f ? 0.0f : g;
  }
}

MHA_CLONES void mha_row_multiply(float *restrict row, const float *restrict factors, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    const float product = row[j] * factors[j];
    row[j] = row[j] == 0.0f || factors[j] == 0.0f ? 0.0f : product;
  }
}

MHA_CLONES double mha_row_alibi_back(const float *gradient, float first, int64_t n) {
  double lanes[LANES] = {0};
  double rest = 0.0;
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES)
    for (int k = 0; k < LANES; k++)
      lanes[k] += (double)gradient[j + k] * fabs((double)first + (double)(j + k));
  for (; j < n; j++)
    rest += (double)gradient[j] * fabs((double)first + (double)j);
  return add_lanes(lanes, rest);
}

MHA_CLONES double mha_row_dot(const float *a, const float *b, int64_t n) {
  double lanes[LANES] = {0};
  double rest = 0.0;
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES)
    for (int k = 0; k < LANES; k++)
      lanes[k] += (double)a[j + k] * (double)b[j + k];
  for (; j < n; j++)
    rest += (double)a[j] * (double)b[j];
  return add_lanes(lanes, rest);
}
