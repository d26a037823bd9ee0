/* Owns the rounding of float32 numbers to the other types: the rules of mha_element_convert. */
#include "base/arithmetic.h"
#include "halves.h"
#include "numbers.h"

#include <math.h>

static const uint16_t half_nan = 0x7e00;

static void put_half(unsigned char *y, uint16_t half) {
  memcpy(y, &half, sizeof half);
}

/* A NaN scale makes all numbers of a block NaN; its other bytes are 0. */
static void put_nan_block(unsigned char *y, size_t bytes) {
  memset(y, 0, bytes);
  put_half(y, half_nan);
}

/* The number of the largest magnitude; NaN if one of them is NaN or infinite. */
static float find_extreme(const float *x) {
  float extreme = 0.0f;
  for (int k = 0; k < MHA_BLOCK; k++) {
    if (!isfinite(x[k]))
      return NAN;
    if (fabsf(x[k]) > fabsf(extreme))
      extreme = x[k];
  }
  return extreme;
}

/* Rounds a scale to F16 and stores it; the value it now has. */
static float put_scale(unsigned char *y, float scale) {
  const uint16_t half = mha_half_of_float(scale);
  put_half(y, half);
  return mha_float_of_half(half);
}

/* q = x/scale, |q| <= 127: a scale that was rounded down, a subnormal one above all, may leave
 * more. */
static void round_q8_0(unsigned char *y, const float *x) {
  enum { BYTES = MHA_BLOCK_SCALE_BYTES + MHA_BLOCK };
  const float largest = fabsf(find_extreme(x));
  const float scale = isnan(largest) ? NAN : put_scale(y, largest / 127.0f);
  if (!isfinite(scale)) {
    put_nan_block(y, BYTES);
    return;
  }
  for (int k = 0; k < MHA_BLOCK; k++) {
    const float q = scale > 0.0f ? roundf(x[k] / scale) : 0.0f;
    const float bounded = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
    const signed char byte = (signed char)bounded;
    memcpy(y + MHA_BLOCK_SCALE_BYTES + k, &byte, 1);
  }
}

/* x/scale + 8 of one number, within 0 to 15. */
static unsigned char nibble(float x, float scale) {
  const float q = scale != 0.0f ? roundf(x / scale + 8.0f) : 8.0f;
  return (unsigned char)(q < 0.0f ? 0.0f : q > 15.0f ? 15.0f : q);
}

/* The number of the largest magnitude becomes -8·scale. */
static void round_q4_0(unsigned char *y, const float *x) {
  enum { HALF = MHA_BLOCK / 2, BYTES = MHA_BLOCK_SCALE_BYTES + HALF };
  const float extreme = find_extreme(x);
  const float scale = isnan(extreme) ? NAN : put_scale(y, extreme / -8.0f);
  if (!isfinite(scale)) {
    put_nan_block(y, BYTES);
    return;
  }
  for (int k = 0; k < HALF; k++)
    y[MHA_BLOCK_SCALE_BYTES + k] =
        (unsigned char)(nibble(x[k], scale) | nibble(x[k + HALF], scale) << 4);
}

void mha_numbers_round(void *y, int32_t element, const float *x, int64_t n) {
  unsigned char *bytes = y;
  if (element == MHA_F32)
    memcpy(y, x, (size_t)n * sizeof *x);
  else if (element == MHA_F16)
    for (int64_t j = 0; j < n; j++)
      put_half(bytes + 2 * j, mha_half_of_float(x[j]));
  else if (element == MHA_BF16)
    for (int64_t j = 0; j < n; j++)
      put_half(bytes + 2 * j, mha_bfloat16_of_float(x[j]));
  else if (element == MHA_Q8_0)
    for (int64_t j = 0; j < n; j += MHA_BLOCK, bytes += MHA_BLOCK_SCALE_BYTES + MHA_BLOCK)
      round_q8_0(bytes, x + j);
  else
    for (int64_t j = 0; j < n; j += MHA_BLOCK, bytes += MHA_BLOCK_SCALE_BYTES + MHA_BLOCK / 2)
      round_q4_0(bytes, x + j);
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
