/* Owns how a product is done with a CBLAS: as one sgemm, or, where few rows meet a large matrix, by
 * calls that do not copy the matrix first. */
#include "products.h"

#include "base/arithmetic.h"
#include "blas.h"
#include "blas_threads.h"
#include "vector.h"

#include <stdatomic.h>
#include <string.h>

static bool fits(mha_view view) {
  return view.rows <= MHA_BLAS_MAX && view.columns <= MHA_BLAS_MAX &&
         view.row_stride <= MHA_BLAS_MAX && view.column_stride <= MHA_BLAS_MAX;
}

/* ---- few rows ----
 * Few rows times a large matrix are bound by reading the matrix, which sgemm would copy into packed
 * form first. Two ways round that, both along the matrix's stored rows, measured in
 * bench/README.md: one sgemv per row over blocks that stay in a second-level cache for the next
 * row; and, on cores for which OpenBLAS has kernels that multiply small matrices without packing,
 * one sgemm per piece small enough for them. */
#define FEW_ROWS_FOR_SGEMV  7
#define FEW_ROWS_FOR_PIECES 16
/* Smaller matrices stay in the caches and are left to sgemm; where it packs them too, up to this
 * many rows go through sgemv instead. */
#define FEW_ROWS_SMALLEST_MATRIX   65536
#define FEW_ROWS_OF_SMALL_MATRICES 3
#define STORED_ROWS_PER_BLOCK      64
/* Multiplications per piece: half of what OpenBLAS's small kernels take. */
#define MULTIPLICATIONS_PER_PIECE 450000

static bool core_has_small_kernels(void) {
  static const char *const cores[] = {"SkylakeX", "Cooperlake", "SapphireRapids"};
  const char *core = mha_blas_core();
  for (size_t k = 0; k < sizeof cores / sizeof *cores; k++)
    if (strcmp(core, cores[k]) == 0)
      return true;
  return false;
}

/* Asked before every product, some of which take no longer than the answer. */
static bool has_small_kernels(void) {
  enum { UNKNOWN = 0, NO = 1, YES = 2 };
  static atomic_int answer = UNKNOWN;
  int known = atomic_load_explicit(&answer, memory_order_relaxed);
  if (known == UNKNOWN) {
    known = core_has_small_kernels() ? YES : NO;
    atomic_store_explicit(&answer, known, memory_order_relaxed);
  }
  return known == YES;
}

/* A matrix by its stored rows. */
typedef struct stored_matrix {
  mha_view view;
  bool by_out; /* each stored row is a column of the view: it makes one number of y */
  int64_t rows, columns;
} stored_matrix;

static stored_matrix as_stored(mha_view w) {
  const bool by_out = w.column_stride != 1;
  const stored_matrix stored = {w, by_out, by_out ? w.columns : w.rows,
                                by_out ? w.rows : w.columns};
  return stored;
}

/* Stored rows that are multiplied at a time; 0 = leave it all to sgemm. */
static int64_t choose_block(mha_view x, const stored_matrix *w, bool *pieces) {
  *pieces = false;
  if (x.rows > FEW_ROWS_FOR_PIECES || x.column_stride != 1)
    return 0;
  if (w->rows * w->columns < FEW_ROWS_SMALLEST_MATRIX)
    return has_small_kernels() || x.rows > FEW_ROWS_OF_SMALL_MATRICES ? 0 : w->rows;
  if (x.rows == 1)
    return w->rows;
  if (has_small_kernels()) {
    const int64_t rows = MULTIPLICATIONS_PER_PIECE / (x.rows * w->columns);
    *pieces = true;
    return rows > 16 ? rows / 16 * 16 : rows > 4 ? rows : 4;
  }
  return x.rows <= FEW_ROWS_FOR_SGEMV ? STORED_ROWS_PER_BLOCK : 0;
}

/* One row times a matrix stored by its columns is a dot product for each. sgemv reads several
 * stored rows side by side; where they are short, memory answers one after the other faster
 * (bench/README.md).
 */
#define LONGEST_ROW_FOR_DOT 2048

static void multiply_by_dots(float alpha, const float *x, mha_view block, float *y) {
  const stored_matrix w = as_stored(block);
  for (int64_t r = 0; r < w.rows; r++)
    y[r] += alpha * mha_blas_dot(w.columns, block.data + r * block.column_stride, x);
}

/* y += alpha·x·W for a block W of stored rows. */
static void multiply_rows(float alpha, mha_view x, mha_view block, float *y, int64_t y_stride) {
  for (int64_t r = 0; r < x.rows; r++)
    mha_blas_gemv(alpha, x.data + r * x.row_stride, block, y + r * y_stride);
}

/* A block of stored rows that are columns of W makes its own columns of y from all of x; one of
 * rows takes its own columns of x and adds to all of y. */
static void multiply_few_rows(float alpha, mha_view x, const stored_matrix *w, float beta, float *y,
                              int64_t y_stride, int64_t block, bool pieces) {
  const bool large = w->rows * w->columns >= FEW_ROWS_SMALLEST_MATRIX;
  const bool dots = x.rows == 1 && w->by_out && large && w->columns <= LONGEST_ROW_FOR_DOT;
  mha_vector_start_rows(beta, y, x.rows, w->view.columns, y_stride);
  for (int64_t first = 0; first < w->rows; first += block) {
    const int64_t n = mha_min(w->rows - first, block);
    const mha_view x_part = w->by_out ? x : mha_view_columns(x, first, n);
    const mha_view w_part =
        w->by_out ? mha_view_columns(w->view, first, n) : mha_view_row_block(w->view, first, n);
    float *y_part = w->by_out ? y + first : y;
    if (pieces)
      mha_blas_gemm(alpha, x_part, w_part, 1.0f, y_part, y_stride);
    else if (dots)
      multiply_by_dots(alpha, x_part.data, w_part, y_part);
    else
      multiply_rows(alpha, x_part, w_part, y_part, y_stride);
  }
}

static void product(float alpha, mha_view a, mha_view b, float beta, float *c, int64_t c_stride) {
  const stored_matrix matrix = as_stored(b);
  bool pieces = false;
  const int64_t block = choose_block(a, &matrix, &pieces);
  if (block > 0)
    multiply_few_rows(alpha, a, &matrix, beta, c, c_stride, block, pieces);
  else
    mha_blas_gemm(alpha, a, b, beta, c, c_stride);
}

mha_status mha_products_multiply(float alpha, mha_view a, mha_view b, float beta, float *c,
                                 int64_t c_stride) {
  if (!fits(a) || !fits(b) || c_stride > MHA_BLAS_MAX)
    return MHA_ERROR_OVERFLOW;
  const bool locked = mha_blas_lock_product();
  product(alpha, a, b, beta, c, c_stride);
  mha_blas_unlock_product(locked);
  return MHA_OK;
}
