/* A tile of queries on the way back: its weights again, and the gradient of its scores. */
#ifndef MHA_SRC_ATTENTION_BACK_H
#define MHA_SRC_ATTENTION_BACK_H

#include "gradient.h"

/* Which scores a gradient is of. */
typedef enum mha_back_stage {
  MHA_BACK_FINAL, /* dF, of the final scores */
  MHA_BACK_SCALED /* dS, of scale·(q·k), and the weights are those that dropout left */
} mha_back_stage;

/* Queries [i, i + n) of head h of entry b. */
typedef struct mha_back {
  const mha_gradient *call;
  mha_back_stage stage;
  int64_t b, h, i, n;
  int64_t live;   /* of the n, those within the entry's length */
  bool clean;     /* no number of Q, K, V and dO of the head is infinite or NaN */
  mha_view q, dy; /* [live][d], [live][dv]; of a head that is not clean copies with 0 in bad rows */
  mha_view k, v;  /* [keys][d], [keys][dv] of the tile at hand, likewise */
  float *weights; /* P [n][stride] */
  float *gradient; /* dF or dS [n][stride] */
  int64_t stride;
  float *dots;                  /* D [n] */
  double *sums;                 /* [n] of dF, of the tiles so far */
  double *totals;               /* [n] of dS, of the tiles so far; under a softcap */
  double slope;                 /* Σ dF·|i + off - j| so far */
  float *capped, *factors;      /* of one row */
  float *key_room, *value_room; /* [keys][d + 1], [keys][dv + 1] */
  float *query_room, *dy_room;  /* [n][d + 1], [n][dv + 1] */
  uint8_t *bad_queries;         /* [n] of a head that is not clean */
  uint8_t *bad_keys;            /* [keys] of the tile at hand, likewise */
} mha_back;

/* Tiles of the way back, for the walk over them. */
mha_cut mha_back_cut(void);

/* Lays out a worker's scratch. */
mha_back_offsets mha_back_plan(const mha_cut_sizes *sizes, mha_layout *layout);

/* Whether no number of the head's Q, K, V and dO that the way back may read is infinite or NaN. The
 * block has b, h and its scratch. */
bool mha_back_is_clean(const mha_back *back);

/* A worker's block: where its arrays are. */
mha_back mha_back_begin(const mha_gradient *call, mha_back_stage stage, int32_t worker);

/* Takes up queries [i, i + n). */
void mha_back_take(mha_back *back, int64_t i, int64_t n);

/* Weights and gradients of the queries `rows` for the keys of one tile; both 0 where hidden. Of a
 * bad query, which met a number that is not finite, weights are 0 and visible gradients NaN. */
mha_status mha_back_tile(mha_back *back, mha_range rows, mha_range keys);

#endif
