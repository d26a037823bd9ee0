/* A layer's sizes and the shapes of its tensors: each follows from the other. */
#ifndef MHA_SRC_FILES_SIZES_H
#define MHA_SRC_FILES_SIZES_H

#include "names.h"

/* Checks the ranks of the layer's tensors, fills in the sizes and the norm that `config` leaves 0,
 * and checks every shape against them. `path` is for messages. SIZE, VALUE: what config gives;
 * HEADS: a width that the heads do not share evenly; WEIGHTS: a shape that does not fit. */
mha_status mha_sizes_derive(const mha_layer_names *layer, const char *path, mha_config *config,
                            mha_error *error);

#endif
