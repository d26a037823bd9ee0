/* The threads of the BLAS, of which calls hold it at one; and how many of ours it takes. */
#ifndef MHA_SRC_ENGINE_BLAS_THREADS_H
#define MHA_SRC_ENGINE_BLAS_THREADS_H

#include <stdbool.h>
#include <stdint.h>

/* Threads the BLAS would use outside the guard; 0 = it was told none and uses one. */
int32_t mha_blas_thread_count(void);

/* Holds a pool of the BLAS's own at one thread, process-wide, until the last matching leave, which
 * restores the count unless somebody changed it meanwhile. Nothing to do for the other kinds. */
void mha_blas_guard_enter(void);
void mha_blas_guard_leave(void);

/* Round every product: locks where the BLAS is a flavour that two threads must not enter. */
bool mha_blas_lock_product(void);
void mha_blas_unlock_product(bool locked);

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

#endif
