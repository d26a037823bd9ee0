/* Random numbers by their index: the counter-based generator Philox4x32-10 ("Parallel Random
 * Numbers: As Easy as 1, 2, 3", 2011). */
#ifndef MHA_SRC_ENGINE_PHILOX_H
#define MHA_SRC_ENGINE_PHILOX_H

#include <stdint.h>

/* Two numbers of 64 bits choose a sequence of 2^64 words of 32 bits: `seed` is the key, `call` the
 * upper half of the counter. Word e of it is word e mod 4 of the block whose counter has e/4 as its
 * lower half. Of a number of 64 bits the lower word comes first. Indices count modulo 2^64. */
typedef struct mha_philox {
  uint64_t seed, call;
} mha_philox;

/* words[k] = word first + k of the sequence, for k < n. */
void mha_philox_words(const mha_philox *philox, uint64_t first, int64_t n, uint32_t *words);

/* factors[k] = 0 where that word is below `threshold`, otherwise `factor`. */
void mha_philox_factors(const mha_philox *philox, uint64_t first, int64_t n, uint32_t threshold,
                        float factor, float *factors);

/* ---- how the words of some blocks are made ---- */

/* Multipliers of a round, and by what the words of the key grow between two rounds. */
#define MHA_PHILOX_MULTIPLIER_0 UINT32_C(0xD2511F53)
#define MHA_PHILOX_MULTIPLIER_1 UINT32_C(0xCD9E8D57)
#define MHA_PHILOX_KEY_STEP_0   UINT32_C(0x9E3779B9)
#define MHA_PHILOX_KEY_STEP_1   UINT32_C(0xBB67AE85)

enum {
  MHA_PHILOX_ROUNDS = 10,
  MHA_PHILOX_BLOCK = 4,   /* words */
  MHA_PHILOX_BLOCKS = 16, /* made at a time */
  MHA_PHILOX_PIECE = MHA_PHILOX_BLOCKS * MHA_PHILOX_BLOCK
};

/* Words [first, first + MHA_PHILOX_PIECE); `first` is a multiple of MHA_PHILOX_BLOCK. */
typedef void mha_philox_maker(const mha_philox *philox, uint64_t first, uint32_t *words);

/* By AVX2; NULL where there is none. */
mha_philox_maker *mha_philox_avx2(void);

#endif
