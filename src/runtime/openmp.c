/* Owns what the library knows of OpenMP, which it does not use itself: the caller may, and a BLAS
 * may. Weak references: they are there when a runtime is in the process and NULL otherwise. */
#include "openmp.h"

#include <stddef.h>

extern __attribute__((weak)) int omp_in_parallel(void);
extern __attribute__((weak)) int omp_get_max_threads(void);
extern __attribute__((weak)) void omp_set_num_threads(int n);

bool mha_openmp_in_region(void) {
  return omp_in_parallel && omp_in_parallel();
}

int mha_openmp_hold(void) {
  if (!omp_get_max_threads || !omp_set_num_threads)
    return 0;
  const int before = omp_get_max_threads();
  if (before != 1)
    omp_set_num_threads(1);
  return before;
}

void mha_openmp_release(int before) {
  if (before > 0 && omp_get_max_threads() != before)
    omp_set_num_threads(before);
}
