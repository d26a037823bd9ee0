/* The processes that share a layer: their communicators, this one's place, and its scratch. */
#ifndef MHA_SRC_MPI_TEAM_H
#define MHA_SRC_MPI_TEAM_H

#include "base/memory.h"
#include "mha_mpi.h"

struct mha_mpi_team {
  mha_allocator allocator;
  mha_mpi_place place;
  MPI_Comm all, heads, positions;
  int64_t *lengths; /* [by_positions][2] rows of queries and of keys that each has, of a call */
  int64_t *counts;  /* [by_heads] numbers of a sum that each receives */
  char *scratch;
  size_t scratch_bytes;
  mha_mpi_trace_function *trace;
  void *trace_user;
};

/* Makes the team's scratch at least so large; what it held is gone. MEMORY; OVERFLOW where the
 * layout has. */
mha_status mha_mpi_team_provide(mha_mpi_team *team, const mha_layout *layout, mha_error *error);

/* The message of what MPI returned, unless that is success; `what` failed. */
mha_status mha_mpi_check(int code, const char *what, mha_error *error);

/* Tells the trace of work that began at `begin` and has ended now. */
double mha_mpi_now(const mha_mpi_team *team);
void mha_mpi_tell(const mha_mpi_team *team, int32_t work, int32_t step, double begin,
                  int64_t bytes);

/* The messages of `bytes` bytes that MPI, which counts in int, takes at a time. */
enum { MHA_MPI_MOST = 1 << 28 };

/* Adds n floats up over the processes that share heads, into all of their copies. */
mha_status mha_mpi_sum(const mha_mpi_team *team, float *numbers, int64_t n, mha_error *error);

/* The same where process r receives only team->counts[r] numbers of the sum, the r-th part of it.
 */
mha_status mha_mpi_sum_parts(const mha_mpi_team *team, float *numbers, float *own,
                             mha_error *error);

#endif
