/* Step 3 by positions: keys and values travel round while those at hand are computed. */
#ifndef MHA_SRC_MPI_RING_H
#define MHA_SRC_MPI_RING_H

#include "agree.h"
#include "blocks.h"

#include <stdbool.h>

/* One attention over the rows of all processes. What is set before mha_mpi_ring_plan: the first
 * block. */
typedef struct mha_mpi_ring {
  mha_mpi_team *team;
  mha_context *context;
  int64_t B, H, G, d, dv; /* this process's heads */
  int32_t order;
  mha_rules rules; /* in rows of all processes; of this process's heads */

  mha_mpi_blocks queries, keys; /* of this process */
  int64_t most_keys;            /* rows that any process has */
  int64_t count;                /* numbers of the largest message */

  /* offsets in the team's scratch, then what lies there */
  size_t at_traveller[2], at_concat, at_part, at_part_lse, at_lse, at_started, at_lists;
  float *traveller[2];    /* K [B][Lk][G·d], then V [B][Lk][G·dv], of one process after the other;
                             the first holds this process's own when the ring begins */
  float *concat;          /* [B][Lq][H·dv], the result so far */
  float *part;            /* [B][piece][H·dv], of one block of keys */
  float *part_lse;        /* [B][H][piece] */
  float *lse;             /* of each piece [B][H][rows], one behind the other */
  unsigned char *started; /* of each piece: whether concat and lse hold anything yet */
  int64_t *offsets, *query_lengths, *key_lengths; /* [B] of one product */
} mha_mpi_ring;

/* Collective by positions: fills in who has which rows, of this process's numbers of them. LENGTH
 * on all processes alike. */
mha_status mha_mpi_ring_gather(mha_mpi_ring *ring, int64_t Lq, int64_t Lk, mha_error *error);

/* Checks what the ring does not take, before anything is sent: packed rows, dropout, offsets and
 * lengths out of range. */
mha_status mha_mpi_ring_check(const mha_mpi_ring *ring, mha_error *error);

/* Adds the ring's scratch to a layout, and finds it in the team's. */
void mha_mpi_ring_plan(mha_mpi_ring *ring, mha_layout *layout);
void mha_mpi_ring_place(mha_mpi_ring *ring);

/* Takes the context's scratch ahead. */
mha_status mha_mpi_ring_reserve(const mha_mpi_ring *ring, mha_error *error);

/* Collective by positions, to its end whatever fails on the way: q [B][Lq][H][d] meets all keys,
 * the result is in concat, and whole after mha_mpi_ring_finish. */
mha_status mha_mpi_ring_run(mha_mpi_ring *ring, const mha_tensor *q, mha_error *error);

/* Queries that see nobody's keys get 0, and the sinks' share leaves the result. */
mha_status mha_mpi_ring_finish(mha_mpi_ring *ring, mha_error *error);

/* Copies the log-sum-exp [B][H][Lq], without sinks, to `log_sum_exp` unless that is NULL. */
void mha_mpi_ring_show(const mha_mpi_ring *ring, float *log_sum_exp);

#endif
