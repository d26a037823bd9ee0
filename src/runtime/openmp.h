/* An OpenMP runtime that somebody else brought into the process. */
#ifndef MHA_SRC_RUNTIME_OPENMP_H
#define MHA_SRC_RUNTIME_OPENMP_H

#include <stdbool.h>

/* Whether the calling thread is in a parallel region of the caller's. */
bool mha_openmp_in_region(void);

/* Has a BLAS that follows OpenMP start no team of its own in the calling thread. Returns what
 * mha_openmp_release needs. */
int mha_openmp_hold(void);
void mha_openmp_release(int before);

#endif
