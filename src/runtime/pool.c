/* Owns the workers of a context and how they share a job's tasks out.
 *
 * A job is on the caller's stack and ends when its tasks are done, not when all workers have come:
 * a core that somebody else holds may keep a worker away for milliseconds. So what a late worker
 * looks at, the ticket, belongs to the pool. It holds how many tasks nobody has taken and how many
 * workers may take them. Whoever lowers it by one task has that task, of whichever job the ticket
 * is at that moment; the job cannot end before the task is done. */
#define _POSIX_C_SOURCE 200809L /* pthread_sigmask */

#include "pool.h"

#include "base/memory.h"
#include "cpus.h"
#include "fork.h"
#include "gate.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

/* The ticket: tasks that are left · TASK + workers. */
#define TASK       (UINT64_C(2) * MHA_POOL_MAX_WORKERS)
#define MOST_TASKS (UINT64_MAX / TASK)

/* Looks that a thread takes before it sleeps, some tens of microseconds: the lists of one call
 * follow one another faster than a thread wakes up. */
#define LOOKS 2000

/* What one thread needs; products of OpenBLAS and the row kernels take some 80 KiB of it. */
#define STACK_BYTES (1 << 20)

typedef struct worker {
  mha_pool *pool;
  int32_t number;
  bool asleep;       /* under the pool's lock */
  mha_cpu_home home; /* likewise */
  pthread_t thread;
  pthread_cond_t wake;
} worker;

struct mha_pool {
  mha_allocator allocator;
  size_t bytes;
  int32_t n_workers;
  int32_t n_started; /* threads, those of workers 1 to n_started */
  bool refused;      /* the last thread that was wanted could not be started */
  int looks;
  int32_t n_alone;    /* short jobs that the caller does alone before it shares one again */
  int32_t next_alone; /* how many it will be the next time that sharing was slower */
  uint32_t generation;
  atomic_uint_fast64_t ticket;
  _Atomic(mha_pool_job *) job;
  atomic_int n_asleep, n_visitors, next_visitor;
  atomic_bool caller_sleeps, stop;
  pthread_mutex_t lock;
  pthread_cond_t finished;
  worker workers[]; /* n_workers; that of the caller is not used */
};

/* ---- tasks ---- */

static void look_again(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

static bool has_task(mha_pool *pool, int32_t number) {
  const uint64_t ticket = atomic_load(&pool->ticket);
  return ticket >= TASK && (uint64_t)number < ticket % TASK;
}

/* Takes a task; false if there is none for this worker. */
static bool take(mha_pool *pool, int32_t number, mha_pool_job **job, int64_t *index) {
  uint_fast64_t ticket = atomic_load(&pool->ticket);
  do {
    if (ticket < TASK || (uint64_t)number >= ticket % TASK)
      return false;
  } while (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket - TASK));
  *job = atomic_load(&pool->job);
  *index = (*job)->n_tasks - (int64_t)(ticket / TASK);
  return true;
}

/* After the last count the job may be gone. */
static void count_done(mha_pool *pool, mha_pool_job *job) {
  const int64_t n_tasks = job->n_tasks;
  if (atomic_fetch_add(&job->n_done, 1) + 1 < n_tasks || !atomic_load(&pool->caller_sleeps))
    return;
  pthread_mutex_lock(&pool->lock);
  pthread_cond_signal(&pool->finished);
  pthread_mutex_unlock(&pool->lock);
}

static void run_one(mha_pool *pool, int32_t number) {
  mha_pool_job *job = NULL;
  int64_t index = 0;
  const bool taken = take(pool, number, &job, &index);
  if (taken)
    job->run(job->argument, index, number);
  mha_gate_leave();
  if (taken && number == 0)
    job->n_own++;
  if (taken)
    count_done(pool, job);
}

/* Runs tasks until there is none for this worker. While the BLAS takes no more threads it waits,
 * since those that are inside leave. */
static mha_status run_all(mha_pool *pool, int32_t number) {
  while (has_task(pool, number)) {
    const mha_status status = mha_gate_enter();
    if (status == MHA_ERROR_MEMORY)
      return status;
    if (status)
      mha_gate_nap();
    else
      run_one(pool, number);
  }
  return MHA_OK;
}

mha_status mha_pool_run_alone(mha_pool_job *job) {
  int64_t index = 0;
  while (index < job->n_tasks) {
    const mha_status status = mha_gate_enter();
    if (status == MHA_ERROR_MEMORY)
      return status;
    if (status) {
      mha_gate_nap();
    } else {
      job->run(job->argument, index++, 0);
      mha_gate_leave();
    }
  }
  return MHA_OK;
}

/* ---- threads ---- */

/* Sleeps until there is a task for this worker; false if there will be none any more. */
static bool wait_for_task(worker *w) {
  mha_pool *pool = w->pool;
  for (int look = 0; look < pool->looks && !atomic_load(&pool->stop); look++) {
    if (has_task(pool, w->number))
      return true;
    look_again();
  }
  pthread_mutex_lock(&pool->lock);
  w->asleep = true;
  atomic_fetch_add(&pool->n_asleep, 1);
  while (!has_task(pool, w->number) && !atomic_load(&pool->stop)) {
    pthread_cond_wait(&w->wake, &pool->lock);
    mha_cpu_come_home(&w->home);
  }
  atomic_fetch_sub(&pool->n_asleep, 1);
  w->asleep = false;
  pthread_mutex_unlock(&pool->lock);
  return !atomic_load(&pool->stop);
}

static void *serve(void *user) {
  worker *w = user;
  while (wait_for_task(w))
    if (run_all(w->pool, w->number))
      mha_gate_nap(); /* the caller finds that out, too, and ends the job */
  return NULL;
}

/* Signals are for the program's own threads. */
static bool start_thread(worker *w) {
  pthread_attr_t attributes;
  sigset_t all;
  sigset_t before;
  if (pthread_attr_init(&attributes) != 0)
    return false;
  (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  const bool started = pthread_create(&w->thread, &attributes, serve, w) == 0;
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_attr_destroy(&attributes);
  return started;
}

static void start_missing(mha_pool *pool, int32_t n_workers) {
  while (pool->n_started < n_workers - 1 && !pool->refused) {
    if (start_thread(&pool->workers[pool->n_started + 1]))
      pool->n_started++;
    else
      pool->refused = true;
  }
}

void mha_pool_start(mha_pool *pool, int32_t n_workers) {
  pool->refused = false;
  if (mha_pool_is_alive(pool))
    start_missing(pool, n_workers);
}

/* ---- life ---- */

mha_pool *mha_pool_create(const mha_allocator *allocator, int32_t n_workers) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(mha_pool), 1, 1, 1);
  (void)mha_layout_add(&layout, sizeof(worker), n_workers, 1, 1);
  mha_pool *pool = layout.overflow ? NULL : mha_memory_allocate(allocator, layout.bytes);
  if (!pool)
    return NULL;
  memset(pool, 0, layout.bytes);
  pool->allocator = *allocator;
  pool->bytes = layout.bytes;
  pool->n_workers = n_workers;
  pool->looks = n_workers <= mha_cpu_count() ? LOOKS : 0;
  pool->generation = mha_fork_generation();
  (void)pthread_mutex_init(&pool->lock, NULL);
  (void)pthread_cond_init(&pool->finished, NULL);
  for (int32_t k = 0; k < n_workers; k++) {
    pool->workers[k].pool = pool;
    pool->workers[k].number = k;
    (void)pthread_cond_init(&pool->workers[k].wake, NULL);
  }
  return pool;
}

bool mha_pool_is_alive(const mha_pool *pool) {
  return pool->generation == mha_fork_generation();
}

static void end_threads(mha_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  atomic_store(&pool->stop, true);
  for (int32_t k = 1; k <= pool->n_started; k++)
    pthread_cond_signal(&pool->workers[k].wake);
  pthread_mutex_unlock(&pool->lock);
  for (int32_t k = 1; k <= pool->n_started; k++)
    (void)pthread_join(pool->workers[k].thread, NULL);
}

void mha_pool_destroy(mha_pool *pool) {
  if (!pool)
    return;
  if (mha_pool_is_alive(pool)) {
    end_threads(pool);
    for (int32_t k = 0; k < pool->n_workers; k++)
      (void)pthread_cond_destroy(&pool->workers[k].wake);
    (void)pthread_cond_destroy(&pool->finished);
    (void)pthread_mutex_destroy(&pool->lock);
  }
  const mha_allocator allocator = pool->allocator;
  mha_memory_release(&allocator, pool, pool->bytes);
}

/* ---- jobs ---- */

static void open_job(mha_pool *pool, mha_pool_job *job, int32_t n_workers) {
  atomic_store(&pool->next_visitor, 0);
  atomic_store(&pool->job, job);
  atomic_store(&pool->ticket, (uint64_t)job->n_tasks * TASK + (uint64_t)n_workers);
}

static void wake_workers(mha_pool *pool, int32_t n_workers) {
  if (atomic_load(&pool->n_asleep) == 0)
    return;
  pthread_mutex_lock(&pool->lock);
  for (int32_t k = 1; k < n_workers && k <= pool->n_started; k++)
    if (pool->workers[k].asleep) {
      mha_cpu_send_away(pool->workers[k].thread, &pool->workers[k].home);
      pthread_cond_signal(&pool->workers[k].wake);
    }
  pthread_mutex_unlock(&pool->lock);
}

static bool is_done(mha_pool_job *job) {
  return atomic_load(&job->n_done) >= job->n_tasks;
}

static void wait_until_done(mha_pool *pool, mha_pool_job *job) {
  for (int look = 0; look < pool->looks && !is_done(job); look++)
    look_again();
  if (is_done(job))
    return;
  pthread_mutex_lock(&pool->lock);
  atomic_store(&pool->caller_sleeps, true);
  while (!is_done(job))
    pthread_cond_wait(&pool->finished, &pool->lock);
  atomic_store(&pool->caller_sleeps, false);
  pthread_mutex_unlock(&pool->lock);
}

/* The caller's share. Tasks that cannot be run count as done. */
static mha_status run_own_share(mha_pool *pool, mha_pool_job *job) {
  const mha_status status = run_all(pool, 0);
  if (status) {
    const uint64_t left = atomic_exchange(&pool->ticket, 0) / TASK;
    atomic_fetch_add(&job->n_done, (long long)left);
  }
  return status;
}

/* ---- short jobs ----
 * A worker whose core another process takes in the middle of a task keeps the caller waiting for as
 * long as the system lets that process run, which may be many times a short job. Where sharing came
 * out slower than the caller alone would have been, the next short jobs are not shared: eight times
 * as many each time, half as many after a job that was worth it, so that it matters little as long
 * as the core is contended and is soon forgotten afterwards. */
#define MOST_ALONE 128

static double now(void) {
  struct timespec t = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool is_done_alone(mha_pool *pool, const mha_pool_job *job) {
  if (!job->is_short || pool->n_alone == 0)
    return false;
  pool->n_alone--;
  return true;
}

/* The caller did its own tasks in `working` seconds, and the job took `total`. */
static void judge_sharing(mha_pool *pool, const mha_pool_job *job, double working, double total) {
  if (!job->is_short || job->n_own == 0)
    return;
  if (total > working / (double)job->n_own * (double)job->n_tasks) {
    pool->n_alone = pool->next_alone > 0 ? pool->next_alone : 1;
    pool->next_alone = 8 * pool->n_alone < MOST_ALONE ? 8 * pool->n_alone : MOST_ALONE;
  } else
    pool->next_alone /= 2;
}

mha_status mha_pool_run(mha_pool *pool, mha_pool_job *job, int32_t n_workers) {
  start_missing(pool, n_workers);
  if (pool->n_started == 0 || (uint64_t)job->n_tasks > MOST_TASKS || is_done_alone(pool, job))
    return mha_pool_run_alone(job);
  const double start = now();
  open_job(pool, job, n_workers);
  wake_workers(pool, n_workers);
  const mha_status status = run_own_share(pool, job);
  const double working = now() - start;
  wait_until_done(pool, job);
  judge_sharing(pool, job, working, now() - start);
  return status;
}

/* ---- the caller's loop ---- */

/* mha_task. The number comes from the pool, so that a loop that calls an index twice, or one that
 * is out of range, puts no two threads at the same scratch. */
static void visit(void *argument, int64_t index) {
  mha_pool *pool = argument;
  (void)index;
  atomic_fetch_add(&pool->n_visitors, 1);
  (void)run_all(pool, atomic_fetch_add(&pool->next_visitor, 1));
  atomic_fetch_sub(&pool->n_visitors, 1);
}

/* A loop that returns too early may have visitors left, who leave when they find no task. */
mha_status mha_pool_run_by(mha_pool *pool, mha_pool_job *job, int32_t n_workers,
                           mha_parallel_for *parallel_for, void *user) {
  if ((uint64_t)job->n_tasks > MOST_TASKS)
    return mha_pool_run_alone(job);
  open_job(pool, job, n_workers);
  parallel_for(user, n_workers, visit, pool);
  while (atomic_load(&pool->n_visitors) > 0)
    mha_gate_nap();
  const mha_status status = run_own_share(pool, job);
  wait_until_done(pool, job);
  return status;
}
