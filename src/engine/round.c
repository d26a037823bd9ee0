/* Owns the rounding of float32 numbers to the other types: the rules of mha_element_convert. */
#include "base/arithmetic.h"
#include "clones.h"
#include "halves.h"
#include "numbers.h"

#include <math.h>

/* As a scale it makes all numbers of a block NaN. */
static const uint16_t half_nan = 0x7e00;

static void put_half(unsigned char *y, uint16_t half) {
  memcpy(y, &half, sizeof half);
}

/* The largest magnitude as bits, whose order is that of the numbers; from infinity on they are not
 * finite. */
static inline uint32_t largest_magnitude(const float *x) {
  uint32_t largest = 0;
  for (int k = 0; k < MHA_BLOCK; k++) {
    const uint32_t magnitude = mha_bits_of_float(x[k]) & 0x7fffffffU;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

static inline bool is_finite(uint32_t magnitude) {
  return magnitude < 0x7f800000U;
}

/* Half away from zero, for |x| below 2^31: exact in every rounding mode. */
static inline int32_t nearest(float x) {
  const int32_t whole = (int32_t)x;
  const float rest = x - (float)whole;
  return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

/* Rounds a scale to F16 and stores it; the value it now has. */
static float put_scale(unsigned char *y, float scale) {
  const uint16_t half = mha_half_of_float(scale);
  put_half(y, half);
  return mha_float_of_half(half);
}

/* q = x/scale, |q| <= 127: a scale that was rounded down, a subnormal one above all, may leave
 * more. */
static inline void round_q8_0(unsigned char *y, const float *x) {
  enum { BYTES = MHA_BLOCK_SCALE_BYTES + MHA_BLOCK };
  const uint32_t largest = largest_magnitude(x);
  const float scale =
      is_finite(largest) ? put_scale(y, mha_float_of_bits(largest) / 127.0f) : INFINITY;
  if (scale == INFINITY || scale == 0.0f) {
    memset(y, 0, BYTES);
    put_half(y, scale == 0.0f ? 0 : half_nan);
    return;
  }
  signed char bytes[MHA_BLOCK];
  for (int k = 0; k < MHA_BLOCK; k++) {
    const int32_t q = nearest(x[k] / scale);
    bytes[k] = (signed char)(q > 127 ? 127 : q < -127 ? -127 : q);
  }
  memcpy(y + MHA_BLOCK_SCALE_BYTES, bytes, sizeof bytes);
}

/* The number of the largest magnitude, the first if there are several. */
static float find_extreme(const float *x, uint32_t largest) {
  int k = 0;
  while ((mha_bits_of_float(x[k]) & 0x7fffffffU) != largest)
    k++;
  return x[k];
}

/* x/scale + 8 of one number, within 0 to 15. */
static inline unsigned char nibble(float x, float scale) {
  const int32_t q = scale != 0.0f ? nearest(x / scale + 8.0f) : 8;
  return (unsigned char)(q < 0 ? 0 : q > 15 ? 15 : q);
}

/* The number of the largest magnitude becomes -8·scale. */
static void round_q4_0(unsigned char *y, const float *x) {
  enum { HALF = MHA_BLOCK / 2, BYTES = MHA_BLOCK_SCALE_BYTES + HALF };
  const uint32_t largest = largest_magnitude(x);
  const float scale =
      is_finite(largest) ? put_scale(y, find_extreme(x, largest) / -8.0f) : INFINITY;
  if (!isfinite(scale)) {
    memset(y, 0, BYTES);
    put_half(y, half_nan);
    return;
  }
  for (int k = 0; k < HALF; k++)
    y[MHA_BLOCK_SCALE_BYTES + k] =
        (unsigned char)(nibble(x[k], scale) | nibble(x[k + HALF], scale) << 4);
}

/* ---- rows of numbers ---- */

MHA_CLONES static void round_to_half(unsigned char *restrict y, const float *restrict x,
                                     int64_t n) {
  for (int64_t j = 0; j < n; j++)
    put_half(y + 2 * j, mha_half_of_float(x[j]));
}

MHA_CLONES static void round_to_bfloat16(unsigned char *restrict y, const float *restrict x,
                                         int64_t n) {
  for (int64_t j = 0; j < n; j++)
    put_half(y + 2 * j, mha_bfloat16_of_float(x[j]));
}

MHA_CLONES static void round_to_q8_0(unsigned char *restrict y, const float *restrict x,
                                     int64_t n) {
  for (int64_t j = 0; j < n; j += MHA_BLOCK, y += MHA_BLOCK_SCALE_BYTES + MHA_BLOCK)
    round_q8_0(y, x + j);
}

MHA_CLONES static void round_to_q4_0(unsigned char *restrict y, const float *restrict x,
                                     int64_t n) {
  for (int64_t j = 0; j < n; j += MHA_BLOCK, y += MHA_BLOCK_SCALE_BYTES + MHA_BLOCK / 2)
    round_q4_0(y, x + j);
}

void mha_numbers_round(void *y, int32_t element, const float *x, int64_t n) {
  if (element == MHA_F32)
    memcpy(y, x, (size_t)n * sizeof *x);
  else if (element == MHA_F16)
    round_to_half(y, x, n);
  else if (element == MHA_BF16)
    round_to_bfloat16(y, x, n);
  else if (element == MHA_Q8_0)
    round_to_q8_0(y, x, n);
  else
    round_to_q4_0(y, x, n);
}

/* By way of float32, a piece at a time. */
void mha_numbers_convert(void *y, int32_t to, const void *x, int32_t from, int64_t n) {
  enum { PIECE = 16 * MHA_BLOCK };
  float piece[PIECE];
  unsigned char *next = y;
  int64_t bytes = 0;
  if (from == to) {
    (void)mha_element_extent(from, n, &bytes);
    memcpy(y, x, (size_t)bytes);
    return;
  }
  for (int64_t done = 0; done < n; done += PIECE) {
    const int64_t m = mha_min(n - done, PIECE);
    mha_numbers_widen(piece, mha_element_at(x, from, done), from, m);
    mha_numbers_round(next, to, piece, m);
    (void)mha_element_extent(to, m, &bytes);
    next += bytes;
  }
}
