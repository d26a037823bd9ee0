/* A head on its way back: its rows gathered, and of a tile of queries the weights again and the
 * gradient of the scores. */
#ifndef MHA_SRC_ATTENTION_BACK_H
#define MHA_SRC_ATTENTION_BACK_H

#include "gradient.h"

/* Which scores a gradient is of. */
typedef enum mha_back_stage {
  MHA_BACK_FINAL, /* dF, of the final scores */
  MHA_BACK_SCALED /* dS, of scale·(q·k), and the weights are those that dropout left */
} mha_back_stage;

/* A worker's arrays, and what they hold: the keys of key head g of entry b, and n queries from i on
 * of head h. Rows are dense; those with a number that is not finite are 0 and marked. */
typedef struct mha_back {
  const mha_gradient *call;
  mha_back_stage stage;
  int64_t b, g, h, i;
  int64_t live;                    /* n, or those of the n within the entry's length */
  float *k, *v;                    /* [keys][d], [keys][dv] */
  float *q, *dy;                   /* [n][d], [n][dv], dy: dO */
  float *d_k, *d_v, *d_q;          /* [keys][d], [keys][dv], [n][d]: room for the gradients */
  uint8_t *bad_keys, *bad_queries; /* [keys], [n]: marks */
  bool has_bad_keys, has_bad_queries;
  float *weights, *gradient; /* [n][stride]: P, dF or dS of the tile at hand */
  int64_t stride;
  float *dots;             /* D [n] */
  double *sums;            /* [n] of dF, of the tiles so far */
  double *totals;          /* [n] of dS, of the tiles so far; under a softcap */
  double slope;            /* Σ dF·|i + off - j| of the head, likewise */
  float *capped, *factors; /* of one row */
} mha_back;

/* Tiles of the way back, for the walk over them. */
mha_cut mha_back_cut(const mha_cut_sizes *sizes);

/* Lays out a worker's scratch. */
mha_back_offsets mha_back_plan(const mha_cut_sizes *sizes, mha_layout *layout);

/* A worker's arrays, which hold nothing yet. */
mha_back mha_back_begin(const mha_gradient *call, mha_back_stage stage, int32_t worker);

/* Gathers the keys and values of key head g of entry b. */
void mha_back_take_keys(mha_back *back, int64_t b, int64_t g);

/* Gathers queries [i, i + n) of head h, one of those that the key head serves. A bad query met a
 * number that is not finite; it is 0 here, as is one that sees no key and passes nothing back. */
void mha_back_take_queries(mha_back *back, int64_t h, int64_t i, int64_t n);

/* Weights and gradients of the queries `rows` for the keys of one tile; both 0 where hidden. Of a
 * bad query weights are 0 and visible gradients NaN. */
mha_status mha_back_tile(mha_back *back, mha_range rows, mha_range keys);

#endif
