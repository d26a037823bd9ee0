/* The pool of workers: each task runs once, on whom; and what it does when a worker keeps the
 * caller waiting longer than the caller would have worked alone. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "support.h"

#include "runtime/fork.h"
#include "runtime/pool.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

static test_allocator allocator;
static mha_pool *pool;

static void open_pool(int32_t n_workers) {
  test_allocator_init(&allocator);
  mha_fork_watch();
  pool = mha_pool_create(&allocator.mha, n_workers);
  assert_non_null(pool);
}

static void close_pool(void) {
  mha_pool_destroy(pool);
  test_allocator_check(&allocator);
}

static double seconds(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_for(double time) {
  const struct timespec t = {(time_t)time, (long)(1e9 * (time - (double)(time_t)time))};
  (void)nanosleep(&t, NULL);
}

/* ---- jobs ---- */

enum { MOST = 64 };

typedef struct record {
  pthread_t caller;
  atomic_int runs[MOST];
  atomic_int n_by_others; /* tasks that other threads than the caller's began */
  bool shares;            /* the caller's first task waits until another thread has begun one */
  bool lingers;           /* others take twenty times as long as has passed since the job began */
  double start;
} record;

static void run_task(void *argument, int64_t index, int32_t worker) {
  record *r = argument;
  (void)worker;
  atomic_fetch_add(&r->runs[index], 1);
  if (!pthread_equal(pthread_self(), r->caller)) {
    atomic_fetch_add(&r->n_by_others, 1);
    if (r->lingers)
      sleep_for(20 * (seconds() - r->start) + 0.001);
    return;
  }
  while (r->shares && atomic_load(&r->n_by_others) == 0)
    sleep_for(1e-5);
}

/* Runs a job of so many tasks on two threads, each task once; returns how many other threads did.
 */
static int run_job(int64_t n_tasks, bool is_short, bool shares, bool lingers) {
  record r;
  memset(&r, 0, sizeof r);
  r.caller = pthread_self();
  r.shares = shares;
  r.lingers = lingers;
  r.start = seconds();
  mha_pool_job job = {.run = run_task, .argument = &r, .n_tasks = n_tasks, .is_short = is_short};
  assert_int_equal(mha_pool_run(pool, &job, 2), MHA_OK);
  for (int64_t k = 0; k < n_tasks; k++)
    assert_int_equal(atomic_load(&r.runs[k]), 1);
  return atomic_load(&r.n_by_others);
}

static void every_task_runs_once(void **state) {
  (void)state;
  open_pool(2);
  for (int64_t n = 1; n <= MOST; n++)
    (void)run_job(n, n % 2 == 0, false, false);
  assert_true(run_job(8, false, true, false) >= 1);
  close_pool();
}

/* A worker that is late by far makes the caller do the next short job alone, then eight; others
 * are shared all the while. */
static void short_jobs_are_done_alone_after_a_late_worker(void **state) {
  (void)state;
  open_pool(2);
  for (int round = 0, alone = 1; round < 3; round++, alone *= 8) {
    assert_true(run_job(8, true, true, true) >= 1);
    for (int k = 0; k < alone; k++) {
      test_note("round %d, job %d", round, k);
      assert_int_equal(run_job(8, true, false, false), 0);
      if (k == 0)
        assert_true(run_job(8, false, true, false) >= 1);
    }
  }
  close_pool();
}

/* What a long job takes says nothing about short ones. */
static void a_late_worker_in_a_long_job_changes_nothing(void **state) {
  (void)state;
  open_pool(2);
  assert_true(run_job(8, false, true, true) >= 1);
  assert_true(run_job(8, true, true, false) >= 1);
  close_pool();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_task_runs_once),
      cmocka_unit_test(short_jobs_are_done_alone_after_a_late_worker),
      cmocka_unit_test(a_late_worker_in_a_long_job_changes_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
