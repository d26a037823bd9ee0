/* What a file says of the model that a layer is part of, and what that means for the layer. */
#ifndef MHA_SRC_FILES_MODEL_H
#define MHA_SRC_FILES_MODEL_H

#include "names.h"

/* Which pairs turn in models of an architecture, an mha_rope; MHA_ROPE_NONE = none, or the name is
 * not known. */
int32_t mha_model_rope(const char *architecture);

/* Fills in what `config` leaves 0 and the model says: H, G, d and dv, unless the config contradicts
 * it in one of them; where the layer has norms, their epsilon; where config.rope is set, the
 * rotary size and the base, unless there are tables. */
void mha_model_complete(const mha_raw_tensors *tensors, const mha_layer_names *layer,
                        mha_config *config);

/* UNSUPPORTED where config.rope is set without tables and the file has frequencies of its own, or
 * where the base is to be the file's and does not say all. */
mha_status mha_model_check_rope(const mha_raw_tensors *tensors, const char *path,
                                const mha_config *config, mha_error *error);

#endif
