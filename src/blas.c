/* Owns the BLAS: the only file that includes cblas.h and knows vendors, their integer, their
 * threads.
 *
 * Vendors' own functions are weak references: they are there when the BLAS in the process has them
 * and NULL otherwise, so that one binary serves every BLAS that the linker or an alternatives
 * system puts under it. Out of an archive the linker takes them when it is told their names, which
 * FindMhaCBLAS.cmake and mha.pc do. cblas.h is not asked for them, since it may be another
 * vendor's. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */

#include "blas.h"

#include "memory.h"

#include <cblas.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern __attribute__((weak)) int openblas_get_num_threads(void);
extern __attribute__((weak)) void openblas_set_num_threads(int n);
extern __attribute__((weak)) int openblas_get_parallel(void);
extern __attribute__((weak)) char *openblas_get_config(void);
extern __attribute__((weak)) char *openblas_get_corename(void);
/* OpenBLAS's own, never called: what of an archive is there even if nobody asked for the above.
 * Every flavour has the first, those with threads have the second. */
extern __attribute__((weak)) void *blas_memory_alloc(int unused);
extern __attribute__((weak)) int exec_blas(long n, void *queue);
extern __attribute__((weak)) int64_t bli_thread_get_num_threads(void);
extern __attribute__((weak)) void bli_thread_set_num_threads(int64_t n);
extern __attribute__((weak)) char *bli_info_get_version_str(void);
extern __attribute__((weak)) int64_t bli_info_get_enable_threading(void);

/* ---- products ---- */

static pthread_mutex_t product_lock = PTHREAD_MUTEX_INITIALIZER;

static bool fits(mha_view view) {
  return view.rows <= MHA_BLAS_MAX && view.columns <= MHA_BLAS_MAX &&
         view.row_stride <= MHA_BLAS_MAX && view.column_stride <= MHA_BLAS_MAX;
}

/* The leading dimension is the stride that is not 1. For one row or column BLAS still wants it to
 * be at least the length of the contiguous dimension, though it is never used. */
static enum CBLAS_TRANSPOSE orientation(mha_view view, int *leading_dimension) {
  const bool by_rows = view.column_stride == 1;
  const int64_t stride = by_rows ? view.row_stride : view.column_stride;
  const int64_t contiguous = by_rows ? view.columns : view.rows;
  *leading_dimension = (int)(stride > contiguous ? stride : contiguous > 0 ? contiguous : 1);
  return by_rows ? CblasNoTrans : CblasTrans;
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
    y[r] += alpha * cblas_sdot((int)w.columns, block.data + r * block.column_stride, 1, x, 1);
}

/* y += alpha·x·W for a block W of stored rows. */
static void multiply_rows(float alpha, mha_view x, mha_view block, float *y, int64_t y_stride) {
  const stored_matrix w = as_stored(block);
  int ld = 0;
  const enum CBLAS_TRANSPOSE transposed =
      orientation(block, &ld) == CblasTrans ? CblasNoTrans : CblasTrans;
  for (int64_t r = 0; r < x.rows; r++)
    cblas_sgemv(CblasRowMajor, transposed, (int)w.rows, (int)w.columns, alpha, block.data, ld,
                x.data + r * x.row_stride, 1, 1.0f, y + r * y_stride, 1);
}

static void multiply_whole(float alpha, mha_view a, mha_view b, float beta, float *c,
                           int64_t c_stride) {
  int lda = 0;
  int ldb = 0;
  const enum CBLAS_TRANSPOSE a_orientation = orientation(a, &lda);
  const enum CBLAS_TRANSPOSE b_orientation = orientation(b, &ldb);
  cblas_sgemm(CblasRowMajor, a_orientation, b_orientation, (int)a.rows, (int)b.columns,
              (int)a.columns, alpha, a.data, lda, b.data, ldb, beta, c, (int)c_stride);
}

/* y = beta·y, without reading y where beta is 0: whether sgemv then clears a NaN differs between
 * versions and cores. */
static void start_rows(float beta, float *y, int64_t rows, int64_t columns, int64_t y_stride) {
  for (int64_t r = 0; beta != 1.0f && r < rows; r++) {
    float *row = y + r * y_stride;
    if (beta == 0.0f)
      memset(row, 0, (size_t)columns * sizeof *row);
    else
      for (int64_t c = 0; c < columns; c++)
        row[c] *= beta;
  }
}

/* A block of stored rows that are columns of W makes its own columns of y from all of x; one of
 * rows takes its own columns of x and adds to all of y. */
static void multiply_few_rows(float alpha, mha_view x, const stored_matrix *w, float beta, float *y,
                              int64_t y_stride, int64_t block, bool pieces) {
  const bool large = w->rows * w->columns >= FEW_ROWS_SMALLEST_MATRIX;
  const bool dots = x.rows == 1 && w->by_out && large && w->columns <= LONGEST_ROW_FOR_DOT;
  start_rows(beta, y, x.rows, w->view.columns, y_stride);
  for (int64_t first = 0; first < w->rows; first += block) {
    const int64_t n = mha_min(w->rows - first, block);
    const mha_view x_part = w->by_out ? x : mha_view_columns(x, first, n);
    const mha_view w_part =
        w->by_out ? mha_view_columns(w->view, first, n) : mha_view_row_block(w->view, first, n);
    float *y_part = w->by_out ? y + first : y;
    if (pieces)
      multiply_whole(alpha, x_part, w_part, 1.0f, y_part, y_stride);
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
    multiply_whole(alpha, a, b, beta, c, c_stride);
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

static mha_blas_threading openblas_threading(void) {
  if (!openblas_get_parallel)
    return exec_blas ? MHA_BLAS_THREADS_OWN : MHA_BLAS_THREADS_LOCKED;
  switch (openblas_get_parallel()) {
  case 0:
    return MHA_BLAS_THREADS_LOCKED;
  case 2:
    return MHA_BLAS_THREADS_OPENMP;
  default:
    return MHA_BLAS_THREADS_OWN;
  }
}

mha_blas_threading mha_blas_threading_kind(void) {
  if (openblas_get_parallel || blas_memory_alloc)
    return openblas_threading();
  const bool has_threads = bli_info_get_enable_threading ? bli_info_get_enable_threading() != 0
                                                         : bli_thread_set_num_threads != NULL;
  return has_threads ? MHA_BLAS_THREADS_OWN : MHA_BLAS_THREADS_NONE;
}

/* BLIS answers -1 unless its environment or a call has told it a count; it then uses one thread. */
static int32_t current_count(void) {
  int64_t n = 1;
  if (openblas_get_num_threads)
    n = openblas_get_num_threads();
  else if (bli_thread_get_num_threads)
    n = bli_thread_get_num_threads();
  return n > 0 ? (int32_t)n : 0;
}

static void set_count(int32_t n) {
  if (openblas_set_num_threads)
    openblas_set_num_threads(n);
  else if (bli_thread_set_num_threads)
    bli_thread_set_num_threads(n);
}

/* OpenBLAS ends its threads before a fork and starts them again in the next call of the above,
 * under a lock that its own fork handler takes: a signal handler that forks there would wait for
 * its own thread. So signals wait, where a fork may have been. */
static atomic_bool forked = true;

static void set_count_safely(int32_t n) {
  sigset_t all;
  sigset_t before;
  if (!atomic_load_explicit(&forked, memory_order_relaxed)) {
    set_count(n);
    return;
  }
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  atomic_store(&forked, false);
  set_count(n);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* The guard. `count` is what the BLAS had before the first of `holders` entered. */
static struct {
  pthread_mutex_t lock;
  int64_t holders;
  int32_t count;
} guard = {PTHREAD_MUTEX_INITIALIZER, 0, 1};

/* Whether this thread holds the lock, or is about to; and how often it is a holder. */
static _Thread_local volatile sig_atomic_t locking;
static _Thread_local volatile sig_atomic_t holding;

static void lock_guard(void) {
  locking = 1;
  pthread_mutex_lock(&guard.lock);
}

static void unlock_guard(void) {
  pthread_mutex_unlock(&guard.lock);
  locking = 0;
}

int32_t mha_blas_thread_count(void) {
  lock_guard();
  const int32_t n = guard.holders > 0 ? guard.count : current_count();
  unlock_guard();
  return n;
}

void mha_blas_guard_enter(void) {
  if (mha_blas_threading_kind() != MHA_BLAS_THREADS_OWN)
    return;
  lock_guard();
  holding++;
  if (guard.holders++ == 0) {
    guard.count = current_count();
    if (guard.count > 1)
      set_count_safely(1);
  }
  unlock_guard();
}

void mha_blas_guard_leave(void) {
  if (mha_blas_threading_kind() != MHA_BLAS_THREADS_OWN)
    return;
  lock_guard();
  holding--;
  if (guard.holders > 0 && --guard.holders == 0 && guard.count > 1 && current_count() == 1)
    set_count_safely(guard.count);
  unlock_guard();
}

/* ---- fork ----
 * Before a fork that waits, nobody is inside a product, so that the lock of products is free. */

bool mha_blas_is_guarding(void) {
  return locking != 0;
}

void mha_blas_note_fork(void) {
  atomic_store(&forked, true);
}

void mha_blas_before_fork(void) {
  pthread_mutex_lock(&guard.lock);
}

void mha_blas_after_fork(void) {
  pthread_mutex_unlock(&guard.lock);
}

/* Other threads that held the guard do not exist in the child: nobody will leave for them. One of
 * them may have had a lock. */
void mha_blas_after_fork_in_child(void) {
  guard.holders = holding;
  (void)pthread_mutex_init(&guard.lock, NULL);
  (void)pthread_mutex_init(&product_lock, NULL);
}

/* ---- how many may call ---- */

/* What OpenBLAS maps for each thread that is in a product, and a little for how it does that; where
 * the system refuses it, it asks again for ever. */
#define OPENBLAS_BUFFER_BYTES ((size_t)129 << 20)

/* OpenBLAS ends the process when more threads are in products than it was built for; the text of
 * its configuration tells the number. */
int32_t mha_blas_most_callers(void) {
  static const char key[] = "MAX_THREADS=";
  const char *text = strstr(mha_blas_vendor(), key);
  const long n = text && openblas_get_config ? strtol(text + sizeof key - 1, NULL, 10) : 0;
  return n > 0 && n < INT32_MAX ? (int32_t)n : INT32_MAX;
}

/* Whether there is room for the buffers of n threads at once, as if none were there yet: which of
 * them are cannot be told, and a moment later somebody else may want some. */
static bool has_room(size_t n) {
  if (n > SIZE_MAX / OPENBLAS_BUFFER_BYTES)
    return false;
  const size_t bytes = n * OPENBLAS_BUFFER_BYTES;
  void *memory =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory != MAP_FAILED && munmap(memory, bytes) == 0;
}

bool mha_blas_takes_callers(int n) {
  return n <= mha_blas_most_callers() && (!openblas_get_config || has_room((size_t)n));
}

/* ---- description ---- */

extern __attribute__((weak)) int bli_arch_query_id(void);
extern __attribute__((weak)) char *bli_arch_string(int id);

static pthread_once_t named = PTHREAD_ONCE_INIT;
static char name[256];

/* OpenBLAS writes its text anew, in one place, each time it is asked. */
static void find_name(void) {
  if (openblas_get_config)
    (void)snprintf(name, sizeof name, "%s", openblas_get_config());
  else if (bli_info_get_version_str)
    (void)snprintf(name, sizeof name, "BLIS %s", bli_info_get_version_str());
  else
    (void)snprintf(name, sizeof name, "%s",
                   blas_memory_alloc            ? "OpenBLAS"
                   : bli_thread_set_num_threads ? "BLIS"
                                                : "CBLAS of unknown vendor");
}

const char *mha_blas_vendor(void) {
  (void)pthread_once(&named, find_name);
  return name;
}

const char *mha_blas_core(void) {
  if (openblas_get_corename)
    return openblas_get_corename();
  return bli_arch_query_id && bli_arch_string ? bli_arch_string(bli_arch_query_id()) : "unknown";
}
