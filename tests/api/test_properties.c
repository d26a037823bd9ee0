/* What must hold for every combination of rules: unseen tokens, requested results, threads and the
 * spelling of a mask. Small shapes take the whole product of options, larger ones, across the
 * borders of tiles, a random sample of it. */
#include "fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Many calls of one fixture --------------------------------------------------------------- */

/* A fixture with its judgement, its layer and context, and the bits of its first call. */
typedef struct trial {
  test_fixture f;
  oracle_result result;
  mha_weights *weights;
  mha_context *context;
  float *output, *lse, *probabilities; /* of the first call */
} trial;

static trial s; /* one at a time; too large for a stack */

static void call(void) {
  mha_error error;
  test_poison_results(&s.f);
  test_expect(test_call(&s.f, s.context, s.weights, &error), MHA_OK, &error);
  test_check_gaps(&s.f);
}

static float *copy(const float *numbers, int64_t n) {
  float *twin = malloc((size_t)(n > 0 ? n : 1) * sizeof *twin);
  assert_non_null(twin);
  if (n > 0)
    memcpy(twin, numbers, (size_t)n * sizeof *twin);
  return twin;
}

/* Builds, asks the judge, calls once and compares. */
static void open_trial(const test_case *c) {
  mha_error error;
  test_build(&s.f, c);
  s.weights = NULL;
  if (!c->core)
    test_expect(mha_weights_create(&s.f.config, &s.f.matrices, &s.weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(&s.f.options, &s.context, &error), MHA_OK, &error);
  test_ask_oracle(&s.f, &s.result);
  call();
  test_judge(&s.f, &s.result);
  s.output = test_gather(&s.f.output);
  s.lse = copy(s.f.lse, s.f.lse_n);
  s.probabilities = copy(s.f.weights, s.f.weights_n);
}

static void close_trial(void) {
  free(s.output);
  free(s.lse);
  free(s.probabilities);
  mha_context_destroy(s.context);
  mha_weights_destroy(s.weights);
  test_allocator_check(&s.f.allocator);
  oracle_free(&s.result);
  test_release(&s.f);
}

/* ---- The properties -------------------------------------------------------------------------- */

static double row_share(const test_case *c, int64_t h, int64_t row, bool seen) {
  if (!seen)
    return 0.0;
  if (!c->sinks)
    return 1.0;
  return 1.0 / (1.0 + exp((double)s.f.sinks[h] - s.result.lse.value[row]));
}

/* Rows of weights sum to 1 less the sink's share, or to 0. */
static void weights_sum_to_one(void) {
  const test_case *c = &s.f.c;
  if (!s.f.weights || c->stage != MHA_STAGE_WEIGHTS)
    return;
  for (int64_t row = 0; row < c->B * c->H * c->Lq; row++) {
    double sum = 0;
    bool seen = false;
    for (int64_t j = 0; j < c->Lk; j++) {
      sum += (double)s.f.weights[row * c->Lk + j];
      seen = seen || test_sees(&s.f, &s.result, 0, 0, row, j);
    }
    test_near("sum of a row", sum, row_share(c, row / c->Lq % c->H, row, seen), 1e-5);
  }
}

/* Asking for less changes no bit of the output. */
static void results_change_no_bit(void) {
  mha_results *a = &s.f.results;
  const mha_results all = *a;
  for (unsigned want = 0; want < TEST_WANT_ALL; want++) {
    a->weights = want & TEST_WANT_WEIGHTS ? all.weights : NULL;
    a->average = want & TEST_WANT_AVERAGE ? all.average : NULL;
    a->log_sum_exp = want & TEST_WANT_LSE ? all.log_sum_exp : NULL;
    call();
    test_same_output(&s.f, s.output);
    *a = all;
    if (want == 0 && s.f.c.Lq > 20)
      return; /* large shapes: nothing at all is the other extreme, and enough */
  }
}

/* Rows of the output that have nothing to do with token j of entry b. */
typedef struct token {
  int64_t b, j;
} token;

static bool has_nothing_of(const void *user, int64_t b, int64_t i) {
  const token *t = user;
  const test_case *c = &s.f.c;
  bool touched = b == t->b && c->source == TEST_SELF && i == t->j;
  for (int64_t h = 0; b == t->b && h < c->H; h++)
    touched = touched || test_sees(&s.f, &s.result, b, h, i, t->j);
  return !touched;
}

static void same_statistics(const token *t) {
  const test_case *c = &s.f.c;
  for (int64_t row = 0; row < c->B * c->H * c->Lq; row++) {
    if (!has_nothing_of(t, row / (c->H * c->Lq), row % c->Lq))
      continue;
    if (s.f.lse && !test_equal_bits(s.f.lse[row], s.lse[row]))
      test_failed("log_sum_exp %" PRId64 " changed with a token that is not seen", row);
    for (int64_t j = 0; s.f.weights && c->stage == MHA_STAGE_WEIGHTS && j < c->Lk; j++)
      if (!test_equal_bits(s.f.weights[row * c->Lk + j], s.probabilities[row * c->Lk + j]))
        test_failed("weight %" PRId64 " of row %" PRId64 " changed with a token that is not seen",
                    j, row);
  }
}

static void overwrite(const test_view *view, int64_t b, int64_t i, float number) {
  for (int64_t h = 0; h < view->heads; h++)
    for (int64_t at = 0; at < view->size; at++)
      *test_at(view, b, i, h, at) = number;
}

/* In the core NaN stays in its head; the layer's output projection spreads it over the row. */
static void nan_reaches_who_sees(const token *t) {
  const test_case *c = &s.f.c;
  for (int64_t i = 0; i < c->Lq; i++)
    for (int64_t h = 0; h < c->H; h++) {
      const float shown = *test_at(&s.f.output, t->b, i, c->core ? h : 0, 0);
      if (test_sees(&s.f, &s.result, t->b, h, i, t->j) && !isnan(shown))
        test_failed("row %" PRId64 " sees token %" PRId64 ", which is NaN, in head %" PRId64
                    " and shows %g",
                    i, t->j, h, (double)shown);
    }
}

/* A key, a value or both become NaN, infinite, huge or just different: those who do not see the
 * token keep every bit; NaN reaches everybody who does. */
static void unseen_tokens_change_no_bit(void) {
  const float fills[] = {NAN, INFINITY, -INFINITY, 1e30F, 0.0F, 2.5F};
  const test_case *c = &s.f.c;
  test_view *views[] = {&s.f.key, &s.f.value};
  for (unsigned which = 1; which <= 3 && c->Lk > 0; which++) {
    const token t = {test_random_range(&s.f.random, 0, c->B - 1),
                     test_random_range(&s.f.random, 0, c->Lk - 1)};
    const float number = fills[test_random_range(&s.f.random, 0, COUNT(fills) - 1)];
    float *old[] = {copy(views[0]->data, views[0]->floats), copy(views[1]->data, views[1]->floats)};
    for (unsigned v = 0; v < 2; v++)
      if (which & (1U << v))
        overwrite(views[v], t.b, t.j, number);
    call();
    test_same_rows(&s.f, s.output, has_nothing_of, &t);
    same_statistics(&t);
    if (isnan(number))
      nan_reaches_who_sees(&t);
    for (unsigned v = 0; v < 2; v++) {
      memcpy(views[v]->data, old[v], (size_t)views[v]->floats * sizeof(float));
      free(old[v]);
    }
  }
}

/* What the judge shows where one of the two masks is not there. */
static void judge_without(uint8_t *mask, float *bias, oracle_result *result) {
  test_fixture *f = &s.f;
  uint8_t *kept_mask = f->mask;
  float *kept_bias = f->bias;
  f->mask = mask;
  f->bias = bias;
  test_ask_oracle(f, result);
  f->mask = kept_mask;
  f->bias = kept_bias;
}

/* Bytes of the mask and numbers of the bias do not count where something else hides the key. Bias
 * and mask have full extents and no gaps here. The last property: it spoils both. */
static void hidden_bias_and_mask_are_ignored(void) {
  const test_case *c = &s.f.c;
  oracle_result hidden;
  if (c->has_bias && c->bias_extents == TEST_FULL && !c->mask_strides) {
    judge_without(s.f.mask, NULL, &hidden);
    for (int64_t at = 0; at < hidden.stage[2].n; at++)
      if (isinf(hidden.stage[2].value[at]))
        s.f.bias[at] = at % 3 ? NAN : INFINITY;
    oracle_free(&hidden);
    call();
    test_same_output(&s.f, s.output);
  }
  if (c->has_mask && c->mask_extents == TEST_FULL && !c->mask_strides) {
    judge_without(NULL, s.f.bias, &hidden);
    for (int64_t at = 0; at < hidden.stage[2].n; at++)
      if (isinf(hidden.stage[2].value[at]) && hidden.stage[2].value[at] < 0)
        s.f.mask[at] = !s.f.mask[at];
    oracle_free(&hidden);
    call();
    test_same_output(&s.f, s.output);
  }
}

static void threads_change_no_bit(int32_t threads) {
  mha_context *one = s.context;
  mha_error error;
  s.f.options.n_threads = threads;
  test_expect(mha_context_create(&s.f.options, &s.context, &error), MHA_OK, &error);
  call();
  test_same_output(&s.f, s.output);
  mha_context_destroy(s.context);
  s.context = one;
}

/* ---- The product of all options over small shapes -------------------------------------------- */

enum {
  CAUSAL = 1,
  WINDOW = 2,
  QUERY_LENGTHS = 4,
  KEY_LENGTHS = 8,
  MASK = 16,
  BIAS = 32,
  ALIBI = 64,
  SOFTCAP = 128,
  SINKS = 256,
  GROUPED = 512,
  ALL_OPTIONS = 1023
};

static test_case case_of_options(unsigned options, uint64_t seed) {
  test_random r;
  test_random_seed(&r, seed);
  test_case c = {.seed = seed,
                 .B = test_random_range(&r, 1, 2),
                 .Lq = test_random_range(&r, 1, 7),
                 .Lk = test_random_range(&r, 1, 11),
                 .H = options & GROUPED ? 4 : 2,
                 .G = options & GROUPED ? test_random_range(&r, 1, 2) : 2,
                 .d = test_random_range(&r, 1, 5),
                 .dv = test_random_range(&r, 1, 5),
                 .Eq = 6,
                 .causal = options & CAUSAL,
                 .window = options & WINDOW,
                 .left = test_random_range(&r, -1, 3),
                 .right = test_random_range(&r, -1, 2),
                 .offset = test_random_range(&r, -3, 5),
                 .offset_each = test_random_range(&r, 0, 1),
                 .query_lengths = options & QUERY_LENGTHS,
                 .key_lengths = options & KEY_LENGTHS,
                 .has_mask = options & MASK,
                 .has_bias = options & BIAS,
                 .bias_hides = test_random_range(&r, 0, 1),
                 .alibi = options & ALIBI,
                 .softcap = options & SOFTCAP ? 1.5F : 0.0F,
                 .sinks = options & SINKS,
                 .biases = TEST_ALL,
                 .accumulate = test_random_range(&r, 0, 3) == 0,
                 .at_front = test_random_range(&r, 0, 1),
                 .want = TEST_WANT_ALL};
  c.mask_extents =
      (unsigned)test_random_range(&r, 0, 3) ? TEST_FULL : (unsigned)test_random_range(&r, 0, 7);
  c.bias_extents =
      (unsigned)test_random_range(&r, 0, 3) ? TEST_FULL : (unsigned)test_random_range(&r, 0, 7);
  c.mask_strides = test_random_range(&r, 0, 4) == 0;
  c.stage = test_random_range(&r, 0, 1) ? MHA_STAGE_WEIGHTS : (mha_stage)(seed % 4);
  c.scale_given = test_random_range(&r, 0, 3) == 0;
  c.scale = (float)test_random_uniform(&r, -1.5, 1.5);
  c.rules_in_call = test_random_range(&r, 0, 1);
  return c;
}

/* Of every fourth case; the judge knows it, and all that changes no bit changes none with it. */
static float dropout_of(uint64_t n) {
  return n / 9 % 4 == 1 ? 0.3F : 0.0F;
}

/* What calls the core: a layer with keys of its own, a layer with self attention, mha_attend. */
static void set_caller(test_case *c, int caller, uint64_t seed) {
  c->source = caller == 1 ? TEST_SELF : TEST_CROSS;
  c->core = caller == 2;
  c->layout = (test_layout)(seed % (c->core ? 4 : 3));
}

static void every_combination_of_options(void **state) {
  const uint64_t step = test_small() ? 23 : 1;
  (void)state;
  for (uint64_t n = 0; n < 9 * (ALL_OPTIONS + 1); n += step) {
    test_case c = case_of_options((unsigned)(n / 9), n);
    c.alignment = (mha_alignment)(n % 3);
    c.dropout = dropout_of(n);
    set_caller(&c, (int)(n / 3 % 3), n);
    open_trial(&c);
    weights_sum_to_one();
    results_change_no_bit();
    unseen_tokens_change_no_bit();
    hidden_bias_and_mask_are_ignored();
    close_trial();
  }
}

/* ---- A sample over large shapes -------------------------------------------------------------- */

static int64_t length_near_a_border(test_random *r, int64_t longest) {
  const int64_t borders[] = {16, 32, 64, 128, 256, 512, 768, 1024};
  const int64_t length = borders[test_random_range(r, 0, COUNT(borders) - 1)];
  const int64_t near = length + test_random_range(r, -2, 2);
  return near <= longest ? near : test_random_range(r, 1, longest);
}

static void large_shapes(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 2 : 90); seed++) {
    test_random r;
    test_random_seed(&r, seed + 1000);
    test_case c = case_of_options((unsigned)test_random_bits(&r) & ALL_OPTIONS, seed);
    c.alignment = (mha_alignment)(seed % 3);
    c.Lq = length_near_a_border(&r, test_small() ? 70 : 600);
    c.Lk = length_near_a_border(&r, test_small() ? 150 : 1100);
    c.left = test_random_range(&r, -1, 300);
    c.right = test_random_range(&r, -1, 40);
    c.offset = test_random_range(&r, -200, 500);
    c.d = test_random_range(&r, 1, 24);
    c.dv = test_random_range(&r, 1, 24);
    c.B = 1 + (seed % 5 == 0);
    c.dropout = dropout_of(seed);
    set_caller(&c, (int)(seed % 4 == 3 ? 1 : seed % 3), seed);
    if (seed % 6 == 5 && !test_small() && c.source != TEST_SELF) { /* decoding: few queries */
      c.Lq = test_random_range(&r, 1, 8);
      c.Lk = test_random_range(&r, 2000, 5000);
      c.d = test_random_range(&r, 24, 40);
      c.dv = test_random_range(&r, 24, 40);
      c.offset += c.Lk / 2;
    }
    open_trial(&c);
    weights_sum_to_one();
    results_change_no_bit();
    unseen_tokens_change_no_bit();
    threads_change_no_bit(3);
    hidden_bias_and_mask_are_ignored();
    close_trial();
  }
}

/* ---- One mask, spelled in other ways --------------------------------------------------------- */

/* Leaves nothing but a bias or a mask of full extents that hide what all rules together hide. */
static void spell_out(bool as_bias, uint8_t *mask, float *bias) {
  test_fixture *f = &s.f;
  const test_case *c = &f->c;
  for (int64_t at = 0; at < s.result.stage[2].n; at++) {
    const double final = s.result.stage[2].value[at];
    const bool seen = !(isinf(final) && final < 0);
    mask[at] = seen;
    bias[at] = seen ? 0.0F : -INFINITY;
  }
  mha_rules *a = &f->rules;
  a->causal = 0;
  a->flags &= ~MHA_WINDOW;
  a->query_lengths = a->key_lengths = NULL;
  a->alignment = MHA_ALIGN_OFFSET;
  a->offsets = f->offsets;
  a->attend = (mha_mask){as_bias ? NULL : mask, c->B, c->H, c->Lq, c->Lk, 0, 0, 0, 0, 0};
  a->bias = (mha_bias){as_bias ? bias : NULL, c->B, c->H, c->Lq, c->Lk, 0, 0, 0, 0, 0};
}

/* off[b] in numbers, since without lengths it cannot be derived any more. */
static void write_down_offsets(test_fixture *f) {
  const test_case *c = &f->c;
  for (int64_t b = 0; b < c->B; b++) {
    const int64_t keys = f->key_lengths ? f->key_lengths[b] : c->Lk;
    const int64_t queries = f->query_lengths ? f->query_lengths[b] : c->Lq;
    if (c->alignment != MHA_ALIGN_OFFSET)
      f->offsets[b] = c->alignment == MHA_ALIGN_BOTTOM_RIGHT ? keys - queries : 0;
  }
}

/* Causal, window, lengths and mask against one mask, and against one bias of −inf. Rows beyond the
 * lengths hold NaN all the while. */
static void rules_or_one_mask(void **state) {
  (void)state;
  for (uint64_t n = 0; n < (test_small() ? 150 : 1500); n++) {
    test_case c = case_of_options((unsigned)(n * 7) & ~(unsigned)BIAS & ALL_OPTIONS, n);
    c.alignment = (mha_alignment)(n % 3);
    set_caller(&c, (int)(n / 3 % 3), n);
    c.stage = MHA_STAGE_WEIGHTS;
    c.dropout = dropout_of(n);
    if (n % 50 == 49) {
      c.Lq = 270;
      c.Lk = 530;
    }
    open_trial(&c);
    const size_t cells = (size_t)s.result.stage[2].n;
    uint8_t *mask = test_pool_bytes(&s.f.pool, cells);
    float *bias = test_pool_floats(&s.f.pool, (int64_t)cells);
    write_down_offsets(&s.f);
    for (int as_bias = 0; as_bias < 2; as_bias++) {
      spell_out(as_bias, mask, bias);
      call();
      test_judge(&s.f, &s.result);
    }
    close_trial();
  }
}

/* ---- Grouped heads, packed sequences --------------------------------------------------------- */

static float *repeat_heads(test_fixture *f, const test_view *view, int64_t H) {
  const int64_t group = H / view->heads;
  float *all = test_pool_floats(&f->pool, view->batch * view->length * H * view->size), *to = all;
  for (int64_t b = 0; b < view->batch; b++)
    for (int64_t i = 0; i < view->length; i++)
      for (int64_t h = 0; h < H; h++, to += view->size)
        memcpy(to, test_at(view, b, i, h / group, 0), (size_t)view->size * sizeof *to);
  return all;
}

static void grouped_heads_are_repeated_heads(void **state) {
  (void)state;
  for (uint64_t n = 0; n < (test_small() ? 50 : 300); n++) {
    test_case c = case_of_options((unsigned)n * 5 % (ALL_OPTIONS + 1), n);
    c.H = 6;
    c.G = 1 + (int64_t)(n % 3);
    c.core = true;
    c.layout = (test_layout)(n % 4);
    c.alignment = (mha_alignment)(n % 3);
    c.dropout = dropout_of(n);
    open_trial(&c);
    s.f.k =
        (mha_tensor){repeat_heads(&s.f, &s.f.key, 6), c.B, c.Lk, 6, c.d, 0, 0, 0, 0, MHA_F32, 0};
    s.f.v =
        (mha_tensor){repeat_heads(&s.f, &s.f.value, 6), c.B, c.Lk, 6, c.dv, 0, 0, 0, 0, MHA_F32, 0};
    call();
    test_judge(&s.f, &s.result);
    close_trial();
  }
}

/* Sequence b of a packed call, alone. */
static void call_one_sequence(int64_t b) {
  test_fixture *f = &s.f;
  const int64_t first_query = f->query_starts[b], first_key = f->key_starts[b];
  const int64_t Lq = f->query_starts[b + 1] - first_query, Lk = f->key_starts[b + 1] - first_key;
  f->rules.query_starts = f->rules.key_starts = NULL;
  f->results.log_sum_exp = NULL;
  f->rules.offsets = NULL;
  f->rules.offset = f->offsets[b];
  f->args.batch = 1;
  f->args.flags = MHA_ALLOW_EMPTY; /* a sequence may have no rows */
  f->args.query_length = f->q.length = Lq;
  f->args.key_length = f->k.length = f->v.length = Lk;
  f->args.query = f->q.data = test_at(&f->query, 0, first_query, 0, 0);
  f->args.key = f->k.data = test_at(&f->key, 0, first_key, 0, 0);
  f->args.value = f->v.data = test_at(&f->value, 0, first_key, 0, 0);
  f->args.output = f->attend_args.output = test_at(&f->output, 0, first_query, 0, 0);
  f->attend_args.n_sequences = 0;
  if (f->c.source == TEST_SELF)
    f->args.key = f->args.value = NULL;
}

static void packed_sequences_are_separate_calls(void **state) {
  (void)state;
  for (uint64_t n = 0; n < (test_small() ? 50 : 400); n++) {
    mha_error error;
    test_case c = case_of_options((unsigned)n, n);
    c.packed = true;
    c.has_mask = c.has_bias = c.accumulate = false;
    c.B = 1 + (int64_t)(n % 6);
    c.Lq = 1 + (int64_t)(n * 31 % (n % 10 ? 40 : 900));
    c.Lk = 1 + (int64_t)(n * 17 % (n % 10 ? 60 : 1300));
    c.alignment = (mha_alignment)(n % 3);
    set_caller(&c, (int)(n / 3 % 3), n);
    c.layout = n % 2 ? TEST_DENSE : TEST_PADDED;
    c.want = TEST_WANT_LSE;
    open_trial(&c);
    if (n % 4 == 0)
      threads_change_no_bit(2);
    test_poison_results(&s.f);
    for (int64_t b = 0; b < c.B; b++) {
      call_one_sequence(b);
      test_expect(test_call(&s.f, s.context, s.weights, &error), MHA_OK, &error);
    }
    float *lse = s.f.lse;
    s.f.lse = NULL;
    test_judge(&s.f, &s.result);
    s.f.lse = lse;
    close_trial();
  }
}

/* ---- Scores that are not finite -------------------------------------------------------------- */

/* A visible bias of NaN or +∞ makes its row NaN; one of −∞ hides its key, NaN or not. */
static void biases_that_are_not_finite(void **state) {
  (void)state;
  for (uint64_t n = 0; n < (test_small() ? 50 : 400); n++) {
    test_case c = case_of_options((unsigned)(n * 3) | BIAS, n);
    c.alignment = (mha_alignment)(n % 3);
    c.bias_extents = n % 2 ? TEST_FULL : TEST_FULL_ROWS;
    set_caller(&c, (int)(n % 2 * 2), n);
    if (n % 40 == 39) {
      c.Lq = 300;
      c.Lk = 600;
    }
    c.stage = n % 3 ? MHA_STAGE_WEIGHTS : MHA_STAGE_FINAL;
    c.want = n % 5 ? TEST_WANT_ALL : 0;
    open_trial(&c);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    oracle_result result;
    for (int64_t at = test_random_range(&s.f.random, 0, 9); at < s.f.bias_floats; at += 23)
      s.f.bias[at] = bad[(uint64_t)at % 3];
    const int64_t row = test_random_range(&s.f.random, 0, c.Lq - 1);
    *test_at(&s.f.query, 0, row, 0, 0) = NAN;
    test_ask_oracle(&s.f, &result);
    call();
    test_judge(&s.f, &result);
    oracle_free(&result);
    close_trial();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_combination_of_options),
      cmocka_unit_test(large_shapes),
      cmocka_unit_test(rules_or_one_mask),
      cmocka_unit_test(grouped_heads_are_repeated_heads),
      cmocka_unit_test(packed_sequences_are_separate_calls),
      cmocka_unit_test(biases_that_are_not_finite),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
