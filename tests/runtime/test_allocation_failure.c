/* Out of memory: the n-th allocation fails for n = 1, 2, … until a call succeeds. Every failure is
 * MHA_ERROR_MEMORY, leaks nothing, writes nothing and leaves the context usable. */
#include "fixture.h"

#include <stdlib.h>
#include <string.h>

static test_fixture fixture; /* one at a time; too large for a stack */

/* More failures than this mean that the count never ends. */
enum { MOST = 50 };

static void expect_memory_error(mha_status status, const mha_error *error) {
  test_expect(status, MHA_ERROR_MEMORY, error);
  test_allocator_check(&fixture.allocator);
}

static void expect_results_untouched(void) {
  for (int64_t at = 0; at < fixture.output.floats; at++)
    if (!test_equal_bits(fixture.output.data[at], fixture.before[at]))
      test_failed("output element %d was written", (int)at);
  for (int64_t at = 0; at < fixture.weights_n; at++)
    assert_true(test_is_poison(fixture.weights[at]));
  for (int64_t at = 0; at < fixture.average_n; at++)
    assert_true(test_is_poison(fixture.average[at]));
  for (int64_t at = 0; at < fixture.lse_n; at++)
    assert_true(test_is_poison(fixture.lse[at]));
}

/* The next allocation but `n` fails from now on. */
static void fail_in(int64_t n) {
  fixture.allocator.fail_at = fixture.allocator.calls + n;
}

static void creating_a_layer(void **state) {
  (void)state;
  for (int borrow = 0; borrow < 2; borrow++) {
    mha_status status = MHA_ERROR_MEMORY;
    int64_t n = 0;
    test_build(&fixture, &(test_case){.seed = 1,
                                      .Lq = 3,
                                      .H = 4,
                                      .G = 2,
                                      .d = 3,
                                      .source = TEST_SELF,
                                      .biases = TEST_ALL,
                                      .borrow = borrow});
    while (status != MHA_OK && n < MOST) {
      int anything = 0;
      mha_weights *weights = (mha_weights *)(void *)&anything;
      mha_error error;
      fail_in(++n);
      status = mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error);
      if (status) {
        expect_memory_error(status, &error);
        assert_null(weights);
      }
      if (!status)
        mha_weights_destroy(weights);
      test_allocator_check(&fixture.allocator);
    }
    assert_true(n > 1 && n < MOST);
    test_release(&fixture);
  }
}

static void loading_a_layer(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  int64_t n = 0;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1});
  while (status != MHA_OK && n < MOST) {
    mha_weights *weights = NULL;
    mha_config config;
    mha_error error;
    mha_config_init(&config, 0, 2);
    config.allocator = &fixture.allocator.mha;
    fail_in(++n);
    status = mha_weights_load(&config, MHA_TEST_DATA_DIR "/article", NULL, &weights, &error);
    if (status)
      expect_memory_error(status, &error);
    if (!status)
      mha_weights_destroy(weights);
    test_allocator_check(&fixture.allocator);
  }
  assert_true(n > 1 && n < MOST);
  test_release(&fixture);
}

static void creating_a_context(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  int64_t n = 0;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1});
  while (status != MHA_OK && n < MOST) {
    int anything = 0;
    mha_context *context = (mha_context *)(void *)&anything;
    mha_error error;
    fail_in(++n);
    status = mha_context_create(&fixture.options, &context, &error);
    if (status) {
      expect_memory_error(status, &error);
      assert_null(context);
    }
    if (!status)
      mha_context_destroy(context);
    test_allocator_check(&fixture.allocator);
  }
  assert_true(n > 1 && n < MOST);
  test_release(&fixture);
}

static void creating_a_cache(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  int64_t n = 0;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 1});
  while (status != MHA_OK && n < MOST) {
    int anything = 0;
    mha_cache *cache = (mha_cache *)(void *)&anything;
    mha_cache_options options;
    mha_error error;
    MHA_INIT(&options);
    options.n_entries = options.capacity = options.n_kv_heads = options.head_size = 3;
    options.allocator = &fixture.allocator.mha;
    fail_in(++n);
    status = mha_cache_create(&options, &cache, &error);
    if (status) {
      expect_memory_error(status, &error);
      assert_null(cache);
    }
    if (!status)
      mha_cache_destroy(cache);
    test_allocator_check(&fixture.allocator);
  }
  assert_true(n > 1 && n < MOST);
  test_release(&fixture);
}

/* What calls of many kinds need: weights, averages, packed input, several threads; from kind 16 on
 * matrices, keys and values that are not float32. */
enum { N_KINDS = 32 };

static test_case kind_of_call(int kind) {
  test_case c = {.seed = (uint64_t)kind,
                 .core = kind & 1,
                 .packed = (kind & 2) != 0,
                 .B = 2,
                 .Lq = 9,
                 .Lk = 13,
                 .H = 4,
                 .G = 2,
                 .d = 3,
                 .biases = TEST_ALL,
                 .accumulate = (kind & 5) == 4,
                 .threads = 1 + kind / 8 % 2,
                 .causal = true,
                 .want = kind & 2 ? TEST_WANT_LSE : TEST_WANT_ALL};
  if (kind >= 16) {
    c.d = 32;
    c.query_type = MHA_Q4_0;
    c.key_type = c.k_type = MHA_Q8_0;
    c.value_type = c.v_type = MHA_F16;
    c.output_type = MHA_BF16;
  }
  return c;
}

typedef struct parts {
  mha_weights *weights;
  mha_context *context;
} parts;

/* The layer takes memory of its own, so that the fixture's allocator counts for the context. */
static parts make_parts(void) {
  parts p = {NULL, NULL};
  fixture.config.allocator = NULL;
  if (!fixture.c.core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &p.weights, NULL), MHA_OK,
                NULL);
  fixture.allocator.fail_at = 0;
  test_expect(mha_context_create(&fixture.options, &p.context, NULL), MHA_OK, NULL);
  return p;
}

static void destroy_parts(parts p) {
  mha_context_destroy(p.context);
  mha_weights_destroy(p.weights);
  test_allocator_check(&fixture.allocator);
}

/* In a context that has nothing yet; after the failure the same context gives the right answer. */
static void calling(void **state) {
  (void)state;
  for (int kind = 0; kind < N_KINDS; kind++) {
    const test_case c = kind_of_call(kind);
    mha_status status = MHA_ERROR_MEMORY;
    oracle_result result;
    int64_t n = 0;
    test_build(&fixture, &c);
    test_ask_oracle(&fixture, &result);
    while (status != MHA_OK && n < MOST) {
      const parts p = make_parts();
      const int64_t live = fixture.allocator.live;
      mha_error error;
      test_poison_results(&fixture);
      fail_in(++n);
      status = test_call(&fixture, p.context, p.weights, &error);
      if (status) {
        test_expect(status, MHA_ERROR_MEMORY, &error);
        assert_int_equal(fixture.allocator.live, live);
        expect_results_untouched();
        fixture.allocator.fail_at = 0;
        test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_OK, &error);
      }
      test_judge(&fixture, &result);
      destroy_parts(p);
    }
    assert_true(n > 1 && n < MOST);
    oracle_free(&result);
    test_release(&fixture);
  }
}

/* A cached call that cannot have its scratch appends nothing; given it, it goes on. */
static void calling_with_a_cache(void **state) {
  (void)state;
  for (int64_t Lq = 1; Lq <= 20; Lq += 19) {
    test_case c = kind_of_call(0);
    mha_cache *cache = NULL;
    mha_cache_options options;
    mha_error error;
    int64_t length = -1;
    c.Lq = Lq;
    c.source = TEST_SELF;
    c.rope = MHA_ROPE_INTERLEAVED;
    c.rotary = 2;
    c.want = TEST_WANT_LSE;
    test_build(&fixture, &c);
    const parts p = make_parts();
    MHA_INIT(&options);
    options.n_entries = c.B;
    options.capacity = Lq;
    options.n_kv_heads = c.G;
    options.head_size = c.d;
    test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
    fixture.args.cache = cache;
    test_poison_results(&fixture);
    fail_in(1);
    test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_ERROR_MEMORY, &error);
    expect_results_untouched();
    for (int64_t b = 0; b < c.B; b++) {
      test_expect(mha_cache_length(cache, b, &length, &error), MHA_OK, &error);
      assert_int_equal(length, 0);
    }
    fixture.allocator.fail_at = 0;
    test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_OK, &error);
    test_judge_now(&fixture); /* off is 0: the uncached call */
    mha_cache_destroy(cache);
    destroy_parts(p);
    test_release(&fixture);
  }
}

/* A call that must grow the scratch of an earlier, smaller one: when it cannot, the smaller call
 * still runs without taking memory. */
static void growing(void **state) {
  (void)state;
  for (int kind = 0; kind < 2; kind++) {
    test_case c = kind_of_call(kind);
    mha_error error;
    oracle_result result;
    test_build(&fixture, &c);
    test_ask_oracle(&fixture, &result);
    const parts p = make_parts();
    const int64_t Lq = c.Lq;
    fixture.results.weights = fixture.results.average = fixture.results.log_sum_exp = NULL;
    fixture.args.query_length = fixture.q.length = 1;
    fixture.args.batch = fixture.q.batch = fixture.k.batch = fixture.v.batch = 1;
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_OK, &error);
    fixture.args.query_length = fixture.q.length = Lq;
    fixture.args.batch = fixture.q.batch = fixture.k.batch = fixture.v.batch = c.B;
    const size_t bytes = fixture.allocator.live_bytes;
    test_poison_results(&fixture);
    fail_in(1);
    test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_ERROR_MEMORY, &error);
    assert_int_equal(fixture.allocator.live_bytes, bytes);
    expect_results_untouched();
    fixture.args.query_length = fixture.q.length = 1;
    fixture.args.batch = fixture.q.batch = fixture.k.batch = fixture.v.batch = 1;
    fail_in(1); /* nothing is taken, so nothing fails */
    test_expect(test_call(&fixture, p.context, p.weights, &error), MHA_OK, &error);
    destroy_parts(p);
    oracle_free(&result);
    test_release(&fixture);
  }
}

static void reserving(void **state) {
  (void)state;
  for (int kind = 0; kind < N_KINDS; kind++) {
    const test_case c = kind_of_call(kind);
    mha_status status = MHA_ERROR_MEMORY;
    mha_shape shape;
    int64_t n = 0;
    test_build(&fixture, &c);
    MHA_INIT(&shape);
    shape.packed = c.packed;
    shape.batch = c.B;
    shape.query_length = c.Lq;
    shape.key_length = c.Lk;
    shape.n_heads = c.H;
    shape.value_head_size = fixture.c.dv;
    shape.cache_type = (int32_t)c.k_type;
    const parts p = make_parts();
    const int64_t live = fixture.allocator.live;
    while (status != MHA_OK && n < MOST) {
      mha_error error;
      fail_in(++n);
      status = mha_context_reserve(p.context, p.weights, &shape, &error);
      if (status) {
        test_expect(status, MHA_ERROR_MEMORY, &error);
        assert_int_equal(fixture.allocator.live, live);
      }
    }
    assert_true(n > 1 && n < MOST);
    destroy_parts(p);
    test_release(&fixture);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(creating_a_layer),
      cmocka_unit_test(loading_a_layer),
      cmocka_unit_test(creating_a_context),
      cmocka_unit_test(creating_a_cache),
      cmocka_unit_test(calling),
      cmocka_unit_test(calling_with_a_cache),
      cmocka_unit_test(growing),
      cmocka_unit_test(reserving),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
