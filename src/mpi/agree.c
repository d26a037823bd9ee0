/* Owns agreements. Each process sends a vector of one length, whatever it calls: what is the least
 * of all of v and of ~v tells the extremes of v, in one reduction. */
#include "agree.h"

#include "base/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- facts ---- */

enum { NUMBER, REAL, DIGEST };

static void add(mha_mpi_facts *facts, const char *name, int64_t value, int kind) {
  if (facts->n >= MHA_MPI_MOST_FACTS) /* none of our lists is as long */
    return;
  facts->names[facts->n] = name;
  facts->kinds[facts->n] = (unsigned char)kind;
  facts->values[facts->n++] = value;
}

void mha_mpi_fact(mha_mpi_facts *facts, const char *name, int64_t value) {
  add(facts, name, value, NUMBER);
}

void mha_mpi_fact_float(mha_mpi_facts *facts, const char *name, double value) {
  int64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  add(facts, name, bits, REAL);
}

/* FNV-1a. */
static int64_t digest(const void *data, size_t bytes) {
  uint64_t hash = UINT64_C(14695981039346656037);
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ at[i]) * UINT64_C(1099511628211);
  return (int64_t)(hash >> 1);
}

void mha_mpi_fact_list(mha_mpi_facts *facts, const char *name, const int64_t *list, int64_t n) {
  add(facts, name, list && n > 0 ? digest(list, (size_t)n * sizeof *list) : list != NULL, DIGEST);
}

void mha_mpi_fact_floats(mha_mpi_facts *facts, const char *name, const float *list, int64_t n) {
  add(facts, name, list && n > 0 ? digest(list, (size_t)n * sizeof *list) : list != NULL, DIGEST);
}

/* ---- agreements ---- */

enum { FAILED, MOMENT, N_FACTS, FACTS, N_VALUES = FACTS + MHA_MPI_MOST_FACTS };

/* Each element is the least of all processes' v, in its second half of ~v. */
typedef struct ballot {
  int64_t v[2 * N_VALUES];
} ballot;

static int64_t least(const ballot *b, int i) {
  return b->v[i];
}

static int64_t greatest(const ballot *b, int i) {
  return ~b->v[N_VALUES + i];
}

static mha_status vote(MPI_Comm communicator, ballot *b, mha_error *error) {
  for (int i = 0; i < N_VALUES; i++)
    b->v[N_VALUES + i] = ~b->v[i];
  return mha_mpi_check(
      MPI_Allreduce(MPI_IN_PLACE, b->v, 2 * N_VALUES, MPI_INT64_T, MPI_MIN, communicator),
      "MPI_Allreduce", error);
}

/* What process `rank` has found goes to all. */
static mha_status spread_failure(MPI_Comm communicator, int root, const mha_error *own,
                                 mha_error *error) {
  mha_error found = *own;
  const mha_status sent = mha_mpi_check(
      MPI_Bcast(&found, (int)sizeof found, MPI_BYTE, root, communicator), "MPI_Bcast", error);
  if (sent)
    return sent;
  found.message[sizeof found.message - 1] = '\0';
  const char *message = found.message[0] ? found.message : "it keeps no message";
  return mha_fail(error, found.status, "process %d: %s", root, message);
}

/* Two of the values that a fact has; what has been digested is not shown. */
static mha_status differ(const mha_mpi_facts *facts, int i, int64_t one, int64_t other,
                         mha_error *error) {
  const int kind = facts->kinds[i];
  double reals[2];
  char values[96] = "";
  memcpy(&reals[0], &one, sizeof one);
  memcpy(&reals[1], &other, sizeof other);
  if (kind == NUMBER)
    (void)snprintf(values, sizeof values, ": %" PRId64 " and %" PRId64, one, other);
  else if (kind == REAL)
    (void)snprintf(values, sizeof values, ": %g and %g", reals[0], reals[1]);
  return mha_fail(error, MHA_ERROR_VALUE, "%s is not the same on all processes%s; rule: it is",
                  facts->names[i], values);
}

static mha_status compare(const ballot *b, const mha_mpi_facts *facts, mha_error *error) {
  if (least(b, MOMENT) != greatest(b, MOMENT) || least(b, N_FACTS) != greatest(b, N_FACTS))
    return mha_fail(error, MHA_ERROR_VALUE,
                    "processes make different calls; rule: the same functions in the same order");
  for (int i = 0; i < facts->n; i++)
    if (least(b, FACTS + i) != greatest(b, FACTS + i))
      return differ(facts, i, least(b, FACTS + i), greatest(b, FACTS + i), error);
  return MHA_OK;
}

/* What this process says: the first that has failed is the one that all listen to. */
static ballot fill(MPI_Comm communicator, mha_mpi_moment moment, mha_status status,
                   const mha_mpi_facts *facts) {
  ballot b = {{0}};
  int rank = 0;
  (void)MPI_Comm_rank(communicator, &rank);
  b.v[FAILED] = status ? rank : INT32_MAX;
  b.v[MOMENT] = (int64_t)moment;
  b.v[N_FACTS] = facts->n;
  for (int i = 0; i < facts->n; i++)
    b.v[FACTS + i] = facts->values[i];
  return b;
}

mha_status mha_mpi_agree_over(MPI_Comm communicator, mha_mpi_moment moment, mha_status status,
                              const mha_mpi_facts *facts, mha_error *error) {
  static const mha_mpi_facts none = {.n = 0};
  const mha_mpi_facts *said = facts ? facts : &none;
  mha_error own = {.status = status};
  if (status && error)
    own = *error;
  ballot b = fill(communicator, moment, status, said);
  const mha_status sent = vote(communicator, &b, error);
  if (sent)
    return sent;
  if (least(&b, FAILED) < INT32_MAX)
    return spread_failure(communicator, (int)least(&b, FAILED), &own, error);
  return compare(&b, said, error);
}

mha_status mha_mpi_agree(const mha_mpi_team *team, mha_mpi_moment moment, mha_status status,
                         const mha_mpi_facts *facts, mha_error *error) {
  const double begin = mha_mpi_now(team);
  const mha_status agreed = mha_mpi_agree_over(team->all, moment, status, facts, error);
  mha_mpi_tell(team, MHA_MPI_AGREE, 0, begin, (int64_t)sizeof(ballot));
  return agreed;
}
