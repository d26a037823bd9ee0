/* Owns the random numbers. Words c0..c3 of a block are its counter after ten rounds
 *
 *   c0, c1, c2, c3 = high(M1·c2)^c1^k0, low(M1·c2), high(M0·c0)^c3^k1, low(M0·c0)
 *
 * between which both words of the key grow by a constant. No block depends on another: many are
 * made side by side. */
#include "philox.h"

#include "clones.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

enum { BLOCK = MHA_PHILOX_BLOCK, BLOCKS = MHA_PHILOX_BLOCKS, PIECE = MHA_PHILOX_PIECE };

/* ---- some blocks ---- */

static inline uint64_t low(uint64_t x) {
  return x & UINT32_MAX;
}

static inline uint64_t high(uint64_t x) {
  return x >> 32;
}

/* A word has a lane of 64 bits, whose upper half holds whatever the products left there: so nothing
 * is packed between the rounds. */
static MHA_CLONES void make_words(const mha_philox *philox, uint64_t first, uint32_t *words) {
  const uint32_t k0 = (uint32_t)low(philox->seed);
  const uint32_t k1 = (uint32_t)high(philox->seed);
  for (int k = 0; k < BLOCKS; k++) {
    uint64_t c0 = (first + (uint64_t)k * BLOCK) / BLOCK;
    uint64_t c1 = high(c0);
    uint64_t c2 = philox->call;
    uint64_t c3 = high(c2);
    for (uint32_t round = 0; round < MHA_PHILOX_ROUNDS; round++) {
      const uint64_t p0 = MHA_PHILOX_MULTIPLIER_0 * low(c0);
      const uint64_t p1 = MHA_PHILOX_MULTIPLIER_1 * low(c2);
      c0 = high(p1) ^ c1 ^ (k0 + round * MHA_PHILOX_KEY_STEP_0);
      c1 = p1;
      c2 = high(p0) ^ c3 ^ (k1 + round * MHA_PHILOX_KEY_STEP_1);
      c3 = p0;
    }
    words[(int64_t)BLOCK * k] = (uint32_t)c0;
    words[(int64_t)BLOCK * k + 1] = (uint32_t)c1;
    words[(int64_t)BLOCK * k + 2] = (uint32_t)c2;
    words[(int64_t)BLOCK * k + 3] = (uint32_t)c3;
  }
}

/* Compilers make one multiplication of a product only from AVX-512 on, with AVX2 three. */
static bool prefers_clone(void) {
#if MHA_HAS_CLONES
  return __builtin_cpu_supports("x86-64-v4");
#elif defined(MHA_BASELINE) /* a build of the tests is without */
  return true;
#else
  return false;
#endif
}

static mha_philox_maker *choose(void) {
  mha_philox_maker *avx2 = prefers_clone() ? NULL : mha_philox_avx2();
  return avx2 ? avx2 : make_words;
}

/* ---- rows ---- */

/* Words of a row from `at` on, as many as one making gives; they begin within a block. */
typedef struct piece {
  uint32_t words[PIECE];
  int64_t begin, n;
} piece;

static void make_piece(mha_philox_maker *make, const mha_philox *philox, uint64_t at, int64_t left,
                       piece *p) {
  p->begin = (int64_t)(at % BLOCK);
  p->n = left < PIECE - p->begin ? left : PIECE - p->begin;
  make(philox, at - at % BLOCK, p->words);
}

void mha_philox_words(const mha_philox *philox, uint64_t first, int64_t n, uint32_t *words) {
  mha_philox_maker *make = choose();
  piece p = {.n = 0};
  for (int64_t done = 0; done < n; done += p.n) {
    make_piece(make, philox, first + (uint64_t)done, n - done, &p);
    memcpy(words + done, p.words + p.begin, (size_t)p.n * sizeof *words);
  }
}

MHA_CLONES void mha_philox_factors(const mha_philox *philox, uint64_t first, int64_t n,
                                   uint32_t threshold, float factor, float *factors) {
  mha_philox_maker *make = choose();
  piece p = {.n = 0};
  for (int64_t done = 0; done < n; done += p.n) {
    make_piece(make, philox, first + (uint64_t)done, n - done, &p);
    for (int64_t k = 0; k < p.n; k++)
      factors[done + k] = p.words[p.begin + k] < threshold ? 0.0f : factor;
  }
}
