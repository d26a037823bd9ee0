/* Owns who may be inside a task. A BLAS has locks of its own, such as OpenBLAS's around its
 * buffers: a child of fork() that inherits one held by a thread that it has not would wait for
 * ever. So fork() waits until no task runs, and none begins before it is done. And OpenBLAS has a
 * largest number of threads that may be in its products at once, beyond which it ends the process.
 *
 * No code of the caller's runs within a task, so that whoever forks from a callback waits for
 * others alone. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */

#include "gate.h"

#include "engine/blas_threads.h"

#include <signal.h>
#include <stdatomic.h>
#include <time.h>

static atomic_int inside;   /* threads, of all contexts */
static atomic_int forking;  /* threads, as long as one forks the gate is shut */
static atomic_int admitted; /* the most that were ever inside */

/* 1 while this thread is inside, or just before and after. */
static _Thread_local volatile sig_atomic_t mine;

void mha_gate_nap(void) {
  const struct timespec moment = {0, 50000};
  (void)nanosleep(&moment, NULL);
}

/* The BLAS keeps what it needs for as many threads as were ever inside at once. */
static bool admit(int n) {
  int most = atomic_load(&admitted);
  if (n <= most)
    return true;
  if (!mha_blas_takes_callers(n))
    return false;
  while (n > most && !atomic_compare_exchange_weak(&admitted, &most, n))
    continue;
  return true;
}

static void step_out(void) {
  atomic_fetch_sub(&inside, 1);
  mine = 0;
}

mha_status mha_gate_enter(void) {
  for (;;) {
    mine = 1;
    const int n = atomic_fetch_add(&inside, 1) + 1;
    const bool shut = atomic_load(&forking) > 0;
    if (!shut && admit(n))
      return MHA_OK;
    step_out();
    if (!shut)
      return n > 1 || atomic_load(&admitted) > 0 ? MHA_ERROR_BUSY : MHA_ERROR_MEMORY;
    while (atomic_load(&forking) > 0)
      mha_gate_nap();
  }
}

void mha_gate_leave(void) {
  step_out();
}

bool mha_gate_is_inside(void) {
  return mine != 0;
}

void mha_gate_shut(void) {
  atomic_fetch_add(&forking, 1);
  while (atomic_load(&inside) > 0)
    mha_gate_nap();
}

void mha_gate_open(void) {
  atomic_fetch_sub(&forking, 1);
}

/* What a BLAS keeps through a fork is its own affair: it is asked again. */
void mha_gate_open_in_child(void) {
  atomic_store(&admitted, 0);
  atomic_store(&inside, mine);
  atomic_store(&forking, 0);
}
