/* Owns the BLAS: the only file that includes cblas.h and knows vendors, their integer, their
 * threads.
 *
 * Vendors' own functions are weak references: they are there when the BLAS in the process has them
 * and NULL otherwise, so that one binary serves every BLAS that the linker or an alternatives
 * system puts under it. cblas.h is not asked for them, since it may be another vendor's. */
#include "blas.h"

#include <cblas.h>
#include <pthread.h>
#include <string.h>

extern __attribute__((weak)) int openblas_get_num_threads(void);
extern __attribute__((weak)) void openblas_set_num_threads(int n);
extern __attribute__((weak)) int openblas_get_parallel(void);
extern __attribute__((weak)) char *openblas_get_config(void);
extern __attribute__((weak)) char *openblas_get_corename(void);
extern __attribute__((weak)) int64_t bli_thread_get_num_threads(void);
extern __attribute__((weak)) void bli_thread_set_num_threads(int64_t n);
extern __attribute__((weak)) char *bli_info_get_version_str(void);

/* ---- products ---- */

static pthread_mutex_t product_lock = PTHREAD_MUTEX_INITIALIZER;

static bool fits(mha_view view) {
  return view.rows <= MHA_BLAS_MAX && view.columns <= MHA_BLAS_MAX &&
         view.row_stride <= MHA_BLAS_MAX && view.column_stride <= MHA_BLAS_MAX;
}

/* The leading dimension is the stride that is not 1. For one row or column BLAS still wants it to
 * be at least the length of the contiguous dimension, though it is never used. */
static CBLAS_TRANSPOSE orientation(mha_view view, int *leading_dimension) {
  const bool by_rows = view.column_stride == 1;
  const int64_t stride = by_rows ? view.row_stride : view.column_stride;
  const int64_t contiguous = by_rows ? view.columns : view.rows;
  *leading_dimension = (int)(stride > contiguous ? stride : contiguous > 0 ? contiguous : 1);
  return by_rows ? CblasNoTrans : CblasTrans;
}

/* Few rows times a large matrix are bound by reading the matrix, which sgemm would pack first: for
 * up to this many rows, one sgemv each is faster. */
#define FEW_ROWS 7
/* The stored rows of the matrix that all rows of x are multiplied by before the next ones: they
 * stay in a second-level cache meanwhile. */
#define STORED_ROWS_PER_BLOCK 64
/* Smaller products are left to sgemm. */
#define FEW_ROWS_SMALLEST 65536

static bool suits_sgemv(mha_view a, mha_view b, float beta) {
  return a.rows <= FEW_ROWS && a.column_stride == 1 && b.rows * b.columns >= FEW_ROWS_SMALLEST &&
         (beta == 0.0f || beta == 1.0f);
}

/* y += alpha·x·W for a block W of stored rows, rows of x and y one after the other. */
static void multiply_block(float alpha, mha_view x, mha_view w, float *y, int64_t y_stride) {
  int ld = 0;
  const bool transposed = orientation(w, &ld) == CblasTrans;
  const int64_t stored_rows = transposed ? w.columns : w.rows;
  const int64_t stored_columns = transposed ? w.rows : w.columns;
  for (int64_t r = 0; r < x.rows; r++)
    cblas_sgemv(CblasRowMajor, transposed ? CblasNoTrans : CblasTrans, (int)stored_rows,
                (int)stored_columns, alpha, w.data, ld, x.data + r * x.row_stride, 1, 1.0f,
                y + r * y_stride, 1);
}

/* W [in][out] is cut along whichever of the two is its stored row: along `in` the blocks add up,
 * along `out` each makes its own columns of y. */
static void multiply_few_rows(float alpha, mha_view x, mha_view w, float beta, float *y,
                              int64_t y_stride) {
  const bool cut_out = w.column_stride != 1;
  const int64_t n = cut_out ? w.columns : w.rows;
  const int64_t step = x.rows == 1 ? n : STORED_ROWS_PER_BLOCK;
  /* Whether sgemv with beta 0 clears a NaN in y differs between versions and cores. */
  for (int64_t r = 0; beta == 0.0f && r < x.rows; r++)
    memset(y + r * y_stride, 0, (size_t)w.columns * sizeof *y);
  for (int64_t first = 0; first < n; first += step) {
    const int64_t size = n - first < step ? n - first : step;
    if (cut_out)
      multiply_block(alpha, x, mha_view_columns(w, first, size), y + first, y_stride);
    else
      multiply_block(alpha, mha_view_columns(x, first, size), mha_view_row_block(w, first, size), y,
                     y_stride);
  }
}

static void product(float alpha, mha_view a, mha_view b, float beta, float *c, int64_t c_stride) {
  int lda = 0;
  int ldb = 0;
  if (suits_sgemv(a, b, beta)) {
    multiply_few_rows(alpha, a, b, beta, c, c_stride);
    return;
  }
  const CBLAS_TRANSPOSE a_orientation = orientation(a, &lda);
  const CBLAS_TRANSPOSE b_orientation = orientation(b, &ldb);
  cblas_sgemm(CblasRowMajor, a_orientation, b_orientation, (int)a.rows, (int)b.columns,
              (int)a.columns, alpha, a.data, lda, b.data, ldb, beta, c, (int)c_stride);
}

mha_status mha_blas_multiply(float alpha, mha_view a, mha_view b, float beta, float *c,
                             int64_t c_stride) {
  if (!fits(a) || !fits(b) || c_stride > MHA_BLAS_MAX)
    return MHA_ERROR_OVERFLOW;
  const bool locked = mha_blas_threading_kind() == MHA_BLAS_THREADS_LOCKED;
  if (locked)
    pthread_mutex_lock(&product_lock);
  product(alpha, a, b, beta, c, c_stride);
  if (locked)
    pthread_mutex_unlock(&product_lock);
  return MHA_OK;
}

/* ---- threads ---- */

mha_blas_threading mha_blas_threading_kind(void) {
  if (openblas_get_parallel) {
    switch (openblas_get_parallel()) {
    case 0:
      return MHA_BLAS_THREADS_LOCKED;
    case 2:
      return MHA_BLAS_THREADS_OPENMP;
    default:
      return MHA_BLAS_THREADS_OWN;
    }
  }
  return bli_thread_set_num_threads ? MHA_BLAS_THREADS_OWN : MHA_BLAS_THREADS_NONE;
}

static int32_t current_count(void) {
  int64_t n = 1;
  if (openblas_get_num_threads)
    n = openblas_get_num_threads();
  else if (bli_thread_get_num_threads)
    n = bli_thread_get_num_threads();
  return n > 1 ? (int32_t)n : 1;
}

static void set_count(int32_t n) {
  if (openblas_set_num_threads)
    openblas_set_num_threads(n);
  else if (bli_thread_set_num_threads)
    bli_thread_set_num_threads(n);
}

/* The guard. `count` is what the BLAS had before the first of `holders` entered. */
static struct {
  pthread_mutex_t lock;
  int64_t holders;
  int32_t count;
} guard = {PTHREAD_MUTEX_INITIALIZER, 0, 1};

static pthread_once_t fork_handlers = PTHREAD_ONCE_INIT;

static void before_fork(void) {
  pthread_mutex_lock(&guard.lock);
  pthread_mutex_lock(&product_lock);
}

static void after_fork_in_parent(void) {
  pthread_mutex_unlock(&product_lock);
  pthread_mutex_unlock(&guard.lock);
}

/* The threads that held the guard do not exist in the child: nobody will leave for them. */
static void after_fork_in_child(void) {
  guard.holders = 0;
  after_fork_in_parent();
}

static void install_fork_handlers(void) {
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int32_t mha_blas_thread_count(void) {
  pthread_mutex_lock(&guard.lock);
  const int32_t n = guard.holders > 0 ? guard.count : current_count();
  pthread_mutex_unlock(&guard.lock);
  return n;
}

void mha_blas_guard_enter(void) {
  if (mha_blas_threading_kind() != MHA_BLAS_THREADS_OWN)
    return;
  (void)pthread_once(&fork_handlers, install_fork_handlers);
  pthread_mutex_lock(&guard.lock);
  if (guard.holders++ == 0) {
    guard.count = current_count();
    if (guard.count != 1)
      set_count(1);
  }
  pthread_mutex_unlock(&guard.lock);
}

void mha_blas_guard_leave(void) {
  if (mha_blas_threading_kind() != MHA_BLAS_THREADS_OWN)
    return;
  pthread_mutex_lock(&guard.lock);
  if (guard.holders > 0 && --guard.holders == 0 && guard.count != 1 && current_count() == 1)
    set_count(guard.count);
  pthread_mutex_unlock(&guard.lock);
}

/* ---- description ---- */

const char *mha_blas_vendor(void) {
  if (openblas_get_config)
    return openblas_get_config();
  return bli_info_get_version_str ? "BLIS" : "CBLAS of unknown vendor";
}

const char *mha_blas_core(void) {
  return openblas_get_corename ? openblas_get_corename() : "unknown";
}
