/* Arithmetic of sizes: checked, since they come from callers and files. */
#ifndef MHA_SRC_BASE_ARITHMETIC_H
#define MHA_SRC_BASE_ARITHMETIC_H

#include <stdbool.h>
#include <stdint.h>

/* *result = a·b or a + b; false if that overflows or a or b is negative. */
static inline bool mha_multiply(int64_t a, int64_t b, int64_t *result) {
  const bool small = ((a | b) >> 31) == 0; /* the usual case, without a division */
  if (!small && (a < 0 || b < 0 || (b > 0 && a > INT64_MAX / b)))
    return false;
  *result = a * b;
  return true;
}

static inline bool mha_add(int64_t a, int64_t b, int64_t *result) {
  if (a < 0 || b < 0 || a > INT64_MAX - b)
    return false;
  *result = a + b;
  return true;
}

/* The largest extent or stride of an array that a product takes: CBLAS counts in int. */
#define MHA_BLAS_MAX ((int64_t)INT32_MAX)

static inline int64_t mha_min(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static inline int64_t mha_max(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* a/b rounded up, a >= 0, b > 0. */
static inline int64_t mha_divide_up(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

#endif
