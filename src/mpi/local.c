/* Owns the turning of a call on the whole layer into the call on a process's heads. */
#include "local.h"

#include "base/arguments.h"
#include "base/error.h"

/* ---- rules ---- */

/* A mask or bias of full extent over heads becomes that of n heads from `first` on. */
typedef struct head_array {
  const void **data;
  int32_t element; /* of a bias; a mask has bytes */
  bool bytes;
  int64_t *heads, *batch_stride, *head_stride, *row_stride;
  int64_t batch, rows, columns;
  const char *name;
} head_array;

static mha_status cut_heads_of(const head_array *a, int64_t H, int64_t first, int64_t n,
                               mha_error *error) {
  if (!*a->data || *a->heads == 1 || H == n)
    return MHA_OK;
  if (*a->heads != H)
    return mha_fail(error, MHA_ERROR_SIZE, "%s has %lld heads; rule: 1 or all of the layer's, %lld",
                    a->name, (long long)*a->heads, (long long)H);
  const int64_t row = a->rows > 1 && *a->row_stride ? *a->row_stride : a->columns;
  int64_t head = *a->head_stride;
  int64_t all = 0;
  if ((head == 0 && !mha_multiply(a->rows, row, &head)) || !mha_multiply(H, head, &all))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld rows of %lld; rule: they can be counted", a->name,
                    (long long)a->rows, (long long)row);
  if (!*a->batch_stride)
    *a->batch_stride = all;
  *a->head_stride = head;
  *a->heads = n;
  const size_t bytes =
      a->bytes ? (size_t)(first * head) : mha_element_bytes(a->element, first * head);
  const char *begin = *a->data;
  *a->data = begin + bytes;
  return MHA_OK;
}

mha_status mha_mpi_local_rules(const mha_rules *given, int64_t H, int64_t first, int64_t n,
                               mha_rules *rules, mha_error *error) {
  MHA_INIT(rules);
  mha_status status =
      given ? mha_read_struct(rules, sizeof *rules, MHA_FIRST_RULES, given, "rules", error)
            : MHA_OK;
  rules->struct_size = sizeof *rules;
  if (status)
    return status;
  mha_mask *mask = &rules->attend;
  mha_bias *bias = &rules->bias;
  const head_array arrays[] = {
      {&mask->data, 0, true, &mask->heads, &mask->batch_stride, &mask->head_stride,
       &mask->row_stride, mask->batch, mask->rows, mask->columns, "rules.attend"},
      {&bias->data, bias->element, false, &bias->heads, &bias->batch_stride, &bias->head_stride,
       &bias->row_stride, bias->batch, bias->rows, bias->columns, "rules.bias"}};
  for (size_t i = 0; !status && i < sizeof arrays / sizeof *arrays; i++)
    status = cut_heads_of(&arrays[i], H, first, n, error);
  if (rules->alibi_slopes)
    rules->alibi_slopes += first;
  if (rules->sinks)
    rules->sinks += first;
  if (!status && n < H && rules->dropout != 0)
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "rules.dropout is %g where heads are shared; rule: 0, which weights are "
                      "dropped depends on all heads",
                      (double)rules->dropout);
  return status;
}

/* ---- inputs ---- */

void mha_mpi_local_strides(int64_t L, int64_t width, int64_t *batch_stride, int64_t *row_stride) {
  if (!*row_stride)
    *row_stride = width;
  int64_t rows = 0; /* what cannot be counted mha_forward refuses */
  if (!*batch_stride)
    *batch_stride = *row_stride >= width && mha_multiply(*row_stride, L, &rows) && rows > 0
                        ? rows
                        : *row_stride;
}

static const float *columns_from(const float *x, int64_t first) {
  return x ? x + first : NULL;
}

/* Where a matrix is absent, the process's columns of the input are its heads. Inputs that were one
 * then begin at different columns. */
static void cut_inputs(const mha_mpi_weights *w, mha_forward_args *a, mha_rules *rules) {
  const mha_config *c = &w->whole;
  const mha_mpi_columns at = mha_mpi_share_columns(w);
  const bool appends = a->cache_mode != MHA_CACHE_ATTEND;
  if (w->n == 1 || !(w->absent[0] || w->absent[1] || w->absent[2]))
    return;
  mha_mpi_local_strides(a->query_length, c->query_width, &a->query_batch_stride,
                        &a->query_row_stride);
  if (appends && !a->key) {
    a->key = a->query;
    a->key_length = a->query_length;
    a->key_batch_stride = a->query_batch_stride;
    a->key_row_stride = a->query_row_stride;
    a->key_position = a->query_position;
    a->key_positions = a->query_positions;
    if (rules->query_starts && !rules->key_starts)
      rules->key_starts = rules->query_starts;
  }
  mha_mpi_local_strides(a->key_length, c->key_width, &a->key_batch_stride, &a->key_row_stride);
  if (appends && !a->value) {
    a->value = a->key;
    a->value_batch_stride = a->key_batch_stride;
    a->value_row_stride = a->key_row_stride;
  }
  mha_mpi_local_strides(a->key_length, c->value_width, &a->value_batch_stride,
                        &a->value_row_stride);
  a->query = columns_from(a->query, w->absent[0] ? at.q : 0);
  a->key = columns_from(a->key, w->absent[1] ? at.k : 0);
  a->value = columns_from(a->value, w->absent[2] ? at.v : 0);
}

mha_status mha_mpi_local_read(const mha_mpi_weights *w, const mha_forward_args *given,
                              mha_mpi_local *l, mha_error *error) {
  *l = (mha_mpi_local){.has_results = false};
  mha_status status =
      mha_read_struct(&l->given, sizeof l->given, MHA_FIRST_FORWARD_ARGS, given, "args", error);
  if (status)
    return status;
  l->given.struct_size = sizeof l->given;
  l->args = l->given;
  status = mha_mpi_local_rules(l->given.rules, w->whole.n_heads, w->first_head, w->n_heads,
                               &l->rules, error);
  if (!status && l->given.results) {
    status = mha_read_struct(&l->results, sizeof l->results, MHA_FIRST_RESULTS, l->given.results,
                             "results", error);
    l->results.struct_size = sizeof l->results;
    l->has_results = true;
  }
  if (status)
    return status;
  cut_inputs(w, &l->args, &l->rules);
  l->args.rules = &l->rules;
  l->args.results = l->has_results ? &l->results : NULL;
  return MHA_OK;
}

/* ---- what is the same on all ---- */

static void add_extents(mha_mpi_facts *facts, const char *name, const void *data, int64_t batch,
                        int64_t heads, int64_t columns) {
  mha_mpi_fact(facts, name, data ? 1 + 2 * (batch > 1) + 4 * (heads > 1) + 8 * columns : 0);
}

void mha_mpi_local_rules_facts(mha_mpi_facts *facts, const mha_rules *r, int64_t B, int64_t H) {
  mha_mpi_fact(facts, "rules.flags", (int64_t)r->flags);
  mha_mpi_fact(facts, "rules.causal", r->causal != 0);
  mha_mpi_fact(facts, "rules.alignment", r->alignment);
  mha_mpi_fact_float(facts, "rules.scale", r->flags & MHA_SCALE ? (double)r->scale : 0.0);
  mha_mpi_fact_float(facts, "rules.softcap", (double)r->softcap);
  mha_mpi_fact_float(facts, "rules.dropout", (double)r->dropout);
  mha_mpi_fact(facts, "rules.dropout_seed", (int64_t)(r->dropout_seed >> 1));
  mha_mpi_fact(facts, "rules.dropout_call", (int64_t)(r->dropout_call >> 1));
  mha_mpi_fact(facts, "rules.offset", r->offset);
  mha_mpi_fact_list(facts, "rules.offsets", r->offsets, B);
  mha_mpi_fact(facts, "rules.window_left", r->flags & MHA_WINDOW ? r->window_left : 0);
  mha_mpi_fact(facts, "rules.window_right", r->flags & MHA_WINDOW ? r->window_right : 0);
  mha_mpi_fact_list(facts, "rules.query_lengths", r->query_lengths, B);
  mha_mpi_fact_list(facts, "rules.key_lengths", r->key_lengths, B);
  mha_mpi_fact_list(facts, "rules.query_starts", r->query_starts, B + 1);
  mha_mpi_fact_list(facts, "rules.key_starts", r->key_starts, B + 1);
  add_extents(facts, "rules.attend", r->attend.data, r->attend.batch, r->attend.heads,
              r->attend.columns);
  add_extents(facts, "rules.bias", r->bias.data, r->bias.batch, r->bias.heads, r->bias.columns);
  mha_mpi_fact_floats(facts, "rules.alibi_slopes", r->alibi_slopes, H);
  mha_mpi_fact_floats(facts, "rules.sinks", r->sinks, H);
}

/* What a call does with a cache; lengths as the process's own has them. */
static void add_cache_facts(mha_mpi_facts *facts, const mha_forward_args *a) {
  int64_t seen = 0;
  for (int64_t b = 0; a->cache && b < a->batch; b++) {
    int64_t length = 0;
    const int64_t entry = a->cache_entries ? a->cache_entries[b] : b;
    if (mha_cache_length(a->cache, entry, &length, NULL))
      length = -1;
    seen = (int64_t)(((uint64_t)seen * 31 + (uint64_t)length) >> 1);
  }
  mha_mpi_fact(facts, "args.cache", a->cache != NULL);
  mha_mpi_fact(facts, "args.cache_mode", a->cache_mode);
  mha_mpi_fact_list(facts, "args.cache_entries", a->cache_entries, a->batch);
  mha_mpi_fact(facts, "the lengths of args.cache", seen);
  mha_mpi_fact_list(facts, "args.new_lengths", a->new_lengths, a->batch);
  mha_mpi_fact_list(facts, "args.expected_lengths", a->expected_lengths, a->batch);
}

/* Rows of all entries, or 0 for sizes that mha_forward refuses. */
static int64_t count_rows(const mha_mpi_local *l, int64_t L) {
  int64_t rows = 0;
  const int64_t entries = l->rules.query_starts ? 1 : l->given.batch;
  return mha_multiply(entries, L, &rows) ? rows : 0;
}

void mha_mpi_local_facts(mha_mpi_facts *facts, const mha_mpi_local *l, const mha_mpi_weights *w,
                         bool rows_too) {
  const mha_forward_args *a = &l->given;
  mha_mpi_fact(facts, "args.flags", (int64_t)a->flags);
  mha_mpi_fact(facts, "args.accumulate", a->accumulate != 0);
  mha_mpi_fact(facts, "args.batch", a->batch);
  mha_mpi_fact(facts, "args.query_length", rows_too ? a->query_length : 0);
  mha_mpi_fact(facts, "args.key_length", rows_too ? a->key_length : 0);
  mha_mpi_fact(facts, "args.key", a->key != NULL);
  mha_mpi_fact(facts, "args.value", a->value != NULL);
  mha_mpi_fact(facts, "args.query_position", a->query_position);
  mha_mpi_fact(facts, "args.key_position", a->key_position);
  mha_mpi_fact_list(facts, "args.query_positions", a->query_positions,
                    rows_too ? count_rows(l, a->query_length) : 0);
  mha_mpi_fact_list(facts, "args.key_positions", a->key_positions,
                    rows_too ? count_rows(l, a->key_length) : 0);
  mha_mpi_fact(facts, "args.tape", a->tape != NULL);
  mha_mpi_fact(facts, "results.stage", l->results.stage);
  mha_mpi_fact(facts, "results.weights", l->results.weights != NULL);
  mha_mpi_fact(facts, "results.average", l->results.average != NULL);
  mha_mpi_fact(facts, "results.log_sum_exp", l->results.log_sum_exp != NULL);
  add_cache_facts(facts, a);
  mha_rules whole = l->rules; /* slopes and sinks as they were given, of all heads */
  whole.alibi_slopes = a->rules ? a->rules->alibi_slopes : NULL;
  whole.sinks = a->rules ? a->rules->sinks : NULL;
  mha_mpi_local_rules_facts(facts, &whole, a->batch, w->whole.n_heads);
}
