/* A layer with a cache: what it refuses, before anything is written; what a ring has dropped; and
 * memory, of which no call takes any, however long the sequence. */
#include "generation.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- What is refused ------------------------------------------------------------------------- */

/* All bytes of the cache that count, its lengths, and the step's results stay as they are. */
static void expect_refused(generation_step *s, mha_status expected, const char *word) {
  const test_case *c = &run.f.c;
  float *twins[2];
  int64_t bytes[2];
  mha_error error;
  for (int values = 0; values < 2; values++) {
    int64_t n = 0;
    const float *numbers = generation_cache_numbers(values, &n);
    bytes[values] = n * 4;
    twins[values] = test_allocate((size_t)bytes[values], 1);
    memcpy(twins[values], numbers, (size_t)bytes[values]);
  }
  for (int with_error = 0; with_error < 2; with_error++)
    test_expect(mha_forward(run.context, run.weights, &s->args, with_error ? &error : NULL),
                expected, with_error ? &error : NULL);
  if (!strstr(error.message, word) || !strstr(error.message, "; rule: "))
    test_failed("the message does not name %s: \"%s\"", word, error.message);
  for (int values = 0; values < 2; values++) {
    int64_t n = 0;
    assert_memory_equal(generation_cache_numbers(values, &n), twins[values], (size_t)bytes[values]);
    free(twins[values]);
  }
  for (int64_t b = 0; b < c->B; b++) {
    int64_t length = -1; /* nobody is left inside either */
    test_expect(mha_cache_truncate(run.cache, run.entries[b], run.length[b], NULL), MHA_OK, NULL);
    test_expect(mha_cache_length(run.cache, run.entries[b], &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, run.length[b]);
  }
  for (int64_t at = 0; at < c->B * s->queries * c->Eo; at++)
    assert_true(test_equal_bits(s->y[at], s->y_before[at]));
  for (int64_t at = 0; at < c->B * s->queries * c->H; at++)
    assert_true(test_is_poison(s->lse[at]));
}

/* Each row spoils one thing of a call that brings two tokens to entries of three. */
typedef enum spoiled {
  TOO_MANY,
  BAD_ENTRY,
  NEGATIVE_ENTRY,
  ENTRY_TWICE,
  NEGATIVE_COUNT,
  LARGE_COUNT,
  QUERY_LENGTHS,
  KEY_LENGTHS,
  PACKED,
  PACKED_KEYS,
  KEY_POSITIONS,
  KEY_POSITION,
  POSITION_BELOW,
  POSITION_BEHIND,
  ATTEND_WITH_KEY_POSITIONS,
  ATTEND_WITH_KEY_POSITION,
  BAD_MODE,
  NO_CACHE_MODE,
  NO_CACHE_ENTRIES,
  NO_CACHE_COUNTS,
  NO_CACHE_EXPECTED,
  ATTEND_WITH_KEY,
  ATTEND_WITH_VALUE,
  ATTEND_WITH_LENGTH,
  VALUE_ALONE,
  MASK_COLUMNS,
  NO_OUTPUT,
  OUTPUT_IN_CACHE,
  INPUT_IN_CACHE,
  OUTPUT_OVER_COUNTS,
  OUTPUT_OVER_ENTRIES,
  OUTPUT_OVER_EXPECTED,
  UNEXPECTED_LENGTH,
  UNEXPECTED_LENGTH_ATTEND,
  TOO_MANY_ENTRIES,
  N_SPOILED
} spoiled;

typedef struct expected {
  mha_status status;
  const char *word;
} expected;

static int64_t spoiled_counts[GENERATION_MOST_ENTRIES], spoiled_entries[GENERATION_MOST_ENTRIES];
static const int64_t lengths_of_two[] = {2, 2, 2}, starts_of_two[] = {0, 1, 2};
static const int64_t zero_positions[16];
static const uint8_t all_ones[4096] = {1};

static expected spoil_entries(generation_step *s, spoiled what) {
  s->args.cache_entries = spoiled_entries;
  spoiled_entries[0] = 0;
  spoiled_entries[1] = what == BAD_ENTRY ? 3 : what == NEGATIVE_ENTRY ? -1 : 0;
  return (expected){MHA_ERROR_LENGTH, "cache_entries"};
}

static expected spoil_counts(generation_step *s, spoiled what) {
  s->args.new_lengths = spoiled_counts;
  spoiled_counts[0] = 1;
  spoiled_counts[1] = what == NEGATIVE_COUNT ? -1 : s->queries + 1;
  return (expected){MHA_ERROR_LENGTH, "new_lengths"};
}

static expected spoil_rules(generation_step *s, spoiled what) {
  switch (what) {
  case QUERY_LENGTHS:
    s->rules.query_lengths = lengths_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "query_lengths"};
  case KEY_LENGTHS:
    s->rules.key_lengths = lengths_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "key_lengths"};
  case PACKED:
    s->rules.query_starts = starts_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "query_starts"};
  case PACKED_KEYS:
    s->rules.key_starts = starts_of_two;
    return (expected){MHA_ERROR_UNSUPPORTED, "results.weights"};
  default:
    s->rules.attend = (mha_mask){all_ones, 1, 1, 1, s->columns - 1, 0, 0, 0, 0, 0};
    return (expected){MHA_ERROR_SIZE, "attend.columns"};
  }
}

static expected spoil_positions(generation_step *s, spoiled what) {
  switch (what) {
  case ATTEND_WITH_KEY_POSITIONS:
  case ATTEND_WITH_KEY_POSITION:
    s->args.cache_mode = MHA_CACHE_ATTEND;
    s->args.key_positions = what == ATTEND_WITH_KEY_POSITIONS ? zero_positions : NULL;
    s->args.key_position = what == ATTEND_WITH_KEY_POSITION ? 1 : 0;
    return (expected){MHA_ERROR_VALUE,
                      what == ATTEND_WITH_KEY_POSITIONS ? "key_positions" : "key_position is"};
  case KEY_POSITIONS:
    s->args.key_positions = zero_positions;
    return (expected){MHA_ERROR_VALUE, "key_positions"};
  case KEY_POSITION:
    s->args.key_position = 1;
    return (expected){MHA_ERROR_VALUE, "key_position"};
  case POSITION_BELOW:
    s->args.query_position = -4; /* token 3 */
    return (expected){MHA_ERROR_LENGTH, "position"};
  default:
    s->args.query_position = run.f.rope_positions - 4; /* token 4 is one behind the last */
    return (expected){MHA_ERROR_LENGTH, "position"};
  }
}

static expected spoil_mode(generation_step *s, spoiled what) {
  mha_forward_args *a = &s->args;
  if (what == BAD_MODE) {
    a->cache_mode = 3;
    return (expected){MHA_ERROR_VALUE, "cache_mode"};
  }
  if (what <= NO_CACHE_EXPECTED) {
    a->cache = NULL;
    a->cache_mode = what == NO_CACHE_MODE ? MHA_CACHE_APPEND : 0;
    a->cache_entries = what == NO_CACHE_ENTRIES ? zero_positions : NULL;
    a->new_lengths = what == NO_CACHE_COUNTS ? zero_positions : NULL;
    a->expected_lengths = what == NO_CACHE_EXPECTED ? zero_positions : NULL;
    return (expected){MHA_ERROR_NULL, "args.cache"};
  }
  a->cache_mode = what == VALUE_ALONE ? 0 : MHA_CACHE_ATTEND;
  a->key = what == ATTEND_WITH_KEY ? s->k : NULL;
  a->value = what == ATTEND_WITH_VALUE || what == VALUE_ALONE ? s->v : NULL;
  a->key_length = what == ATTEND_WITH_LENGTH ? 2 : 0;
  if (what == VALUE_ALONE)
    return (expected){MHA_ERROR_NULL, "key"};
  return (expected){MHA_ERROR_VALUE, what == ATTEND_WITH_KEY     ? "key"
                                     : what == ATTEND_WITH_VALUE ? "value"
                                                                 : "key_length"};
}

static expected spoil_arrays(generation_step *s, spoiled what) {
  int64_t n = 0;
  mha_forward_args *a = &s->args;
  switch (what) {
  case NO_OUTPUT:
    a->output = NULL;
    return (expected){MHA_ERROR_NULL, "output"};
  case OUTPUT_IN_CACHE:
    a->output = generation_cache_numbers(true, &n);
    return (expected){MHA_ERROR_OVERLAP, "cache"};
  case INPUT_IN_CACHE:
    a->query = generation_cache_numbers(false, &n);
    return (expected){MHA_ERROR_OVERLAP, "cache"};
  case OUTPUT_OVER_COUNTS:
    a->new_lengths = test_pool_bytes(&s->pool, 2048);
    memset((void *)(uintptr_t)a->new_lengths, 0, 2048);
    a->output = (float *)(uintptr_t)a->new_lengths;
    return (expected){MHA_ERROR_OVERLAP, "new_lengths"};
  case OUTPUT_OVER_ENTRIES:
    a->cache_entries = spoiled_entries;
    spoiled_entries[0] = 1;
    spoiled_entries[1] = 0;
    a->output = (float *)(void *)spoiled_entries;
    return (expected){MHA_ERROR_OVERLAP, "cache_entries"};
  case OUTPUT_OVER_EXPECTED:
    a->expected_lengths = test_pool_bytes(&s->pool, 2048);
    memset((void *)(uintptr_t)a->expected_lengths, 0, 2048);
    spoiled_entries[0] = spoiled_entries[1] = 3;
    memcpy((void *)(uintptr_t)a->expected_lengths, spoiled_entries, 2 * sizeof *spoiled_entries);
    a->output = (float *)(uintptr_t)a->expected_lengths;
    return (expected){MHA_ERROR_OVERLAP, "expected_lengths"};
  case UNEXPECTED_LENGTH:
  case UNEXPECTED_LENGTH_ATTEND: /* entry 1 has three tokens */
    a->cache_mode = what == UNEXPECTED_LENGTH ? MHA_CACHE_APPEND_ATTEND : MHA_CACHE_ATTEND;
    a->expected_lengths = spoiled_entries;
    spoiled_entries[0] = 3;
    spoiled_entries[1] = 0;
    return (expected){MHA_ERROR_LENGTH, "expected_lengths[1] is 0, but entry 1"};
  default:
    a->batch = 4;
    return (expected){MHA_ERROR_LENGTH, "batch"};
  }
}

static expected spoil(generation_step *s, spoiled what) {
  if (what == TOO_MANY)
    return (expected){MHA_ERROR_LENGTH, "capacity"};
  if (what <= ENTRY_TWICE)
    return spoil_entries(s, what);
  if (what <= LARGE_COUNT)
    return spoil_counts(s, what);
  if (what <= PACKED_KEYS || what == MASK_COLUMNS)
    return spoil_rules(s, what);
  if (what <= ATTEND_WITH_KEY_POSITION)
    return spoil_positions(s, what);
  return what <= VALUE_ALONE ? spoil_mode(s, what) : spoil_arrays(s, what);
}

/* B30 and its kin: found before anything is written. */
static void b30_calls_that_do_not_fit(void **state) {
  (void)state;
  for (int what = 0; what < N_SPOILED; what++) {
    generation_plan plan = {.c = generation_case(16), .capacity = 5};
    plan.c.Lq = 12;
    plan.c.rope = MHA_ROPE_HALVES;
    plan.c.rope_tables = true;
    plan.c.biases = 0;
    plan.c.Eo = 12;
    generation_open(&plan);
    generation_advance(3, NULL);
    const int64_t n = what == TOO_MANY ? 3 : 2;
    generation_step s = {.queries = n, .keys = n};
    step_prepare(&s);
    test_note("spoiled %d", what);
    const expected e = spoil(&s, (spoiled)what);
    expect_refused(&s, e.status, e.word);
    step_free(&s);
    generation_advance(2, NULL); /* and the cache goes on */
    generation_close();
  }
}

static void caches_of_other_sizes(void **state) {
  (void)state;
  for (int which = 0; which < 3; which++) {
    generation_plan plan = {.c = generation_case(17)};
    generation_open(&plan);
    mha_cache_options o = generation_cache_options();
    o.n_kv_heads += which == 0;
    o.head_size += which == 1;
    o.value_head_size += which == 2;
    mha_cache_destroy(run.cache);
    test_expect(mha_cache_create(&o, &run.cache, NULL), MHA_OK, NULL);
    generation_step s = {.queries = 2, .keys = 2};
    step_prepare(&s);
    expect_refused(&s, MHA_ERROR_SIZE, "cache");
    step_free(&s);
    generation_close();
  }
}

/* ---- What a ring has dropped ----------------------------------------------------------------- */

/* Calls without the window of a ring, or with a wider one: from the first token on, though nothing
 * that they need is dropped yet. */
static void expect_windows_refused(int64_t widest, mha_cache_mode mode) {
  const int64_t keys = mode == MHA_CACHE_ATTEND ? 0 : 2;
  for (int64_t left = -1; left <= 12; left += left < 0 ? widest + 2 : 1) {
    generation_step wide = {.mode = mode, .queries = 2, .keys = keys};
    step_prepare(&wide);
    wide.rules.window_left = left;
    test_note("window_left %" PRId64 ", %" PRId64 " tokens", left, run.length[0]);
    expect_refused(&wide, MHA_ERROR_VALUE, "window");
    step_free(&wide);
  }
  generation_step none = {.mode = mode, .queries = 2, .keys = keys};
  step_prepare(&none);
  none.rules.flags &= ~MHA_WINDOW;
  expect_refused(&none, MHA_ERROR_VALUE, "window");
  step_free(&none);
}

/* A ring refuses chunks that would overwrite what their first query sees, and windows wider than
 * what it holds, also where the first queries of the call see nothing at all. */
static void what_a_ring_refuses(void **state) {
  (void)state;
  generation_plan plan = {.c = generation_case(18)};
  plan.c.Lq = 60;
  generation_set_ring(&plan, 4, 2, 9);
  generation_open(&plan);
  expect_windows_refused(3, MHA_CACHE_APPEND_ATTEND);
  for (int t = 0; t < 40; t += 4)
    generation_advance(4, NULL); /* the largest: 9 - 4 - 2 + 1 */
  generation_step s = {.queries = 5, .keys = 5};
  step_prepare(&s);
  expect_refused(&s, MHA_ERROR_LENGTH, "ring");
  step_free(&s);
  expect_windows_refused(3, MHA_CACHE_APPEND_ATTEND);
  generation_advance(1, NULL);
  generation_close();
}

static void what_a_ring_refuses_attend_only(void **state) {
  const int64_t offsets[] = {-1, -20, 0, 10, 31};
  (void)state;
  generation_plan plan = {.c = generation_case(18)};
  plan.c.Lq = 60;
  generation_set_ring(&plan, 4, 2, 9);
  generation_open(&plan);
  for (int t = 0; t < 40; t += 4)
    generation_advance(4, NULL);
  for (size_t i = 0; i < COUNT(offsets); i++) {
    generation_step s = {.mode = MHA_CACHE_ATTEND, .queries = 25};
    step_prepare(&s);
    s.rules.alignment = MHA_ALIGN_OFFSET;
    s.rules.offset = offsets[i];
    test_note("offset %" PRId64, offsets[i]);
    expect_refused(&s, MHA_ERROR_LENGTH, "the ring has dropped");
    step_free(&s);
  }
  expect_windows_refused(3, MHA_CACHE_ATTEND);
  generation_close();
}

/* Behind a truncated length a ring's rows hold the tokens that were taken back, not the ones a
 * capacity before them: those are gone for good. */
static void open_truncated_ring(void) {
  generation_plan plan = {.c = generation_case(18)};
  plan.c.Lq = 60;
  plan.c.B = 1;
  generation_set_ring(&plan, 4, 5, 9);
  plan.c.stage = MHA_STAGE_SCALED;
  generation_open(&plan);
  for (int t = 0; t < 20; t++)
    generation_advance(1, NULL);
  generation_truncate(15); /* tokens 11 to 14 are there, and rows of 15 to 19 */
}

static void truncated_rings_show_no_stale_scores(void **state) {
  (void)state;
  open_truncated_ring();
  for (int t = 0; t < 4; t++) {
    generation_step s = {.queries = 1, .keys = 1};
    step_call(&s);
    step_judge(&s);
    for (int64_t h = 0; h < run.f.c.H; h++)
      for (int64_t j = 0; j < s.columns; j++)
        assert_true((s.weights[h * s.columns + j] == -INFINITY) == (j < 11));
    step_free(&s);
  }
  generation_close();
}

/* The window is that of the ring, and still the first of several queries sees what is gone. */
static void truncated_rings_refuse_stale_rows(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 4; n++) {
    open_truncated_ring();
    /* the first sees from 15 - n - 3 on */
    generation_step s = {.mode = MHA_CACHE_ATTEND, .queries = n};
    if (n == 1) {
      step_call(&s);
      step_judge(&s);
    } else {
      step_prepare(&s);
      expect_refused(&s, MHA_ERROR_LENGTH, "the ring has dropped the keys below 11");
    }
    step_free(&s);
    generation_close();
  }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void reserve(int64_t queries, int64_t capacity) {
  mha_shape shape;
  mha_error error;
  MHA_INIT(&shape);
  shape.cached = 1;
  shape.cache_page_tokens = generation_cache_options().page_tokens;
  shape.batch = run.f.c.B;
  shape.query_length = queries;
  shape.key_length = capacity;
  test_expect(mha_context_reserve(run.context, run.weights, &shape, &error), MHA_OK, &error);
}

/* Chunks of `most` tokens, then every smaller one, in a context that reserved for `most`. */
static void expect_no_memory(const generation_plan *plan, int64_t most) {
  const int64_t tokens = plan->window ? 2 * plan->capacity : plan->capacity - most;
  generation_open(plan);
  reserve(most, run.plan.capacity);
  const int64_t calls = run.f.allocator.calls;
  for (int64_t t = 0; t + most <= tokens; t += most) {
    free(generation_advance_for_bits(most, NULL));
    if (run.f.allocator.calls != calls)
      test_failed("a call of %" PRId64 " tokens at %" PRId64 " took memory", most, t);
  }
  for (int64_t n = most; n > 0; n--) {
    const int64_t length = run.length[0];
    free(generation_advance_for_bits(n, NULL));
    if (run.f.allocator.calls != calls)
      test_failed("reserved for %" PRId64 " tokens, a call of %" PRId64 " took memory", most, n);
    generation_truncate(length);
  }
  generation_close();
}

/* After a reserve for the longest chunk and the capacity no call takes memory: few queries, many,
 * and those between, of many heads, whose scores few queries hold all at once. */
static void no_step_takes_memory(void **state) {
  const int64_t capacities[] = {40, 95, 300};
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (size_t at = 0; at < COUNT(capacities); at++)
      for (int64_t most = 1; most <= 18; most = most < 9 ? 2 * most + 1 : most + 3)
        for (int64_t B = 1; B <= 3; B += 2) {
          generation_plan plan = {.c = generation_case(19)}; /* 1, 3, 7, 15 and 18 tokens */
          plan.c.B = B;
          plan.c.Lq = 2 * capacities[at] + 20;
          plan.c.H = plan.c.G = 16;
          plan.c.want = 0;
          plan.capacity = capacities[at];
          if (ring)
            generation_set_ring(&plan, 10, most, capacities[at]); /* each chunk is taken back */
          if (ring && plan.capacity - plan.window - plan.rollback + 1 < most)
            continue;
          expect_no_memory(&plan, most);
        }
}

/* Lengths at which the cut into parts changes. */
static void no_length_takes_memory(void **state) {
  const int64_t lengths[] = {15, 16, 255, 256, 257, 4096, 16383, 16384, 16385, 20000, 32768, 32769};
  (void)state;
  for (size_t i = 0; i < COUNT(lengths); i++) {
    generation_plan plan = {.c = generation_case(20), .capacity = 33000};
    plan.c.B = 1;
    plan.c.want = 0;
    generation_open(&plan);
    reserve(2, run.plan.capacity);
    const int64_t calls = run.f.allocator.calls, n = lengths[i];
    float *zeros = test_allocate((size_t)n * 2 * 4, sizeof *zeros);
    const mha_tensor k = {zeros, 1, n, 2, 4, 0, 0, 0, 0, MHA_F32, 0},
                     v = {zeros, 1, n, 2, 3, 0, 0, 0, 0, MHA_F32, 0};
    test_expect(mha_cache_append(run.cache, &k, &v, NULL, NULL, NULL), MHA_OK, NULL);
    float x[20] = {0}, y[14];
    mha_forward_args args;
    MHA_INIT(&args);
    args.cache_mode = MHA_CACHE_ATTEND;
    args.batch = 1;
    args.query = x;
    args.output = y;
    args.cache = run.cache;
    for (args.query_length = 1; args.query_length <= 2; args.query_length++) {
      test_expect(mha_forward(run.context, run.weights, &args, NULL), MHA_OK, NULL);
      if (run.f.allocator.calls != calls)
        test_failed("%d queries over %d keys took memory", (int)args.query_length, (int)n);
    }
    free(zeros);
    generation_close();
  }
}

/* ---- A very long sequence -------------------------------------------------------------------- */

enum { LONG_WINDOW = 1000, LONG_CAPACITY = 1024, LONG_WIDTH = 64 };

/* Token t of a sequence that is not kept: normal numbers from its own seed. */
static void make_token(int64_t t, float *x) {
  test_random random;
  test_random_seed(&random, (uint64_t)t);
  for (int c = 0; c < LONG_WIDTH; c++)
    x[c] = (float)test_random_uniform(&random, -1.7, 1.7);
}

/* The last LONG_WINDOW tokens up to t as a problem of their own. */
static void judge_token(int64_t t, const float *output) {
  const int64_t first = at_least(t - LONG_WINDOW + 1, 0), n = t - first + 1;
  oracle_problem p = run.p;
  oracle_result result;
  double *keys = test_allocate((size_t)(n * LONG_WIDTH), sizeof *keys);
  int64_t *positions = test_allocate((size_t)n, sizeof *positions);
  float x[LONG_WIDTH];
  for (int64_t j = 0; j < n; j++) {
    make_token(first + j, x);
    positions[j] = first + j;
    for (int c = 0; c < LONG_WIDTH; c++)
      keys[j * LONG_WIDTH + c] = (double)x[c];
  }
  p.Lq = 1;
  p.Lk = n;
  p.query = keys + (n - 1) * LONG_WIDTH;
  p.key = p.value = keys;
  p.query_positions = &t;
  p.key_positions = positions;
  p.alignment = ORACLE_BOTTOM_RIGHT;
  oracle_solve(&p, &result);
  test_note("token %" PRId64, t);
  test_compare("output", (test_shape){{1, 1, 1, LONG_WIDTH}}, output, result.output.value,
               result.output.bound);
  oracle_free(&result);
  free(keys);
  free(positions);
}

/* One token per call through a ring of 1024, with rotary positions: the memory stays the same, and
 * sampled tokens are right. MHA_TEST_LONG=1: a million tokens. */
static void a_very_long_sequence(void **state) {
  const char *wanted = getenv("MHA_TEST_LONG");
  const int64_t tokens = wanted && *wanted == '1' ? 1000000 : test_small() ? 3000 : 30000;
  float x[LONG_WIDTH], y[LONG_WIDTH];
  mha_forward_args args;
  mha_error error;
  (void)state;
  generation_plan plan = {.c = {.seed = 23,
                                .Lq = 1,
                                .H = 4,
                                .d = LONG_WIDTH / 4,
                                .biases = TEST_ALL,
                                .source = TEST_SELF,
                                .causal = true,
                                .window = true,
                                .left = LONG_WINDOW - 1,
                                .right = -1,
                                .rope = MHA_ROPE_HALVES},
                          .capacity = LONG_CAPACITY,
                          .window = LONG_WINDOW};
  generation_open(&plan);
  reserve(1, LONG_CAPACITY);
  const int64_t calls = run.f.allocator.calls;
  MHA_INIT(&args);
  args.batch = args.query_length = 1;
  args.query = x;
  args.output = y;
  args.rules = &run.f.rules;
  args.cache = run.cache;
  for (int64_t t = 0; t < tokens; t++) {
    make_token(t, x);
    test_expect(mha_forward(run.context, run.weights, &args, &error), MHA_OK, &error);
    if (t < 20 || (t > 990 && t < 1050 && t % 12 == 0) || t % (tokens / 10) == 0 || t == tokens - 1)
      judge_token(t, y);
  }
  assert_int_equal(run.f.allocator.calls, calls);
  generation_close();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(b30_calls_that_do_not_fit),
      cmocka_unit_test(caches_of_other_sizes),
      cmocka_unit_test(what_a_ring_refuses),
      cmocka_unit_test(what_a_ring_refuses_attend_only),
      cmocka_unit_test(truncated_rings_show_no_stale_scores),
      cmocka_unit_test(truncated_rings_refuse_stale_rows),
      cmocka_unit_test(no_step_takes_memory),
      cmocka_unit_test(no_length_takes_memory),
      cmocka_unit_test(a_very_long_sequence),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
