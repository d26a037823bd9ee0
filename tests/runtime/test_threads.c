/* Threads and processes: many contexts at once, any number of threads, the caller's own pool, the
 * BLAS's thread count, fork. Faults that libraries over a BLAS are known for carry their number. */
#define _GNU_SOURCE 1 /* RTLD_DEFAULT, usleep */
#include "fixture.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static test_fixture fixture; /* one at a time; too large for a stack */

/* ---- What the BLAS says of itself ------------------------------------------------------------ */

typedef int get_int(void);
typedef void set_int(int);

/* The BLAS is behind the library, so its functions are looked up, not linked. */
static void find(const char *name, void *function, size_t bytes) {
  void *symbol = dlsym(RTLD_DEFAULT, name);
  memcpy(function, &symbol, bytes);
}

/* Threads of OpenBLAS; 0 if the BLAS is another one. */
static int blas_threads(void) {
  get_int *get = NULL;
  find("openblas_get_num_threads", &get, sizeof get);
  return get ? get() : 0;
}

static void set_blas_threads(int n) {
  set_int *set = NULL;
  find("openblas_set_num_threads", &set, sizeof set);
  if (set)
    set(n);
}

/* True for OpenBLAS's pthread flavour, the only one that has a process-wide count to hold. */
static bool blas_has_a_pool(void) {
  get_int *get = NULL;
  find("openblas_get_parallel", &get, sizeof get);
  return get && get() == 1;
}

/* ---- Parts ----------------------------------------------------------------------------------- */

static mha_weights *make_weights(void) {
  mha_weights *weights = NULL;
  fixture.config.allocator = NULL;
  if (!fixture.c.core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                NULL);
  return weights;
}

static mha_context *make_context(int32_t threads, uint32_t flags) {
  mha_context *context = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  options.n_threads = threads;
  options.flags = flags;
  test_expect(mha_context_create(&options, &context, NULL), MHA_OK, NULL);
  return context;
}

static void call(mha_context *context, const mha_weights *weights) {
  mha_error error;
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
}

static int process_threads(void) {
  int n = 0;
  DIR *tasks = opendir("/proc/self/task");
  if (!tasks)
    return 0;
  for (struct dirent *entry = readdir(tasks); entry; entry = readdir(tasks))
    n += entry->d_name[0] != '.';
  (void)closedir(tasks);
  return n;
}

static test_case medium_layer(void) {
  return (test_case){.seed = 64,
                     .Lq = 64,
                     .H = 4,
                     .d = 32,
                     .source = TEST_SELF,
                     .biases = TEST_ALL,
                     .causal = true};
}

/* Worth several threads in each of its steps. */
static test_case large_layer(void) {
  const int64_t L = test_small() ? 20 : 200;
  return (test_case){
      .seed = 65, .B = 2, .Lq = L, .H = 4, .d = 40, .source = TEST_SELF, .biases = TEST_ALL};
}

/* ---- One process ----------------------------------------------------------------------------- */

/* The first test of the program, while nobody else has started threads. */
static void b49_thread_teams_do_not_multiply(void **state) {
  enum { THREADS = 3 };
  const test_case c = large_layer();
  (void)state;
  const int before = process_threads(), allowed = THREADS + blas_threads();
  if (before == 0)
    skip(); /* no /proc */
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  for (int round = 0; round < 3; round++) {
    mha_context *context = make_context(THREADS, 0);
    call(context, weights);
    if (process_threads() > allowed)
      test_failed("%d threads run, %d before; %d are ours and %d the BLAS's", process_threads(),
                  before, THREADS, blas_threads());
    mha_context_destroy(context);
  }
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* One of many callers, with a context and an output of its own. */
typedef struct caller {
  pthread_t thread;
  const mha_weights *weights;
  const float *expected;
  int repeats, n_threads;
  int wrong, failed;
} caller;

static void *call_many_times(void *user) {
  caller *me = user;
  const int64_t n = fixture.output.floats;
  float *output = malloc((size_t)n * sizeof *output);
  mha_context *context = NULL;
  mha_context_options options;
  mha_forward_args args = fixture.args;
  MHA_INIT(&options);
  options.n_threads = me->n_threads;
  if (!output || mha_context_create(&options, &context, NULL)) {
    me->failed++;
    free(output);
    return NULL;
  }
  args.output = output;
  for (int i = 0; i < me->repeats; i++) {
    test_fill_poison(output, n);
    me->failed += mha_forward(context, me->weights, &args, NULL) != MHA_OK;
    me->wrong += memcmp(output, me->expected, (size_t)n * sizeof *output) != 0;
  }
  mha_context_destroy(context);
  free(output);
  return NULL;
}

static void many_callers(const test_case *c, int callers, int repeats, int n_threads) {
  caller all[8] = {0};
  test_build(&fixture, c);
  mha_weights *weights = make_weights();
  mha_context *context = make_context(1, 0);
  call(context, weights);
  float *expected = test_gather(&fixture.output);
  const int blas = blas_threads();
  for (int i = 0; i < callers; i++) {
    all[i] = (caller){
        .weights = weights, .expected = expected, .repeats = repeats, .n_threads = n_threads};
    assert_int_equal(pthread_create(&all[i].thread, NULL, call_many_times, &all[i]), 0);
  }
  for (int i = 0; i < callers; i++)
    assert_int_equal(pthread_join(all[i].thread, NULL), 0);
  for (int i = 0; i < callers; i++)
    if (all[i].failed || all[i].wrong)
      test_failed("caller %d of %d: %d calls failed, %d gave other bits than the serial one", i,
                  callers, all[i].failed, all[i].wrong);
  assert_int_equal(blas_threads(), blas); /* although their calls overlapped */
  free(expected);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

static void b41_many_callers_over_one_layer(void **state) {
  const test_case c = medium_layer();
  (void)state;
  many_callers(&c, 8, test_small() ? 3 : 1000, 1);
}

static void many_callers_with_threads_of_their_own(void **state) {
  const test_case c = large_layer();
  (void)state;
  many_callers(&c, 2, test_small() ? 3 : 100, 2);
}

/* One caller in large products of the BLAS itself, with all the BLAS's threads, all the while. */
typedef void sgemm_function(int order, int transpose_a, int transpose_b, int m, int n, int k,
                            float alpha, const float *a, int lda, const float *b, int ldb,
                            float beta, float *c, int ldc);

static atomic_bool stop_products;
static atomic_int wrong_products;

static void *multiply_ones(void *user) {
  enum { N = 200 };
  sgemm_function *sgemm = *(sgemm_function **)user;
  float *a = malloc(sizeof(float) * N * N), *c = malloc(sizeof(float) * N * N);
  for (int i = 0; a && c && i < N * N; i++)
    a[i] = 1.0F;
  while (a && c && !atomic_load(&stop_products)) {
    sgemm(101, 111, 111, N, N, N, 1.0F, a, N, a, N, 0.0F, c, N);
    for (int i = 0; i < N * N; i++)
      if (!test_equal_bits(c[i], (float)N))
        atomic_fetch_add(&wrong_products, 1);
  }
  free(a);
  free(c);
  return NULL;
}

static void b43_beside_products_of_others(void **state) {
  sgemm_function *sgemm = NULL;
  pthread_t other;
  (void)state;
  find("cblas_sgemm", &sgemm, sizeof sgemm);
  if (!sgemm)
    skip(); /* a BLAS linked statically shows no symbols */
  atomic_store(&stop_products, false);
  assert_int_equal(pthread_create(&other, NULL, multiply_ones, &sgemm), 0);
  const test_case c = large_layer();
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  oracle_result result;
  test_ask_oracle(&fixture, &result);
  for (int i = 0; i < (test_small() ? 3 : 100); i++) {
    mha_context *context = make_context(2, 0);
    call(context, weights);
    mha_context_destroy(context);
    test_judge(&fixture, &result);
  }
  atomic_store(&stop_products, true);
  assert_int_equal(pthread_join(other, NULL), 0);
  assert_int_equal(atomic_load(&wrong_products), 0);
  oracle_free(&result);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- A context that is inside a call --------------------------------------------------------- */

typedef struct intruder {
  mha_context *context;
  const mha_weights *weights;
  mha_status status, reserve;
  int calls;
} intruder;

static void *intrude(void *user) {
  intruder *me = user;
  float x[128 * 64] = {0}, output[128 * 64];
  mha_shape shape;
  MHA_INIT(&shape);
  shape.batch = shape.query_length = 1;
  me->status = mha_self_attention(me->context, me->weights, x, 1, 64, output, NULL);
  me->reserve = mha_context_reserve(me->context, me->weights, &shape, NULL);
  return NULL;
}

static void let_intrude(void *user, const mha_trace_step *step) {
  intruder *me = user;
  pthread_t thread;
  (void)step;
  me->calls++;
  me->status = me->reserve = MHA_OK;
  if (pthread_create(&thread, NULL, intrude, me) == 0)
    (void)pthread_join(thread, NULL);
}

static void another_thread_is_refused(void **state) {
  const test_case c = medium_layer();
  (void)state;
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *context = make_context(2, 0);
  intruder other = {.context = context, .weights = weights};
  test_expect(mha_context_trace(context, let_intrude, &other, NULL), MHA_OK, NULL);
  call(context, weights);
  assert_true(other.calls > 0);
  assert_int_equal(other.status, MHA_ERROR_BUSY);
  assert_int_equal(other.reserve, MHA_ERROR_BUSY);
  test_expect(mha_context_trace(context, NULL, NULL, NULL), MHA_OK, NULL);
  call(context, weights);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- The same bits from any number of threads ------------------------------------------------ */

/* Large enough to be worth more than one thread. */
static test_case shape_with_options(int which) {
  const test_case all[] = {
      {.core = true, .B = 1, .Lq = 1, .Lk = 20000, .H = 16, .G = 4, .d = 64},
      {.B = 3,
       .Lq = 270,
       .Lk = 530,
       .H = 4,
       .d = 24,
       .causal = true,
       .key_lengths = true,
       .query_lengths = true,
       .alignment = MHA_ALIGN_BOTTOM_RIGHT,
       .want = TEST_WANT_ALL},
      {.B = 1,
       .Lq = 700,
       .H = 8,
       .d = 16,
       .source = TEST_SELF,
       .window = true,
       .left = 300,
       .right = 20,
       .alibi = true,
       .sinks = true,
       .want = TEST_WANT_LSE},
      {.B = 5, .Lq = 1200, .Lk = 1600, .H = 4, .G = 2, .d = 16, .packed = true, .causal = true},
      {.core = true,
       .B = 2,
       .Lq = 300,
       .Lk = 300,
       .H = 6,
       .G = 3,
       .d = 32,
       .dv = 19,
       .has_mask = true,
       .mask_extents = TEST_FULL_ROWS,
       .has_bias = true,
       .bias_hides = true,
       .softcap = 5.0F,
       .want = TEST_WANT_ALL,
       .stage = MHA_STAGE_FINAL},
      {.B = 16, .Lq = 20, .Lk = 30, .H = 16, .d = 32, .biases = TEST_ALL, .accumulate = true},
  };
  test_case c = all[which];
  if (test_small()) {
    c.Lq = (c.Lq + 7) / 8;
    c.Lk = (c.Lk + 7) / 8;
  }
  return c;
}
enum { SHAPES = 6 };

static void expect_bits_of(const float *output, const float *weights, const float *lse) {
  test_same_output(&fixture, output);
  test_same_bits("weights", (test_shape){{1, 1, 1, fixture.weights_n}}, fixture.weights, weights);
  test_same_bits("lse", (test_shape){{1, 1, 1, fixture.lse_n}}, fixture.lse, lse);
}

static float *copy(const float *numbers, int64_t n) {
  float *twin = malloc((size_t)(n > 0 ? n : 1) * sizeof *twin);
  assert_non_null(twin);
  if (n > 0)
    memcpy(twin, numbers, (size_t)n * sizeof *twin);
  return twin;
}

static void b52_threads_do_not_change_bits(void **state) {
  const int32_t threads[] = {2, 3, 8, 0};
  (void)state;
  for (int which = 0; which < SHAPES; which++) {
    test_case c = shape_with_options(which);
    c.seed = (uint64_t)which;
    test_build(&fixture, &c);
    mha_weights *weights = make_weights();
    mha_context *one = make_context(1, 0);
    call(one, weights);
    mha_context_destroy(one);
    float *output = test_gather(&fixture.output);
    float *probabilities = copy(fixture.weights, fixture.weights_n);
    float *lse = copy(fixture.lse, fixture.lse_n);
    for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
      mha_context *context = make_context(threads[t], 0);
      const int repeats = threads[t] > 3 ? 2 : 5; /* teams above the CPUs are slow */
      for (int repeat = 0; repeat < (test_small() ? 1 : repeats); repeat++) {
        call(context, weights);
        expect_bits_of(output, probabilities, lse);
      }
      mha_context_destroy(context);
    }
    mha_context *alone = make_context(4, MHA_LEAVE_BLAS_ALONE);
    set_blas_threads(1); /* then its products are the same, too */
    call(alone, weights);
    expect_bits_of(output, probabilities, lse);
    mha_context_destroy(alone);
    free(output);
    free(probabilities);
    free(lse);
    mha_weights_destroy(weights);
    test_release(&fixture);
  }
}

#ifdef CPU_COUNT
/* Threads of this process whose affinity is not `expected`. */
static int threads_elsewhere(const cpu_set_t *expected) {
  DIR *tasks = opendir("/proc/self/task");
  int n = 0;
  if (!tasks)
    return 0;
  for (const struct dirent *entry = readdir(tasks); entry; entry = readdir(tasks)) {
    cpu_set_t mask;
    const pid_t id = (pid_t)strtol(entry->d_name, NULL, 10);
    if (id > 0 && sched_getaffinity(id, sizeof mask, &mask) == 0 && !CPU_EQUAL(&mask, expected))
      n++;
  }
  (void)closedir(tasks);
  return n;
}

/* A worker is kept off the caller's CPU while it wakes up, and then may run anywhere again. */
static void workers_come_home(void **state) {
  const test_case c = large_layer();
  cpu_set_t mask;
  (void)state;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0)
    skip();
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *context = make_context(3, 0);
  for (int round = 0; round < 20; round++) {
    call(context, weights);
    if (round % 4 == 0)
      (void)usleep(3000); /* the workers sleep */
  }
  int elsewhere = threads_elsewhere(&mask);
  for (int look = 0; look < 2000 && elsewhere > 0; look++) { /* one is perhaps on its way */
    (void)usleep(5000);
    elsewhere = threads_elsewhere(&mask);
  }
  assert_int_equal(elsewhere, 0);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}
#endif

/* Workers round as the caller does: were it not so, some tasks would come out different. */
static void workers_take_over_the_rounding_mode(void **state) {
  const test_case c = large_layer();
  (void)state;
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *one = make_context(1, 0), *three = make_context(3, 0);
  call(one, weights);
  float *nearest = test_gather(&fixture.output);
  assert_int_equal(fesetround(FE_UPWARD), 0);
  call(one, weights);
  float *upward = test_gather(&fixture.output);
  call(three, weights);
  const int mode = fegetround();
  assert_int_equal(fesetround(FE_TONEAREST), 0);
  assert_int_equal(mode, FE_UPWARD); /* left as it was */
  test_same_output(&fixture, upward);
  if (!test_small()) /* valgrind rounds to nearest whatever it is told */
    assert_memory_not_equal(nearest, upward, (size_t)fixture.output.floats * sizeof(float));
  call(three, weights); /* and no worker keeps it */
  test_same_output(&fixture, nearest);
  free(nearest);
  free(upward);
  mha_context_destroy(one);
  mha_context_destroy(three);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- The caller's own pool ------------------------------------------------------------------- */

/* How often each index was run; what the library asked for. */
typedef struct pool {
  bool reverse, threaded;
  int64_t largest_n;
  int loops;
} pool;

typedef struct pool_item {
  pthread_t thread;
  mha_task *task;
  void *argument;
  int64_t index;
} pool_item;

static void *run_item(void *user) {
  pool_item *item = user;
  item->task(item->argument, item->index);
  return NULL;
}

static void pool_for(void *user, int64_t n, mha_task *task, void *argument) {
  pool *p = user;
  pool_item items[64];
  p->loops++;
  p->largest_n = n > p->largest_n ? n : p->largest_n;
  if (!p->threaded) {
    for (int64_t i = 0; i < n; i++)
      task(argument, p->reverse ? n - 1 - i : i);
    return;
  }
  for (int64_t i = 0; i < n && i < 64; i++) {
    items[i] = (pool_item){.task = task, .argument = argument, .index = i};
    if (pthread_create(&items[i].thread, NULL, run_item, &items[i]))
      abort();
  }
  for (int64_t i = 0; i < n && i < 64; i++)
    (void)pthread_join(items[i].thread, NULL);
}

static void the_callers_pool_gives_the_same_bits(void **state) {
  (void)state;
  for (int which = 0; which < SHAPES; which++) {
    test_case c = shape_with_options(which);
    c.seed = (uint64_t)which;
    test_build(&fixture, &c);
    mha_weights *weights = make_weights();
    mha_context *one = make_context(1, 0);
    call(one, weights);
    mha_context_destroy(one);
    float *output = test_gather(&fixture.output);
    float *probabilities = copy(fixture.weights, fixture.weights_n);
    float *lse = copy(fixture.lse, fixture.lse_n);
    for (int how = 0; how < 3; how++) {
      pool p = {.reverse = how == 1, .threaded = how == 2};
      mha_context *context = NULL;
      mha_context_options options;
      MHA_INIT(&options);
      options.n_threads = 5;
      options.parallel_for = pool_for;
      options.parallel_user = &p;
      test_expect(mha_context_create(&options, &context, NULL), MHA_OK, NULL);
      call(context, weights);
      expect_bits_of(output, probabilities, lse);
      assert_true(p.largest_n <= 5);
      if (test_blas_is_serial())
        assert_int_equal(p.loops, 0); /* no second thread may enter it */
      else
        assert_true(test_small() || (p.loops > 0 && p.largest_n >= 2)); /* else not worth it */
      mha_context_destroy(context);
    }
    free(output);
    free(probabilities);
    free(lse);
    mha_weights_destroy(weights);
    test_release(&fixture);
  }
}

/* ---- The BLAS's thread count ----------------------------------------------------------------- */

/* What a callback sees and does in the middle of a call. */
typedef struct observer {
  int seen, calls;
  int change_to;       /* 0 = leave it */
  mha_context *second; /* a call within the call, in a context of its own */
  const mha_weights *weights;
  int after_second;
} observer;

static void look_at_the_count(void *user, const mha_trace_step *step) {
  observer *o = user;
  (void)step;
  if (o->calls++ > 0)
    return;
  o->seen = blas_threads();
  if (o->change_to)
    set_blas_threads(o->change_to);
  if (o->second) {
    static float x[64 * 128], output[64 * 128];
    if (mha_self_attention(o->second, o->weights, x, 1, 64, output, NULL))
      o->after_second = -1;
    else
      o->after_second = blas_threads();
  }
}

static observer observe(uint32_t flags, int change_to, bool nested) {
  const test_case c = medium_layer();
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *context = make_context(2, flags);
  observer o = {.change_to = change_to, .weights = weights};
  o.second = nested ? make_context(2, flags) : NULL;
  test_expect(mha_context_trace(context, look_at_the_count, &o, NULL), MHA_OK, NULL);
  call(context, weights);
  mha_context_destroy(o.second);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
  return o;
}

static void b45_the_count_is_held_and_restored(void **state) {
  (void)state;
  if (!blas_has_a_pool())
    skip();
  const int before = blas_threads();
  set_blas_threads(3);
  assert_int_equal(blas_threads(), 3);
  assert_int_equal(observe(0, 0, false).seen, 1);
  assert_int_equal(blas_threads(), 3);
  /* two calls that overlap: the first one still computes when the second one ends */
  assert_int_equal(observe(0, 0, true).after_second, 1);
  assert_int_equal(blas_threads(), 3);
  /* somebody changed it meanwhile, and means it */
  assert_int_equal(observe(0, 2, false).seen, 1);
  assert_int_equal(blas_threads(), 2);
  /* the opt-out never touches it */
  set_blas_threads(3);
  assert_int_equal(observe(MHA_LEAVE_BLAS_ALONE, 0, true).after_second, 3);
  assert_int_equal(blas_threads(), 3);
  set_blas_threads(before);
}

static void b45_the_count_is_restored_after_errors(void **state) {
  test_allocator allocator;
  mha_error error;
  const test_case c = medium_layer();
  (void)state;
  test_build(&fixture, &c);
  const int before = blas_threads();
  mha_weights *weights = make_weights();
  assert_int_equal(blas_threads(), before);
  test_allocator_init(&allocator);
  mha_context *context = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  options.allocator = &allocator.mha;
  test_expect(mha_context_create(&options, &context, NULL), MHA_OK, NULL);
  assert_int_equal(blas_threads(), before);
  allocator.fail_at = allocator.calls + 1; /* fails inside the guard, if anywhere */
  test_expect(mha_forward(context, weights, &fixture.args, &error), MHA_ERROR_MEMORY, &error);
  assert_int_equal(blas_threads(), before);
  fixture.args.output = (float *)(uintptr_t)fixture.args.query;
  test_expect(mha_forward(context, weights, &fixture.args, &error), MHA_ERROR_OVERLAP, &error);
  assert_int_equal(blas_threads(), before);
  test_expect(mha_forward(context, weights, NULL, &error), MHA_ERROR_NULL, &error);
  assert_int_equal(blas_threads(), before);
  fixture.args.output = fixture.output.data;
  test_expect(mha_forward(context, weights, &fixture.args, &error), MHA_OK, &error);
  assert_int_equal(blas_threads(), before);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  assert_int_equal(blas_threads(), before);
  test_allocator_check(&allocator);
  test_release(&fixture);
}

/* ---- fork ------------------------------------------------------------------------------------ */

/* Waits at most 30 seconds; kills and fails otherwise. Returns the child's exit status. */
static int wait_for(pid_t child) {
  for (int tenths = 0; tenths < 300 * (test_small() ? 10 : 1); tenths++) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child)
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    (void)usleep(100000);
  }
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  return -2;
}

/* In a child: no cmocka, only an exit status. */
static int child_calls(mha_context *context, const mha_weights *weights, const float *expected) {
  test_poison_results(&fixture);
  if (mha_forward(context, weights, &fixture.args, NULL))
    return 10;
  return memcmp(fixture.output.data, expected, (size_t)fixture.output.floats * sizeof *expected)
             ? 11
             : 0;
}

static int child_work(mha_context *context, const mha_weights *weights, const float *expected) {
  mha_context *fresh = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  options.n_threads = 3;
  int status = child_calls(context, weights, expected);
  if (!status && mha_context_create(&options, &fresh, NULL))
    status = 12;
  if (!status)
    status = child_calls(fresh, weights, expected);
  mha_context_destroy(fresh);
  mha_context_destroy(context);
  return status;
}

static void b46_a_child_computes_too(void **state) {
  const test_case c = {.seed = 4,
                       .Lq = test_small() ? 32 : 256,
                       .H = 8,
                       .d = 64,
                       .source = TEST_SELF,
                       .biases = TEST_ALL};
  (void)state;
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *context = make_context(4, 0);
  call(context, weights);
  float *expected = test_gather(&fixture.output);
  const int before = blas_threads();
  for (int round = 0; round < 3; round++) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
      _exit(child_work(context, weights, expected));
    assert_int_equal(wait_for(child), 0);
    call(context, weights); /* the parent goes on */
    test_same_output(&fixture, expected);
    assert_int_equal(blas_threads(), before);
  }
  free(expected);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* fork while another thread is inside a call: the child's idle context still works, and the count
 * that the other call holds is not held for ever. */
typedef struct worker {
  mha_context *context;
  const mha_weights *weights;
  atomic_bool stop;
  atomic_int calls;
  float output[2 * 200 * 160];
} worker;

static void *keep_calling(void *user) {
  worker *w = user;
  mha_forward_args args = fixture.args;
  args.output = w->output;
  while (!atomic_load(&w->stop))
    if (mha_forward(w->context, w->weights, &args, NULL) == MHA_OK)
      atomic_fetch_add(&w->calls, 1);
  return NULL;
}

static void a_child_of_a_busy_parent(void **state) {
  const test_case c = large_layer();
  pthread_t thread;
  (void)state;
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *idle = make_context(2, 0);
  worker w = {.context = make_context(2, 0), .weights = weights};
  call(idle, weights);
  float *expected = test_gather(&fixture.output);
  assert_int_equal(pthread_create(&thread, NULL, keep_calling, &w), 0);
  while (atomic_load(&w.calls) == 0)
    (void)usleep(1000);
  int status = 0;
  for (int round = 0; round < (test_small() ? 1 : 10) && status == 0; round++) {
    const pid_t child = fork();
    if (child == 0) {
      const int outcome = child_calls(idle, weights, expected);
      mha_context_destroy(idle); /* the child's own copy */
      _exit(outcome);
    }
    status = child < 0 ? -3 : wait_for(child);
  }
  atomic_store(&w.stop, true);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(status, 0);
  call(idle, weights);
  test_same_output(&fixture, expected);
  free(expected);
  mha_context_destroy(idle);
  mha_context_destroy(w.context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* A BLAS locks its buffers for a moment in each product: a child must not inherit such a lock held.
 * The shorter the calls the more often they pass there: without the wait before a fork, one child
 * in fifteen hangs, where with 64 rows of 16 numbers it is one in seventy or more. */
static void many_children_of_busy_parents(void **state) {
  const test_case c = {.seed = 6, .Lq = 4, .H = 4, .d = 4, .source = TEST_SELF};
  pthread_t threads[2];
  worker workers[2];
  (void)state;
  test_build(&fixture, &c);
  mha_weights *weights = make_weights();
  mha_context *idle = make_context(1, 0);
  call(idle, weights);
  float *expected = test_gather(&fixture.output);
  for (int t = 0; t < 2; t++) {
    workers[t] = (worker){.context = make_context(1, 0), .weights = weights};
    assert_int_equal(pthread_create(&threads[t], NULL, keep_calling, &workers[t]), 0);
  }
  int status = 0;
  for (int round = 0; round < (test_small() ? 5 : 100) && status == 0; round++) {
    const pid_t child = fork();
    if (child == 0)
      _exit(child_calls(idle, weights, expected));
    int state_of_child = 0;
    alarm(60); /* a child that waits for ever would make this program wait too */
    status = child < 0 || waitpid(child, &state_of_child, 0) != child ? -3 : state_of_child;
    alarm(0);
  }
  for (int t = 0; t < 2; t++) {
    atomic_store(&workers[t].stop, true);
    assert_int_equal(pthread_join(threads[t], NULL), 0);
    mha_context_destroy(workers[t].context);
  }
  assert_int_equal(status, 0);
  free(expected);
  mha_context_destroy(idle);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- References ------------------------------------------------------------------------------ */

static void *retain_and_destroy(void *user) {
  mha_weights *weights = user;
  for (int i = 0; i < 10000; i++)
    mha_weights_destroy(mha_weights_retain(weights));
  mha_weights_destroy(weights);
  return NULL;
}

static void references_are_counted_from_any_thread(void **state) {
  pthread_t threads[4];
  mha_weights *weights = NULL;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1, .H = 2, .d = 2});
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  for (int i = 0; i < 4; i++)
    assert_int_equal(
        pthread_create(&threads[i], NULL, retain_and_destroy, mha_weights_retain(weights)), 0);
  for (int i = 0; i < 4; i++)
    assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_int_equal(fixture.allocator.live, 1);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(b49_thread_teams_do_not_multiply),
      /* while there is little memory: a fork copies what tells where it is */
      cmocka_unit_test(b46_a_child_computes_too),
      cmocka_unit_test(a_child_of_a_busy_parent),
      cmocka_unit_test(many_children_of_busy_parents),
      cmocka_unit_test(b41_many_callers_over_one_layer),
      cmocka_unit_test(many_callers_with_threads_of_their_own),
      cmocka_unit_test(b43_beside_products_of_others),
      cmocka_unit_test(another_thread_is_refused),
      cmocka_unit_test(b52_threads_do_not_change_bits),
#ifdef CPU_COUNT
      cmocka_unit_test(workers_come_home),
#endif
      cmocka_unit_test(workers_take_over_the_rounding_mode),
      cmocka_unit_test(the_callers_pool_gives_the_same_bits),
      cmocka_unit_test(b45_the_count_is_held_and_restored),
      cmocka_unit_test(b45_the_count_is_restored_after_errors),
      cmocka_unit_test(references_are_counted_from_any_thread),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
