/* Owns the ring. In step s a process computes with the keys of the process s places before it,
 * while those go on to the next one and those of the one before arrive. Blocks of queries are cut
 * into pieces, between which MPI gets a moment to move what is on its way. */
#include "ring.h"

#include "base/arguments.h"
#include "base/error.h"

#include <math.h>
#include <string.h>

/* Rows of queries that meet a block of keys at a time. */
#ifndef MHA_MPI_PIECE
#define MHA_MPI_PIECE 512
#endif

/* A message is sent in so many parts at most. */
enum { MOST_PARTS = 64 };

/* Offsets and window sides beyond this see everything or nothing: sums of them do not overflow. */
#define FAR (INT64_C(1) << 61)

/* ---- who has what ---- */

mha_status mha_mpi_ring_gather(mha_mpi_ring *r, int64_t Lq, int64_t Lk, mha_error *error) {
  const mha_mpi_place *place = &r->team->place;
  int64_t *lengths = r->team->lengths;
  const int64_t own[2] = {Lq, Lk};
  mha_status status =
      mha_mpi_check(MPI_Allgather(own, 2, MPI_INT64_T, lengths, 2, MPI_INT64_T, r->team->positions),
                    "MPI_Allgather", error);
  for (int32_t u = 0; !status && u < 2 * place->by_positions; u++)
    if (lengths[u] > FAR / place->by_positions)
      status = mha_fail(error, MHA_ERROR_OVERFLOW,
                        "a process has %lld rows; rule: those of all can be counted",
                        (long long)lengths[u]);
  if (!status)
    status = mha_mpi_blocks_check(r->order, place->by_positions, lengths, "query_length", error);
  if (!status)
    status = mha_mpi_blocks_check(r->order, place->by_positions, lengths + 1, "key_length", error);
  if (status)
    return status;
  r->queries = mha_mpi_blocks_of(r->order, place->by_positions, place->position, lengths);
  r->keys = mha_mpi_blocks_of(r->order, place->by_positions, place->position, lengths + 1);
  r->most_keys = 0;
  for (int32_t u = 0; u < place->by_positions; u++)
    r->most_keys = mha_max(r->most_keys, lengths[INT64_C(2) * u + 1]);
  return MHA_OK;
}

static mha_status check_lengths(const int64_t *lengths, int64_t B, int64_t all, const char *name,
                                mha_error *error) {
  for (int64_t b = 0; lengths && b < B; b++)
    if (lengths[b] < 0 || lengths[b] > all)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%s[%lld] is %lld; rule: between 0 and the %lld rows of all processes", name,
                      (long long)b, (long long)lengths[b], (long long)all);
  return MHA_OK;
}

/* Rows are the process's own, columns those of all. */
static mha_status check_cells(const mha_mpi_ring *r, const mha_mask *m, const char *name,
                              mha_error *error) {
  const int64_t rows = m->rows;
  const int64_t columns = m->columns;
  const int64_t row = rows > 1 && m->row_stride ? m->row_stride : columns;
  int64_t all_rows = 0;
  int64_t head = 0;
  int64_t all = 0;
  if (!m->data)
    return MHA_OK;
  bool fits = mha_multiply(rows, row, &all_rows);
  head = m->heads > 1 && m->head_stride ? m->head_stride : all_rows;
  fits = fits && mha_multiply(m->heads, head, &all);
  fits =
      fits && mha_multiply(m->batch, m->batch > 1 && m->batch_stride ? m->batch_stride : all, &all);
  if (!fits)
    return mha_fail(
        error, MHA_ERROR_OVERFLOW,
        "%s has batch, head and row strides %lld, %lld, %lld; rule: none is negative, and "
        "its cells can be counted",
        name, (long long)m->batch_stride, (long long)m->head_stride, (long long)m->row_stride);
  if ((rows == 1 || rows == r->queries.rows) && columns == r->keys.all)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_SIZE,
                  "%s has %lld rows and %lld columns; rule: 1 or the process's %lld rows, and the "
                  "%lld keys of all processes",
                  name, (long long)rows, (long long)columns, (long long)r->queries.rows,
                  (long long)r->keys.all);
}

static int64_t given_offset(const mha_mpi_ring *r, int64_t b) {
  return r->rules.offsets ? r->rules.offsets[b] : r->rules.offset;
}

mha_status mha_mpi_ring_check(const mha_mpi_ring *r, mha_error *error) {
  const mha_rules *u = &r->rules;
  if (u->query_starts || u->key_starts)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "rules.%s is given where rows are spread; rule: NULL, packed rows are not",
                    u->query_starts ? "query_starts" : "key_starts");
  if (u->dropout != 0)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "rules.dropout is %g where rows are spread; rule: 0", (double)u->dropout);
  for (int64_t b = 0; u->alignment == MHA_ALIGN_OFFSET && b < r->B; b++)
    if (given_offset(r, b) < -FAR || given_offset(r, b) > FAR)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "rules.offset%s of entry %lld is %lld; rule: within 2^61",
                      u->offsets ? "s" : "", (long long)b, (long long)given_offset(r, b));
  mha_status status =
      check_lengths(u->query_lengths, r->B, r->queries.all, "rules.query_lengths", error);
  if (!status)
    status = check_lengths(u->key_lengths, r->B, r->keys.all, "rules.key_lengths", error);
  const mha_bias *b = &u->bias;
  const mha_mask bias = {.data = b->data,
                         .batch = b->batch,
                         .heads = b->heads,
                         .rows = b->rows,
                         .columns = b->columns,
                         .batch_stride = b->batch_stride,
                         .head_stride = b->head_stride,
                         .row_stride = b->row_stride};
  if (!status)
    status = check_cells(r, &u->attend, "rules.attend", error);
  return status ? status : check_cells(r, &bias, "rules.bias", error);
}

/* ---- scratch ---- */

static int64_t piece_count(const mha_mpi_ring *r) {
  return r->queries.rows / MHA_MPI_PIECE + MHA_MPI_BLOCKS_OF_ONE;
}

static int64_t most_piece(const mha_mpi_ring *r) {
  return mha_min(r->queries.rows, MHA_MPI_PIECE);
}

void mha_mpi_ring_plan(mha_mpi_ring *r, mha_layout *layout) {
  int64_t width = 0;
  int64_t concat = 0;
  int64_t rows = 0;
  layout->overflow |=
      !mha_multiply(r->G, r->d + r->dv, &width) || !mha_multiply(r->H, r->dv, &concat) ||
      !mha_multiply(r->B, r->most_keys, &rows) || !mha_multiply(rows, width, &r->count) ||
      r->count > INT64_C(1) * MOST_PARTS * MHA_MPI_MOST;
  for (int i = 0; i < 2; i++)
    r->at_traveller[i] = mha_layout_add(layout, sizeof(float), r->B, r->most_keys, width);
  r->at_concat = mha_layout_add(layout, sizeof(float), r->B, r->queries.rows, concat);
  r->at_part = mha_layout_add(layout, sizeof(float), r->B, most_piece(r), concat);
  r->at_part_lse = mha_layout_add(layout, sizeof(float), r->B, r->H, most_piece(r));
  r->at_lse = mha_layout_add(layout, sizeof(float), r->B, r->H, r->queries.rows);
  r->at_started = mha_layout_add(layout, 1, piece_count(r), 1, 1);
  r->at_lists = mha_layout_add(layout, sizeof(int64_t), r->B, 3, 1);
}

void mha_mpi_ring_place(mha_mpi_ring *r) {
  char *scratch = r->team->scratch;
  for (int i = 0; i < 2; i++)
    r->traveller[i] = (void *)(scratch + r->at_traveller[i]);
  r->concat = (void *)(scratch + r->at_concat);
  r->part = (void *)(scratch + r->at_part);
  r->part_lse = (void *)(scratch + r->at_part_lse);
  r->lse = (void *)(scratch + r->at_lse);
  r->started = (void *)(scratch + r->at_started);
  r->offsets = (void *)(scratch + r->at_lists);
  r->query_lengths = r->offsets + r->B;
  r->key_lengths = r->query_lengths + r->B;
}

mha_status mha_mpi_ring_reserve(const mha_mpi_ring *r, mha_error *error) {
  mha_shape shape;
  MHA_INIT(&shape);
  shape.batch = r->B;
  shape.query_length = most_piece(r);
  shape.key_length = r->most_keys;
  shape.n_heads = r->H;
  shape.n_kv_heads = r->G;
  shape.head_size = r->d;
  shape.value_head_size = r->dv;
  return mha_context_reserve(r->context, NULL, &shape, error);
}

/* ---- one block of keys ---- */

/* Queries [row, row + length) of the process, of which the first is row `begin` of all. */
typedef struct piece {
  int64_t row, begin, length;
  int64_t index; /* among the process's pieces */
} piece;

/* Keys [begin, begin + length) of all, which are rows `row` on of those at hand. */
typedef struct visitor {
  const float *k, *v; /* [B][rows][G·d], [B][rows][G·dv] of the process they come from */
  int64_t rows;
  mha_mpi_block block;
} visitor;

/* off[b] of the contract, in rows of all processes. */
static int64_t offset_of(const mha_mpi_ring *r, int64_t b) {
  const mha_rules *u = &r->rules;
  if (u->alignment == MHA_ALIGN_OFFSET)
    return given_offset(r, b);
  if (u->alignment != MHA_ALIGN_BOTTOM_RIGHT)
    return 0;
  const int64_t Lk = u->key_lengths ? u->key_lengths[b] : r->keys.all;
  return Lk - (u->query_lengths ? u->query_lengths[b] : r->queries.all);
}

/* Whether a query of the piece may see one of the keys, as far as lengths, causal rule and window
 * tell. */
static bool entry_sees(const mha_mpi_ring *r, int64_t b, const piece *q, const visitor *u) {
  const mha_rules *rules = &r->rules;
  const bool window = rules->flags & MHA_WINDOW;
  const int64_t first = q->begin + offset_of(r, b); /* the place of the first query */
  const int64_t last = first + q->length - 1;
  const int64_t end = u->block.begin + u->block.length;
  if (rules->query_lengths && q->begin >= rules->query_lengths[b])
    return false;
  if (rules->key_lengths && u->block.begin >= rules->key_lengths[b])
    return false;
  if (rules->causal && u->block.begin > last)
    return false;
  if (window && rules->window_left >= 0 && end - 1 < first - mha_min(rules->window_left, FAR))
    return false;
  return !window || rules->window_right < 0 ||
         u->block.begin <= last + mha_min(rules->window_right, FAR);
}

static bool sees(const mha_mpi_ring *r, const piece *q, const visitor *u) {
  for (int64_t b = 0; b < r->B; b++)
    if (entry_sees(r, b, q, u))
      return true;
  return false;
}

/* A mask's or bias's rows of the piece and columns of the block. */
static const void *cell(const void *data, int64_t rows, int64_t *row_stride, int64_t columns,
                        const piece *q, const visitor *u, size_t bytes) {
  if (!data)
    return NULL;
  if (rows <= 1 || !*row_stride)
    *row_stride = columns;
  const int64_t at = (rows > 1 ? q->row * *row_stride : 0) + u->block.begin;
  return (const char *)data + (size_t)at * bytes;
}

static void spread_strides(int64_t rows, int64_t row_stride, int64_t heads, int64_t *head_stride,
                           int64_t *batch_stride) {
  if (heads <= 1 || !*head_stride)
    *head_stride = rows * row_stride;
  if (!*batch_stride)
    *batch_stride = heads * *head_stride;
}

static void cut_mask(mha_mask *m, const piece *q, const visitor *u) {
  const int64_t rows = m->rows;
  m->data = cell(m->data, rows, &m->row_stride, m->columns, q, u, 1);
  spread_strides(rows, m->row_stride, m->heads, &m->head_stride, &m->batch_stride);
  m->rows = rows > 1 ? q->length : rows;
  m->columns = u->block.length;
}

static void cut_bias(mha_bias *m, const piece *q, const visitor *u) {
  const int64_t rows = m->rows;
  m->data = cell(m->data, rows, &m->row_stride, m->columns, q, u, mha_element_bytes(m->element, 1));
  spread_strides(rows, m->row_stride, m->heads, &m->head_stride, &m->batch_stride);
  m->rows = rows > 1 ? q->length : rows;
  m->columns = u->block.length;
}

/* The rules of one product: everything counted from the piece's and the block's first row. */
static mha_rules rules_of(const mha_mpi_ring *r, const piece *q, const visitor *u) {
  mha_rules rules = r->rules;
  for (int64_t b = 0; b < r->B; b++) {
    const int64_t Lq = rules.query_lengths ? rules.query_lengths[b] : r->queries.all;
    const int64_t Lk = rules.key_lengths ? rules.key_lengths[b] : r->keys.all;
    r->offsets[b] = offset_of(r, b) + q->begin - u->block.begin;
    r->query_lengths[b] = mha_max(0, mha_min(Lq - q->begin, q->length));
    r->key_lengths[b] = mha_max(0, mha_min(Lk - u->block.begin, u->block.length));
  }
  rules.alignment = MHA_ALIGN_OFFSET;
  rules.offsets = r->offsets;
  rules.query_lengths = r->query_lengths;
  rules.key_lengths = r->key_lengths;
  rules.sinks = NULL; /* at the end, once */
  if (rules.attend.data)
    cut_mask(&rules.attend, q, u);
  if (rules.bias.data)
    cut_bias(&rules.bias, q, u);
  return rules;
}

static mha_tensor keys_at(const mha_mpi_ring *r, const visitor *u, const float *rows,
                          int64_t size) {
  const int64_t row = r->G * size;
  const mha_tensor t = {.data = rows + u->block.row * row,
                        .batch = r->B,
                        .length = u->block.length,
                        .heads = r->G,
                        .size = size,
                        .batch_stride = u->rows * row,
                        .row_stride = row,
                        .head_stride = size,
                        .size_stride = 1};
  return t;
}

/* The piece's rows of the result so far. */
static mha_tensor result_at(const mha_mpi_ring *r, const piece *q) {
  const int64_t row = r->H * r->dv;
  const mha_tensor t = {.data = r->concat + q->row * row,
                        .batch = r->B,
                        .length = q->length,
                        .heads = r->H,
                        .size = r->dv,
                        .batch_stride = r->queries.rows * row,
                        .row_stride = row,
                        .head_stride = r->dv,
                        .size_stride = 1};
  return t;
}

static float *lse_at(const mha_mpi_ring *r, const piece *q) {
  return r->lse + r->B * r->H * q->row;
}

static mha_status attend(const mha_mpi_ring *r, const mha_tensor *queries, const piece *q,
                         const visitor *u, const mha_tensor *output, float *lse, mha_error *error) {
  const mha_rules rules = rules_of(r, q, u);
  const mha_tensor k = keys_at(r, u, u->k, r->d);
  const mha_tensor v = keys_at(r, u, u->v, r->dv);
  mha_tensor rows = *queries;
  mha_results results;
  mha_attend_args args;
  rows.data = (const float *)queries->data + q->row * queries->row_stride;
  rows.length = q->length;
  MHA_INIT(&results);
  results.log_sum_exp = lse;
  MHA_INIT(&args);
  args.output = (float *)(uintptr_t)output->data;
  args.output_batch_stride = output->batch_stride;
  args.output_row_stride = output->row_stride;
  args.output_head_stride = output->head_stride;
  args.rules = &rules;
  args.results = &results;
  return mha_attend(r->context, &rows, &k, &v, &args, error);
}

/* One more part joins what the piece has. */
static mha_status merge(const mha_mpi_ring *r, const piece *q, const mha_tensor *part,
                        mha_error *error) {
  const mha_tensor result = result_at(r, q);
  const mha_tensor outputs[] = {result, *part};
  const float *const sums[] = {lse_at(r, q), r->part_lse};
  mha_merge_args args;
  MHA_INIT(&args);
  args.n_parts = 2;
  args.outputs = outputs;
  args.log_sum_exps = sums;
  args.output = (float *)(uintptr_t)result.data;
  args.output_batch_stride = result.batch_stride;
  args.output_row_stride = result.row_stride;
  args.output_head_stride = result.head_stride;
  args.log_sum_exp = lse_at(r, q);
  return mha_merge(&args, error);
}

static mha_status add_block(const mha_mpi_ring *r, const mha_tensor *queries, const piece *q,
                            const visitor *u, mha_error *error) {
  const int64_t row = r->H * r->dv;
  const mha_tensor result = result_at(r, q);
  const mha_tensor part = {.data = r->part,
                           .batch = r->B,
                           .length = q->length,
                           .heads = r->H,
                           .size = r->dv,
                           .batch_stride = q->length * row,
                           .row_stride = row,
                           .head_stride = r->dv,
                           .size_stride = 1};
  if (u->block.length == 0 || !sees(r, q, u))
    return MHA_OK;
  if (!r->started[q->index]) {
    r->started[q->index] = 1;
    return attend(r, queries, q, u, &result, lse_at(r, q), error);
  }
  const mha_status status = attend(r, queries, q, u, &part, r->part_lse, error);
  return status ? status : merge(r, q, &part, error);
}

/* ---- pieces ---- */

/* The next piece of the process's queries, or false; begins with {0} and index -1. */
static bool next_piece(const mha_mpi_ring *r, piece *q) {
  const int64_t row = q->row + q->length;
  for (int i = 0; i < MHA_MPI_BLOCKS_OF_ONE; i++) {
    const mha_mpi_block *b = &r->queries.at[i];
    if (row < b->row || row >= b->row + b->length)
      continue;
    const int64_t left = b->row + b->length - row;
    *q = (piece){row, b->begin + row - b->row, mha_min(left, MHA_MPI_PIECE), q->index + 1};
    return true;
  }
  return false;
}

static const piece before_first = {.index = -1};

/* ---- travelling ---- */

/* The messages of a step: a block's parts to the next process, and another's from the one before.
 */
typedef struct travel {
  MPI_Request requests[2 * MOST_PARTS];
  MPI_Status statuses[2 * MOST_PARTS]; /* of no interest; some compilers warn of "ignored" ones */
  int n;
  double begin;
  int64_t bytes;
} travel;

static int64_t numbers_of(const mha_mpi_ring *r, int32_t process) {
  return r->B * r->team->lengths[INT64_C(2) * process + 1] * r->G * (r->d + r->dv);
}

/* The process whose keys are at hand in a step. */
static int32_t origin(const mha_mpi_ring *r, int32_t step) {
  const int32_t p = r->team->place.by_positions;
  return ((r->team->place.position - step) % p + p) % p;
}

static mha_status start_travel(const mha_mpi_ring *r, int32_t step, travel *t, mha_error *error) {
  const int32_t p = r->team->place.by_positions;
  const int32_t next = (r->team->place.position + 1) % p;
  const int32_t previous = (r->team->place.position + p - 1) % p;
  const int64_t leaving = numbers_of(r, origin(r, step));
  const int64_t arriving = numbers_of(r, origin(r, step + 1));
  float *from = r->traveller[step % 2];
  float *to = r->traveller[(step + 1) % 2];
  mha_status status = MHA_OK;
  t->begin = mha_mpi_now(r->team);
  t->bytes = arriving * (int64_t)sizeof(float);
  for (int64_t at = 0; !status && at < arriving; at += MHA_MPI_MOST)
    status = mha_mpi_check(MPI_Irecv(to + at, (int)mha_min(arriving - at, MHA_MPI_MOST), MPI_FLOAT,
                                     previous, step, r->team->positions, &t->requests[t->n++]),
                           "MPI_Irecv", error);
  for (int64_t at = 0; !status && at < leaving; at += MHA_MPI_MOST)
    status = mha_mpi_check(MPI_Isend(from + at, (int)mha_min(leaving - at, MHA_MPI_MOST), MPI_FLOAT,
                                     next, step, r->team->positions, &t->requests[t->n++]),
                           "MPI_Isend", error);
  return status;
}

/* MPI moves large messages only while it is called. */
static void push_on(const mha_mpi_ring *r, int32_t step, travel *t) {
  int done = 0;
  if (t->n == 0)
    return;
  if (MPI_Testall(t->n, t->requests, &done, t->statuses) == MPI_SUCCESS && done) {
    mha_mpi_tell(r->team, MHA_MPI_TRAVEL, step, t->begin, t->bytes);
    t->n = 0;
  }
}

static mha_status end_travel(const mha_mpi_ring *r, int32_t step, travel *t, mha_error *error) {
  if (t->n == 0)
    return MHA_OK;
  const double begin = mha_mpi_now(r->team);
  const mha_status status =
      mha_mpi_check(MPI_Waitall(t->n, t->requests, t->statuses), "MPI_Waitall", error);
  mha_mpi_tell(r->team, MHA_MPI_WAIT, step, begin, t->bytes);
  mha_mpi_tell(r->team, MHA_MPI_TRAVEL, step, t->begin, t->bytes);
  return status;
}

/* ---- the ring ---- */

static mha_status compute_step(mha_mpi_ring *r, int32_t step, const mha_tensor *q, travel *t,
                               mha_error *error) {
  const int32_t from = origin(r, step);
  const mha_mpi_blocks keys =
      mha_mpi_blocks_of(r->order, r->team->place.by_positions, from, r->team->lengths + 1);
  const float *k = r->traveller[step % 2];
  visitor u = {.k = k, .v = k + r->B * keys.rows * r->G * r->d, .rows = keys.rows};
  mha_status status = MHA_OK;
  piece at = before_first;
  while (!status && next_piece(r, &at))
    for (int i = 0; !status && i < MHA_MPI_BLOCKS_OF_ONE; i++) {
      const double begin = mha_mpi_now(r->team);
      u.block = keys.at[i];
      status = add_block(r, q, &at, &u, error);
      mha_mpi_tell(r->team, MHA_MPI_COMPUTE, step, begin, 0);
      push_on(r, step, t);
    }
  return status;
}

mha_status mha_mpi_ring_run(mha_mpi_ring *r, const mha_tensor *q, mha_error *error) {
  const int32_t p = r->team->place.by_positions;
  mha_status status = MHA_OK; /* the first that fails; the others wait for what it passes on */
  mha_error ignored;
  memset(r->started, 0, (size_t)piece_count(r));
  for (int32_t step = 0; step < p; step++) {
    travel t;
    t.n = 0;
    mha_status sent = MHA_OK;
    if (step + 1 < p)
      sent = start_travel(r, step, &t, status ? &ignored : error);
    if (!status && !sent)
      status = compute_step(r, step, q, &t, error);
    if (!sent)
      sent = end_travel(r, step, &t, status ? &ignored : error);
    if (sent)
      return status ? status : sent; /* MPI itself has failed */
  }
  return status;
}

/* ---- the result ---- */

/* Queries that see no key of anybody. */
static void clear_piece(const mha_mpi_ring *r, const piece *q) {
  const mha_tensor t = result_at(r, q);
  float *lse = lse_at(r, q);
  for (int64_t b = 0; b < r->B; b++)
    memset((float *)(uintptr_t)t.data + b * t.batch_stride, 0,
           (size_t)(q->length * t.row_stride) * sizeof *lse);
  for (int64_t i = 0; i < r->B * r->H * q->length; i++)
    lse[i] = -INFINITY;
}

static mha_status take_sinks(const mha_mpi_ring *r, const piece *q, mha_error *error) {
  const mha_tensor result = result_at(r, q);
  const float *const sums[] = {lse_at(r, q)};
  mha_merge_args args;
  MHA_INIT(&args);
  args.n_parts = 1;
  args.outputs = &result;
  args.log_sum_exps = sums;
  args.sinks = r->rules.sinks;
  args.output = (float *)(uintptr_t)result.data;
  args.output_batch_stride = result.batch_stride;
  args.output_row_stride = result.row_stride;
  args.output_head_stride = result.head_stride;
  return mha_merge(&args, error);
}

static void show_lse(const mha_mpi_ring *r, const piece *q, float *log_sum_exp) {
  const float *lse = lse_at(r, q);
  for (int64_t row = 0; row < r->B * r->H; row++)
    memcpy(log_sum_exp + row * r->queries.rows + q->row, lse + row * q->length,
           (size_t)q->length * sizeof *lse);
}

mha_status mha_mpi_ring_finish(mha_mpi_ring *r, mha_error *error) {
  mha_status status = MHA_OK;
  piece at = before_first;
  while (!status && r->B > 0 && next_piece(r, &at)) {
    if (!r->started[at.index])
      clear_piece(r, &at);
    if (r->rules.sinks)
      status = take_sinks(r, &at, error);
  }
  return status;
}

void mha_mpi_ring_show(const mha_mpi_ring *r, float *log_sum_exp) {
  piece at = before_first;
  while (log_sum_exp && r->B > 0 && next_piece(r, &at))
    show_lse(r, &at, log_sum_exp);
}
