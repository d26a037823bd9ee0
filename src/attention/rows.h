/* The rows of one task: their running softmax, from nothing seen to the result. */
#ifndef MHA_SRC_ATTENTION_ROWS_H
#define MHA_SRC_ATTENTION_ROWS_H

#include "block.h"

/* Rows of a block, and what the keys so far have made of each: the largest score m, the sum l of
 * exp(score - m), and their O in the block's output. Row (k, r), head h + k and query i + r, has
 * index k·n + r. */
typedef struct mha_rows {
  const mha_core *core;
  mha_block block;
  float *max;        /* m */
  float *sum;        /* l */
  float *poison;     /* see poison.h */
  float *correction; /* exp(m_old - m_new) of the tile at hand */
  float *spare;      /* [keys of a tile] */
  const uint8_t
      *kinds; /* what each value of the tile at hand is, if values are replaced; or NULL */
} mha_rows;

/* Nothing seen: m = -inf, l = 0, O = 0 for the products to add to. */
void mha_rows_start(const mha_rows *rows);

/* Turns the scores of `tile`, as mha_block_scores leaves them, a part of the block, into P = exp(S
 * - m), 0 for hidden keys; brings m and l up to date, and O to the new m. Then drops weights, of
 * which m and l know nothing. */
void mha_rows_advance(const mha_rows *rows, const mha_block *tile, mha_range keys);

/* Whether one of the first `live` queries has an O that its scores do not explain: the product met
 * a value that is not finite, perhaps a hidden one. */
bool mha_rows_are_suspect(const mha_rows *rows, int64_t live);

/* O /= l, the sink's share in l, and O goes where the core wants it. */
void mha_rows_finish(const mha_rows *rows);

/* The same for one row [dv] of head h. */
void mha_rows_finish_one(const mha_core *core, int64_t h, float max, float sum, float poison,
                         float *output);

#endif
