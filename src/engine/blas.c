/* Owns the BLAS: the only file that includes cblas.h and knows vendors.
 *
 * Vendors' own functions are weak references: they are there when the BLAS in the process has them
 * and NULL otherwise, so that one binary serves every BLAS that the linker or an alternatives
 * system puts under it. Out of an archive the linker takes them when it is told their names, which
 * FindMhaCBLAS.cmake and mha.pc do. cblas.h is not asked for them, since it may be another
 * vendor's. */
#include "blas.h"

#include <cblas.h>
#include <pthread.h>
#include <stdio.h>

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

/* ---- calls ---- */

/* The leading dimension is the stride that is not 1. For one row or column BLAS still wants it to
 * be at least the length of the contiguous dimension, though it is never used. */
static enum CBLAS_TRANSPOSE orientation(mha_view view, int *leading_dimension) {
  const bool by_rows = view.column_stride == 1;
  const int64_t stride = by_rows ? view.row_stride : view.column_stride;
  const int64_t contiguous = by_rows ? view.columns : view.rows;
  *leading_dimension = (int)(stride > contiguous ? stride : contiguous > 0 ? contiguous : 1);
  return by_rows ? CblasNoTrans : CblasTrans;
}

void mha_blas_gemm(float alpha, mha_view a, mha_view b, float beta, float *c, int64_t c_stride) {
  int lda = 0;
  int ldb = 0;
  const enum CBLAS_TRANSPOSE a_orientation = orientation(a, &lda);
  const enum CBLAS_TRANSPOSE b_orientation = orientation(b, &ldb);
  cblas_sgemm(CblasRowMajor, a_orientation, b_orientation, (int)a.rows, (int)b.columns,
              (int)a.columns, alpha, a.data, lda, b.data, ldb, beta, c, (int)c_stride);
}

/* The row is the vector, so it is the transposed matrix that multiplies it. */
void mha_blas_gemv(float alpha, const float *x, mha_view w, float *y) {
  int ld = 0;
  const bool by_out = w.column_stride != 1;
  const enum CBLAS_TRANSPOSE transposed =
      orientation(w, &ld) == CblasTrans ? CblasNoTrans : CblasTrans;
  cblas_sgemv(CblasRowMajor, transposed, (int)(by_out ? w.columns : w.rows),
              (int)(by_out ? w.rows : w.columns), alpha, w.data, ld, x, 1, 1.0f, y, 1);
}

float mha_blas_dot(int64_t n, const float *x, const float *y) {
  return cblas_sdot((int)n, x, 1, y, 1);
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
int32_t mha_blas_count(void) {
  int64_t n = 1;
  if (openblas_get_num_threads)
    n = openblas_get_num_threads();
  else if (bli_thread_get_num_threads)
    n = bli_thread_get_num_threads();
  return n > 0 ? (int32_t)n : 0;
}

void mha_blas_set_count(int32_t n) {
  if (openblas_set_num_threads)
    openblas_set_num_threads(n);
  else if (bli_thread_set_num_threads)
    bli_thread_set_num_threads(n);
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

bool mha_blas_is_openblas(void) {
  return openblas_get_config != NULL;
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
