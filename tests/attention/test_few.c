/* Few queries over many keys: the keys are cut into parts, whose results are merged. Lengths around
 * every border, layouts, results, and the answers that do not depend on how the keys are cut. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#include "fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

/* ---- Every border ---------------------------------------------------------------------------- */

/* Around the ratio of keys to queries, vectors, tiles and parts; the small ones are the borders of
 * a build with tiny tiles. */
static const int64_t lengths[] = {1,   2,   3,   5,   7,   8,   9,   12,  15,  16,   17,   23,  24,
                                  25,  33,  47,  63,  64,  65,  111, 112, 127, 128,  129,  143, 144,
                                  145, 255, 256, 257, 511, 512, 513, 767, 769, 2047, 2048, 2049};

static size_t n_lengths(void) {
  return test_small() ? 24 : COUNT(lengths);
}

/* Rules by number, so that neighbouring sizes meet different ones. */
enum { N_RULES = 9 };

static void set_rules(test_case *c, int rules) {
  c->causal = rules == 1 || rules == 7;
  c->alignment = rules == 7 ? MHA_ALIGN_OFFSET : MHA_ALIGN_BOTTOM_RIGHT;
  c->offset = c->Lk / 2;
  c->window = rules == 2 || rules == 7;
  c->left = rules == 7 ? -1 : c->Lk / 3;
  c->right = rules == 7 ? 3 : 0;
  c->has_mask = rules == 3 || rules == 8;
  c->has_bias = c->bias_hides = rules == 4;
  c->mask_extents = c->bias_extents = TEST_FULL;
  c->alibi = rules == 5 || rules == 8;
  c->softcap = rules == 6 ? 2.0F : 0.0F;
  c->sinks = rules == 2 || rules == 8;
  c->key_lengths = rules == 0 || rules == 8;
  c->query_lengths = rules == 8;
}

static test_case case_of(uint64_t seed, int64_t Lq, int64_t Lk) {
  const int64_t heads[][2] = {{4, 4}, {4, 2}, {6, 1}, {1, 1}, {3, 3}};
  const size_t h = seed % COUNT(heads);
  test_case c = {.seed = seed,
                 .core = seed % 2 == 0,
                 .B = 1 + (int64_t)(seed / 2 % 2),
                 .Lq = Lq,
                 .Lk = Lk,
                 .H = heads[h][0],
                 .G = heads[h][1],
                 .d = 3 + (int64_t)(seed % 3) * 4,
                 .dv = 5,
                 .Eq = 6,
                 .layout = (test_layout)(seed / 3 % 4),
                 .want = TEST_WANT_ALL,
                 .stage = (mha_stage)(seed / 2 % 4)};
  if (!c.core && c.layout == TEST_HEAD_FIRST)
    c.layout = TEST_PADDED;
  set_rules(&c, (int)(seed % N_RULES));
  return c;
}

static void every_border(void **state) {
  uint64_t seed = 0;
  (void)state;
  for (size_t at = 0; at < n_lengths(); at++)
    for (int64_t Lq = 1; Lq <= 9; Lq += lengths[at] > 600 ? 4 : 1, seed++) {
      const test_case c = case_of(seed, Lq, lengths[at]);
      test_check(&c);
    }
}

/* Every rule at one and at a few queries, over several tiles. */
static void every_rule(void **state) {
  const int64_t sizes[] = {40, 129, 300, 600};
  (void)state;
  for (int rules = 0; rules < N_RULES; rules++)
    for (size_t at = 0; at < COUNT(sizes); at++)
      for (int64_t Lq = 1; Lq <= 8; Lq += 3)
        for (int stage = 0; stage < 4; stage++) {
          test_case c = case_of((uint64_t)stage + at, Lq, sizes[at]);
          set_rules(&c, rules);
          c.stage = (mha_stage)stage;
          test_check(&c);
        }
}

/* More parts than there may be tiles, strips of several heads and a last one of fewer. */
static void many_parts_and_strips(void **state) {
  const struct {
    int64_t Lk, H, G, d;
  } shapes[] = {{16384 + 256 + 1, 1, 1, 1},
                {530, 5, 5, 512},
                {700, 14, 7, 500},
                {300, 3, 3, 1100},
                {260, 40, 20, 64}};
  (void)state;
  for (size_t at = test_small() ? 1 : 0; at < COUNT(shapes); at++)
    for (int64_t Lq = 1; Lq <= 7; Lq += 6) {
      const test_case c = {.seed = at,
                           .core = true,
                           .Lq = Lq,
                           .Lk = shapes[at].Lk,
                           .H = shapes[at].H,
                           .G = shapes[at].G,
                           .d = shapes[at].d,
                           .want = TEST_WANT_ALL};
      test_check(&c);
    }
}

/* ---- What changes no bit --------------------------------------------------------------------- */

static void threads_change_no_bit(void **state) {
  const int threads[] = {1, 1, 2, 3, 8};
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 4 : 12); seed++) {
    float *one = NULL;
    for (size_t i = 0; i < COUNT(threads); i++) {
      test_case c = case_of(seed, 1 + (int64_t)(seed % 8), 700);
      c.threads = threads[i];
      test_build(&fixture, &c);
      test_run_for_bits(&fixture, &one);
    }
    free(one);
  }
}

static void results_change_no_bit(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 2 * N_RULES; seed++) {
    float *plain = NULL;
    for (unsigned want = 0; want <= TEST_WANT_ALL; want++) {
      test_case c = case_of(seed, 1 + (int64_t)(seed % 8), 600);
      c.want = want;
      c.stage = (mha_stage)(want % 4);
      test_build(&fixture, &c);
      test_run_for_bits(&fixture, &plain);
    }
    free(plain);
  }
}

/* The layout of q, k, v changes rounding at most: each is judged above. The layout of the output
 * changes nothing at all. */
static void the_output_s_layout_changes_no_bit(void **state) {
  (void)state;
  for (int64_t Lq = 1; Lq <= 8; Lq += 7) {
    float *dense = NULL;
    for (int spread = 0; spread < 2; spread++) {
      enum { H = 4, D = 6 };
      float *apart = NULL;
      const test_case c = {.seed = 3, .core = true, .Lq = Lq, .Lk = 600, .H = H, .G = 2, .d = D};
      test_build(&fixture, &c);
      if (spread) { /* heads first, with gaps */
        apart = test_pool_floats(&fixture.pool, H * Lq * (D + 2));
        fixture.attend_args.output = apart;
        fixture.attend_args.output_row_stride = D + 2;
        fixture.attend_args.output_head_stride = Lq * (D + 2);
        fixture.attend_args.output_batch_stride = H * Lq * (D + 2);
      }
      test_run(&fixture);
      if (!dense)
        dense = test_gather(&fixture.output);
      for (int64_t i = 0; apart && i < Lq; i++)
        for (int64_t h = 0; h < H; h++)
          for (int64_t e = 0; e < D; e++)
            assert_true(
                test_equal_bits(apart[(h * Lq + i) * (D + 2) + e], dense[(i * H + h) * D + e]));
      test_release(&fixture);
    }
    free(dense);
  }
}

/* Heads that share their keys by a stride of 0, in q too. */
static void broadcast_heads(void **state) {
  (void)state;
  for (int64_t Lq = 1; Lq <= 8; Lq += 7)
    for (int which = 0; which < 7; which++) {
      enum { H = 4, D = 5, LK = 530 };
      const test_case c = {.seed = 4,
                           .core = true,
                           .Lq = Lq,
                           .Lk = LK,
                           .H = H,
                           .d = D,
                           .layout = TEST_PADDED,
                           .want = TEST_WANT_LSE};
      test_build(&fixture, &c);
      test_view *views[] = {&fixture.query, &fixture.key, &fixture.value};
      mha_tensor *tensors[] = {&fixture.q, &fixture.k, &fixture.v};
      for (int t = 0; t < 3; t++)
        if ((which + 1) >> t & 1) /* the judge gathers by the same strides */
          views[t]->head_stride = tensors[t]->head_stride = 0;
      test_run(&fixture);
      test_judge_now(&fixture);
      test_release(&fixture);
    }
}

/* Two heads of q further apart than the BLAS's integer counts: a stride between heads is no leading
 * dimension. The memory is reserved, not there. */
static void heads_far_apart(void **state) {
  enum { LK = 300, D = 4 };
  const int64_t apart = (INT64_C(1) << 31) + 16;
  const size_t bytes = (size_t)(apart + 8 * D) * sizeof(float);
  float *q =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  (void)state;
  if (q == MAP_FAILED)
    skip();
  for (int64_t Lq = 1; Lq <= 8; Lq += 7) {
    const test_case c = {.seed = 5, .core = true, .Lq = Lq, .Lk = LK, .H = 2, .G = 1, .d = D};
    oracle_result result;
    mha_error error;
    mha_context *context = NULL;
    test_build(&fixture, &c);
    test_ask_oracle(&fixture, &result);
    for (int64_t i = 0; i < Lq; i++)
      for (int64_t h = 0; h < 2; h++)
        memcpy(q + h * apart + i * D, test_at(&fixture.query, 0, i, h, 0), D * sizeof *q);
    fixture.q = (mha_tensor){q, 1, Lq, 2, D, 2 * apart, D, apart, 1, MHA_F32, 0};
    test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
    test_poison_results(&fixture);
    test_expect(test_call(&fixture, context, NULL, &error), MHA_OK, &error);
    test_judge(&fixture, &result);
    mha_context_destroy(context);
    oracle_free(&result);
    test_release(&fixture);
  }
  assert_int_equal(munmap(q, bytes), 0);
}

/* ---- Answers that do not depend on the cut --------------------------------------------------- */

enum { KEYS = 600, MOST_QUERIES = 9 };

/* One head of size 1 and q = 1: the scores are the keys, with a scale of 1. */
static float scores[KEYS], values[KEYS], outputs[MOST_QUERIES], lse[MOST_QUERIES],
    weights[MOST_QUERIES * KEYS];
static const float ones[MOST_QUERIES] = {1, 1, 1, 1, 1, 1, 1, 1, 1};

static test_core one_head(int64_t Lq) {
  test_core core = {.Lq = Lq, .Lk = KEYS, .q = ones, .k = scores, .v = values, .output = outputs};
  MHA_INIT(&core.rules);
  core.rules.flags = MHA_SCALE;
  core.rules.scale = 1.0F;
  core.results.log_sum_exp = lse;
  core.results.weights = weights;
  for (int64_t j = 0; j < KEYS; j++) {
    scores[j] = 0.0F;
    values[j] = (float)(j % 7) - 3.0F;
  }
  return core;
}

static const int64_t places[] = {0, 1, 15, 254, 255, 256, 257, 511, 512, 598, 599};

/* B21: one score of 1000 among zeros or -1000, two of 1e30, at every place. */
static void b21_extreme_scores(void **state) {
  (void)state;
  for (int64_t Lq = 1; Lq <= MOST_QUERIES; Lq += 7)
    for (size_t at = 0; at < COUNT(places); at++)
      for (int kind = 0; kind < 3; kind++) {
        test_core core = one_head(Lq);
        const int64_t j = places[at], other = (j + 300) % KEYS;
        for (int64_t k = 0; k < KEYS; k++)
          scores[k] = kind == 1 ? -1000.0F : 0.0F;
        scores[j] = kind == 2 ? 1e30F : 1000.0F;
        if (kind == 2)
          scores[other] = 1e30F;
        test_core_run(&core);
        const double expected =
            kind == 2 ? 0.5 * ((double)values[j] + (double)values[other]) : (double)values[j];
        for (int64_t i = 0; i < Lq; i++) {
          test_near("output", (double)outputs[i], expected, 1e-6);
          assert_true(weights[i * KEYS + j] == (kind == 2 ? 0.5F : 1.0F));
        }
      }
  for (int kind = 0; kind < 3; kind++) { /* all the same */
    const float same[] = {-1000.0F, -1e30F, 1e30F};
    test_core core = one_head(1);
    double mean = 0;
    for (int64_t j = 0; j < KEYS; j++) {
      scores[j] = same[kind];
      mean += (double)values[j] / KEYS;
    }
    test_core_run(&core);
    test_near("the mean", (double)outputs[0], mean, 1e-6 + 4 * 0x1p-24 * 4 * 3);
  }
}

/* Parts in which nothing is visible, before, between and behind those with something. */
static void b02_parts_that_see_nothing(void **state) {
  const struct {
    int64_t begin, end;
  } seen[] = {{0, 1}, {0, 256}, {256, 257}, {300, 301}, {255, 257}, {512, 600}, {599, 600}, {0, 0}};
  static uint8_t mask[KEYS];
  static float bias[KEYS];
  (void)state;
  for (int64_t Lq = 1; Lq <= MOST_QUERIES; Lq += 7)
    for (size_t at = 0; at < COUNT(seen); at++)
      for (int kind = 0; kind < 2; kind++) {
        test_core core = one_head(Lq);
        double mean = 0;
        const int64_t n = seen[at].end - seen[at].begin;
        for (int64_t j = 0; j < KEYS; j++) {
          const bool visible = j >= seen[at].begin && j < seen[at].end;
          mask[j] = visible;
          bias[j] = visible ? 0.0F : -INFINITY;
          mean += visible ? (double)values[j] / (double)n : 0.0;
        }
        if (kind)
          core.rules.bias = (mha_bias){bias, 1, 1, 1, KEYS, 0, 0, 0, 0, 0};
        else
          core.rules.attend = (mha_mask){mask, 1, 1, 1, KEYS, 0, 0, 0, 0, 0};
        test_core_run(&core);
        for (int64_t i = 0; i < Lq; i++) {
          test_near("output", (double)outputs[i], mean, n ? 1e-6 : 0.0);
          test_near("lse", (double)lse[i], log((double)n), 2e-6 + 0x1p-24 * 32);
          for (int64_t j = 0; j < KEYS; j++)
            assert_true((weights[i * KEYS + j] > 0) == (mask[j] != 0));
        }
      }
}

/* +inf and NaN among the scores make the row NaN, hidden keys still weigh 0. */
static void scores_that_are_no_numbers(void **state) {
  static uint8_t mask[KEYS];
  const float bad[] = {NAN, INFINITY};
  (void)state;
  for (int64_t Lq = 1; Lq <= MOST_QUERIES; Lq += 7)
    for (size_t at = 0; at < COUNT(places); at++)
      for (size_t b = 0; b < COUNT(bad); b++)
        for (int hidden = 0; hidden < 2; hidden++) {
          test_core core = one_head(Lq);
          const int64_t j = places[at];
          memset(mask, 1, sizeof mask);
          mask[j] = !hidden;
          mask[(j + 1) % KEYS] = 0;
          scores[j] = bad[b];
          core.rules.attend = (mha_mask){mask, 1, 1, 1, KEYS, 0, 0, 0, 0, 0};
          test_core_run(&core);
          for (int64_t i = 0; i < Lq; i++) {
            assert_int_equal(isnan(outputs[i]) != 0, !hidden);
            assert_int_equal(isnan(lse[i]) != 0, !hidden);
            assert_true(weights[i * KEYS + (j + 1) % KEYS] == 0.0F);
            assert_int_equal(isnan(weights[i * KEYS + (j + 2) % KEYS]) != 0, !hidden);
          }
        }
}

/* NaN alone is visible: no part has a maximum, and yet the row is not empty. */
static void nothing_but_nan(void **state) {
  static uint8_t mask[KEYS];
  (void)state;
  for (size_t at = 0; at < COUNT(places); at++) {
    test_core core = one_head(1);
    memset(mask, 0, sizeof mask);
    mask[places[at]] = 1;
    scores[places[at]] = NAN;
    core.rules.attend = (mha_mask){mask, 1, 1, 1, KEYS, 0, 0, 0, 0, 0};
    test_core_run(&core);
    assert_true(isnan(outputs[0]) != 0);
    assert_true(isnan(lse[0]) != 0);
  }
}

/* NaN and infinity in values: hidden ones change no bit; a visible NaN makes the row NaN; a visible
 * infinity makes it non-finite, unless its weight rounds to 0 in its part or in the merge. */
static void values_that_are_no_numbers(void **state) {
  static uint8_t mask[KEYS];
  const float bad[] = {NAN, INFINITY, -INFINITY};
  (void)state;
  for (int64_t Lq = 1; Lq <= MOST_QUERIES; Lq += 7)
    for (size_t at = 0; at < COUNT(places); at++)
      for (size_t b = 0; b < COUNT(bad); b++)
        for (int kind = 0; kind < 4; kind++) {
          /* 0 hidden, 1 visible, 2 its weight is 0 beside its own part's, 3 only in the merge */
          test_core core = one_head(Lq);
          const int64_t j = places[at], top = kind == 3 ? (j + 300) % KEYS : (j + 1) % KEYS;
          memset(mask, 1, sizeof mask);
          mask[j] = kind != 0;
          for (int64_t k = 0; k < KEYS; k++)
            scores[k] = sinf((float)k);
          if (kind >= 2)
            scores[top] = 500.0F;
          core.rules.attend = (mha_mask){mask, 1, 1, 1, KEYS, 0, 0, 0, 0, 0};
          test_core_run(&core);
          float plain[MOST_QUERIES];
          memcpy(plain, outputs, sizeof plain);
          values[j] = bad[b];
          test_core_run(&core);
          for (int64_t i = 0; i < Lq; i++) {
            if (kind == 0)
              assert_true(test_equal_bits(outputs[i], plain[i]));
            else if (kind == 1)
              assert_true(isfinite(outputs[i]) == 0);
            else if (isnan(bad[b]))
              assert_true(isnan(outputs[i]) != 0);
            else
              test_near("output", (double)outputs[i], (double)values[top], 1e-6);
          }
        }
}

/* Keys whose values add up beyond float32 have no weight beside one key far above them, wherever
 * that lies and however the keys are cut; a hidden NaN among them changes nothing. */
static void sums_that_fit_under_the_row_s_maximum(void **state) {
  static uint8_t mask[KEYS];
  const int64_t queries[] = {1, 8, 9};
  (void)state;
  for (size_t q = 0; q < COUNT(queries); q++)
    for (size_t at = 0; at < COUNT(places); at++)
      for (int hidden = 0; hidden < 2; hidden++) {
        test_core core = one_head(queries[q]);
        const int64_t top = places[at];
        memset(mask, 1, sizeof mask);
        for (int64_t j = 0; j < KEYS; j++)
          values[j] = 3e38F;
        scores[top] = 1000.0F;
        values[top] = 7.0F;
        if (hidden) {
          mask[(top + 5) % KEYS] = 0;
          values[(top + 5) % KEYS] = NAN;
        }
        core.rules.attend = (mha_mask){mask, 1, 1, 1, KEYS, 0, 0, 0, 0, 0};
        test_core_run(&core);
        for (int64_t i = 0; i < queries[q]; i++)
          test_near("output", (double)outputs[i], 7.0, 1e-6 + 28 * 0x1p-24);
      }
}

/* A sink has its share once, not once for each part. */
static void sinks_count_once(void **state) {
  const float sinks[] = {-INFINITY, -5.0F, 0.0F, 3.0F, 80.0F, 1e30F};
  (void)state;
  for (int64_t Lq = 1; Lq <= MOST_QUERIES; Lq += 7)
    for (size_t s = 0; s < COUNT(sinks); s++) {
      test_core core = one_head(Lq);
      double mean = 0, share = 1.0 / (1.0 + exp((double)sinks[s] - log(KEYS)));
      for (int64_t j = 0; j < KEYS; j++) {
        values[j] = (float)(j % 3) + 1.0F;
        mean += (double)values[j] / KEYS;
      }
      core.rules.sinks = &sinks[s];
      test_core_run(&core);
      for (int64_t i = 0; i < Lq; i++) {
        test_near("output", (double)outputs[i], mean * share, 4 * 0x1p-24 * 4 * 3 + 1e-6);
        test_near("lse", (double)lse[i], log(KEYS), 2e-6 + 0x1p-24 * 32);
      }
    }
}

/* A query that is NaN in one row of a few: that row alone. */
static void a_query_that_is_nan(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < N_RULES; seed++)
    for (int64_t row = 0; row < 4; row += 3) {
      test_case c = case_of(2 * seed, 4, 600);
      set_rules(&c, (int)seed);
      c.query_lengths = false;
      test_build(&fixture, &c);
      *test_at(&fixture.query, 0, row, c.H - 1, 1) = NAN;
      test_run(&fixture);
      test_judge_now(&fixture);
      test_release(&fixture);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_border),
      cmocka_unit_test(every_rule),
      cmocka_unit_test(many_parts_and_strips),
      cmocka_unit_test(threads_change_no_bit),
      cmocka_unit_test(results_change_no_bit),
      cmocka_unit_test(the_output_s_layout_changes_no_bit),
      cmocka_unit_test(broadcast_heads),
      cmocka_unit_test(heads_far_apart),
      cmocka_unit_test(b21_extreme_scores),
      cmocka_unit_test(b02_parts_that_see_nothing),
      cmocka_unit_test(scores_that_are_no_numbers),
      cmocka_unit_test(nothing_but_nan),
      cmocka_unit_test(values_that_are_no_numbers),
      cmocka_unit_test(sums_that_fit_under_the_row_s_maximum),
      cmocka_unit_test(sinks_count_once),
      cmocka_unit_test(a_query_that_is_nan),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
