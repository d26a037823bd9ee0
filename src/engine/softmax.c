/* Owns the row kernels: maximum, exp and sum, softcap, bias, masks. Plain C loops that compilers
 * vectorise; where the toolchain can, each exists once per x86-64 level and the loader picks. */
#include "softmax.h"

#include "clones.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* ---- exp ----
 * For x <= 0: exp(x) = 2^k · exp(r) with k = round(x / ln 2) and r = x - k·ln 2, |r| <= ln 2 / 2.
 * ln 2 is split in two so that k·LN2_HIGH is exact. exp(r) = 1 + r + r²·q(r) with q of degree 4,
 * fitted for the smallest relative error of the whole on that interval: 3.1e-9, below 2^-28. */
#define LOG2_E   1.44269504088896341f
#define LN2_HIGH 0.693359375f
#define LN2_LOW  (-2.12194440e-4f)
/* 1.5·2^23: adding it leaves round(x) in the low bits of the float's pattern. */
#define ROUNDER 12582912.0f
/* ln(FLT_MIN): below it exp is subnormal. */
#define EXP_LOWEST (-87.33654f)

static inline float exponential(float x) {
  const float shifted = x * LOG2_E + ROUNDER;
  const float k = shifted - ROUNDER;
  const float r = (x - k * LN2_HIGH) - k * LN2_LOW;
  float q = 1.3814539e-3f;
  q = q * r + 8.368745e-3f;
  q = q * r + 4.166839e-2f;
  q = q * r + 1.6666521e-1f;
  q = q * r + 4.9999994e-1f;
  q = q * r + 1.0f;
  const float p = q * r + 1.0f;
  uint32_t bits = 0;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + UINT32_C(0x3f800000); /* 2^k: the low bits of `shifted` hold k */
  float power = 0.0f;
  memcpy(&power, &bits, sizeof power);
  return x < EXP_LOWEST ? 0.0f : p * power;
}

float mha_exp(float x) {
  return exponential(x);
}

static inline float max2(float a, float b) {
  return a > b ? a : b; /* b where a is NaN */
}

/* The maximum is bound by latency: in long rows four vectors of lanes keep four comparisons in
 * flight. */
enum { MAX_LANES = 4 * MHA_LANES };

/* Maximum of the first n - n mod MAX_LANES elements, n >= MAX_LANES. */
static inline float max_of_blocks(const float *row, int64_t n) {
  float lanes[MAX_LANES];
  for (int k = 0; k < MAX_LANES; k++)
    lanes[k] = -INFINITY;
  for (int64_t j = 0; j + MAX_LANES <= n; j += MAX_LANES)
    for (int k = 0; k < MAX_LANES; k++)
      lanes[k] = max2(row[j + k], lanes[k]);
  for (int half = MAX_LANES / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++)
      lanes[k] = max2(lanes[k + half], lanes[k]);
  return lanes[0];
}

/* Of n < MAX_LANES elements, and `max`. */
static inline float max_of_rest(const float *row, int64_t n, float max) {
  float lanes[MHA_LANES];
  for (int k = 0; k < MHA_LANES; k++)
    lanes[k] = max;
  int64_t j = 0;
  for (; j + MHA_LANES <= n; j += MHA_LANES)
    for (int k = 0; k < MHA_LANES; k++)
      lanes[k] = max2(row[j + k], lanes[k]);
  for (; j < n; j++)
    max = max2(row[j], max);
  for (int k = 0; k < MHA_LANES; k++)
    max = max2(lanes[k], max);
  return max;
}

MHA_CLONES float mha_row_max(const float *row, int64_t n) {
  const float max = n >= MAX_LANES ? max_of_blocks(row, n) : -INFINITY;
  const int64_t rest = n % MAX_LANES;
  return rest > 0 ? max_of_rest(row + n - rest, rest, max) : max;
}

/* factor·s, rounded before anything is subtracted from it: adding 0 takes up the multiplication
 * that could be fused with the subtraction, so that the largest score gives exactly max. */
static inline float scaled(float factor, float s) {
  return factor * s + 0.0f;
}

MHA_CLONES float mha_row_exp(float *row, int64_t n, float factor, float max) {
  float lanes[MHA_LANES] = {0};
  int64_t j = 0;
  for (; j + MHA_LANES <= n; j += MHA_LANES)
    for (int k = 0; k < MHA_LANES; k++) {
      const float e = exponential(scaled(factor, row[j + k]) - max);
      row[j + k] = e;
      lanes[k] += e;
    }
  float sum = 0.0f;
  for (; j < n; j++) {
    row[j] = exponential(scaled(factor, row[j]) - max);
    sum += row[j];
  }
  for (int half = MHA_LANES / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++)
      lanes[k] += lanes[k + half];
  return sum + lanes[0];
}

MHA_CLONES float mha_row_exp_max(float *row, int64_t n, float factor, float max, float *largest) {
  float sums[MHA_LANES] = {0};
  float tops[MHA_LANES];
  int64_t j = 0;
  for (int k = 0; k < MHA_LANES; k++)
    tops[k] = -INFINITY;
  for (; j + MHA_LANES <= n; j += MHA_LANES)
    for (int k = 0; k < MHA_LANES; k++) {
      const float score = row[j + k];
      const float e = exponential(factor * score - max);
      tops[k] = max2(score, tops[k]);
      row[j + k] = e;
      sums[k] += e;
    }
  for (int half = MHA_LANES / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++) {
      sums[k] += sums[k + half];
      tops[k] = max2(tops[k + half], tops[k]);
    }
  float sum = 0.0f;
  float top = tops[0];
  for (; j < n; j++) {
    top = max2(row[j], top);
    row[j] = exponential(factor * row[j] - max);
    sum += row[j];
  }
  *largest = top;
  return sum + sums[0];
}

static inline float weight_of(float score, float max, float share) {
  const float x = score - max;
  const float weight = exponential(x > 0.0f ? 0.0f : x) * share;
  return weight < FLT_MIN ? 0.0f : weight; /* NaN stays */
}

static inline float gradient_of(float gradient, float weight, float dot) {
  const float g = weight * (gradient - dot);
  return weight == 0.0f || fabsf(g) < FLT_MIN ? 0.0f : g; /* likewise */
}

MHA_CLONES double mha_row_softmax_back(float *restrict scores, float *restrict gradient, int64_t n,
                                       float max, float share, float dot) {
  float lanes[MHA_LANES] = {0};
  double sum = 0.0;
  int64_t j = 0;
  for (; j + MHA_LANES <= n; j += MHA_LANES)
    for (int k = 0; k < MHA_LANES; k++) {
      const float weight = weight_of(scores[j + k], max, share);
      const float g = gradient_of(gradient[j + k], weight, dot);
      scores[j + k] = weight;
      gradient[j + k] = g;
      lanes[k] += g;
    }
  for (; j < n; j++) {
    scores[j] = weight_of(scores[j], max, share);
    gradient[j] = gradient_of(gradient[j], scores[j], dot);
    sum += (double)gradient[j];
  }
  for (int k = 0; k < MHA_LANES; k++)
    sum += (double)lanes[k];
  return sum;
}

MHA_CLONES void mha_row_lower(float *row, int64_t n, float factor) {
  for (int64_t j = 0; j < n; j++) {
    const float lowered = row[j] * factor;
    row[j] = lowered < FLT_MIN ? 0.0f : lowered; /* NaN stays */
  }
}

MHA_CLONES void mha_row_scale(float *row, int64_t n, float factor) {
  for (int64_t j = 0; j < n; j++)
    row[j] *= factor;
}

/* ---- tanh ----
 * tanh(x) = (1 - t) / (1 + t) with t = exp(-2|x|), and the sign of x. Near 0 that subtraction would
 * lose digits: there tanh(x) = x + x³·q(x²) with q of degree 4, fitted like exp's on |x| <= 0.55
 * with a relative error of 1.0e-9. */
#define TANH_SERIES_END 0.55f

static inline float hyperbolic_tangent(float x) {
  const float size = fabsf(x);
  const float z = x * x;
  float q = -6.2742396e-3f;
  q = q * z + 2.107168e-2f;
  q = q * z + -5.385231e-2f;
  q = q * z + 1.3332586e-1f;
  q = q * z + -3.3333316e-1f;
  const float near_zero = x + x * z * q;
  const float t = exponential(-2.0f * size);
  const float far = copysignf((1.0f - t) / (1.0f + t), x);
  return size < TANH_SERIES_END ? near_zero : far;
}

MHA_CLONES void mha_row_softcap(float *row, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j++)
    row[j] = cap * hyperbolic_tangent(row[j] / cap);
}

MHA_CLONES void mha_row_add_bias(float *row, const float *bias, int64_t n) {
  for (int64_t j = 0; j < n; j++)
    row[j] = bias[j] == -INFINITY ? -INFINITY : row[j] + bias[j];
}

MHA_CLONES void mha_row_add_alibi(float *row, int64_t n, float slope, float first) {
  /* Distances are exact in float up to 2^24; beyond, their rounding is that of the product. */
  for (int64_t j = 0; j < n; j++)
    row[j] -= slope * fabsf(first + (float)j);
}

MHA_CLONES void mha_row_hide(float *row, const uint8_t *attend, int64_t n) {
  for (int64_t j = 0; j < n; j++)
    row[j] = attend[j] ? row[j] : -INFINITY;
}

MHA_CLONES bool mha_row_is_finite(const float *row, int64_t n) {
  /* x - x is 0 for finite x and NaN otherwise, and NaN survives every further sum. */
  float lanes[MHA_LANES] = {0};
  int64_t j = 0;
  for (; j + MHA_LANES <= n; j += MHA_LANES)
    for (int k = 0; k < MHA_LANES; k++)
      lanes[k] += row[j + k] - row[j + k];
  float sum = 0.0f;
  for (; j < n; j++)
    sum += row[j] - row[j];
  for (int k = 0; k < MHA_LANES; k++)
    sum += lanes[k];
  return sum == 0.0f;
}

MHA_CLONES bool mha_row_copy_finite(float *restrict copy, const float *restrict row, int64_t n) {
  float lanes[MHA_LANES] = {0};
  float sum = 0.0f;
  int64_t j = 0;
  for (; j + MHA_LANES <= n; j += MHA_LANES)
    for (int k = 0; k < MHA_LANES; k++) {
      copy[j + k] = row[j + k];
      lanes[k] += row[j + k] - row[j + k]; /* as below */
    }
  for (; j < n; j++) {
    copy[j] = row[j];
    sum += row[j] - row[j];
  }
  for (int k = 0; k < MHA_LANES; k++)
    sum += lanes[k];
  return sum == 0.0f;
}

const char *mha_row_instruction_set(void) {
#if MHA_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4"))
    return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3"))
    return "x86-64-v3";
#endif
  return "baseline";
}
