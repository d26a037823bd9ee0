/* The one interface through which every matrix product goes, and what is known of the BLAS. */
#ifndef MHA_SRC_BLAS_H
#define MHA_SRC_BLAS_H

#include "mha.h"

#include <stdbool.h>

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

/* C = alpha·A·B + beta·C with C [A.rows][B.columns], row-major, rows c_stride apart. alpha is not
 * 0 (a BLAS may then skip A and B and lose their NaN); beta 0 writes C without reading it. Sizes
 * and strides must fit the BLAS's integer: MHA_ERROR_OVERFLOW otherwise, C untouched. */
mha_status mha_blas_multiply(float alpha, mha_view a, mha_view b, float beta, float *c,
                             int64_t c_stride);

/* How the BLAS uses threads. */
typedef enum mha_blas_threading {
  MHA_BLAS_THREADS_NONE,   /* single-threaded, safe to call from several threads */
  MHA_BLAS_THREADS_LOCKED, /* OpenBLAS's serial flavour: every product under one lock */
  MHA_BLAS_THREADS_OWN,    /* a pool of its own, one process-wide count */
  MHA_BLAS_THREADS_OPENMP  /* follows the calling thread's OpenMP setting */
} mha_blas_threading;

mha_blas_threading mha_blas_threading_kind(void);

/* Threads the BLAS would use outside the guard; 0 = it was told none and uses one. */
int32_t mha_blas_thread_count(void);

/* Holds a pool of the BLAS's own at one thread, process-wide, until the last matching leave, which
 * restores the count unless somebody changed it meanwhile. Nothing to do for the other kinds. */
void mha_blas_guard_enter(void);
void mha_blas_guard_leave(void);

/* Whether the calling thread is in the middle of the guard's lines: a signal handler asks. */
bool mha_blas_is_guarding(void);

/* Around a fork of the calling thread; the first also where the others cannot be called. In the
 * child the locks are free. */
void mha_blas_note_fork(void);
void mha_blas_before_fork(void);
void mha_blas_after_fork(void);
void mha_blas_after_fork_in_child(void);

/* How many threads may be inside products at once. */
int32_t mha_blas_most_callers(void);

/* Whether n threads may be inside products at once, more than ever before. */
bool mha_blas_takes_callers(int n);

/* Vendor with version, and the core its kernels are made for; static or the BLAS's own text. */
const char *mha_blas_vendor(void);
const char *mha_blas_core(void);

#endif
