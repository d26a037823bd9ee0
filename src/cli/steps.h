/* A layer call token by token, over a key/value cache, as text is generated. */
#ifndef MHA_SRC_CLI_STEPS_H
#define MHA_SRC_CLI_STEPS_H

#include "calls.h"

/* How the cache holds keys and values. */
typedef struct mha_steps_cache {
  int32_t type;        /* mha_element */
  int64_t page_tokens; /* 0 = no pages */
} mha_steps_cache;

/* Does what mha_forward would do with causal self attention, in Lq calls of one token each. `args`
 * is dense, without key, value and cache; its attention is causal and has neither lengths nor
 * starts nor average. The numbers agree within rounding; stages before the softmax show -inf for
 * the keys behind the query's own, which were not there yet. On failure outputs hold anything. */
mha_status mha_forward_by_steps(const mha_calls *calls, mha_context *context,
                                const mha_weights *weights, const mha_config *config,
                                const mha_steps_cache *cache, const mha_forward_args *args,
                                mha_error *error);

#endif
