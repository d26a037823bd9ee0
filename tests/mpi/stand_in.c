/* Owns stand-ins for mha_forward, mha_attend and mha_backward that spread each call over all
 * processes and give every one of them the whole result, so that programs written for one process
 * test libmha_mpi as they are. What does not divide, and what libmha_mpi does not do, goes to the
 * library itself; how many calls that were is told at the end.
 *
 *   MHA_TEST_SPREAD   heads or positions */
#include "mha_mpi.h"

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

static mha_mpi_team *team;
static mha_mpi_place place;
static bool by_positions;
static long n_spread, n_left;

/* ---- numbers that every process has a part of ---- */

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

/* Of each number that a process has changed the new one. */
static void unite_changes(float *numbers, const float *before, int64_t n) {
  int32_t *owner = allocate(n, sizeof *owner);
  int32_t *last = allocate(n, sizeof *last);
  float *own = allocate(n, sizeof *own);
  for (int64_t i = 0; i < n; i++)
    owner[i] = memcmp(&numbers[i], &before[i], sizeof *before) == 0 ? -1 : place.rank;
  MPI_Allreduce(owner, last, (int)n, MPI_INT32_T, MPI_MAX, MPI_COMM_WORLD);
  for (int64_t i = 0; i < n; i++)
    if (last[i] == place.rank || (last[i] < 0 && place.rank == 0))
      own[i] = numbers[i];
  unite(own, n);
  if (n > 0)
    memcpy(numbers, own, (size_t)n * sizeof *own);
  free(owner);
  free(last);
  free(own);
}

static void explicit_strides(int64_t L, int64_t width, int64_t *batch_stride, int64_t *row_stride) {
  if (!*row_stride)
    *row_stride = width;
  if (!*batch_stride)
    *batch_stride = *row_stride >= width ? L * *row_stride : *row_stride;
}

/* ---- by heads ---- */

static mha_status share_of(const mha_weights *weights, mha_mpi_weights **share,
                           mha_config *config) {
  mha_matrices m;
  MHA_INIT(&m);
  MHA_INIT(config);
  mha_status status = mha_weights_config(weights, config, NULL);
  if (!status)
    status = mha_weights_matrices(weights, &m, NULL);
  m.ownership = MHA_BORROW;
  return status ? status : mha_mpi_weights_create(team, config, &m, share, NULL);
}

/* The process's heads among all, of an array [B][H][n]. */
static void spread_heads(const float *own, float *all, int64_t B, int64_t H, int64_t n) {
  const int64_t heads = H / place.by_heads;
  float *whole = allocate(B * H * n, sizeof *whole);
  for (int64_t b = 0; b < B; b++)
    memcpy(whole + (b * H + place.head * heads) * n, own + b * heads * n,
           (size_t)(heads * n) * sizeof *own);
  unite(whole, B * H * n);
  memcpy(all, whole, (size_t)(B * H * n) * sizeof *all);
  free(whole);
}

static bool takes_no_heads(const mha_forward_args *args) {
  return !args || args->struct_size < sizeof *args || args->cache || args->batch < 1 ||
         args->query_length < 1 || args->key_length < 0 ||
         (args->rules && (args->rules->dropout != 0 || args->rules->struct_size == 0)) ||
         (args->results && args->results->struct_size == 0);
}

static mha_status forward_by_heads(mha_context *context, const mha_weights *weights,
                                   const mha_forward_args *given, mha_error *error) {
  mha_forward_args args = *given;
  mha_mpi_weights *share = NULL;
  mha_config config;
  if (share_of(weights, &share, &config)) {
    n_left++;
    return mha_forward(context, weights, given, error);
  }
  n_spread++;
  const bool packed = args.rules && args.rules->query_starts;
  const int64_t B = packed ? 1 : args.batch;
  const int64_t Lq = args.query_length;
  const int64_t Lk = args.key ? args.key_length : Lq;
  mha_results results;
  MHA_INIT(&results);
  if (given->results)
    results = *given->results;
  float *weights_of_own = allocate(results.weights ? B * config.n_heads * Lq * Lk : 0, 4);
  float *lse = allocate(results.log_sum_exp ? B * config.n_heads * Lq : 0, 4);
  results.weights = results.weights ? weights_of_own : NULL;
  results.log_sum_exp = results.log_sum_exp ? lse : NULL;
  args.results = given->results ? &results : NULL;
  args.tape = NULL;
  const mha_status status = mha_mpi_forward(team, context, share, &args, NULL, error);
  if (!status && results.weights)
    spread_heads(weights_of_own, given->results->weights, B, config.n_heads, Lq * Lk);
  if (!status && results.log_sum_exp)
    spread_heads(lse, given->results->log_sum_exp, B, config.n_heads, Lq);
  free(weights_of_own);
  free(lse);
  mha_mpi_weights_destroy(share);
  return status;
}

typedef struct gradient {
  float *numbers;
  int64_t n;
} gradient;

/* First to last number of a matrix's gradient, without gaps. */
static int64_t size_of(int64_t in, int64_t heads, int64_t size) {
  return in * heads * size;
}

mha_status test_spread_backward(mha_context *context, const mha_weights *weights,
                                const mha_forward_args *args, const mha_backward_args *back,
                                mha_error *error) {
  mha_mpi_weights *share = NULL;
  mha_backward_args b = *back;
  mha_config c;
  if (by_positions || takes_no_heads(args) || share_of(weights, &share, &c)) {
    n_left++;
    b.tape = NULL;
    return mha_backward(context, weights, args, &b, error);
  }
  n_spread++;
  b.tape = NULL;
  const mha_bias *bias = args->rules ? &args->rules->bias : NULL;
  const gradient own[] = {
      {b.d_wq, size_of(c.query_width, c.n_heads, c.head_size)},
      {b.d_wk, size_of(c.key_width, c.n_kv_heads, c.head_size)},
      {b.d_wv, size_of(c.value_width, c.n_kv_heads, c.value_head_size)},
      {b.d_wo, size_of(c.output_width, c.n_heads, c.value_head_size)},
      {b.d_bq, c.n_heads * c.head_size},
      {b.d_bk, c.n_kv_heads * c.head_size},
      {b.d_bv, c.n_kv_heads * c.value_head_size},
      {b.d_alibi_slopes, c.n_heads},
      {b.d_sinks, c.n_heads},
      {b.d_bias, bias ? bias->batch * bias->heads * bias->rows * bias->columns : 0}};
  enum { N_OWN = sizeof own / sizeof *own };
  float *before[N_OWN] = {NULL};
  for (int i = 0; i < N_OWN; i++)
    if (own[i].numbers) {
      before[i] = allocate(own[i].n, sizeof(float));
      memcpy(before[i], own[i].numbers, (size_t)own[i].n * sizeof(float));
    }
  mha_forward_args forward = *args;
  forward.tape = NULL;
  forward.results = NULL;
  const mha_status status = mha_mpi_backward(team, context, share, &forward, &b, error);
  for (int i = 0; i < N_OWN; i++)
    if (own[i].numbers) {
      unite_changes(own[i].numbers, before[i], own[i].n);
      free(before[i]);
    }
  mha_mpi_weights_destroy(share);
  return status;
}

/* ---- by positions ---- */

static mha_mpi_range rows_of(int64_t length, int32_t rank) {
  const int64_t begin = rank * length / place.by_positions;
  const mha_mpi_range range = {begin, (rank + 1) * length / place.by_positions - begin};
  return range;
}

/* A mask's or bias's rows from `begin` on. */
static void cut_rows(const void **data, int64_t *rows, int64_t columns, int64_t heads,
                     int64_t *batch_stride, int64_t *head_stride, int64_t *row_stride,
                     mha_mpi_range own, size_t bytes) {
  if (!*data || *rows <= 1)
    return;
  *row_stride = *row_stride ? *row_stride : columns;
  *head_stride = *head_stride ? *head_stride : *rows * *row_stride;
  *batch_stride = *batch_stride ? *batch_stride : heads * *head_stride;
  *data = (const char *)*data + (size_t)(own.begin * *row_stride) * bytes;
  *rows = own.length;
}

static void own_rules(mha_rules *rules, mha_mpi_range own) {
  mha_mask *m = &rules->attend;
  mha_bias *b = &rules->bias;
  cut_rows(&m->data, &m->rows, m->columns, m->heads, &m->batch_stride, &m->head_stride,
           &m->row_stride, own, 1);
  cut_rows(&b->data, &b->rows, b->columns, b->heads, &b->batch_stride, &b->head_stride,
           &b->row_stride, own, sizeof(float));
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

static int64_t *own_positions(const int64_t *all, int64_t B, int64_t L) {
  const mha_mpi_range rows = rows_of(L, place.position);
  int64_t *own = allocate(B * rows.length, sizeof *own);
  for (int64_t b = 0; b < B && all; b++)
    for (int64_t i = 0; i < rows.length; i++)
      own[b * rows.length + i] = all[b * L + rows.begin + i];
  return own;
}

static bool takes_no_positions(const mha_rules *rules, const mha_results *results) {
  return (rules && (rules->query_starts || rules->key_starts || rules->dropout != 0)) ||
         (results && (results->weights || results->average));
}

static mha_status forward_by_positions(mha_context *context, const mha_weights *weights,
                                       const mha_forward_args *given, mha_error *error) {
  mha_forward_args a = *given;
  mha_mpi_weights *share = NULL;
  mha_config c;
  mha_rules rules;
  mha_results results;
  if (takes_no_positions(given->rules, given->results) || share_of(weights, &share, &c)) {
    n_left++;
    return mha_forward(context, weights, given, error);
  }
  n_spread++;
  const int64_t Lq = a.query_length;
  const int64_t Lk = a.key ? a.key_length : Lq;
  const mha_mpi_range q = rows_of(Lq, place.position);
  const mha_mpi_range k = rows_of(Lk, place.position);
  MHA_INIT(&rules);
  if (given->rules)
    rules = *given->rules;
  own_rules(&rules, q);
  explicit_strides(Lq, c.query_width, &a.query_batch_stride, &a.query_row_stride);
  explicit_strides(Lk, c.key_width, &a.key_batch_stride, &a.key_row_stride);
  explicit_strides(Lk, c.value_width, &a.value_batch_stride, &a.value_row_stride);
  explicit_strides(Lq, c.output_width, &a.output_batch_stride, &a.output_row_stride);
  float *output = a.output;
  a.query += q.begin * a.query_row_stride;
  a.key = a.key ? a.key + k.begin * a.key_row_stride : NULL;
  a.value = a.value ? a.value + k.begin * a.value_row_stride : NULL;
  a.output += q.begin * a.output_row_stride;
  a.query_length = q.length;
  a.key_length = a.key ? k.length : 0;
  a.flags |= MHA_ALLOW_EMPTY;
  int64_t *query_positions = own_positions(a.query_positions, a.batch, Lq);
  int64_t *key_positions = own_positions(a.key_positions, a.batch, Lk);
  a.query_positions = a.query_positions ? query_positions : NULL;
  a.key_positions = a.key_positions ? key_positions : NULL;
  float *lse = allocate(a.batch * c.n_heads * q.length, sizeof *lse);
  MHA_INIT(&results);
  const bool wants = given->results && given->results->log_sum_exp;
  results.log_sum_exp = wants ? lse : NULL;
  a.rules = &rules;
  a.results = &results;
  a.tape = NULL;
  const mha_status status = mha_mpi_forward(team, context, share, &a, NULL, error);
  if (!status)
    share_rows(output, a.batch, Lq, c.output_width, a.output_batch_stride, a.output_row_stride);
  if (!status && wants)
    share_lse(lse, given->results->log_sum_exp, a.batch * c.n_heads, Lq);
  free(lse);
  free(query_positions);
  free(key_positions);
  mha_mpi_weights_destroy(share);
  return status;
}

mha_status test_spread_forward(mha_context *context, const mha_weights *weights,
                               const mha_forward_args *args, mha_error *error) {
  if (!context || !weights || takes_no_heads(args)) {
    n_left++;
    return mha_forward(context, weights, args, error);
  }
  return by_positions ? forward_by_positions(context, weights, args, error)
                      : forward_by_heads(context, weights, args, error);
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
  own_rules(&rules, rows);
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
  mha_mpi_options options;
  mha_error error;
  int provided = 0;
  const char *how = getenv("MHA_TEST_SPREAD");
  by_positions = how && strcmp(how, "positions") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MHA_INIT(&options);
  MHA_INIT(&place);
  options.by_heads = by_positions ? 1 : 0;
  if (mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error) ||
      mha_mpi_team_place(team, &place, &error)) {
    fprintf(stderr, "%s\n", error.message);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  cmocka_set_skip_filter(MHA_TEST_SKIP);
  const int status = test_spread_main(argc, argv);
  if (place.rank == 0)
    printf("%ld calls were spread by %s over %d processes, %ld were not\n", n_spread,
           by_positions ? "positions" : "heads", (int)place.n_processes, n_left);
  if (status == 77) /* what is not there is not there for anybody */
    MPI_Finalize();
  else if (status || n_spread == 0)
    MPI_Abort(MPI_COMM_WORLD, 1);
  else {
    mha_mpi_team_destroy(team);
    MPI_Finalize();
  }
  return status;
}
