/* Dropout: which weights meet their values, by the judge's random numbers; and what it must leave
 * alone. */
#include "dropout.h"
#include "fixture.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture;

/* ---- Against the judge ----------------------------------------------------------------------- */

enum { CALLERS = 4 };

/* What calls the core: mha_attend, a layer with keys of its own, one of self attention, packed. */
static void set_caller(test_case *c, int caller) {
  c->core = caller == 0 || (caller == 3 && c->seed % 2 == 0);
  c->source = caller == 2 ? TEST_SELF : TEST_CROSS;
  c->packed = caller == 3;
  if (c->packed) {
    c->query_lengths = c->key_lengths = c->has_mask = c->has_bias = false;
    c->want = TEST_WANT_LSE;
  }
}

static test_case case_of(uint64_t seed) {
  const float shares[] = {0.1F, 0.5F, 0.9F, 0.3F, 0.75F, 1e-6F};
  test_random r;
  test_random_seed(&r, seed);
  test_case c = {.seed = seed,
                 .B = test_random_range(&r, 1, 3),
                 .Lq = test_random_range(&r, 1, 20),
                 .Lk = test_random_range(&r, 1, 40),
                 .H = 4,
                 .G = (int64_t)1 << seed % 3,
                 .d = test_random_range(&r, 1, 9),
                 .dv = test_random_range(&r, 1, 9),
                 .Eo = 7,
                 .causal = test_random_range(&r, 0, 1),
                 .window = test_random_range(&r, 0, 2) == 0,
                 .left = test_random_range(&r, -1, 9),
                 .right = test_random_range(&r, -1, 9),
                 .alignment = (mha_alignment)test_random_range(&r, 0, 2),
                 .offset = test_random_range(&r, -3, 9),
                 .query_lengths = test_random_range(&r, 0, 2) == 0,
                 .key_lengths = test_random_range(&r, 0, 2) == 0,
                 .has_mask = test_random_range(&r, 0, 2) == 0,
                 .mask_extents = (unsigned)test_random_range(&r, 0, 7),
                 .has_bias = test_random_range(&r, 0, 2) == 0,
                 .bias_hides = true,
                 .bias_extents = (unsigned)test_random_range(&r, 0, 7),
                 .alibi = test_random_range(&r, 0, 3) == 0,
                 .sinks = test_random_range(&r, 0, 3) == 0,
                 .softcap = test_random_range(&r, 0, 3) == 0 ? 2.0F : 0.0F,
                 .dropout = shares[seed % COUNT(shares)],
                 .dropout_seed = test_random_bits(&r),
                 .dropout_call = seed % 2 ? seed : test_random_bits(&r),
                 .threads = 1 + (int)(seed % 3),
                 .want = TEST_WANT_ALL,
                 .stage = (mha_stage)(seed / 4 % 4)};
  set_caller(&c, (int)(seed % CALLERS));
  return c;
}

static void every_rule(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 60 : 600); seed++) {
    const test_case c = case_of(seed);
    test_check(&c);
  }
}

/* Across the borders of tiles of keys and queries. */
static void long_rows(void **state) {
  const int64_t lengths[][2] = {{70, 150}, {257, 513}, {300, 1100}, {97, 640}};
  (void)state;
  for (size_t k = 0; k < (test_small() ? 1 : COUNT(lengths)); k++)
    for (uint64_t seed = 0; seed < 2 * CALLERS; seed++) {
      test_case c = case_of(seed);
      c.B = c.packed ? 3 : 1;
      c.Lq = lengths[k][0];
      c.Lk = lengths[k][1];
      test_check(&c);
    }
}

/* Parts of the keys, strips of heads. */
static void few_queries(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 4 : 16); seed++) {
    test_case c = case_of(seed);
    set_caller(&c, seed % 2 ? 1 : 0);
    c.Lq = 1 + (int64_t)(seed % 8);
    c.Lk = test_small() ? 200 : 1500;
    c.offset = c.Lk - c.Lq;
    c.alignment = MHA_ALIGN_OFFSET;
    c.d = 17;
    test_check(&c);
  }
}

/* Keys and values of other types than float32. */
static void stored_keys(void **state) {
  const int32_t types[] = {MHA_F16, MHA_BF16, MHA_Q8_0};
  (void)state;
  for (size_t k = 0; k < COUNT(types); k++)
    for (int64_t Lq = 2; Lq <= 40; Lq += 38)
      test_check(&(test_case){.seed = k,
                              .core = true,
                              .Lq = Lq,
                              .Lk = 150,
                              .H = 4,
                              .G = 2,
                              .d = 32,
                              .k_type = types[k],
                              .v_type = types[COUNT(types) - 1 - k],
                              .dropout = 0.4F,
                              .dropout_seed = 3,
                              .want = TEST_WANT_ALL});
}

/* Shares of words: the least that can be, and the most. */
static void extreme_shares(void **state) {
  const float shares[] = {FLT_TRUE_MIN, 0x1p-32F, 0x1p-9F, 1.0F - 0x1p-24F, 1.0F - 0x1p-9F};
  (void)state;
  for (size_t k = 0; k < COUNT(shares); k++)
    test_check(&(test_case){.seed = k,
                            .core = true,
                            .Lq = 60,
                            .Lk = 70,
                            .H = 2,
                            .d = 4,
                            .dropout = shares[k],
                            .dropout_seed = 77,
                            .want = TEST_WANT_ALL});
}

/* ---- By hand --------------------------------------------------------------------------------- */

/* Of seed 0 and call 0 the first words are 6627e8d5 e169c58d bc57ac4c 9b00dbd8: with p = 0.5 the
 * first is dropped, with p = 0.61, above 0x9b00dbd8/2^32 = 0.6055, the last one too. */
static void the_first_words(void **state) {
  const float q[2] = {0.0F, 0.0F}, k[8] = {0.0F};
  const float v[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  float output[4];
  test_core core = {.Lq = 1, .Lk = 4, .d = 2, .dv = 4, .q = q, .k = k, .v = v, .output = output};
  (void)state;
  MHA_INIT(&core.rules);
  core.rules.dropout = 0.5F;
  test_core_run(&core);
  for (int c = 0; c < 4; c++)
    assert_true(output[c] == (c == 0 ? 0.0F : 0.5F));
  core.rules.dropout = 0.61F;
  test_core_run(&core);
  for (int c = 0; c < 4; c++)
    test_near("output", (double)output[c], c == 0 || c == 3 ? 0 : 0.25 / (1 - (double)0.61F), 1e-6);
}

/* A word w is kept by p = w/2^32 and dropped by a p half a word above, which is no word: both are
 * exact floats where w is small. */
static void shares_between_two_words(void **state) {
  enum { N = 4096 };
  static float zeros[N], values[N];
  const uint32_t key[2] = {0, 0};
  uint32_t least = UINT32_MAX;
  int64_t place = 0;
  float output = 0.0F;
  test_core core = {.Lq = 1, .Lk = N, .d = 1, .dv = 1, .q = zeros, .k = zeros, .v = values};
  (void)state;
  for (uint32_t e = 0; e < N; e++) {
    const uint32_t counter[4] = {e / 4, 0, 0, 0};
    uint32_t words[4];
    test_philox(counter, key, words);
    if (words[e % 4] < least) {
      least = words[e % 4];
      place = e;
    }
  }
  assert_in_range(least, 1, 1 << 22);
  values[place] = N;
  core.output = &output;
  MHA_INIT(&core.rules);
  core.rules.dropout = ldexpf((float)least, -32);
  test_core_run(&core);
  test_near("kept", (double)output, 1, 0.01);
  core.rules.dropout = ldexpf((float)least + 0.5F, -32);
  test_core_run(&core);
  assert_true(output == 0.0F);
}

/* Equal weights and values of 1: a row's result is the share that was kept, times 1/(1 - p). */
static void the_share_that_is_kept(void **state) {
  enum { L = 400, D = 4 };
  static float zeros[L * D], ones[L], output[L];
  const float shares[] = {0.1F, 0.5F, 0.8F};
  (void)state;
  for (int j = 0; j < L; j++)
    ones[j] = 1.0F;
  for (size_t k = 0; k < COUNT(shares); k++) {
    const double p = (double)shares[k];
    test_core core = {
        .Lq = L, .Lk = L, .d = D, .dv = 1, .q = zeros, .k = zeros, .v = ones, .output = output};
    double mean = 0, squares = 0;
    MHA_INIT(&core.rules);
    core.rules.dropout = shares[k];
    core.rules.dropout_seed = 1234;
    test_core_run(&core);
    for (int i = 0; i < L; i++) {
      mean += (double)output[i] / L;
      squares += ((double)output[i] - 1) * ((double)output[i] - 1) / L;
    }
    /* four standard deviations of L² and of L words */
    test_near("mean", mean, 1, 4 * sqrt(p / (1 - p)) / L);
    test_near("variance of a row", squares, p / (1 - p) / L, 4 * sqrt(2.0 / L) * p / (1 - p) / L);
  }
}

/* ---- What changes no bit --------------------------------------------------------------------- */

static void threads_change_no_bit(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 8 : 24); seed++) {
    float *one = NULL;
    for (int threads = 1; threads <= 3; threads++) {
      test_case c = case_of(seed);
      c.Lq += seed % 3 ? 0 : 100;
      c.Lk += 200;
      c.threads = threads;
      test_build(&fixture, &c);
      test_run_for_bits(&fixture, &one);
    }
    free(one);
  }
}

static void results_change_no_bit(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 24; seed++) {
    float *plain = NULL;
    for (unsigned want = 0; want <= TEST_WANT_ALL; want++) {
      test_case c = case_of(seed);
      c.want = c.packed ? want & TEST_WANT_LSE : want;
      test_build(&fixture, &c);
      test_run_for_bits(&fixture, &plain);
    }
    free(plain);
  }
}

/* Without dropout seed and call do not count. */
static void none_is_none(void **state) {
  const float shares[] = {0.0F, 0.0F, -0.0F};
  (void)state;
  for (uint64_t seed = 0; seed < 24; seed++) {
    float *none = NULL;
    for (size_t k = 0; k < COUNT(shares); k++) {
      test_case c = case_of(seed);
      c.dropout = shares[k];
      c.dropout_seed *= k;
      c.dropout_call *= k;
      test_build(&fixture, &c);
      test_run_for_bits(&fixture, &none);
    }
    free(none);
  }
}

static void same_bits(const char *name, const float *a, const float *b, int64_t n) {
  for (int64_t at = 0; at < n; at++)
    if (!test_equal_bits(a[at], b[at]))
      test_failed("%s %" PRId64 " is %g and %g", name, at, (double)a[at], (double)b[at]);
}

/* What is asked for is what it is without dropout. */
static void results_are_those_before(void **state) {
  static test_fixture without;
  (void)state;
  for (uint64_t seed = 0; seed < 40; seed++) {
    test_case c = case_of(seed);
    c.stage = (mha_stage)(seed / CALLERS % 4);
    test_build(&fixture, &c);
    test_run(&fixture);
    c.dropout = 0.0F;
    test_build(&without, &c);
    test_run(&without);
    same_bits("weight", fixture.weights, without.weights, without.weights_n);
    same_bits("average", fixture.average, without.average, without.average_n);
    same_bits("log-sum-exp", fixture.lse, without.lse, without.lse_n);
    test_release(&without);
    test_release(&fixture);
  }
}

/* ---- What changes ---------------------------------------------------------------------------- */

static int64_t changed_rows(const float *a, const float *b, int64_t rows, int64_t columns) {
  int64_t n = 0;
  for (int64_t r = 0; r < rows; r++)
    n += memcmp(a + r * columns, b + r * columns, (size_t)columns * sizeof *a) != 0;
  return n;
}

/* Either word of seed and call counts: nearly every row meets other values. */
static void another_seed_or_call_drops_others(void **state) {
  enum { ROWS = 30, WIDTH = 6 };
  const uint64_t numbers[][2] = {{5, 9},    {6, 9},
                                 {5, 10},   {5 + (UINT64_C(1) << 32), 9},
                                 {9, 5},    {5, 9 + (UINT64_C(1) << 40)},
                                 {5 ^ 9, 0}};
  float *outputs[COUNT(numbers)];
  (void)state;
  for (size_t k = 0; k < COUNT(numbers); k++) {
    test_build(&fixture, &(test_case){.seed = 1,
                                      .core = true,
                                      .Lq = ROWS,
                                      .Lk = 50,
                                      .d = WIDTH,
                                      .dropout = 0.25F,
                                      .dropout_seed = numbers[k][0],
                                      .dropout_call = numbers[k][1]});
    test_run(&fixture);
    outputs[k] = test_gather(&fixture.output);
    test_release(&fixture);
    for (size_t other = 0; other < k; other++)
      assert_int_equal(changed_rows(outputs[k], outputs[other], ROWS, WIDTH), ROWS);
  }
  for (size_t k = 0; k < COUNT(numbers); k++)
    free(outputs[k]);
}

/* ---- Values that are not finite -------------------------------------------------------------- */

static bool sees_only_earlier(const void *user, int64_t b, int64_t i) {
  (void)b;
  return i < *(const int64_t *)user;
}

static void spoil(const test_view *view, int64_t token, float number) {
  for (int64_t h = 0; h < view->heads; h++)
    for (int64_t c = 0; c < view->size; c++)
      *test_at(view, 0, token, h, c) = number;
}

/* A token that is not finite, seen by the later rows: the others keep their bits, although the task
 * is done again; and rows that see it without dropping it are NaN. */
static void hidden_values_change_no_bit(void **state) {
  const float fills[] = {NAN, INFINITY, 1e30F};
  (void)state;
  for (uint64_t seed = 0; seed < 12; seed++) {
    const int64_t token = 3 + (int64_t)seed * 3;
    test_build(&fixture, &(test_case){.seed = seed,
                                      .core = seed % 2,
                                      .source = TEST_KEY_ONLY,
                                      .Lq = 50,
                                      .Lk = 50,
                                      .H = 2,
                                      .d = 5,
                                      .causal = true,
                                      .dropout = 0.5F,
                                      .dropout_seed = seed});
    test_run(&fixture);
    float *clean = test_gather(&fixture.output);
    spoil(&fixture.value, token, fills[seed % COUNT(fills)]);
    if (seed % 4 < 2)
      spoil(&fixture.key, token, fills[seed % COUNT(fills)]);
    test_run(&fixture);
    test_same_rows(&fixture, clean, sees_only_earlier, &token);
    for (int64_t i = token; seed % COUNT(fills) == 0 && i < 50; i++)
      assert_true(isnan(*test_at(&fixture.output, 0, i, 0, 0)));
    free(clean);
    test_release(&fixture);
  }
}

/* ---- With a cache, and without rules --------------------------------------------------------- */

/* A chunk behind cached tokens is the call over all keys: the index of a weight has the cache's
 * length as Lk. */
static void a_cache_counts_all_keys(void **state) {
  enum { B = 2, BEFORE = 9, CHUNK = 7, ALL = BEFORE + CHUNK };
  mha_context *context = NULL;
  mha_weights *weights = NULL;
  mha_cache *cache = NULL;
  mha_cache_options options;
  mha_error error;
  oracle_result result;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 4,
                                    .B = B,
                                    .Lq = CHUNK,
                                    .Lk = ALL,
                                    .H = 4,
                                    .G = 2,
                                    .d = 5,
                                    .causal = true,
                                    .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                                    .dropout = 0.4F,
                                    .dropout_seed = 11,
                                    .dropout_call = 12,
                                    .want = TEST_WANT_ALL});
  test_ask_oracle(&fixture, &result);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  MHA_INIT(&options);
  options.n_entries = B;
  options.capacity = ALL;
  options.weights = weights;
  test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
  mha_forward_args args = fixture.args;
  args.cache = cache;
  args.cache_mode = MHA_CACHE_APPEND;
  args.key_batch_stride = fixture.key.batch_stride;
  args.value_batch_stride = fixture.value.batch_stride;
  args.query_length = args.key_length = BEFORE;
  args.query = args.key;
  args.output = NULL;
  args.rules = NULL;
  args.results = NULL;
  test_expect(mha_forward(context, weights, &args, &error), MHA_OK, &error);
  args = fixture.args;
  args.cache = cache;
  args.key_length = CHUNK;
  args.key_batch_stride = fixture.key.batch_stride;
  args.value_batch_stride = fixture.value.batch_stride;
  args.key = test_at(&fixture.key, 0, BEFORE, 0, 0);
  args.value = test_at(&fixture.value, 0, BEFORE, 0, 0);
  test_poison_results(&fixture);
  test_expect(mha_forward(context, weights, &args, &error), MHA_OK, &error);
  test_judge(&fixture, &result);
  oracle_free(&result);
  mha_cache_destroy(cache);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

/* No call leaves its dropout behind. */
static void self_attention_drops_nothing(void **state) {
  enum { B = 2, L = 9 };
  mha_context *context = NULL;
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  test_build(&fixture,
             &(test_case){
                 .seed = 6, .B = B, .Lq = L, .H = 2, .d = 4, .source = TEST_SELF, .dropout = 0.5F});
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  test_judge_now(&fixture);
  test_expect(
      mha_self_attention(context, weights, fixture.query.data, B, L, fixture.output.data, &error),
      MHA_OK, &error);
  fixture.rules.dropout = 0.0F;
  test_judge_now(&fixture);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_rule),
      cmocka_unit_test(long_rows),
      cmocka_unit_test(few_queries),
      cmocka_unit_test(stored_keys),
      cmocka_unit_test(extreme_shares),
      cmocka_unit_test(the_first_words),
      cmocka_unit_test(shares_between_two_words),
      cmocka_unit_test(the_share_that_is_kept),
      cmocka_unit_test(threads_change_no_bit),
      cmocka_unit_test(results_change_no_bit),
      cmocka_unit_test(none_is_none),
      cmocka_unit_test(results_are_those_before),
      cmocka_unit_test(another_seed_or_call_drops_others),
      cmocka_unit_test(hidden_values_change_no_bit),
      cmocka_unit_test(a_cache_counts_all_keys),
      cmocka_unit_test(self_attention_drops_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
