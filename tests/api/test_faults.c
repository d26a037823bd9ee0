/* Faults that attention libraries are known for, numbered, one test each. B01 to B25: masks and
 * softmax; B26 to B40: shapes, layouts and arguments. Numbers left out do not apply here. */
#include "seen.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

/* ---- Masks and softmax ----------------------------------------------------------------------- */

static void b01_band_mask_on_long_inputs(void **state) {
  const int64_t lengths[] = {160, 256, 300, 384, 640, 1024};
  (void)state;
  for (size_t which = 0; which < (test_small() ? 2 : COUNT(lengths)); which++) {
    const int64_t L = lengths[which];
    test_build(&fixture, &(test_case){.seed = 1,
                                      .core = true,
                                      .Lq = L,
                                      .Lk = L,
                                      .d = 4,
                                      .has_bias = true,
                                      .bias_extents = TEST_FULL_ROWS,
                                      .want = TEST_WANT_LSE});
    for (int64_t at = 0; at < L * 4; at++)
      fixture.query.data[at] = fixture.key.data[at] = fixture.value.data[at] = 1.0F;
    for (int64_t i = 0; i < L; i++)
      for (int64_t j = 0; j < L; j++)
        fixture.bias[i * L + j] = j > i || j <= i - 10 ? -INFINITY : 0.0F;
    test_run(&fixture);
    test_judge_now(&fixture);
    for (int64_t at = 0; at < L * 4; at++)
      test_near("the common value", (double)fixture.output.data[at], 1.0, 1e-6);
    test_release(&fixture);
  }
}

static void b02_a_row_with_nothing_to_attend_to(void **state) {
  mha_rules rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0);
  (void)state;
  rules.key_lengths = (int64_t[]){3, 0};
  seen_expect_sets(rules, 2, 3, 3, (const char *[]){"012", "012", "012", "", "", ""});
  rules.query_lengths = (int64_t[]){3, 0};
  seen_expect_sets(rules, 2, 3, 3, (const char *[]){"012", "012", "012", "", "", ""});
  rules = seen_rules(1, MHA_ALIGN_TOP_LEFT, 0); /* two keys of padding on the left */
  rules.attend = (mha_mask){(uint8_t[]){0, 0, 1}, 1, 1, 1, 3, 0, 0, 0, 0, 0};
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"", "", "2"});
  rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0);
  rules.attend = (mha_mask){(uint8_t[]){0, 0, 0, 0}, 1, 1, 2, 2, 0, 0, 0, 0, 0};
  seen_expect_sets(rules, 1, 2, 2, (const char *[]){"", ""});
}

static void b03_asking_for_weights_changes_nothing(void **state) {
  enum { E = 3, H = 3, L = 5 };
  float *plain = NULL;
  (void)state;
  for (unsigned want = 0; want <= TEST_WANT_ALL; want++) {
    test_build(&fixture, &(test_case){.seed = 1,
                                      .Lq = L,
                                      .H = H,
                                      .d = 1,
                                      .source = TEST_SELF,
                                      .biases = TEST_ALL,
                                      .has_mask = true,
                                      .mask_extents = TEST_FULL_HEADS,
                                      .want = want});
    for (int64_t at = 0; at < H * L; at++)
      fixture.mask[at] = at < 2 * L;
    test_run(&fixture);
    test_judge_now(&fixture);
    if (plain)
      test_same_output(&fixture, plain);
    else
      plain = test_gather(&fixture.output);
    for (int64_t at = 2 * L * L; fixture.weights && at < 3 * L * L; at++)
      test_near("head 2", (double)fixture.weights[at], 0.0, 0.0);
    test_release(&fixture);
  }
  free(plain);
}

static bool before_the_last(const void *user, int64_t b, int64_t i) {
  (void)user;
  (void)b;
  return i < 3;
}

/* Every combination of weights requested, mask, padding, grouped heads and window; self attention,
 * so that token 3 is a key, a value and a query. */
static void b04_causal_is_never_dropped(void **state) {
  (void)state;
  for (unsigned set = 0; set < 128; set++) {
    const test_case c = {.seed = set,
                         .Lq = 4,
                         .H = 4,
                         .G = set & 8 ? 2 : 4,
                         .d = 2,
                         .Eq = 6,
                         .source = TEST_SELF,
                         .causal = true,
                         .biases = TEST_ALL,
                         .want = set & 1 ? TEST_WANT_ALL : 0,
                         .has_mask = set & 2,
                         .mask_extents = TEST_FULL_ROWS,
                         .key_lengths = set & 4,
                         .window = set & 16,
                         .left = 2,
                         .right = 1,
                         .alibi = set & 32,
                         .has_bias = set & 64,
                         .bias_extents = TEST_FULL_HEADS};
    test_build(&fixture, &c);
    if (fixture.key_lengths)
      fixture.key_lengths[0] = 4;
    test_fill_normal(&fixture.random, fixture.query.data, fixture.query.floats, 1.0);
    test_run(&fixture);
    float *clean = test_gather(&fixture.output);
    for (int64_t e = 0; e < 6; e++)
      *test_at(&fixture.query, 0, 3, 0, e) = 7.0F - (float)e;
    test_run(&fixture);
    test_same_rows(&fixture, clean, before_the_last, NULL);
    free(clean);
    test_release(&fixture);
  }
}

static void b05_a_finite_additive_mask_counts(void **state) {
  const float zeros[] = {0.0F, 0.0F}, v[] = {0.0F, 1.0F}, bias[] = {0.0F, 1.5F, 0.0F, 0.0F};
  float output[2];
  (void)state;
  test_core core = {.Lq = 2,
                    .Lk = 2,
                    .q = zeros,
                    .k = zeros,
                    .v = v,
                    .output = output,
                    .rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0)};
  core.rules.bias = (mha_bias){bias, 1, 1, 2, 2, 0, 0, 0, 0, 0};
  test_core_run(&core);
  test_near("row 0", (double)output[0], 1.0 / (1.0 + exp(-1.5)), 1e-6);
  test_near("row 1", (double)output[1], 0.5, 1e-6);
}

/* One content, which depends on the key alone, in all eight extents, as a mask and as a bias. */
static void b06_every_extent_of_one_mask(void **state) {
  enum { L = 3 };
  const uint8_t keep[L] = {1, 0, 1};
  oracle_result first;
  (void)state;
  for (unsigned extents = 0; extents < 16; extents++) {
    const bool additive = extents & 8;
    test_build(&fixture, &(test_case){.seed = 1,
                                      .B = 2,
                                      .Lq = L,
                                      .Lk = L,
                                      .H = 2,
                                      .d = 4,
                                      .has_mask = !additive,
                                      .has_bias = additive,
                                      .mask_extents = extents & 7,
                                      .bias_extents = extents & 7,
                                      .want = TEST_WANT_ALL});
    for (int64_t at = 0; at < fixture.mask_bytes; at++)
      fixture.mask[at] = keep[at % L];
    for (int64_t at = 0; at < fixture.bias_floats; at++)
      fixture.bias[at] = keep[at % L] ? 0.0F : -INFINITY;
    test_run(&fixture);
    if (extents == 0)
      test_ask_oracle(&fixture, &first);
    test_judge(&fixture, &first);
    test_release(&fixture);
  }
  oracle_free(&first);
}

/* A mask with one head for two: the fixture's guard pages stop a read behind it. */
static void b07_a_mask_for_all_heads(void **state) {
  (void)state;
  for (int front = 0; front < 2; front++)
    for (int64_t B = 1; B <= 2; B++)
      for (int strides = 0; strides < 2; strides++)
        test_check(&(test_case){.seed = 1,
                                .B = B,
                                .Lq = 5,
                                .Lk = 6,
                                .H = 2,
                                .d = 4,
                                .at_front = front,
                                .has_mask = true,
                                .mask_strides = strides,
                                .mask_extents = TEST_FULL_ROWS,
                                .want = TEST_WANT_ALL});
}

static void b09_which_corner(void **state) {
  (void)state;
  seen_expect_sets(seen_rules(1, MHA_ALIGN_TOP_LEFT, 0), 1, 1, 4, (const char *[]){"0"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_BOTTOM_RIGHT, 0), 1, 1, 4, (const char *[]){"0123"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_TOP_LEFT, 0), 1, 2, 5, (const char *[]){"0", "01"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_BOTTOM_RIGHT, 0), 1, 2, 5,
                   (const char *[]){"0123", "01234"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_TOP_LEFT, 0), 1, 5, 2,
                   (const char *[]){"0", "01", "01", "01", "01"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_BOTTOM_RIGHT, 0), 1, 5, 2,
                   (const char *[]){"", "", "", "0", "01"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_OFFSET, 2), 1, 2, 5, (const char *[]){"012", "0123"});
  seen_expect_sets(seen_rules(1, MHA_ALIGN_OFFSET, -1), 1, 2, 5, (const char *[]){"", "0"});
}

static void b10_a_causal_offset_per_entry(void **state) {
  mha_rules rules = seen_rules(1, MHA_ALIGN_BOTTOM_RIGHT, 0);
  (void)state;
  rules.key_lengths = (int64_t[]){3, 5};
  seen_expect_sets(rules, 2, 2, 8, (const char *[]){"01", "012", "0123", "01234"});
  rules.key_lengths = (int64_t[]){1, 0}; /* fewer keys than queries */
  seen_expect_sets(rules, 2, 2, 8, (const char *[]){"", "0", "", ""});
  rules.key_lengths = (int64_t[]){3, 5};
  rules.query_lengths = (int64_t[]){1, 2};
  seen_expect_sets(rules, 2, 2, 8, (const char *[]){"012", "", "0123", "01234"});
  rules = seen_rules(1, MHA_ALIGN_OFFSET, 99);
  rules.offsets = (int64_t[]){0, 4};
  seen_expect_sets(rules, 2, 2, 8, (const char *[]){"0", "01", "01234", "012345"});
}

static void b11_one_query_is_no_special_case(void **state) {
  (void)state;
  for (int64_t offset = -1; offset <= 3; offset++) {
    float q[8], k[16], v[16], one[4], two[8];
    test_random random;
    test_random_seed(&random, 11);
    test_fill_normal(&random, q, 8, 1.0);
    test_fill_normal(&random, k, 16, 1.0);
    test_fill_normal(&random, v, 16, 1.0);
    test_core core = {.Lq = 1,
                      .Lk = 4,
                      .d = 4,
                      .dv = 4,
                      .q = q,
                      .k = k,
                      .v = v,
                      .output = one,
                      .rules = seen_rules(1, MHA_ALIGN_OFFSET, offset)};
    test_core_run(&core);
    core.Lq = 2;
    core.output = two;
    test_core_run(&core);
    for (int c = 0; c < 4; c++) /* values of size 1: twice an attention result's bound */
      test_near("row 0", (double)one[c], (double)two[c], 2 * (1e-6 + 40 * 0x1p-24));
    if (offset == -1)
      test_near("no key", (double)one[0], 0.0, 0.0);
    if (offset == 0)
      test_near("key 0 alone", (double)one[0], (double)v[0], 1e-6);
  }
}

static void b12_softcap_comes_before_the_mask(void **state) {
  const float zeros[] = {0.0F, 0.0F}, bias[] = {0.0F, -INFINITY};
  float output[1];
  (void)state;
  test_core core = {.Lq = 1,
                    .Lk = 2,
                    .q = zeros,
                    .k = zeros,
                    .v = zeros,
                    .output = output,
                    .rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0)};
  core.rules.softcap = 1.0F;
  core.rules.bias = (mha_bias){bias, 1, 1, 1, 2, 0, 0, 0, 0, 0};
  seen_expect_weights(&core, 2, (double[]){1.0, 0.0});
  core.rules.bias.data = NULL;
  core.rules.attend = (mha_mask){(uint8_t[]){1, 0}, 1, 1, 1, 2, 0, 0, 0, 0, 0};
  seen_expect_weights(&core, 2, (double[]){1.0, 0.0});
  /* and a finite bias is not capped: e^3 : 1 */
  core.rules.attend.data = NULL;
  core.rules.bias.data = (float[]){3.0F, 0.0F};
  seen_expect_weights(&core, 2, (double[]){1 / (1 + exp(-3.0)), 1 / (1 + exp(3.0))});
}

static void b14_a_mask_that_hides_nothing(void **state) {
  const uint8_t all[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  mha_rules rules = seen_rules(1, MHA_ALIGN_TOP_LEFT, 0);
  (void)state;
  rules.attend = (mha_mask){all, 1, 1, 3, 3, 0, 0, 0, 0, 0};
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"0", "01", "012"});
  rules.alibi_slopes = (float[]){0.0F}; /* 0·distance, not 0·∞ */
  rules.bias = (mha_bias){(float[]){0.0F, 0.0F, 0.0F}, 1, 1, 1, 3, 0, 0, 0, MHA_F32, 0};
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"0", "01", "012"});
}

static void b15_hidden_keys_weigh_exactly_nothing(void **state) {
  const uint8_t keep[7] = {0, 1, 1, 0, 0, 1, 0};
  const double factors[] = {1.0, 2e4};
  (void)state;
  for (size_t which = 0; which < COUNT(factors); which++) {
    test_build(&fixture, &(test_case){.seed = 15,
                                      .Lq = 7,
                                      .H = 2,
                                      .d = 3,
                                      .source = TEST_SELF,
                                      .causal = true,
                                      .has_mask = true,
                                      .want = TEST_WANT_ALL});
    memcpy(fixture.mask, keep, sizeof keep);
    for (int64_t at = 0; at < fixture.query.floats; at++)
      fixture.query.data[at] *= (float)factors[which];
    test_run(&fixture);
    for (int64_t h = 0; h < 2; h++)
      for (int64_t i = 0; i < 7; i++)
        for (int64_t j = 0; j < 7; j++)
          if (j > i || !keep[j])
            test_near("hidden", (double)fixture.weights[(h * 7 + i) * 7 + j], 0.0, 0.0);
    for (int64_t e = 0; e < 6; e++)
      test_near("row 0", (double)*test_at(&fixture.output, 0, 0, 0, e), 0.0, 0.0);
    /* with scores of size 1e8 the weights are steps: the bounds, which grow with the scores, say
     * nothing, so the judge is asked at size 1 only */
    if (which == 0)
      test_judge_now(&fixture);
    test_release(&fixture);
  }
}

/* The newest key and the oldest are hidden alike. (A cache that holds the older ones: not yet.) */
static void b16_the_newest_key_is_masked_too(void **state) {
  mha_rules rules = seen_rules(1, MHA_ALIGN_BOTTOM_RIGHT, 0);
  (void)state;
  rules.attend = (mha_mask){(uint8_t[]){1, 1, 1, 0}, 1, 1, 1, 4, 0, 0, 0, 0, 0};
  seen_expect_sets(rules, 1, 1, 4, (const char *[]){"012"});
  rules.attend.data = (uint8_t[]){0, 1, 1, 1};
  seen_expect_sets(rules, 1, 1, 4, (const char *[]){"123"});
}

/* Rows 5 to 7 of 8 are not valid, whatever they hold, and one context remembers nothing. */
static void b17_rows_that_were_never_written(void **state) {
  const float fills[] = {0.0F, 1e30F, NAN, -INFINITY, 1e30F, 0.0F};
  float *first = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  for (int core = 0; core < 2; core++) {
    test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
    for (size_t which = 0; which < COUNT(fills); which++) {
      mha_weights *weights = NULL;
      test_build(&fixture, &(test_case){.seed = 17,
                                        .core = core,
                                        .Lq = 2,
                                        .Lk = 8,
                                        .H = 2,
                                        .d = 4,
                                        .biases = TEST_ALL,
                                        .key_lengths = true});
      test_random_seed(&fixture.random, 170);
      test_fill_normal(&fixture.random, fixture.key.data, fixture.key.floats, 1.0);
      test_fill_normal(&fixture.random, fixture.value.data, fixture.value.floats, 1.0);
      fixture.key_lengths[0] = 5;
      for (int64_t at = 5 * 8; at < 8 * 8; at++)
        fixture.key.data[at] = fixture.value.data[at] = fills[which];
      test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK,
                  NULL);
      test_poison_results(&fixture);
      test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
      if (first)
        test_same_output(&fixture, first);
      else
        first = test_gather(&fixture.output);
      mha_weights_destroy(weights);
      test_release(&fixture);
    }
    free(first);
    first = NULL;
    mha_context_destroy(context);
  }
}

static void b21_the_row_maximum_is_subtracted(void **state) {
  const float q[] = {1.0F}, zeros[] = {0.0F, 0.0F, 0.0F};
  float output[1];
  (void)state;
  test_core core = {.Lq = 1,
                    .Lk = 3,
                    .q = q,
                    .v = zeros,
                    .output = output,
                    .rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0)};
  core.k = (float[]){1000.0F, 0.0F, 0.0F};
  seen_expect_weights(&core, 3, (double[]){1.0, 0.0, 0.0});
  core.k = (float[]){-1000.0F, -1000.0F, -1000.0F};
  seen_expect_weights(&core, 3, (double[]){1.0 / 3, 1.0 / 3, 1.0 / 3});
  core.k = (float[]){1e30F, 0.0F, 1e30F};
  seen_expect_weights(&core, 3, (double[]){0.5, 0.0, 0.5});
  core.k = zeros; /* position biases near 2000 */
  core.rules.alibi_slopes = (float[]){-1000.0F};
  seen_expect_weights(&core, 3, (double[]){0.0, 0.0, 1.0});
}

static void b22_zero_means_bidirectional(void **state) {
  mha_rules rules;
  (void)state;
  MHA_INIT(&rules);
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"012", "012", "012"});
  /* and the default scale: the judge knows no other */
  test_check(&(test_case){.seed = 22,
                          .Lq = 5,
                          .H = 2,
                          .d = 9,
                          .source = TEST_SELF,
                          .want = TEST_WANT_WEIGHTS,
                          .stage = MHA_STAGE_FINAL});
}

static void b24_nonzero_means_attend(void **state) {
  mha_rules rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0);
  (void)state;
  rules.attend = (mha_mask){(uint8_t[]){1, 0, 1, 1}, 1, 1, 2, 2, 0, 0, 0, 0, 0};
  seen_expect_sets(rules, 1, 2, 2, (const char *[]){"0", "01"});
  rules.attend.data = (uint8_t[]){0, 1, 0, 0};
  seen_expect_sets(rules, 1, 2, 2, (const char *[]){"1", ""});
  rules.attend.data = (uint8_t[]){255, 0, 128, 2};
  seen_expect_sets(rules, 1, 2, 2, (const char *[]){"0", "01"});
}

/* {1, 0} as floats adds, as bytes selects, and padding is a count. */
static void b25_masks_have_a_type(void **state) {
  const float zeros[] = {0.0F, 0.0F};
  float output[1];
  (void)state;
  test_core core = {.Lq = 1,
                    .Lk = 2,
                    .q = zeros,
                    .k = zeros,
                    .v = zeros,
                    .output = output,
                    .rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0)};
  core.rules.bias = (mha_bias){(float[]){1.0F, 0.0F}, 1, 1, 1, 2, 0, 0, 0, MHA_F32, 0};
  seen_expect_weights(&core, 2, (double[]){1 / (1 + exp(-1.0)), 1 / (1 + exp(1.0))});
  core.rules.bias.data = NULL;
  core.rules.attend = (mha_mask){(uint8_t[]){1, 0}, 1, 1, 1, 2, 0, 0, 0, 0, 0};
  seen_expect_weights(&core, 2, (double[]){1.0, 0.0});
  core.rules.attend.data = NULL;
  core.rules.key_lengths = (int64_t[]){1};
  seen_expect_weights(&core, 2, (double[]){1.0, 0.0});
}

/* ---- Shapes, layouts, arguments -------------------------------------------------------------- */

static void b26_an_inner_stride_that_is_not_one(void **state) {
  enum { L = 5, H = 2, D = 3 };
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .core = true, .Lq = L, .Lk = L, .H = H, .d = D});
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  mha_tensor *tensors[] = {&fixture.q, &fixture.k, &fixture.v};
  for (size_t which = 0; which < COUNT(tensors); which++) {
    const mha_tensor good = *tensors[which];
    tensors[which]->row_stride = 1; /* [B][H][d][L] */
    tensors[which]->head_stride = D * L;
    tensors[which]->batch_stride = (int64_t)H * D * L;
    tensors[which]->size_stride = L;
    test_expect(test_call(&fixture, context, NULL, &error), MHA_ERROR_STRIDE, &error);
    for (int64_t at = 0; at < fixture.output.floats; at++)
      assert_true(test_is_poison(fixture.output.data[at]));
    *tensors[which] = good;
  }
  /* one key head for all, by stride 0 */
  oracle_result result;
  memcpy(test_at(&fixture.key, 0, 0, 1, 0), test_at(&fixture.key, 0, 0, 0, 0), D * sizeof(float));
  for (int64_t j = 0; j < L; j++)
    memcpy(test_at(&fixture.key, 0, j, 1, 0), test_at(&fixture.key, 0, j, 0, 0), D * sizeof(float));
  test_ask_oracle(&fixture, &result);
  fixture.k.row_stride = H * D;
  fixture.k.head_stride = 0;
  fixture.k.batch_stride = (int64_t)L * H * D;
  fixture.k.size_stride = 1;
  test_run(&fixture);
  test_judge(&fixture, &result);
  oracle_free(&result);
  mha_context_destroy(context);
  test_release(&fixture);
}

static void keep_heads(void *user, const mha_trace_step *step) {
  float *heads = user;
  if (strcmp(step->name, "heads") == 0)
    for (int64_t h = 0; h < 2; h++)
      for (int64_t i = 0; i < 2; i++)
        heads[h * 2 + i] = step->data[h * step->strides[1] + i * step->strides[2]];
}

/* Every token sees itself alone, so that the heads are the values, split. */
static void b27_heads_are_column_blocks(void **state) {
  const float x[] = {1.0F, 2.0F, 3.0F, 4.0F};
  float output[4], heads[4];
  mha_config config;
  mha_matrices matrices;
  mha_rules rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0);
  mha_forward_args args;
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  (void)state;
  mha_config_init(&config, 2, 2);
  MHA_INIT(&matrices);
  MHA_INIT(&args);
  rules.flags = MHA_WINDOW;
  args.batch = 1;
  args.query_length = 2;
  args.query = x;
  args.output = output;
  args.rules = &rules;
  test_expect(mha_weights_create(&config, &matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  test_expect(mha_context_trace(context, keep_heads, heads, NULL), MHA_OK, NULL);
  test_expect(mha_forward(context, weights, &args, NULL), MHA_OK, NULL);
  test_same_bits("heads", (test_shape){{1, 2, 2, 1}}, heads, (float[]){1.0F, 3.0F, 2.0F, 4.0F});
  test_same_bits("output", (test_shape){{1, 2, 1, 2}}, output, x);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

static void b28_which_kv_head_serves_which_head(void **state) {
  const float q[4] = {0}, k[2] = {0}, v[] = {10.0F, 20.0F};
  float output[4];
  (void)state;
  test_core core = {.Lq = 1,
                    .Lk = 1,
                    .H = 4,
                    .G = 2,
                    .q = q,
                    .k = k,
                    .v = v,
                    .output = output,
                    .rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0)};
  test_core_run(&core);
  test_same_bits("heads", (test_shape){{1, 1, 4, 1}}, output,
                 (float[]){10.0F, 10.0F, 20.0F, 20.0F});
}

static void b29_empty_tensors(void **state) {
  const float numbers[8] = {0};
  float output[8];
  mha_config config;
  mha_matrices matrices;
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  test_core core = {.Lq = 0,
                    .Lk = 4,
                    .q = numbers,
                    .k = numbers,
                    .v = numbers,
                    .output = output,
                    .rules = seen_rules(1, MHA_ALIGN_BOTTOM_RIGHT, 0)};
  test_core_run(&core);
  core.Lq = 3;
  core.Lk = 0;
  test_core_run(&core);
  for (int i = 0; i < 3; i++)
    test_near("empty row", (double)output[i], 0.0, 0.0);
  MHA_INIT(&matrices);
  mha_config_init(&config, 4, 0); /* H = 0 */
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_ERROR_SIZE, &error);
  mha_config_init(&config, 0, 2); /* and so d = 0 */
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_ERROR_SIZE, &error);
  mha_config_init(&config, 4, 2);
  config.head_size = -1;
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_ERROR_SIZE, &error);
  mha_context *context = NULL;
  mha_attend_args args;
  MHA_INIT(&args);
  args.output = output;
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  const mha_tensor good = {numbers, 1, 2, 1, 2, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor no_heads = {numbers, 1, 2, 0, 2, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor no_size = {numbers, 1, 2, 1, 0, 0, 0, 0, 0, MHA_F32, 0};
  test_expect(mha_attend(context, &no_heads, &good, &good, &args, &error), MHA_ERROR_SIZE, &error);
  test_expect(mha_attend(context, &no_size, &no_size, &good, &args, &error), MHA_ERROR_SIZE,
              &error);
  test_expect(mha_attend(context, &good, &good, &no_size, &args, &error), MHA_ERROR_SIZE, &error);
  mha_context_destroy(context);
}

/* (Lengths of a cache: not yet.) */
static void b30_lengths_are_checked_before_they_are_used(void **state) {
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  test_build(&fixture, &(test_case){.seed = 1,
                                    .core = true,
                                    .B = 2,
                                    .Lq = 3,
                                    .Lk = 8,
                                    .H = 2,
                                    .d = 4,
                                    .key_lengths = true,
                                    .query_lengths = true,
                                    .want = TEST_WANT_LSE});
  const int64_t bad_keys[] = {-1, 9, INT64_MIN, INT64_MAX, INT64_C(1) << 32};
  for (size_t which = 0; which < COUNT(bad_keys); which++) {
    const int64_t good = fixture.key_lengths[1], good_query = fixture.query_lengths[0];
    fixture.key_lengths[1] = bad_keys[which];
    test_expect(test_call(&fixture, context, NULL, &error), MHA_ERROR_LENGTH, &error);
    fixture.key_lengths[1] = good;
    fixture.query_lengths[0] = bad_keys[which];
    test_expect(test_call(&fixture, context, NULL, &error), MHA_ERROR_LENGTH, &error);
    fixture.query_lengths[0] = good_query;
  }
  for (int64_t at = 0; at < fixture.output.floats; at++)
    assert_true(test_is_poison(fixture.output.data[at]));
  assert_true(test_is_poison(fixture.lse[0]));
  test_release(&fixture);

  const int64_t starts[][3] = {{0, 5, 3},  {1, 2, 5}, {0, 2, 6},        {-1, 2, 5},
                               {0, -1, 5}, {0, 6, 6}, {0, INT64_MAX, 5}};
  test_build(
      &fixture,
      &(test_case){
          .seed = 1, .core = true, .B = 2, .Lq = 5, .Lk = 5, .H = 2, .d = 4, .packed = true});
  for (size_t which = 0; which < COUNT(starts); which++)
    for (int keys = 0; keys < 2; keys++) {
      const int64_t good[] = {0, 2, 5};
      fixture.rules.query_starts = keys ? good : starts[which];
      fixture.rules.key_starts = keys ? starts[which] : good;
      test_expect(test_call(&fixture, context, NULL, &error), MHA_ERROR_LENGTH, &error);
    }
  for (int64_t at = 0; at < fixture.output.floats; at++)
    assert_true(test_is_poison(fixture.output.data[at]));
  mha_context_destroy(context);
  test_release(&fixture);
}

static void b33_a_width_that_the_heads_do_not_divide(void **state) {
  mha_config config;
  mha_matrices matrices;
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  mha_config_init(&config, 10, 3);
  MHA_INIT(&matrices);
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_ERROR_HEADS, &error);
  assert_null(weights);
  /* with a head size of its own it is a layer like any other */
  test_check(&(test_case){.seed = 33, .Lq = 4, .H = 3, .d = 5, .Eq = 10, .source = TEST_SELF});
}

static void b34_rows_of_weights_sum_to_one(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 34,
                                    .B = 2,
                                    .Lq = 9,
                                    .Lk = 30,
                                    .H = 3,
                                    .d = 4,
                                    .causal = true,
                                    .alignment = MHA_ALIGN_OFFSET,
                                    .offset = -2,
                                    .want = TEST_WANT_ALL});
  test_run(&fixture);
  for (int64_t row = 0; row < 2 * 3 * 9; row++) {
    double sum = 0;
    for (int64_t j = 0; j < 30; j++)
      sum += (double)fixture.weights[row * 30 + j];
    test_near("sum of weights", sum, row % 9 < 2 ? 0.0 : 1.0, row % 9 < 2 ? 0.0 : 1e-5);
  }
  for (int64_t row = 0; row < 2 * 9; row++) {
    double sum = 0;
    for (int64_t j = 0; j < 30; j++)
      sum += (double)fixture.average[row * 30 + j];
    test_near("sum of average", sum, row % 9 < 2 ? 0.0 : 1.0, row % 9 < 2 ? 0.0 : 1e-5);
  }
  test_release(&fixture);
}

static void b35_lengths_are_plain_counts(void **state) {
  mha_rules rules = seen_rules(0, MHA_ALIGN_TOP_LEFT, 0);
  (void)state;
  rules.key_lengths = (int64_t[]){3, 1};
  rules.query_lengths = (int64_t[]){1, 2};
  seen_expect_sets(rules, 2, 2, 4, (const char *[]){"012", "", "0", "0"});
}

/* left counts the keys before the query's own: W keys with its own are left = W − 1. */
static void b36_a_window_includes_both_ends(void **state) {
  mha_rules rules = seen_rules(1, MHA_ALIGN_TOP_LEFT, 0);
  (void)state;
  rules.flags = MHA_WINDOW;
  rules.window_left = 1;
  seen_expect_sets(rules, 1, 6, 6, (const char *[]){"0", "01", "12", "23", "34", "45"});
  rules.window_left = 2;
  seen_expect_sets(rules, 1, 6, 6, (const char *[]){"0", "01", "012", "123", "234", "345"});
  rules.window_left = 0;
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"0", "1", "2"});
  rules.causal = 0;
  rules.window_right = 1;
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"01", "12", "2"});
  rules.window_left = -1;
  seen_expect_sets(rules, 1, 3, 3, (const char *[]){"01", "012", "012"});
  rules.window_left = 1;
  rules.window_right = -1;
  seen_expect_sets(rules, 1, 4, 4, (const char *[]){"0123", "0123", "123", "23"});
  rules.alignment = MHA_ALIGN_BOTTOM_RIGHT;
  rules.window_right = 0;
  seen_expect_sets(rules, 1, 2, 5, (const char *[]){"23", "34"});
}

/* Five tokens at once, or one by one with the keys so far. (Rotary positions and a cache: not
 * yet.) */
static void b37_token_by_token_or_at_once(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++) {
    oracle_result result;
    test_build(&fixture, &(test_case){.seed = 37,
                                      .core = core,
                                      .Lq = 5,
                                      .Lk = 5,
                                      .H = 2,
                                      .d = 4,
                                      .biases = TEST_ALL,
                                      .causal = true});
    test_ask_oracle(&fixture, &result);
    test_run(&fixture);
    test_judge(&fixture, &result);
    float *output = fixture.output.data;
    for (int64_t i = 0; i < 5; i++) {
      fixture.rules.alignment = MHA_ALIGN_BOTTOM_RIGHT;
      fixture.args.query_length = fixture.q.length = 1;
      fixture.args.key_length = fixture.k.length = fixture.v.length = i + 1;
      fixture.args.query = fixture.q.data = test_at(&fixture.query, 0, i, 0, 0);
      fixture.args.output = fixture.attend_args.output = output + 8 * i;
      test_run(&fixture);
      test_compare("token alone", (test_shape){{1, 1, 1, 8}}, output + 8 * i,
                   result.output.value + 8 * i, result.output.bound + 8 * i);
    }
    oracle_free(&result);
    test_release(&fixture);
  }
}

static void b38_input_widths_are_not_head_sizes(void **state) {
  (void)state;
  test_check(&(test_case){.seed = 38,
                          .B = 2,
                          .Lq = 3,
                          .Lk = 6,
                          .H = 1,
                          .d = 5,
                          .Eq = 5,
                          .Ek = 5,
                          .Ev = 4,
                          .Eo = 5,
                          .biases = TEST_ALL,
                          .want = TEST_WANT_ALL});
  test_check(&(test_case){.seed = 39,
                          .Lq = 3,
                          .Lk = 6,
                          .H = 2,
                          .d = 3,
                          .Eq = 6,
                          .Ek = 7,
                          .Ev = 4,
                          .Eo = 6,
                          .out_in = true,
                          .biases = TEST_ALL});
}

/* Scratch for a call with a broadcast mask and bias is that of a call without. */
static void b40_a_broadcast_mask_is_never_expanded(void **state) {
  enum { B = 2, H = 4, L = 600 };
  size_t bytes[2];
  (void)state;
  for (int masked = 0; masked < 2; masked++) {
    mha_context *context = NULL;
    mha_error error;
    test_build(&fixture, &(test_case){.seed = 40,
                                      .core = true,
                                      .B = B,
                                      .Lq = L,
                                      .Lk = L,
                                      .H = H,
                                      .d = 8,
                                      .has_mask = masked,
                                      .has_bias = masked,
                                      .mask_extents = TEST_FULL_ROWS,
                                      .bias_extents = TEST_FULL_ROWS});
    test_expect(mha_context_create(&fixture.options, &context, NULL), MHA_OK, NULL);
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, NULL, &error), MHA_OK, &error);
    bytes[masked] = fixture.allocator.live_bytes;
    mha_context_destroy(context);
    test_allocator_check(&fixture.allocator);
    test_release(&fixture);
  }
  assert_int_equal(bytes[0], bytes[1]);
  /* one tile of scores for one thread, far from one [L][L] matrix */
  assert_true(bytes[1] < sizeof(float) * L * L);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(b01_band_mask_on_long_inputs),
      cmocka_unit_test(b02_a_row_with_nothing_to_attend_to),
      cmocka_unit_test(b03_asking_for_weights_changes_nothing),
      cmocka_unit_test(b04_causal_is_never_dropped),
      cmocka_unit_test(b05_a_finite_additive_mask_counts),
      cmocka_unit_test(b06_every_extent_of_one_mask),
      cmocka_unit_test(b07_a_mask_for_all_heads),
      cmocka_unit_test(b09_which_corner),
      cmocka_unit_test(b10_a_causal_offset_per_entry),
      cmocka_unit_test(b11_one_query_is_no_special_case),
      cmocka_unit_test(b12_softcap_comes_before_the_mask),
      cmocka_unit_test(b14_a_mask_that_hides_nothing),
      cmocka_unit_test(b15_hidden_keys_weigh_exactly_nothing),
      cmocka_unit_test(b16_the_newest_key_is_masked_too),
      cmocka_unit_test(b17_rows_that_were_never_written),
      cmocka_unit_test(b21_the_row_maximum_is_subtracted),
      cmocka_unit_test(b22_zero_means_bidirectional),
      cmocka_unit_test(b24_nonzero_means_attend),
      cmocka_unit_test(b25_masks_have_a_type),
      cmocka_unit_test(b26_an_inner_stride_that_is_not_one),
      cmocka_unit_test(b27_heads_are_column_blocks),
      cmocka_unit_test(b28_which_kv_head_serves_which_head),
      cmocka_unit_test(b29_empty_tensors),
      cmocka_unit_test(b30_lengths_are_checked_before_they_are_used),
      cmocka_unit_test(b33_a_width_that_the_heads_do_not_divide),
      cmocka_unit_test(b34_rows_of_weights_sum_to_one),
      cmocka_unit_test(b35_lengths_are_plain_counts),
      cmocka_unit_test(b36_a_window_includes_both_ends),
      cmocka_unit_test(b37_token_by_token_or_at_once),
      cmocka_unit_test(b38_input_widths_are_not_head_sizes),
      cmocka_unit_test(b40_a_broadcast_mask_is_never_expanded),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
