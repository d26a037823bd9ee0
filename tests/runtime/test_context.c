/* mha_context: options, workspace, reservation, trace, a second entry; and what the library says
 * about itself. */
#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static test_fixture fixture; /* one at a time; too large for a stack */

static mha_weights *make_weights(void) {
  mha_weights *weights = NULL;
  mha_error error;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  return weights;
}

static mha_context *make_context(void) {
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  return context;
}

/* ---- Scratch --------------------------------------------------------------------------------- */

static size_t bytes_for(const mha_context *context, const mha_weights *weights, int64_t B,
                        int64_t Lq, int64_t Lk) {
  mha_shape shape;
  mha_error error;
  size_t bytes = 0;
  MHA_INIT(&shape);
  shape.batch = B;
  shape.query_length = Lq;
  shape.key_length = Lk;
  shape.n_heads = 8;
  shape.value_head_size = 64;
  test_expect(mha_workspace_bytes(context, weights, &shape, &bytes, &error), MHA_OK, &error);
  return bytes;
}

/* Doubling the lengths doubles the scratch at most, once every tile is full. */
static void scratch_grows_with_the_lengths_not_their_product(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1, .H = 8, .d = 64});
  mha_weights *weights = make_weights();
  mha_context *context = make_context();
  for (int core = 0; core < 2; core++) {
    const mha_weights *layer = core ? NULL : weights;
    const size_t at_4096 = bytes_for(context, layer, 1, 4096, 4096);
    const size_t at_8192 = bytes_for(context, layer, 1, 8192, 8192);
    assert_true(at_4096 > 0);
    assert_true(at_8192 <= 2 * at_4096);
    assert_true(bytes_for(context, layer, 1, 1, 1000000) <= 1000000 * 2 * 512 * sizeof(float) * 2);
  }
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* B = 1, H = 8, L = 8192, d = 64, any masks, up to 8 threads: no L×L buffer. */
static void scratch_of_a_long_sequence_stays_under_100_mb(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1, .H = 8, .d = 64});
  mha_weights *weights = make_weights();
  for (int32_t threads = 1; threads <= 8; threads++) {
    fixture.options.n_threads = threads;
    mha_context *context = make_context();
    assert_true(bytes_for(context, weights, 1, 8192, 8192) < 100000000);
    assert_true(bytes_for(context, NULL, 1, 8192, 8192) < 100000000);
    mha_context_destroy(context);
  }
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* What was really taken for such a call, with causal, lengths and a broadcast mask. */
static void a_long_sequence_takes_what_was_said(void **state) {
  enum { L = 2048 };
  (void)state;
  if (test_small())
    skip(); /* 17 GFLOP */
  test_build(&fixture, &(test_case){.seed = 1,
                                    .core = true,
                                    .Lq = L,
                                    .Lk = L,
                                    .H = 8,
                                    .d = 64,
                                    .causal = true,
                                    .key_lengths = true,
                                    .has_mask = true,
                                    .threads = 2,
                                    .mask_extents = TEST_FULL_ROWS});
  mha_context *context = make_context();
  mha_error error;
  const int64_t before = (int64_t)fixture.allocator.live_bytes;
  const size_t said = bytes_for(context, NULL, 1, L, L);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, NULL, &error), MHA_OK, &error);
  assert_true(fixture.allocator.live_bytes - (size_t)before <= said);
  mha_context_destroy(context);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

/* Arrays without a number in them lie somewhere too: their places are found by adding to an
 * address. */
static void scratch_of_nothing_has_an_address(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1, .H = 8, .d = 64});
  mha_weights *weights = make_weights();
  mha_context *context = make_context();
  assert_true(bytes_for(context, weights, 0, 0, 0) > 0);
  assert_true(bytes_for(context, NULL, 0, 0, 0) > 0);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

/* Sizes beyond any memory are answered or refused, and never wrap. */
static void sizes_beyond_32_bits(void **state) {
  mha_error error;
  size_t bytes = 77;
  mha_shape shape;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1, .H = 8, .d = 64});
  mha_weights *weights = make_weights();
  mha_context *context = make_context();
  /* B·H·Lq·Lk is 2^41; Q alone has 2^31 elements */
  assert_true(bytes_for(context, weights, 64, 65536, 65536) >= (size_t)64 * 65536 * 512 * 4);
  MHA_INIT(&shape);
  shape.n_heads = 8;
  shape.value_head_size = 64;
  const int64_t huge[][3] = {{INT64_C(1) << 40, INT64_C(1) << 40, 1},
                             {INT64_MAX, 1, 1},
                             {1, INT64_MAX, 1},
                             {1, 1, INT64_MAX},
                             {INT64_C(1) << 31, INT64_C(1) << 31, INT64_C(1) << 31}};
  for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
    shape.batch = huge[i][0];
    shape.query_length = huge[i][1];
    shape.key_length = huge[i][2];
    test_note("shape %zu", i);
    test_expect(mha_workspace_bytes(context, weights, &shape, &bytes, &error), MHA_ERROR_OVERFLOW,
                &error);
    assert_int_equal(bytes, 77);
    test_expect(mha_context_reserve(context, weights, &shape, &error), MHA_ERROR_OVERFLOW, &error);
  }
  shape.batch = shape.query_length = shape.key_length = 1;
  shape.value_head_size = INT64_MAX; /* one column more is wanted */
  test_expect(mha_workspace_bytes(context, NULL, &shape, &bytes, &error), MHA_ERROR_OVERFLOW,
              &error);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

static void reserve_and_call(const test_case *c, mha_context *context, int64_t *calls_after) {
  mha_error error;
  mha_shape shape;
  size_t bytes = 0;
  test_allocator *a = &fixture.allocator;
  mha_weights *weights = c->core ? NULL : make_weights();
  MHA_INIT(&shape);
  shape.packed = c->packed;
  shape.batch = fixture.c.B;
  shape.query_length = fixture.c.Lq;
  shape.key_length = fixture.c.Lk;
  shape.n_heads = c->core ? fixture.c.H : 0;
  shape.value_head_size = c->core ? fixture.c.dv : 0;
  const size_t before = a->live_bytes;
  test_expect(mha_workspace_bytes(context, weights, &shape, &bytes, &error), MHA_OK, &error);
  test_expect(mha_context_reserve(context, weights, &shape, &error), MHA_OK, &error);
  if (a->live_bytes != before + bytes)
    test_failed("reserved %zu bytes, said %zu", a->live_bytes - before, bytes);
  const int64_t calls = a->calls;
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  assert_int_equal(a->calls, calls);
  /* a smaller call fits too, and nothing is given back */
  const size_t live = a->live_bytes;
  if (!c->packed && !c->key_lengths && !c->query_lengths && !c->has_mask && !c->has_bias) {
    fixture.args.query_length = fixture.q.length = 1;
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  }
  *calls_after = a->calls - calls;
  assert_int_equal(a->live_bytes, live);
  mha_weights_destroy(weights);
}

static void after_a_reserve_a_call_allocates_nothing(void **state) {
  (void)state;
  for (uint64_t n = 0; n < 48; n++) {
    int64_t calls_after = -1;
    const test_case c = {.seed = n,
                         .core = n & 1,
                         .packed = (n & 2) != 0,
                         .B = 3,
                         .Lq = 70 + (int64_t)n,
                         .Lk = 600,
                         .H = 4,
                         .G = 2,
                         .d = 5,
                         .dv = 7,
                         .causal = (n & 4) != 0,
                         .key_lengths = (n & 8) != 0,
                         .has_mask = (n & 10) == 8,
                         .mask_extents = TEST_FULL,
                         .threads = 1 + (int)(n % 3),
                         .biases = TEST_ALL,
                         .sinks = n & 1,
                         .want = n & 2 ? TEST_WANT_LSE : TEST_WANT_ALL};
    test_build(&fixture, &c);
    mha_context *context = make_context();
    reserve_and_call(&c, context, &calls_after);
    assert_int_equal(calls_after, 0);
    mha_context_destroy(context);
    test_allocator_check(&fixture.allocator);
    test_release(&fixture);
  }
}

/* Few queries of many heads over many keys hold the scores of all heads at once, which is more than
 * a tile of many queries takes. */
static void a_reserve_holds_for_few_queries(void **state) {
  enum { MOST = 18 };
  const int64_t spans[] = {40, 300};
  (void)state;
  for (size_t i = 0; i < sizeof spans / sizeof *spans; i++) {
    const test_case c = {.seed = i, .core = true, .Lq = MOST, .Lk = spans[i], .H = 16, .d = 1};
    mha_shape shape;
    test_build(&fixture, &c);
    mha_context *context = make_context();
    MHA_INIT(&shape);
    shape.batch = 1;
    shape.query_length = MOST;
    shape.key_length = spans[i];
    shape.n_heads = 16;
    shape.value_head_size = 1;
    test_expect(mha_context_reserve(context, NULL, &shape, NULL), MHA_OK, NULL);
    const int64_t calls = fixture.allocator.calls;
    for (int64_t n = MOST; n > 0; n--) {
      mha_error error;
      fixture.q.length = n;
      test_note("%d of %d queries over %d keys", (int)n, MOST, (int)spans[i]);
      test_expect(test_call(&fixture, context, NULL, &error), MHA_OK, &error);
      assert_int_equal(fixture.allocator.calls, calls);
    }
    mha_context_destroy(context);
    test_release(&fixture);
  }
}

/* ---- Trace ----------------------------------------------------------------------------------- */

#define MAX_STEPS 16

typedef struct trace_log {
  int n;
  mha_trace_step steps[MAX_STEPS];
  char names[MAX_STEPS][16];
  bool same_data; /* weights shown are those asked for, output is the caller's */
} trace_log;

static void log_step(void *user, const mha_trace_step *step) {
  trace_log *log = user;
  if (log->n == MAX_STEPS)
    return;
  log->steps[log->n] = *step;
  (void)snprintf(log->names[log->n], sizeof log->names[0], "%s", step->name);
  if (strcmp(step->name, "weights") == 0)
    log->same_data = log->same_data && step->data == fixture.weights;
  if (strcmp(step->name, "output") == 0)
    log->same_data = log->same_data && step->data == fixture.output.data;
  log->n++;
}

static void expect_step(const trace_log *log, int at, const char *name, int32_t rank,
                        const int64_t shape[4]) {
  assert_true(at < log->n);
  assert_string_equal(log->names[at], name);
  assert_int_equal(log->steps[at].rank, rank);
  for (int32_t axis = 0; axis < rank; axis++)
    assert_int_equal(log->steps[at].shape[axis], shape[axis]);
  assert_int_equal(log->steps[at].strides[rank - 1], 1);
}

static void the_trace_shows_names_shapes_and_strides(void **state) {
  enum { B = 2, LQ = 5, LK = 9, H = 4, G = 2, D = 3, DV = 6, EO = 11 };
  (void)state;
  for (int variant = 0; variant < 4; variant++) {
    const bool weights_wanted = variant & 1, packed = (variant & 2) != 0 && !weights_wanted;
    const int64_t b = packed ? 1 : B;
    trace_log log = {.same_data = true};
    mha_error error;
    test_build(&fixture, &(test_case){.seed = 3,
                                      .B = B,
                                      .Lq = LQ,
                                      .Lk = LK,
                                      .H = H,
                                      .G = G,
                                      .d = D,
                                      .dv = DV,
                                      .Eq = 8,
                                      .Eo = EO,
                                      .packed = packed,
                                      .layout = TEST_PADDED,
                                      .want = weights_wanted ? TEST_WANT_ALL : 0});
    mha_weights *weights = make_weights();
    mha_context *context = make_context();
    test_expect(mha_context_trace(context, log_step, &log, &error), MHA_OK, &error);
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
    int at = 0;
    expect_step(&log, at++, "Q", 3, (int64_t[]){b, LQ, H * D, 0});
    expect_step(&log, at++, "K", 3, (int64_t[]){b, LK, G * D, 0});
    expect_step(&log, at++, "V", 3, (int64_t[]){b, LK, G * DV, 0});
    if (weights_wanted)
      expect_step(&log, at++, "weights", 4, (int64_t[]){b, H, LQ, LK});
    expect_step(&log, at++, "heads", 4, (int64_t[]){b, H, LQ, DV});
    expect_step(&log, at++, "concat", 3, (int64_t[]){b, LQ, H * DV, 0});
    expect_step(&log, at++, "output", 3, (int64_t[]){b, LQ, EO, 0});
    assert_int_equal(log.n, at);
    assert_true(log.same_data);
    /* heads and concat are two views of the same numbers: nothing was copied */
    assert_ptr_equal(log.steps[at - 3].data, log.steps[at - 2].data);
    assert_int_equal(log.steps[at - 3].strides[1], DV);
    assert_int_equal(log.steps[at - 3].strides[2], log.steps[at - 2].strides[1]);
    /* the output's strides are the caller's */
    assert_int_equal(log.steps[at - 1].strides[1], fixture.output.row_stride);
    if (!packed)
      assert_int_equal(log.steps[at - 1].strides[0], fixture.output.batch_stride);
    /* NULL ends it */
    test_expect(mha_context_trace(context, NULL, NULL, &error), MHA_OK, &error);
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
    assert_int_equal(log.n, at);
    mha_context_destroy(context);
    mha_weights_destroy(weights);
    test_release(&fixture);
  }
}

/* Compares Q, K, V and concat with the judge's, within the bound of any order of summation. */
typedef struct traced_numbers {
  const oracle_result *result;
  int compared;
} traced_numbers;

static void compare_step(void *user, const mha_trace_step *step) {
  traced_numbers *traced = user;
  const oracle_result *r = traced->result;
  const struct {
    const char *name;
    const oracle_numbers *numbers;
  } known[] = {
      {"Q", &r->q}, {"K", &r->k}, {"V", &r->v}, {"concat", &r->concat}, {"output", &r->output}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (strcmp(step->name, known[i].name) != 0)
      continue;
    const test_view view = {.data = (float *)(uintptr_t)step->data,
                            .batch = step->shape[0],
                            .length = step->shape[1],
                            .heads = 1,
                            .size = step->shape[2],
                            .batch_stride = step->strides[0],
                            .row_stride = step->strides[1]};
    float *dense = test_gather(&view);
    test_compare(step->name, test_view_shape(&view), dense, known[i].numbers->value,
                 known[i].numbers->bound);
    free(dense);
    traced->compared++;
  }
}

/* Rows beyond a length, poison in the input, show 0 in every step before the output. */
static void the_traces_numbers_are_right(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 40; seed++) {
    oracle_result result;
    traced_numbers traced = {&result, 0};
    mha_error error;
    test_build(&fixture, &(test_case){.seed = seed,
                                      .B = 3,
                                      .Lq = 6,
                                      .Lk = 8,
                                      .H = 2,
                                      .d = 3,
                                      .Eq = 17,
                                      .biases = TEST_ALL,
                                      .query_lengths = seed & 1,
                                      .key_lengths = (seed & 2) != 0,
                                      .packed = seed % 5 == 4,
                                      .causal = seed % 3 == 0,
                                      .layout = TEST_LENGTH_FIRST});
    test_ask_oracle(&fixture, &result);
    mha_weights *weights = make_weights();
    mha_context *context = make_context();
    test_expect(mha_context_trace(context, compare_step, &traced, &error), MHA_OK, &error);
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
    assert_int_equal(traced.compared, 5);
    mha_context_destroy(context);
    mha_weights_destroy(weights);
    oracle_free(&result);
    test_release(&fixture);
  }
}

/* What a callback finds when it enters the library again. */
typedef struct reentry {
  mha_context *busy, *other;
  const mha_weights *weights;
  mha_status forward, self, attend, reserve, trace;
  mha_status other_forward;
  int calls;
} reentry;

static void enter_again(void *user, const mha_trace_step *step) {
  reentry *r = user;
  float x[6 * 4] = {0}, output[6 * 4];
  mha_shape shape;
  (void)step;
  if (r->calls++ > 0)
    return;
  mha_forward_args args;
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = 4;
  args.query = x;
  args.output = output;
  MHA_INIT(&shape);
  shape.batch = 1;
  shape.query_length = 4;
  const mha_tensor tensor = {x, 1, 4, 2, 3, 0, 0, 0, 0, MHA_F32, 0};
  mha_attend_args attend;
  MHA_INIT(&attend);
  attend.output = output;
  r->forward = mha_forward(r->busy, r->weights, &args, NULL);
  r->self = mha_self_attention(r->busy, r->weights, x, 1, 4, output, NULL);
  r->attend = mha_attend(r->busy, &tensor, &tensor, &tensor, &attend, NULL);
  r->reserve = mha_context_reserve(r->busy, r->weights, &shape, NULL);
  r->trace = mha_context_trace(r->busy, NULL, NULL, NULL);
  r->other_forward = mha_forward(r->other, r->weights, &args, NULL);
}

static void a_second_entry_is_refused(void **state) {
  mha_error error;
  oracle_result result;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 5, .Lq = 4, .H = 2, .d = 3, .source = TEST_SELF});
  test_ask_oracle(&fixture, &result);
  mha_weights *weights = make_weights();
  mha_context *context = make_context(), *other = make_context();
  reentry r = {.busy = context, .other = other, .weights = weights};
  test_expect(mha_context_trace(context, enter_again, &r, &error), MHA_OK, &error);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  assert_true(r.calls > 1);
  assert_int_equal(r.forward, MHA_ERROR_BUSY);
  assert_int_equal(r.self, MHA_ERROR_BUSY);
  assert_int_equal(r.attend, MHA_ERROR_BUSY);
  assert_int_equal(r.reserve, MHA_ERROR_BUSY);
  assert_int_equal(r.trace, MHA_ERROR_BUSY);
  assert_int_equal(r.other_forward, MHA_OK);
  test_judge(&fixture, &result); /* and the call that was disturbed is right */
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error); /* free again */
  mha_context_destroy(context);
  mha_context_destroy(other);
  mha_weights_destroy(weights);
  oracle_free(&result);
  test_release(&fixture);
}

/* ---- About the library ----------------------------------------------------------------------- */

static void the_library_describes_itself(void **state) {
  const char *const keys[] = {"version: ",      "blas: ",      "blas_threading: ",
                              "blas_threads: ", "blas_core: ", "instruction_set: ",
                              "engines: ",      "xsmm: "};
  char text[4096], cut[16];
  (void)state;
  assert_string_equal(mha_version(), MHA_VERSION_STRING);
  assert_int_equal(mha_version_number(), MHA_VERSION_NUMBER);
  assert_int_equal(MHA_VERSION_NUMBER,
                   10000 * MHA_VERSION_MAJOR + 100 * MHA_VERSION_MINOR + MHA_VERSION_PATCH);
  const size_t length = mha_build_info(text, sizeof text);
  assert_true(length < sizeof text);
  assert_int_equal(strlen(text), length);
  assert_int_equal(mha_build_info(NULL, 0), length);
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    const char *line = strstr(text, keys[i]);
    if (!line || (line != text && line[-1] != '\n') || line[strlen(keys[i])] == '\n')
      test_failed("no line \"%s\" with a value in:\n%s", keys[i], text);
  }
  memset(cut, 'x', sizeof cut);
  assert_int_equal(mha_build_info(cut, 8), length);
  assert_int_equal(strlen(cut), 7);
  assert_memory_equal(cut, text, 7);
  assert_int_equal(cut[8], 'x');
}

static void statuses_have_names(void **state) {
  const char *const names[] = {"MHA_OK",
                               "MHA_ERROR_NULL",
                               "MHA_ERROR_STRUCT_SIZE",
                               "MHA_ERROR_SIZE",
                               "MHA_ERROR_HEADS",
                               "MHA_ERROR_STRIDE",
                               "MHA_ERROR_OVERFLOW",
                               "MHA_ERROR_VALUE",
                               "MHA_ERROR_LENGTH",
                               "MHA_ERROR_WEIGHTS",
                               "MHA_ERROR_OVERLAP",
                               "MHA_ERROR_BUSY",
                               "MHA_ERROR_MEMORY",
                               "MHA_ERROR_UNSUPPORTED",
                               "MHA_ERROR_IO",
                               "MHA_ERROR_FORMAT",
                               "MHA_ERROR_COMMUNICATION"};
  (void)state;
  for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
    assert_string_equal(mha_status_name((mha_status)i), names[i]);
  assert_string_equal(mha_status_name((mha_status)17), "unknown status");
  assert_string_equal(mha_status_name((mha_status)-1), "unknown status");
}

static void destroy_ignores_null(void **state) {
  (void)state;
  mha_context_destroy(NULL);
  mha_weights_destroy(NULL);
}

/* No options at all, and options that say nothing, are the same. */
static void defaults(void **state) {
  mha_context *context = NULL;
  mha_context_options options;
  mha_error error;
  (void)state;
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  mha_context_destroy(context);
  MHA_INIT(&options);
  test_expect(mha_context_create(&options, &context, &error), MHA_OK, &error);
  mha_context_destroy(context);
  options.n_threads = 1024;
  options.flags = MHA_LEAVE_BLAS_ALONE;
  test_expect(mha_context_create(&options, &context, &error), MHA_OK, &error);
  mha_context_destroy(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(scratch_grows_with_the_lengths_not_their_product),
      cmocka_unit_test(scratch_of_a_long_sequence_stays_under_100_mb),
      cmocka_unit_test(a_long_sequence_takes_what_was_said),
      cmocka_unit_test(scratch_of_nothing_has_an_address),
      cmocka_unit_test(sizes_beyond_32_bits),
      cmocka_unit_test(after_a_reserve_a_call_allocates_nothing),
      cmocka_unit_test(a_reserve_holds_for_few_queries),
      cmocka_unit_test(the_trace_shows_names_shapes_and_strides),
      cmocka_unit_test(the_traces_numbers_are_right),
      cmocka_unit_test(a_second_entry_is_refused),
      cmocka_unit_test(the_library_describes_itself),
      cmocka_unit_test(statuses_have_names),
      cmocka_unit_test(destroy_ignores_null),
      cmocka_unit_test(defaults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
