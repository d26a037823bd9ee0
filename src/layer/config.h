/* A layer's config: the one derivation of its sizes. */
#ifndef MHA_SRC_LAYER_CONFIG_H
#define MHA_SRC_LAYER_CONFIG_H

#include "base/ieee.h"
#include "mha.h"

#include <stdbool.h>

/* Widths inside a layer: H·d, G·d, G·dv, H·dv, and the sum of the first three. */
typedef struct mha_widths {
  int64_t q, k, v, concat, packed;
} mha_widths;

/* The widths of a config whose sizes are known; false if they overflow. */
bool mha_config_widths(const mha_config *config, mha_widths *widths);

/* What the matrices of a file tell: input widths Eq, Ek, Ev, the output width Eo; and either the
 * output widths of Wq and Wv, or that of one matrix that holds all three. */
typedef struct mha_extents {
  int64_t query, key, value, output;
  int64_t q, v, packed; /* 0 = there is no such matrix */
} mha_extents;

/* Fills in what a config leaves 0. NULL, or the rule that the extents break, of Wv if *of_value.
 * The config's sizes are not negative. */
const char *mha_config_derive(mha_config *config, const mha_extents *extents, bool *of_value);

/* Fills in what a config still leaves 0, from its other sizes and from the matrices that are
 * absent, each of which makes an input and an output width equal; checks all of it. */
mha_status mha_config_complete(mha_config *config, const mha_matrices *matrices, mha_widths *widths,
                               mha_error *error);

/* 1/√d, the scale where none is given. */
float mha_default_scale(int64_t d);

#endif
