/* Between projection and attention: Q and K are normalised and turned to their positions. */
#ifndef MHA_SRC_LAYER_PREPARE_H
#define MHA_SRC_LAYER_PREPARE_H

#include "attention/visibility.h"
#include "project.h"
#include "runtime/parallel.h"
#include "weights.h"

/* Rotary positions of the rows of one array: given, or counted from where the entry's rows begin.
 */
typedef struct mha_positions {
  const char *name;     /* of one row: "query" or "key", for messages */
  const int64_t *given; /* [B][L], packed [rows]; NULL = counted */
  int64_t offset;       /* added to either */
} mha_positions;

/* Rows of Q or K after their projection, in place. */
typedef struct mha_preparing {
  const mha_weights *weights;
  const mha_visibility *visibility; /* the entries: where each begins, packed or in a cache */
  const float *norm;                /* weight of the normalisation or NULL */
  int64_t heads;
  float *data; /* [B][L][heads·d] */
  float *raw;  /* receives the rows as they were, where the layer normalises them; or NULL */
  mha_rows_shape shape;
  const mha_cache_rows *cached; /* as in mha_projecting */
  mha_live_rows live;
  bool keys; /* packed: rows begin at key_starts, not at query_starts */
  mha_positions positions;
} mha_preparing;

/* Fails if a row that is computed has a position below 0 or beyond the tables. */
mha_status mha_prepare_check(const mha_preparing *rows, mha_error *error);

/* Normalises and turns the rows of n arrays. */
mha_status mha_prepare(const mha_threads *threads, const mha_preparing *arrays, int n);

/* The way back of one array: `data` holds the gradient of what mha_prepare made, and gets that of
 * the rows as they were, which are in `raw`. The gradient of the normalisation's weight is added up
 * in parts of `sums`, in their order in the first of them; NULL = it is not wanted. */
enum { MHA_PREPARE_PARTS = 32 };
int64_t mha_prepare_sums(const mha_preparing *rows); /* doubles */
mha_status mha_prepare_back(const mha_threads *threads, const mha_preparing *rows, double *sums);

#endif
