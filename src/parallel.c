/* Owns threads: the only file with OpenMP. Which tasks there are is decided by shape alone,
 * elsewhere; here only who runs them, so that results do not depend on the number of threads. */
#include "parallel.h"

#include "blas.h"

#include <fenv.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

/* Waking a thread and waiting for it takes as long as some tens of thousands of floating-point
 * operations; a thread that is not idle elsewhere answers much later still. Each thread should have
 * this many to do, about 0.1 ms. */
#ifndef MHA_OPERATIONS_PER_THREAD
#define MHA_OPERATIONS_PER_THREAD 8e6
#endif

typedef struct task_queue {
  const mha_task_list *list;
  atomic_llong next;  /* the first task that nobody took */
  atomic_int failure; /* of the first task to fail, or MHA_OK */
  fenv_t environment; /* the caller's: rounding mode, flush to zero */
} task_queue;

/* ---- fork ---- */

/* libgomp's pool does not survive fork() and hangs when used again: a child computes alone. A BLAS
 * has locks of its own, such as OpenBLAS's around its buffers: a child that inherits one held by a
 * thread that it has not would wait for ever. So fork() waits until no task runs, and none begins
 * before it is done. No code of the caller's runs within a task, so that forking from a callback
 * waits for others alone. */
static atomic_bool forked;
static atomic_bool forking;
static atomic_int running; /* tasks, of all contexts */
static pthread_mutex_t fork_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_handler = PTHREAD_ONCE_INIT;

static void before_fork(void) {
  pthread_mutex_lock(&fork_lock);
  atomic_store(&forking, true);
  while (atomic_load(&running) > 0)
    (void)sched_yield();
}

static void after_fork_in_parent(void) {
  atomic_store(&forking, false);
  pthread_mutex_unlock(&fork_lock);
}

static void after_fork_in_child(void) {
  atomic_store(&forked, true);
  after_fork_in_parent();
}

static void install_fork_handler(void) {
  (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void begin_task(void) {
  atomic_fetch_add(&running, 1);
  while (atomic_load(&forking)) {
    atomic_fetch_sub(&running, 1);
    while (atomic_load(&forking))
      (void)sched_yield();
    atomic_fetch_add(&running, 1);
  }
}

static void end_task(void) {
  atomic_fetch_sub(&running, 1);
}

/* ---- tasks ---- */

static void take_tasks(task_queue *queue, int32_t worker) {
  for (;;) {
    const int64_t index = atomic_fetch_add(&queue->next, 1);
    if (index >= queue->list->n_tasks)
      return;
    begin_task();
    const mha_status status = queue->list->work(queue->list->job, index, worker);
    end_task();
    int none = MHA_OK;
    if (status != MHA_OK)
      (void)atomic_compare_exchange_strong(&queue->failure, &none, (int)status);
  }
}

/* A BLAS that follows OpenMP would start a team of its own in a thread that is in no team. */
static int hold_openmp_blas(void) {
  const int before = omp_get_max_threads();
  if (mha_blas_threading_kind() == MHA_BLAS_THREADS_OPENMP && before != 1)
    omp_set_num_threads(1);
  return before;
}

static void release_openmp_blas(int before) {
  if (omp_get_max_threads() != before)
    omp_set_num_threads(before);
}

/* mha_task for the caller's pool, and the body of our own team. */
static void run_worker(void *argument, int64_t worker) {
  task_queue *const queue = argument;
  fenv_t own;
  (void)fegetenv(&own);
  (void)fesetenv(&queue->environment);
  const int before = hold_openmp_blas();
  take_tasks(queue, (int32_t)worker);
  release_openmp_blas(before);
  (void)fesetenv(&own);
}

static void run_team(task_queue *queue, int32_t n) {
#pragma omp parallel num_threads(n)
  run_worker(queue, omp_get_thread_num());
}

/* In a caller's own parallel region, or after fork(), the calling thread works alone. */
static int32_t usable_threads(const mha_threads *threads, const mha_task_list *list) {
  const bool own_team = threads->parallel_for == NULL;
  const double worthwhile = list->operations / MHA_OPERATIONS_PER_THREAD;
  int32_t n = threads->n;
  if (own_team && (omp_in_parallel() || atomic_load(&forked)))
    return 1;
  if (list->n_tasks < n)
    n = (int32_t)list->n_tasks;
  return worthwhile < n ? (int32_t)(worthwhile < 1 ? 1 : worthwhile) : n;
}

mha_status mha_parallel_run(const mha_threads *threads, const mha_task_list *list) {
  if (list->n_tasks <= 0)
    return MHA_OK;
  task_queue queue = {.list = list};
  atomic_init(&queue.next, 0);
  atomic_init(&queue.failure, MHA_OK);
  const int32_t n = usable_threads(threads, list);
  if (!threads->hold_blas) {
    take_tasks(&queue, 0);
  } else {
    (void)fegetenv(&queue.environment);
    if (n == 1)
      run_worker(&queue, 0);
    else if (threads->parallel_for)
      threads->parallel_for(threads->user, n, run_worker, &queue);
    else
      run_team(&queue, n);
  }
  return (mha_status)atomic_load(&queue.failure);
}

void mha_parallel_watch_forks(void) {
  /* what comes later runs earlier before a fork: tasks end while they can still have the BLAS's
   * lock */
  mha_blas_watch_forks();
  (void)pthread_once(&fork_handler, install_fork_handler);
}

int32_t mha_parallel_cpu_count(void) {
  return omp_get_num_procs();
}
