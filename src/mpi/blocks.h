/* Which rows of all each process has, by positions. */
#ifndef MHA_SRC_MPI_BLOCKS_H
#define MHA_SRC_MPI_BLOCKS_H

#include "mha_mpi.h"

/* Neighbouring rows of a process: rows [begin, begin + length) of all, of which the first is its
 * row `row`. */
typedef struct mha_mpi_block {
  int64_t begin, length, row;
} mha_mpi_block;

/* A process's rows, in at most two blocks, the earlier one first. */
enum { MHA_MPI_BLOCKS_OF_ONE = 2 };
typedef struct mha_mpi_blocks {
  mha_mpi_block at[MHA_MPI_BLOCKS_OF_ONE];
  int64_t rows; /* of the process */
  int64_t all;  /* of all processes */
} mha_mpi_blocks;

/* The rows of process r of p, where process u has lengths[2·u]: queries, or one behind: keys. */
mha_mpi_blocks mha_mpi_blocks_of(int32_t order, int32_t p, int32_t r, const int64_t *lengths);

/* Fails with LENGTH unless every process has as many as the order gives it. `name` is what the
 * caller calls the number of its rows. */
mha_status mha_mpi_blocks_check(int32_t order, int32_t p, const int64_t *lengths, const char *name,
                                mha_error *error);

/* Of `length` rows counted over all, those within the process's: always its first ones. */
int64_t mha_mpi_blocks_within(const mha_mpi_blocks *blocks, int64_t length);

#endif
