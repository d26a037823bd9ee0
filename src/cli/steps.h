/* A layer call token by token, over a key/value cache, as text is generated. */
#ifndef MHA_SRC_CLI_STEPS_H
#define MHA_SRC_CLI_STEPS_H

#include "mha.h"

/* Does what mha_forward would do with causal self attention, in Lq calls of one token each. `args`
 * is dense, without key, value and cache; its attention is causal and has neither lengths nor
 * starts nor average. The numbers agree within rounding; stages before the softmax show -inf for
 * the keys behind the query's own, which were not there yet. The cache holds keys and values as
 * cache_type, an mha_element. On failure outputs hold anything. */
mha_status mha_forward_by_steps(mha_context *context, const mha_weights *weights,
                                const mha_config *config, int32_t cache_type,
                                const mha_forward_args *args, mha_error *error);

#endif
