/* The process round a call: limits that keep threads away, forks in odd places, loops of the
 * caller's that do not do what they should. Whatever happens, the bits are the same and nothing is
 * printed. */
#define _GNU_SOURCE 1 /* usleep, sched_setaffinity, setenv */
#include "fixture.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static test_fixture fixture; /* one at a time; too large for a stack */
static mha_weights *layer;
static float *expected; /* the output of one thread */
static size_t output_bytes;

/* ---- A layer that is worth many threads ------------------------------------------------------ */

static mha_context *make_context(const mha_context_options *given, int32_t threads) {
  mha_context *context = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  if (given)
    options = *given;
  options.n_threads = threads;
  test_expect(mha_context_create(&options, &context, NULL), MHA_OK, NULL);
  return context;
}

/* The layer with L tokens, and what one thread makes of it if that is wanted. */
static void open_layer(int64_t B, int64_t L, bool compute) {
  const test_case c = {
      .seed = 81, .B = B, .Lq = L, .H = 8, .d = 16, .source = TEST_SELF, .biases = TEST_ALL};
  test_build(&fixture, &c);
  fixture.config.allocator = NULL;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &layer, NULL), MHA_OK, NULL);
  if (!compute)
    return;
  mha_context *alone = make_context(NULL, 1);
  test_expect(test_call(&fixture, alone, layer, NULL), MHA_OK, NULL);
  mha_context_destroy(alone);
  expected = test_gather(&fixture.output);
  output_bytes = (size_t)fixture.output.floats * sizeof *expected;
}

static void close_layer(void) {
  free(expected);
  mha_weights_destroy(layer);
  test_release(&fixture);
}

/* One call into `output`; 0, or what went wrong. No cmocka, so that children can use it. */
static int call_into(mha_context *context, float *output) {
  mha_forward_args args = fixture.args;
  args.output = output;
  memset(output, 0x5a, output_bytes);
  if (mha_forward(context, layer, &args, NULL) != MHA_OK)
    return 10;
  return memcmp(output, expected, output_bytes) == 0 ? 0 : 11;
}

static int call(mha_context *context) {
  return call_into(context, fixture.output.data);
}

/* ---- Processes of their own ------------------------------------------------------------------ */

static const char *program;

/* Runs this program again for one scenario, a number beside its name, and reads its stdout and
 * stderr; fails unless it ends by itself within some minutes with status 0 and prints nothing. */
static void expect_quiet_success(const char *scenario, long number) {
  int channel[2];
  char printed[400];
  char text[32];
  (void)snprintf(text, sizeof text, "%ld", number);
  assert_int_equal(pipe(channel), 0);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    (void)dup2(channel[1], 1);
    (void)dup2(channel[1], 2);
    /* OpenBLAS's own fork handler waits for its threads, which may wait for a lock that the
     * interrupted thread has: with that pool no library can help a signal handler that forks */
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 1);
    (void)alarm(300);
    (void)execl(program, program, scenario, text, (char *)NULL);
    _exit(20);
  }
  (void)close(channel[1]);
  size_t length = 0;
  for (ssize_t n = 1; n > 0; length += n > 0 ? (size_t)n : 0)
    n = read(channel[0], printed + length, sizeof printed - 1 - length);
  printed[length] = '\0';
  (void)close(channel[0]);
  int status = 0;
  assert_true(waitpid(child, &status, 0) == child);
  if (status != 0 || length > 0)
    test_failed("%s %ld ended with %d, signal %d, and printed \"%s\"", scenario, number,
                WEXITSTATUS(status), WTERMSIG(status), printed);
}

/* ---- As many threads as there are ------------------------------------------------------------ */

static bool blas_is_openblas(void) {
  char text[1024] = "";
  (void)mha_build_info(text, sizeof text);
  return strstr(text, "blas: OpenBLAS") != NULL;
}

static size_t address_space(void) {
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file)
    return 0;
  const int n = fscanf(file, "%ld", &pages);
  (void)fclose(file);
  return n == 1 ? (size_t)pages * (size_t)sysconf(_SC_PAGESIZE) : 0;
}

/* Memory that is in the address space already. */
static _Alignas(64) char heap[96 << 20];
static size_t heap_used;

static void *take_from_heap(void *user, size_t bytes, size_t alignment) {
  const size_t begin = (heap_used + alignment - 1) / alignment * alignment;
  (void)user;
  if (bytes > sizeof heap - begin)
    return NULL;
  heap_used = begin + bytes;
  return heap + begin;
}

static void leave_in_heap(void *user, void *memory, size_t bytes) {
  (void)user, (void)memory, (void)bytes;
}

/* With `spare` bytes of address space more than now. */
static int calls_under_a_limit(long megabytes) {
  const size_t spare = (size_t)megabytes << 20;
  const mha_allocator allocator = {NULL, take_from_heap, leave_in_heap};
  mha_context *context = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  options.n_threads = 40;
  options.allocator = &allocator;
  if (mha_context_create(&options, &context, NULL) != MHA_OK)
    return 12;
  mha_context *first = make_context(NULL, 1);
  if (call(first) != 0) /* the BLAS has what it needs for one thread, and for its own */
    return 19;
  mha_context_destroy(first);
  const struct rlimit limit = {address_space() + spare, address_space() + spare};
  if (setrlimit(RLIMIT_AS, &limit) != 0)
    return 13;
  int status = 0;
  for (int round = 0; round < 3 && status == 0; round++)
    status = call(context);
  mha_context_destroy(context);
  return status;
}

/* Threads have stacks, and the BLAS has buffers for each that is in a product: there may be room
 * for none, for some stacks, for some buffers. */
static void a_limit_of_memory_costs_threads_only(void **state) {
  const long megabytes[] = {1, 6, 100, 300, 1000};
  (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip(); /* they take address space themselves, and end the process without it */
#endif
  if (address_space() == 0)
    skip(); /* no /proc */
  for (size_t k = 0; k < sizeof megabytes / sizeof *megabytes; k++)
    expect_quiet_success("limit", megabytes[k]);
}

/* Packed rows of which the last two belong to no sequence: a failure leaves those too as they were.
 */
static bool packed_rows_stay(mha_context *context) {
  enum { L = 6 };
  static const float numbers[L] = {1, 2, 3, 4, 5, 6};
  static const int64_t starts[] = {0, L - 2};
  float output[L] = {7, 7, 7, 7, 7, 7};
  const mha_tensor tensor = {numbers, 1, L, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  mha_rules rules;
  mha_attend_args args;
  mha_error error;
  MHA_INIT(&rules);
  MHA_INIT(&args);
  rules.query_starts = rules.key_starts = starts;
  args.n_sequences = 1;
  args.output = output;
  args.rules = &rules;
  bool same = mha_attend(context, &tensor, &tensor, &tensor, &args, &error) == MHA_ERROR_MEMORY;
  for (int i = 0; i < L; i++)
    same = same && output[i] == 7.0F;
  return same;
}

/* No thread was ever in a product, and there is no room for the first. */
static int calls_without_memory(long megabytes) {
  const mha_allocator allocator = {NULL, take_from_heap, leave_in_heap};
  mha_context *context = NULL;
  mha_context_options options;
  mha_error error;
  MHA_INIT(&options);
  options.n_threads = 3;
  options.allocator = &allocator;
  if (mha_context_create(&options, &context, NULL) != MHA_OK)
    return 12;
  const size_t most = address_space() + ((size_t)megabytes << 20);
  const struct rlimit limit = {most, most};
  if (setrlimit(RLIMIT_AS, &limit) != 0)
    return 13;
  const mha_status status = mha_forward(context, layer, &fixture.args, &error);
  const bool stay = packed_rows_stay(context);
  mha_context_destroy(context);
  if (!stay)
    return 23;
  return status == MHA_ERROR_MEMORY && strstr(error.message, "the BLAS finds no memory") ? 0 : 22;
}

/* OpenBLAS would ask the system again for ever. */
static void no_memory_for_the_blas_is_an_error(void **state) {
  (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip();
#endif
  if (address_space() == 0 || !blas_is_openblas())
    skip();
  expect_quiet_success("no_memory", 6);
}

/* ---- fork in odd places ---------------------------------------------------------------------- */

static volatile sig_atomic_t forks, children_failed;

/* A child of a signal handler may do little; it ends at once. */
static void fork_here(int number) {
  (void)number;
  const pid_t child = fork();
  if (child == 0)
    _exit(0);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
    children_failed++;
  forks++;
}

typedef struct interrupter {
  pthread_t target;
  atomic_bool stop;
} interrupter;

/* To that thread alone: one of the BLAS's own would wait for itself when it forks. */
static void *interrupt_often(void *user) {
  interrupter *i = user;
  while (!atomic_load(&i->stop)) {
    const int seen = forks;
    (void)usleep(700);
    (void)pthread_kill(i->target, SIGUSR1);
    while (forks == seen && !atomic_load(&i->stop)) /* otherwise the call itself never gets on */
      (void)usleep(100);
  }
  return NULL;
}

static int calls_interrupted_by_forks(long threads) {
  mha_context *context = make_context(NULL, (int32_t)threads);
  interrupter i = {.target = pthread_self()};
  pthread_t thread;
  int status = call(context); /* the C library's allocator does not bear a fork in its middle */
  if (signal(SIGUSR1, fork_here) == SIG_ERR ||
      pthread_create(&thread, NULL, interrupt_often, &i) != 0)
    return 15;
  while (status == 0 && forks < (test_small() ? 3 : 200))
    status = call(context);
  atomic_store(&i.stop, true);
  (void)pthread_join(thread, NULL);
  mha_context_destroy(context);
  return status ? status : children_failed > 0 ? 16 : 0;
}

/* A task of the interrupted thread cannot end before its handler does. */
static void a_signal_handler_may_fork(void **state) {
  (void)state;
  expect_quiet_success("interrupted", 1);
  expect_quiet_success("interrupted", 3);
}

typedef struct caller {
  pthread_t thread;
  mha_context *context;
  float *output;
  int status;
} caller;

static atomic_bool stop_calling;

static void *call_until_stopped(void *user) {
  caller *c = user;
  while (c->status == 0 && !atomic_load(&stop_calling))
    c->status = call_into(c->context, c->output);
  return NULL;
}

/* On one CPU: a thread of real-time priority that waits without sleeping keeps the other from
 * ending its task, for ever or, where the system leaves plain threads a little, for a second each
 * time. */
static int real_time_forks(long rounds) {
  caller other = {.context = make_context(NULL, 1), .output = malloc(output_bytes)};
  const struct sched_param priority = {.sched_priority = 1};
  cpu_set_t one;
  int status = 0;
  CPU_ZERO(&one);
  CPU_SET((size_t)sched_getcpu(), &one);
  if (!other.output || sched_setaffinity(0, sizeof one, &one) != 0 ||
      pthread_create(&other.thread, NULL, call_until_stopped, &other) != 0)
    return 17;
  if (pthread_setschedparam(pthread_self(), SCHED_FIFO, &priority) == 0) {
    for (int round = 0; round < rounds && status == 0; round++) {
      (void)usleep(3000);
      const pid_t child = fork();
      if (child == 0)
        _exit(0);
      if (child < 0 || waitpid(child, &status, 0) != child)
        status = 18;
    }
  }
  atomic_store(&stop_calling, true);
  (void)pthread_join(other.thread, NULL);
  mha_context_destroy(other.context);
  free(other.output);
  return status ? status : other.status;
}

/* Whether this process may give a thread real-time priority. */
static bool may_be_real_time(void) {
  const struct sched_param real = {.sched_priority = 1};
  const struct sched_param plain = {.sched_priority = 0};
  const bool may = sched_setscheduler(0, SCHED_FIFO, &real) == 0;
  return sched_setscheduler(0, SCHED_OTHER, &plain) == 0 && may;
}

static void a_real_time_thread_may_fork(void **state) {
  (void)state;
  if (!may_be_real_time())
    skip();
  expect_quiet_success("real_time", 500); /* a second each would be too long */
}

/* ---- The caller's loop ----------------------------------------------------------------------- */

enum { BY_ONE, BY_NONE, BY_HALF, TWICE, OUT_OF_RANGE, FROM_THREADS, LATE };

typedef struct odd_loop {
  int kind;
  int64_t calls;
} odd_loop;

typedef struct item {
  pthread_t thread;
  mha_task *task;
  void *argument;
  int64_t index;
} item;

static void *run_item(void *user) {
  const item *i = user;
  i->task(i->argument, i->index);
  return NULL;
}

/* Every thread is told the same index. */
static void run_in_threads(int64_t n, mha_task *task, void *argument) {
  item items[8];
  for (int64_t k = 0; k < n; k++) {
    items[k] = (item){.task = task, .argument = argument, .index = 1};
    assert_int_equal(pthread_create(&items[k].thread, NULL, run_item, &items[k]), 0);
  }
  for (int64_t k = 0; k < n; k++)
    (void)pthread_join(items[k].thread, NULL);
}

static mha_task *late_task;
static void *late_argument;

static void odd_parallel_for(void *user, int64_t n, mha_task *task, void *argument) {
  odd_loop *loop = user;
  loop->calls++;
  if (loop->kind == FROM_THREADS)
    run_in_threads(n, task, argument);
  if (loop->kind == LATE) { /* what this call leaves to do, the next one does */
    if (late_task)
      late_task(late_argument, 0);
    late_task = task;
    late_argument = argument;
  }
  for (int64_t k = 0; k < n; k++) {
    if (loop->kind == TWICE || (loop->kind == BY_HALF && k % 2 == 0) ||
        (loop->kind == BY_ONE && k == 0))
      task(argument, k);
    if (loop->kind == TWICE)
      task(argument, k);
    if (loop->kind == OUT_OF_RANGE)
      task(argument, k == 0 ? INT64_MAX : -k);
  }
}

static void any_loop_gives_the_same_bits(void **state) {
  (void)state;
  open_layer(4, 160, true);
  for (int kind = BY_ONE; kind <= LATE; kind++) {
    odd_loop loop = {.kind = kind};
    mha_context_options options;
    MHA_INIT(&options);
    options.parallel_for = odd_parallel_for;
    options.parallel_user = &loop;
    mha_context *context = make_context(&options, 4);
    late_task = NULL;
    for (int round = 0; round < 3; round++) {
      test_note("loop %d, round %d", kind, round);
      const int status = call(context);
      if (status != 0)
        test_failed("%s", status == 10 ? "an error" : "other bits");
    }
    mha_context_destroy(context);
    if (!test_blas_is_serial() && loop.calls == 0)
      test_failed("the loop was never called");
  }
  close_layer();
}

/* ---- The program ----------------------------------------------------------------------------- */

typedef struct scenario {
  const char *name;
  int (*run)(long number);
  int64_t B, L;   /* of the layer; L under MHA_TEST_SMALL 40 */
  bool untouched; /* nothing was multiplied before */
} scenario;

static int run_scenario(const char *name, long number) {
  const scenario scenarios[] = {{"limit", calls_under_a_limit, 4, 160, false},
                                {"no_memory", calls_without_memory, 4, 160, true},
                                {"interrupted", calls_interrupted_by_forks, 4, 160, false},
                                {"real_time", real_time_forks, 4, 160, false}};
  int status = 21;
  for (size_t k = 0; k < sizeof scenarios / sizeof *scenarios; k++) {
    const scenario *s = &scenarios[k];
    if (strcmp(name, s->name) != 0)
      continue;
    open_layer(s->B, test_small() ? 40 : s->L, !s->untouched);
    status = s->run(number);
    close_layer();
  }
  return status;
}

int main(int argc, char **argv) {
  program = argv[0];
  if (argc == 3)
    return run_scenario(argv[1], strtol(argv[2], NULL, 10));
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_limit_of_memory_costs_threads_only),
      cmocka_unit_test(no_memory_for_the_blas_is_an_error),
      cmocka_unit_test(a_signal_handler_may_fork),
      cmocka_unit_test(a_real_time_thread_may_fork),
      cmocka_unit_test(any_loop_gives_the_same_bits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
