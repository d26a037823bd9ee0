/* The workers of one context: threads of its own, which sleep until there is a job, or those of the
 * caller's parallel loop. */
#ifndef MHA_SRC_RUNTIME_POOL_H
#define MHA_SRC_RUNTIME_POOL_H

#include "mha.h"

#include <stdatomic.h>
#include <stdbool.h>

typedef struct mha_pool mha_pool;

/* Tasks [0, n_tasks), each to be run once, in any order. worker, in [0, n_workers) of the job, is
 * nobody else's while the task runs. */
typedef struct mha_pool_job {
  void (*run)(void *argument, int64_t index, int32_t worker);
  void *argument;
  int64_t n_tasks;
  atomic_llong n_done; /* begins as 0 */
  int64_t n_own;       /* of worker 0; begins as 0 */
  bool is_short;       /* a worker that loses its core in it may cost more than it brings */
} mha_pool_job;

/* Workers that a pool can have, the caller among them. */
#define MHA_POOL_MAX_WORKERS 1024

/* A pool for jobs of at most n_workers; no thread is started yet. NULL = no memory. */
mha_pool *mha_pool_create(const mha_allocator *allocator, int32_t n_workers);

/* Ends the threads, none of which is inside a job. Of a pool that a child of fork() inherited there
 * are none. */
void mha_pool_destroy(mha_pool *pool);

/* Starts the threads that are missing for n_workers, also those that could not be started when they
 * were wanted before. */
void mha_pool_start(mha_pool *pool, int32_t n_workers);

/* Whether its threads would be this process's. */
bool mha_pool_is_alive(const mha_pool *pool);

/* Each of these runs all tasks on at most n_workers threads, the caller's among them, and returns
 * when all are done. Nobody waits for a thread that has no task: one that comes late finds nothing
 * to do. MHA_ERROR_MEMORY: not all were run, since the BLAS finds no memory to work in. */

/* On the pool's threads; one that cannot be started is a thread fewer. */
mha_status mha_pool_run(mha_pool *pool, mha_pool_job *job, int32_t n_workers);

/* On the threads of the caller's loop; what it leaves undone the calling thread does. */
mha_status mha_pool_run_by(mha_pool *pool, mha_pool_job *job, int32_t n_workers,
                           mha_parallel_for *parallel_for, void *user);

/* On the calling thread alone; needs no pool. */
mha_status mha_pool_run_alone(mha_pool_job *job);

#endif
