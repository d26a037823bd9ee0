/* The choice of an engine: what is refused, that both give the judge's answer, what packing costs
 * and keeps, that nothing is taken after a reserve; and scores that rise from tile to tile, which
 * both engines walk in one pass. */
#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static test_fixture fixture;

static bool has_xsmm(void) {
  char text[4096];
  (void)mha_build_info(text, sizeof text);
  return strstr(text, "\nengines: blas, xsmm\n") != NULL;
}

static mha_context *make_context(mha_engine_choice engine, int threads) {
  mha_context *context = NULL;
  mha_error error;
  mha_context_options options;
  MHA_INIT(&options);
  options.engine = (int32_t)engine;
  options.n_threads = threads;
  options.allocator = &fixture.allocator.mha;
  test_expect(mha_context_create(&options, &context, &error), MHA_OK, &error);
  return context;
}

static mha_weights *make_weights(bool pack) {
  mha_weights *weights = NULL;
  mha_error error;
  fixture.config.flags |= pack ? MHA_PACK_WEIGHTS : 0;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  return weights;
}

/* ---- what is refused ---- */

static void engines_that_are_none(void **state) {
  const int32_t engines[] = {-1, 2, INT32_MAX, INT32_MIN};
  mha_context *context = NULL;
  mha_context_options options;
  mha_error error;
  (void)state;
  for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
    MHA_INIT(&options);
    options.engine = engines[i];
    assert_int_equal(mha_context_create(&options, &context, &error), MHA_ERROR_VALUE);
    assert_non_null(strstr(error.message, "options.engine"));
    assert_null(context);
  }
  MHA_INIT(&options);
  options.reserved = 1;
  assert_int_equal(mha_context_create(&options, &context, &error), MHA_ERROR_VALUE);
  assert_non_null(strstr(error.message, "options.reserved"));
}

/* Where there is no libxsmm, or the CPU has none of its targets, both requests are errors. */
static void an_engine_that_cannot_be_had(void **state) {
  mha_context *context = NULL;
  mha_weights *weights = NULL;
  mha_context_options options;
  mha_error error;
  (void)state;
  if (has_xsmm())
    skip();
  MHA_INIT(&options);
  options.engine = MHA_ENGINE_XSMM;
  assert_int_equal(mha_context_create(&options, &context, &error), MHA_ERROR_UNSUPPORTED);
  assert_non_null(strstr(error.message, "MHA_ENGINE_XSMM"));
  assert_non_null(strstr(error.message, "; rule: "));
  assert_null(context);
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 3, .H = 2, .d = 4});
  fixture.config.flags |= MHA_PACK_WEIGHTS;
  assert_int_equal(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error),
                   MHA_ERROR_UNSUPPORTED);
  assert_non_null(strstr(error.message, "MHA_PACK_WEIGHTS"));
  assert_null(weights);
  test_release(&fixture);
}

/* Heads of a shape that no call can have. */
static void wrong_heads_of_a_shape(void **state) {
  const struct {
    int64_t n_kv_heads, head_size;
    mha_status status;
    const char *word;
  } rows[] = {{-1, 4, MHA_ERROR_SIZE, "shape.n_kv_heads"},
              {3, 4, MHA_ERROR_HEADS, "shape.n_kv_heads"},
              {8, 4, MHA_ERROR_HEADS, "shape.n_kv_heads"},
              {2, -1, MHA_ERROR_SIZE, "shape.head_size"}};
  (void)state;
  test_allocator_init(&fixture.allocator);
  mha_context *context = make_context(MHA_ENGINE_BLAS, 1);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mha_shape shape;
    mha_error error;
    size_t bytes = 77;
    MHA_INIT(&shape);
    shape.batch = shape.query_length = 1;
    shape.n_heads = 4;
    shape.value_head_size = 4;
    shape.n_kv_heads = rows[i].n_kv_heads;
    shape.head_size = rows[i].head_size;
    assert_int_equal(mha_workspace_bytes(context, NULL, &shape, &bytes, &error), rows[i].status);
    assert_non_null(strstr(error.message, rows[i].word));
    assert_int_equal(mha_context_reserve(context, NULL, &shape, &error), rows[i].status);
    assert_int_equal(bytes, 77);
  }
  mha_context_destroy(context);
}

/* ---- both engines, one answer ---- */

static test_case case_of(uint64_t n) {
  const test_case c = {.seed = n,
                       .B = 1 + (int64_t)(n % 3),
                       .Lq = 1 + (int64_t)(n * 37 % 210),
                       .Lk = 1 + (int64_t)(n * 91 % 700),
                       .H = 6,
                       .G = n % 2 ? 6 : 3,
                       .d = 3 + (int64_t)(n % 5) * 8,
                       .dv = 5 + (int64_t)(n % 7) * 9,
                       .Eq = 40 + (int64_t)(n % 50),
                       .Eo = 30 + (int64_t)(n % 99),
                       .core = n % 4 == 3,
                       .layout = (test_layout)(n % 3),
                       .out_in = n % 5 == 0,
                       .biases = n % 3 ? TEST_ALL : 0,
                       .accumulate = n % 6 == 1,
                       .causal = n % 7 < 3,
                       .window = n % 11 == 1,
                       .left = 90,
                       .right = 100,
                       .alignment = (mha_alignment)(n % 2),
                       .key_lengths = n % 13 == 2,
                       .has_mask = n % 8 == 5,
                       .mask_extents = TEST_FULL_ROWS,
                       .alibi = n % 10 == 7,
                       .sinks = n % 9 == 4,
                       .scale_given = n % 12 == 6,
                       .scale = n % 24 == 6 ? -0.3F : 0.0F,
                       .softcap = n % 14 == 8 ? 3.0F : 0.0F,
                       .want = TEST_WANT_ALL};
  return c;
}

static void both_engines_are_right(void **state) {
  (void)state;
  if (!has_xsmm())
    skip();
  for (uint64_t n = 0; n < (test_small() ? 12 : 120); n++) {
    const test_case c = case_of(n);
    oracle_result result;
    float *first = NULL;
    test_build(&fixture, &c);
    test_ask_oracle(&fixture, &result);
    mha_weights *weights = c.core ? NULL : make_weights(n % 5 != 4);
    for (int k = 0; k < 3; k++) {
      mha_error error;
      mha_context *context =
          make_context(k < 2 ? MHA_ENGINE_XSMM : MHA_ENGINE_BLAS, 1 + 2 * (k % 2));
      test_note("case %d, context %d", (int)n, k);
      test_poison_results(&fixture);
      test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
      test_judge(&fixture, &result);
      test_check_gaps(&fixture);
      if (k == 0)
        first = test_gather(&fixture.output);
      if (k == 1) /* on three threads the same bits */
        test_same_output(&fixture, first);
      mha_context_destroy(context);
    }
    free(first);
    mha_weights_destroy(weights);
    test_allocator_check(&fixture.allocator);
    oracle_free(&result);
    test_release(&fixture);
  }
}

/* ---- packing ---- */

static void packing_takes_the_matrices_once_more(void **state) {
  (void)state;
  if (!has_xsmm())
    skip();
  test_build(&fixture, &(test_case){.seed = 5, .Lq = 9, .H = 2, .d = 50, .borrow = true});
  mha_weights *plain = make_weights(false);
  const size_t before = fixture.allocator.live_bytes;
  mha_weights *packed = make_weights(true);
  const size_t taken = fixture.allocator.live_bytes - before;
  assert_true(taken >= (size_t)4 * 100 * 128 * sizeof(float)); /* four of 100 x 100, rounded up */
  assert_true(taken < (size_t)4 * 100 * 128 * sizeof(float) + 4096);
  mha_config config;
  MHA_INIT(&config);
  test_expect(mha_weights_config(packed, &config, NULL), MHA_OK, NULL);
  assert_true(config.flags & MHA_PACK_WEIGHTS);
  mha_weights_destroy(plain);
  mha_weights_destroy(packed);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

/* A matrix that is borrowed and packed is read once; CBLAS goes on reading what is borrowed. */
static void what_is_packed_does_not_change(void **state) {
  (void)state;
  if (!has_xsmm())
    skip();
  test_build(&fixture, &(test_case){.seed = 6, .Lq = 20, .H = 2, .d = 40, .borrow = true});
  mha_error error;
  mha_weights *weights = make_weights(true);
  mha_context *context = make_context(MHA_ENGINE_XSMM, 1);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  float *first = test_gather(&fixture.output);
  for (int64_t at = 0; at < 80 * 80; at++)
    fixture.wo.data[at] *= 2;
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  test_same_output(&fixture, first);
  mha_context *other = make_context(MHA_ENGINE_BLAS, 1);
  test_expect(test_call(&fixture, other, weights, &error), MHA_OK, &error);
  test_judge_now(&fixture);
  free(first);
  mha_context_destroy(other);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* ---- memory ---- */

static mha_shape shape_of(const test_case *c) {
  mha_shape shape;
  MHA_INIT(&shape);
  shape.packed = c->packed;
  shape.batch = fixture.c.B;
  shape.query_length = fixture.c.Lq;
  shape.key_length = fixture.c.Lk;
  shape.n_heads = fixture.c.H;
  shape.n_kv_heads = fixture.c.G;
  shape.head_size = fixture.c.d;
  shape.value_head_size = fixture.c.dv;
  return shape;
}

/* Also with rows that lie as no reserve foresees. */
static void after_a_reserve_nothing_is_taken(void **state) {
  (void)state;
  if (!has_xsmm())
    skip();
  for (uint64_t n = 0; n < 24; n++) {
    const test_case c = {.seed = n,
                         .core = n & 1,
                         .packed = n % 8 >= 6,
                         .layout = (test_layout)(n % 8 >= 6 ? 0
                                                 : n & 1    ? n % 4
                                                            : n % 3),
                         .B = 2,
                         .Lq = 5 + (int64_t)n * 9,
                         .Lk = 300,
                         .H = 4,
                         .G = 2,
                         .d = 20,
                         .dv = 9,
                         .causal = n & 4,
                         .threads = 2};
    mha_error error;
    test_build(&fixture, &c);
    mha_weights *weights = c.core ? NULL : make_weights(true);
    mha_context *context = make_context(MHA_ENGINE_XSMM, 2);
    const mha_shape shape = shape_of(&c);
    test_note("case %d", (int)n);
    test_expect(mha_context_reserve(context, weights, &shape, &error), MHA_OK, &error);
    const int64_t calls = fixture.allocator.calls;
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
    assert_int_equal(fixture.allocator.calls, calls);
    test_judge_now(&fixture);
    mha_context_destroy(context);
    mha_weights_destroy(weights);
    test_allocator_check(&fixture.allocator);
    test_release(&fixture);
  }
}

/* ---- scores that rise ---- */

/* One query [d = 1], keys j with the score scores[j], values of one number. The weights are judged
 * in double precision; bound: the rounding of the largest score, thrice. */
static void expect_softmax(mha_engine_choice engine, const float *scores, int64_t n, float scale) {
  enum { ROWS = 20 };
  mha_error error;
  mha_rules rules;
  mha_attend_args args;
  float *values = test_allocate((size_t)n, sizeof *values);
  float queries[ROWS], output[ROWS];
  double largest = -INFINITY, sum = 0, right = 0, size = 0;
  for (int64_t j = 0; j < n; j++) {
    values[j] = (float)(j % 7) - 3;
    largest = fmax(largest, (double)scale * (double)scores[j]);
  }
  for (int64_t j = 0; j < n; j++) {
    const double p = exp((double)scale * (double)scores[j] - largest);
    sum += p;
    right += p * (double)values[j];
    size += p * fabs((double)values[j]);
  }
  for (int r = 0; r < ROWS; r++)
    queries[r] = 1;
  const mha_tensor q = {queries, 1, ROWS, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor k = {scores, 1, n, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor v = {values, 1, n, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  MHA_INIT(&rules);
  rules.flags = MHA_SCALE;
  rules.scale = scale;
  MHA_INIT(&args);
  args.rules = &rules;
  args.output = output;
  mha_context *context = make_context(engine, 1);
  test_expect(mha_attend(context, &q, &k, &v, &args, &error), MHA_OK, &error);
  for (int r = 0; r < ROWS; r++)
    test_near("output", (double)output[r], right / sum,
              3 * ldexp(4 + fabs(largest), -24) * size / sum + 1e-6);
  mha_context_destroy(context);
  free(values);
}

/* From tile to tile by little, by so much that exp overflows before the tile is over, or down. */
static void scores_may_rise_as_they_like(void **state) {
  enum { N = 2100 };
  const double steps[] = {0, 0.01, 1, 20, 59, 61, 80, 90, 200, 1e4, 1e9, -1, -100, -1e6};
  const float scales[] = {1.0F, 0.125F, 0.3F, 7.0F};
  float *scores = test_allocate(N, sizeof *scores);
  (void)state;
  test_allocator_init(&fixture.allocator);
  for (int engine = 0; engine < (has_xsmm() ? 2 : 1); engine++)
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++)
      for (size_t f = 0; f < sizeof scales / sizeof *scales; f++)
        for (int64_t tile = 64; tile <= 512; tile *= 8) {
          for (int64_t j = 0; j < N; j++) {
            const int64_t step = j / tile;
            const int64_t pair = j / 2 % 50; /* each key has a neighbour of the same score */
            scores[j] = (float)(steps[s] * (double)step + 0.1 * (double)pair) / scales[f];
          }
          test_note("engine %d, steps of %g every %d keys, scale %g", engine, steps[s], (int)tile,
                    (double)scales[f]);
          expect_softmax((mha_engine_choice)engine, scores, N, scales[f]);
        }
  free(scores);
}

/* A score far above all others in the second tile: the weights that are asked for, which are made
 * from the scores once more, are those of the output. */
static void weights_belong_to_the_output(void **state) {
  enum { L = 700, SIZE = 64, LARGE = 650 };
  const double sizes[] = {1e2, 1e3, 1e4, 1e6, 1e8, 1e30};
  (void)state;
  for (int engine = 0; engine < (has_xsmm() ? 2 : 1); engine++)
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
      const test_case c = {
          .seed = s, .core = true, .Lq = L, .Lk = L, .d = SIZE, .want = TEST_WANT_ALL};
      mha_error error;
      test_note("engine %d, size %g", engine, sizes[s]);
      test_build(&fixture, &c);
      for (int64_t x = 0; x < SIZE; x++)
        for (int64_t i = 0; i < L; i++) {
          float *q = test_at(&fixture.query, 0, i, 0, x);
          float *k = test_at(&fixture.key, 0, i, 0, x);
          *q = fabsf(*q) + 0.5F;
          *k *= i == LARGE ? (float)sizes[s] : 1e-3F;
          *k = i == LARGE ? fabsf(*k) : *k;
        }
      mha_context *context = make_context((mha_engine_choice)engine, 1);
      test_poison_results(&fixture);
      test_expect(test_call(&fixture, context, NULL, &error), MHA_OK, &error);
      test_judge_now(&fixture);
      for (int64_t i = 0; i < L; i++)
        assert_true(fixture.weights[i * L + LARGE] == 1.0F);
      *test_at(&fixture.value, 0, LARGE, 0, 3) = INFINITY;
      test_expect(test_call(&fixture, context, NULL, &error), MHA_OK, &error);
      for (int64_t i = 0; i < L; i++) /* all weight is on it, and infinite values make a row NaN */
        assert_true(isnan(*test_at(&fixture.output, 0, i, 0, 3)));
      mha_context_destroy(context);
      test_release(&fixture);
    }
}

/* A score of -inf hides its key also where only the scale makes it so; a NaN does not hide among
 * such. */
static void the_scale_may_make_minus_infinity(void **state) {
  enum { L = 20 };
  float queries[L], keys[L], values[L], output[L];
  mha_rules rules;
  mha_attend_args args;
  mha_error error;
  (void)state;
  test_allocator_init(&fixture.allocator);
  const mha_tensor q = {queries, 1, L, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor k = {keys, 1, L, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor v = {values, 1, L, 1, 1, 0, 0, 0, 0, MHA_F32, 0};
  for (int engine = 0; engine < (has_xsmm() ? 2 : 1); engine++) {
    mha_context *context = make_context((mha_engine_choice)engine, 1);
    for (int j = 0; j < L; j++) {
      queries[j] = 1;
      keys[j] = j == 5 ? -4e10F : 0;
      values[j] = j == 5 ? NAN : (float)j;
    }
    MHA_INIT(&rules);
    rules.flags = MHA_SCALE;
    rules.scale = 1e30F;
    MHA_INIT(&args);
    args.rules = &rules;
    args.output = output;
    test_note("engine %d", engine);
    test_expect(mha_attend(context, &q, &k, &v, &args, &error), MHA_OK, &error);
    test_near("output", (double)output[0], 185.0 / 19, 1e-5);
    for (int j = 0; j < L; j++)
      keys[j] = j == 7 ? NAN : -4e10F;
    test_expect(mha_attend(context, &q, &k, &v, &args, &error), MHA_OK, &error);
    assert_true(isnan(output[0]));
    mha_context_destroy(context);
  }
}

/* Sizes whose product overflows are an answer, not an accident. */
static void huge_heads_of_a_shape(void **state) {
  mha_shape shape;
  mha_error error;
  size_t bytes = 0;
  (void)state;
  test_allocator_init(&fixture.allocator);
  for (int engine = 0; engine < (has_xsmm() ? 2 : 1); engine++) {
    mha_context *context = make_context((mha_engine_choice)engine, 1);
    MHA_INIT(&shape);
    shape.batch = shape.query_length = shape.key_length = 100;
    shape.n_heads = (int64_t)1 << 60;
    shape.value_head_size = 1;
    shape.head_size = 64;
    assert_int_equal(mha_workspace_bytes(context, NULL, &shape, &bytes, &error),
                     MHA_ERROR_OVERFLOW);
    assert_int_equal(mha_context_reserve(context, NULL, &shape, &error), MHA_ERROR_OVERFLOW);
    mha_context_destroy(context);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(engines_that_are_none),
      cmocka_unit_test(an_engine_that_cannot_be_had),
      cmocka_unit_test(wrong_heads_of_a_shape),
      cmocka_unit_test(both_engines_are_right),
      cmocka_unit_test(packing_takes_the_matrices_once_more),
      cmocka_unit_test(what_is_packed_does_not_change),
      cmocka_unit_test(after_a_reserve_nothing_is_taken),
      cmocka_unit_test(scores_may_rise_as_they_like),
      cmocka_unit_test(weights_belong_to_the_output),
      cmocka_unit_test(the_scale_may_make_minus_infinity),
      cmocka_unit_test(huge_heads_of_a_shape),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
