/* The gradient of the additive bias. */
#ifndef MHA_SRC_ATTENTION_GRADIENT_BIAS_H
#define MHA_SRC_ATTENTION_GRADIENT_BIAS_H

#include "gradient.h"

/* dbias += dF, summed over the axes that the bias is broadcast along; dbias = where nothing is
 * added to. Scratch is the call's. */
mha_status mha_gradient_bias_run(mha_gradient *call, const mha_threads *threads);

#endif
