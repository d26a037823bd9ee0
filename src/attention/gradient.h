/* The way back through step 3, as data and as a list of tasks. */
#ifndef MHA_SRC_ATTENTION_GRADIENT_H
#define MHA_SRC_ATTENTION_GRADIENT_H

#include "base/memory.h"
#include "core.h"
#include "runtime/parallel.h"

/* Rows of a head lie in pages of their own, so no processor guesses the next ones: they are asked
 * for so many rows ahead. */
enum { MHA_ROWS_AHEAD = 8 };

/* Where a gradient [B][L][heads][size] goes; size has stride 1. */
typedef struct mha_gradient_heads {
  float *data; /* NULL = not wanted */
  int64_t batch_stride, row_stride, head_stride;
} mha_gradient_heads;

/* How the way back is cut, by sizes alone. A task has `heads` query heads of one key head, and
 * every chunks-th tile of an entry's queries; `shares` tasks add to the same keys. */
typedef struct mha_gradient_cut {
  int64_t heads, chunks, shares;
} mha_gradient_cut;

/* Offsets of a worker's arrays within its scratch, see back.c. */
typedef struct mha_back_offsets {
  size_t k, v, q, dy, d_k, d_v, d_q, bad_keys, bad_queries;
  size_t weights, gradient, dots, sums, totals, capped, factors;
} mha_back_offsets;

/* One call. */
typedef struct mha_gradient {
  mha_core core; /* of the forward call, its output, row_max and row_sum known */
  mha_heads dy;  /* dO [B][Lq][H][dv] */
  mha_gradient_heads q, k, v;
  float *bias;           /* as the core's bias, or NULL = not wanted */
  float *slopes, *sinks; /* [H], likewise */
  double *key_sums;      /* [G][d], Σ_j dK_j by way of the queries, see gradient.c; or NULL */
  bool accumulate;       /* these are added to what is there */
  bool accumulate_heads; /* likewise those of q, k and v */
  mha_gradient_cut cut;
  float *shared_k; /* [G][shares][rows of K][d], where several tasks share keys */
  float *shared_v; /* [G][shares][rows of V][dv] */
  double *sums;    /* [B][chunks][H] of the slopes, then of the sinks */
  double *moved;   /* [B][chunks][H][d] of the key sums */
  char *scratch;   /* one part for each worker */
  size_t scratch_bytes;
  mha_back_offsets scratch_at;
} mha_gradient;

/* Where the scratch of a call lies in an arena. */
typedef struct mha_gradient_scratch {
  size_t shared_k, shared_v, sums, moved, workers, worker_bytes;
} mha_gradient_scratch;

/* Entries of the largest call whose tasks may share keys. The fewer there are, the more tasks share
 * a key head, so a smaller call may take more scratch than a larger one. */
int64_t mha_gradient_most_shared_entries(void);

/* Lays the scratch out for at most n_threads. */
mha_gradient_scratch mha_gradient_plan(const mha_cut_sizes *sizes, int32_t n_threads,
                                       mha_layout *layout);

/* Cuts the call and gives it its places in the arena. */
void mha_gradient_use(mha_gradient *call, char *arena, const mha_gradient_scratch *at);

/* Computes all that is wanted. */
mha_status mha_gradient_run(const mha_gradient *call, const mha_threads *threads);

#endif
