/* One call of a layer as data, and its five steps. */
#ifndef MHA_SRC_LAYER_FORWARD_H
#define MHA_SRC_LAYER_FORWARD_H

#include "attention/core.h"
#include "cache/cache.h"
#include "prepare.h"
#include "project.h"
#include "runtime/context.h"
#include "scratch.h"
#include "tape.h"
#include "weights.h"

/* What the caller calls the arguments that mha_forward and mha_self_attention have in common. */
typedef struct mha_forward_names {
  mha_size_names sizes;
  const char *query, *output;
  const char *row; /* one row of the query */
} mha_forward_names;

typedef struct mha_forward_call {
  const mha_forward_names *names;
  const mha_weights *weights;
  mha_context *context;
  mha_forward_args args;                    /* every default filled in */
  mha_rows_shape query, key, value, output; /* the caller's arrays */
  mha_core core;                            /* step 3 */
  mha_address_ranges ranges;                /* all arrays, by address */
  mha_scratch workspace;
  const mha_kept *kept; /* where the way back finds what it needs; NULL = it is not kept */
  size_t before;        /* bytes of the arena in front of the call's scratch */
  mha_rows_shape q, k, v, concat; /* the workspace's arrays, dense; k and v: also the new rows of a
                                     cache, by their extents */
  bool append, attends;           /* whether keys are projected, and queries */
  bool back;                      /* it is read for its way back: output and results do not count */
  bool in_cache;                  /* args.cache has been entered */
  const mha_cache_rows *direct;   /* where in the cache new rows are projected to; NULL = into the
                                     workspace */
  bool gather;                    /* from where they then go to the cache */
  mha_cache_rows cached;          /* with a cache */
  mha_preparing prepare_q, prepare_k;
} mha_forward_call;

/* The rows of the inputs that are computed. */
mha_live_rows mha_forward_live_queries(const mha_forward_call *c);
mha_live_rows mha_forward_live_keys(const mha_forward_call *c);

/* Sizes of what the call keeps. */
mha_kept_size mha_forward_kept_size(const mha_forward_call *c);

/* Computes a call that has been read and checked, with scratch of its context, and fills its tape.
 * BUSY, which leaves the tape as it is, MEMORY, and OVERFLOW for what the engine cannot count. */
mha_status mha_forward_run(mha_forward_call *c, mha_error *error);

/* 2. and 4.: gives a core its Q, K, V and output, which are buffers of the call's sizes with heads
 * side by side. */
void mha_forward_split(const mha_forward_call *c, const float *q, const float *k, const float *v,
                       float *concat, mha_core *core);

/* Steps 1 to 3 once more, into what is kept, of a call whose context has been entered and has the
 * room: nothing of the caller's is written, and no trace shows it. */
mha_status mha_forward_again(mha_forward_call *c, mha_error *error);

/* Steps 1 and 2 alone, into what is kept: of Q where the call attends, of K and V where it appends.
 * Then step 5 alone, from concat [B][Lq][H·dv]. Both enter the context; errors as mha_forward_run.
 */
mha_status mha_forward_project(mha_forward_call *c, mha_error *error);
mha_status mha_forward_finish(mha_forward_call *c, const float *concat, mha_error *error);

#endif
