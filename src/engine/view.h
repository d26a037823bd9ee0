/* A matrix in somebody's buffer. */
#ifndef MHA_SRC_ENGINE_VIEW_H
#define MHA_SRC_ENGINE_VIEW_H

#include "mha.h"

/* A matrix in somebody's buffer: element (r, c) is data[r·row_stride + c·column_stride]. One of
 * the strides is 1: which one decides the transpose flag that BLAS gets. */
typedef struct mha_view {
  const float *data;
  int64_t rows, columns;
  int64_t row_stride, column_stride;
} mha_view;

static inline mha_view mha_view_rows(const float *data, int64_t rows, int64_t columns,
                                     int64_t row_stride) {
  const mha_view view = {data, rows, columns, row_stride, 1};
  return view;
}

static inline mha_view mha_view_transposed(mha_view view) {
  const mha_view transposed = {view.data, view.columns, view.rows, view.column_stride,
                               view.row_stride};
  return transposed;
}

/* Columns [first, first + columns) of a view. */
static inline mha_view mha_view_columns(mha_view view, int64_t first, int64_t columns) {
  view.data += first * view.column_stride;
  view.columns = columns;
  return view;
}

/* Rows [first, first + rows) of a view. */
static inline mha_view mha_view_row_block(mha_view view, int64_t first, int64_t rows) {
  view.data += first * view.row_stride;
  view.rows = rows;
  return view;
}

#endif
