/* Owns a running checksum of everything that calls compute: a library to be loaded before libmha,
 * under any program. At its end the program writes one line to the file that MHA_CHECKSUMS names:
 * the number of calls, and the sum of their checksums, so that their order does not count. Two
 * builds whose lines are equal computed the same bits and gave the same messages. */
#define _GNU_SOURCE 1 /* RTLD_NEXT, program_invocation_short_name */
#include "mha.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_ullong n_calls, sum;

/* ---- FNV-1a, by whole floats, since arrays are large ----------------------------------------- */

static uint64_t add_number(uint64_t hash, uint64_t number) {
  return (hash ^ number) * UINT64_C(0x100000001b3);
}

static uint64_t add_floats(uint64_t hash, const float *numbers, int64_t n) {
  for (int64_t k = 0; numbers && k < n; k++) {
    uint32_t bits;
    memcpy(&bits, &numbers[k], sizeof bits);
    hash = add_number(hash, bits);
  }
  return hash;
}

static uint64_t begin(mha_status status, const mha_error *error) {
  uint64_t hash = add_number(UINT64_C(0xcbf29ce484222325), (uint64_t)status);
  for (const char *c = error->message; *c; c++)
    hash = add_number(hash, (unsigned char)*c);
  return hash;
}

static void count(uint64_t hash) {
  atomic_fetch_add(&n_calls, 1);
  atomic_fetch_add(&sum, hash);
}

/* ---- what a call wrote ----------------------------------------------------------------------- */

/* What an older caller's struct may end before. */
static mha_results results_of(const mha_results *given) {
  mha_results results;
  MHA_INIT(&results);
  if (given)
    memcpy(&results, given,
           given->struct_size < sizeof results ? given->struct_size : sizeof results);
  return results;
}

static uint64_t add_results(uint64_t hash, const mha_results *given, int64_t B, int64_t H,
                            int64_t Lq, int64_t Lk) {
  const mha_results results = results_of(given);
  hash = add_floats(hash, results.weights, B * H * Lq * Lk);
  hash = add_floats(hash, results.average, B * Lq * Lk);
  return add_floats(hash, results.log_sum_exp, B * H * Lq);
}

static uint64_t add_tensor(uint64_t hash, const float *data, const int64_t n[3],
                           const int64_t strides[3], int64_t size) {
  for (int64_t b = 0; b < n[0]; b++)
    for (int64_t i = 0; i < n[1]; i++)
      for (int64_t h = 0; h < n[2]; h++)
        hash = add_floats(hash, data + b * strides[0] + i * strides[1] + h * strides[2], size);
  return hash;
}

/* The most keys that an entry of the call's cache has after it. */
static int64_t longest(const mha_forward_args *a) {
  int64_t most = 0;
  for (int64_t b = 0; b < a->batch; b++) {
    int64_t n = 0;
    if (!mha_cache_length(a->cache, a->cache_entries ? a->cache_entries[b] : b, &n, NULL) &&
        n > most)
      most = n;
  }
  return most;
}

static uint64_t add_forward(uint64_t hash, const mha_weights *weights, const mha_forward_args *a) {
  mha_config c;
  MHA_INIT(&c);
  if (mha_weights_config(weights, &c, NULL) || a->cache_mode == MHA_CACHE_APPEND)
    return hash;
  const int64_t B = a->rules && a->rules->query_starts ? 1 : a->batch;
  const int64_t Lk = a->cache ? longest(a) : a->key ? a->key_length : a->query_length;
  const int64_t row = a->output_row_stride && (a->query_length > 1 || a->output_row_stride > 0)
                          ? a->output_row_stride
                          : c.output_width;
  const int64_t batch =
      a->output_batch_stride && B > 1 ? a->output_batch_stride : row * a->query_length;
  const int64_t n[3] = {B, a->query_length, 1};
  const int64_t strides[3] = {batch, row, 0};
  if (a->output)
    hash = add_tensor(hash, a->output, n, strides, c.output_width);
  return add_results(hash, a->results, B, c.n_heads, a->query_length, Lk);
}

static uint64_t add_attend(uint64_t hash, const mha_tensor *q, const mha_tensor *k,
                           const mha_tensor *v, const mha_attend_args *a) {
  const bool dense = !a->output_batch_stride && !a->output_row_stride && !a->output_head_stride;
  const int64_t row = q->heads * v->size;
  const int64_t n[3] = {q->batch, q->length, q->heads};
  const int64_t dense_strides[3] = {q->length * row, row, v->size};
  const int64_t given[3] = {a->output_batch_stride, a->output_row_stride, a->output_head_stride};
  if (a->output)
    hash = add_tensor(hash, a->output, n, dense ? dense_strides : given, v->size);
  return add_results(hash, a->results, q->batch, q->heads, q->length, k->length);
}

/* ---- the calls ------------------------------------------------------------------------------- */

static void *next(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  if (!found) {
    (void)fprintf(stderr, "no %s behind this library\n", name);
    abort();
  }
  return found;
}

mha_status mha_forward(mha_context *context, const mha_weights *weights,
                       const mha_forward_args *args, mha_error *error) {
  mha_status (*real)(mha_context *, const mha_weights *, const mha_forward_args *, mha_error *);
  mha_error own;
  *(void **)&real = next("mha_forward");
  const mha_status status = real(context, weights, args, error ? error : &own);
  const uint64_t hash = begin(status, error ? error : &own);
  count(status ? hash : add_forward(hash, weights, args));
  return status;
}

mha_status mha_self_attention(mha_context *context, const mha_weights *weights, const float *x,
                              int64_t batch, int64_t length, float *output, mha_error *error) {
  mha_status (*real)(mha_context *, const mha_weights *, const float *, int64_t, int64_t, float *,
                     mha_error *);
  mha_error own;
  mha_forward_args args;
  MHA_INIT(&args);
  args.batch = batch;
  args.query_length = length;
  args.output = output;
  *(void **)&real = next("mha_self_attention");
  const mha_status status = real(context, weights, x, batch, length, output, error ? error : &own);
  const uint64_t hash = begin(status, error ? error : &own);
  count(status ? hash : add_forward(hash, weights, &args));
  return status;
}

mha_status mha_attend(mha_context *context, const mha_tensor *q, const mha_tensor *k,
                      const mha_tensor *v, const mha_attend_args *args, mha_error *error) {
  mha_status (*real)(mha_context *, const mha_tensor *, const mha_tensor *, const mha_tensor *,
                     const mha_attend_args *, mha_error *);
  mha_error own;
  *(void **)&real = next("mha_attend");
  const mha_status status = real(context, q, k, v, args, error ? error : &own);
  const uint64_t hash = begin(status, error ? error : &own);
  count(status ? hash : add_attend(hash, q, k, v, args));
  return status;
}

__attribute__((destructor)) static void report(void) {
  const char *path = getenv("MHA_CHECKSUMS");
  FILE *file = path && atomic_load(&n_calls) > 0 ? fopen(path, "a") : NULL;
  if (!file)
    return;
  (void)fprintf(file, "%-24s %8llu calls  %016llx\n", program_invocation_short_name,
                atomic_load(&n_calls), atomic_load(&sum));
  (void)fclose(file);
}
