/* Owns how a list of tasks is run: on how many threads, whose they are, in which floating-point
 * environment. Which tasks there are is decided by shape alone, elsewhere; so results do not depend
 * on who runs them. */
#include "parallel.h"

#include "engine/blas.h"
#include "openmp.h"

#include <fenv.h>
#include <pthread.h>

/* Waking a thread and waiting for it takes as long as some tens of thousands of floating-point
 * operations; a thread that is not idle elsewhere answers much later still. Each thread should have
 * this many to do, about 0.1 ms. */
#ifndef MHA_OPERATIONS_PER_THREAD
#define MHA_OPERATIONS_PER_THREAD 8e6
#endif

/* Below this a job is short, some milliseconds: what a system lets another process have a core for.
 */
#ifndef MHA_OPERATIONS_OF_SHORT_JOB
#define MHA_OPERATIONS_OF_SHORT_JOB 4e8
#endif

typedef struct run {
  const mha_task_list *list;
  pthread_t caller;
  atomic_int failure; /* of the first task to fail, or MHA_OK */
  fenv_t environment; /* the caller's: rounding mode, flush to zero */
} run;

static void run_here(run *r, int64_t index, int32_t worker) {
  const mha_status status = r->list->work(r->list->job, index, worker);
  int none = MHA_OK;
  if (status != MHA_OK)
    (void)atomic_compare_exchange_strong(&r->failure, &none, (int)status);
}

/* A BLAS that follows OpenMP would start a team of its own in a thread that is in no team. */
static int hold_openmp_blas(void) {
  return mha_blas_threading_kind() == MHA_BLAS_THREADS_OPENMP ? mha_openmp_hold() : 0;
}

/* A pool's task, on the calling thread or on another one, which gets back what it had. */
static void run_task(void *argument, int64_t index, int32_t worker) {
  run *const r = argument;
  fenv_t own;
  if (pthread_equal(pthread_self(), r->caller)) {
    run_here(r, index, worker);
    return;
  }
  (void)fegetenv(&own);
  (void)fesetenv(&r->environment);
  const int before = hold_openmp_blas();
  run_here(r, index, worker);
  mha_openmp_release(before);
  (void)fesetenv(&own);
}

/* In a caller's own parallel region, or in a child of fork() that has none of the pool's threads,
 * the calling thread works alone. */
static int32_t usable_threads(const mha_threads *threads, const mha_task_list *list) {
  const double worthwhile = list->operations / MHA_OPERATIONS_PER_THREAD;
  int32_t n = threads->n;
  if (list->n_tasks < n)
    n = (int32_t)list->n_tasks;
  if (worthwhile < n)
    n = (int32_t)(worthwhile < 1 ? 1 : worthwhile);
  if (n > 1 && !threads->parallel_for &&
      (mha_openmp_in_region() || !mha_pool_is_alive(threads->pool)))
    return 1;
  return n;
}

static mha_status run_on(const mha_threads *threads, mha_pool_job *job, int32_t n) {
  if (n == 1)
    return mha_pool_run_alone(job);
  if (threads->parallel_for)
    return mha_pool_run_by(threads->pool, job, n, threads->parallel_for, threads->user);
  return mha_pool_run(threads->pool, job, n);
}

mha_status mha_parallel_run(const mha_threads *threads, const mha_task_list *list) {
  if (list->n_tasks <= 0)
    return MHA_OK;
  const int32_t n = usable_threads(threads, list);
  run r = {.list = list, .caller = pthread_self()};
  mha_pool_job job = {.run = run_task,
                      .argument = &r,
                      .n_tasks = list->n_tasks,
                      .is_short = list->operations < MHA_OPERATIONS_OF_SHORT_JOB};
  atomic_init(&r.failure, MHA_OK);
  if (n > 1)
    (void)fegetenv(&r.environment);
  const int before = threads->hold_blas ? hold_openmp_blas() : 0;
  const mha_status status = run_on(threads, &job, n);
  mha_openmp_release(before);
  return status ? status : (mha_status)atomic_load(&r.failure);
}
