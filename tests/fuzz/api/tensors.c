/* Owns the layouts of tensors. */
#include "tensors.h"

#include <stdio.h>
#include <stdlib.h>

enum { DENSE, WRITTEN_OUT, HEADS_FIRST, ROWS_FIRST, PADDED, SHARED_ENTRIES, SHARED_HEADS };

static void set_strides(mha_tensor *t, int64_t batch, int64_t row, int64_t head) {
  t->batch_stride = batch;
  t->row_stride = row;
  t->head_stride = head;
  t->size_stride = 1;
}

static void lay_out(mha_tensor *t, int64_t layout, int64_t pad) {
  const int64_t size = t->size + pad;
  switch (layout) {
  case HEADS_FIRST:
    set_strides(t, t->heads * t->length * size, size, t->length * size);
    break;
  case ROWS_FIRST:
    set_strides(t, t->heads * size, t->batch * t->heads * size, size);
    break;
  case SHARED_ENTRIES:
    set_strides(t, 0, t->heads * size, size);
    break;
  case SHARED_HEADS:
    set_strides(t, t->length * size, size, 0);
    break;
  default:
    set_strides(t, t->length * (t->heads * size + pad), t->heads * size + pad, size);
  }
}

static int64_t extent(const mha_tensor *t) {
  if (t->batch == 0 || t->length == 0)
    return 0;
  return (t->batch - 1) * t->batch_stride + (t->length - 1) * t->row_stride +
         (t->heads - 1) * t->head_stride + t->size;
}

static mha_tensor choose(fuzz_trial *trial, mha_tensor t, int64_t last_layout) {
  const int64_t layout = fuzz_read(trial->reader, 0, last_layout);
  lay_out(&t, layout, layout >= HEADS_FIRST ? fuzz_read(trial->reader, 0, 2) : 0);
  if (t.row_stride < t.size) /* no entries */
    t.row_stride = t.size;
  return t;
}

static void take_strides_back(mha_tensor *t, fuzz_trial *trial) {
  mha_tensor dense = *t;
  lay_out(&dense, WRITTEN_OUT, 0);
  if (dense.batch_stride == t->batch_stride && dense.row_stride == t->row_stride &&
      dense.head_stride == t->head_stride && !fuzz_read_one_in(trial->reader, 2))
    t->batch_stride = t->row_stride = t->head_stride = t->size_stride = 0;
}

mha_tensor fuzz_choose_tensor(fuzz_trial *trial, int64_t batch, int64_t length, int64_t heads,
                              int64_t size) {
  const mha_tensor extents = {.batch = batch, .length = length, .heads = heads, .size = size};
  mha_tensor t = choose(trial, extents, SHARED_HEADS);
  const int64_t n = extent(&t);
  float *data = fuzz_pool_floats(&trial->pool, n);
  fuzz_read_floats(trial->reader, data, n);
  t.data = data;
  take_strides_back(&t, trial);
  return t;
}

mha_tensor fuzz_choose_output(fuzz_trial *trial, int64_t batch, int64_t length, int64_t heads,
                              int64_t size) {
  const mha_tensor extents = {.batch = batch, .length = length, .heads = heads, .size = size};
  mha_tensor t = choose(trial, extents, PADDED);
  float *data = fuzz_pool_output(&trial->pool, extent(&t), FUZZ_BOTH_RUNS, true);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < length; i++)
      for (int64_t h = 0; h < heads; h++)
        fuzz_pool_allow(&trial->pool,
                        data + b * t.batch_stride + i * t.row_stride + h * t.head_stride,
                        (size_t)size * sizeof *data);
  t.data = data;
  take_strides_back(&t, trial);
  return t;
}

mha_tensor fuzz_with_strides(const mha_tensor *tensor) {
  mha_tensor t = *tensor;
  if (t.size_stride == 0)
    lay_out(&t, WRITTEN_OUT, 0);
  return t;
}

void fuzz_hide_rows(fuzz_trial *trial, const mha_tensor *tensor, const int64_t *counts) {
  const mha_tensor t = fuzz_with_strides(tensor);
  if (!counts || (t.batch_stride == 0 && t.batch > 1))
    return;
  for (int64_t b = 0; b < t.batch; b++)
    for (int64_t i = counts[b]; i < t.length; i++)
      for (int64_t h = 0; h < t.heads; h++)
        fuzz_pool_hide(&trial->pool,
                       (const float *)t.data + b * t.batch_stride + i * t.row_stride +
                           h * t.head_stride,
                       (size_t)t.size * sizeof(float));
}

void fuzz_spoil_tensor(fuzz_trial *trial, mha_tensor *tensor) {
  fuzz_reader *r = trial->reader;
  const bool empty = tensor->batch == 0 || tensor->length == 0;
  int64_t *sizes[] = {&tensor->batch, &tensor->length, &tensor->heads, &tensor->size};
  int64_t *strides[] = {&tensor->batch_stride, &tensor->row_stride, &tensor->head_stride};
  const int64_t counts[] = {tensor->batch, tensor->length, tensor->heads};
  const int64_t kind = fuzz_read(r, 0, 5);
  if (kind <= 1) {
    const int64_t which = fuzz_read(r, 0, 3);
    /* nothing tells that an empty tensor's heads are too many: arrays [H] would be read */
    *sizes[which] = which > 1 && (empty || fuzz_read_one_in(r, 3)) ? 0 : fuzz_read_no_size(r);
    fuzz_trial_refuse(trial, !empty || *sizes[which] <= 0);
  } else if (kind <= 3) {
    const int64_t which = fuzz_read(r, 0, 2);
    *tensor = fuzz_with_strides(tensor);
    *strides[which] = fuzz_read_no_size(r);
    fuzz_trial_spoil(trial, counts[which] <= 1 ? FUZZ_SUCCESS
                            : empty            ? FUZZ_ANYTHING
                                               : FUZZ_FAILURE);
  } else if (kind == 4) {
    *tensor = fuzz_with_strides(tensor);
    tensor->size_stride = fuzz_read_one_in(r, 2) ? 0 : fuzz_read_no_size(r);
    fuzz_trial_spoil(trial, tensor->size > 1 ? FUZZ_FAILURE : FUZZ_SUCCESS);
  } else {
    tensor->data = NULL;
    fuzz_trial_refuse(trial, !empty);
  }
}
