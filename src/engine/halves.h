/* 16-bit floats, one at a time, by their bits. */
#ifndef MHA_SRC_ENGINE_HALVES_H
#define MHA_SRC_ENGINE_HALVES_H

#include <stdint.h>
#include <string.h>

static inline float mha_float_of_bits(uint32_t bits) {
  float x = 0.0f;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint32_t mha_bits_of_float(float x) {
  uint32_t bits = 0;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline uint16_t mha_half_at(const unsigned char *data) {
  uint16_t bits = 0;
  memcpy(&bits, data, sizeof bits);
  return bits;
}

static inline float mha_float_of_bfloat16(uint16_t bits) {
  return mha_float_of_bits((uint32_t)bits << 16);
}

/* binary16: 5 bits of exponent, 10 of fraction. A subnormal is made as a difference of two normal
 * numbers, so that a processor told to flush subnormals does not see one; that of equal numbers is
 * -0 where the caller rounds downward, so its sign is left out. */
static inline float mha_float_of_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000U) << 16;
  const uint32_t magnitude = (uint32_t)(half & 0x7fffU) << 13;
  const uint32_t lowest = UINT32_C(113) << 23; /* 2^-14, the smallest normal one */
  uint32_t bits = magnitude + (UINT32_C(112) << 23);
  if (magnitude >= UINT32_C(31) << 23) /* infinite or NaN */
    bits = magnitude + (UINT32_C(224) << 23);
  else if (magnitude < UINT32_C(1) << 23)
    bits = 0x7fffffffU &
           mha_bits_of_float(mha_float_of_bits(magnitude + lowest) - mha_float_of_bits(lowest));
  return mha_float_of_bits(bits | sign);
}

/* To nearest, ties to even; what is too large becomes infinite, NaN stays NaN. */
static inline uint16_t mha_bfloat16_of_float(float x) {
  const uint32_t bits = mha_bits_of_float(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U)
    return (uint16_t)(bits >> 16 | 0x40U);
  return (uint16_t)((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

/* yes ? a : b without a branch, which would keep loops from becoming vectors. */
static inline uint32_t mha_select(int yes, uint32_t a, uint32_t b) {
  const uint32_t mask = 0U - (uint32_t)yes;
  return (a & mask) | (b & ~mask);
}

/* Likewise. By integers alone: the caller's rounding mode does not count. */
static inline uint16_t mha_half_of_float(float x) {
  const uint32_t bits = mha_bits_of_float(x);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t lowest = UINT32_C(113) << 23; /* 2^-14, the smallest normal one */
  /* the carry of rounding goes into the exponent */
  const uint32_t normal =
      (magnitude - (UINT32_C(112) << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
  /* in units of 2^-24; below half of one, from a shift of 25 on, nothing is left */
  const uint32_t exponent = magnitude >> 23;
  const uint32_t shift =
      126 - mha_select(exponent < 101, 101, mha_select(exponent > 112, 112, exponent));
  const uint32_t fraction = (magnitude & 0x7fffffU) | 0x800000U;
  const uint32_t below_half = (UINT32_C(1) << (shift - 1)) - 1U;
  const uint32_t subnormal = (fraction + below_half + (fraction >> shift & 1U)) >> shift;
  uint32_t half = mha_select(magnitude < lowest, subnormal, normal);
  half = mha_select(magnitude >= 0x477ff000U, 0x7c00U, half); /* half way to what does not fit */
  half = mha_select(magnitude > 0x7f800000U, 0x7e00U, half);
  return (uint16_t)(half | (bits >> 16 & 0x8000U));
}

#endif
