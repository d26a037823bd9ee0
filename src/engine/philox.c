/* Owns the random numbers. Words c0..c3 of a block are its counter after ten rounds
 *
 *   c0, c1, c2, c3 = high(M1·c2)^c1^k0, low(M1·c2), high(M0·c0)^c3^k1, low(M0·c0)
 *
 * between which both words of the key grow by a constant. No block depends on another: many are
 * made side by side, in loops that compilers vectorise. */
#include "philox.h"

#include "clones.h"

#include <string.h>

enum { ROUNDS = 10, BLOCK = 4, BLOCKS = 16, WORDS = BLOCKS * BLOCK };

#define MULTIPLIER_0 UINT64_C(0xD2511F53)
#define MULTIPLIER_1 UINT64_C(0xCD9E8D57)
#define KEY_STEP_0   UINT32_C(0x9E3779B9)
#define KEY_STEP_1   UINT32_C(0xBB67AE85)

static inline uint64_t low(uint64_t x) {
  return x & UINT32_MAX;
}

static inline uint64_t high(uint64_t x) {
  return x >> 32;
}

/* Words [first, first + WORDS), `first` a multiple of BLOCK. A word has a lane of 64 bits, the
 * upper half of which is only kept from the products: so nothing is packed between the rounds. */
static inline void make_words(const mha_philox *philox, uint64_t first, uint32_t words[WORDS]) {
  const uint32_t k0 = (uint32_t)low(philox->seed);
  const uint32_t k1 = (uint32_t)high(philox->seed);
  for (int k = 0; k < BLOCKS; k++) {
    const uint64_t counter = (first + (uint64_t)k * BLOCK) / BLOCK;
    uint64_t c0 = counter;
    uint64_t c1 = high(counter);
    uint64_t c2 = philox->call;
    uint64_t c3 = high(philox->call);
    for (uint32_t round = 0; round < ROUNDS; round++) {
      const uint64_t p0 = MULTIPLIER_0 * low(c0);
      const uint64_t p1 = MULTIPLIER_1 * low(c2);
      c0 = high(p1) ^ c1 ^ (k0 + round * KEY_STEP_0);
      c1 = p1;
      c2 = high(p0) ^ c3 ^ (k1 + round * KEY_STEP_1);
      c3 = p0;
    }
    words[BLOCK * k] = (uint32_t)c0;
    words[BLOCK * k + 1] = (uint32_t)c1;
    words[BLOCK * k + 2] = (uint32_t)c2;
    words[BLOCK * k + 3] = (uint32_t)c3;
  }
}

/* The next words of a row of n, of which `done` are taken: makes them, and says where the row goes
 * on among them and how many there are. A row may begin within a block. */
typedef struct piece {
  uint32_t words[WORDS];
  int64_t begin, n;
} piece;

static inline void make_piece(const mha_philox *philox, uint64_t first, int64_t n, int64_t done,
                              piece *p) {
  const uint64_t next = first + (uint64_t)done;
  p->begin = (int64_t)(next % BLOCK);
  p->n = n - done < WORDS - p->begin ? n - done : WORDS - p->begin;
  make_words(philox, next - next % BLOCK, p->words);
}

MHA_CLONES void mha_philox_words(const mha_philox *philox, uint64_t first, int64_t n,
                                 uint32_t *words) {
  piece p = {.n = 0};
  for (int64_t done = 0; done < n; done += p.n) {
    make_piece(philox, first, n, done, &p);
    memcpy(words + done, p.words + p.begin, (size_t)p.n * sizeof *words);
  }
}

MHA_CLONES void mha_philox_factors(const mha_philox *philox, uint64_t first, int64_t n,
                                   uint32_t threshold, float factor, float *factors) {
  piece p = {.n = 0};
  for (int64_t done = 0; done < n; done += p.n) {
    make_piece(philox, first, n, done, &p);
    for (int64_t k = 0; k < p.n; k++)
      factors[done + k] = p.words[p.begin + k] < threshold ? 0.0f : factor;
  }
}
