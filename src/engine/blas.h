/* The BLAS in the process: three of its functions, and what is known of it. Sizes and strides fit
 * its integer. */
#ifndef MHA_SRC_ENGINE_BLAS_H
#define MHA_SRC_ENGINE_BLAS_H

#include "view.h"

#include <stdbool.h>

/* C = alpha·A·B + beta·C with C [A.rows][B.columns], rows c_stride apart. */
void mha_blas_gemm(float alpha, mha_view a, mha_view b, float beta, float *c, int64_t c_stride);

/* y += alpha·x·W, x [W.rows], y [W.columns], both dense. */
void mha_blas_gemv(float alpha, const float *x, mha_view w, float *y);

/* x·y, both dense, of n numbers. */
float mha_blas_dot(int64_t n, const float *x, const float *y);

/* How the BLAS uses threads. */
typedef enum mha_blas_threading {
  MHA_BLAS_THREADS_NONE,   /* single-threaded, safe to call from several threads */
  MHA_BLAS_THREADS_LOCKED, /* OpenBLAS's serial flavour: every product under one lock */
  MHA_BLAS_THREADS_OWN,    /* a pool of its own, one process-wide count */
  MHA_BLAS_THREADS_OPENMP  /* follows the calling thread's OpenMP setting */
} mha_blas_threading;

mha_blas_threading mha_blas_threading_kind(void);

/* The BLAS's own count of threads as it is now; 0 = it was told none and uses one. */
int32_t mha_blas_count(void);
void mha_blas_set_count(int32_t n);

/* Whether what is known of OpenBLAS's limits holds. */
bool mha_blas_is_openblas(void);

/* Vendor with version, and the core its kernels are made for; static or the BLAS's own text. */
const char *mha_blas_vendor(void);
const char *mha_blas_core(void);

#endif
