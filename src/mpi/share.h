/* Which part of a layer a process has. */
#ifndef MHA_SRC_MPI_SHARE_H
#define MHA_SRC_MPI_SHARE_H

#include "mha_mpi.h"

#include <stdbool.h>

struct mha_mpi_weights {
  mha_allocator allocator;
  mha_weights *layer; /* this process's heads */
  mha_config whole;   /* of the whole layer, all sizes derived, allocator NULL */
  bool absent[4];     /* Wq, Wk, Wv, Wo */
  bool has_output_bias;
  int64_t ld[4];      /* between stored rows of their gradients */
  bool is_loaded;     /* gradients lie as the share does, otherwise as the whole layer */
  int32_t n;          /* processes that share the heads */
  int32_t head;       /* this one's number among them */
  int64_t n_heads;    /* H/n */
  int64_t n_kv_heads; /* at least 1 */
  int64_t first_head, first_kv_head;
  int32_t sharers;               /* processes that hold the same key heads */
  mha_release_function *release; /* of borrowed arrays, or NULL */
  void *release_user;
};

/* Columns of Q, K, V and concat at which the process's heads begin. */
typedef struct mha_mpi_columns {
  int64_t q, k, v, concat;
} mha_mpi_columns;
mha_mpi_columns mha_mpi_share_columns(const mha_mpi_weights *weights);

#endif
