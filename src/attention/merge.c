/* Owns mha_merge: one attention of several over parts of its keys. For each row, from the parts'
 * log-sum-exps,
 *
 *   m = max_u lse_u,  S = Σ_u exp(lse_u - m),  lse = m + ln S
 *   output = Σ_u exp(lse_u - m)·output_u / (S + exp(sink - m))                                   */
#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/error.h"
#include "base/tensor.h"
#include "engine/vector.h"

#include <math.h>
#include <stdio.h>

/* ---- reading ---- */

/* Sizes that were forgotten. */
static mha_status check_meant(const mha_merge_args *a, mha_error *error) {
  const mha_tensor *first = &a->outputs[0];
  const void *given = first->data ? first->data : a->output;
  const char *name = first->data ? "args.outputs[0].data" : "args.output";
  mha_status status =
      mha_require_meant(a->flags, first->batch, "args.outputs[0].batch", given, name, error);
  if (!status)
    status =
        mha_require_meant(a->flags, first->length, "args.outputs[0].length", given, name, error);
  return status;
}

/* The output's extents are those of the first part. */
static mha_status read_whole(mha_merge_args *a, const mha_merge_args *given,
                             mha_tensor_shape *first, mha_tensor_shape *output,
                             mha_address_ranges *ranges, mha_error *error) {
  mha_address_ranges ignored = {.n = 0};
  mha_status status = mha_read_struct(a, sizeof *a, MHA_FIRST_MERGE_ARGS, given, "args", error);
  if (!status)
    status = mha_require_flags(a->flags, MHA_ALLOW_EMPTY, "args.flags", error);
  if (!status)
    status = mha_require_reserved(a->reserved, "args.reserved", error);
  if (!status)
    status = mha_require_at_least(a->n_parts, 1, "args.n_parts", error);
  if (!status)
    status = mha_require(a->outputs, "args.outputs", error);
  if (!status)
    status = mha_require(a->log_sum_exps, "args.log_sum_exps", error);
  if (!status)
    status = mha_tensor_read(&a->outputs[0], "args.outputs[0]", first, &ignored, error);
  if (!status)
    status = check_meant(a, error);
  if (!status)
    status = mha_ranges_add(ranges, "args.outputs", a->outputs, a->n_parts, sizeof *a->outputs,
                            false, error);
  if (!status)
    status = mha_ranges_add(ranges, "args.log_sum_exps", a->log_sum_exps, a->n_parts,
                            sizeof *a->log_sum_exps, false, error);
  if (status)
    return status;
  *output = *first;
  output->batch_stride = a->output_batch_stride;
  output->row_stride = a->output_row_stride;
  output->head_stride = a->output_head_stride;
  status = mha_tensor_read_output(a->output, "args.output", output, ranges, error);
  return status ? status : mha_require_sinks(a->sinks, first->heads, "args.sinks", error);
}

/* Adds what has one number for each row and head. */
static mha_status add_rows(const mha_tensor_shape *s, const char *name, const float *data,
                           bool is_output, mha_address_ranges *ranges, mha_error *error) {
  int64_t n = 0;
  if (!mha_multiply(s->batch, s->heads, &n) || !mha_multiply(n, s->length, &n))
    return mha_fail(
        error, MHA_ERROR_OVERFLOW,
        "args.outputs[0] has %lld entries of %lld rows of %lld heads; rule: the product "
        "must not overflow",
        (long long)s->batch, (long long)s->length, (long long)s->heads);
  return mha_ranges_add(ranges, name, data, n, sizeof(float), is_output, error);
}

static bool is_in_place(const mha_merge_args *a, const mha_tensor *part, const mha_tensor_shape *s,
                        const mha_tensor_shape *output) {
  return part->data == a->output && s->batch_stride == output->batch_stride &&
         s->row_stride == output->row_stride && s->head_stride == output->head_stride;
}

/* Checks part u against the first and against what is written. */
static mha_status check_part(const mha_merge_args *a, int64_t u, const mha_tensor_shape *first,
                             const mha_tensor_shape *output, const mha_address_ranges *whole,
                             mha_error *error) {
  mha_address_ranges ranges = *whole;
  mha_tensor_shape s = {0};
  const float *lse = a->log_sum_exps[u];
  char name[40];
  (void)snprintf(name, sizeof name, "args.outputs[%lld]", (long long)u);
  mha_status status = mha_tensor_read(&a->outputs[u], name, &s, &ranges, error);
  if (status)
    return status;
  if (s.batch != first->batch || s.length != first->length || s.heads != first->heads ||
      s.size != first->size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "args.outputs[%lld] is [%lld][%lld][%lld][%lld]; rule: as the first, "
                    "[%lld][%lld][%lld][%lld]",
                    (long long)u, (long long)s.batch, (long long)s.length, (long long)s.heads,
                    (long long)s.size, (long long)first->batch, (long long)first->length,
                    (long long)first->heads, (long long)first->size);
  if (s.batch > 0 && s.length > 0 && !lse)
    return mha_fail(error, MHA_ERROR_NULL,
                    "args.log_sum_exps[%lld] is NULL; rule: it must be given", (long long)u);
  if (is_in_place(a, &a->outputs[u], &s, output))
    ranges.n = whole->n;
  if (lse != a->log_sum_exp)
    status = add_rows(&s, "args.log_sum_exps", lse, false, &ranges, error);
  return status ? status : mha_ranges_check(&ranges, error);
}

/* ---- merging ---- */

static double largest(const mha_merge_args *a, int64_t row) {
  double max = -INFINITY;
  for (int64_t u = 0; u < a->n_parts; u++) {
    const double lse = (double)a->log_sum_exps[u][row];
    max = lse > max || isnan(lse) ? lse : max;
  }
  return max;
}

/* S */
static double add_weights(const mha_merge_args *a, int64_t row, double max) {
  double sum = 0.0;
  for (int64_t u = 0; u < a->n_parts; u++)
    sum += exp((double)a->log_sum_exps[u][row] - max);
  return sum;
}

/* Row (b, i, h) of a part that has been checked. */
static const float *part_row(const mha_tensor *t, int64_t b, int64_t i, int64_t h) {
  const float *data = t->data;
  if (!t->batch_stride && !t->row_stride && !t->head_stride && !t->size_stride)
    return data + ((b * t->length + i) * t->heads + h) * t->size;
  return data + b * t->batch_stride + i * t->row_stride + h * t->head_stride;
}

/* Elements at a time: all parts of them are read before one is written, since the output may be in
 * place of a part. */
enum { COLUMNS = 64 };

/* Columns [first, first + n) of row (b, i, h) of the whole; `row` is its number, `scale` what its
 * sum of weights and sink make of it. */
static void merge_columns(const mha_merge_args *a, int64_t b, int64_t i, int64_t h, int64_t row,
                          double max, double scale, int64_t first, int64_t n, float *output) {
  double sums[COLUMNS] = {0};
  for (int64_t u = 0; u < a->n_parts; u++) {
    const float lse = a->log_sum_exps[u][row];
    const float *part = part_row(&a->outputs[u], b, i, h) + first;
    const double factor = exp((double)lse - max) * scale;
    if (lse != -INFINITY)
      mha_vector_gather(sums, part, factor, n);
  }
  for (int64_t c = 0; c < n; c++)
    output[first + c] = (float)sums[c];
}

static void merge_row(const mha_merge_args *a, const mha_tensor_shape *s, int64_t b, int64_t i,
                      int64_t h, float *output) {
  const int64_t row = (b * s->heads + h) * s->length + i;
  const double max = largest(a, row);
  const double sum = max == -INFINITY ? 0.0 : add_weights(a, row, max);
  const double sink = a->sinks ? exp((double)a->sinks[h] - max) : 0.0;
  const double scale = max == -INFINITY ? 0.0 : 1.0 / (sum + sink);
  for (int64_t c = 0; c < s->size; c += COLUMNS)
    merge_columns(a, b, i, h, row, max, scale, c, mha_min(s->size - c, COLUMNS), output);
  if (a->log_sum_exp)
    a->log_sum_exp[row] = max == -INFINITY ? -INFINITY : (float)(max + log(sum));
}

mha_status mha_merge(const mha_merge_args *args, mha_error *error) {
  mha_merge_args a;
  mha_address_ranges ranges = {.n = 0};
  mha_tensor_shape first = {0};
  mha_tensor_shape output = {0};
  mha_status status = read_whole(&a, args, &first, &output, &ranges, error);
  if (!status)
    status = add_rows(&first, "args.log_sum_exp", a.log_sum_exp, true, &ranges, error);
  if (!status)
    status =
        mha_ranges_add(&ranges, "args.sinks", a.sinks, first.heads, sizeof(float), false, error);
  for (int64_t u = 0; !status && u < a.n_parts; u++)
    status = check_part(&a, u, &first, &output, &ranges, error);
  if (status)
    return status;
  for (int64_t b = 0; first.length > 0 && b < first.batch; b++) /* it may be any number then */
    for (int64_t i = 0; i < first.length; i++)
      for (int64_t h = 0; h < first.heads; h++)
        merge_row(&a, &first, b, i, h,
                  a.output + b * output.batch_stride + i * output.row_stride +
                      h * output.head_stride);
  return mha_succeed(error);
}
