/* Owns the choice of gradients, good and bad. */
#include "gradients.h"

#include <stdio.h>
#include <stdlib.h>

void fuzz_begin_gradients(fuzz_trial *trial, fuzz_gradients *gradients) {
  fuzz_reader *r = trial->reader;
  gradients->accumulate = fuzz_read_one_in(r, 3) ? (int32_t)fuzz_read(r, -1, 2) : 0;
}

float *fuzz_want_gradient(fuzz_trial *trial, fuzz_gradients *gradients, float **member, int64_t n,
                          bool is_there) {
  if (!is_there) {
    gradients->missing[gradients->n_missing++] = member;
    return NULL;
  }
  if (fuzz_read_one_in(trial->reader, 3))
    return NULL;
  float *data = fuzz_pool_output(&trial->pool, n, FUZZ_BOTH_RUNS, gradients->accumulate == 0);
  if (gradients->accumulate)
    fuzz_read_floats(trial->reader, data, n);
  gradients->wanted[gradients->n].member = member;
  gradients->wanted[gradients->n++].floats = n;
  *member = data;
  return data;
}

void fuzz_want_vector(fuzz_trial *trial, fuzz_gradients *gradients, float **member, int64_t n,
                      bool is_there) {
  const float *data = fuzz_want_gradient(trial, gradients, member, n, is_there);
  if (data)
    fuzz_pool_allow(&trial->pool, data, (size_t)n * sizeof *data);
}

/* A stride of an extent; 0 stands for the dense one. */
static int64_t step(int64_t extent, int64_t stride, int64_t dense) {
  return extent <= 1 ? 0 : stride ? stride : dense;
}

void fuzz_want_bias(fuzz_trial *trial, fuzz_gradients *gradients, float **member,
                    const mha_rules *rules) {
  const mha_bias *a = &rules->bias;
  const int64_t dense_row = a->rows > 1 && a->row_stride ? a->row_stride : a->columns;
  const int64_t dense_head = a->heads > 1 && a->head_stride ? a->head_stride : a->rows * dense_row;
  const int64_t row = step(a->rows, a->row_stride, a->columns);
  const int64_t head = step(a->heads, a->head_stride, a->rows * dense_row);
  const int64_t batch = step(a->batch, a->batch_stride, a->heads * dense_head);
  const bool empty = a->batch == 0 || a->rows == 0;
  const int64_t n =
      empty ? 0 : (a->batch - 1) * batch + (a->heads - 1) * head + (a->rows - 1) * row + a->columns;
  const float *data = fuzz_want_gradient(trial, gradients, member, n, a->data != NULL);
  for (int64_t b = 0; data && b < a->batch; b++)
    for (int64_t h = 0; h < a->heads; h++)
      for (int64_t i = 0; i < a->rows; i++)
        fuzz_pool_allow(&trial->pool, data + b * batch + h * head + i * row,
                        (size_t)a->columns * sizeof *data);
}

bool fuzz_spoil_gradients(fuzz_trial *trial, fuzz_gradients *gradients, const void *neighbour) {
  fuzz_reader *r = trial->reader;
  const int n = gradients->n;
  if (fuzz_read_one_in(r, 2) && gradients->n_missing > 0) {
    *gradients->missing[fuzz_read(r, 0, gradients->n_missing - 1)] =
        fuzz_pool_floats(&trial->pool, 1);
    return true;
  }
  if (n == 0)
    return false;
  const int64_t which = fuzz_read(r, 0, n - 1);
  const int64_t other = fuzz_read(r, 0, n - 1);
  if (gradients->wanted[which].floats == 0 || gradients->wanted[other].floats == 0)
    return false;
  if (which == other || fuzz_read_one_in(r, 2)) {
    if (neighbour)
      *gradients->wanted[which].member = (float *)(uintptr_t)neighbour;
    return neighbour != NULL;
  }
  *gradients->wanted[which].member = *gradients->wanted[other].member;
  return true;
}
