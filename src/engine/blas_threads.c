/* Owns how many threads the BLAS may use and take: its count, held at one while calls compute; the
 * lock of a flavour without threads; the limit of callers. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */

#include "blas_threads.h"

#include "blas.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- the guard ---- */

/* OpenBLAS ends its threads before a fork and starts them again in the next call of the above,
 * under a lock that its own fork handler takes: a signal handler that forks there would wait for
 * its own thread. So signals wait, where a fork may have been. */
static atomic_bool forked = true;

static void set_count_safely(int32_t n) {
  sigset_t all;
  sigset_t before;
  if (!atomic_load_explicit(&forked, memory_order_relaxed)) {
    mha_blas_set_count(n);
    return;
  }
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  atomic_store(&forked, false);
  mha_blas_set_count(n);
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

/* Of a flavour that two threads must not enter. */
static pthread_mutex_t product_lock = PTHREAD_MUTEX_INITIALIZER;

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
  const int32_t n = guard.holders > 0 ? guard.count : mha_blas_count();
  unlock_guard();
  return n;
}

void mha_blas_guard_enter(void) {
  if (mha_blas_threading_kind() != MHA_BLAS_THREADS_OWN)
    return;
  lock_guard();
  holding++;
  if (guard.holders++ == 0) {
    guard.count = mha_blas_count();
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
  if (guard.holders > 0 && --guard.holders == 0 && guard.count > 1 && mha_blas_count() == 1)
    set_count_safely(guard.count);
  unlock_guard();
}

/* ---- one product at a time ---- */

bool mha_blas_lock_product(void) {
  const bool locked = mha_blas_threading_kind() == MHA_BLAS_THREADS_LOCKED;
  if (locked)
    pthread_mutex_lock(&product_lock);
  return locked;
}

void mha_blas_unlock_product(bool locked) {
  if (locked)
    pthread_mutex_unlock(&product_lock);
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
  const long n = text && mha_blas_is_openblas() ? strtol(text + sizeof key - 1, NULL, 10) : 0;
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
  return n <= mha_blas_most_callers() && (!mha_blas_is_openblas() || has_room((size_t)n));
}
