/* Owns the BLAS's thread count. The vendors' functions are weak references: they are NULL where
 * another BLAS is linked, and the bench still builds. */
#define _POSIX_C_SOURCE 200809L
#include "blas_threads.h"

#include <stdint.h>
#include <unistd.h>

extern __attribute__((weak)) int openblas_get_num_threads(void);
extern __attribute__((weak)) void openblas_set_num_threads(int n);
extern __attribute__((weak)) int64_t bli_thread_get_num_threads(void);
extern __attribute__((weak)) void bli_thread_set_num_threads(int64_t n);

int bench_blas_threads(void) {
  int64_t n = 1;
  if (openblas_get_num_threads)
    n = openblas_get_num_threads();
  else if (bli_thread_get_num_threads)
    n = bli_thread_get_num_threads();
  return n > 1 ? (int)n : 1; /* BLIS answers -1 for "not set" */
}

bool bench_blas_threads_can_change(void) {
  return openblas_set_num_threads || bli_thread_set_num_threads;
}

int bench_blas_threads_set(int n) {
  const int before = bench_blas_threads();
  if (openblas_set_num_threads)
    openblas_set_num_threads(n);
  else if (bli_thread_set_num_threads)
    bli_thread_set_num_threads(n);
  return before;
}

int bench_all_threads(void) {
  const int blas = bench_blas_threads();
  const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  return blas > 1 || cpus < 1 ? blas : (int)cpus;
}
