/* What `mha inspect` tells of a model beside its tensors. */
#ifndef MHA_SRC_CLI_MODEL_H
#define MHA_SRC_CLI_MODEL_H

#include "mha.h"

#include <stdio.h>

/* Prints what the file says of the model, nothing of what it does not say, and which option its
 * rotary positions need. Nothing at all without an architecture. */
void mha_model_print(const mha_model_info *model, FILE *stream);

/* Prints what a token takes in a layer's cache as each type that it can have. Its keys are `key`
 * numbers, G·d, its values `value`, G·dv: nothing is printed where one of them is 0, not known.
 * Whether there are whole blocks is known with G = n_kv_heads alone; 0 = not known. */
void mha_model_print_cache(int64_t key, int64_t value, int64_t n_kv_heads, FILE *stream);

#endif
