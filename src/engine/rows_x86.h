/* What the row kernels of x86-64 have in common. */
#ifndef MHA_SRC_ENGINE_ROWS_X86_H
#define MHA_SRC_ENGINE_ROWS_X86_H

#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>

static inline __m128i load_16_bytes(const unsigned char *x) {
  return _mm_loadu_si128((const __m128i *)(const void *)x);
}

/* clang 14 does not know the name of F16C. */
static inline bool cpu_has_f16c(void) {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

#endif
