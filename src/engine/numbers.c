/* Owns the element types. Only float32 is stored so far, and is used as it lies. */
#include "numbers.h"

const void *mha_numbers_at(const void *data, int32_t element, int64_t index) {
  (void)element;
  return (const float *)data + index;
}

int64_t mha_numbers_scratch(int32_t element, int64_t rows, int64_t columns) {
  (void)element, (void)rows, (void)columns;
  return 0;
}

mha_view mha_numbers_fetch(const mha_stored *stored, float *scratch) {
  (void)scratch;
  const mha_view view = {stored->data, stored->rows, stored->columns, stored->row_stride,
                         stored->column_stride};
  return view;
}
