/* Owns the team: its making out of a communicator, scratch, sums over it, and the trace. */
#include "team.h"

#include "agree.h"
#include "base/arguments.h"
#include "base/error.h"

#include <string.h>

enum {
  FIRST_OPTIONS = MHA_ENDS_BEHIND(mha_mpi_options, allocator),
  FIRST_PLACE = MHA_ENDS_BEHIND(mha_mpi_place, position)
};

mha_status mha_mpi_check(int code, const char *what, mha_error *error) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (code == MPI_SUCCESS)
    return MHA_OK;
  (void)MPI_Error_string(code, text, &length);
  return mha_fail(error, MHA_ERROR_COMMUNICATION, "%s failed: %s", what, text);
}

/* ---- making ---- */

static mha_status check_running(mha_error *error) {
  int initialised = 0;
  int finalised = 0;
  (void)MPI_Initialized(&initialised);
  (void)MPI_Finalized(&finalised);
  if (initialised && !finalised)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE, "MPI is %s; rule: between MPI_Init and MPI_Finalize",
                  finalised ? "finalised" : "not initialised");
}

static mha_status read_options(const mha_mpi_options *given, mha_mpi_options *options,
                               mha_error *error) {
  MHA_INIT(options);
  mha_status status =
      given ? mha_read_struct(options, sizeof *options, FIRST_OPTIONS, given, "options", error)
            : MHA_OK;
  if (!status)
    status = mha_require_flags(options->flags, 0, "options.flags", error);
  return status ? status : mha_require_at_least(options->by_heads, 0, "options.by_heads", error);
}

static mha_status find_place(MPI_Comm all, int32_t by_heads, mha_mpi_place *place,
                             mha_error *error) {
  int n = 0;
  int rank = 0;
  mha_status status = mha_mpi_check(MPI_Comm_size(all, &n), "MPI_Comm_size", error);
  if (!status)
    status = mha_mpi_check(MPI_Comm_rank(all, &rank), "MPI_Comm_rank", error);
  if (status)
    return status;
  const int32_t heads = by_heads > 0 ? by_heads : n;
  if (n % heads != 0)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "options.by_heads is %d with %d processes; rule: it divides their number",
                    (int)heads, n);
  MHA_INIT(place);
  place->n_processes = n;
  place->rank = rank;
  place->by_heads = heads;
  place->head = rank % heads;
  place->by_positions = n / heads;
  place->position = rank / heads;
  return MHA_OK;
}

/* The rows and columns of the processes. */
static mha_status split(mha_mpi_team *team, mha_error *error) {
  const mha_mpi_place *p = &team->place;
  mha_status status = mha_mpi_check(MPI_Comm_split(team->all, p->position, p->head, &team->heads),
                                    "MPI_Comm_split", error);
  if (!status)
    status = mha_mpi_check(MPI_Comm_split(team->all, p->head, p->position, &team->positions),
                           "MPI_Comm_split", error);
  return status;
}

/* The team with its lists in one block. */
typedef struct team_layout {
  size_t bytes, lengths, counts;
} team_layout;

static team_layout lay_out(const mha_mpi_place *place) {
  mha_layout layout = {0};
  team_layout at = {0};
  (void)mha_layout_add(&layout, sizeof(mha_mpi_team), 1, 1, 1);
  at.lengths = mha_layout_add(&layout, sizeof(int64_t), place->by_positions, 2, 1);
  at.counts = mha_layout_add(&layout, sizeof(int64_t), place->by_heads, 1, 1);
  at.bytes = layout.bytes;
  return at;
}

/* The options and the place are agreed on over `all`, whoever has found a fault. */
static mha_status create(MPI_Comm all, const mha_mpi_options *given, mha_mpi_team **team,
                         mha_error *error) {
  mha_mpi_options options = {0};
  mha_mpi_place place = {0};
  mha_mpi_team *made = NULL;
  mha_mpi_facts facts = {.n = 0};
  mha_status status = mha_require(team, "team", error);
  if (!status)
    status = read_options(given, &options, error);
  if (!status)
    status = find_place(all, options.by_heads, &place, error);
  const mha_allocator allocator = mha_memory_allocator(status ? NULL : options.allocator);
  const team_layout at = lay_out(&place);
  if (!status && !(made = mha_memory_allocate(&allocator, at.bytes)))
    status = mha_fail(error, MHA_ERROR_MEMORY, "the team needs %zu bytes; rule: they must be there",
                      at.bytes);
  mha_mpi_fact(&facts, "options.by_heads", status ? 0 : place.by_heads);
  status = mha_mpi_agree_over(all, MHA_MPI_TEAM, status, &facts, error);
  if (status) {
    mha_memory_release(&allocator, made, at.bytes);
    return status;
  }
  *made = (mha_mpi_team){.allocator = allocator,
                         .place = place,
                         .all = all,
                         .heads = MPI_COMM_NULL,
                         .positions = MPI_COMM_NULL,
                         .lengths = (void *)((char *)made + at.lengths),
                         .counts = (void *)((char *)made + at.counts)};
  *team = made;
  return split(made, error);
}

mha_status mha_mpi_team_create(MPI_Comm communicator, const mha_mpi_options *options,
                               mha_mpi_team **team, mha_error *error) {
  MPI_Comm all = MPI_COMM_NULL;
  if (team)
    *team = NULL;
  mha_status status = check_running(error);
  if (!status && communicator == MPI_COMM_NULL)
    status = mha_fail(error, MHA_ERROR_NULL,
                      "communicator is MPI_COMM_NULL; rule: one that this process is in");
  if (!status)
    status = mha_mpi_check(MPI_Comm_dup(communicator, &all), "MPI_Comm_dup", error);
  if (status)
    return status;
  (void)MPI_Comm_set_errhandler(all, MPI_ERRORS_RETURN); /* those made of it inherit it */
  mha_mpi_team *made = NULL;
  status = create(all, options, team ? &made : NULL, error);
  if (status && made)
    mha_mpi_team_destroy(made);
  else if (status)
    (void)MPI_Comm_free(&all);
  if (status)
    return status;
  *team = made;
  return mha_succeed(error);
}

static void free_communicator(MPI_Comm *communicator) {
  if (*communicator != MPI_COMM_NULL)
    (void)MPI_Comm_free(communicator);
}

void mha_mpi_team_destroy(mha_mpi_team *team) {
  if (!team)
    return;
  const mha_allocator allocator = team->allocator;
  const size_t bytes = lay_out(&team->place).bytes;
  free_communicator(&team->positions);
  free_communicator(&team->heads);
  free_communicator(&team->all);
  mha_memory_release(&allocator, team->scratch, team->scratch_bytes);
  mha_memory_release(&allocator, team, bytes);
}

mha_status mha_mpi_team_place(const mha_mpi_team *team, mha_mpi_place *place, mha_error *error) {
  mha_mpi_place known;
  mha_status status = mha_require(team, "team", error);
  if (!status)
    status = mha_read_struct(&known, sizeof known, FIRST_PLACE, place, "place", error);
  if (status)
    return status;
  mha_write_struct(place, &team->place, sizeof team->place);
  return mha_succeed(error);
}

/* ---- scratch ---- */

mha_status mha_mpi_team_provide(mha_mpi_team *team, const mha_layout *layout, mha_error *error) {
  if (layout->overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the call's sizes have no product; rule: its scratch fits the address space");
  if (layout->bytes <= team->scratch_bytes)
    return MHA_OK;
  char *scratch = mha_memory_allocate(&team->allocator, layout->bytes);
  if (!scratch)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the team's scratch needs %zu bytes; rule: they must be there", layout->bytes);
  mha_memory_release(&team->allocator, team->scratch, team->scratch_bytes);
  team->scratch = scratch;
  team->scratch_bytes = layout->bytes;
  return MHA_OK;
}

/* ---- sums ---- */

mha_status mha_mpi_sum(const mha_mpi_team *team, float *numbers, int64_t n, mha_error *error) {
  const double begin = mha_mpi_now(team);
  mha_status status = MHA_OK;
  for (int64_t at = 0; !status && at < n; at += MHA_MPI_MOST)
    status =
        mha_mpi_check(MPI_Allreduce(MPI_IN_PLACE, numbers + at, (int)mha_min(n - at, MHA_MPI_MOST),
                                    MPI_FLOAT, MPI_SUM, team->heads),
                      "MPI_Allreduce", error);
  mha_mpi_tell(team, MHA_MPI_SUM, 0, begin, n * (int64_t)sizeof *numbers);
  return status;
}

/* Too many numbers or processes for one call are summed up as a whole. */
static mha_status sum_whole(const mha_mpi_team *team, float *numbers, int64_t n, float *own,
                            mha_error *error) {
  const int64_t *counts = team->counts;
  int64_t before = 0;
  for (int32_t r = 0; r < team->place.head; r++)
    before += counts[r];
  const mha_status status = mha_mpi_sum(team, numbers, n, error);
  if (!status && counts[team->place.head] > 0)
    memcpy(own, numbers + before, (size_t)counts[team->place.head] * sizeof *own);
  return status;
}

mha_status mha_mpi_sum_parts(const mha_mpi_team *team, float *numbers, float *own,
                             mha_error *error) {
  enum { MOST_PROCESSES = 1024 };
  const int32_t processes = team->place.by_heads;
  int parts[MOST_PROCESSES];
  int64_t n = 0;
  for (int32_t r = 0; r < processes; r++)
    n += team->counts[r];
  if (n > MHA_MPI_MOST || processes > MOST_PROCESSES)
    return sum_whole(team, numbers, n, own, error);
  for (int32_t r = 0; r < processes; r++)
    parts[r] = (int)team->counts[r];
  const double begin = mha_mpi_now(team);
  const mha_status status =
      mha_mpi_check(MPI_Reduce_scatter(numbers, own, parts, MPI_FLOAT, MPI_SUM, team->heads),
                    "MPI_Reduce_scatter", error);
  mha_mpi_tell(team, MHA_MPI_SUM, 0, begin, n * (int64_t)sizeof *numbers);
  return status;
}

/* ---- trace ---- */

mha_status mha_mpi_team_trace(mha_mpi_team *team, mha_mpi_trace_function *function, void *user,
                              mha_error *error) {
  const mha_status status = mha_require(team, "team", error);
  if (status)
    return status;
  team->trace = function;
  team->trace_user = user;
  return mha_succeed(error);
}

double mha_mpi_now(const mha_mpi_team *team) {
  return team->trace ? MPI_Wtime() : 0.0;
}

void mha_mpi_tell(const mha_mpi_team *team, int32_t work, int32_t step, double begin,
                  int64_t bytes) {
  if (!team->trace)
    return;
  const mha_mpi_event event = {work, step, begin, MPI_Wtime(), bytes};
  team->trace(team->trace_user, &event);
}
