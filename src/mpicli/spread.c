/* Owns the spreading of calls that one process would make: its heads and rows are cut out of the
 * whole layer and of all rows, and what each process gets is put together again. */
#include "spread.h"

#include "base/error.h"
#include "base/memory.h"

#include <stdbool.h>
#include <string.h>

mha_status mha_spread_create(mha_spread *spread, int32_t by_heads, mha_error *error) {
  mha_mpi_options options;
  MHA_INIT(&options);
  MHA_INIT(&spread->place);
  options.by_heads = by_heads;
  const mha_status status = mha_mpi_team_create(MPI_COMM_WORLD, &options, &spread->team, error);
  return status ? status : mha_mpi_team_place(spread->team, &spread->place, error);
}

void mha_spread_destroy(mha_spread *spread) {
  mha_mpi_team_destroy(spread->team);
  spread->team = NULL;
}

int64_t mha_spread_kv_heads(const mha_spread *spread, int64_t G) {
  return mha_max(G / spread->place.by_heads, 1);
}

/* ---- numbers that every process has a part of ---- */

/* n numbers, zeroed. A process that has none has no way to tell the others in the middle of this,
 * so all of them end. */
static void *allocate(int64_t n, size_t bytes) {
  const mha_allocator c_library = mha_memory_allocator(NULL);
  const size_t all = (size_t)(n > 0 ? n : 1) * bytes;
  void *numbers = mha_memory_allocate(&c_library, all);
  if (numbers)
    memset(numbers, 0, all);
  else
    MPI_Abort(MPI_COMM_WORLD, 1);
  return numbers;
}

static void release(void *numbers, int64_t n, size_t bytes) {
  const mha_allocator c_library = mha_memory_allocator(NULL);
  mha_memory_release(&c_library, numbers, (size_t)(n > 0 ? n : 1) * bytes);
}

/* Counts of MPI are ints. */
enum { MOST = 1 << 28 };

/* The bits that one process has and the others have not (0). */
static void unite(float *numbers, int64_t n) {
  for (int64_t at = 0; at < n; at += MOST)
    MPI_Allreduce(MPI_IN_PLACE, numbers + at, (int)mha_min(n - at, MOST), MPI_INT32_T, MPI_BOR,
                  MPI_COMM_WORLD);
}

/* Of each number that a process has changed the new one. */
static void unite_changes(const mha_spread *s, float *numbers, const float *before, int64_t n) {
  int32_t *last = allocate(n, sizeof *last);
  float *own = allocate(n, sizeof *own);
  for (int64_t i = 0; i < n; i++)
    last[i] = memcmp(&numbers[i], &before[i], sizeof *before) == 0 ? -1 : s->place.rank;
  for (int64_t at = 0; at < n; at += MOST)
    MPI_Allreduce(MPI_IN_PLACE, last + at, (int)mha_min(n - at, MOST), MPI_INT32_T, MPI_MAX,
                  MPI_COMM_WORLD);
  for (int64_t i = 0; i < n; i++)
    if (last[i] == s->place.rank || (last[i] < 0 && s->place.rank == 0))
      own[i] = numbers[i];
  unite(own, n);
  memcpy(numbers, own, (size_t)n * sizeof *own);
  release(last, n, sizeof *last);
  release(own, n, sizeof *own);
}

/* ---- heads ---- */

static mha_status share_of(const mha_spread *s, const mha_weights *weights, mha_mpi_weights **share,
                           mha_config *config, mha_error *error) {
  mha_matrices m;
  MHA_INIT(&m);
  MHA_INIT(config);
  mha_status status = mha_weights_config(weights, config, error);
  if (!status)
    status = mha_weights_matrices(weights, &m, error);
  m.ownership = MHA_BORROW;
  return status ? status : mha_mpi_weights_create(s->team, config, &m, share, error);
}

/* ---- rows ---- */

static mha_mpi_range rows_of(const mha_spread *s, int64_t length, int64_t position) {
  const int64_t p = s->place.by_positions;
  const int64_t begin = position * length / p;
  const mha_mpi_range range = {begin, (position + 1) * length / p - begin};
  return range;
}

static mha_mpi_range own_rows(const mha_spread *s, int64_t length) {
  return rows_of(s, length, s->place.position);
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

void mha_spread_cut_rules(mha_rules *rules, mha_mpi_range own) {
  mha_mask *m = &rules->attend;
  mha_bias *b = &rules->bias;
  cut_rows(&m->data, &m->rows, m->columns, m->heads, &m->batch_stride, &m->head_stride,
           &m->row_stride, own, 1);
  cut_rows(&b->data, &b->rows, b->columns, b->heads, &b->batch_stride, &b->head_stride,
           &b->row_stride, own, sizeof(float));
}

static void explicit_strides(int64_t L, int64_t width, int64_t *batch_stride, int64_t *row_stride) {
  if (!*row_stride)
    *row_stride = width;
  if (!*batch_stride)
    *batch_stride = *row_stride >= width ? L * *row_stride : *row_stride;
}

static int64_t *cut_positions(const int64_t *all, int64_t B, int64_t L, mha_mpi_range rows) {
  int64_t *own = allocate(B * rows.length, sizeof *own);
  for (int64_t b = 0; b < B && all; b++)
    for (int64_t i = 0; i < rows.length; i++)
      own[b * rows.length + i] = all[b * L + rows.begin + i];
  return own;
}

/* Every process's rows of the output to all. */
static void share_rows(const mha_spread *s, const mha_forward_args *a, int64_t width) {
  for (int32_t r = 0; r < s->place.by_positions; r++) {
    const mha_mpi_range rows = rows_of(s, a->query_length, r);
    for (int64_t b = 0; b < a->batch; b++)
      for (int64_t i = 0; i < rows.length; i++)
        MPI_Bcast(a->output + b * a->output_batch_stride + (rows.begin + i) * a->output_row_stride,
                  (int)width, MPI_FLOAT, r * s->place.by_heads, MPI_COMM_WORLD);
  }
}

/* ---- what is asked for beside the output ---- */

/* Results [B][H][Lq][n] of which a process has its heads and rows. */
typedef struct own_results {
  mha_results results;
  int64_t B, H, Lq, Lk;
  int64_t first_head, heads;
  mha_mpi_range rows;
  int64_t n_weights, n_lse;
} own_results;

/* The most tokens that an entry of the call has so far. */
static int64_t cached_tokens(const mha_forward_args *a) {
  int64_t most = 0;
  int64_t length = 0;
  for (int64_t b = 0; a->cache && b < a->batch; b++)
    if (!mha_cache_length(a->cache, a->cache_entries ? a->cache_entries[b] : b, &length, NULL))
      most = mha_max(most, length);
  return most;
}

static own_results ask(const mha_spread *s, const mha_forward_args *a, const mha_config *c) {
  own_results own = {.H = c->n_heads, .Lq = a->query_length};
  const bool packed = a->rules && a->rules->query_starts;
  own.B = packed ? 1 : a->batch;
  own.Lk = (a->key ? a->key_length : a->query_length) + cached_tokens(a);
  own.heads = own.H / s->place.by_heads;
  own.first_head = s->place.head * own.heads;
  own.rows = own_rows(s, own.Lq);
  MHA_INIT(&own.results);
  if (!a->results)
    return own;
  own.results = *a->results;
  own.n_lse = own.B * own.heads * own.rows.length;
  own.n_weights = own.n_lse * own.Lk;
  if (own.results.weights)
    own.results.weights = allocate(own.n_weights, sizeof(float));
  if (own.results.log_sum_exp)
    own.results.log_sum_exp = allocate(own.n_lse, sizeof(float));
  return own;
}

static void put(const own_results *own, const float *part, float *all, int64_t n) {
  if (!part)
    return;
  const int64_t total = own->B * own->H * own->Lq * n;
  float *whole = allocate(total, sizeof *whole);
  for (int64_t b = 0; b < own->B; b++)
    for (int64_t h = 0; h < own->heads; h++)
      memcpy(whole + ((b * own->H + own->first_head + h) * own->Lq + own->rows.begin) * n,
             part + (b * own->heads + h) * own->rows.length * n,
             (size_t)(own->rows.length * n) * sizeof *whole);
  unite(whole, total);
  memcpy(all, whole, (size_t)total * sizeof *whole);
  release(whole, total, sizeof *whole);
}

static void give(const own_results *own, const mha_results *asked, mha_status status) {
  if (!status && asked) {
    put(own, own->results.weights, asked->weights, own->Lk);
    put(own, own->results.log_sum_exp, asked->log_sum_exp, 1);
  }
  release(own->results.weights, own->n_weights, sizeof(float));
  release(own->results.log_sum_exp, own->n_lse, sizeof(float));
}

/* ---- the calls ---- */

static mha_status forward_rows(const mha_spread *s, mha_context *context,
                               const mha_mpi_weights *share, const mha_config *c,
                               const mha_forward_args *given, mha_forward_args whole,
                               mha_error *error) {
  mha_rules rules;
  mha_forward_args own = whole;
  mha_forward_args *a = &own;
  const int64_t Lq = a->query_length;
  const int64_t Lk = a->key ? a->key_length : Lq;
  const mha_mpi_range q = own_rows(s, Lq);
  const mha_mpi_range k = own_rows(s, Lk);
  MHA_INIT(&rules);
  if (given->rules)
    rules = *given->rules;
  mha_spread_cut_rules(&rules, q);
  explicit_strides(Lq, c->query_width, &a->query_batch_stride, &a->query_row_stride);
  explicit_strides(Lk, c->key_width, &a->key_batch_stride, &a->key_row_stride);
  explicit_strides(Lk, c->value_width, &a->value_batch_stride, &a->value_row_stride);
  explicit_strides(Lq, c->output_width, &a->output_batch_stride, &a->output_row_stride);
  whole = *a;
  int64_t *query_positions = cut_positions(a->query_positions, a->batch, Lq, q);
  int64_t *key_positions = cut_positions(a->key_positions, a->batch, Lk, k);
  a->query_positions = a->query_positions ? query_positions : NULL;
  a->key_positions = a->key_positions ? key_positions : NULL;
  a->query += q.begin * a->query_row_stride;
  a->key = a->key ? a->key + k.begin * a->key_row_stride : NULL;
  a->value = a->value ? a->value + k.begin * a->value_row_stride : NULL;
  a->output += q.begin * a->output_row_stride;
  a->query_length = q.length;
  a->key_length = a->key ? k.length : 0;
  a->flags |= MHA_ALLOW_EMPTY;
  a->rules = &rules;
  const mha_status status = mha_mpi_forward(s->team, context, share, a, NULL, error);
  if (!status)
    share_rows(s, &whole, c->output_width);
  release(query_positions, a->batch * q.length, sizeof *query_positions);
  release(key_positions, a->batch * k.length, sizeof *key_positions);
  return status;
}

mha_status mha_spread_forward(const mha_spread *s, mha_context *context, const mha_weights *weights,
                              const mha_forward_args *given, mha_error *error) {
  mha_mpi_weights *share = NULL;
  mha_forward_args a = *given;
  mha_config c;
  mha_status status = share_of(s, weights, &share, &c, error);
  if (status)
    return status;
  own_results own = ask(s, given, &c);
  a.results = given->results ? &own.results : NULL;
  a.tape = NULL;
  if (s->place.by_positions == 1)
    status = mha_mpi_forward(s->team, context, share, &a, NULL, error);
  else
    status = forward_rows(s, context, share, &c, given, a, error);
  give(&own, given->results, status);
  mha_mpi_weights_destroy(share);
  return status;
}

/* Gradients of which each process has a part, all of them without gaps. */
enum { N_PARTS = 10 };
typedef struct parts {
  float *numbers[N_PARTS];
  float *before[N_PARTS];
  int64_t n[N_PARTS];
} parts;

static parts note_parts(const mha_config *c, const mha_forward_args *args,
                        const mha_backward_args *b) {
  const mha_bias *bias = args->rules ? &args->rules->bias : NULL;
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size;
  parts p = {{b->d_wq, b->d_wk, b->d_wv, b->d_wo, b->d_bq, b->d_bk, b->d_bv, b->d_alibi_slopes,
              b->d_sinks, b->d_bias},
             {NULL},
             {c->query_width * q, c->key_width * k, c->value_width * v,
              c->output_width * c->n_heads * c->value_head_size, q, k, v, c->n_heads, c->n_heads,
              bias ? bias->batch * bias->heads * bias->rows * bias->columns : 0}};
  for (int i = 0; i < N_PARTS; i++)
    if (p.numbers[i]) {
      p.before[i] = allocate(p.n[i], sizeof(float));
      memcpy(p.before[i], p.numbers[i], (size_t)p.n[i] * sizeof(float));
    }
  return p;
}

mha_status mha_spread_backward(const mha_spread *s, mha_context *context,
                               const mha_weights *weights, const mha_forward_args *args,
                               const mha_backward_args *back, mha_error *error) {
  mha_mpi_weights *share = NULL;
  mha_forward_args a = *args;
  mha_backward_args b = *back;
  mha_config c;
  mha_status status = share_of(s, weights, &share, &c, error);
  if (status)
    return status;
  a.tape = NULL;
  a.results = NULL;
  b.tape = NULL;
  const parts p = note_parts(&c, args, back);
  status = mha_mpi_backward(s->team, context, share, &a, &b, error);
  for (int i = 0; i < N_PARTS; i++)
    if (p.numbers[i]) {
      if (!status)
        unite_changes(s, p.numbers[i], p.before[i], p.n[i]);
      release(p.before[i], p.n[i], sizeof(float));
    }
  mha_mpi_weights_destroy(share);
  return status;
}
