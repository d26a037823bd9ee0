/* Dropout: which weights of a row are multiplied by 0, and the others by what. */
#ifndef MHA_SRC_ATTENTION_DROPOUT_H
#define MHA_SRC_ATTENTION_DROPOUT_H

#include "core.h"

/* factors[j - keys.begin] = 0 or 1/(1 - p) for the weights of query i of head h of entry b and the
 * keys `keys`. Only where core->dropout.threshold is not 0. */
void mha_dropout_factors(const mha_core *core, int64_t b, int64_t h, int64_t i, mha_range keys,
                         float *factors);

#endif
