/* Values that are not finite, and who sees them. */
#ifndef MHA_SRC_ATTENTION_POISON_H
#define MHA_SRC_ATTENTION_POISON_H

#include "block.h"

/* What one row of V holds. */
enum { MHA_VALUE_FINITE = 0, MHA_VALUE_INFINITE = 1, MHA_VALUE_NAN = 2 };

/* Copies V of one key tile and the block's first key head to `values` [keys][dv], with 0 in its
 * non-finite rows; notes the kind of each. The copy is of the type of V. */
mha_stored mha_poison_replace(const mha_core *core, const mha_block *block, mha_range keys,
                              void *values, uint8_t *kinds);

/* Scores lack `factor` > 0. poison = the largest score that a row gives to an infinite value; +inf
 * if it sees a NaN, which no weight can make harmless. -inf where it sees neither. */
void mha_poison_remember(float *poison, const uint8_t *kinds, float factor, const float *scores,
                         int64_t n);

/* Whether the weight of what was remembered does not round to 0, so that the row is NaN. */
bool mha_poison_counts(float poison, float max, float denominator);

#endif
