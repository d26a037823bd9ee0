/* The BLAS's own thread count, for the engines that call it directly. */
#ifndef MHA_BENCH_BLAS_THREADS_H
#define MHA_BENCH_BLAS_THREADS_H

#include <stdbool.h>

/* The count now, or 1 where the BLAS cannot tell. */
int bench_blas_threads(void);

/* Whether bench_blas_threads_set does anything. */
bool bench_blas_threads_can_change(void);

/* Sets the count and returns what it was before. */
int bench_blas_threads_set(int n);

/* Threads of "all": the BLAS's, or the machine's CPUs where the BLAS has only one. */
int bench_all_threads(void);

#endif
