/* One mha_mpi_forward as data, and what both ways to spread it have in common: the output, which is
 * a sum over the processes that share heads. */
#ifndef MHA_SRC_MPI_CALL_H
#define MHA_SRC_MPI_CALL_H

#include "base/arguments.h"
#include "local.h"

typedef struct mha_mpi_call {
  mha_mpi_team *team;
  mha_context *context;
  const mha_mpi_weights *weights;
  mha_mpi_local local;
  mha_mpi_spread spread;
  mha_rows_shape output; /* [entries][Lq][Eo], packed rows are one entry, with the strides of what
                            the caller receives: all of that or own rows of it */
  int64_t first, own;    /* rows of all entries: where the process's own begin, and how many */
  int64_t n, n_average;  /* numbers of a partial output, and of a partial average */
  size_t at_sum, at_own;
  float
      *sum; /* [n] the partial output, [n_average], and one that is not 0 where a process failed */
  float *own_rows; /* [own][Eo] of the sum */
} mha_mpi_call;

/* Reads how a call is spread; NULL is all defaults. */
mha_status mha_mpi_spread_read(const mha_mpi_spread *given, mha_mpi_spread *spread,
                               mha_error *error);

/* Reads the place of the output, of a call whose arguments have been read. */
mha_status mha_mpi_output_read(mha_mpi_call *c, mha_error *error);

/* Adds the partial output to a layout, finds it in the team's scratch, and has a layer call write
 * there: dense, or, without Wo, into the process's columns between zeros. */
void mha_mpi_output_plan(mha_mpi_call *c, mha_layout *layout);
void mha_mpi_output_place(mha_mpi_call *c, mha_forward_args *args);

/* Collective, whatever `status` this process comes with: sums the partial outputs up and writes
 * the caller's, unless a process has failed, which then all have. */
mha_status mha_mpi_output_finish(mha_mpi_call *c, mha_status status, mha_error *error);

/* Takes ahead what the process's own layer call will need; with gradients of it, too. */
mha_status mha_mpi_call_reserve(const mha_mpi_call *c, int32_t backward, mha_error *error);

/* The two ways, of a call that all agree on. */
mha_status mha_mpi_forward_by_heads(mha_mpi_call *c, mha_error *error);
mha_status mha_mpi_forward_by_positions(mha_mpi_call *c, mha_error *error);

#endif
