/* Numbers as they are stored, and the float32 that products want. */
#ifndef MHA_SRC_ENGINE_NUMBERS_H
#define MHA_SRC_ENGINE_NUMBERS_H

#include "base/element.h"
#include "engine.h"

/* A matrix of any element type in somebody's buffer. Strides count elements; one of them is 1, and
 * along it lie whole blocks. */
typedef struct mha_stored {
  const void *data;
  int32_t element; /* mha_element */
  int64_t rows, columns;
  int64_t row_stride, column_stride;
} mha_stored;

/* float32 as they lie. */
static inline mha_stored mha_stored_view(mha_view view) {
  const mha_stored stored = {view.data,    MHA_F32,         view.rows,
                             view.columns, view.row_stride, view.column_stride};
  return stored;
}

/* The matrix seen with rows and columns exchanged; columns [first, first + columns) of it, rows
 * [first, first + rows). Where blocks are cut, it is between two of them. */
mha_stored mha_stored_transposed(mha_stored stored);
mha_stored mha_stored_columns(mha_stored stored, int64_t first, int64_t columns);
mha_stored mha_stored_row_block(mha_stored stored, int64_t first, int64_t rows);

/* y[n] = the numbers at x, whole blocks, of any type. */
void mha_numbers_widen(float *y, const void *x, int32_t element, int64_t n);

/* y = x[n] rounded to a type, as mha_element_convert says. The caller's rounding mode does not
 * count for the types of 16 bits. */
void mha_numbers_round(void *y, int32_t element, const float *x, int64_t n);

/* y = the n numbers at x, of one type, in another, as mha_element_convert says. */
void mha_numbers_convert(void *y, int32_t to, const void *x, int32_t from, int64_t n);

/* The same matrix as float32: as it lies, or widened into the scratch [rows·columns], dense, its
 * stored rows one after the other. */
mha_view mha_numbers_fetch(const mha_stored *stored, float *scratch);

/* The same rows [rows][columns] as a dense copy, whatever their type; their columns have stride 1.
 */
void mha_numbers_gather(const mha_stored *stored, float *dense);

/* Y = alpha·X·W + beta·Y as the engine's multiply, with W as it is stored. float32 is the engine's;
 * numbers of other types are for few rows of X, whose columns have stride 1: they are read once
 * from end to end, and nothing is widened into memory. */
mha_status mha_numbers_multiply(const mha_engine *engine, float alpha, mha_view x,
                                const mha_stored *w, float beta, float *y, int64_t y_stride);

#endif
