/* Owns the fork handlers, one for the whole library, so that their order is this file's: tasks end
 * while they can still have the BLAS's lock, and go on when it is free again.
 *
 * A signal handler may fork in the middle of a task or of the guard's lines. Its own thread stands
 * still there and may hold a lock that others wait for, so that it can wait for nobody: such a
 * child may find the BLAS's locks held, and has to be content with what POSIX leaves to it. */
#include "fork.h"

#include "engine/blas_threads.h"
#include "gate.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

static atomic_uint generation;
static pthread_once_t watched = PTHREAD_ONCE_INIT;

/* Whether the fork that this thread is in did not wait. */
static _Thread_local volatile sig_atomic_t hurried;

static void before_fork(void) {
  mha_blas_note_fork();
  hurried = mha_gate_is_inside() || mha_blas_is_guarding();
  if (hurried)
    return;
  mha_gate_shut();
  mha_blas_before_fork();
}

static void after_fork_in_parent(void) {
  if (hurried)
    return;
  mha_blas_after_fork();
  mha_gate_open();
}

static void after_fork_in_child(void) {
  atomic_fetch_add(&generation, 1);
  mha_blas_after_fork_in_child();
  mha_gate_open_in_child();
}

static void install_handlers(void) {
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void mha_fork_watch(void) {
  (void)pthread_once(&watched, install_handlers);
}

uint32_t mha_fork_generation(void) {
  return atomic_load(&generation);
}
