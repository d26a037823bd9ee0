/* Owns the row kernels for AVX2, FMA and F16C: lanes are two registers. */
#include "halves.h"
#include "stored_rows.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "rows_x86.h"

#define LANES_CODE   __attribute__((target("avx2,fma,f16c")))
#define LANES_NAME   "avx2"
#define LANES_CHAINS 2
#define LANES_X      2
#define LANES_W      2
#define LANES_SUMMED 8
#define INLINE_AVX   static inline __attribute__((always_inline)) LANES_CODE

typedef struct lanes {
  __m256 a, b; /* 0 to 7, 8 to 15 */
} lanes;

INLINE_AVX lanes pair(__m256 a, __m256 b) {
  const lanes x = {a, b};
  return x;
}

INLINE_AVX lanes lanes_zero(void) {
  return pair(_mm256_setzero_ps(), _mm256_setzero_ps());
}

INLINE_AVX lanes lanes_broadcast(float x) {
  return pair(_mm256_set1_ps(x), _mm256_set1_ps(x));
}

INLINE_AVX lanes lanes_load(const float *x) {
  return pair(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8));
}

INLINE_AVX void lanes_store(float *y, lanes x) {
  _mm256_storeu_ps(y, x.a);
  _mm256_storeu_ps(y + 8, x.b);
}

INLINE_AVX lanes lanes_multiply(lanes a, lanes b) {
  return pair(_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b));
}

INLINE_AVX lanes lanes_multiply_add(lanes a, lanes b, lanes c) {
  return pair(_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b));
}

INLINE_AVX lanes lanes_add(lanes a, lanes b) {
  return pair(_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b));
}

INLINE_AVX float lanes_sum(lanes x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE_AVX lanes lanes_from_half(const unsigned char *x) {
  return pair(_mm256_cvtph_ps(load_16_bytes(x)), _mm256_cvtph_ps(load_16_bytes(x + 16)));
}

INLINE_AVX __m256 eight_from_bfloat16(const unsigned char *x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(x)), 16));
}

INLINE_AVX lanes lanes_from_bfloat16(const unsigned char *x) {
  return pair(eight_from_bfloat16(x), eight_from_bfloat16(x + 16));
}

INLINE_AVX lanes lanes_from_signed(__m128i bytes) {
  return pair(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
              _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
}

INLINE_AVX lanes lanes_from_bytes(const unsigned char *x) {
  return lanes_from_signed(load_16_bytes(x));
}

INLINE_AVX void lanes_from_nibbles(const unsigned char *x, lanes *low, lanes *high) {
  const __m128i bytes = load_16_bytes(x);
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i eight = _mm_set1_epi8(8);
  *low = lanes_from_signed(_mm_sub_epi8(_mm_and_si128(bytes, mask), eight));
  *high = lanes_from_signed(_mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask), eight));
}

INLINE_AVX lanes lanes_scale(const unsigned char *x) {
  const __m256 scale = _mm256_cvtph_ps(_mm_set1_epi16((short)mha_half_at(x)));
  return pair(scale, scale);
}

#include "rows_template.h"

const mha_row_kernels *mha_rows_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c()
             ? &kernels
             : NULL;
}

#else

const mha_row_kernels *mha_rows_avx2(void) {
  return NULL;
}

#endif
