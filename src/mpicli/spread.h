/* Layer calls as one process would make them, spread over all: every process comes with the whole
 * layer and all rows, and leaves with the whole result. */
#ifndef MHA_SRC_MPICLI_SPREAD_H
#define MHA_SRC_MPICLI_SPREAD_H

#include "mha_mpi.h"

typedef struct mha_spread {
  mha_mpi_team *team; /* of MPI_COMM_WORLD */
  mha_mpi_place place;
} mha_spread;

/* Makes a team in which so many processes share heads, 0 = all. */
mha_status mha_spread_create(mha_spread *spread, int32_t by_heads, mha_error *error);
void mha_spread_destroy(mha_spread *spread);

/* mha_forward and mha_backward. UNSUPPORTED or HEADS where libmha_mpi does not do it, as also for a
 * cache of all key heads: one of the share's is given as mha_spread_kv_heads says. A tape is of the
 * share, and there is none: it is not filled. */
mha_status mha_spread_forward(const mha_spread *spread, mha_context *context,
                              const mha_weights *weights, const mha_forward_args *args,
                              mha_error *error);
mha_status mha_spread_backward(const mha_spread *spread, mha_context *context,
                               const mha_weights *weights, const mha_forward_args *args,
                               const mha_backward_args *back, mha_error *error);

/* Leaves masks and biases with all rows those of `own`. */
void mha_spread_cut_rules(mha_rules *rules, mha_mpi_range own);

/* Key heads that this process's share has, of G. */
int64_t mha_spread_kv_heads(const mha_spread *spread, int64_t G);

#endif
