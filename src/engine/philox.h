/* Random numbers by their index: the counter-based generator Philox4x32-10 ("Parallel Random
 * Numbers: As Easy as 1, 2, 3", 2011). */
#ifndef MHA_SRC_ENGINE_PHILOX_H
#define MHA_SRC_ENGINE_PHILOX_H

#include <stdint.h>

/* Two numbers of 64 bits choose a sequence of 2^64 words of 32 bits: `seed` is the key, `call` the
 * upper half of the counter. Word e of it is word e mod 4 of the block whose counter has e/4 as its
 * lower half. Of a number of 64 bits the lower word comes first. */
typedef struct mha_philox {
  uint64_t seed, call;
} mha_philox;

/* words[k] = word first + k of the sequence, for k < n. */
void mha_philox_words(const mha_philox *philox, uint64_t first, int64_t n, uint32_t *words);

/* factors[k] = 0 where that word is below `threshold`, otherwise `factor`. */
void mha_philox_factors(const mha_philox *philox, uint64_t first, int64_t n, uint32_t threshold,
                        float factor, float *factors);

#endif
