/* Scratch memory and threads of one caller at a time. */
#ifndef MHA_SRC_CONTEXT_H
#define MHA_SRC_CONTEXT_H

#include "attention.h"
#include "memory.h"
#include "parallel.h"
#include "weights.h"

#include <stdatomic.h>

struct mha_context {
  atomic_bool busy;
  mha_allocator allocator;
  mha_threads threads;
  char *arena;
  size_t arena_bytes;
  mha_trace_function *trace;
  void *trace_user;
};

/* Sizes of a call, as far as scratch depends on them. */
typedef struct mha_call_size {
  mha_cut_sizes core;
  int64_t key_rows; /* of each entry's K and V that need room here, not in a cache */
  mha_size_names names;
} mha_call_size;

/* Where the scratch of a call lies in the arena. Without weights the four buffers of the layer are
 * NULL. */
typedef struct mha_workspace {
  float *q;      /* [B·Lq][H·d] */
  float *k;      /* [B·Lk][G·d], unless they go straight to a cache */
  float *v;      /* [B·Lk][G·dv], likewise */
  float *concat; /* [B·Lq][H·dv] */
  float
      *partial; /* mha_partial_floats of the query, key and value projections, or of the output's */
  float *row_max; /* [B][H][Lq] */
  float *row_sum; /* [B][H][Lq] */
  float *parts;   /* of the keys, see attention.h */
  char *workers;  /* worker_bytes for each thread */
  size_t worker_bytes;
} mha_workspace;

/* Enters a context: MHA_ERROR_BUSY if somebody is inside, otherwise the BLAS is held and the caller
 * must leave. */
mha_status mha_context_enter(mha_context *context, mha_error *error);
void mha_context_leave(mha_context *context);

/* Makes sure that the arena holds a call of this size and lays it out. Between enter and leave. */
mha_status mha_context_workspace(mha_context *context, const mha_weights *weights,
                                 const mha_call_size *size, mha_workspace *workspace,
                                 mha_error *error);

#endif
