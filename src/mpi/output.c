/* Owns the output of a call whose heads are shared: partial in scratch, summed up over processes,
 * and then written as the caller wants it, all rows or this process's own. */
#include "base/error.h"
#include "call.h"

#include <string.h>

enum { FIRST_SPREAD = MHA_ENDS_BEHIND(mha_mpi_spread, output) };

mha_status mha_mpi_spread_read(const mha_mpi_spread *given, mha_mpi_spread *spread,
                               mha_error *error) {
  MHA_INIT(spread);
  mha_status status =
      given ? mha_read_struct(spread, sizeof *spread, FIRST_SPREAD, given, "spread", error)
            : MHA_OK;
  if (!status && spread->order != MHA_MPI_BLOCKS && spread->order != MHA_MPI_BALANCED)
    status = mha_fail(error, MHA_ERROR_VALUE, "spread.order is %d; rule: a value of mha_mpi_order",
                      (int)spread->order);
  if (!status && spread->output != MHA_MPI_ALL_ROWS && spread->output != MHA_MPI_OWN_ROWS)
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "spread.output is %d; rule: a value of mha_mpi_output", (int)spread->output);
  return status;
}

/* ---- whose rows ---- */

static bool keeps_own(const mha_mpi_call *c) {
  return c->spread.output == MHA_MPI_OWN_ROWS && c->team->place.by_heads > 1;
}

/* Of R rows, those before r·R/n. */
static int64_t rows_before(const mha_mpi_call *c, int64_t r) {
  const int64_t R = c->output.batch * c->output.length;
  const int64_t n = c->team->place.by_heads;
  return R / n * r + R % n * r / n;
}

static mha_status check_sizes(const mha_forward_args *a, mha_error *error) {
  mha_status status = mha_require_at_least(a->batch, 0, "args.batch", error);
  if (!status)
    status = mha_require_at_least(a->query_length, 0, "args.query_length", error);
  return status ? status : mha_require_at_least(a->key_length, 0, "args.key_length", error);
}

mha_status mha_mpi_output_read(mha_mpi_call *c, mha_error *error) {
  const mha_forward_args *a = &c->local.given;
  const bool none = a->cache && a->cache_mode == MHA_CACHE_APPEND;
  mha_status status = check_sizes(a, error);
  int64_t rows = 0;
  c->output = (mha_rows_shape){c->local.rules.query_starts ? 1 : a->batch,
                               none ? 0 : a->query_length, c->weights->whole.output_width,
                               a->output_batch_stride, a->output_row_stride};
  if (!status && !mha_multiply(c->output.batch, c->output.length, &rows))
    status = mha_fail(error, MHA_ERROR_OVERFLOW,
                      "args.batch is %lld, args.query_length %lld; rule: the product must not "
                      "overflow",
                      (long long)a->batch, (long long)a->query_length);
  if (status)
    return status;
  c->first = rows_before(c, c->team->place.head);
  c->own = rows_before(c, c->team->place.head + INT64_C(1)) - c->first;
  const mha_rows_shape own = {1, c->own, c->output.width, 0, a->output_row_stride};
  mha_rows_shape given = keeps_own(c) ? own : c->output;
  status = mha_resolve_strides(&given, true, "args.output", error);
  if (!status && given.batch > 0 && given.length > 0)
    status = mha_require(a->output, "args.output", error);
  c->output.batch_stride = given.batch_stride;
  c->output.row_stride = given.row_stride;
  return status;
}

/* ---- scratch ---- */

void mha_mpi_output_plan(mha_mpi_call *c, mha_layout *layout) {
  const mha_forward_args *a = &c->local.given;
  const int64_t rows = c->output.batch * c->output.length;
  int64_t total = 0;
  c->n_average = 0;
  bool fits = mha_multiply(rows, c->output.width, &c->n);
  if (fits && c->local.results.average)
    fits = mha_multiply(rows, a->key ? a->key_length : a->query_length, &c->n_average);
  fits = fits && mha_add(c->n, c->n_average, &total) && mha_add(total, 1, &total);
  layout->overflow |= !fits;
  c->at_sum = mha_layout_add(layout, sizeof(float), total, 1, 1);
  c->at_own = mha_layout_add(layout, sizeof(float), keeps_own(c) ? c->own : 0, c->output.width, 1);
}

void mha_mpi_output_place(mha_mpi_call *c, mha_forward_args *a) {
  const mha_mpi_weights *w = c->weights;
  c->sum = (void *)(c->team->scratch + c->at_sum);
  c->own_rows = (void *)(c->team->scratch + c->at_own);
  a->output = c->sum;
  a->accumulate = 0;
  a->output_row_stride = c->output.width;
  a->output_batch_stride = c->output.width * c->output.length;
  if (w->absent[3]) {
    memset(c->sum, 0, (size_t)c->n * sizeof *c->sum);
    a->output += mha_mpi_share_columns(w).concat;
  }
}

/* ---- the sum ---- */

static void write_rows(const mha_mpi_call *c, const float *rows, const mha_rows_shape *to) {
  const bool add = c->local.given.accumulate != 0;
  for (int64_t b = 0; b < to->batch; b++)
    for (int64_t i = 0; i < to->length; i++, rows += to->width) {
      float *y = c->local.given.output + b * to->batch_stride + i * to->row_stride;
      for (int64_t e = 0; add && e < to->width; e++)
        y[e] += rows[e];
      if (!add)
        memcpy(y, rows, (size_t)to->width * sizeof *y);
    }
}

static void write_average(const mha_mpi_call *c) {
  const float share = 1.0f / (float)c->team->place.by_heads;
  for (int64_t i = 0; i < c->n_average; i++)
    c->local.given.results->average[i] = c->sum[c->n + i] * share;
}

/* The sum of parts has no room for a word about failures. */
static mha_status sum_own(mha_mpi_call *c, mha_status status, mha_error *error) {
  const mha_rows_shape own = {1, c->own, c->output.width, 0, c->output.row_stride};
  status = mha_mpi_agree(c->team, MHA_MPI_DONE, status, NULL, error);
  for (int64_t r = 0; r < c->team->place.by_heads; r++)
    c->team->counts[r] = (rows_before(c, r + 1) - rows_before(c, r)) * c->output.width;
  if (!status)
    status = mha_mpi_sum_parts(c->team, c->sum, c->own_rows, error);
  if (!status && c->n_average > 0)
    status = mha_mpi_sum(c->team, c->sum + c->n, c->n_average, error);
  if (!status)
    write_rows(c, c->own_rows, &own);
  return status;
}

/* A process that failed says so behind the numbers that it owes the others. */
static mha_status sum_all(mha_mpi_call *c, mha_status status, mha_error *error) {
  const int64_t n = c->n + c->n_average;
  mha_error unsaid;
  c->sum[n] = status ? 1.0f : 0.0f;
  if (status)
    memset(c->sum, 0, (size_t)n * sizeof *c->sum);
  const mha_status sent = mha_mpi_sum(c->team, c->sum, n + 1, status ? &unsaid : error);
  if (sent)
    return status ? status : sent;
  if (c->sum[n] != 0.0f)
    return mha_mpi_agree(c->team, MHA_MPI_DONE, status, NULL, error);
  write_rows(c, c->sum, &c->output);
  return MHA_OK;
}

mha_status mha_mpi_output_finish(mha_mpi_call *c, mha_status status, mha_error *error) {
  status = keeps_own(c) ? sum_own(c, status, error) : sum_all(c, status, error);
  if (!status)
    write_average(c);
  return status;
}
