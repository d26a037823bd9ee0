/* Rotary positions of one row. */
#ifndef MHA_SRC_LAYER_ROPE_H
#define MHA_SRC_LAYER_ROPE_H

#include "base/ieee.h"
#include "mha.h"

/* frequencies[p] = rope_base^(-2p/rotary_size) for p in [0, rotary_size/2): the angle of pair p per
 * position. */
void mha_rope_frequencies(const mha_config *config, double *frequencies);

/* Positions from 0 up to this one are possible: the tables' last, or every one. */
int64_t mha_rope_last_position(const mha_config *config);

/* Turns the heads of a row of Q or K [heads·d] in place by a position in [0, last]; frequencies are
 * those of the config, not used with tables. Without rotary positions nothing happens. */
void mha_rope_row(const mha_config *config, const double *frequencies, int64_t position,
                  int64_t heads, float *row);

/* The way back of the same: turns a gradient by the transposed turn, (a, b) -> (a·cos + b·sin,
 * b·cos - a·sin). */
void mha_rope_row_back(const mha_config *config, const double *frequencies, int64_t position,
                       int64_t heads, float *gradient);

#endif
