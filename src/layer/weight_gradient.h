/* Gradients of matrices and biases: dW = Xᵀ·dY and db = Σ dY over the rows of a call. */
#ifndef MHA_SRC_LAYER_WEIGHT_GRADIENT_H
#define MHA_SRC_LAYER_WEIGHT_GRADIENT_H

#include "base/memory.h"
#include "project.h"

/* One projection y = x·W + b on its way back. */
typedef struct mha_weight_gradient {
  const mha_projection *projection;
  const float *x;  /* [B][L][in] */
  const float *dy; /* [B][L][out] */
  mha_rows_shape x_shape, dy_shape;
  mha_live_rows live; /* rows that were computed; others are not read for W */
  bool is_output;     /* of Wo: dY is the caller's, and bo was added to the other rows too */
  float *matrix;      /* as the projection's matrix, or NULL = not wanted */
  float *bias;        /* [out], likewise */
  const double *sums; /* [out], Σ dY known more exactly, for those that are finite; or NULL */
} mha_weight_gradient;

/* Tasks that a matrix is cut into. */
int64_t mha_weight_gradient_tasks(const mha_projection *projection);

/* Bytes of scratch that a worker needs for projections up to any width. */
size_t mha_weight_gradient_bytes(void);

/* Computes n of them, n at most 4, overwriting what is there or adding to it. scratch has those
 * bytes for each of the context's threads. */
mha_status mha_weight_gradients(const mha_context *context, const mha_weight_gradient *gradients,
                                int n, bool accumulate, char *scratch);

#endif
