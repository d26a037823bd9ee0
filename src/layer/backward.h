/* One way back through a layer as data, and its steps. */
#ifndef MHA_SRC_LAYER_BACKWARD_H
#define MHA_SRC_LAYER_BACKWARD_H

#include "back_scratch.h"
#include "forward.h"

typedef struct mha_backward_call {
  mha_forward_call forward; /* the call whose way back it is */
  mha_backward_args back;   /* every default filled in */
  mha_rows_shape dy;        /* [B][Lq][Eo] */
  float *d_key, *d_value;   /* where those of key and value go, d_query perhaps */
  const mha_kept *kept;     /* of the tape; NULL = the call is computed again */
  mha_back_scratch scratch;
} mha_backward_call;

/* Computes a call that has been read and checked, with scratch of its context. BUSY, MEMORY, and
 * OVERFLOW for what the engine cannot count. */
mha_status mha_backward_run(mha_backward_call *call, mha_error *error);

#endif
