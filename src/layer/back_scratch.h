/* The scratch of a way back: how much, and where each array lies in the context's arena. */
#ifndef MHA_SRC_LAYER_BACK_SCRATCH_H
#define MHA_SRC_LAYER_BACK_SCRATCH_H

#include "attention/gradient.h"
#include "scratch.h"
#include "tape.h"

/* What a way back through a layer, or through step 3 alone, has beside the caller's arrays. */
typedef struct mha_back_scratch {
  mha_kept kept;                     /* of a call that is computed again; step 3 alone: concat is
                                        its output, and there are no others but row statistics */
  float *d_concat, *d_q, *d_k, *d_v; /* as concat, Q, K and V */
  double *key_sums;                  /* [G·d] */
  double *sums_q, *sums_k;           /* mha_prepare_sums */
  mha_gradient_scratch gradient;     /* offsets in the arena, of the time of step 3 */
  mha_widening widening;             /* of the time of the projections */
  char *panels;                      /* mha_weight_gradient_bytes for each worker, likewise */
  size_t before;                     /* where the scratch of a call that is computed again begins */
} mha_back_scratch;

/* Bytes that it takes; `again`: the call is computed again. weights NULL = of step 3 alone.
 * OVERFLOW if its sizes have no product. */
mha_status mha_back_scratch_measure(const mha_context *context, const mha_weights *weights,
                                    const mha_call_size *size, bool again, size_t *bytes,
                                    mha_error *error);

/* Makes sure that the context, which the caller has entered, has the room, and gives the arrays
 * their places. */
mha_status mha_back_scratch_take(mha_context *context, const mha_weights *weights,
                                 const mha_call_size *size, bool again, mha_back_scratch *scratch,
                                 mha_error *error);

#endif
