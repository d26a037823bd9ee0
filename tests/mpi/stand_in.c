/* Owns stand-ins for mha_forward, mha_attend and mha_backward that spread each call over all
 * processes and give every one of them the whole result, so that programs written for one process
 * test libmha_mpi as they are. What does not divide, and what libmha_mpi does not do, goes to the
 * library itself; how many calls that were is told at the end.
 *
 *   MHA_TEST_SPREAD   heads or positions */
#include "mpicli/spread.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef MHA_TEST_SKIP /* tests of one process's bits, which several do not promise */
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#else
#define cmocka_set_skip_filter(pattern) (void)(pattern)
#define MHA_TEST_SKIP                   ""
#endif

int test_spread_main(int argc, char **argv);
mha_status test_spread_forward(mha_context *context, const mha_weights *weights,
                               const mha_forward_args *args, mha_error *error);
mha_status test_spread_attend(mha_context *context, const mha_tensor *q, const mha_tensor *k,
                              const mha_tensor *v, const mha_attend_args *args, mha_error *error);
mha_status test_spread_backward(mha_context *context, const mha_weights *weights,
                                const mha_forward_args *args, const mha_backward_args *back,
                                mha_error *error);

static mha_spread spread;
static mha_mpi_team *team;
static mha_mpi_place place;
static bool by_positions;
static long n_spread, n_left;

/* ---- layers ---- */

/* Heads that do not divide, blocks that a share would cut, and what is not done by several. What is
 * wrong for one process too is found by the library itself then. */
static bool is_left(mha_status status) {
  return status == MHA_ERROR_HEADS || status == MHA_ERROR_SIZE || status == MHA_ERROR_UNSUPPORTED;
}

/* What the spread calls follow before the library has looked at it. */
static bool can_be_read(const mha_forward_args *args) {
  return args && args->struct_size == sizeof *args && !args->cache && args->batch > 0 &&
         args->query_length > 0 && args->key_length >= 0 &&
         (!args->rules || args->rules->struct_size == sizeof *args->rules) &&
         (!args->results || args->results->struct_size == sizeof *args->results);
}

mha_status test_spread_forward(mha_context *context, const mha_weights *weights,
                               const mha_forward_args *args, mha_error *error) {
  if (context && weights && can_be_read(args)) {
    const mha_status status = mha_spread_forward(&spread, context, weights, args, error);
    if (!is_left(status)) {
      n_spread++;
      return status;
    }
  }
  n_left++;
  return mha_forward(context, weights, args, error);
}

mha_status test_spread_backward(mha_context *context, const mha_weights *weights,
                                const mha_forward_args *args, const mha_backward_args *back,
                                mha_error *error) {
  mha_backward_args without_tape = *back;
  const mha_status status = mha_spread_backward(&spread, context, weights, args, back, error);
  if (!is_left(status)) {
    n_spread++;
    return status;
  }
  n_left++;
  without_tape.tape = NULL;
  return mha_backward(context, weights, args, &without_tape, error);
}

/* ---- the core, by positions ---- */

static void *allocate(int64_t n, size_t bytes) {
  void *memory = calloc(n > 0 ? (size_t)n : 1, bytes);
  if (!memory)
    MPI_Abort(MPI_COMM_WORLD, 1);
  return memory;
}

/* The bits that one process has and the others have not (0). */
static void unite(float *numbers, int64_t n) {
  int32_t *bits = allocate(n, sizeof *bits);
  if (n > 0)
    memcpy(bits, numbers, (size_t)n * sizeof *bits);
  MPI_Allreduce(MPI_IN_PLACE, bits, (int)n, MPI_INT32_T, MPI_BOR, MPI_COMM_WORLD);
  if (n > 0)
    memcpy(numbers, bits, (size_t)n * sizeof *bits);
  free(bits);
}

static mha_mpi_range rows_of(int64_t length, int32_t rank) {
  const int64_t begin = rank * length / place.by_positions;
  const mha_mpi_range range = {begin, (rank + 1) * length / place.by_positions - begin};
  return range;
}

/* Every process's rows of an output [B][L][width] to all. */
static void share_rows(float *output, int64_t B, int64_t L, int64_t width, int64_t batch_stride,
                       int64_t row_stride) {
  for (int32_t r = 0; r < place.by_positions; r++) {
    const mha_mpi_range rows = rows_of(L, r);
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < rows.length; i++)
        MPI_Bcast(output + b * batch_stride + (rows.begin + i) * row_stride, (int)width, MPI_FLOAT,
                  r, MPI_COMM_WORLD);
  }
}

/* [B·H][own rows] among [B·H][L]. */
static void share_lse(const float *own, float *all, int64_t n, int64_t L) {
  const mha_mpi_range rows = rows_of(L, place.position);
  float *whole = allocate(n * L, sizeof *whole);
  for (int64_t i = 0; i < n; i++)
    if (rows.length > 0)
      memcpy(whole + i * L + rows.begin, own + i * rows.length, (size_t)rows.length * sizeof *own);
  unite(whole, n * L);
  memcpy(all, whole, (size_t)(n * L) * sizeof *whole);
  free(whole);
}

static bool takes_no_positions(const mha_rules *rules, const mha_results *results) {
  return (rules && (rules->query_starts || rules->key_starts || rules->dropout != 0)) ||
         (results && (results->weights || results->average));
}

static mha_tensor own_rows_of(const mha_tensor *given) {
  mha_tensor t = *given;
  const mha_mpi_range rows = rows_of(t.length, place.position);
  if (!t.batch_stride && !t.row_stride && !t.head_stride && !t.size_stride) {
    t.size_stride = 1;
    t.head_stride = t.size;
    t.row_stride = t.heads * t.size;
    t.batch_stride = t.length * t.row_stride;
  }
  t.data = (const char *)t.data + mha_element_bytes(t.element, rows.begin * t.row_stride);
  t.length = rows.length;
  return t;
}

mha_status test_spread_attend(mha_context *context, const mha_tensor *q, const mha_tensor *k,
                              const mha_tensor *v, const mha_attend_args *args, mha_error *error) {
  mha_rules rules;
  mha_results results;
  if (!by_positions || !q || !k || !v || !args || args->n_sequences != 0 || q->length < 1 ||
      q->batch < 1 || k->length < 1 || takes_no_positions(args->rules, args->results)) {
    n_left++;
    return mha_attend(context, q, k, v, args, error);
  }
  n_spread++;
  const mha_tensor own[] = {own_rows_of(q), own_rows_of(k), own_rows_of(v)};
  const mha_mpi_range rows = rows_of(q->length, place.position);
  mha_attend_args a = *args;
  MHA_INIT(&rules);
  if (args->rules)
    rules = *args->rules;
  mha_spread_cut_rules(&rules, rows);
  if (!a.output_batch_stride && !a.output_row_stride && !a.output_head_stride) {
    a.output_head_stride = v->size;
    a.output_row_stride = q->heads * v->size;
    a.output_batch_stride = q->length * a.output_row_stride;
  }
  a.output += rows.begin * a.output_row_stride;
  float *lse = allocate(q->batch * q->heads * rows.length, sizeof *lse);
  const bool wants = args->results && args->results->log_sum_exp;
  MHA_INIT(&results);
  results.log_sum_exp = wants ? lse : NULL;
  a.rules = &rules;
  a.results = &results;
  a.flags |= MHA_ALLOW_EMPTY;
  const mha_status status =
      mha_mpi_attend(team, context, &own[0], &own[1], &own[2], &a, NULL, error);
  for (int64_t h = 0; !status && h < q->heads; h++)
    share_rows(args->output + h * a.output_head_stride, q->batch, q->length, v->size,
               a.output_batch_stride, a.output_row_stride);
  if (!status && wants)
    share_lse(lse, args->results->log_sum_exp, q->batch * q->heads, q->length);
  free(lse);
  return status;
}

/* ---- the program ---- */

int main(int argc, char **argv) {
  mha_error error;
  int provided = 0;
  const char *how = getenv("MHA_TEST_SPREAD");
  by_positions = how && strcmp(how, "positions") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  if (mha_spread_create(&spread, by_positions ? 1 : 0, &error)) {
    fprintf(stderr, "%s\n", error.message);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  cmocka_set_skip_filter(MHA_TEST_SKIP);
  team = spread.team;
  place = spread.place;
  const int status = test_spread_main(argc, argv);
  if (place.rank == 0)
    printf("%ld calls were spread by %s over %d processes, %ld were not\n", n_spread,
           by_positions ? "positions" : "heads", (int)place.n_processes, n_left);
  if (status == 77) /* what is not there is not there for anybody */
    MPI_Finalize();
  else if (status || n_spread == 0)
    MPI_Abort(MPI_COMM_WORLD, 1);
  else {
    mha_spread_destroy(&spread);
    MPI_Finalize();
  }
  return status;
}
