/* A layer call as one of the processes that share its heads makes it. */
#ifndef MHA_SRC_MPI_LOCAL_H
#define MHA_SRC_MPI_LOCAL_H

#include "agree.h"
#include "share.h"

/* Arguments that point to each other, for this process's heads; filled in where they lie. */
typedef struct mha_mpi_local {
  mha_forward_args given; /* as the caller has them */
  mha_forward_args args;
  mha_rules rules;
  mha_results results;
  bool has_results;
} mha_mpi_local;

/* Reads the arguments of a call and turns masks, biases, slopes, sinks and inputs without a matrix
 * to the process's heads. What mha_forward checks is left to it. */
mha_status mha_mpi_local_read(const mha_mpi_weights *weights, const mha_forward_args *given,
                              mha_mpi_local *local, mha_error *error);

/* The same of rules alone, of H heads of which the process has n from `first` on. */
mha_status mha_mpi_local_rules(const mha_rules *given, int64_t H, int64_t first, int64_t n,
                               mha_rules *rules, mha_error *error);

/* Everything that has to be the same on all processes: rules of B entries with so many heads, and
 * calls. `rows_too`: the numbers of rows are, and what is given for each of them. */
void mha_mpi_local_rules_facts(mha_mpi_facts *facts, const mha_rules *rules, int64_t B, int64_t H);
void mha_mpi_local_facts(mha_mpi_facts *facts, const mha_mpi_local *local,
                         const mha_mpi_weights *weights, bool rows_too);

/* Rows that are L rows of `width` numbers for each of B entries: strides that were left out. */
void mha_mpi_local_strides(int64_t L, int64_t width, int64_t *batch_stride, int64_t *row_stride);

#endif
