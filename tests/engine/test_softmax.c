/* The row kernels against the same thing in double precision: exp over its whole range, maxima and
 * sums over lengths around every vector width, what they do with NaN and infinities. */
#include "support.h"

#include "engine/softmax.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define ROW 200

static const int64_t lengths[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 79, 127, 128, 200};
#define N_LENGTHS (sizeof lengths / sizeof *lengths)

/* Every 97th float from 0 down to below the smallest normal result: some ten million arguments. */
static void exp_is_right_over_its_whole_range(void **state) {
  (void)state;
  const uint32_t last = UINT32_C(0xc2aeac4f); /* -87.33654, the last that is not flushed */
  const uint32_t step = test_small() ? 9973 : 97;
  double worst = 0;
  for (uint32_t bits = UINT32_C(0x80000000); bits < last; bits += step) {
    float x = 0;
    memcpy(&x, &bits, sizeof x);
    const double right = exp((double)x);
    const double error = fabs((double)mha_exp(x) - right) / right;
    worst = error > worst ? error : worst;
  }
  /* softmax.h: 2 units in the last place; one is at most 2^-23 of the number */
  test_near("worst relative error of exp", worst, 0, 2 * ldexp(1, -23));
}

static void exp_at_its_borders(void **state) {
  (void)state;
  assert_true(mha_exp(0.0f) == 1.0f);
  assert_true(mha_exp(-INFINITY) == 0.0f);
  assert_true(mha_exp(-88.0f) == 0.0f);
  assert_true(mha_exp(-FLT_MAX) == 0.0f);
  assert_true(mha_exp(-87.3f) >= FLT_MIN);
  assert_true(isnan(mha_exp(NAN)));
}

/* row[j] is exp(factor·before[j] - max) for j < n, flushed, and what it was behind; `sum` theirs.
 * The difference is rounded once before exp sees it: some |x|·2^-24 more. */
static void expect_exp(const float *row, const float *before, int64_t n, float factor, float max,
                       float sum) {
  double right_sum = 0;
  for (int64_t j = 0; j < n; j++) {
    const double score = (double)factor * (double)before[j];
    const double right = exp(score - (double)max);
    test_near("exp", (double)row[j], right < FLT_MIN ? 0 : right,
              right * (fabs(score) + fabs((double)max) + 8) * ldexp(1, -24));
    right_sum += (double)row[j];
  }
  test_near("sum", (double)sum, right_sum, right_sum * 16 * ldexp(1, -24));
  for (int64_t j = n; j < ROW; j++)
    assert_true(test_equal_bits(row[j], before[j]));
}

static void rows_of_exp_are_exp_and_sum(void **state) {
  const float max = 40.0f;
  test_random random;
  (void)state;
  test_random_seed(&random, 11);
  for (size_t k = 0; k < N_LENGTHS; k++) {
    float row[ROW], before[ROW];
    test_note("n = %d", (int)lengths[k]);
    test_fill_normal(&random, row, ROW, 10);
    memcpy(before, row, sizeof row);
    const float sum = mha_row_exp(row, lengths[k], 1.0f, max);
    expect_exp(row, before, lengths[k], 1.0f, max, sum);
  }
}

/* Of a maximum that is none: exp beyond 1, and the largest of what was there. */
static void exp_finds_the_maximum_on_the_way(void **state) {
  const float factor = 0.37f, max = -20.0f;
  test_random random;
  (void)state;
  test_random_seed(&random, 12);
  for (size_t k = 0; k < N_LENGTHS; k++) {
    float row[ROW], before[ROW], largest = 0;
    test_note("n = %d", (int)lengths[k]);
    test_fill_normal(&random, row, ROW, 30);
    memcpy(before, row, sizeof row);
    const float sum = mha_row_exp_max(row, lengths[k], factor, max, &largest);
    assert_true(largest == mha_row_max(before, lengths[k]));
    expect_exp(row, before, lengths[k], factor, max, sum);
  }
}

/* The largest score, though its product is not rounded before the subtraction, gives exactly 1. */
static void the_largest_score_has_weight_one(void **state) {
  (void)state;
  test_random random;
  test_random_seed(&random, 13);
  for (int trial = 0; trial < 2000; trial++) {
    float row[40];
    const float factor = (float)test_random_uniform(&random, 0.01, 3);
    test_fill_normal(&random, row, 40, trial % 2 ? 10 : 1e8);
    const float score = mha_row_max(row, 40);
    const float max = factor * score;
    int64_t at = 0;
    while (row[at] != score)
      at++;
    (void)mha_row_exp(row, 40, factor, max);
    assert_true(row[at] == 1.0f);
  }
}

static void nan_stays_nan_in_either_exp(void **state) {
  (void)state;
  const uint32_t payloads[] = {0x7fc00000, 0x7fc00001, 0x7fc5a5a5, 0xffffffff, 0x7fffffff};
  for (size_t k = 0; k < sizeof payloads / sizeof *payloads; k++)
    for (int at = 0; at < 35; at++) {
      float row[35] = {0};
      float largest = 0;
      memcpy(&row[at], &payloads[k], sizeof row[at]);
      assert_true(isnan(mha_row_exp_max(row, 35, 0.5f, 1.0f, &largest)));
      assert_true(isnan(row[at]) && largest == 0.0f);
      memset(row, 0, sizeof row);
      memcpy(&row[at], &payloads[k], sizeof row[at]);
      assert_true(isnan(mha_row_exp(row, 35, 0.5f, 1.0f)) && isnan(row[at]));
    }
}

static void lowered_rows_have_no_subnormal_numbers(void **state) {
  (void)state;
  float row[ROW], before[ROW];
  for (int j = 0; j < ROW; j++)
    row[j] = before[j] = ldexpf(1.5f, -j % 140);
  row[5] = before[5] = NAN;
  mha_row_lower(row, ROW, 0.25f);
  for (int j = 0; j < ROW; j++) {
    const float right = 0.25f * before[j];
    assert_true(j == 5 ? isnan(row[j]) : row[j] == (right < FLT_MIN ? 0.0f : right));
  }
}

static void weights_below_the_normal_numbers_are_zero(void **state) {
  (void)state;
  float row[ROW];
  for (int j = 0; j < ROW; j++)
    row[j] = -80.0f - 0.1f * (float)j;
  (void)mha_row_exp(row, ROW, 1.0f, 0.0f);
  for (int j = 0; j < ROW; j++)
    assert_true(row[j] == 0.0f || row[j] >= FLT_MIN);
}

static void the_maximum_stands_anywhere(void **state) {
  (void)state;
  for (size_t k = 0; k < N_LENGTHS; k++)
    for (int64_t at = 0; at < lengths[k]; at++) {
      float row[ROW];
      for (int j = 0; j < ROW; j++)
        row[j] = j < lengths[k] ? -1.0f - (float)j : 1000.0f;
      row[at] = -0.5f;
      test_note("n = %d, at = %d", (int)lengths[k], (int)at);
      assert_true(mha_row_max(row, lengths[k]) == -0.5f);
    }
  assert_true(mha_row_max(NULL, 0) == -INFINITY);
}

static void the_maximum_passes_over_nan(void **state) {
  (void)state;
  for (size_t k = 1; k < N_LENGTHS; k++)
    for (int64_t at = 0; at < lengths[k]; at++) {
      float row[ROW];
      for (int j = 0; j < ROW; j++)
        row[j] = j == at ? 3.0f : NAN;
      assert_true(mha_row_max(row, lengths[k]) == 3.0f);
      row[at] = NAN;
      assert_true(mha_row_max(row, lengths[k]) == -INFINITY);
    }
}

static void finite_rows_are_told_from_others(void **state) {
  (void)state;
  const float wrong[] = {NAN, INFINITY, -INFINITY};
  for (size_t k = 0; k < N_LENGTHS; k++) {
    float row[ROW];
    for (int j = 0; j < ROW; j++)
      row[j] = j < lengths[k] ? FLT_MAX : NAN;
    assert_true(mha_row_is_finite(row, lengths[k]));
    for (int64_t at = 0; at < lengths[k]; at++)
      for (int w = 0; w < 3; w++) {
        row[at] = wrong[w];
        assert_false(mha_row_is_finite(row, lengths[k]));
        row[at] = -FLT_MAX;
      }
  }
}

static void the_softcap_is_a_tanh(void **state) {
  (void)state;
  test_random random;
  test_random_seed(&random, 12);
  for (size_t k = 0; k < N_LENGTHS; k++) {
    float row[ROW];
    float before[ROW];
    const double cap = 30;
    test_fill_normal(&random, row, ROW, 60);
    memcpy(before, row, sizeof row);
    mha_row_softcap(row, lengths[k], (float)cap);
    for (int64_t j = 0; j < lengths[k]; j++)
      test_near("softcap", (double)row[j], cap * tanh((double)before[j] / cap),
                fabs((double)before[j]) * 8 * ldexp(1, -24));
  }
  float ends[4] = {INFINITY, -INFINITY, 0.0f, NAN};
  mha_row_softcap(ends, 4, 2.0f);
  assert_true(ends[0] == 2.0f && ends[1] == -2.0f && ends[2] == 0.0f && isnan(ends[3]));
}

static void a_bias_of_minus_infinity_hides_whatever_the_score(void **state) {
  (void)state;
  float row[6] = {1.0f, NAN, INFINITY, -INFINITY, 2.0f, 3.0f};
  const float bias[6] = {-INFINITY, -INFINITY, -INFINITY, 5.0f, 0.5f, NAN};
  mha_row_add_bias(row, bias, 6);
  for (int j = 0; j < 4; j++)
    assert_true(row[j] == -INFINITY);
  assert_true(row[4] == 2.5f && isnan(row[5]));
}

static void hiding_selects_and_never_multiplies(void **state) {
  (void)state;
  float row[4] = {NAN, INFINITY, 7.0f, NAN};
  const uint8_t attend[4] = {0, 0, 255, 1};
  mha_row_hide(row, attend, 4);
  assert_true(row[0] == -INFINITY && row[1] == -INFINITY && row[2] == 7.0f && isnan(row[3]));
}

static void alibi_grows_with_the_distance_on_both_sides(void **state) {
  (void)state;
  float row[40];
  for (int j = 0; j < 40; j++)
    row[j] = 1.0f;
  mha_row_add_alibi(row, 40, 0.25f, -20);
  for (int j = 0; j < 40; j++)
    assert_true(row[j] == 1.0f - 0.25f * fabsf((float)j - 20.0f));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(exp_is_right_over_its_whole_range),
      cmocka_unit_test(exp_at_its_borders),
      cmocka_unit_test(rows_of_exp_are_exp_and_sum),
      cmocka_unit_test(exp_finds_the_maximum_on_the_way),
      cmocka_unit_test(the_largest_score_has_weight_one),
      cmocka_unit_test(nan_stays_nan_in_either_exp),
      cmocka_unit_test(lowered_rows_have_no_subnormal_numbers),
      cmocka_unit_test(weights_below_the_normal_numbers_are_zero),
      cmocka_unit_test(the_maximum_stands_anywhere),
      cmocka_unit_test(the_maximum_passes_over_nan),
      cmocka_unit_test(finite_rows_are_told_from_others),
      cmocka_unit_test(the_softcap_is_a_tanh),
      cmocka_unit_test(a_bias_of_minus_infinity_hides_whatever_the_score),
      cmocka_unit_test(hiding_selects_and_never_multiplies),
      cmocka_unit_test(alibi_grows_with_the_distance_on_both_sides),
  };
  return cmocka_run_group_tests_name("softmax", tests, NULL, NULL);
}
