/* The contract's table of fixed answers: one test per row, named after it. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

static void expect_row(const float *got, const float *expected, int64_t n, const char *what) {
  test_same_bits(what, (test_shape){{1, 1, 1, n}}, got, expected);
}

static void expect_all(const char *what, const float *got, int64_t n, double expected) {
  for (int64_t i = 0; i < n; i++)
    test_near(what, (double)got[i], expected, 0.0);
}

/* ---- Rows about who is seen ------------------------------------------------------------------ */

static void hide_row(int64_t row) {
  const mha_mask *m = &fixture.rules.attend;
  for (int64_t b = 0; b < m->batch; b++)
    for (int64_t h = 0; h < m->heads; h++)
      memset(fixture.mask + ((b * m->heads + h) * m->rows + row) * m->columns, 0,
             (size_t)m->columns);
}

static void a_query_that_sees_no_key(void **state) {
  enum { ROW = 2 };
  (void)state;
  for (int variant = 0; variant < 8; variant++) {
    const test_case c = {.seed = (uint64_t)variant,
                         .B = 2,
                         .Lq = 5,
                         .Lk = 9,
                         .H = 2,
                         .d = 4,
                         .core = variant & 4,
                         .biases = TEST_ALL,
                         .has_mask = true,
                         .mask_extents = TEST_FULL,
                         .sinks = variant & 1,
                         .want = TEST_WANT_ALL};
    test_build(&fixture, &c);
    hide_row(ROW);
    for (int64_t b = 0; (variant & 2) && b < 2; b++)
      *test_at(&fixture.query, b, ROW, 0, 1) = NAN;
    test_run(&fixture);
    test_judge_now(&fixture);
    for (int64_t b = 0; b < 2; b++) {
      if (c.core)
        expect_all("result", test_at(&fixture.output, b, ROW, 0, 0), 2 * 4, 0.0);
      else
        expect_row(test_at(&fixture.output, b, ROW, 0, 0), fixture.wo.bias, 8, "output is bo");
      for (int64_t h = 0; h < 2; h++) {
        expect_all("weights", fixture.weights + ((b * 2 + h) * 5 + ROW) * 9, 9, 0.0);
        expect_all("lse", fixture.lse + (b * 2 + h) * 5 + ROW, 1, -INFINITY);
      }
      expect_all("average", fixture.average + (b * 5 + ROW) * 9, 9, 0.0);
    }
    test_release(&fixture);
  }
}

static void query_rows_beyond_query_lengths(void **state) {
  (void)state;
  for (int stage = 0; stage < 4; stage++)
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      const test_case c = {.seed = 4,
                           .B = 2,
                           .Lq = 6,
                           .Lk = 5,
                           .H = 2,
                           .d = 3,
                           .biases = TEST_ALL,
                           .query_lengths = true,
                           .accumulate = accumulate,
                           .causal = true,
                           .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                           .want = TEST_WANT_ALL,
                           .stage = (mha_stage)stage};
      test_build(&fixture, &c);
      for (int64_t b = 0; b < 2; b++) { /* lengths 4 and 0; poison beyond */
        fixture.query_lengths[b] = 4 - 4 * b;
        for (int64_t i = 0; i < 6; i++)
          if (i < fixture.query_lengths[b])
            test_fill_normal(&fixture.random, test_at(&fixture.query, b, i, 0, 0), 6, 1.0);
          else
            test_fill_poison(test_at(&fixture.query, b, i, 0, 0), 6);
      }
      test_run(&fixture);
      test_judge_now(&fixture);
      const double hidden = stage == MHA_STAGE_WEIGHTS ? 0.0 : -INFINITY;
      for (int64_t h = 0; h < 2; h++) {
        expect_all("lse", fixture.lse + h * 6 + 4, 2, -INFINITY);
        expect_all("stage", fixture.weights + (h * 6 + 4) * 5, 2 * 5, hidden);
        expect_all("stage", fixture.weights + (2 + h) * 6 * 5, 6 * 5, hidden);
      }
      expect_all("average", fixture.average + 4 * 5, 2 * 5 + 6 * 5, 0.0);
      for (int64_t i = 4; i < 6 && !accumulate; i++)
        expect_row(test_at(&fixture.output, 0, i, 0, 0), fixture.wo.bias, 6, "output is bo");
      test_release(&fixture);
    }
}

/* The last entry's rows beyond its length lie in pages that cannot be read. */
static void put_on_the_edge(test_view *view, int64_t readable_rows) {
  const int64_t width = view->heads * view->size;
  const int64_t readable = ((view->batch - 1) * view->length + readable_rows) * width;
  float *edge = test_pool_cut(&fixture.pool, view->floats, readable);
  memcpy(edge, view->data, (size_t)readable * sizeof *edge);
  view->data = edge;
}

/* For the judge, which reads with the same views: give it back what can be read. */
static void judge_on_the_edge(int64_t query_rows, int64_t key_rows) {
  test_view *views[] = {&fixture.query, &fixture.key, &fixture.value};
  const int64_t rows[] = {query_rows, key_rows, key_rows};
  for (int which = 0; which < 3; which++) {
    test_view *v = views[which];
    const int64_t width = v->heads * v->size;
    float *copy = test_pool_floats(&fixture.pool, v->floats);
    memcpy(copy, v->data,
           (size_t)(((v->batch - 1) * v->length + rows[which]) * width) * sizeof *copy);
    v->data = copy;
  }
  test_judge_now(&fixture);
}

static void keys_beyond_key_lengths(void **state) {
  enum { B = 2, LQ = 40, LK = 3000, QUERIES = 17, KEYS = 41 };
  (void)state;
  for (int variant = 0; variant < 16; variant++) {
    const int64_t queries = variant & 4 ? QUERIES : 0, keys = variant & 8 ? KEYS : 0;
    const test_case c = {.seed = (uint64_t)variant,
                         .B = B,
                         .Lq = LQ,
                         .Lk = LK,
                         .H = 2,
                         .G = 1,
                         .d = 4,
                         .core = variant & 1,
                         .absent = variant & 2 ? TEST_ALL : 0,
                         .Ek = 4,
                         .Ev = 4,
                         .key_lengths = true,
                         .query_lengths = true,
                         .want = TEST_WANT_LSE};
    test_build(&fixture, &c);
    fixture.query_lengths[0] = LQ;
    fixture.query_lengths[1] = queries;
    fixture.key_lengths[0] = LK;
    fixture.key_lengths[1] = keys;
    test_view *views[] = {&fixture.query, &fixture.key, &fixture.value};
    for (int which = 0; which < 3; which++) {
      test_fill_normal(&fixture.random, views[which]->data, views[which]->floats, 1.0);
      put_on_the_edge(views[which], which == 0 ? queries : keys);
    }
    fixture.args.query = fixture.q.data = fixture.query.data;
    fixture.args.key = fixture.k.data = fixture.key.data;
    fixture.args.value = fixture.v.data = fixture.value.data;
    test_run(&fixture);
    judge_on_the_edge(queries, keys);
    test_release(&fixture);
  }
}

/* ---- Rows about NaN and infinity ------------------------------------------------------------- */

/* Which rows do not see one key of one entry. */
typedef struct unseen_key {
  const test_fixture *f;
  const oracle_result *result;
  int64_t b, j;
  int64_t head; /* -1: in no head at all */
} unseen_key;

static bool does_not_see(const void *user, int64_t b, int64_t i) {
  const unseen_key *key = user;
  bool sees = false;
  for (int64_t h = 0; b == key->b && h < key->f->c.H; h++)
    sees = sees ||
           ((key->head < 0 || key->head == h) && test_sees(key->f, key->result, b, h, i, key->j));
  return !sees;
}

static void overwrite(test_view *view, int64_t b, int64_t i, float number) {
  for (int64_t h = 0; h < view->heads; h++)
    for (int64_t c = 0; c < view->size; c++)
      *test_at(view, b, i, h, c) = number;
}

/* Masks that differ by row, so that each key is seen by some rows and not by others. */
static test_case partly_visible(int variant) {
  return (test_case){.seed = (uint64_t)variant,
                     .core = variant & 1,
                     .B = 2,
                     .Lq = 37,
                     .Lk = 70,
                     .H = 2,
                     .d = 5,
                     .biases = TEST_ALL,
                     .causal = (variant & 2) != 0,
                     .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                     .window = (variant & 4) != 0,
                     .left = 9,
                     .right = 3,
                     .has_mask = (variant & 8) != 0,
                     .mask_extents = TEST_FULL,
                     .has_bias = (variant & 16) != 0,
                     .bias_extents = TEST_FULL_ROWS,
                     .bias_hides = true,
                     .key_lengths = (variant & 32) != 0,
                     .sinks = (variant & 1) == 0,
                     .want = TEST_WANT_ALL};
}

static void nan_or_inf_in_a_key_or_value_that_is_not_seen(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY, 1e30F};
  (void)state;
  for (int variant = 0; variant < 64; variant++) {
    const test_case c = partly_visible(variant);
    oracle_result result;
    test_build(&fixture, &c);
    test_ask_oracle(&fixture, &result);
    test_run(&fixture);
    test_judge(&fixture, &result);
    float *clean = test_gather(&fixture.output);
    for (int64_t j = 0; j < 70; j += test_small() ? 23 : 7)
      for (size_t which = 0; which < COUNT(bad); which++) {
        const unseen_key key = {&fixture, &result, 1, j, -1};
        float *old_key = test_gather(&fixture.key), *old_value = test_gather(&fixture.value);
        if (which % 2 == 0 || c.core)
          overwrite(&fixture.key, 1, j, bad[which]);
        overwrite(&fixture.value, 1, j, bad[which]);
        test_run(&fixture);
        test_same_rows(&fixture, clean, does_not_see, &key);
        memcpy(fixture.key.data, old_key, (size_t)fixture.key.floats * sizeof(float));
        memcpy(fixture.value.data, old_value, (size_t)fixture.value.floats * sizeof(float));
        free(old_key);
        free(old_value);
      }
    free(clean);
    oracle_free(&result);
    test_release(&fixture);
  }
}

static bool other_rows(const void *user, int64_t b, int64_t i) {
  const int64_t *row = user;
  return b != row[0] || i != row[1];
}

static void nan_in_a_query_row(void **state) {
  (void)state;
  for (int stage = 0; stage < 4; stage++)
    for (int variant = 0; variant < 64; variant++) {
      test_case c = partly_visible(variant);
      const int64_t row[] = {1, 21};
      c.stage = (mha_stage)stage;
      c.core = false;
      test_build(&fixture, &c);
      test_run(&fixture);
      float *clean = test_gather(&fixture.output);
      *test_at(&fixture.query, row[0], row[1], 0, 3) = NAN;
      test_run(&fixture);
      test_judge_now(&fixture); /* NaN exactly where the judge has it, hidden keys 0 or −inf */
      test_same_rows(&fixture, clean, other_rows, row);
      free(clean);
      test_release(&fixture);
    }
}

/* In the core one head's query can be NaN alone. */
static void nan_in_one_heads_query(void **state) {
  (void)state;
  for (int variant = 1; variant < 64; variant += 2) {
    const test_case c = partly_visible(variant);
    const int64_t row[] = {0, 30};
    test_build(&fixture, &c);
    test_run(&fixture);
    float *clean = test_gather(&fixture.output);
    *test_at(&fixture.query, row[0], row[1], 1, 2) = NAN;
    test_run(&fixture);
    test_judge_now(&fixture);
    test_same_rows(&fixture, clean, other_rows, row);
    expect_row(test_at(&fixture.output, row[0], row[1], 0, 0), clean + row[1] * 2 * 5, 5,
               "the other head");
    free(clean);
    test_release(&fixture);
  }
}

static void nan_in_a_visible_key(void **state) {
  (void)state;
  for (int variant = 0; variant < 64; variant++) {
    const test_case c = partly_visible(variant);
    oracle_result result;
    test_build(&fixture, &c);
    test_run(&fixture);
    float *clean = test_gather(&fixture.output);
    test_ask_oracle(&fixture, &result);
    const unseen_key key = {&fixture, &result, 0, 33, -1};
    *test_at(&fixture.key, 0, 33, 0, 1) = NAN;
    test_run(&fixture);
    test_same_rows(&fixture, clean, does_not_see, &key);
    test_judge_now(&fixture); /* the judge has NaN in the rows that see it */
    oracle_free(&result);
    free(clean);
    test_release(&fixture);
  }
}

static void inf_in_a_visible_value(void **state) {
  (void)state;
  for (int sign = -1; sign <= 1; sign += 2)
    for (int variant = 1; variant < 64; variant += 2) {
      const test_case c = partly_visible(variant);
      oracle_result result;
      test_build(&fixture, &c);
      test_run(&fixture);
      float *clean = test_gather(&fixture.output);
      test_ask_oracle(&fixture, &result);
      const unseen_key key = {&fixture, &result, 1, 11, 0};
      *test_at(&fixture.value, 1, 11, 0, 2) = (float)sign * INFINITY;
      test_run(&fixture);
      test_same_rows(&fixture, clean, does_not_see, &key);
      for (int64_t i = 0; i < c.Lq; i++) {
        const float *row = test_at(&fixture.output, 1, i, 0, 0);
        expect_row(row + 5, clean + ((c.Lq + i) * 2 + 1) * 5, 5, "the other head");
        if (!does_not_see(&key, 1, i) && isfinite(row[2]))
          test_failed("row %d sees an infinite value and shows %g", (int)i, (double)row[2]);
      }
      oracle_free(&result);
      free(clean);
      test_release(&fixture);
    }
}

/* A weight of exp(−200) is 0 in float32, and then the infinite value has no say. */
static void inf_in_a_value_whose_weight_rounds_to_zero(void **state) {
  const float q[] = {1.0F}, k[] = {0.0F, -200.0F, 0.0F}, bad[] = {INFINITY, -INFINITY};
  (void)state;
  for (size_t which = 0; which < COUNT(bad); which++) {
    const float v[] = {1.0F, bad[which], 4.0F};
    float output[1];
    test_core core = {.Lq = 1, .Lk = 3, .q = q, .k = k, .v = v, .output = output};
    MHA_INIT(&core.rules);
    test_core_run(&core);
    test_near("output", (double)output[0], 2.5, 4e-6);
  }
}

/* NaN has no such excuse: a row that sees it becomes NaN whatever its weight. */
static void nan_in_a_value_whose_weight_rounds_to_zero(void **state) {
  const float q[] = {1.0F}, k[] = {0.0F, -200.0F, 0.0F}, v[] = {1.0F, NAN, 4.0F};
  float output[1];
  (void)state;
  test_core core = {.Lq = 1, .Lk = 3, .q = q, .k = k, .v = v, .output = output};
  MHA_INIT(&core.rules);
  test_core_run(&core);
  test_near("output", (double)output[0], NAN, 0.0);
}

/* ---- Rows about large and small scores ------------------------------------------------------- */

static void expect_weights(const float *k, int64_t n, const double *expected, double lse) {
  const float q[] = {1.0F};
  float output[1], weights[64], got_lse[1];
  float v[64];
  double value = 0;
  for (int64_t j = 0; j < n; j++) {
    v[j] = (float)(j + 1);
    value += expected[j] * (double)v[j];
  }
  test_core core = {.Lq = 1, .Lk = n, .q = q, .k = k, .v = v, .output = output};
  MHA_INIT(&core.rules);
  core.results.weights = weights;
  core.results.log_sum_exp = got_lse;
  test_core_run(&core);
  for (int64_t j = 0; j < n; j++)
    test_near("weight", (double)weights[j], expected[j], 1e-6);
  test_near("output", (double)output[0], value, 1e-6 + 5e-7 * fabs(value));
  test_near("lse", (double)got_lse[0], lse, 2e-6 + 8 * 0x1p-24 * (4 + fabs(lse)));
}

static void huge_scores(void **state) {
  const float huge = 1e30F;
  const double log3 = 1.0986122886681098, log2 = 0.6931471805599453;
  (void)state;
  expect_weights((float[]){1e30F, -1e30F, 0.0F}, 3, (double[]){1, 0, 0}, (double)huge);
  expect_weights((float[]){1e30F, 0.0F, 1e30F}, 3, (double[]){0.5, 0, 0.5}, (double)huge);
  expect_weights((float[]){-1e30F, -1e30F, -1e30F}, 3, (double[]){1. / 3, 1. / 3, 1. / 3},
                 -(double)huge);
  expect_weights((float[]){-1e30F, 0.0F, 0.0F}, 3, (double[]){0, 0.5, 0.5}, log2);
  expect_weights((float[]){-1000.0F, -1000.0F, -1000.0F}, 3, (double[]){1. / 3, 1. / 3, 1. / 3},
                 -1000 + log3);
  expect_weights((float[]){0.0F, 1000.0F, 0.0F}, 3, (double[]){0, 1, 0}, 1000);
  expect_weights((float[]){1000.0F, 1000.0F, 1000.0F}, 3, (double[]){1. / 3, 1. / 3, 1. / 3},
                 1000 + log3);
}

/* Huge scores in a later tile must push out what an earlier one gathered, and the other way. */
static void huge_scores_anywhere_in_a_long_row(void **state) {
  enum { N = 700 };
  static float k[N], v[N];
  const float q[] = {1.0F};
  const float tall[] = {1000.0F, 1e30F};
  (void)state;
  for (int which = 0; which < 2; which++)
    for (int64_t at = 0; at < N; at += 13) {
      float output[1], lse[1];
      for (int64_t j = 0; j < N; j++) {
        k[j] = j % 2 ? -1000.0F : -1e30F;
        v[j] = (float)j;
      }
      k[at] = tall[which];
      test_core core = {.Lq = 1, .Lk = N, .q = q, .k = k, .v = v, .output = output};
      MHA_INIT(&core.rules);
      core.results.log_sum_exp = lse;
      test_core_run(&core);
      test_near("output", (double)output[0], (double)at, 1e-6 + 5e-7 * (double)at);
      test_near("lse", (double)lse[0], (double)tall[which], 5e-7 * (double)tall[which]);
    }
}

static double seconds(void) {
  struct timespec now;
  (void)timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Every second key scores `gap` below the others. */
static double time_with_gap(float gap) {
  enum { L = 512, D = 8 };
  static float q[L * D], k[L * D], v[L * D], output[L * D];
  mha_context *context = NULL;
  mha_context_options options;
  mha_attend_args args;
  double best = 1e9;
  for (int64_t i = 0; i < L; i++)
    for (int64_t c = 0; c < D; c++) {
      q[i * D + c] = c == 0 ? 1.0F : 0.0F;
      k[i * D + c] = c == 0 && i % 2 ? -gap - (float)(i % 10) : 0.0F;
      v[i * D + c] = 1.0F;
    }
  const mha_tensor tq = {q, 1, L, 1, D, 0, 0, 0, 0, MHA_F32, 0},
                   tk = {k, 1, L, 1, D, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor tv = {v, 1, L, 1, D, 0, 0, 0, 0, MHA_F32, 0};
  mha_rules rules;
  MHA_INIT(&rules);
  rules.flags = MHA_SCALE;
  rules.scale = 1.0F;
  MHA_INIT(&args);
  args.output = output;
  args.rules = &rules;
  MHA_INIT(&options);
  options.n_threads = 1;
  test_expect(mha_context_create(&options, &context, NULL), MHA_OK, NULL);
  for (int run = 0; run < 20; run++) {
    const double begin = seconds();
    test_expect(mha_attend(context, &tq, &tk, &tv, &args, NULL), MHA_OK, NULL);
    best = fmin(best, seconds() - begin);
  }
  mha_context_destroy(context);
  return best;
}

/* Subnormal arithmetic costs 10 times and more; 1.5 leaves room for a machine that is shared. The
 * best of several rounds counts, so that one disturbance does not. */
static void subnormal_weights(void **state) {
  double ratio = 1e9;
  (void)state;
  if (test_small())
    skip(); /* a clock means nothing under valgrind */
  for (int round = 0; round < 5 && ratio > 1.5; round++)
    ratio = fmin(ratio, time_with_gap(90.0F) / time_with_gap(5.0F));
  if (ratio > 1.5)
    test_failed("scores 90 to 99 apart take %.2f times as long as scores 5 to 14 apart", ratio);
}

/* ---- Rows about empty sizes and wrong arguments ---------------------------------------------- */

static void no_batch_or_no_query(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  float guard[4] = {1.0F, 2.0F, 3.0F, 4.0F};
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1, .Lq = 2, .H = 2, .d = 2, .source = TEST_SELF});
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  for (int which = 0; which < 2; which++) {
    const int64_t batch = which ? 3 : 0, length = which ? 0 : 5;
    mha_forward_args args;
    MHA_INIT(&args);
    args.batch = batch;
    args.query_length = length;
    test_expect(mha_forward(context, weights, &args, &error), MHA_OK, &error);
    test_expect(mha_self_attention(context, weights, NULL, batch, length, NULL, &error), MHA_OK,
                &error);
    args.output = guard;
    args.query = guard + 2; /* nothing is written */
    args.flags = MHA_ALLOW_EMPTY;
    test_expect(mha_forward(context, weights, &args, &error), MHA_OK, &error);
    const mha_tensor empty = {NULL, batch, length, 2, 2, 0, 0, 0, 0, MHA_F32, 0};
    mha_attend_args attend;
    MHA_INIT(&attend);
    test_expect(mha_attend(context, &empty, &empty, &empty, &attend, &error), MHA_OK, &error);
    /* what does not depend on data is checked all the same */
    mha_rules rules;
    MHA_INIT(&rules);
    rules.flags = MHA_SCALE;
    rules.scale = NAN;
    args.rules = &rules;
    attend.rules = &rules;
    test_expect(mha_forward(context, weights, &args, &error), MHA_ERROR_VALUE, &error);
    test_expect(mha_attend(context, &empty, &empty, &empty, &attend, &error), MHA_ERROR_VALUE,
                &error);
    test_expect(mha_forward(context, NULL, &args, &error), MHA_ERROR_NULL, &error);
    test_expect(mha_self_attention(context, NULL, NULL, batch, length, NULL, &error),
                MHA_ERROR_NULL, &error);
  }
  expect_row(guard, (float[]){1.0F, 2.0F, 3.0F, 4.0F}, 4, "nothing is written");
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

static void no_keys(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++)
    for (int accumulate = 0; accumulate < 2; accumulate++)
      for (int sinks = 0; sinks < 2; sinks++) {
        test_build(&fixture, &(test_case){.seed = 1,
                                          .core = core,
                                          .B = 2,
                                          .Lq = 3,
                                          .Lk = 0,
                                          .H = 2,
                                          .d = 2,
                                          .biases = TEST_ALL,
                                          .accumulate = accumulate,
                                          .sinks = sinks,
                                          .causal = true,
                                          .want = TEST_WANT_ALL});
        test_run(&fixture);
        test_judge_now(&fixture);
        expect_all("lse", fixture.lse, fixture.lse_n, -INFINITY);
        for (int64_t b = 0; b < 2; b++)
          for (int64_t i = 0; i < 3; i++) {
            const float *row = test_at(&fixture.output, b, i, 0, 0);
            if (core)
              expect_all("result", row, 4, 0.0);
            else if (!accumulate)
              expect_row(row, fixture.wo.bias, 4, "output is bo");
          }
        test_release(&fixture);
      }
}

static void expect_rule_refused(const test_fixture *f, const char *name) {
  mha_context *context = NULL;
  mha_error error;
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  test_expect(mha_attend(context, &f->q, &f->k, &f->v, &f->attend_args, &error), MHA_ERROR_VALUE,
              &error);
  if (!strstr(error.message, name))
    test_failed("the message does not name %s: \"%s\"", name, error.message);
  test_check_gaps(f);
  for (int64_t at = 0; at < f->output.floats; at++)
    assert_true(test_is_poison(f->output.data[at]));
  mha_context_destroy(context);
}

static void numbers_that_are_no_rule(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY, -1.0F};
  (void)state;
  for (size_t which = 0; which < COUNT(bad); which++) {
    test_build(&fixture, &(test_case){.seed = 1,
                                      .core = true,
                                      .Lq = 3,
                                      .Lk = 4,
                                      .H = 2,
                                      .d = 2,
                                      .alibi = true,
                                      .sinks = true});
    mha_rules *a = &fixture.rules;
    const mha_rules good = *a;
    a->flags |= MHA_SCALE;
    a->scale = bad[which];
    if (which < 3)
      expect_rule_refused(&fixture, "scale");
    *a = good;
    a->softcap = bad[which];
    expect_rule_refused(&fixture, "softcap");
    *a = good;
    fixture.slopes[1] = bad[which];
    if (which < 3)
      expect_rule_refused(&fixture, "alibi_slopes");
    fixture.slopes[1] = 0.5F;
    fixture.sinks[1] = bad[which];
    if (which < 2)
      expect_rule_refused(&fixture, "sinks");
    fixture.sinks[1] = 0.5F;
    a->flags |= MHA_WINDOW;
    a->window_left = -2 - (int64_t)which;
    expect_rule_refused(&fixture, "window_left");
    a->window_left = 0;
    a->window_right = INT64_MIN + (int64_t)which;
    expect_rule_refused(&fixture, "window_right");
    test_release(&fixture);
  }
}

/* Softcap 0 is none, and so is a sink of −inf: the judge knows nothing of either here. */
static void numbers_that_mean_none(void **state) {
  oracle_result result;
  (void)state;
  test_build(&fixture,
             &(test_case){
                 .seed = 1, .core = true, .Lq = 3, .Lk = 4, .H = 2, .d = 2, .want = TEST_WANT_ALL});
  test_ask_oracle(&fixture, &result);
  const float none[] = {-INFINITY, -INFINITY};
  fixture.rules.sinks = none;
  fixture.rules.flags |= MHA_SOFTCAP;
  fixture.rules.softcap = 0.0F;
  test_run(&fixture);
  test_judge(&fixture, &result);
  oracle_free(&result);
  test_release(&fixture);
}

/* One of each kind here; the whole table is in the tests of errors. */
static void arguments_that_do_not_fit(void **state) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  test_build(&fixture, &(test_case){.seed = 1,
                                    .core = true,
                                    .B = 2,
                                    .Lq = 3,
                                    .Lk = 4,
                                    .H = 4,
                                    .G = 2,
                                    .d = 2,
                                    .key_lengths = true});
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  fixture.config.n_kv_heads = 3;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error),
              MHA_ERROR_HEADS, &error);
  mha_tensor strided = fixture.q;
  strided.batch_stride = 24;
  strided.row_stride = 1;
  strided.head_stride = 6;
  strided.size_stride = 3;
  test_expect(mha_attend(context, &strided, &fixture.k, &fixture.v, &fixture.attend_args, &error),
              MHA_ERROR_STRIDE, &error);
  for (int64_t length = -1; length <= 5; length += 6) {
    const int64_t good = fixture.key_lengths[1];
    fixture.key_lengths[1] = length;
    test_expect(test_call(&fixture, context, NULL, &error), MHA_ERROR_LENGTH, &error);
    fixture.key_lengths[1] = good;
  }
  mha_tensor large = fixture.q;
  large.batch = INT64_MAX / 2;
  test_expect(mha_attend(context, &large, &fixture.k, &fixture.v, &fixture.attend_args, &error),
              MHA_ERROR_OVERFLOW, &error);
  fixture.attend_args.output = (float *)(uintptr_t)fixture.q.data;
  test_expect(test_call(&fixture, context, NULL, &error), MHA_ERROR_OVERLAP, &error);
  for (int64_t at = 0; at < fixture.output.floats; at++)
    assert_true(test_is_poison(fixture.output.data[at]));
  mha_context_destroy(context);
  test_release(&fixture);
}

/* ---- Rows about equal bits ------------------------------------------------------------------- */

static void ignore_step(void *user, const mha_trace_step *step) {
  (void)step;
  ++*(int *)user;
}

static void trace_changes_no_bit(const test_case *c, const float *plain) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  int steps = 0;
  test_build(&fixture, c);
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  test_expect(mha_context_trace(context, ignore_step, &steps, NULL), MHA_OK, NULL);
  test_poison_results(&fixture);
  test_expect(test_call(&fixture, context, weights, &error), MHA_OK, &error);
  assert_true(steps > 0);
  test_same_output(&fixture, plain);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_release(&fixture);
}

static void results_requested(void **state) {
  (void)state;
  for (int variant = 0; variant < 64; variant++) {
    test_case c = partly_visible(variant);
    c.want = 0;
    test_build(&fixture, &c);
    test_run(&fixture);
    float *plain = test_gather(&fixture.output);
    test_release(&fixture);
    if (!c.core)
      trace_changes_no_bit(&c, plain);
    for (unsigned want = 1; want <= TEST_WANT_ALL; want++)
      for (int stage = 0; stage < 4; stage++) {
        c.want = want;
        c.stage = (mha_stage)stage;
        test_build(&fixture, &c);
        test_run(&fixture);
        test_same_output(&fixture, plain);
        test_release(&fixture);
      }
    free(plain);
  }
}

static void a_token_that_is_not_visible(void **state) {
  (void)state;
  for (int variant = 0; variant < 64; variant++) {
    const test_case c = partly_visible(variant);
    oracle_result result;
    test_build(&fixture, &c);
    test_run(&fixture);
    float *clean = test_gather(&fixture.output);
    test_ask_oracle(&fixture, &result);
    for (int64_t j = 2; j < 70; j += test_small() ? 31 : 11) {
      const unseen_key key = {&fixture, &result, 0, j, -1};
      float *old_key = test_gather(&fixture.key), *old_value = test_gather(&fixture.value);
      overwrite(&fixture.key, 0, j, 0.25F);
      overwrite(&fixture.value, 0, j, -3.0F);
      test_run(&fixture);
      test_same_rows(&fixture, clean, does_not_see, &key);
      memcpy(fixture.key.data, old_key, (size_t)fixture.key.floats * sizeof(float));
      memcpy(fixture.value.data, old_value, (size_t)fixture.value.floats * sizeof(float));
      free(old_key);
      free(old_value);
    }
    free(clean);
    oracle_free(&result);
    test_release(&fixture);
  }
}

static void any_number_of_threads(void **state) {
  const int threads[] = {1, 2, 3, 4, 8};
  (void)state;
  for (int variant = 0; variant < 64; variant += test_small() ? 9 : 3) {
    float *one = NULL;
    for (size_t t = 0; t < COUNT(threads); t++) {
      test_case c = partly_visible(variant);
      c.threads = threads[t];
      c.Lq = test_small() ? 37 : 300; /* enough to be worth several threads */
      c.Lk = test_small() ? 70 : 530;
      c.d = 16;
      test_build(&fixture, &c);
      test_run_for_bits(&fixture, &one);
    }
    free(one);
  }
}

static void the_same_call_twice(void **state) {
  (void)state;
  for (int variant = 0; variant < 64; variant++) {
    const test_case c = partly_visible(variant);
    test_build(&fixture, &c);
    test_run(&fixture);
    float *first = test_gather(&fixture.output);
    float *weights = malloc((size_t)fixture.weights_n * sizeof *weights);
    assert_non_null(weights);
    memcpy(weights, fixture.weights, (size_t)fixture.weights_n * sizeof *weights);
    test_run(&fixture);
    test_same_output(&fixture, first);
    expect_row(fixture.weights, weights, fixture.weights_n, "weights");
    free(first);
    free(weights);
    test_release(&fixture);
  }
}

/* Alone or in a batch: each entry of a batch is judged alone, with the same bounds. */
static void alone_or_in_a_batch(void **state) {
  (void)state;
  test_build(&fixture, &(test_case){.seed = 6,
                                    .B = 3,
                                    .Lq = 20,
                                    .Lk = 33,
                                    .H = 2,
                                    .d = 5,
                                    .biases = TEST_ALL,
                                    .causal = true});
  oracle_result result;
  test_ask_oracle(&fixture, &result);
  test_run(&fixture);
  test_judge(&fixture, &result);
  fixture.args.batch = 1;
  for (int64_t b = 0; b < 3; b++) {
    fixture.args.query = test_at(&fixture.query, b, 0, 0, 0);
    fixture.args.key = test_at(&fixture.key, b, 0, 0, 0);
    fixture.args.value = test_at(&fixture.value, b, 0, 0, 0);
    fixture.args.output = test_at(&fixture.output, b, 0, 0, 0);
    test_run(&fixture);
    test_compare("entry alone", (test_shape){{1, 1, 20, 10}}, fixture.args.output,
                 result.output.value + b * 200, result.output.bound + b * 200);
  }
  oracle_free(&result);
  test_release(&fixture);
}

/* Padded or not: 33 keys alone, or 33 of 64 by lengths, by a mask or by −inf. */
static void padded_or_not(void **state) {
  enum { LQ = 20, KEYS = 33, LK = 64, E = 10 };
  (void)state;
  for (int how = 0; how < 4; how++) {
    oracle_result result;
    test_build(&fixture, &(test_case){.seed = 7,
                                      .Lq = LQ,
                                      .Lk = LK,
                                      .H = 2,
                                      .d = 5,
                                      .key_lengths = true,
                                      .has_mask = how == 2,
                                      .has_bias = how == 3});
    fixture.key_lengths[0] = KEYS;
    test_fill_normal(&fixture.random, fixture.key.data, fixture.key.floats, 1.0);
    test_fill_normal(&fixture.random, fixture.value.data, fixture.value.floats, 1.0);
    for (int64_t j = 0; how == 2 && j < LK; j++)
      fixture.mask[j] = j < KEYS;
    for (int64_t j = 0; how == 3 && j < LK; j++)
      fixture.bias[j] = j < KEYS ? 0.0F : -INFINITY;
    test_ask_oracle(&fixture, &result);
    if (how != 1)
      fixture.rules.key_lengths = NULL;
    if (how == 0)
      fixture.args.key_length = KEYS;
    test_run(&fixture);
    test_judge(&fixture, &result);
    oracle_free(&result);
    test_release(&fixture);
  }
}

/* Causal four ways: by its flag, a window, a mask and a bias. */
static void one_mask_spelled_in_many_ways(void **state) {
  enum { LQ = 40, LK = 70, OFF = 12 };
  (void)state;
  for (int core = 0; core < 2; core++)
    for (int how = 0; how < 4; how++) {
      oracle_result result;
      test_build(&fixture, &(test_case){.seed = 8,
                                        .core = core,
                                        .Lq = LQ,
                                        .Lk = LK,
                                        .H = 2,
                                        .d = 5,
                                        .causal = true,
                                        .alignment = MHA_ALIGN_OFFSET,
                                        .offset = OFF,
                                        .has_mask = true,
                                        .has_bias = true,
                                        .mask_extents = TEST_FULL_ROWS,
                                        .bias_extents = TEST_FULL_ROWS,
                                        .want = TEST_WANT_ALL});
      for (int64_t i = 0; i < LQ; i++)
        for (int64_t j = 0; j < LK; j++) {
          fixture.mask[i * LK + j] = j <= i + OFF;
          fixture.bias[i * LK + j] = j <= i + OFF ? 0.0F : -INFINITY;
        }
      test_ask_oracle(&fixture, &result);
      mha_rules *a = &fixture.rules;
      a->causal = how == 0;
      a->flags |= how == 1 ? MHA_WINDOW : 0;
      a->window_left = -1;
      a->window_right = 0;
      a->attend.data = how == 2 ? fixture.mask : NULL;
      a->bias.data = how == 3 ? fixture.bias : NULL;
      test_run(&fixture);
      test_judge(&fixture, &result);
      oracle_free(&result);
      test_release(&fixture);
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_query_that_sees_no_key),
      cmocka_unit_test(query_rows_beyond_query_lengths),
      cmocka_unit_test(keys_beyond_key_lengths),
      cmocka_unit_test(nan_or_inf_in_a_key_or_value_that_is_not_seen),
      cmocka_unit_test(nan_in_a_query_row),
      cmocka_unit_test(nan_in_one_heads_query),
      cmocka_unit_test(nan_in_a_visible_key),
      cmocka_unit_test(inf_in_a_visible_value),
      cmocka_unit_test(inf_in_a_value_whose_weight_rounds_to_zero),
      cmocka_unit_test(nan_in_a_value_whose_weight_rounds_to_zero),
      cmocka_unit_test(huge_scores),
      cmocka_unit_test(huge_scores_anywhere_in_a_long_row),
      cmocka_unit_test(subnormal_weights),
      cmocka_unit_test(no_batch_or_no_query),
      cmocka_unit_test(no_keys),
      cmocka_unit_test(numbers_that_are_no_rule),
      cmocka_unit_test(numbers_that_mean_none),
      cmocka_unit_test(arguments_that_do_not_fit),
      cmocka_unit_test(results_requested),
      cmocka_unit_test(a_token_that_is_not_visible),
      cmocka_unit_test(any_number_of_threads),
      cmocka_unit_test(the_same_call_twice),
      cmocka_unit_test(alone_or_in_a_batch),
      cmocka_unit_test(padded_or_not),
      cmocka_unit_test(one_mask_spelled_in_many_ways),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
