/* The scratch of a layer call: how much, and where each array lies in the context's arena. */
#ifndef MHA_SRC_LAYER_SCRATCH_H
#define MHA_SRC_LAYER_SCRATCH_H

#include "attention/laid.h"
#include "project.h"
#include "runtime/context.h"
#include "weights.h"

/* What the caller calls the sizes of a call, for messages about their product. */
typedef struct mha_size_names {
  const char *batch, *query_length, *key_length;
} mha_size_names;

/* Sizes of a call, as far as scratch depends on them. */
typedef struct mha_call_size {
  mha_cut_sizes core;
  int64_t key_rows; /* of each entry's K and V that need room here, not in a cache */
  int64_t new_rows; /* of each entry's key and value that are projected */
  mha_laid_strides strides;
  mha_size_names names;
  bool kept;     /* Q, K, V and concat have room elsewhere */
  size_t before; /* bytes of the arena that are somebody else's */
} mha_call_size;

/* Buffers of a layer. */
typedef struct mha_scratch {
  float *q;      /* [B·Lq][H·d] */
  float *k;      /* [B·Lk][G·d], unless they go straight to a cache */
  float *v;      /* [B·Lk][G·dv], likewise */
  float *concat; /* [B·Lq][H·dv] */
  float
      *partial; /* mha_partial_floats of the query, key and value projections, or of the output's */
  mha_widening widening; /* which the projections share */
} mha_scratch;

/* Rows of Q in the workspace, and of V there or in a cache. */
mha_laid_strides mha_scratch_strides(const mha_weights *weights);

/* Fails with OVERFLOW: the sizes of a call have no product. */
mha_status mha_scratch_overflow(const mha_call_size *size, mha_error *error);

/* Bytes that a call of this size takes in a context; weights NULL = of mha_attend. OVERFLOW if its
 * sizes have no product. */
mha_status mha_scratch_measure(const mha_context *context, const mha_weights *weights,
                               const mha_call_size *size, size_t *bytes, mha_error *error);

/* Makes sure that the context, which the caller has entered or claimed, has so many bytes and, if
 * it takes any, the kernels of calls of n sizes. On failure it is as it was. */
mha_status mha_scratch_provide(mha_context *context, const mha_weights *weights,
                               const mha_call_size *sizes, int n, size_t bytes, mha_error *error);

/* Makes sure that the context, which the caller has entered, has room and kernels for a call of
 * this size, and gives the buffers and the core their places in it, and the core its engine.
 * Without weights there is no workspace. */
mha_status mha_scratch_take(mha_context *context, const mha_weights *weights,
                            const mha_call_size *size, mha_core *core, mha_scratch *workspace,
                            mha_error *error);

#endif
