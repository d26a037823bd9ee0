/* RMS normalisation of one row or of the heads in it. */
#ifndef MHA_SRC_LAYER_NORM_H
#define MHA_SRC_LAYER_NORM_H

#include "base/ieee.h"
#include "mha.h"

/* Normalises a row of Q or K [heads·d] in place, as the layer's config has it. weight is
 * query_norm or key_norm of the layer. Without a normalisation nothing happens. */
void mha_norm_row(const mha_config *config, const float *weight, int64_t heads, float *row);

#endif
