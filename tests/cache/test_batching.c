/* Packed queries with a cache: one call for sequences in different states, each judged by itself.
 */
#include "generation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- A call of the run that is on, packed ---------------------------------------------------- */

enum { TAIL = 2 }; /* rows behind the last sequence */

/* The arrays of a step's call without padding, in its pool. */
typedef struct packed_call {
  int64_t starts[GENERATION_MOST_ENTRIES + 1], key_starts[GENERATION_MOST_ENTRIES + 1];
  int64_t rows; /* of queries, with the tail */
  float *y, *lse;
  mha_rules rules;
  mha_results results;
  mha_forward_args args;
} packed_call;

static int64_t lay_starts(const int64_t *counts, int64_t *starts) {
  starts[0] = 0;
  for (int64_t b = 0; b < run.f.c.B; b++)
    starts[b + 1] = starts[b] + counts[b];
  return starts[run.f.c.B];
}

/* Rows [B][rows][stride] without those that are no tokens, and a tail of poison. */
static float *pack(generation_step *s, const float *from, int64_t rows, int64_t width,
                   const int64_t *starts) {
  const int64_t B = run.f.c.B, stride = width + run.plan.gap;
  float *to = test_pool_floats(&s->pool, (starts[B] + TAIL) * stride - run.plan.gap);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < starts[b + 1] - starts[b]; i++)
      memcpy(to + (starts[b] + i) * stride, from + (b * rows + i) * stride,
             (size_t)width * sizeof *to);
  return to;
}

static int64_t *pack_positions(generation_step *s, const int64_t *starts) {
  const int64_t B = run.f.c.B;
  const size_t bytes = (size_t)(starts[B] + TAIL) * sizeof(int64_t);
  int64_t *to = test_pool_bytes(&s->pool, bytes);
  for (int64_t r = 0; r < starts[B] + TAIL; r++)
    to[r] = INT64_MIN; /* of the tail: no layer could take it */
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < starts[b + 1] - starts[b]; i++)
      to[starts[b] + i] = s->positions[b * s->queries + i];
  return to;
}

static void pack_keys(generation_step *s, packed_call *p, const int64_t *new_keys) {
  const test_case *c = &run.f.c;
  mha_forward_args *a = &p->args;
  const int64_t n = lay_starts(new_keys, p->key_starts);
  if (!a->key)
    return;
  a->key_length = n + TAIL;
  a->key = pack(s, s->k, s->keys, c->Ek, p->key_starts);
  if (a->value)
    a->value = pack(s, s->v, s->keys, c->Ev, p->key_starts);
  p->rules.key_starts = p->key_starts;
}

/* The prepared step's arguments, packed. */
static void pack_call(generation_step *s, packed_call *p) {
  const test_case *c = &run.f.c;
  int64_t new_keys[GENERATION_MOST_ENTRIES];
  const int64_t n = lay_starts(s->live, p->starts);
  p->rows = n + TAIL;
  p->args = s->args;
  p->rules = s->rules;
  p->results = s->results;
  mha_forward_args *a = &p->args;
  a->flags = MHA_ALLOW_EMPTY;
  a->new_lengths = NULL;
  a->rules = &p->rules;
  a->results = s->mode == MHA_CACHE_APPEND ? NULL : &p->results;
  p->rules.query_starts = p->starts;
  a->query_length = p->rows;
  a->query = pack(s, s->x, s->queries, c->Eq, p->starts);
  for (int64_t b = 0; b < c->B; b++)
    new_keys[b] = s->mode == MHA_CACHE_ATTEND ? 0 : s->after[b] - s->before[b];
  pack_keys(s, p, new_keys);
  if (s->positions)
    a->query_positions = pack_positions(s, p->starts);
  a->output = p->y = pack(s, s->y, s->queries, c->Eo, p->starts);
  const int64_t stride = c->Eo + run.plan.gap;
  for (int64_t r = n; c->accumulate && r < p->rows; r++)
    memset(p->y + r * stride, 0, (size_t)c->Eo * sizeof *p->y);
  p->lse = test_pool_floats(&s->pool, c->H * p->rows);
  p->results.log_sum_exp = s->results.log_sum_exp ? p->lse : NULL;
}

/* What a row that is no token shows: the output's bias, added or not. */
static float empty_row(const generation_step *s, int64_t row, int64_t column) {
  const float bias = run.f.wo.bias ? run.f.wo.bias[column] : 0.0F;
  return run.f.c.accumulate ? s->y_before[row * (run.f.c.Eo + run.plan.gap) + column] + bias : bias;
}

/* Brings the results to where those of a padded call are. */
static void unpack(generation_step *s, const packed_call *p) {
  const test_case *c = &run.f.c;
  const int64_t stride = c->Eo + run.plan.gap;
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t i = 0; i < s->queries; i++) {
      const int64_t to = b * s->queries + i, from = p->starts[b] + i;
      for (int64_t e = 0; e < c->Eo; e++)
        s->y[to * stride + e] = i < s->live[b] ? p->y[from * stride + e] : empty_row(s, to, e);
      for (int64_t h = 0; h < c->H && s->results.log_sum_exp; h++)
        s->lse[(b * c->H + h) * s->queries + i] =
            i < s->live[b] ? p->lse[h * p->rows + from] : -INFINITY;
    }
}

/* Rows behind the last sequence: the bias, and a log-sum-exp of minus infinity. */
static void check_tail(const packed_call *p) {
  const test_case *c = &run.f.c;
  const int64_t stride = c->Eo + run.plan.gap;
  for (int64_t r = p->rows - TAIL; r < p->rows; r++) {
    for (int64_t e = 0; e < c->Eo; e++)
      test_near("tail", (double)p->y[r * stride + e],
                run.f.wo.bias ? (double)run.f.wo.bias[e] : 0.0, 0.0);
    for (int64_t h = 0; h < c->H && p->results.log_sum_exp; h++)
      assert_true(p->lse[h * p->rows + r] == -INFINITY);
  }
}

static void call_packed(generation_step *s) {
  packed_call p;
  mha_error error;
  step_prepare(s);
  pack_call(s, &p);
  test_expect(mha_forward(run.context, run.weights, &p.args, &error), MHA_OK, &error);
  step_commit(s);
  if (s->mode == MHA_CACHE_APPEND)
    return;
  check_tail(&p);
  unpack(s, &p);
}

static void try_packed(generation_step s) {
  call_packed(&s);
  step_judge(&s);
  step_free(&s);
}

/* ---- Sequences in different states ----------------------------------------------------------- */

/* What entry b brings next: nothing, one token, a few, or many. */
static int64_t draw_count(int64_t b) {
  static const int64_t most[] = {0, 1, 1, 1, 8, 60};
  const int64_t left = run.f.c.Lq - run.length[b];
  const int64_t n = most[test_random_range(&run.f.random, 0, COUNT(most) - 1)];
  const int64_t wanted = n > 1 ? test_random_range(&run.f.random, 1, n) : n;
  return at_most(at_most(wanted, left), generation_largest_chunk());
}

static bool draw_counts(int64_t *counts, int64_t *longest) {
  bool complete = true;
  *longest = 0;
  for (int64_t b = 0; b < run.f.c.B; b++) {
    complete = complete && run.length[b] == run.f.c.Lq;
    counts[b] = draw_count(b);
    *longest = at_least(*longest, counts[b]);
  }
  return !complete;
}

/* Generates everything by packed calls; some append first and attend afterwards. */
static void finish_packed(void) {
  int64_t counts[GENERATION_MOST_ENTRIES], n = 0;
  while (draw_counts(counts, &n)) {
    const bool apart = run.f.c.source == TEST_SELF && test_random_range(&run.f.random, 0, 3) == 0;
    if (!apart) {
      try_packed((generation_step){.queries = n, .keys = n, .counts = counts});
      continue;
    }
    generation_step append = {.mode = MHA_CACHE_APPEND, .queries = n, .keys = n, .counts = counts};
    call_packed(&append);
    step_free(&append);
    try_packed(
        (generation_step){.mode = MHA_CACHE_ATTEND, .queries = n, .keys = n, .counts = counts});
  }
}

/* A random layer, its rules and its cache. */
static generation_plan draw_plan(uint64_t seed) {
  static const int kinds[] = {0, 1, 2, 3, 6, 7, 8, 9};
  static const int64_t groups[][2] = {{4, 4}, {4, 2}, {6, 1}, {1, 1}};
  static const int32_t types[] = {MHA_F32, MHA_F32, MHA_F16, MHA_BF16};
  static const int64_t pages[] = {0, 16, 32, 64};
  test_random random;
  test_random_seed(&random, seed);
  generation_plan plan = {.c = generation_case(seed)};
  test_case *c = &plan.c;
  const int64_t *group = groups[test_random_range(&random, 0, COUNT(groups) - 1)];
  c->B = test_random_range(&random, 1, GENERATION_MOST_ENTRIES);
  c->H = group[0];
  c->G = group[1];
  c->Lq = test_small() ? 90 : test_random_range(&random, 20, 300);
  c->threads = (int)test_random_range(&random, 1, 3);
  c->accumulate = test_random_range(&random, 0, 3) == 0;
  c->want = test_random_range(&random, 0, 1) ? TEST_WANT_LSE : 0;
  c->Lk = c->Lq;
  c->source = (test_source)test_random_range(&random, TEST_CROSS, TEST_SELF);
  c->rope = (mha_rope)test_random_range(&random, 0, 2);
  c->norm = (mha_norm)test_random_range(&random, 0, 2);
  c->positions_given =
      c->rope != MHA_ROPE_NONE && c->source == TEST_SELF && test_random_range(&random, 0, 3) == 0;
  generation_set_mask(c, kinds[test_random_range(&random, 0, COUNT(kinds) - 1)]);
  plan.entries = test_random_range(&random, 0, 1) ? 6 : 0;
  plan.gap = test_random_range(&random, 0, 1) * 3;
  plan.type = types[test_random_range(&random, 0, COUNT(types) - 1)];
  plan.page_tokens = pages[test_random_range(&random, 0, COUNT(pages) - 1)];
  if (test_random_range(&random, 0, 3) == 0)
    generation_set_ring(&plan, test_random_range(&random, 3, 40), 2, 110);
  return plan;
}

static void sequences_in_different_states(void **state) {
  (void)state;
  test_keep_memory();
  for (uint64_t seed = 1; seed <= (test_small() ? 12 : 120); seed++) {
    const generation_plan plan = draw_plan(seed);
    generation_open(&plan);
    finish_packed();
    generation_compare_with_whole();
    generation_close();
  }
}

/* ---- What changes no bit --------------------------------------------------------------------- */

/* A long sequence, a short one, and one that begins; then one token, 60 and 3 of them. */
static void prepare_mix(int64_t counts[3]) {
  const int64_t first[] = {260, 40, 0};
  free(generation_advance_for_bits(260, first));
  counts[0] = 1;
  counts[1] = 60;
  counts[2] = 3;
}

static generation_plan mix_plan(int64_t page_tokens, int32_t type, int threads) {
  generation_plan plan = {.c = generation_case(7), .type = type, .page_tokens = page_tokens};
  plan.c.B = 3;
  plan.c.Lq = 300;
  plan.c.threads = threads;
  plan.c.want = 0;
  return plan;
}

/* The output's bits of a mix; a token of entry `broken` may be NaN in the cache. */
static float *mix_output(const generation_plan *plan, int64_t broken) {
  int64_t counts[3];
  generation_open(plan);
  prepare_mix(counts);
  const float nan = NAN;
  for (int value = 0; broken >= 0 && value < 2; value++)
    memcpy(generation_cached_row(value, broken, 10), &nan, sizeof nan);
  generation_step s = {.queries = 60, .keys = 60, .counts = counts};
  call_packed(&s);
  float *output = step_output(&s);
  step_free(&s);
  generation_close();
  return output;
}

static void threads_change_no_bit(void **state) {
  static const int64_t pages[] = {0, 16, 64};
  static const int32_t types[] = {MHA_F32, MHA_F16};
  (void)state;
  for (size_t p = 0; p < COUNT(pages); p++)
    for (size_t t = 0; t < COUNT(types); t++) {
      float *expected = NULL;
      for (int threads = 1; threads <= 4; threads++) {
        const generation_plan plan = mix_plan(pages[p], types[t], threads % 4);
        float *output = mix_output(&plan, -1);
        if (expected)
          test_same_bits("output", (test_shape){{1, 3, 60, 7}}, output, expected);
        else
          expected = output;
        if (output != expected)
          free(output);
      }
      free(expected);
    }
}

/* NaN in a key and value of one sequence stays in that sequence. */
static void sequences_do_not_meet(void **state) {
  (void)state;
  for (int64_t page_tokens = 0; page_tokens <= 16; page_tokens += 16) {
    const generation_plan plan = mix_plan(page_tokens, MHA_F32, 2);
    float *expected = mix_output(&plan, -1);
    for (int64_t broken = 0; broken < 2; broken++) {
      float *output = mix_output(&plan, broken);
      for (int64_t b = 0; b < 3; b++)
        if (b != broken)
          test_same_bits("another sequence", (test_shape){{1, 1, 60, 7}}, output + b * 60 * 7,
                         expected + b * 60 * 7);
      assert_true(isnan(output[broken * 60 * 7]));
      free(output);
    }
    free(expected);
  }
}

/* ---- No memory ------------------------------------------------------------------------------- */

static void a_reserve_is_enough(void **state) {
  static const int64_t pages[] = {0, 16};
  static const int32_t types[] = {MHA_F32, MHA_BF16};
  (void)state;
  for (size_t k = 0; k < 4; k++) {
    const generation_plan plan = mix_plan(pages[k % 2], types[k / 2], 2);
    int64_t counts[3], n = 0;
    mha_shape shape;
    mha_error error;
    generation_open(&plan);
    MHA_INIT(&shape);
    shape.packed = shape.cached = 1;
    shape.batch = 3;
    shape.query_length = 3 * 60 + TAIL;
    shape.key_length = 300;
    shape.cache_type = plan.type;
    shape.cache_page_tokens = plan.page_tokens;
    test_expect(mha_context_reserve(run.context, run.weights, &shape, &error), MHA_OK, &error);
    const int64_t calls = run.f.allocator.calls;
    while (draw_counts(counts, &n)) {
      generation_step s = {.queries = n, .keys = n, .counts = counts};
      call_packed(&s);
      step_free(&s);
      if (run.f.allocator.calls != calls)
        test_failed("a packed call of at most %lld rows took memory", (long long)n);
    }
    generation_close();
  }
}

/* ---- What is refused ------------------------------------------------------------------------- */

typedef enum spoiled {
  LATE_START,
  FALLING_START,
  END_BEYOND,
  NEW_LENGTHS,
  QUERY_LENGTHS,
  KEY_LENGTHS,
  MASK,
  BIAS,
  WEIGHTS,
  AVERAGE,
  NO_KEY_STARTS,
  NO_QUERY_STARTS,
  KEY_STARTS_ATTEND,
  TOO_MANY,
  ENTRY_TWICE,
  ENTRY_BEYOND,
  N_SPOILED
} spoiled;

static const struct {
  mha_status status;
  const char *word;
} refusals[N_SPOILED] = {
    [LATE_START] = {MHA_ERROR_LENGTH, "rules.query_starts[0] is 1"},
    [FALLING_START] = {MHA_ERROR_LENGTH, "rules.query_starts[2] is"},
    [END_BEYOND] = {MHA_ERROR_LENGTH, "rules.query_starts ends at"},
    [NEW_LENGTHS] = {MHA_ERROR_UNSUPPORTED, "args.new_lengths"},
    [QUERY_LENGTHS] = {MHA_ERROR_UNSUPPORTED, "rules.query_lengths"},
    [KEY_LENGTHS] = {MHA_ERROR_UNSUPPORTED, "rules.key_lengths"},
    [MASK] = {MHA_ERROR_UNSUPPORTED, "rules.attend"},
    [BIAS] = {MHA_ERROR_UNSUPPORTED, "rules.bias"},
    [WEIGHTS] = {MHA_ERROR_UNSUPPORTED, "results.weights"},
    [AVERAGE] = {MHA_ERROR_UNSUPPORTED, "results.average"},
    [NO_KEY_STARTS] = {MHA_ERROR_NULL, "rules.key_starts"},
    [NO_QUERY_STARTS] = {MHA_ERROR_NULL, "rules.query_starts"},
    [KEY_STARTS_ATTEND] = {MHA_ERROR_VALUE, "rules.key_starts is given with MHA_CACHE_ATTEND"},
    [TOO_MANY] = {MHA_ERROR_LENGTH, "batch entry 1 brings 4 tokens"},
    [ENTRY_TWICE] = {MHA_ERROR_LENGTH, "cache_entries[1] is 0 a second time"},
    [ENTRY_BEYOND] = {MHA_ERROR_LENGTH, "args.batch is 3 without args.cache_entries"},
};

static void spoil(packed_call *p, spoiled what, int64_t *numbers) {
  static const uint8_t byte[1];
  static const int64_t twice[2];
  static const float number[1];
  static float sink[1];
  switch (what) {
  case LATE_START:
    p->starts[0] = 1;
    break;
  case FALLING_START:
    p->starts[1] = p->starts[2] + 1;
    break;
  case END_BEYOND:
    p->starts[2] = p->rows + 1;
    break;
  case NEW_LENGTHS:
    p->args.new_lengths = numbers;
    break;
  case QUERY_LENGTHS:
    p->rules.query_lengths = numbers;
    break;
  case KEY_LENGTHS:
    p->rules.key_lengths = numbers;
    break;
  case MASK:
    p->rules.attend.data = byte;
    break;
  case BIAS:
    p->rules.bias.data = number;
    break;
  case WEIGHTS:
    p->results.weights = sink;
    break;
  case AVERAGE:
    p->results.average = sink;
    break;
  case NO_KEY_STARTS:
    p->args.key = p->args.query;
    p->args.key_length = p->rows;
    break;
  case NO_QUERY_STARTS:
    p->rules.query_starts = NULL;
    p->rules.key_starts = p->starts;
    break;
  case KEY_STARTS_ATTEND:
    p->args.cache_mode = MHA_CACHE_ATTEND;
    p->rules.key_starts = p->starts;
    break;
  case ENTRY_TWICE:
    p->args.cache_entries = twice;
    p->args.expected_lengths = NULL;
    break;
  case ENTRY_BEYOND: /* without cache_entries there is one entry for each sequence, or none */
    p->starts[3] = p->starts[2];
    p->args.batch = 3;
    p->args.expected_lengths = NULL;
    break;
  default:
    break;
  }
}

static void what_is_refused(void **state) {
  (void)state;
  for (int what = 0; what < N_SPOILED; what++)
    for (int64_t page_tokens = 0; page_tokens <= 16; page_tokens += 16) {
      int64_t counts[] = {1, 4}, numbers[] = {1, 1};
      generation_plan plan = {.c = generation_case(3), .page_tokens = page_tokens};
      packed_call p;
      mha_error error;
      test_note("spoiled %d, pages of %lld", what, (long long)page_tokens);
      plan.c.want = 0;
      plan.c.Eo = plan.c.Eq;
      plan.capacity = 10;
      generation_open(&plan);
      free(generation_advance_for_bits(what == TOO_MANY ? 7 : 5, NULL));
      generation_step s = {.queries = 4, .keys = 4, .counts = counts};
      step_prepare(&s);
      pack_call(&s, &p);
      spoil(&p, (spoiled)what, numbers);
      memset(&error, 0xA5, sizeof error);
      float *before = test_allocate((size_t)(p.rows * 10), sizeof *before);
      memcpy(before, p.y, (size_t)(p.rows * 10) * sizeof *before);
      test_expect(mha_forward(run.context, run.weights, &p.args, &error), refusals[what].status,
                  &error);
      if (!strstr(error.message, refusals[what].word))
        test_failed("\"%s\" lacks \"%s\"", error.message, refusals[what].word);
      assert_memory_equal(before, p.y, (size_t)(p.rows * 10) * sizeof *before);
      free(before);
      for (int64_t b = 0; b < 2; b++) {
        int64_t length = -1;
        test_expect(mha_cache_length(run.cache, b, &length, &error), MHA_OK, &error);
        assert_int_equal(length, run.length[b]);
      }
      step_free(&s);
      generation_close();
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sequences_in_different_states),
      cmocka_unit_test(threads_change_no_bit),
      cmocka_unit_test(sequences_do_not_meet),
      cmocka_unit_test(a_reserve_is_enough),
      cmocka_unit_test(what_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
