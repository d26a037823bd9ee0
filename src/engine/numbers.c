/* Owns the ways from stored numbers to products: as views, widened, or, for few rows, as they lie.
 */
#include "numbers.h"

#include "base/memory.h"
#include "stored_rows.h"
#include "vector.h"

#include <string.h>

/* ---- views ---- */

mha_stored mha_stored_transposed(mha_stored w) {
  const mha_stored transposed = {w.data, w.element,       w.columns,
                                 w.rows, w.column_stride, w.row_stride};
  return transposed;
}

mha_stored mha_stored_columns(mha_stored w, int64_t first, int64_t columns) {
  w.data = mha_element_at(w.data, w.element, first * w.column_stride);
  w.columns = columns;
  return w;
}

mha_stored mha_stored_row_block(mha_stored w, int64_t first, int64_t rows) {
  w.data = mha_element_at(w.data, w.element, first * w.row_stride);
  w.rows = rows;
  return w;
}

/* ---- widening ---- */

void mha_numbers_widen(float *y, const void *x, int32_t element, int64_t n) {
  if (element == MHA_F32)
    memcpy(y, x, (size_t)n * sizeof *y);
  else
    mha_rows_best()->widen(y, x, element, n);
}

mha_view mha_numbers_fetch(const mha_stored *w, float *scratch) {
  if (w->element == MHA_F32) {
    const mha_view view = {w->data, w->rows, w->columns, w->row_stride, w->column_stride};
    return view;
  }
  if (w->column_stride != 1) {
    const mha_stored turned = mha_stored_transposed(*w);
    return mha_view_transposed(mha_numbers_fetch(&turned, scratch));
  }
  if (w->row_stride == w->columns)
    mha_numbers_widen(scratch, w->data, w->element, w->rows * w->columns);
  else
    for (int64_t r = 0; r < w->rows; r++)
      mha_numbers_widen(scratch + r * w->columns,
                        mha_element_at(w->data, w->element, r * w->row_stride), w->element,
                        w->columns);
  return mha_view_rows(scratch, w->rows, w->columns, w->columns);
}

/* Rows far apart are asked for ahead: the processor does not foresee them. */
void mha_numbers_gather(const mha_stored *w, float *dense) {
  enum { AHEAD = 8 };
  const size_t row_bytes = mha_element_bytes(w->element, w->columns);
  for (int64_t r = 0; r < w->rows; r++) {
    const void *row = mha_element_at(w->data, w->element, r * w->row_stride);
    if (r + AHEAD < w->rows)
      mha_memory_fetch(mha_element_at(w->data, w->element, (r + AHEAD) * w->row_stride), 1,
                       row_bytes, row_bytes);
    if (w->element == MHA_F32)
      memcpy(dense + r * w->columns, row, row_bytes);
    else
      mha_numbers_widen(dense + r * w->columns, row, w->element, w->columns);
  }
}

/* ---- products ---- */

static void multiply_rows(float alpha, mha_view x, const mha_stored *w, float beta, float *y,
                          int64_t y_stride) {
  const bool by_columns = w->column_stride != 1; /* stored rows are columns of W */
  int64_t row_bytes = 0;
  (void)mha_element_extent(w->element, by_columns ? w->column_stride : w->row_stride, &row_bytes);
  const mha_rows_product p = {.element = w->element,
                              .w = w->data,
                              .w_row_bytes = row_bytes,
                              .rows = by_columns ? w->columns : w->rows,
                              .columns = by_columns ? w->rows : w->columns,
                              .alpha = alpha,
                              .x = x.data,
                              .x_rows = x.rows,
                              .x_stride = x.row_stride,
                              .y = y,
                              .y_stride = y_stride};
  mha_vector_start_rows(beta, y, x.rows, w->columns, y_stride);
  if (by_columns)
    mha_rows_best()->dots(&p);
  else
    mha_rows_best()->sums(&p);
}

mha_status mha_numbers_multiply(const mha_engine *engine, float alpha, mha_view x,
                                const mha_stored *w, float beta, float *y, int64_t y_stride) {
  if (w->element == MHA_F32)
    return engine->multiply(alpha, x, mha_numbers_fetch(w, NULL), beta, y, y_stride);
  multiply_rows(alpha, x, w, beta, y, y_stride);
  return MHA_OK;
}
