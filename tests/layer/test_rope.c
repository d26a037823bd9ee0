/* Rotary positions in a layer without a cache: the rotation by hand and against long double,
 * tables, offsets and given positions, and what is refused. */
#include "fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

/* Unit roundoff of float32. */
static const double u = 0x1p-24;

/* ---- Q and K as the trace shows them --------------------------------------------------------- */

enum { MOST = 1 << 16 };

typedef struct traced {
  float q[MOST], k[MOST];
} traced;

static traced shown;

static void copy_step(const mha_trace_step *step, float *to) {
  int64_t at = 0;
  for (int64_t b = 0; b < step->shape[0]; b++)
    for (int64_t i = 0; i < step->shape[1]; i++)
      for (int64_t c = 0; c < step->shape[2]; c++, at++) {
        assert_true(at < MOST);
        to[at] = step->data[b * step->strides[0] + i * step->strides[1] + c * step->strides[2]];
      }
}

static void remember(void *user, const mha_trace_step *step) {
  traced *t = user;
  if (strcmp(step->name, "Q") == 0)
    copy_step(step, t->q);
  if (strcmp(step->name, "K") == 0)
    copy_step(step, t->k);
}

/* Runs the fixture and keeps Q and K. */
static void run_traced(void) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  test_expect(mha_context_trace(context, remember, &shown, &error), MHA_OK, &error);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

/* ---- By hand --------------------------------------------------------------------------------- */

/* d = 4 and base 4: pair 0 turns by the position, pair 1 by half of it. Position 2 is angles 2, 1.
 */
static void a_head_of_four_by_hand(void **state) {
  const double c1 = 0.54030230586813977, s1 = 0.84147098480789651;
  const double c2 = -0.41614683654714241, s2 = 0.90929742682568170;
  const double turned[2][4] = {
      {1 * c2 - 3 * s2, 2 * c1 - 4 * s1, 3 * c2 + 1 * s2, 4 * c1 + 2 * s1}, /* halves */
      {1 * c2 - 2 * s2, 2 * c2 + 1 * s2, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1}  /* interleaved */
  };
  (void)state;
  for (int mode = 0; mode < 2; mode++) {
    test_build(&fixture, &(test_case){.Lq = 3,
                                      .d = 4,
                                      .absent = TEST_ALL,
                                      .source = TEST_SELF,
                                      .rope = mode ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALVES,
                                      .rope_base = 4.0});
    for (int64_t at = 0; at < 12; at++)
      fixture.query.data[at] = (float)(1 + at % 4);
    run_traced();
    for (int c = 0; c < 4; c++) {
      /* cos and sin rounded, two products and a sum */
      test_near("Q of token 2", (double)shown.q[8 + c], turned[mode][c], 4 * u * 8);
      test_near("K of token 2", (double)shown.k[8 + c], turned[mode][c], 4 * u * 8);
      test_near("Q of token 0", (double)shown.q[c], 1 + c, 0.0);
    }
    test_release(&fixture);
  }
}

/* Only the first rotary_size elements of each head turn. */
static void the_rest_of_a_head_passes(void **state) {
  (void)state;
  for (int mode = 0; mode < 2; mode++)
    for (int64_t rotary = 2; rotary <= 6; rotary += 2) {
      test_build(&fixture, &(test_case){.seed = 1,
                                        .B = 2,
                                        .Lq = 5,
                                        .H = 3,
                                        .d = 6,
                                        .absent = TEST_ALL,
                                        .source = TEST_SELF,
                                        .rotary = rotary,
                                        .rope = mode ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALVES});
      run_traced();
      for (int64_t at = 0; at < 2 * 5 * 18; at++) {
        const bool first_token = at / 18 % 5 == 0, passes = at % 6 >= rotary;
        assert_int_equal(test_equal_bits(shown.q[at], fixture.query.data[at]),
                         first_token || passes);
      }
      test_release(&fixture);
    }
}

/* Position 0, however it is spelled, is no rotation at all: the bits of a layer without one. */
static void position_zero_changes_nothing(void **state) {
  static const int64_t zeros[14],
      tens[14] = {10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10};
  (void)state;
  for (int mode = 0; mode < 2; mode++) {
    float *plain = NULL;
    for (int way = 0; way < 3; way++) {
      test_build(
          &fixture,
          &(test_case){.seed = 2, .B = 2, .Lq = 7, .H = 4, .G = 2, .d = 8, .source = TEST_SELF});
      if (way > 0) {
        fixture.config.rope = mode ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALVES;
        fixture.args.query_positions = way == 1 ? zeros : tens;
        fixture.args.query_position = way == 1 ? 0 : -10;
      }
      test_run_for_bits(&fixture, &plain);
    }
    free(plain);
  }
}

/* ---- Late positions -------------------------------------------------------------------------- */

/* A float cannot hold the angle of position 1,000,000; heads of more than one piece of 64 pairs. */
static void late_positions_against_long_double(void **state) {
  const int64_t positions[] = {1, 2047, 65537, 1000000, 1000003, 16777217, INT64_C(3000000000)};
  const int64_t sizes[] = {2, 4, 126, 128, 130, 256, 260};
  (void)state;
  for (int mode = 0; mode < 2; mode++)
    for (size_t s = 0; s < COUNT(sizes); s++)
      for (size_t at = 0; at < COUNT(positions); at++) {
        const int64_t d = sizes[s];
        oracle_problem p;
        test_build(&fixture, &(test_case){.seed = at,
                                          .Lq = 1,
                                          .H = 2,
                                          .d = d,
                                          .absent = TEST_ALL,
                                          .source = TEST_SELF,
                                          .rope = mode ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALVES,
                                          .query_position = positions[at]});
        run_traced();
        test_problem(&fixture, &p);
        for (int64_t h = 0; h < 2; h++) {
          double x[260], bound[260] = {0};
          memcpy(x, p.query + h * d, (size_t)d * sizeof *x);
          oracle_turn(&p, positions[at], x, bound);
          for (int64_t c = 0; c < d; c++) {
            /* the angle in double is off by its own rounding, twice */
            const double drift = 2 * (double)positions[at] * 0x1p-53 * 8;
            test_near("Q", (double)shown.q[h * d + c], x[c], bound[c] + drift);
            test_near("K", (double)shown.k[h * d + c], x[c], bound[c] + drift);
          }
        }
        test_problem_free(&p);
        test_release(&fixture);
      }
}

/* Scores depend on differences of positions alone. */
static void scores_depend_on_distances(void **state) {
  const int64_t offsets[] = {0, 1, 17, 1000, 100000};
  enum { L = 9, H = 2 };
  (void)state;
  for (int mode = 0; mode < 2; mode++) {
    oracle_result first;
    for (size_t at = 0; at < COUNT(offsets); at++) {
      test_build(&fixture, &(test_case){.seed = 3,
                                        .Lq = L,
                                        .Lk = L,
                                        .H = H,
                                        .d = 16,
                                        .rotary = 8,
                                        .rope = mode ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALVES,
                                        .want = TEST_WANT_WEIGHTS,
                                        .stage = MHA_STAGE_SCALED});
      if (at == 0)
        test_ask_oracle(&fixture, &first);
      fixture.args.query_position = fixture.args.key_position = offsets[at];
      test_run(&fixture);
      test_compare("scores", (test_shape){{1, H, L, L}}, fixture.weights, first.stage[0].value,
                   first.stage[0].bound);
      test_release(&fixture);
    }
    oracle_free(&first);
  }
}

/* B109: a head whose elements are permuted from halves to pairs turns the same way, so scores are
 * the same; with the wrong mode they are not. */
static void b109_the_two_modes_are_a_permutation(void **state) {
  enum { L = 6, D = 8, R = 6 };
  oracle_result halves, wrong;
  (void)state;
  test_case c = {.seed = 4,
                 .Lq = L,
                 .d = D,
                 .rotary = R,
                 .absent = TEST_ALL,
                 .source = TEST_SELF,
                 .rope = MHA_ROPE_HALVES,
                 .want = TEST_WANT_WEIGHTS,
                 .stage = MHA_STAGE_SCALED};
  test_build(&fixture, &c);
  test_ask_oracle(&fixture, &halves);
  float *x = test_gather(&fixture.query);
  test_release(&fixture);
  c.rope = MHA_ROPE_INTERLEAVED;
  test_build(&fixture, &c);
  test_ask_oracle(&fixture, &wrong);
  double apart = 0;
  for (int64_t at = 0; at < L * L; at++)
    apart = fmax(apart, fabs(wrong.stage[0].value[at] - halves.stage[0].value[at]));
  assert_true(apart > 0.1);
  for (int64_t i = 0; i < L; i++)
    for (int64_t p = 0; p < R / 2; p++) {
      fixture.query.data[i * D + 2 * p] = x[i * D + p];
      fixture.query.data[i * D + 2 * p + 1] = x[i * D + p + R / 2];
    }
  test_run(&fixture);
  test_compare("scores", (test_shape){{1, 1, L, L}}, fixture.weights, halves.stage[0].value,
               halves.stage[0].bound);
  test_release(&fixture);
  free(x);
  oracle_free(&halves);
  oracle_free(&wrong);
}

/* ---- Every way to say a position ------------------------------------------------------------- */

static test_case sample_case(test_random *random, uint64_t seed) {
  const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 3}};
  const size_t h = (size_t)test_random_range(random, 0, COUNT(heads) - 1);
  test_case c = {.seed = seed,
                 .B = test_random_range(random, 1, 3),
                 .Lq = test_random_range(random, 1, 20),
                 .Lk = test_random_range(random, 1, 40),
                 .H = heads[h][0],
                 .G = heads[h][1],
                 .d = 2 * test_random_range(random, 1, 5),
                 .Eq = 12,
                 .threads = test_random_range(random, 0, 7) ? 1 : 2,
                 .out_in = test_random_range(random, 0, 1),
                 .biases = (unsigned)test_random_range(random, 0, TEST_ALL),
                 .layout = (test_layout)test_random_range(random, TEST_DENSE, TEST_LENGTH_FIRST),
                 .source = (test_source)test_random_range(random, TEST_CROSS, TEST_SELF),
                 .causal = test_random_range(random, 0, 1),
                 .norm = (mha_norm)test_random_range(random, 0, 2),
                 .norm_ones = test_random_range(random, 0, 3) == 0,
                 .rope = (mha_rope)test_random_range(random, 0, 2),
                 .rope_base = test_random_range(random, 0, 1) ? 0.0 : 500000.0,
                 .rope_tables = test_random_range(random, 0, 1),
                 .positions_given = test_random_range(random, 0, 1),
                 .query_position = test_random_range(random, 0, 1) * 37,
                 .key_position = test_random_range(random, 0, 1) * 5,
                 .want = TEST_WANT_ALL,
                 .stage = (mha_stage)test_random_range(random, 0, 3)};
  c.rotary = 2 * test_random_range(random, 1, c.d / 2);
  c.packed = test_random_range(random, 0, 3) == 0;
  c.packed_tail = c.packed && test_random_range(random, 0, 1);
  c.query_lengths = !c.packed && test_random_range(random, 0, 1);
  c.key_lengths = !c.packed && test_random_range(random, 0, 1);
  if (c.packed)
    c.want = TEST_WANT_LSE;
  return c;
}

/* Norms, modes, partial sizes, tables, offsets, given positions, lengths, packed input, layouts and
 * threads at once; rows beyond a length are poison. */
static void a_sample_of_all_options(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 11);
  for (uint64_t seed = 0; seed < (test_small() ? 200 : 1500); seed++) {
    const test_case c = sample_case(&random, seed);
    test_check(&c);
  }
}

static void threads_change_no_bit(void **state) {
  (void)state;
  for (int mode = 1; mode <= 2; mode++) {
    float *one = NULL;
    for (int threads = 1; threads <= 8; threads += threads < 3 ? 1 : 5) {
      test_build(&fixture, &(test_case){.seed = 5,
                                        .B = 2,
                                        .Lq = 67,
                                        .H = 4,
                                        .G = 2,
                                        .d = 16,
                                        .threads = threads,
                                        .source = TEST_SELF,
                                        .causal = true,
                                        .norm = (mha_norm)mode,
                                        .rope = (mha_rope)mode});
      test_run_for_bits(&fixture, &one);
    }
    free(one);
  }
}

/* ---- What is refused ------------------------------------------------------------------------- */

static void expect_refused(mha_status expected, const char *word) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), expected, &error);
  if (!strstr(error.message, word) || !strstr(error.message, "; rule: "))
    test_failed("the message does not name %s: \"%s\"", word, error.message);
  for (int64_t at = 0; at < fixture.output.floats; at++)
    assert_true(test_equal_bits(fixture.output.data[at], fixture.before[at]));
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

enum { ROWS = 5 };

static void build_refusable(bool tables, bool self) {
  test_build(&fixture, &(test_case){.seed = 6,
                                    .B = 2,
                                    .Lq = ROWS,
                                    .Lk = ROWS,
                                    .d = 4,
                                    .source = self ? TEST_SELF : TEST_CROSS,
                                    .rope = MHA_ROPE_HALVES,
                                    .rope_tables = tables});
}

/* Tables of ROWS positions: 0 to 4. */
static void positions_out_of_range(void **state) {
  (void)state;
  for (int tables = 0; tables < 2; tables++)
    for (int key = 0; key < 2; key++) {
      const char *word = key ? "key" : "query";
      const int64_t bad[] = {-1, INT64_MIN, tables ? 1 : INT64_MAX};
      for (size_t i = 0; i < COUNT(bad); i++) {
        build_refusable(tables, false);
        *(key ? &fixture.args.key_position : &fixture.args.query_position) = bad[i];
        expect_refused(MHA_ERROR_LENGTH, word);
        test_release(&fixture);
      }
      for (size_t i = 0; i < COUNT(bad); i++) {
        int64_t given[2 * ROWS] = {0};
        build_refusable(tables, false);
        given[7] = tables && bad[i] == 1 ? ROWS : bad[i];
        *(key ? &fixture.args.key_positions : &fixture.args.query_positions) = given;
        if (i == 2 && !tables) /* INT64_MAX itself is a position; one more is not */
          *(key ? &fixture.args.key_position : &fixture.args.query_position) = 1;
        expect_refused(MHA_ERROR_LENGTH, word);
        test_release(&fixture);
      }
    }
}

/* Rows behind a length have no position that matters; without rotary positions none does. */
static void positions_of_padding_do_not_matter(void **state) {
  int64_t lengths[] = {2, 0}, given[2 * ROWS] = {4, 0, -1, INT64_MIN, INT64_MAX, -5, 99, 5, 6, 7};
  (void)state;
  build_refusable(true, true);
  fixture.args.query_positions = given;
  fixture.rules.query_lengths = fixture.rules.key_lengths = lengths;
  test_run(&fixture);
  test_release(&fixture);
  build_refusable(false, true);
  fixture.config.rope = MHA_ROPE_NONE;
  fixture.args.query_positions = given;
  fixture.args.query_position = INT64_MIN;
  test_run(&fixture);
  test_release(&fixture);
}

static void key_positions_need_a_key(void **state) {
  static const int64_t zeros[2 * ROWS];
  (void)state;
  build_refusable(false, true);
  fixture.args.key_positions = zeros;
  expect_refused(MHA_ERROR_VALUE, "key_positions");
  test_release(&fixture);
  build_refusable(false, true);
  fixture.args.key_position = 1;
  expect_refused(MHA_ERROR_VALUE, "key_position");
  test_release(&fixture);
}

/* The tables are not copied: an output in them would change them. */
static void an_output_over_the_tables(void **state) {
  (void)state;
  build_refusable(true, true);
  fixture.output.data = fixture.rope_cos; /* [5][2], the output is [2][5][4] */
  fixture.args.output = fixture.rope_sin;
  fixture.output.data = fixture.before;
  expect_refused(MHA_ERROR_OVERLAP, "rope_sin");
  test_release(&fixture);
}

static void defaults_are_filled_in(void **state) {
  mha_weights *weights = NULL;
  mha_config config;
  mha_error error;
  (void)state;
  build_refusable(false, true);
  fixture.config.rope_base = 0.0;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  MHA_INIT(&config);
  test_expect(mha_weights_config(weights, &config, &error), MHA_OK, &error);
  assert_int_equal(config.rotary_size, 4);
  assert_true(config.rope_base == 10000.0);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_head_of_four_by_hand),
      cmocka_unit_test(the_rest_of_a_head_passes),
      cmocka_unit_test(position_zero_changes_nothing),
      cmocka_unit_test(late_positions_against_long_double),
      cmocka_unit_test(scores_depend_on_distances),
      cmocka_unit_test(b109_the_two_modes_are_a_permutation),
      cmocka_unit_test(a_sample_of_all_options),
      cmocka_unit_test(threads_change_no_bit),
      cmocka_unit_test(positions_out_of_range),
      cmocka_unit_test(positions_of_padding_do_not_matter),
      cmocka_unit_test(key_positions_need_a_key),
      cmocka_unit_test(an_output_over_the_tables),
      cmocka_unit_test(defaults_are_filled_in),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
