/* The layer against the judge: sweeps of every size, layout and way to give weights. All memory is
 * poisoned with NaN before use (inputs' gaps, outputs, scratch) and fenced with guard pages. */
#include "fixture.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Around vector widths and likely tile widths. */
static const int64_t lengths[] = {1,  2,  7,  8,   15,  16,  17,  31,  33,
                                  63, 64, 65, 127, 128, 129, 255, 256, 257};
static const int64_t small_lengths[] = {1, 2, 8, 17, 33};
static const int64_t sizes[] = {1, 3, 4, 8, 15, 16, 17, 32, 33, 64, 65};
static const int64_t small_sizes[] = {1, 4, 17, 33};

static const int64_t *sweep(const int64_t *all, size_t n_all, const int64_t *few, size_t n_few,
                            size_t *n) {
  *n = test_small() ? n_few : n_all;
  return test_small() ? few : all;
}

static void every_pair_of_lengths(void **state) {
  size_t n;
  const int64_t *all = sweep(lengths, COUNT(lengths), small_lengths, COUNT(small_lengths), &n);
  (void)state;
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++)
      test_check(&(test_case){.seed = 100 * i + j,
                              .Lq = all[i],
                              .Lk = all[j],
                              .H = 2,
                              .G = 1,
                              .d = 5,
                              .dv = 3,
                              .Eq = 6,
                              .biases = TEST_ALL,
                              .at_front = (i + j) % 2,
                              .want = (i + j) % 3 == 0 ? TEST_WANT_ALL : 0});
}

static void long_lengths(void **state) {
  const int64_t pairs[][2] = {{511, 513}, {512, 512}, {513, 511}, {1, 4097}, {2, 2049},
                              {1025, 1},  {1023, 65}, {70, 1500}, {5, 12345}};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 1 : COUNT(pairs)); i++)
    test_check(&(test_case){.seed = i,
                            .Lq = pairs[i][0],
                            .Lk = pairs[i][1],
                            .H = 2,
                            .d = 16,
                            .Eq = 24,
                            .biases = TEST_ALL,
                            .want = TEST_WANT_LSE});
}

static void every_pair_of_head_sizes(void **state) {
  size_t n;
  const int64_t *all = sweep(sizes, COUNT(sizes), small_sizes, COUNT(small_sizes), &n);
  (void)state;
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++)
      test_check(&(test_case){.seed = 100 * i + j,
                              .B = 2,
                              .Lq = 17,
                              .Lk = 70,
                              .H = 3,
                              .d = all[i],
                              .dv = all[j],
                              .Eq = 9,
                              .at_front = i % 2,
                              .want = TEST_WANT_ALL});
}

static void large_heads(void **state) {
  const int64_t large[] = {96, 128, 200, 256};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 1 : COUNT(large)); i++)
    test_check(&(test_case){.seed = i,
                            .Lq = 40,
                            .H = 2,
                            .d = large[i],
                            .source = TEST_SELF,
                            .biases = TEST_ALL,
                            .want = TEST_WANT_ALL});
}

/* A few rows times large matrices: where a BLAS has faster routines than for many rows. */
static void few_rows_of_wide_layers(void **state) {
  (void)state;
  for (int64_t L = 1; L <= (test_small() ? 2 : 9); L++)
    for (int variant = 0; variant < 16; variant++)
      test_check(&(test_case){.seed = (uint64_t)(100 * L + variant),
                              .B = variant & 8 ? 2 : 1,
                              .Lq = L,
                              .Lk = L + 1,
                              .H = 4,
                              .G = 2,
                              .d = 70,
                              .dv = 130,
                              .Eq = 517,
                              .Ek = 511,
                              .Ev = 300,
                              .Eo = 259,
                              .out_in = variant & 1,
                              .accumulate = variant & 2,
                              .biases = variant & 4 ? TEST_ALL : 0,
                              .weight_layout = variant & 4 ? TEST_GAPS : TEST_APART,
                              .layout = (test_layout)(variant % 3),
                              .threads = 1 + variant % 2,
                              .want = TEST_WANT_ALL});
}

/* Widths beyond the panels that a projection may be cut into, each column with its own bias. */
static void wide_layers(void **state) {
  const int64_t rows[] = {3, 20};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 1 : COUNT(rows)); i++)
    for (int variant = 0; variant < 4; variant++)
      test_check(&(test_case){.seed = i,
                              .Lq = rows[i],
                              .Lk = 7,
                              .H = 10,
                              .d = 110,
                              .Eq = 40,
                              .Eo = 2100,
                              .out_in = variant & 1,
                              .accumulate = variant & 2,
                              .biases = TEST_ALL,
                              .threads = 2,
                              .layout = (test_layout)(variant % 3)});
}

static void few_queries_over_many_keys(void **state) {
  (void)state;
  for (int64_t Lq = 1; Lq <= (test_small() ? 1 : 9); Lq++)
    for (int variant = 0; variant < 4; variant++)
      test_check(&(test_case){.seed = (uint64_t)(10 * Lq + variant),
                              .core = variant & 1,
                              .Lq = Lq,
                              .Lk = 4000 + Lq,
                              .H = 2,
                              .d = 33,
                              .dv = 17 + 20 * (variant / 2),
                              .Eq = 10,
                              .layout = variant & 2 ? TEST_PADDED : TEST_DENSE,
                              .want = TEST_WANT_ALL});
}

/* All four widths different from each other and from H·d. */
static void every_width_on_its_own(void **state) {
  const int64_t widths[][4] = {{5, 7, 11, 13},  {1, 2, 3, 4},    {64, 33, 17, 129},
                               {130, 1, 64, 1}, {16, 48, 32, 8}, {3, 100, 5, 257}};
  (void)state;
  for (size_t i = 0; i < COUNT(widths); i++)
    for (int out_in = 0; out_in < 2; out_in++)
      test_check(&(test_case){.seed = i,
                              .B = 2,
                              .Lq = 9,
                              .Lk = 20,
                              .H = 4,
                              .G = 2,
                              .d = 6,
                              .dv = 5,
                              .Eq = widths[i][0],
                              .Ek = widths[i][1],
                              .Ev = widths[i][2],
                              .Eo = widths[i][3],
                              .out_in = out_in,
                              .biases = TEST_ALL,
                              .want = TEST_WANT_ALL});
}

static void every_grouping_of_heads(void **state) {
  (void)state;
  for (int64_t H = 1; H <= 12; H++)
    for (int64_t G = 1; G <= H; G++)
      for (int64_t B = 1; H % G == 0 && B <= 3; B += 2)
        test_check(&(test_case){.seed = (uint64_t)(100 * H + G),
                                .B = B,
                                .Lq = 6,
                                .Lk = 11,
                                .H = H,
                                .G = G,
                                .d = 4,
                                .dv = 3,
                                .Eq = 10,
                                .want = TEST_WANT_ALL});
}

static void every_way_to_lay_weights(void **state) {
  (void)state;
  for (int out_in = 0; out_in < 2; out_in++)
    for (int borrow = 0; borrow < 2; borrow++)
      for (int layout = TEST_APART; layout <= TEST_IN_BLOCK; layout++)
        for (unsigned biases = 0; biases <= TEST_ALL; biases++)
          test_check(&(test_case){.seed = biases,
                                  .B = 2,
                                  .Lq = 5,
                                  .Lk = 7,
                                  .H = 4,
                                  .G = 2,
                                  .d = 3,
                                  .dv = 2,
                                  .Eq = 10,
                                  .Eo = 9,
                                  .out_in = out_in,
                                  .borrow = borrow,
                                  .weight_layout = (test_weight_layout)layout,
                                  .biases = biases});
}

/* H·d = G·d = G·dv = the widths, so that each step can be the identity, with and without a bias. */
static void every_matrix_absent(void **state) {
  (void)state;
  for (unsigned absent = 0; absent <= TEST_ALL; absent++)
    for (unsigned biases = 0; biases <= TEST_ALL; biases++)
      for (int source = TEST_CROSS; source <= TEST_SELF; source++)
        test_check(&(test_case){.seed = 16 * absent + biases,
                                .B = 2,
                                .Lq = 6,
                                .Lk = 9,
                                .H = 2,
                                .d = 4,
                                .out_in = biases % 2,
                                .source = (test_source)source,
                                .layout = absent % 2 ? TEST_PADDED : TEST_LENGTH_FIRST,
                                .accumulate = (absent ^ biases) & 4,
                                .query_lengths = biases & 2,
                                .key_lengths = absent & 8,
                                .absent = absent,
                                .biases = biases});
}

/* The identity with grouped heads: Ek = G·d and Ev = G·dv differ from Eq = H·d. */
static void absent_matrices_of_grouped_heads(void **state) {
  (void)state;
  for (int layout = TEST_DENSE; layout <= TEST_LENGTH_FIRST; layout++)
    test_check(&(test_case){.seed = (uint64_t)layout,
                            .B = 2,
                            .Lq = 6,
                            .Lk = 9,
                            .H = 6,
                            .G = 2,
                            .d = 4,
                            .dv = 3,
                            .Ek = 8,
                            .Ev = 6,
                            .Eo = 18,
                            .layout = (test_layout)layout,
                            .absent = TEST_ALL,
                            .want = TEST_WANT_ALL});
}

static void every_layout_of_inputs(void **state) {
  (void)state;
  for (int layout = TEST_DENSE; layout <= TEST_LENGTH_FIRST; layout++)
    for (int source = TEST_CROSS; source <= TEST_SELF; source++)
      for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int64_t B = 1; B <= 3; B++)
          for (int front = 0; front < 2; front++)
            test_check(&(test_case){.seed = (uint64_t)(10 * B + layout),
                                    .B = B,
                                    .Lq = 13,
                                    .Lk = 18,
                                    .H = 2,
                                    .d = 5,
                                    .Eq = 7,
                                    .layout = (test_layout)layout,
                                    .source = (test_source)source,
                                    .accumulate = accumulate,
                                    .at_front = front,
                                    .biases = B == 2 ? TEST_ALL : 0});
}

static void the_call_overrides_the_layer(void **state) {
  const float scales[] = {0.0F, -0.5F, 1.0F, 2.5F}, softcaps[] = {0.0F, 1.0F, 30.0F};
  (void)state;
  for (size_t i = 0; i < COUNT(scales); i++)
    for (size_t j = 0; j < COUNT(softcaps); j++)
      for (int in_call = 0; in_call < 2; in_call++)
        for (int stage = 0; stage < 4; stage++)
          test_check(&(test_case){.seed = i,
                                  .Lq = 6,
                                  .Lk = 9,
                                  .H = 2,
                                  .d = 4,
                                  .scale_given = true,
                                  .scale = scales[i],
                                  .softcap = softcaps[j],
                                  .rules_in_call = in_call,
                                  .want = TEST_WANT_WEIGHTS | TEST_WANT_LSE,
                                  .stage = (mha_stage)stage});
}

static void packed_sequences(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 5 : 60); seed++)
    test_check(&(test_case){.seed = seed,
                            .B = 1 + (int64_t)(seed % 7),
                            .Lq = 1 + (int64_t)(seed * 7 % 90),
                            .Lk = 1 + (int64_t)(seed * 11 % 150),
                            .H = 4,
                            .G = 2,
                            .d = 3,
                            .Eq = 8,
                            .packed = true,
                            .packed_tail = seed % 4 > 1,
                            .source = seed % 2 ? TEST_SELF : TEST_CROSS,
                            .layout = seed % 3 ? TEST_DENSE : TEST_PADDED,
                            .accumulate = seed % 4 == 0,
                            .causal = seed % 3 == 1,
                            .alignment = (mha_alignment)(seed % 3),
                            .offset = (int64_t)(seed % 5) - 2,
                            .alibi = seed % 5 == 0,
                            .biases = TEST_ALL,
                            .want = TEST_WANT_LSE});
}

/* The one-line call is the full call with everything left out. */
static void self_attention_is_forward(void **state) {
  test_fixture f;
  oracle_result result;
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  test_build(
      &f,
      &(test_case){
          .seed = 1, .B = 3, .Lq = 21, .H = 4, .d = 5, .source = TEST_SELF, .biases = TEST_ALL});
  test_expect(mha_weights_create(&f.config, &f.matrices, &weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_poison_results(&f);
  test_expect(mha_self_attention(context, weights, f.query.data, 3, 21, f.output.data, &error),
              MHA_OK, &error);
  test_ask_oracle(&f, &result);
  test_judge(&f, &result);
  float *short_call = test_gather(&f.output);
  test_poison_results(&f);
  test_expect(mha_forward(context, weights, &f.args, &error), MHA_OK, &error);
  test_same_bits("output", test_view_shape(&f.output), f.output.data, short_call);
  free(short_call);
  oracle_free(&result);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&f);
}

/* One context for many layers and shapes: what an earlier call left in the scratch shows nowhere.
 */
static void one_context_serves_many_layers(void **state) {
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  for (uint64_t seed = 0; seed < 40; seed++) {
    static test_fixture f;
    mha_weights *weights = NULL;
    oracle_result result;
    test_build(&f, &(test_case){.seed = seed,
                                .B = 1 + (int64_t)(seed % 3),
                                .Lq = 1 + (int64_t)(seed * 37 % 101),
                                .Lk = 1 + (int64_t)(seed * 53 % 97),
                                .H = 2,
                                .d = 1 + (int64_t)(seed % 9),
                                .Eq = 1 + (int64_t)(seed % 17),
                                .causal = seed % 2,
                                .want = TEST_WANT_ALL});
    f.config.allocator = NULL; /* these weights outlive test_run, which looks for leaks */
    test_expect(mha_weights_create(&f.config, &f.matrices, &weights, &error), MHA_OK, &error);
    test_poison_results(&f);
    test_expect(mha_forward(context, weights, &f.args, &error), MHA_OK, &error);
    test_ask_oracle(&f, &result);
    test_judge(&f, &result);
    float *first = test_gather(&f.output);
    test_run(&f); /* in a fresh context */
    test_same_bits("output", test_view_shape(&f.output), f.output.data, first);
    free(first);
    oracle_free(&result);
    mha_weights_destroy(weights);
    test_release(&f);
  }
  mha_context_destroy(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_pair_of_lengths),
      cmocka_unit_test(long_lengths),
      cmocka_unit_test(every_pair_of_head_sizes),
      cmocka_unit_test(large_heads),
      cmocka_unit_test(few_rows_of_wide_layers),
      cmocka_unit_test(wide_layers),
      cmocka_unit_test(few_queries_over_many_keys),
      cmocka_unit_test(every_width_on_its_own),
      cmocka_unit_test(every_grouping_of_heads),
      cmocka_unit_test(every_way_to_lay_weights),
      cmocka_unit_test(every_matrix_absent),
      cmocka_unit_test(absent_matrices_of_grouped_heads),
      cmocka_unit_test(every_layout_of_inputs),
      cmocka_unit_test(the_call_overrides_the_layer),
      cmocka_unit_test(packed_sequences),
      cmocka_unit_test(self_attention_is_forward),
      cmocka_unit_test(one_context_serves_many_layers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
