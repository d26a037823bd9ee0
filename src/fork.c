/* Owns the fork handlers, one for the whole library, so that their order is this file's: tasks end
 * while they can still have the BLAS's lock, and go on when it is free again. */
#include "fork.h"

#include "blas.h"
#include "gate.h"

#include <pthread.h>
#include <stdatomic.h>

static atomic_uint generation;
static pthread_once_t watched = PTHREAD_ONCE_INIT;

static void before_fork(void) {
  mha_gate_shut();
  mha_blas_before_fork();
}

static void after_fork_in_parent(void) {
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
