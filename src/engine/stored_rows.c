/* Owns the choice of row kernels: once, by what the processor has. */
#include "stored_rows.h"

#include <stdatomic.h>
#include <stddef.h>

#ifndef MHA_BASELINE /* a build of the tests is without */
#define MHA_BASELINE 0
#endif

static const mha_row_kernels *choose(void) {
  const mha_row_kernels *avx512 = MHA_BASELINE ? NULL : mha_rows_avx512();
  const mha_row_kernels *avx2 = MHA_BASELINE ? NULL : mha_rows_avx2();
  return avx512 ? avx512 : avx2 ? avx2 : mha_rows_plain();
}

const mha_row_kernels *mha_rows_best(void) {
  static const mha_row_kernels *_Atomic chosen = NULL;
  const mha_row_kernels *best = atomic_load_explicit(&chosen, memory_order_relaxed);
  if (!best) {
    best = choose();
    atomic_store_explicit(&chosen, best, memory_order_relaxed);
  }
  return best;
}
