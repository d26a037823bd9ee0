/* Owns the memory of arrays that are computed for a file. */
#include "arrays.h"

#include "base/error.h"
#include "base/memory.h"

#include <string.h>

/* `n` numbers, unless counting them overflowed. */
static mha_status allocate(mha_array *array, const char *path, bool fits, int64_t n,
                           mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  mha_layout layout = {0};
  if (fits)
    (void)mha_layout_add(&layout, sizeof *array->data, n, 1, 1);
  if (!fits || layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the numbers for %s overflow; rule: they fit the address space",
                    mha_shown_path(path));
  array->bytes = layout.bytes ? layout.bytes : MHA_ALIGNMENT;
  array->data = mha_memory_allocate(&memory, array->bytes);
  if (!array->data)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of %s", array->bytes,
                    mha_shown_path(path));
  memset(array->data, 0, array->bytes);
  return MHA_OK;
}

mha_status mha_array_make(mha_array *array, const char *path, int rank, const int64_t *shape,
                          mha_error *error) {
  int64_t n = 1;
  bool fits = true;
  array->rank = rank;
  for (int axis = 0; axis < rank; axis++) {
    array->shape[axis] = shape[axis];
    fits = fits && mha_multiply(n, shape[axis], &n);
  }
  return allocate(array, path, fits, n, error);
}

mha_status mha_array_make_matrix(mha_array *array, const char *path, int64_t rows, int64_t columns,
                                 int64_t row_stride, mha_error *error) {
  int64_t n = 0;
  array->rank = 2;
  array->shape[0] = rows;
  array->shape[1] = columns;
  array->row_stride = row_stride;
  const bool fits = mha_multiply(rows, row_stride, &n);
  return allocate(array, path, fits, n, error);
}

mha_status mha_array_stage(mha_array *array, const char *path, mha_output *file, mha_error *error) {
  const int64_t columns = array->shape[1];
  if (array->rank == 2 && array->row_stride > columns) {
    for (int64_t row = 1; row < array->shape[0]; row++)
      memmove(array->data + row * columns, array->data + row * array->row_stride,
              (size_t)columns * sizeof *array->data);
    array->row_stride = columns;
  }
  return mha_npy_stage(path, array->rank, array->shape, array->data, file, error);
}

void mha_array_release(mha_array *array) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  mha_memory_release(&memory, array->data, array->bytes);
  *array = (mha_array){0};
}
