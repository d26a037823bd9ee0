/* What one process does wrong or has no room for is the same status with the same message on all,
 * at once, and leaves everything as it was; then the next call succeeds. */
#include "folder.h"
#include "processes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static int n_processes;
static int rank;

/* ---- a layer to go wrong with ---- */

typedef struct scene {
  test_fixture f;
  mha_mpi_team *team;
  mha_mpi_weights *weights;
  mha_context *context;
  test_allocator team_allocator;
  double began;
} scene;

static scene s;

static test_case make_case(void) {
  return (test_case){.seed = 5,
                     .B = 2,
                     .Lq = 6,
                     .H = 2 * n_processes,
                     .G = n_processes,
                     .d = 4,
                     .Eq = 8,
                     .source = TEST_SELF,
                     .biases = TEST_ALL,
                     .query_lengths = true,
                     .want = TEST_WANT_LSE};
}

static void begin(int32_t by_heads) {
  const test_case c = make_case();
  mha_error error;
  memset(&s, 0, sizeof s);
  test_build(&s.f, &c);
  test_allocator_init(&s.team_allocator);
  s.team = test_mpi_team(by_heads, &s.team_allocator.mha);
  s.weights = test_mpi_share(s.team, &s.f);
  test_expect(mha_context_create(&s.f.options, &s.context, &error), MHA_OK, &error);
}

static void end(void) {
  mha_context_destroy(s.context);
  mha_mpi_weights_destroy(s.weights);
  mha_mpi_team_destroy(s.team);
  test_allocator_check(&s.team_allocator);
  test_allocator_check(&s.f.allocator);
  test_release(&s.f);
  test_mpi_passed();
}

/* Results of one process's heads, which have room for all of them. */
static mha_status call(const mha_forward_args *args, mha_error *error) {
  test_poison_results(&s.f);
  return mha_mpi_forward(s.team, s.context, s.weights, args, NULL, error);
}

static void start_clock(void) {
  MPI_Barrier(MPI_COMM_WORLD);
  s.began = MPI_Wtime();
}

/* The same status and message on all within a second. */
static void expect(mha_status status, mha_status expected, const mha_error *error) {
  if (MPI_Wtime() - s.began > 1.0)
    test_failed("it took %g seconds", MPI_Wtime() - s.began);
  test_mpi_expect(status, expected, error);
  if (expected && !error->message[0])
    test_failed("there is no message");
}

static void nothing_was_written(void) {
  float *output = test_gather(&s.f.output);
  for (int64_t i = 0; i < s.f.output.batch * s.f.output.length * s.f.output.heads; i++)
    if (output[i] == output[i])
      test_failed("the output was written");
  free(output);
}

/* ---- other arguments on one process ---- */

typedef void change(mha_forward_args *args, mha_rules *rules);

static void other_batch(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->batch = 1;
}
static void other_length(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->query_length--;
  args->key_length = 0;
}
static void negative_batch(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->batch = -1;
}
static void no_query(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->query = NULL;
}
static void no_output(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->output = NULL;
}
static void bad_size(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->struct_size = 3;
}
static void accumulating(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->accumulate = 1;
}
static void causal(mha_forward_args *args, mha_rules *rules) {
  (void)args;
  rules->causal = 1;
}
static void offset(mha_forward_args *args, mha_rules *rules) {
  (void)args;
  rules->alignment = MHA_ALIGN_OFFSET;
  rules->offset = 3;
}
static void window(mha_forward_args *args, mha_rules *rules) {
  (void)args;
  rules->flags |= MHA_WINDOW;
  rules->window_left = 2;
}
static void softcap(mha_forward_args *args, mha_rules *rules) {
  (void)args;
  rules->softcap = 3.0f;
}
static void bad_softcap(mha_forward_args *args, mha_rules *rules) {
  (void)args;
  rules->softcap = -3.0f;
}
static void lengths(mha_forward_args *args, mha_rules *rules) {
  static const int64_t others[] = {1, 0};
  (void)args;
  rules->query_lengths = others;
}
static void no_results(mha_forward_args *args, mha_rules *rules) {
  (void)rules;
  args->results = NULL;
}
static void dropout(mha_forward_args *args, mha_rules *rules) {
  (void)args;
  rules->dropout = 0.5f;
}

static void one_process_says_otherwise(void **state) {
  static const struct {
    change *make;
    mha_status status;
    const char *fragment;
  } changes[] = {{other_batch, MHA_ERROR_VALUE, "args.batch"},
                 {other_length, MHA_ERROR_VALUE, "args.query_length"},
                 {negative_batch, MHA_ERROR_SIZE, "args.batch is -1"},
                 {no_query, MHA_ERROR_NULL, "args.query"},
                 {no_output, MHA_ERROR_NULL, "args.output"},
                 {bad_size, MHA_ERROR_STRUCT_SIZE, "args"},
                 {accumulating, MHA_ERROR_VALUE, "args.accumulate"},
                 {causal, MHA_ERROR_VALUE, "rules.causal"},
                 {offset, MHA_ERROR_VALUE, "rules.alignment"},
                 {window, MHA_ERROR_VALUE, "rules.flags"},
                 {softcap, MHA_ERROR_VALUE, "rules.softcap"},
                 {bad_softcap, MHA_ERROR_VALUE, "softcap"},
                 {lengths, MHA_ERROR_VALUE, "rules.query_lengths"},
                 {no_results, MHA_ERROR_VALUE, "results.log_sum_exp"},
                 {dropout, MHA_ERROR_UNSUPPORTED, "rules.dropout"}};
  mha_error error;
  (void)state;
  for (int way = 0; way < 2; way++) {
    begin(way == 0 ? n_processes : 1);
    for (size_t i = 0; i < COUNT(changes); i++)
      for (int culprit = 0; culprit < n_processes; culprit += n_processes - 1) {
        mha_forward_args args = s.f.args;
        mha_rules rules = s.f.rules;
        mha_results results = s.f.results;
        test_note("change %zu by process %d, way %d", i, culprit, way);
        args.rules = &rules;
        args.results = &results;
        if (way == 1)
          rules.query_lengths = NULL;
        if (rank == culprit)
          changes[i].make(&args, &rules);
        start_clock();
        const mha_status status = call(&args, &error);
        if (way == 1 && changes[i].make == other_length) /* by positions each has its own */
          test_mpi_expect(status, MHA_OK, &error);
        else
          expect(status,
                 way == 1 && changes[i].make == dropout ? MHA_ERROR_VALUE : changes[i].status,
                 &error);
        if (status && !strstr(error.message, changes[i].fragment))
          test_failed("\"%s\" lacks \"%s\"", error.message, changes[i].fragment);
        if (status)
          nothing_was_written();
      }
    if (way == 0) {
      test_mpi_expect(call(&s.f.args, &error), MHA_OK, &error);
      if (s.f.c.want == 0)
        test_judge_now(&s.f);
    }
    end();
    test_mpi_still_good(NULL);
  }
  test_mpi_passed();
}

/* ---- a context inside another call ---- */

typedef struct busy {
  mha_status status;
  mha_error error;
  int n;
} busy;

static void call_inside(void *user, const mha_trace_step *step) {
  busy *b = user;
  if (strcmp(step->name, "Q") != 0 || b->n++ > 0)
    return;
  b->status = call(&s.f.args, &b->error);
}

static void a_context_is_busy(void **state) {
  (void)state;
  begin(n_processes);
  busy b = {.n = 0};
  mha_weights *whole = NULL;
  mha_error error;
  test_expect(mha_weights_create(&s.f.config, &s.f.matrices, &whole, &error), MHA_OK, &error);
  start_clock();
  if (rank == n_processes - 1) {
    float *output = test_allocate((size_t)(2 * 6 * s.f.c.Eo), sizeof *output);
    mha_forward_args args = s.f.args;
    args.output = output;
    args.output_batch_stride = args.output_row_stride = 0;
    args.results = NULL;
    test_expect(mha_context_trace(s.context, call_inside, &b, &error), MHA_OK, &error);
    test_expect(mha_forward(s.context, whole, &args, &error), MHA_OK, &error);
    test_expect(mha_context_trace(s.context, NULL, NULL, &error), MHA_OK, &error);
    free(output);
  } else {
    b.status = call(&s.f.args, &b.error);
  }
  expect(b.status, MHA_ERROR_BUSY, &b.error);
  nothing_was_written();
  test_mpi_expect(call(&s.f.args, &error), MHA_OK, &error);
  mha_weights_destroy(whole);
  end();
}

/* ---- memory ---- */

/* The n-th allocation of a context, or of a team, fails on one process: until none does. */
static void memory_is_missing(void **state) {
  mha_error error;
  (void)state;
  for (int32_t by_heads = 1; by_heads <= n_processes; by_heads += n_processes - 1)
    for (int of_team = 0; of_team < 2; of_team++) {
      mha_status status = MHA_ERROR_MEMORY;
      for (int64_t n = 1; status; n++) {
        begin(by_heads);
        mha_rules rules = s.f.rules;
        mha_forward_args args = s.f.args;
        test_allocator *allocator = of_team ? &s.team_allocator : &s.f.allocator;
        rules.query_lengths = NULL;
        args.rules = &rules;
        if (rank == n_processes - 1)
          allocator->fail_at = allocator->calls + n;
        start_clock();
        status = call(&args, &error);
        expect(status, status ? MHA_ERROR_MEMORY : MHA_OK, &error);
        assert_true(n < 12 && (status || n > 1));
        if (status)
          nothing_was_written();
        test_mpi_expect(call(&args, &error), MHA_OK, &error);
        end();
        test_mpi_still_good(NULL);
      }
    }
  test_mpi_passed();
}

static void memory_for_a_share_is_missing(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  mha_error error;
  (void)state;
  for (int64_t n = 1; status; n++) {
    mha_mpi_weights *share = NULL;
    begin(n_processes);
    if (rank == 0)
      s.f.allocator.fail_at = s.f.allocator.calls + n;
    start_clock();
    status = mha_mpi_weights_create(s.team, &s.f.config, &s.f.matrices, &share, &error);
    expect(status, status ? MHA_ERROR_MEMORY : MHA_OK, &error);
    assert_true(n < 20 && (status || n > 1));
    assert_true(!share == (status != MHA_OK));
    mha_mpi_weights_destroy(share);
    end();
    test_mpi_still_good(NULL);
  }
  test_mpi_passed();
}

static void memory_for_a_team_is_missing(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  mha_error error;
  (void)state;
  for (int64_t n = 1; status; n++) {
    test_allocator allocator;
    mha_mpi_options options;
    mha_mpi_team *team = NULL;
    test_allocator_init(&allocator);
    MHA_INIT(&options);
    options.allocator = &allocator.mha;
    if (rank == 0)
      allocator.fail_at = n;
    start_clock();
    status = mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error);
    expect(status, status ? MHA_ERROR_MEMORY : MHA_OK, &error);
    assert_true(n < 4 && (status || n > 1));
    mha_mpi_team_destroy(team);
    test_allocator_check(&allocator);
  }
  test_mpi_passed();
}

/* ---- shares ---- */

static int n_released;

static void count_release(void *user) {
  (void)user;
  n_released++;
}

static void shares_that_cannot_be(void **state) {
  mha_mpi_weights *share = NULL;
  mha_error error;
  (void)state;
  begin(n_processes);
  mha_config config = s.f.config;
  mha_matrices matrices = s.f.matrices;
  matrices.ownership = MHA_BORROW;
  matrices.release = count_release;
  n_released = 0;
  config.softcap = rank == 0 ? 2.0f : 0.0f;
  start_clock();
  mha_status status = mha_mpi_weights_create(s.team, &config, &matrices, &share, &error);
  expect(status, MHA_ERROR_VALUE, &error);
  assert_non_null(strstr(error.message, "config.softcap"));
  config = s.f.config;
  start_clock();
  status = mha_mpi_weights_create(s.team, rank == 0 ? NULL : &config, &matrices, &share, &error);
  expect(status, MHA_ERROR_NULL, &error);
  start_clock();
  status = mha_mpi_weights_create(s.team, &config, rank == 0 ? NULL : &matrices, &share, &error);
  expect(status, MHA_ERROR_NULL, &error);
  start_clock();
  status = mha_mpi_weights_create(s.team, &config, &matrices, rank == 0 ? NULL : &share, &error);
  expect(status, MHA_ERROR_NULL, &error);
  config.n_heads = rank == 0 ? -1 : config.n_heads;
  start_clock();
  status = mha_mpi_weights_create(s.team, &config, &matrices, &share, &error);
  expect(status, MHA_ERROR_SIZE, &error);
  assert_int_equal(n_released, 0);
  assert_null(share);
  config = s.f.config;
  test_mpi_expect(mha_mpi_weights_create(s.team, &config, &matrices, &share, &error), MHA_OK,
                  &error);
  mha_mpi_weights_destroy(share);
  assert_int_equal(n_released, 1);
  end();
}

/* Heads that do not divide, key heads that neither divide nor are divided, a norm over all heads.
 */
static void heads_that_do_not_divide(void **state) {
  mha_error error;
  (void)state;
  mha_mpi_team *team = test_mpi_team(n_processes, NULL);
  const struct {
    int64_t H, G;
    mha_norm norm;
    mha_status status;
  } layers[] = {{2 * n_processes + 1, 1, MHA_NORM_NONE, MHA_ERROR_HEADS},
                {6 * n_processes, 2 * n_processes, MHA_NORM_FULL, MHA_ERROR_UNSUPPORTED},
                {n_processes * (n_processes + 1), n_processes + 1, MHA_NORM_NONE, MHA_ERROR_HEADS}};
  for (size_t i = 0; i < COUNT(layers); i++) {
    const test_case c = {
        .H = layers[i].H, .G = layers[i].G, .d = 2, .Eq = 6, .norm = layers[i].norm};
    mha_mpi_weights *share = NULL;
    test_build(&s.f, &c);
    test_mpi_expect(mha_mpi_weights_create(team, &s.f.config, &s.f.matrices, &share, &error),
                    layers[i].status, &error);
    assert_null(share);
    test_release(&s.f);
  }
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

/* ---- teams and other calls ---- */

static void teams_that_cannot_be(void **state) {
  mha_mpi_options options;
  mha_mpi_team *team = NULL;
  mha_error error;
  (void)state;
  assert_int_equal(mha_mpi_team_create(MPI_COMM_NULL, NULL, &team, &error), MHA_ERROR_NULL);
  MHA_INIT(&options);
  options.by_heads = rank == 0 ? 1 : n_processes;
  start_clock();
  expect(mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error), MHA_ERROR_VALUE, &error);
  options.by_heads = n_processes + 1;
  expect(mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error), MHA_ERROR_SIZE, &error);
  options.by_heads = rank == 0 ? -1 : 1;
  expect(mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error), MHA_ERROR_SIZE, &error);
  options.by_heads = 1;
  options.struct_size = rank == 0 ? 1 : sizeof options;
  expect(mha_mpi_team_create(MPI_COMM_WORLD, &options, &team, &error), MHA_ERROR_STRUCT_SIZE,
         &error);
  expect(mha_mpi_team_create(MPI_COMM_WORLD, NULL, rank == 0 ? NULL : &team, &error),
         MHA_ERROR_NULL, &error);
  assert_null(team);
  mha_mpi_range ranges[2];
  mha_mpi_place place;
  MHA_INIT(&place);
  assert_int_equal(mha_mpi_team_place(NULL, &place, &error), MHA_ERROR_NULL);
  assert_int_equal(mha_mpi_rows(NULL, 1, 0, ranges, &error), MHA_ERROR_NULL);
  assert_int_equal(mha_mpi_team_trace(NULL, NULL, NULL, &error), MHA_ERROR_NULL);
  assert_int_equal(mha_mpi_forward(NULL, NULL, NULL, NULL, NULL, &error), MHA_ERROR_NULL);
  team = test_mpi_team(1, NULL);
  assert_int_equal(mha_mpi_team_place(team, NULL, &error), MHA_ERROR_NULL);
  assert_int_equal(mha_mpi_rows(team, 1, 0, NULL, &error), MHA_ERROR_NULL);
  assert_int_equal(mha_mpi_rows(team, -1, 0, ranges, &error), MHA_ERROR_SIZE);
  assert_int_equal(mha_mpi_rows(team, 1, 2, ranges, &error), MHA_ERROR_VALUE);
  mha_mpi_team_destroy(team);
  mha_mpi_team_destroy(NULL);
  mha_mpi_weights_destroy(NULL);
  assert_null(mha_mpi_weights_layer(NULL));
  test_mpi_passed();
}

/* One process makes another call than the rest. */
static void calls_that_do_not_meet(void **state) {
  mha_error error;
  (void)state;
  begin(n_processes);
  mha_mpi_weights *share = NULL;
  start_clock();
  const mha_status status =
      rank == 0 ? mha_mpi_weights_create(s.team, &s.f.config, &s.f.matrices, &share, &error)
                : call(&s.f.args, &error);
  expect(status, MHA_ERROR_VALUE, &error);
  assert_non_null(strstr(error.message, "different calls"));
  mha_backward_args back;
  float *gradient = test_allocate((size_t)(2 * 6 * s.f.c.Eq), sizeof *gradient);
  MHA_INIT(&back);
  back.dy = gradient;
  back.d_query = rank == 0 ? NULL : gradient;
  start_clock();
  expect(mha_mpi_backward(s.team, s.context, s.weights, &s.f.args, &back, &error), MHA_ERROR_VALUE,
         &error);
  start_clock();
  expect(
      mha_mpi_backward(s.team, s.context, s.weights, &s.f.args, rank == 0 ? NULL : &back, &error),
      MHA_ERROR_NULL, &error);
  free(gradient);
  end();
}

/* The balanced order wants so many rows of each process; what is not by positions is refused. */
static void rows_that_cannot_be(void **state) {
  mha_error error;
  mha_mpi_spread spread;
  (void)state;
  begin(1);
  mha_rules rules = s.f.rules;
  mha_forward_args args = s.f.args;
  MHA_INIT(&spread);
  spread.order = MHA_MPI_BALANCED;
  rules.query_lengths = NULL;
  args.rules = &rules;
  args.query_length = rank == 0 ? 5 : 2;
  args.key_length = 0;
  test_poison_results(&s.f);
  start_clock();
  expect(mha_mpi_forward(s.team, s.context, s.weights, &args, &spread, &error), MHA_ERROR_LENGTH,
         &error);
  spread.order = rank == 0 ? 7 : 0;
  start_clock();
  expect(mha_mpi_forward(s.team, s.context, s.weights, &args, &spread, &error), MHA_ERROR_VALUE,
         &error);
  spread.order = 0;
  spread.output = rank == 0 ? -1 : 0;
  start_clock();
  expect(mha_mpi_forward(s.team, s.context, s.weights, &args, &spread, &error), MHA_ERROR_VALUE,
         &error);
  const int64_t far[] = {1, 100};
  rules.key_lengths = far;
  start_clock();
  expect(mha_mpi_forward(s.team, s.context, s.weights, &args, NULL, &error), MHA_ERROR_LENGTH,
         &error);
  rules.key_lengths = NULL;
  rules.alignment = MHA_ALIGN_OFFSET;
  rules.offset = INT64_MAX;
  start_clock();
  expect(mha_mpi_forward(s.team, s.context, s.weights, &args, NULL, &error), MHA_ERROR_LENGTH,
         &error);
  nothing_was_written();
  end();
}

/* By heads and by positions at once: what fails in one row of processes is told to the others. */
static void heads_and_rows(void **state) {
  float sinks[64] = {0};
  mha_error error;
  (void)state;
  if (n_processes % 2 != 0) {
    test_mpi_passed();
    return;
  }
  begin(2);
  mha_rules rules = s.f.rules;
  mha_forward_args args = s.f.args;
  rules.query_lengths = NULL;
  args.rules = &rules;
  args.key_length = 0;
  args.query_length = rank == 1 ? 5 : 6;
  if (n_processes > 2) { /* otherwise there are no rows to be spread */
    start_clock();
    expect(call(&args, &error), MHA_ERROR_VALUE, &error);
    assert_non_null(strstr(error.message, "args.query_length"));
  }
  args.query_length = 6;
  sinks[s.f.c.H - 1] = NAN; /* of a head that some have */
  rules.sinks = sinks;
  start_clock();
  expect(call(&args, &error), MHA_ERROR_VALUE, &error);
  nothing_was_written();
  rules.sinks = NULL;
  rules.attend.data = sinks;
  rules.attend.batch = rules.attend.rows = 1;
  rules.attend.heads = s.f.c.H / 2; /* a share's */
  rules.attend.columns = 6 * (n_processes / 2);
  start_clock();
  expect(call(&args, &error), MHA_ERROR_SIZE, &error);
  assert_non_null(strstr(error.message, "rules.attend has"));
  rules.attend.data = NULL;
  test_mpi_expect(call(&args, &error), MHA_OK, &error);
  end();
}

/* Gradients are by heads alone, and pass through matrices. */
static void ways_back_that_there_are_not(void **state) {
  mha_backward_args back;
  mha_error error;
  (void)state;
  begin(1);
  float *dy = test_allocate((size_t)(2 * 6 * s.f.c.Eo), sizeof *dy);
  MHA_INIT(&back);
  back.dy = dy;
  back.d_bo = dy;
  start_clock();
  expect(mha_mpi_backward(s.team, s.context, s.weights, &s.f.args, &back, &error),
         MHA_ERROR_UNSUPPORTED, &error);
  end();
  test_mpi_still_good(NULL);
  const test_case c = {
      .Lq = 3, .H = 2 * n_processes, .d = 2, .source = TEST_SELF, .absent = TEST_Q};
  test_build(&s.f, &c);
  mha_mpi_team *team = test_mpi_team(n_processes, NULL);
  mha_mpi_weights *share = test_mpi_share(team, &s.f);
  mha_context *context = NULL;
  test_expect(mha_context_create(&s.f.options, &context, &error), MHA_OK, &error);
  test_mpi_expect(mha_mpi_backward(team, context, share, &s.f.args, &back, &error),
                  MHA_ERROR_UNSUPPORTED, &error);
  mha_context_destroy(context);
  mha_mpi_weights_destroy(share);
  mha_mpi_team_destroy(team);
  test_release(&s.f);
  free(dy);
  test_mpi_passed();
}

/* The core by positions. */
static void cores_that_cannot_be(void **state) {
  float numbers[64] = {0};
  float output[64] = {0};
  float weights[64];
  mha_results results;
  mha_rules rules;
  mha_error error;
  (void)state;
  begin(1);
  const mha_tensor q = {.data = numbers, .batch = 1, .length = 2, .heads = 2, .size = 4};
  mha_tensor k = q;
  const mha_tensor v = q;
  mha_attend_args args;
  MHA_INIT(&args);
  MHA_INIT(&results);
  MHA_INIT(&rules);
  args.output = output;
  args.rules = &rules;
  test_mpi_expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_OK,
                  &error);
  start_clock();
  expect(mha_mpi_attend(s.team, s.context, rank == 0 ? NULL : &q, &k, &v, &args, NULL, &error),
         MHA_ERROR_NULL, &error);
  k.size = rank == 0 ? 3 : 4;
  start_clock();
  expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_ERROR_SIZE,
         &error);
  k.size = 4;
  args.n_sequences = 1;
  start_clock();
  expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_ERROR_UNSUPPORTED,
         &error);
  args.n_sequences = 0;
  results.weights = weights;
  args.results = &results;
  expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_ERROR_UNSUPPORTED,
         &error);
  args.results = NULL;
  rules.dropout = 0.5f;
  expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_ERROR_UNSUPPORTED,
         &error);
  rules.dropout = 0;
  args.output = rank == 0 ? numbers : output;
  expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_ERROR_OVERLAP,
         &error);
  rules.attend.data = weights;
  rules.attend.batch = rules.attend.heads = rules.attend.rows = 1;
  rules.attend.columns = 2; /* and not those of all processes */
  args.output = output;
  start_clock();
  expect(mha_mpi_attend(s.team, s.context, &q, &k, &v, &args, NULL, &error), MHA_ERROR_SIZE,
         &error);
  end();
}

/* ---- files ---- */

/* Each process has a folder of its own; one of them lacks the file. */
static void a_file_is_missing(void **state) {
  char folder[64];
  mha_weights *whole = NULL;
  mha_mpi_weights *share = NULL;
  mha_error error;
  (void)state;
  (void)snprintf(folder, sizeof folder, "test_mpi_faults_%d", rank);
  assert_int_equal(test_folder_enter(folder), 0);
  begin(n_processes);
  test_expect(mha_weights_create(&s.f.config, &s.f.matrices, &whole, &error), MHA_OK, &error);
  if (rank != n_processes - 1)
    test_expect(mha_weights_save(whole, "layer.safetensors", NULL, &error), MHA_OK, &error);
  start_clock();
  expect(mha_mpi_weights_load(s.team, &s.f.config, "layer.safetensors", NULL, &share, &error),
         MHA_ERROR_IO, &error);
  assert_null(share);
  mha_weights_destroy(whole);
  end();
  assert_int_equal(test_remove_files("."), 0);
  assert_int_equal(test_folder_leave(), 0);
}

/* ---- caches ---- */

static mha_cache *make_cache(int64_t capacity) {
  mha_cache_options options;
  mha_cache *cache = NULL;
  mha_error error;
  MHA_INIT(&options);
  options.n_entries = 2;
  options.capacity = capacity;
  options.weights = mha_mpi_weights_layer(s.weights);
  test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
  return cache;
}

/* One process's cache has less room: those of the others get nothing. */
static void a_cache_is_full(void **state) {
  mha_error error;
  int64_t length = -1;
  (void)state;
  begin(n_processes);
  mha_cache *cache = make_cache(rank == 0 ? 9 : 20);
  mha_rules rules = s.f.rules;
  mha_forward_args args = s.f.args;
  rules.query_lengths = NULL;
  args.rules = &rules;
  args.results = NULL;
  args.cache = cache;
  args.key_length = 0;
  test_mpi_expect(call(&args, &error), MHA_OK, &error);
  start_clock();
  const mha_status status = call(&args, &error);
  expect(status, MHA_ERROR_LENGTH, &error);
  nothing_was_written();
  for (int64_t entry = 0; entry < 2; entry++) {
    test_expect(mha_cache_length(cache, entry, &length, &error), MHA_OK, &error);
    assert_int_equal(length, 6);
  }
  if (rank == 0) /* and of one that has lost a sequence */
    test_expect(mha_cache_reset(cache, 1, &error), MHA_OK, &error);
  start_clock();
  expect(call(&args, &error), MHA_ERROR_VALUE, &error);
  assert_non_null(strstr(error.message, "lengths of args.cache"));
  mha_cache_destroy(cache);
  end();
}

static int find_rank(void **state) {
  MPI_Comm_size(MPI_COMM_WORLD, &n_processes);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return test_mpi_still_good(state);
}

#define FAULT(function) cmocka_unit_test_setup(function, find_rank)

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {FAULT(one_process_says_otherwise),
                                     FAULT(a_context_is_busy),
                                     FAULT(memory_is_missing),
                                     FAULT(memory_for_a_share_is_missing),
                                     FAULT(memory_for_a_team_is_missing),
                                     FAULT(shares_that_cannot_be),
                                     FAULT(heads_that_do_not_divide),
                                     FAULT(teams_that_cannot_be),
                                     FAULT(calls_that_do_not_meet),
                                     FAULT(rows_that_cannot_be),
                                     FAULT(heads_and_rows),
                                     FAULT(ways_back_that_there_are_not),
                                     FAULT(cores_that_cannot_be),
                                     FAULT(a_file_is_missing),
                                     FAULT(a_cache_is_full)};
  return test_mpi_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
