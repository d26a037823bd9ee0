/* Row kernels for numbers that are not stored as float32, once per instruction set. */
#ifndef MHA_SRC_ENGINE_STORED_ROWS_H
#define MHA_SRC_ENGINE_STORED_ROWS_H

#include "base/ieee.h"
#include "mha.h"

/* X [x_rows][...] float32 and W [rows][columns] as it is stored: a type other than MHA_F32, rows of
 * whole blocks. */
typedef struct mha_rows_product {
  int32_t element;
  const unsigned char *w;
  int64_t w_row_bytes; /* from one stored row to the next */
  int64_t rows, columns;
  float alpha;
  const float *x;
  int64_t x_rows, x_stride;
  float *y;
  int64_t y_stride;
} mha_rows_product;

/* From so many columns on a single row of X is multiplied in several sums. */
enum { MHA_LONG_ROW = 512 };

/* The kernels of an instruction set. Nothing beyond the arrays' ends is read. Each number of a
 * result is summed in the same order, whatever the counts of rows are, but for a single row of X
 * with long stored ones, see above. Between instruction sets fused multiplications make a
 * difference, and in how many sums a long row is taken. */
typedef struct mha_row_kernels {
  const char *name;
  /* y[n] = the n numbers at x, which are whole blocks. */
  void (*widen)(float *y, const unsigned char *x, int32_t element, int64_t n);
  /* y[r][j] += alpha·Σ_c x[r][c]·w[j][c]: each stored row makes one column of Y. */
  void (*dots)(const mha_rows_product *p);
  /* y[r][c] += Σ_j alpha·x[r][j]·w[j][c]: each stored row is added to all of a row of Y. */
  void (*sums)(const mha_rows_product *p);
} mha_row_kernels;

/* NULL where the processor that the code is compiled for, or the one it runs on, has none. */
const mha_row_kernels *mha_rows_avx512(void);
const mha_row_kernels *mha_rows_avx2(void);
/* In C alone. */
const mha_row_kernels *mha_rows_plain(void);

/* The fastest of them. */
const mha_row_kernels *mha_rows_best(void);

#endif
