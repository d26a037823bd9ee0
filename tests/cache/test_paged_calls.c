/* Layer calls over a cache in pages: what changes no bit of them, and that a call which fails, be
 * it for want of pages, leaves everything as it was. */
#include "generation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- What changes no bit --------------------------------------------------------------------- */

static generation_plan plan_of(int64_t page_tokens, int32_t type) {
  generation_plan plan = {
      .c = generation_case(11), .page_tokens = page_tokens, .type = type, .entries = 6};
  plan.c.Lq = 700;
  plan.c.want = 0;
  if (type == MHA_Q8_0)
    plan.c.d = plan.c.dv = 32;
  return plan;
}

static void append_anything(int64_t entry, int64_t n) {
  const test_case *c = &run.f.c;
  const int64_t size = c->d > c->dv ? c->d : c->dv;
  float *rows = test_allocate((size_t)(n * c->G * size), sizeof *rows);
  const mha_tensor k = {rows, 1, n, c->G, c->d, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor v = {rows, 1, n, c->G, c->dv, 0, 0, 0, 0, MHA_F32, 0};
  mha_error error;
  for (int64_t i = 0; i < n * c->G * size; i++)
    rows[i] = NAN; /* nobody may read it */
  test_expect(mha_cache_append(run.cache, &k, &v, &entry, NULL, &error), MHA_OK, &error);
  free(rows);
}

/* Other sequences come and go, so that free pages are in disorder and full of NaN. */
static void disturb_pool(void) {
  for (int64_t round = 0; round < 3; round++) {
    for (int64_t entry = 0; entry < 4; entry++)
      append_anything(entry, 40 + 23 * entry + 7 * round);
    for (int64_t entry = 3; entry >= 0; entry -= 2)
      test_expect(mha_cache_reset(run.cache, entry, NULL), MHA_OK, NULL);
  }
}

/* A long input, then some tokens: of all calls the outputs. */
static float *generate(const generation_plan *plan, bool disturbed) {
  const int64_t counts[] = {9, 4};
  generation_open(plan);
  if (disturbed)
    disturb_pool();
  float *first = generation_advance_for_bits(530, NULL);
  float *second = generation_advance_for_bits(9, counts);
  float *third = generation_advance_for_bits(1, NULL);
  const size_t row = (size_t)run.f.c.Eo;
  float *all = test_allocate(2 * 540 * row, sizeof *all);
  memcpy(all, first, 2 * 530 * row * sizeof *all);
  memcpy(all + 2 * 530 * row, second, 2 * 9 * row * sizeof *all);
  memcpy(all + 2 * 539 * row, third, 2 * row * sizeof *all);
  free(first);
  free(second);
  free(third);
  generation_close();
  return all;
}

static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16, MHA_Q8_0};

/* Threads do not, nor where in the memory pages lie; and without pages it is the same within the
 * bounds that the judge of other tests has. */
static void places_and_threads_change_no_bit(void **state) {
  static const int64_t pages[] = {16, 64, 512, 1024};
  (void)state;
  for (size_t t = 0; t < COUNT(types); t++)
    for (size_t p = 0; p < COUNT(pages); p++) {
      generation_plan plan = plan_of(pages[p], types[t]);
      const test_shape shape = {{1, 1, 2 * 540, 7}};
      plan.n_pages = 400;
      float *expected = generate(&plan, false);
      for (int threads = 2; threads <= 3; threads++) {
        plan.c.threads = threads;
        float *output = generate(&plan, threads == 3);
        test_note("type %d, pages of %lld", types[t], (long long)pages[p]);
        test_same_bits("output", shape, output, expected);
        free(output);
      }
      free(expected);
    }
}

/* A beginning that is shared gives the same bits as one of its own. */
static void shared_pages_change_no_bit(void **state) {
  (void)state;
  for (size_t t = 0; t < COUNT(types); t++) {
    float *outputs[2];
    for (int shared = 0; shared < 2; shared++) {
      const generation_plan plan = plan_of(16, types[t]);
      generation_open(&plan);
      generation_share_tokens(100);
      for (int64_t at = 0; at < 100; at += 25) {
        const int64_t counts[] = {25, shared ? 0 : 25};
        free(generation_advance_for_bits(25, counts));
      }
      if (shared) {
        test_expect(mha_cache_copy_entry(run.cache, run.entries[0], run.entries[1], NULL), MHA_OK,
                    NULL);
        run.length[1] = run.length[0];
      }
      outputs[shared] = generation_advance_for_bits(30, NULL);
      generation_close();
    }
    test_same_bits("output", (test_shape){{1, 2, 30, 7}}, outputs[1], outputs[0]);
    free(outputs[0]);
    free(outputs[1]);
  }
}

/* ---- As it was ------------------------------------------------------------------------------- */

enum { TOKENS = 20 };

/* Who has which page, and what is in the rows. */
typedef struct snapshot {
  int64_t n_free, rows[2][TOKENS];
  unsigned char numbers[2][TOKENS][2][1024];
} snapshot;

static void take_snapshot(snapshot *s) {
  const test_case *c = &run.f.c;
  memset(s, 0, sizeof *s);
  test_expect(mha_cache_page_count(run.cache, 0, NULL, NULL, NULL, &s->n_free, NULL), MHA_OK, NULL);
  for (int b = 0; b < 2; b++) {
    int64_t length = -1;
    test_expect(mha_cache_length(run.cache, run.entries[b], &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, TOKENS);
    for (int64_t t = 0; t < TOKENS; t++) {
      test_expect(mha_cache_row(run.cache, run.entries[b], t, &s->rows[b][t], NULL), MHA_OK, NULL);
      for (int value = 0; value < 2; value++)
        memcpy(s->numbers[b][t][value], generation_cached_row(value, b, t),
               mha_element_bytes(run.plan.type, c->G * (value ? c->dv : c->d)));
    }
  }
}

typedef enum failure { NO_PAGES, NO_MEMORY, BAD_WINDOW, OVERLAP, N_FAILURES } failure;

typedef struct kind {
  mha_cache_mode mode;
  int64_t rows, counts[2]; /* counts[0] < 0: all */
  int32_t type;
  bool packed, shared; /* entry 1 shares the pages of entry 0 */
} kind;

static const kind kinds[] = {
    {MHA_CACHE_APPEND_ATTEND, 40, {-1, -1}, MHA_F32, false, false},
    {MHA_CACHE_APPEND_ATTEND, 40, {13, 40}, MHA_F32, false, false},
    {MHA_CACHE_APPEND_ATTEND, 13, {-1, -1}, MHA_F32, false, true},
    {MHA_CACHE_APPEND_ATTEND, 1, {-1, -1}, MHA_F32, false, true},
    {MHA_CACHE_APPEND, 40, {-1, -1}, MHA_F32, false, false},
    {MHA_CACHE_APPEND, 40, {40, 13}, MHA_F16, false, false},
    {MHA_CACHE_APPEND_ATTEND, 40, {-1, -1}, MHA_Q8_0, false, false},
    {MHA_CACHE_APPEND_ATTEND, 40, {40, 13}, MHA_F32, true, false},
    {MHA_CACHE_APPEND_ATTEND, 13, {1, 13}, MHA_BF16, true, true},
    {MHA_CACHE_APPEND, 40, {13, 40}, MHA_F32, true, true},
};

static void open_kind(const kind *k, failure why) {
  generation_plan plan = plan_of(16, k->type);
  plan.c.Lq = 80;
  plan.n_pages = why == NO_PAGES ? (k->shared ? 3 : 5) : 12;
  generation_open(&plan);
  generation_share_tokens(TOKENS);
  const int64_t counts[] = {TOKENS, k->shared ? 0 : TOKENS};
  free(generation_advance_for_bits(TOKENS, counts));
  if (k->shared) {
    test_expect(mha_cache_copy_entry(run.cache, run.entries[0], run.entries[1], NULL), MHA_OK,
                NULL);
    run.length[1] = TOKENS;
  }
}

/* The call as packed rows: the inputs are random either way. */
static void pack(generation_step *s, int64_t starts[3]) {
  starts[0] = 0;
  starts[1] = s->counts[0];
  starts[2] = s->counts[0] + s->counts[1];
  for (int64_t i = 0; i < 2 * s->queries * run.f.c.Eq; i++)
    ((float *)(uintptr_t)s->x)[i] = 0.25F;
  s->args.query_length = 2 * s->queries;
  s->args.new_lengths = NULL;
  s->rules.query_starts = starts;
}

static void expect_failure(generation_step *s, failure why) {
  static const mha_status expected[] = {MHA_ERROR_LENGTH, MHA_ERROR_MEMORY, MHA_ERROR_VALUE,
                                        MHA_ERROR_OVERLAP};
  mha_error error;
  if (why == NO_MEMORY)
    run.f.allocator.fail_at = run.f.allocator.calls + 1;
  if (why == BAD_WINDOW) {
    s->rules.flags |= MHA_WINDOW;
    s->rules.window_left = -2;
  }
  if (why == OVERLAP) { /* new keys from where they would go, or the output there */
    mha_tensor k, v;
    test_expect(mha_cache_view(run.cache, &k, &v, NULL), MHA_OK, NULL);
    s->args.query = k.data;
  }
  test_expect(mha_forward(run.context, run.weights, &s->args, &error), expected[why], &error);
  run.f.allocator.fail_at = 0;
  if (why == NO_PAGES && (!strstr(error.message, "the call wants ") ||
                          !strstr(error.message, " pages of the cache and 1 are free; rule: ")))
    test_failed("\"%s\" lacks the figures", error.message);
}

static void failed_calls_leave_all_as_it_was(void **state) {
  static snapshot before, after;
  (void)state;
  for (size_t i = 0; i < COUNT(kinds); i++)
    for (int why = 0; why < N_FAILURES; why++) {
      const kind *k = &kinds[i];
      int64_t starts[3];
      if (k->mode == MHA_CACHE_APPEND && why == BAD_WINDOW)
        continue; /* rules do not matter there */
      open_kind(k, (failure)why);
      test_note("kind %zu, failure %d", i, why);
      take_snapshot(&before);
      assert_true(why != NO_PAGES || before.n_free == 1);
      if (why == NO_MEMORY) { /* a context without scratch */
        mha_context_destroy(run.context);
        test_expect(mha_context_create(&run.f.options, &run.context, NULL), MHA_OK, NULL);
      }
      generation_step s = {.mode = k->mode,
                           .queries = k->rows,
                           .keys = k->rows,
                           .counts = k->counts[0] < 0 ? NULL : k->counts};
      step_prepare(&s);
      if (k->packed)
        pack(&s, starts);
      if (k->mode == MHA_CACHE_APPEND)
        s.args.results = NULL;
      expect_failure(&s, (failure)why);
      take_snapshot(&after);
      assert_memory_equal(&before, &after, sizeof before);
      for (int64_t at = 0; at < 2 * k->rows * run.f.c.Eo; at++)
        assert_true(test_equal_bits(s.y[at], s.y_before[at]));
      step_free(&s);
      if (why != NO_PAGES && !k->shared) /* it works as if nothing had been */
        generation_advance(k->rows, k->counts[0] < 0 ? NULL : k->counts);
      generation_close();
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(places_and_threads_change_no_bit),
      cmocka_unit_test(shared_pages_change_no_bit),
      cmocka_unit_test(failed_calls_leave_all_as_it_was),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
