/* Owns the row kernels in C alone, for processors without kernels of their own. */
#include "halves.h"

#define LANES_CODE
#define LANES_NAME   "plain"
#define LANES_CHAINS 1
#define LANES_X      1
#define LANES_W      1
#define LANES_SUMMED 2
#define EACH         for (int64_t k = 0; k < 16; k++)

typedef struct lanes {
  float at[16];
} lanes;

static inline lanes lanes_zero(void) {
  const lanes zero = {{0.0f}};
  return zero;
}

static inline lanes lanes_broadcast(float x) {
  lanes y;
  EACH y.at[k] = x;
  return y;
}

static inline lanes lanes_load(const float *x) {
  lanes y;
  memcpy(&y, x, sizeof y);
  return y;
}

static inline void lanes_store(float *y, lanes x) {
  memcpy(y, &x, sizeof x);
}

static inline lanes lanes_multiply(lanes a, lanes b) {
  EACH a.at[k] *= b.at[k];
  return a;
}

static inline lanes lanes_multiply_add(lanes a, lanes b, lanes c) {
  EACH c.at[k] += a.at[k] * b.at[k];
  return c;
}

static inline lanes lanes_add(lanes a, lanes b) {
  EACH a.at[k] += b.at[k];
  return a;
}

static inline float lanes_sum(lanes x) {
  for (int half = 8; half > 0; half /= 2)
    for (int k = 0; k < half; k++)
      x.at[k] += x.at[k + half];
  return x.at[0];
}

static inline lanes lanes_from_half(const unsigned char *x) {
  lanes y;
  EACH y.at[k] = mha_float_of_half(mha_half_at(x + 2 * k));
  return y;
}

static inline lanes lanes_from_bfloat16(const unsigned char *x) {
  lanes y;
  EACH y.at[k] = mha_float_of_bfloat16(mha_half_at(x + 2 * k));
  return y;
}

static inline lanes lanes_from_bytes(const unsigned char *x) {
  lanes y;
  signed char bytes[16];
  memcpy(bytes, x, sizeof bytes);
  EACH y.at[k] = (float)bytes[k];
  return y;
}

static inline void lanes_from_nibbles(const unsigned char *x, lanes *low, lanes *high) {
  EACH low->at[k] = (float)((x[k] & 15) - 8);
  EACH high->at[k] = (float)((x[k] >> 4) - 8);
}

static inline lanes lanes_scale(const unsigned char *x) {
  return lanes_broadcast(mha_float_of_half(mha_half_at(x)));
}

#include "rows_template.h"

const mha_row_kernels *mha_rows_plain(void) {
  return &kernels;
}
