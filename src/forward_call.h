/* One call of a layer, read from the caller's arguments and checked. */
#ifndef MHA_SRC_FORWARD_CALL_H
#define MHA_SRC_FORWARD_CALL_H

#include "attention.h"
#include "cache.h"
#include "context.h"
#include "prepare.h"
#include "project.h"
#include "weights.h"
#include "workspace.h"

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
  mha_address_ranges ranges;                /* all arrays */
  mha_workspace workspace;
  mha_rows_shape q, k, v, concat; /* the workspace's arrays, dense; k and v: also the new rows of a
                                     cache, by their extents */
  bool append, attends;           /* whether keys are projected, and queries */
  bool in_cache;                  /* args.cache has been entered */
  const mha_cache_rows *direct;   /* where in the cache new rows are projected to; NULL = into the
                                     workspace */
  bool gather;                    /* from where they then go to the cache */
  mha_cache_rows cached;          /* with a cache */
  mha_preparing prepare_q, prepare_k;
} mha_forward_call;

/* Reads and checks everything; names, weights and context are set. Enters the cache, if there is
 * one: end with mha_forward_call_end in any case. Writes nothing of the caller's. */
mha_status mha_forward_call_read(mha_forward_call *c, const mha_forward_args *given,
                                 mha_error *error);

/* Whether there is anything to compute. */
bool mha_forward_call_has_work(const mha_forward_call *c);

/* Takes the scratch from the context, which the caller has entered. */
mha_status mha_forward_call_take_workspace(mha_forward_call *c, mha_error *error);

/* Leaves the cache; if the call succeeded, the new rows count from now on. */
void mha_forward_call_end(mha_forward_call *c, bool success);

/* The rows of the inputs that are computed. */
mha_live_rows mha_forward_call_live_queries(const mha_forward_call *c);
mha_live_rows mha_forward_call_live_keys(const mha_forward_call *c);

#endif
