/* RMS normalisation of one row or of the heads in it. */
#ifndef MHA_SRC_LAYER_NORM_H
#define MHA_SRC_LAYER_NORM_H

#include "base/ieee.h"
#include "mha.h"

/* Normalises a row of Q or K [heads·d] in place, as the layer's config has it. weight is
 * query_norm or key_norm of the layer. Without a normalisation nothing happens. */
void mha_norm_row(const mha_config *config, const float *weight, int64_t heads, float *row);

/* The way back of the same for x, the row before it: gradient [heads·d] becomes that of x, in
 * place, and sums [d], or [heads·d], gets that of the weight added; NULL = it is not wanted. What
 * is 0 stays 0, whatever x holds. */
void mha_norm_row_back(const mha_config *config, const float *weight, int64_t heads, const float *x,
                       float *gradient, double *sums);

#endif
