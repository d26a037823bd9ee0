/* Memory of training: after a reserve nothing is taken, for calls up to the shape; a failure at
 * each allocation leaves everything as it was; and what is needed grows with the length. */
#include "backward.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One at a time; too large for a stack. The first has the layer and the allocator, the second the
 * smaller calls. */
static test_fixture fixture, smaller;
static test_backward back;

typedef struct parts {
  mha_weights *weights;
  mha_context *context;
  mha_tape *tape;
} parts;

/* The layer takes memory of its own, so that the allocator counts for context and tape. */
static parts make_parts(int32_t engine) {
  parts p = {NULL, NULL, NULL};
  mha_error error;
  fixture.config.allocator = NULL;
  fixture.options.engine = engine;
  if (!fixture.c.core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &p.weights, &error), MHA_OK,
                &error);
  test_expect(mha_context_create(&fixture.options, &p.context, &error), MHA_OK, &error);
  test_expect(mha_tape_create(&fixture.allocator.mha, &p.tape, &error), MHA_OK, &error);
  return p;
}

static void destroy_parts(parts p) {
  mha_tape_destroy(p.tape);
  mha_context_destroy(p.context);
  mha_weights_destroy(p.weights);
  test_allocator_check(&fixture.allocator);
}

static bool has_engine(int32_t engine) {
  mha_context *context = NULL;
  mha_context_options options;
  MHA_INIT(&options);
  options.engine = engine;
  const bool has = mha_context_create(&options, &context, NULL) == MHA_OK;
  mha_context_destroy(context);
  return has;
}

static mha_shape shape_of(const test_case *c, int32_t use) {
  mha_shape shape;
  MHA_INIT(&shape);
  shape.packed = c->packed;
  shape.batch = c->B;
  shape.query_length = c->Lq;
  shape.key_length = c->Lk;
  shape.backward = use;
  if (c->core) {
    shape.n_heads = c->H;
    shape.value_head_size = c->dv;
    shape.n_kv_heads = c->G;
    shape.head_size = c->d;
    shape.cache_type = c->k_type;
  }
  return shape;
}

/* Forward and backward of a fixture, as a shape's use says: with the tape, or with the log-sum-exp,
 * or alone. */
static mha_status train(test_fixture *f, parts p, int32_t use, mha_error *error) {
  const bool kept = use == MHA_BACKWARD_WITH_TAPE;
  mha_tape *tape = kept && !f->c.core ? p.tape : NULL;
  f->args.tape = tape;
  back.args.tape = tape;
  back.attend.log_sum_exp = kept && f->c.core ? f->lse : NULL;
  mha_status status = test_call(f, p.context, p.weights, error);
  if (!status)
    status = test_backward_call(&back, f, p.context, p.weights, error);
  f->args.tape = NULL;
  return status;
}

/* ---- after a reserve ---- */

/* Options in every combination that takes scratch, by the bits of n. */
static test_case kind_of_call(uint64_t n, test_random *random) {
  const int64_t groups[] = {1, 2, 4, 1};
  test_case c = {.seed = n,
                 .core = n % 3 == 2,
                 .packed = n % 5 == 1,
                 .H = 4,
                 .G = groups[n % 4],
                 .d = n % 7 == 0 ? 32 : 6,
                 .dv = n % 7 == 0 ? 32 : 5,
                 .out_in = n & 1,
                 .biases = TEST_ALL,
                 .causal = n & 2,
                 .dropout = n & 4 ? 0.25F : 0.0F,
                 .alibi = n & 8,
                 .sinks = n & 4,
                 .softcap = n & 8 ? 20.0F : 0.0F,
                 .threads = 1 + (int)(n % 3),
                 .want = TEST_WANT_LSE};
  c.has_bias = !c.packed && n % 2 == 0;
  c.bias_extents = (unsigned)test_random_range(random, 0, TEST_FULL);
  c.query_lengths = c.key_lengths = !c.packed && n % 6 == 3;
  if (!c.core) {
    c.norm = (mha_norm)(n % 3);
    c.rope = n & 1 ? MHA_ROPE_HALVES : MHA_ROPE_NONE;
    c.rotary = 2;
  }
  if (n % 7 == 0) {
    c.query_type = MHA_Q4_0;
    c.key_type = MHA_BF16;
    c.value_type = c.v_type = MHA_Q8_0;
    c.output_type = c.k_type = MHA_F16;
  }
  return c;
}

static test_case shrink(test_case c, test_random *random) {
  c.B = test_random_range(random, 1, c.B);
  c.Lq = test_random_range(random, 1, test_random_range(random, 1, c.Lq));
  c.Lk = test_random_range(random, 1, test_random_range(random, 1, c.Lk));
  c.bias_extents = (unsigned)test_random_range(random, 0, TEST_FULL);
  return c;
}

static void reserve(parts p, const mha_shape *shape, int32_t engine) {
  const test_allocator *a = &fixture.allocator;
  mha_error error;
  size_t bytes = 0;
  size_t before = a->live_bytes;
  test_expect(mha_workspace_bytes(p.context, p.weights, shape, &bytes, &error), MHA_OK, &error);
  test_expect(mha_context_reserve(p.context, p.weights, shape, &error), MHA_OK, &error);
  if (engine == MHA_ENGINE_BLAS && a->live_bytes != before + bytes)
    test_failed("the context took %zu bytes, said %zu", a->live_bytes - before, bytes);
  if (!p.weights || shape->backward != MHA_BACKWARD_WITH_TAPE)
    return;
  before = a->live_bytes;
  test_expect(mha_tape_bytes(p.weights, shape, &bytes, &error), MHA_OK, &error);
  test_expect(mha_tape_reserve(p.tape, p.weights, shape, &error), MHA_OK, &error);
  if (a->live_bytes != before + bytes)
    test_failed("the tape took %zu bytes, said %zu", a->live_bytes - before, bytes);
}

static void expect_nothing_taken(const test_case *c, parts p, int32_t use) {
  const test_allocator *a = &fixture.allocator;
  const int64_t calls = a->calls;
  mha_error error;
  test_build(&smaller, c);
  test_backward_build(&back, &smaller);
  test_poison_results(&smaller);
  test_expect(train(&smaller, p, use, &error), MHA_OK, &error);
  if (a->calls != calls)
    test_failed("a call took memory");
  test_release(&smaller);
}

static void try_kind(uint64_t n, int32_t engine) {
  test_random random;
  test_random_seed(&random, n);
  test_case c = kind_of_call(n, &random);
  c.B = test_random_range(&random, 1, 11);
  c.Lq = test_random_range(&random, 1, test_random_range(&random, 1, 150));
  c.Lk = test_random_range(&random, 1, test_random_range(&random, 1, 300));
  const int32_t use = n % 11 < 7 ? MHA_BACKWARD_WITH_TAPE : MHA_BACKWARD_ALONE;
  test_build(&fixture, &c);
  c = fixture.c;
  const parts p = make_parts(engine);
  const mha_shape shape = shape_of(&c, use);
  reserve(p, &shape, engine);
  expect_nothing_taken(&c, p, use);
  for (int k = 0; k < 4; k++) {
    const test_case less = shrink(c, &random);
    expect_nothing_taken(&less, p, use);
  }
  test_case fewer = c; /* the fewest and the most of each: where tasks are cut otherwise */
  for (fewer.B = 1; fewer.B < c.B; fewer.B++)
    expect_nothing_taken(&fewer, p, use);
  fewer = c;
  fewer.Lq = 1;
  expect_nothing_taken(&fewer, p, use);
  fewer = c;
  fewer.Lk = 1;
  expect_nothing_taken(&fewer, p, use);
  destroy_parts(p);
  test_release(&fixture);
}

static void after_a_reserve_training_allocates_nothing(void **state) {
  const uint64_t most = test_small() ? 24 : 120;
  (void)state;
  for (uint64_t n = 0; n < most; n++)
    try_kind(n, MHA_ENGINE_BLAS);
}

static void also_with_the_other_engine(void **state) {
  const uint64_t most = test_small() ? 12 : 48;
  (void)state;
  if (!has_engine(MHA_ENGINE_XSMM))
    skip();
  for (uint64_t n = 0; n < most; n++)
    try_kind(n, MHA_ENGINE_XSMM);
}

/* A shape that is for training is for calls without it, too: those that validate. Few queries of
 * many heads take more than their way back. */
static void a_reserve_for_training_is_one_for_forward_calls(void **state) {
  const struct {
    int64_t H, d, Lq, Lk;
  } sizes[] = {{4, 5, 3, 7}, {256, 1, 8, 256}, {16, 1, 16, 3000}};
  (void)state;
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (int32_t use = MHA_BACKWARD_WITH_TAPE; use <= MHA_BACKWARD_ALONE; use++) {
      const test_case c = {.seed = i,
                           .H = sizes[i].H,
                           .d = sizes[i].d,
                           .Lq = sizes[i].Lq,
                           .Lk = sizes[i].Lk,
                           .Eq = 1};
      mha_error error;
      test_build(&fixture, &c);
      const parts p = make_parts(MHA_ENGINE_BLAS);
      const mha_shape shape = shape_of(&fixture.c, use);
      reserve(p, &shape, MHA_ENGINE_BLAS);
      const int64_t calls = fixture.allocator.calls;
      test_poison_results(&fixture);
      test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_OK, &error);
      assert_int_equal(fixture.allocator.calls, calls);
      destroy_parts(p);
      test_release(&fixture);
    }
}

/* ---- how much ---- */

static size_t bytes_of_training(const mha_context *context, const mha_weights *weights,
                                int64_t length, int32_t use) {
  mha_shape shape;
  mha_error error;
  size_t scratch = 0;
  size_t kept = 0;
  MHA_INIT(&shape);
  shape.batch = 1;
  shape.query_length = length;
  shape.backward = use;
  test_expect(mha_workspace_bytes(context, weights, &shape, &scratch, &error), MHA_OK, &error);
  if (use == MHA_BACKWARD_WITH_TAPE)
    test_expect(mha_tape_bytes(weights, &shape, &kept, &error), MHA_OK, &error);
  return scratch + kept;
}

/* A single array of scores [H][L][L] would be 2 GiB. */
static void memory_grows_with_the_length(void **state) {
  enum { LENGTH = 8192, WIDTH = 512 };
  (void)state;
  test_build(
      &fixture,
      &(test_case){.seed = 1, .Lq = 1, .H = 8, .d = WIDTH / 8, .threads = 2, .borrow = true});
  const parts p = make_parts(MHA_ENGINE_BLAS);
  for (int32_t use = MHA_BACKWARD_WITH_TAPE; use <= MHA_BACKWARD_ALONE; use++) {
    const size_t half = bytes_of_training(p.context, p.weights, LENGTH / 2, use);
    const size_t whole = bytes_of_training(p.context, p.weights, LENGTH, use);
    const size_t twice = bytes_of_training(p.context, p.weights, 2 * LENGTH, use);
    test_note("use %d: %zu, %zu, %zu bytes", (int)use, half, whole, twice);
    if (whole >= (size_t)200 << 20)
      test_failed("%zu bytes", whole);
    if (whole > 2 * half || twice > 2 * whole || twice - whole != 2 * (whole - half))
      test_failed("the bytes are not in proportion");
  }
  destroy_parts(p);
  test_release(&fixture);
}

/* ---- failures ---- */

/* More failures than this mean that the count never ends. */
enum { MOST = 50 };

static void expect_results_untouched(void) {
  for (int64_t at = 0; at < fixture.output.floats; at++)
    if (!test_equal_bits(fixture.output.data[at], fixture.before[at]))
      test_failed("output element %d was written", (int)at);
  for (int64_t at = 0; at < fixture.lse_n; at++)
    assert_true(test_is_poison(fixture.lse[at]));
}

/* The next allocation but `n` fails from now on. */
static void fail_in(int64_t n) {
  fixture.allocator.fail_at = fixture.allocator.calls + n;
}

static void build_for_failures(uint64_t n) {
  test_random random;
  test_random_seed(&random, n);
  test_case c = kind_of_call(n, &random);
  c.B = 2;
  c.Lq = 9;
  c.Lk = 13;
  test_build(&fixture, &c);
  test_backward_build(&back, &fixture);
}

/* What all gradients are, by a context and a tape that have all they want; malloc'd. */
static float *right_gradients(int32_t use) {
  mha_error error;
  const parts p = make_parts(MHA_ENGINE_BLAS);
  test_poison_results(&fixture);
  test_backward_poison(&back);
  test_expect(train(&fixture, p, use, &error), MHA_OK, &error);
  float *right = test_backward_copy(&back);
  destroy_parts(p);
  return right;
}

/* In a context and a tape that have nothing yet; after a failure the same two serve. */
static void training(void **state) {
  (void)state;
  for (uint64_t kind = 0; kind < 24; kind++)
    for (int32_t use = MHA_BACKWARD_WITH_TAPE; use <= MHA_BACKWARD_ALONE; use++) {
      build_for_failures(kind);
      float *right = right_gradients(use);
      mha_status status = MHA_ERROR_MEMORY;
      int64_t n = 0;
      while (status != MHA_OK && n < MOST) {
        fixture.allocator.fail_at = 0;
        const parts p = make_parts(MHA_ENGINE_BLAS);
        mha_error error;
        test_poison_results(&fixture);
        test_backward_poison(&back);
        fail_in(++n);
        status = train(&fixture, p, use, &error);
        if (status) {
          test_expect(status, MHA_ERROR_MEMORY, &error);
          assert_non_null(strstr(error.message, "; rule: "));
          test_backward_expect_poison(&back);
          fixture.allocator.fail_at = 0;
          test_expect(train(&fixture, p, use, &error), MHA_OK, &error);
        }
        test_backward_expect_bits(&back, right);
        destroy_parts(p);
      }
      assert_true(n > 1 && n < MOST);
      free(right);
      test_release(&fixture);
    }
}

/* A tape that cannot grow, or whose call cannot have its scratch, is empty: nobody goes back
 * through the call before. The context still serves the way back of a smaller call. */
static void a_tape_after_a_failure(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 2; n++) {
    mha_error error;
    build_for_failures(0);
    const parts p = make_parts(MHA_ENGINE_BLAS);
    mha_forward_args *a = &fixture.args;
    const int64_t batch = a->batch;
    fixture.rules.bias.data = NULL;
    back.args.d_bias = NULL;
    a->tape = p.tape;
    back.args.tape = p.tape;
    a->batch = 1;
    test_poison_results(&fixture);
    test_expect(mha_forward(p.context, p.weights, a, &error), MHA_OK, &error);
    a->batch = batch;
    test_poison_results(&fixture);
    fail_in(n); /* the tape, then the scratch */
    test_expect(mha_forward(p.context, p.weights, a, &error), MHA_ERROR_MEMORY, &error);
    assert_non_null(strstr(error.message, n == 1 ? "the tape" : "the scratch"));
    expect_results_untouched();
    fixture.allocator.fail_at = 0;
    for (a->batch = 1; a->batch <= batch; a->batch++) {
      test_expect(mha_backward(p.context, p.weights, a, &back.args, &error), MHA_ERROR_VALUE,
                  &error);
      test_backward_expect_poison(&back);
    }
    a->batch = batch;
    test_expect(train(&fixture, p, MHA_BACKWARD_WITH_TAPE, &error), MHA_OK, &error);
    destroy_parts(p);
    test_release(&fixture);
  }
}

static void creating_and_reserving_a_tape(void **state) {
  int anything = 0;
  mha_tape *tape = (mha_tape *)(void *)&anything;
  mha_error error;
  (void)state;
  build_for_failures(0);
  fail_in(1);
  test_expect(mha_tape_create(&fixture.allocator.mha, &tape, &error), MHA_ERROR_MEMORY, &error);
  assert_null(tape);
  assert_non_null(strstr(error.message, "; rule: "));
  fixture.allocator.fail_at = 0;
  const parts p = make_parts(MHA_ENGINE_BLAS);
  test_expect(train(&fixture, p, MHA_BACKWARD_WITH_TAPE, &error), MHA_OK, &error);
  float *right = test_backward_copy(&back);
  mha_shape shape = shape_of(&fixture.c, MHA_BACKWARD_WITH_TAPE);
  shape.query_length *= 100;
  const size_t live = fixture.allocator.live_bytes;
  fail_in(1);
  test_expect(mha_tape_reserve(p.tape, p.weights, &shape, &error), MHA_ERROR_MEMORY, &error);
  assert_int_equal(fixture.allocator.live_bytes, live);
  test_backward_poison(&back);
  back.args.tape = p.tape; /* as it was */
  test_expect(test_backward_call(&back, &fixture, p.context, p.weights, &error), MHA_OK, &error);
  test_backward_expect_bits(&back, right);
  free(right);
  destroy_parts(p);
  test_release(&fixture);
}

/* ---- one tape for many calls ---- */

/* Calls of other sizes, and of other layers, one after the other: each as with a tape of its own.
 * The second fixture has the other layer. */
static void a_tape_is_used_again(void **state) {
  (void)state;
  mha_tape *tape = NULL;
  mha_error error;
  test_allocator allocator;
  test_allocator_init(&allocator);
  test_expect(mha_tape_create(&allocator.mha, &tape, &error), MHA_OK, &error);
  const int64_t lengths[] = {3, 40, 1, 17, 64, 5};
  for (uint64_t n = 0; n < 18; n++) {
    test_random random;
    test_random_seed(&random, n);
    test_case c = kind_of_call(n, &random);
    c.core = false;
    c.B = 1 + (int64_t)n % 3;
    c.Lq = lengths[n % 6];
    c.Lk = lengths[(n + 1) % 6];
    test_build(&fixture, &c);
    test_backward_build(&back, &fixture);
    float *right = right_gradients(MHA_BACKWARD_ALONE);
    const parts p = make_parts(MHA_ENGINE_BLAS);
    fixture.args.tape = tape;
    back.args.tape = tape;
    test_poison_results(&fixture);
    test_backward_poison(&back);
    test_expect(mha_forward(p.context, p.weights, &fixture.args, &error), MHA_OK, &error);
    for (int turn = 0; turn < 2; turn++) { /* it may be read more than once */
      test_expect(mha_backward(p.context, p.weights, &fixture.args, &back.args, &error), MHA_OK,
                  &error);
      test_backward_expect_bits(&back, right);
      test_backward_poison(&back);
    }
    free(right);
    destroy_parts(p);
    test_release(&fixture);
  }
  mha_tape_destroy(tape);
  test_allocator_check(&allocator);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(after_a_reserve_training_allocates_nothing),
      cmocka_unit_test(also_with_the_other_engine),
      cmocka_unit_test(a_reserve_for_training_is_one_for_forward_calls),
      cmocka_unit_test(memory_grows_with_the_length),
      cmocka_unit_test(training),
      cmocka_unit_test(a_tape_after_a_failure),
      cmocka_unit_test(creating_and_reserving_a_tape),
      cmocka_unit_test(a_tape_is_used_again),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
