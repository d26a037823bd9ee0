/* Owns the random numbers with AVX2: four blocks in four registers, a word in the lower half of
 * each lane of 64 bits. The multiplication reads lower halves alone, so that what else is in the
 * upper ones does not count. */
#include "philox.h"

#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include "rows_x86.h"

#define AVX2       __attribute__((target("avx2")))
#define INLINE_AVX static inline __attribute__((always_inline)) AVX2

enum { LANES = 4 };

INLINE_AVX __m256i broadcast(uint64_t x) {
  return _mm256_set1_epi64x((long long)x);
}

INLINE_AVX __m256i xor3(__m256i a, __m256i b, __m256i c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}

INLINE_AVX __m256i high(__m256i x) {
  return _mm256_srli_epi64(x, 32);
}

/* a in the lower halves, b in the upper ones. */
INLINE_AVX __m256i join(__m256i a, __m256i b) {
  return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
}

INLINE_AVX void store(uint32_t *words, __m256i x) {
  _mm256_storeu_si256((__m256i *)(void *)words, x);
}

/* The four blocks one after the other. */
INLINE_AVX void store_blocks(uint32_t *words, const __m256i c[4]) {
  const __m256i left = join(c[0], c[1]);
  const __m256i right = join(c[2], c[3]);
  const __m256i even = _mm256_unpacklo_epi64(left, right);
  const __m256i odd = _mm256_unpackhi_epi64(left, right);
  store(words, _mm256_permute2x128_si256(even, odd, 0x20));
  store(words + 8, _mm256_permute2x128_si256(even, odd, 0x31));
}

static AVX2 void make_words(const mha_philox *philox, uint64_t first, uint32_t *words) {
  const __m256i m0 = broadcast(MHA_PHILOX_MULTIPLIER_0);
  const __m256i m1 = broadcast(MHA_PHILOX_MULTIPLIER_1);
  const uint32_t k0 = (uint32_t)philox->seed;
  const uint32_t k1 = (uint32_t)(philox->seed >> 32);
  for (int k = 0; k < MHA_PHILOX_PIECE; k += LANES * MHA_PHILOX_BLOCK) {
    const __m256i index =
        _mm256_add_epi64(broadcast(first + (uint64_t)k), _mm256_set_epi64x(12, 8, 4, 0));
    const __m256i counter = _mm256_srli_epi64(index, 2); /* index / MHA_PHILOX_BLOCK */
    const __m256i call = broadcast(philox->call);
    __m256i c[4] = {counter, high(counter), call, high(call)};
    for (uint32_t round = 0; round < MHA_PHILOX_ROUNDS; round++) {
      const __m256i p0 = _mm256_mul_epu32(m0, c[0]);
      const __m256i p1 = _mm256_mul_epu32(m1, c[2]);
      c[0] = xor3(high(p1), c[1], broadcast(k0 + round * MHA_PHILOX_KEY_STEP_0));
      c[1] = p1;
      c[2] = xor3(high(p0), c[3], broadcast(k1 + round * MHA_PHILOX_KEY_STEP_1));
      c[3] = p0;
    }
    store_blocks(words + k, c);
  }
}

mha_philox_maker *mha_philox_avx2(void) {
  return __builtin_cpu_supports("avx2") ? make_words : NULL;
}
#else
mha_philox_maker *mha_philox_avx2(void) {
  return NULL;
}
#endif
