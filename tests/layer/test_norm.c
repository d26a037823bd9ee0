/* RMS normalisation of Q and K: by hand, at both ends of float32, and in all company. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

/* Unit roundoff of float32. */
static const double u = 0x1p-24;

/* ---- Q and K as the trace shows them --------------------------------------------------------- */

enum { MOST = 4096 };

static float shown_q[MOST], shown_k[MOST];

static void remember(void *user, const mha_trace_step *step) {
  float *to = strcmp(step->name, "Q") == 0   ? shown_q
              : strcmp(step->name, "K") == 0 ? shown_k
                                             : NULL;
  const int64_t n = step->shape[0] * step->shape[1] * step->shape[2];
  (void)user;
  assert_true(!to || n <= MOST);
  for (int64_t at = 0; to && at < n; at++) /* dense: one entry */
    to[at] = step->data[at];
}

static void run_traced(void) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  test_expect(mha_context_trace(context, remember, NULL, &error), MHA_OK, &error);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

/* One row of H heads of d numbers, each equal to `number`; no matrices. */
static void build_row(mha_norm norm, int64_t H, int64_t d, double number, float epsilon) {
  test_build(&fixture, &(test_case){.Lq = 1,
                                    .H = H,
                                    .d = d,
                                    .absent = TEST_ALL,
                                    .source = TEST_SELF,
                                    .norm = norm,
                                    .norm_ones = true});
  fixture.config.norm_epsilon = epsilon;
  for (int64_t at = 0; at < H * d; at++)
    fixture.query.data[at] = (float)number;
}

/* ---- By hand --------------------------------------------------------------------------------- */

/* (3, 4 | 0, 0): per head the first has mean square 12.5; over the row it is 6.25, and with eps
 * 2.75 it is 9. */
static void two_heads_by_hand(void **state) {
  const double per_head[] = {3 / sqrt(12.5), 4 / sqrt(12.5), 0, 0}, full[] = {1, 4 / 3.0, 0, 0};
  (void)state;
  for (int norm = 1; norm <= 2; norm++) {
    build_row((mha_norm)norm, 2, 2, 0.0, norm == MHA_NORM_FULL ? 2.75F : 1e-12F);
    fixture.query.data[0] = 3.0F;
    fixture.query.data[1] = 4.0F;
    run_traced();
    for (int c = 0; c < 4; c++) {
      const double expected = norm == MHA_NORM_FULL ? full[c] : per_head[c];
      test_near("Q", (double)shown_q[c], expected, 4 * u * expected);
      test_near("K", (double)shown_k[c], expected, 4 * u * expected);
    }
    test_release(&fixture);
  }
}

/* [d] serves every head, [H·d] each element its own. */
static void weights_per_element(void **state) {
  const float weight[] = {1.0F, 2.0F, -3.0F, 0.5F};
  (void)state;
  for (int norm = 1; norm <= 2; norm++) {
    build_row((mha_norm)norm, 2, 2, 1.0, 1e-12F);
    fixture.matrices.query_norm = weight;
    run_traced();
    for (int c = 0; c < 4; c++) {
      const double w = (double)weight[norm == MHA_NORM_FULL ? c : c % 2];
      test_near("Q", (double)shown_q[c], w, 4 * u * fabs(w));
      test_near("K: no weight is ones", (double)shown_k[c], 1.0, 4 * u);
    }
    test_release(&fixture);
  }
}

/* Ones given and ones left out are the same bits. */
static void no_weight_is_ones(void **state) {
  const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  (void)state;
  for (int norm = 1; norm <= 2; norm++) {
    float *without = NULL;
    for (int given = 0; given < 2; given++) {
      test_build(&fixture, &(test_case){.seed = 1,
                                        .Lq = 5,
                                        .H = 4,
                                        .G = 2,
                                        .d = 3,
                                        .source = TEST_SELF,
                                        .norm = (mha_norm)norm,
                                        .norm_ones = true});
      fixture.matrices.query_norm = fixture.matrices.key_norm = given ? ones : NULL;
      test_run_for_bits(&fixture, &without);
    }
    free(without);
  }
}

/* ---- Both ends of float32 -------------------------------------------------------------------- */

/* The square of 1e25 is no float; that of 1e-30 neither, nor is eps lost beside it. */
static void huge_and_tiny_numbers(void **state) {
  const struct {
    double number;
    float epsilon;
  } rows[] = {{1e19, 1e-5F}, {1e25, 1e-5F},  {1e30, 1e-5F},   {1e37, 1e-5F},
              {1e25, 1e30F}, {1e-30, 1e-5F}, {1e-22, 1e-37F}, {1e-18, 1e-38F},
              {0.0, 1e-38F}, {0.0, 1e-5F},   {-1e25, 1e-6F}};
  (void)state;
  for (int norm = 1; norm <= 2; norm++)
    for (size_t i = 0; i < COUNT(rows); i++) {
      const int64_t d = 11;
      build_row((mha_norm)norm, 3, d, rows[i].number, rows[i].epsilon);
      run_traced();
      const double x = (double)(float)rows[i].number;
      const double expected = x / sqrt(x * x + (double)rows[i].epsilon);
      for (int64_t c = 0; c < 3 * d; c++)
        test_near("Q", (double)shown_q[c], expected, 4 * u * fabs(expected));
      test_release(&fixture);
    }
}

/* One huge element among ordinary ones, at every place of a vector and behind it. */
static void one_huge_element(void **state) {
  (void)state;
  for (int64_t at = 0; at < 19; at++) {
    double x[19], bound[19] = {0};
    build_row(MHA_NORM_PER_HEAD, 1, 19, 0.0, 1e-5F);
    test_fill_normal(&fixture.random, fixture.query.data, 19, 1.0);
    fixture.query.data[at] = 1e25F;
    run_traced();
    for (int c = 0; c < 19; c++)
      x[c] = (double)fixture.query.data[c];
    oracle_normalise(x, bound, 19, NULL, (double)1e-5F);
    for (int c = 0; c < 19; c++)
      test_near("Q", (double)shown_q[c], x[c], bound[c]);
    test_release(&fixture);
  }
}

/* NaN and infinity stay in their own token. */
static void a_broken_token_breaks_no_other(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY};
  (void)state;
  for (size_t i = 0; i < COUNT(bad); i++)
    for (int norm = 1; norm <= 2; norm++) {
      test_build(&fixture, &(test_case){.seed = 2,
                                        .Lq = 6,
                                        .H = 2,
                                        .d = 4,
                                        .causal = true,
                                        .source = TEST_SELF,
                                        .norm = (mha_norm)norm});
      test_run(&fixture);
      float *whole = test_gather(&fixture.output);
      fixture.query.data[4 * 8 + 3] = bad[i];
      test_run(&fixture);
      for (int64_t at = 0; at < 4 * 8; at++)
        assert_true(test_equal_bits(fixture.output.data[at], whole[at]));
      for (int64_t at = 4 * 8; at < 6 * 8; at++)
        assert_true(isnan(fixture.output.data[at]));
      free(whole);
      test_release(&fixture);
    }
}

/* ---- In company ------------------------------------------------------------------------------ */

/* Sizes around every vector width; copied and borrowed weights; heads that share keys. */
static void every_size(void **state) {
  (void)state;
  for (int norm = 1; norm <= 2; norm++)
    for (int64_t d = 1; d <= (test_small() ? 9 : 40); d++)
      for (int64_t G = 1; G <= 4; G *= 2) {
        const test_case c = {.seed = (uint64_t)d,
                             .B = 2,
                             .Lq = 3,
                             .Lk = 5,
                             .H = 4,
                             .G = G,
                             .d = d,
                             .dv = 1 + d % 5,
                             .biases = TEST_ALL,
                             .borrow = d % 2,
                             .out_in = d % 3 == 0,
                             .norm = (mha_norm)norm,
                             .want = TEST_WANT_ALL};
        test_check(&c);
      }
}

/* The normalisation comes before the rotation: with unequal weights the other order shows. */
static void before_the_positions(void **state) {
  (void)state;
  for (int norm = 1; norm <= 2; norm++)
    for (int rope = 1; rope <= 2; rope++) {
      const test_case c = {.seed = 3,
                           .Lq = 9,
                           .H = 2,
                           .d = 8,
                           .source = TEST_SELF,
                           .norm = (mha_norm)norm,
                           .rope = (mha_rope)rope,
                           .query_position = 40,
                           .want = TEST_WANT_WEIGHTS,
                           .stage = MHA_STAGE_SCALED};
      test_check(&c);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(two_heads_by_hand), cmocka_unit_test(weights_per_element),
      cmocka_unit_test(no_weight_is_ones), cmocka_unit_test(huge_and_tiny_numbers),
      cmocka_unit_test(one_huge_element),  cmocka_unit_test(a_broken_token_breaks_no_other),
      cmocka_unit_test(every_size),        cmocka_unit_test(before_the_positions),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
