/* Runs a list of independent tasks on the context's threads. */
#ifndef MHA_SRC_RUNTIME_PARALLEL_H
#define MHA_SRC_RUNTIME_PARALLEL_H

#include "pool.h"

typedef struct mha_threads {
  int32_t n;                      /* at most this many run at once, the caller among them */
  bool hold_blas;                 /* false: the BLAS's threads are left alone, n is 1 */
  mha_parallel_for *parallel_for; /* the caller's pool; NULL = own threads */
  void *user;
  mha_pool *pool; /* NULL where n is 1 */
} mha_threads;

/* Reading a number from memory takes as long as this many operations of a large product. */
#define MHA_OPERATIONS_PER_READ 16.0

/* One task of a job. worker, in [0, threads.n), is nobody else's while the task runs: it picks the
 * scratch. Returns MHA_OK or what went wrong. */
typedef mha_status mha_work(void *job, int64_t index, int32_t worker);

/* A list of tasks. */
typedef struct mha_task_list {
  mha_work *work;
  void *job;
  int64_t n_tasks;
  double operations; /* of all together, roughly: too few are not worth a second thread */
} mha_task_list;

/* Calls work(job, i, worker) for every i in [0, n_tasks), each exactly once, in any order, and
 * returns when all are done: MHA_OK, or the first failure; MHA_ERROR_MEMORY also where the BLAS
 * finds no memory to work in. Every worker computes in the caller's floating-point environment. */
mha_status mha_parallel_run(const mha_threads *threads, const mha_task_list *list);

#endif
