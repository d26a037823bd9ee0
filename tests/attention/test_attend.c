/* The core alone, mha_attend: strided tensors in every layout that strides can say. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void every_layout(void **state) {
  (void)state;
  for (int layout = TEST_DENSE; layout <= TEST_HEAD_FIRST; layout++)
    for (int64_t H = 1; H <= 4; H++)
      for (int64_t G = 1; G <= H; G++)
        for (int64_t B = 1; H % G == 0 && B <= 3; B++)
          test_check(&(test_case){.seed = (uint64_t)(100 * H + 10 * G + B),
                                  .core = true,
                                  .B = B,
                                  .Lq = 9,
                                  .Lk = 14,
                                  .H = H,
                                  .G = G,
                                  .d = 5,
                                  .dv = 3,
                                  .layout = (test_layout)layout,
                                  .at_front = B == 2,
                                  .want = TEST_WANT_ALL,
                                  .stage = (mha_stage)(H - 1)});
}

static void every_size(void **state) {
  const int64_t lengths[] = {1, 7, 16, 31, 64, 65, 129, 256, 300};
  const int64_t sizes[] = {1, 4, 8, 15, 33, 64};
  const size_t n = test_small() ? 3 : COUNT(lengths);
  (void)state;
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++)
      for (size_t s = 0; s < (test_small() ? 2 : COUNT(sizes)); s++)
        test_check(&(test_case){.seed = 100 * i + 10 * j + s,
                                .core = true,
                                .Lq = lengths[i],
                                .Lk = lengths[j],
                                .H = 2,
                                .d = sizes[s],
                                .dv = sizes[COUNT(sizes) - 1 - s],
                                .layout = s % 2 ? TEST_DENSE : TEST_HEAD_FIRST,
                                .want = TEST_WANT_LSE});
}

static void the_scale_is_the_callers(void **state) {
  const float scales[] = {0.0F, -1.0F, 0.3F, 4.0F};
  (void)state;
  for (size_t i = 0; i < COUNT(scales); i++)
    test_check(&(test_case){.seed = i,
                            .core = true,
                            .Lq = 5,
                            .Lk = 8,
                            .H = 2,
                            .d = 3,
                            .scale_given = true,
                            .scale = scales[i],
                            .softcap = i % 2 ? 2.0F : 0.0F,
                            .want = TEST_WANT_ALL,
                            .stage = MHA_STAGE_CAPPED});
}

static void packed_sequences(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 5 : 40); seed++)
    test_check(&(test_case){.seed = seed,
                            .core = true,
                            .B = 1 + (int64_t)(seed % 6),
                            .Lq = 1 + (int64_t)(seed * 13 % 80),
                            .Lk = 1 + (int64_t)(seed * 17 % 120),
                            .H = 4,
                            .G = 2,
                            .d = 3,
                            .dv = 4,
                            .packed = true,
                            .packed_tail = seed % 5 > 2,
                            .layout = (test_layout)(seed % 4),
                            .causal = seed % 2,
                            .window = seed % 3 == 0,
                            .left = 4,
                            .right = 2,
                            .alignment = (mha_alignment)(seed % 3),
                            .offset = 1,
                            .offset_each = seed % 2,
                            .want = TEST_WANT_LSE});
}

/* q, k and v of one packed [B][L][3][H][d] buffer, as one projection leaves them. */
static void packed_qkv(void **state) {
  enum { B = 2, L = 11, H = 3, D = 4 };
  static test_fixture f;
  test_pool pool = {0};
  oracle_result result;
  (void)state;
  test_build(&f, &(test_case){.seed = 5,
                              .core = true,
                              .B = B,
                              .Lq = L,
                              .Lk = L,
                              .H = H,
                              .d = D,
                              .causal = true,
                              .want = TEST_WANT_ALL});
  test_ask_oracle(&f, &result);
  float *block = test_pool_floats(&pool, (int64_t)B * L * 3 * H * D);
  const test_view *views[] = {&f.query, &f.key, &f.value};
  mha_tensor *tensors[] = {&f.q, &f.k, &f.v};
  for (int64_t which = 0; which < 3; which++) {
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < L; i++)
        memcpy(block + ((b * L + i) * 3 + which) * H * D, test_at(views[which], b, i, 0, 0),
               H * D * sizeof(float));
    *tensors[which] = (mha_tensor){block + which * H * D, B, L, H,       D, (int64_t)L * 3 * H * D,
                                   (int64_t)3 * H * D,    D, 1, MHA_F32, 0};
  }
  test_run(&f);
  test_judge(&f, &result);
  oracle_free(&result);
  test_pool_free(&pool);
  test_release(&f);
}

/* Stride 0 on the batch or head axis: one tensor for all entries or all heads. */
static void broadcast_by_stride_zero(void **state) {
  enum { B = 3, LQ = 4, LK = 6, H = 2, D = 3 };
  (void)state;
  for (int axis = 0; axis < 2; axis++) {
    static test_fixture f;
    oracle_result result;
    test_build(&f, &(test_case){.seed = 8,
                                .core = true,
                                .B = B,
                                .Lq = LQ,
                                .Lk = LK,
                                .H = H,
                                .d = D,
                                .want = TEST_WANT_ALL});
    for (int64_t b = 0; b < B; b++)
      for (int64_t j = 0; j < LK; j++)
        for (int64_t h = 0; h < H; h++) {
          const int64_t from_b = axis == 0 ? 0 : b, from_h = axis == 1 ? 0 : h;
          memcpy(test_at(&f.key, b, j, h, 0), test_at(&f.key, from_b, j, from_h, 0),
                 D * sizeof(float));
        }
    test_ask_oracle(&f, &result);
    f.k.batch_stride = axis == 0 ? 0 : f.key.batch_stride;
    f.k.row_stride = f.key.row_stride;
    f.k.head_stride = axis == 1 ? 0 : f.key.head_stride;
    f.k.size_stride = 1;
    test_run(&f);
    test_judge(&f, &result);
    oracle_free(&result);
    test_release(&f);
  }
}

/* Partial results over two halves of the keys merge through their log-sum-exps. */
static void halves_merge_by_log_sum_exp(void **state) {
  enum { L = 10, LK = 24, HALF = 9, H = 2, D = 4 };
  static test_fixture whole;
  oracle_result result;
  (void)state;
  test_build(
      &whole,
      &(test_case){
          .seed = 3, .core = true, .Lq = L, .Lk = LK, .H = H, .d = D, .want = TEST_WANT_LSE});
  test_ask_oracle(&whole, &result);
  float part[2][L * H * D], lse[2][H * L];
  for (int64_t half = 0; half < 2; half++) {
    const int64_t first = half ? HALF : 0;
    whole.k.length = whole.v.length = half ? LK - HALF : HALF;
    whole.k.data = test_at(&whole.key, 0, first, 0, 0);
    whole.v.data = test_at(&whole.value, 0, first, 0, 0);
    test_run(&whole);
    memcpy(part[half], whole.output.data, sizeof part[half]);
    memcpy(lse[half], whole.lse, sizeof lse[half]);
  }
  for (int64_t i = 0; i < L; i++)
    for (int64_t h = 0; h < H; h++) {
      const double share = 1.0 / (1.0 + exp((double)(lse[1][h * L + i] - lse[0][h * L + i])));
      for (int64_t c = 0; c < D; c++) {
        const int64_t at = (i * H + h) * D + c;
        const double a = (double)part[0][at], b = (double)part[1][at];
        /* each part is off by its bound, and the share by a quarter of two log-sum-exps' bounds */
        const double bound =
            result.concat.bound[at] + 1e-6 + 0.5 * result.lse.bound[h * L + i] * fabs(a - b);
        test_near("merged", share * a + (1 - share) * b, result.concat.value[at], bound);
      }
    }
  oracle_free(&result);
  test_release(&whole);
}

/* Offsets and windows far beyond any length neither overflow nor wrap. */
static void offsets_and_windows_without_end(void **state) {
  enum { LQ = 3, LK = 5 };
  const struct {
    int causal;
    int64_t offset, left, right;
    bool seen;
  } rows[] = {
      {1, INT64_MAX, -1, -1, true},          {1, INT64_MIN, -1, -1, false},
      {0, 0, INT64_MAX, INT64_MAX, true},    {0, INT64_MAX, 0, -1, false},
      {0, INT64_MIN, -1, 0, false},          {1, INT64_C(1) << 40, INT64_C(1) << 41, 0, true},
      {0, -(INT64_C(1) << 40), 0, 0, false},
  };
  static test_fixture f;
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    for (int each = 0; each < 2; each++) {
      test_build(&f, &(test_case){.seed = i,
                                  .core = true,
                                  .Lq = LQ,
                                  .Lk = LK,
                                  .d = 2,
                                  .window = true,
                                  .alignment = MHA_ALIGN_OFFSET,
                                  .want = TEST_WANT_ALL,
                                  .offset_each = each});
      test_note("offset or window %zu", i);
      f.rules.causal = rows[i].causal;
      f.rules.offset = f.offsets[0] = rows[i].offset;
      f.rules.window_left = rows[i].left;
      f.rules.window_right = rows[i].right;
      test_run(&f);
      for (int64_t at = 0; at < LQ * LK; at++)
        if ((f.weights[at] > 0.0F) != rows[i].seen)
          test_failed("weight %d is %g", (int)at, (double)f.weights[at]);
      test_release(&f);
    }
}

/* A sink far above or below the scores takes everything or nothing. */
static void sinks_of_any_size(void **state) {
  const float sinks[] = {-INFINITY, -1e30F, -200.0F, 0.0F, 20.0F, 95.0F, 200.0F, 1e30F};
  static test_fixture f;
  (void)state;
  for (size_t i = 0; i < COUNT(sinks); i++)
    for (int64_t Lk = 5; Lk <= 700; Lk += 695) {
      test_build(&f, &(test_case){.seed = i,
                                  .core = true,
                                  .Lq = 4,
                                  .Lk = Lk,
                                  .H = 2,
                                  .d = 3,
                                  .sinks = true,
                                  .want = TEST_WANT_ALL});
      f.sinks[1] = sinks[i];
      test_run(&f);
      test_judge_now(&f);
      test_release(&f);
    }
}

/* Scores around 1e14·d, whose last bits are worth far more than 88: weights made from scores that
 * differ from the core's by one bit would be 0 or infinite. Rows behind the first tiles are few, so
 * that another product makes them. */
static void weights_of_huge_scores_sum_to_one(void **state) {
  enum { L = 69 };
  const int64_t d = 16384;
  test_pool pool = {0};
  test_random random;
  (void)state;
  test_random_seed(&random, 69);
  float *q = test_pool_floats(&pool, L * d);
  float *output = test_pool_floats(&pool, L * d);
  float *weights = test_pool_floats(&pool, L * L);
  test_fill_normal(&random, q, L * d, 1e7);
  const mha_tensor tensor = {.data = q, .batch = 1, .length = L, .heads = 1, .size = d};
  mha_rules rules;
  mha_results results;
  MHA_INIT(&rules);
  MHA_INIT(&results);
  rules.causal = 1;
  results.weights = weights;
  mha_attend_args args;
  MHA_INIT(&args);
  args.output = output;
  args.rules = &rules;
  args.results = &results;
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_attend(context, &tensor, &tensor, &tensor, &args, &error), MHA_OK, &error);
  for (int i = 0; i < L; i++) {
    double sum = 0;
    for (int j = 0; j < L; j++)
      sum += (double)weights[i * L + j];
    test_note("row %d", i);
    test_near("sum of weights", sum, 1, 1e-5);
    test_near("weight of the query's own key", (double)weights[i * L + i], 1, 1e-5);
  }
  mha_context_destroy(context);
  test_pool_free(&pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_layout),
      cmocka_unit_test(every_size),
      cmocka_unit_test(the_scale_is_the_callers),
      cmocka_unit_test(packed_sequences),
      cmocka_unit_test(packed_qkv),
      cmocka_unit_test(broadcast_by_stride_zero),
      cmocka_unit_test(offsets_and_windows_without_end),
      cmocka_unit_test(sinks_of_any_size),
      cmocka_unit_test(halves_merge_by_log_sum_exp),
      cmocka_unit_test(weights_of_huge_scores_sum_to_one),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
