/* Numbers as they are stored, and the float32 that products want. */
#ifndef MHA_SRC_ENGINE_NUMBERS_H
#define MHA_SRC_ENGINE_NUMBERS_H

#include "view.h"

/* A matrix of any element type in somebody's buffer. Strides count elements; one of them is 1. */
typedef struct mha_stored {
  const void *data;
  int32_t element; /* mha_element */
  int64_t rows, columns;
  int64_t row_stride, column_stride;
} mha_stored;

/* Where element `index` of a buffer lies. */
const void *mha_numbers_at(const void *data, int32_t element, int64_t index);

/* Floats of scratch that mha_numbers_fetch needs for a matrix: none for float32. */
int64_t mha_numbers_scratch(int32_t element, int64_t rows, int64_t columns);

/* The same matrix as float32: as it lies, or widened into the scratch. */
mha_view mha_numbers_fetch(const mha_stored *stored, float *scratch);

#endif
