/* Owns the row kernels for AVX-512: lanes are one register. */
#include "halves.h"
#include "stored_rows.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "rows_x86.h"

#define LANES_CODE    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define LANES_NAME    "avx512"
#define LANES_CHAINS  4
#define LANES_X       4
#define LANES_W       4
#define LANES_SUMMED  8
#define INLINE_AVX512 static inline __attribute__((always_inline)) LANES_CODE

typedef __m512 lanes;

INLINE_AVX512 lanes lanes_zero(void) {
  return _mm512_setzero_ps();
}

INLINE_AVX512 lanes lanes_broadcast(float x) {
  return _mm512_set1_ps(x);
}

INLINE_AVX512 lanes lanes_load(const float *x) {
  return _mm512_loadu_ps(x);
}

INLINE_AVX512 void lanes_store(float *y, lanes x) {
  _mm512_storeu_ps(y, x);
}

INLINE_AVX512 lanes lanes_multiply(lanes a, lanes b) {
  return _mm512_mul_ps(a, b);
}

INLINE_AVX512 lanes lanes_multiply_add(lanes a, lanes b, lanes c) {
  return _mm512_fmadd_ps(a, b, c);
}

INLINE_AVX512 lanes lanes_add(lanes a, lanes b) {
  return _mm512_add_ps(a, b);
}

INLINE_AVX512 float lanes_sum(lanes x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE_AVX512 __m256i load_32_bytes(const unsigned char *x) {
  return _mm256_loadu_si256((const __m256i *)(const void *)x);
}

INLINE_AVX512 lanes lanes_from_half(const unsigned char *x) {
  return _mm512_cvtph_ps(load_32_bytes(x));
}

INLINE_AVX512 lanes lanes_from_bfloat16(const unsigned char *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(x)), 16));
}

INLINE_AVX512 lanes lanes_from_bytes(const unsigned char *x) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(x)));
}

INLINE_AVX512 void lanes_from_nibbles(const unsigned char *x, lanes *low, lanes *high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load_16_bytes(x));
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  *low = _mm512_permutexvar_ps(bytes, values); /* by the low four bits of each index */
  *high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}

INLINE_AVX512 lanes lanes_scale(const unsigned char *x) {
  return _mm512_cvtph_ps(_mm256_set1_epi16((short)mha_half_at(x)));
}

#include "rows_template.h"

const mha_row_kernels *mha_rows_avx512(void) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 cpu_has_f16c()
             ? &kernels
             : NULL;
}

#else

const mha_row_kernels *mha_rows_avx512(void) {
  return NULL;
}

#endif
