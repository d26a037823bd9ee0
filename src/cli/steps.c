/* Owns `mha run --steps`: how one call is cut into calls of one token. */
#include "steps.h"

#include "base/error.h"
#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

typedef struct steps {
  const mha_calls *calls;
  const mha_forward_args *whole;
  mha_cache *cache;
  mha_steps_cache how;
  int64_t n_heads;
  int64_t query_width, output_width;
  float *weights; /* [B][H][1][t+1] of step t */
  float *lse;     /* [B][H][1] */
  size_t weights_bytes, lse_bytes;
} steps;

/* ---- Masks and biases ------------------------------------------------------------------------ */

/* Extents of one that serves all steps: Lk grows from step to step, so that the library sees only
 * the first columns of one row. */
static mha_status check_extents(const char *name, int64_t rows, int64_t columns, int64_t L,
                                mha_error *error) {
  if ((rows == 1 || rows == L) && columns == L)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_SIZE,
                  "%s has %" PRId64 " rows and %" PRId64 " columns; rule: 1 or Lq rows and Lk "
                  "columns, with Lq = Lk = %" PRId64,
                  name, rows, columns, L);
}

static mha_status check_masks(const mha_rules *a, int64_t L, mha_error *error) {
  mha_status status = MHA_OK;
  if (a->attend.data)
    status = check_extents("attend", a->attend.rows, a->attend.columns, L, error);
  if (!status && a->bias.data)
    status = check_extents("bias", a->bias.rows, a->bias.columns, L, error);
  return status;
}

/* Where row t begins in [rows][columns]. */
static int64_t row_offset(int64_t rows, int64_t columns, int64_t t) {
  return rows > 1 ? t * columns : 0;
}

static void cut_mask(mha_mask *mask, int64_t t) {
  if (!mask->data)
    return;
  mask->data = (const uint8_t *)mask->data + row_offset(mask->rows, mask->columns, t);
  mask->head_stride = mask->rows * mask->columns;
  mask->batch_stride = mask->heads * mask->head_stride;
  mask->rows = 1;
  mask->columns = t + 1;
}

static void cut_bias(mha_bias *bias, int64_t t) {
  if (!bias->data)
    return;
  bias->data = (const float *)bias->data + row_offset(bias->rows, bias->columns, t);
  bias->head_stride = bias->rows * bias->columns;
  bias->batch_stride = bias->heads * bias->head_stride;
  bias->rows = 1;
  bias->columns = t + 1;
}

/* ---- What a step returns --------------------------------------------------------------------- */

/* Row t of each head: what the step saw, then the keys that were not there yet. */
static void put_row(const steps *s, int64_t t) {
  const mha_results *a = s->whole->results;
  const int64_t L = s->whole->query_length;
  const float hidden = a->stage == MHA_STAGE_WEIGHTS ? 0.0F : -INFINITY;
  for (int64_t head = 0; head < s->whole->batch * s->n_heads; head++) {
    if (a->log_sum_exp)
      a->log_sum_exp[head * L + t] = s->lse[head];
    if (!a->weights)
      continue;
    float *row = a->weights + (head * L + t) * L;
    memcpy(row, s->weights + head * (t + 1), (size_t)(t + 1) * sizeof *row);
    for (int64_t j = t + 1; j < L; j++)
      row[j] = hidden;
  }
}

static mha_status step(mha_context *context, const mha_weights *weights, const steps *s, int64_t t,
                       mha_error *error) {
  mha_rules rules = *s->whole->rules;
  mha_results results = *s->whole->results;
  mha_forward_args args = *s->whole;
  args.cache = s->cache;
  args.query_length = 1;
  args.query += t * s->query_width;
  args.query_batch_stride = s->whole->query_length * s->query_width;
  args.output += t * s->output_width;
  args.output_batch_stride = s->whole->query_length * s->output_width;
  args.rules = &rules;
  args.results = &results;
  cut_mask(&rules.attend, t);
  cut_bias(&rules.bias, t);
  results.weights = s->weights;
  results.log_sum_exp = s->lse;
  const mha_status status = s->calls->forward(s->calls->user, context, weights, &args, error);
  if (!status)
    put_row(s, t);
  return status;
}

/* ---- All steps ------------------------------------------------------------------------------- */

static mha_status create_cache(steps *s, const mha_config *config, mha_error *error) {
  mha_cache_options options;
  MHA_INIT(&options);
  options.n_entries = s->whole->batch;
  options.capacity = s->whole->query_length;
  options.n_kv_heads = s->calls->kv_heads(s->calls->user, config->n_kv_heads);
  options.head_size = config->head_size;
  options.value_head_size = config->value_head_size;
  options.type = s->how.type;
  options.page_tokens = s->how.page_tokens;
  if (options.page_tokens > 0) /* as many as all tokens take; what is no such size is refused */
    options.n_pages = options.n_entries * mha_divide_up(options.capacity, options.page_tokens);
  return mha_cache_create(&options, &s->cache, error);
}

/* `n` floats, if the whole call asks for them. */
static mha_status make(bool wanted, int64_t n, float **numbers, size_t *bytes, mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  if (!wanted)
    return MHA_OK;
  *bytes = (size_t)n * sizeof **numbers;
  *numbers = mha_memory_allocate(&memory, *bytes);
  return *numbers
             ? MHA_OK
             : mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of a step", *bytes);
}

/* The products cannot overflow: the results of all steps, Lq times as large, are in memory. */
static mha_status prepare(steps *s, const mha_config *config, mha_error *error) {
  const mha_results *a = s->whole->results;
  const int64_t n = s->whole->batch * s->n_heads;
  mha_status status = check_masks(s->whole->rules, s->whole->query_length, error);
  if (!status)
    status = create_cache(s, config, error);
  if (!status)
    status = make(a->weights, n * s->whole->query_length, &s->weights, &s->weights_bytes, error);
  if (!status)
    status = make(a->log_sum_exp, n, &s->lse, &s->lse_bytes, error);
  return status;
}

mha_status mha_forward_by_steps(const mha_calls *calls, mha_context *context,
                                const mha_weights *weights, const mha_config *config,
                                const mha_steps_cache *cache, const mha_forward_args *args,
                                mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  steps s = {.calls = calls,
             .whole = args,
             .how = *cache,
             .n_heads = config->n_heads,
             .query_width = config->query_width,
             .output_width = config->output_width};
  if (args->batch == 0 || args->query_length == 0) /* no cache is that small */
    return calls->forward(calls->user, context, weights, args, error);
  mha_status status = prepare(&s, config, error);
  for (int64_t t = 0; !status && t < args->query_length; t++)
    status = step(context, weights, &s, t, error);
  mha_cache_destroy(s.cache);
  mha_memory_release(&memory, s.weights, s.weights_bytes);
  mha_memory_release(&memory, s.lse, s.lse_bytes);
  return status;
}
