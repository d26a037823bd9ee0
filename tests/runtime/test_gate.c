/* How many threads are inside products at once: no more than the BLAS was built for, however many
 * were asked for, in one context or in many. This program has its own cblas_sgemm, which the
 * library calls instead of the BLAS's; it counts who is inside, keeps them there for a moment so
 * that all come who may, and passes the call on. */
#define _GNU_SOURCE 1 /* RTLD_NEXT, usleep */
#include "fixture.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void sgemm_function(int order, int transpose_a, int transpose_b, int m, int n, int k,
                            float alpha, const float *a, int lda, const float *b, int ldb,
                            float beta, float *c, int ldc);
sgemm_function cblas_sgemm;

static sgemm_function *blas_sgemm;
static atomic_int inside, most;

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  const int now = atomic_fetch_add(&inside, 1) + 1;
  int before = atomic_load(&most);
  while (now > before && !atomic_compare_exchange_weak(&most, &before, now))
    continue;
  (void)usleep(20000);
  blas_sgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  atomic_fetch_sub(&inside, 1);
}

/* The number that the BLAS itself tells; 0 = it has no such limit. */
static int blas_limit(void) {
  char text[1024] = "";
  (void)mha_build_info(text, sizeof text);
  const char *limit = strstr(text, "MAX_THREADS=");
  return limit ? (int)strtol(limit + strlen("MAX_THREADS="), NULL, 10) : 0;
}

static int set_up(void **state) {
  void *symbol = dlsym(RTLD_NEXT, "cblas_sgemm");
  (void)state;
  memcpy(&blas_sgemm, &symbol, sizeof blas_sgemm);
  return symbol ? 0 : -1;
}

static mha_context *make_context(int32_t threads) {
  mha_context *context = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  options.n_threads = threads;
  test_expect(mha_context_create(&options, &context, NULL), MHA_OK, NULL);
  return context;
}

static void expect_most(int limit) {
  if (atomic_load(&most) > limit)
    test_failed("%d threads were in products at once; OpenBLAS takes %d", atomic_load(&most),
                limit);
}

static test_fixture fixture; /* too large for a stack */

/* 128 tasks of attention, each worth a thread. */
static void one_context_of_many_threads(void **state) {
  const int limit = blas_limit();
  const test_case c = {.seed = 7, .core = true, .B = 4, .Lq = 1024, .Lk = 1024, .H = 8, .d = 16};
  (void)state;
  if (limit == 0 || limit >= 128 || test_small() || test_blas_is_serial())
    skip();
  test_build(&fixture, &c);
  mha_context *context = make_context(1024);
  atomic_store(&most, 0);
  test_expect(test_call(&fixture, context, NULL, NULL), MHA_OK, NULL);
  expect_most(limit);
  if (atomic_load(&most) < 2)
    test_failed("nothing was done side by side");
  mha_context_destroy(context);
  test_release(&fixture);
}

enum { CALLERS = 200, LENGTH = 24, SIZE = 16 };

typedef struct caller {
  pthread_t thread;
  mha_context *context;
  mha_status status;
  float output[LENGTH * SIZE];
} caller;

static caller callers[CALLERS];
static float numbers[LENGTH * SIZE];

static void *call(void *user) {
  caller *me = user;
  const mha_tensor tensor = {
      .data = numbers, .batch = 1, .length = LENGTH, .heads = 1, .size = SIZE};
  mha_attend_args args;
  MHA_INIT(&args);
  args.output = me->output;
  me->status = mha_attend(me->context, &tensor, &tensor, &tensor, &args, NULL);
  return NULL;
}

static void many_contexts_of_one_thread(void **state) {
  const int limit = blas_limit();
  pthread_attr_t small;
  (void)state;
  if (limit == 0 || limit >= CALLERS || test_blas_is_serial())
    skip();
  for (int i = 0; i < LENGTH * SIZE; i++)
    numbers[i] = (float)(i * 37 % 101 - 50) / 50.0F;
  (void)pthread_attr_init(&small);
  (void)pthread_attr_setstacksize(&small, 1 << 20);
  atomic_store(&most, 0);
  for (int k = 0; k < CALLERS; k++) {
    callers[k].context = make_context(1);
    assert_int_equal(pthread_create(&callers[k].thread, &small, call, &callers[k]), 0);
  }
  for (int k = 0; k < CALLERS; k++) {
    assert_int_equal(pthread_join(callers[k].thread, NULL), 0);
    assert_int_equal(callers[k].status, MHA_OK);
    assert_memory_equal(callers[k].output, callers[0].output, sizeof callers[k].output);
    mha_context_destroy(callers[k].context);
  }
  expect_most(limit);
  if (atomic_load(&most) < 2)
    test_failed("nothing was done side by side");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(one_context_of_many_threads),
      cmocka_unit_test(many_contexts_of_one_thread),
  };
  return cmocka_run_group_tests(tests, set_up, NULL);
}
