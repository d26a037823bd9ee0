/* A layer with a cache: what changes no bit of a call, such as rows that nobody sees, threads,
 * results that are asked for, and tokens that were taken back. */
#include "generation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- What changes no bit --------------------------------------------------------------------- */

/* B17: rows behind the length hold anything. */
static void b17_unwritten_rows_change_no_bit(void **state) {
  const float fillings[] = {0.0F, 1e30F, NAN, INFINITY, -INFINITY};
  (void)state;
  for (int64_t n = 1; n <= 9; n += 4) {
    float *expected = NULL;
    for (size_t fill = 0; fill < COUNT(fillings); fill++) {
      generation_plan plan = {.c = generation_case(2)};
      const int64_t counts[] = {n, n / 2};
      plan.c.Lq = 400;
      plan.c.want = 0;
      generation_open(&plan);
      for (int values = 0; values < 2; values++) {
        int64_t n_numbers = 0;
        float *numbers = generation_cache_numbers(values, &n_numbers);
        for (int64_t at = 0; at < n_numbers; at++)
          numbers[at] = fillings[fill];
      }
      free(generation_advance_for_bits(261, NULL));
      float *output = generation_advance_for_bits(n, counts);
      if (expected)
        test_same_bits("output", (test_shape){{1, 2, n, run.f.c.Eo}}, output, expected);
      else
        expected = output;
      if (output != expected)
        free(output);
      generation_close();
    }
    free(expected);
  }
}

/* Puts a number into the row of keys or values that a token has in the cache. */
static void spoil_token(int64_t token, bool value, float number) {
  memcpy(generation_cached_row(value, 0, token), &number, sizeof number); /* head 0, element 0 */
}

/* NaN and infinity in a key or value: queries that a window keeps from it keep every bit, those
 * that see it are no numbers (an infinite value may be NaN or inf), and other entries do not know.
 */
static void broken_tokens_reach_those_that_see_them(void **state) {
  const float bad[] = {NAN, INFINITY, -INFINITY};
  enum { WINDOW = 40, TOKENS = 300, TOKEN = 270 };
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int value = 0; value < 2; value++)
      for (size_t which = 0; which < COUNT(bad); which++)
        for (int64_t n = 1; n <= 12; n += 5) {
          float *outputs[2];
          for (int spoiled = 0; spoiled < 2; spoiled++) {
            generation_plan plan = {.c = generation_case(3)};
            plan.c.Lq = 400;
            plan.c.want = 0;
            plan.c.window = true;
            plan.c.left = WINDOW - 1;
            plan.c.right = -1;
            plan.c.absent = TEST_O;
            plan.c.Eo = 12;
            plan.window = ring ? WINDOW : 0;
            plan.capacity = ring ? 97 : 0;
            generation_open(&plan);
            for (int64_t t = 0; t < TOKENS; t += 50)
              free(generation_advance_for_bits(50, NULL));
            if (spoiled)
              spoil_token(TOKEN, value, bad[which]);
            for (int64_t t = TOKENS; t + n <= 340; t += n) {
              float *output = generation_advance_for_bits(n, NULL);
              for (int64_t b = 0; b < 2; b++)
                memcpy(run.outputs + (b * 400 + t) * 12, output + b * n * 12,
                       (size_t)n * 12 * sizeof(float));
              free(output);
            }
            outputs[spoiled] = generation_close_for_outputs();
          }
          for (int64_t b = 0; b < 2; b++)
            for (int64_t t = TOKENS; t < 340; t++)
              for (int64_t c = 0; c < 12; c++) {
                const int64_t at = (b * 400 + t) * 12 + c;
                /* key head 0 serves the first two of four heads; the output is their concat */
                const bool sees = b == 0 && t < TOKEN + WINDOW && c < 6;
                if (!sees)
                  assert_true(test_equal_bits(outputs[0][at], outputs[1][at]));
                else if (isnan(bad[which]) || (value && c % 3 == 0))
                  assert_true(isfinite(outputs[1][at]) == 0);
              }
          free(outputs[0]);
          free(outputs[1]);
        }
}

/* Prefill, decode and the bits of both, with one of several settings. */
typedef struct bits {
  float *prefill, *decode[6];
} bits;

static bits take_bits(const generation_plan *plan, int64_t start, int64_t n) {
  bits b = {NULL, {NULL}};
  generation_open(plan);
  for (int64_t left = start; left > 0; left -= at_most(left, generation_largest_chunk())) {
    free(b.prefill);
    b.prefill = generation_advance_for_bits(at_most(left, generation_largest_chunk()), NULL);
  }
  for (size_t i = 0; i < COUNT(b.decode); i++)
    b.decode[i] = generation_advance_for_bits(n, NULL);
  generation_close();
  return b;
}

static void free_bits(bits *b) {
  free(b->prefill);
  for (size_t i = 0; i < COUNT(b->decode); i++)
    free(b->decode[i]);
}

static void same_decode(const bits *a, const bits *b, int64_t B, int64_t n, int64_t Eo) {
  for (size_t i = 0; i < COUNT(a->decode); i++)
    test_same_bits("decode", (test_shape){{1, B, n, Eo}}, a->decode[i], b->decode[i]);
}

/* Runs the plan with one thread and nothing asked for, then with others; `variant` counts on. */
static void try_threads(generation_plan plan, int64_t start, int64_t n, int variant) {
  const int threads[] = {1, 2, 3, 8};
  plan.c.want = 0;
  plan.c.threads = 1;
  bits first = take_bits(&plan, start, n);
  for (int i = 0; i < 2; i++) { /* all four, over two calls of this function */
    plan.c.threads = threads[(2 * variant + i) % 4];
    plan.c.want = i ? TEST_WANT_ALL : TEST_WANT_AVERAGE;
    plan.c.stage = (mha_stage)((variant + i) % 4);
    bits b = take_bits(&plan, start, n);
    same_decode(&first, &b, plan.c.B, n, plan.c.Eo);
    free_bits(&b);
  }
  free_bits(&first);
}

static void threads_and_results_change_no_bit(void **state) {
  const int64_t start = test_small() ? 60 : 600;
  int variant = 0;
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int64_t n = 1; n <= 9; n += 4)
      for (int kind = (int)n / 4; kind < GENERATION_MASKS; kind += 4) {
        generation_plan plan = {.c = generation_case(4)};
        generation_set_mask(&plan.c, kind);
        plan.c.Lq = start + 60;
        plan.c.H = 8;
        plan.c.d = 16;
        plan.c.rope = MHA_ROPE_HALVES;
        plan.c.has_mask = plan.c.has_bias = false; /* they grow with the square of the length */
        if (ring) {
          plan.c.window = true;
          plan.c.left = test_small() ? 28 : 280;
          plan.window = plan.c.left + 1;
          plan.capacity = plan.window + (test_small() ? 9 : 52);
        }
        try_threads(plan, start, n, variant++);
      }
}

static void backwards(void *user, int64_t n, mha_task *task, void *argument) {
  int64_t *calls = user;
  ++*calls;
  for (int64_t i = n - 1; i >= 0; i--)
    task(argument, i);
}

static void a_caller_s_loop_changes_no_bit(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 9; n += 8) {
    bits both[2];
    int64_t calls = 0;
    for (int own = 0; own < 2; own++) {
      generation_plan plan = {.c = generation_case(5)};
      plan.c.Lq = 700;
      plan.c.H = 8;
      plan.c.d = 16;
      plan.c.threads = 3;
      plan.c.want = 0;
      generation_open(&plan);
      if (own) {
        mha_context_destroy(run.context);
        run.f.options.parallel_for = backwards;
        run.f.options.parallel_user = &calls;
        test_expect(mha_context_create(&run.f.options, &run.context, NULL), MHA_OK, NULL);
      }
      both[own].prefill = generation_advance_for_bits(600, NULL);
      for (size_t i = 0; i < COUNT(both[own].decode); i++)
        both[own].decode[i] = generation_advance_for_bits(n, NULL);
      generation_close();
    }
    assert_true(calls > 0 || test_blas_is_serial());
    same_decode(&both[0], &both[1], 2, n, 7);
    free_bits(&both[0]);
    free_bits(&both[1]);
  }
}

/* Attending again to the same tokens, nothing appended, gives the same bits. */
static void the_same_call_twice(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 9; n += 4) {
    float *outputs[2];
    generation_plan plan = {.c = generation_case(6)};
    plan.c.Lq = 300;
    plan.c.want = 0;
    generation_open(&plan);
    free(generation_advance_for_bits(300, NULL));
    for (int round = 0; round < 2; round++) {
      generation_step s = {.mode = MHA_CACHE_ATTEND, .queries = n};
      step_call(&s);
      step_judge(&s);
      outputs[round] = step_output(&s);
      step_free(&s);
    }
    test_same_bits("output", (test_shape){{1, 2, n, 7}}, outputs[0], outputs[1]);
    free(outputs[0]);
    free(outputs[1]);
    generation_close();
  }
}

/* ---- Going back, branching, starting anew ---------------------------------------------------- */

/* Tokens that were taken back leave no trace: the bits of a run that never had them. */
static void truncation_then_regrowth(void **state) {
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int64_t guess = 1; guess <= 5; guess++) {
      float *outputs[2];
      for (int guessed = 0; guessed < 2; guessed++) {
        generation_plan plan = {.c = generation_case(8), .entries = 3};
        plan.c.Lq = 60;
        plan.c.rope = MHA_ROPE_HALVES;
        plan.c.want = 0;
        if (ring)
          generation_set_ring(&plan, 7, 5, 17);
        generation_open(&plan);
        for (int t = 0; t < 40; t += 5)
          generation_advance(5, NULL);
        for (int round = 0; guessed && round < 3; round++) {
          for (int64_t b = 0; b < 2; b++) /* other numbers than those that follow */
            for (int64_t i = 0; i < 10; i++)
              *test_at(&run.f.query, b, 40 + i, 0, 0) += 3.0F;
          generation_renew_problem();
          generation_advance(guess, NULL);
          generation_truncate(40);
          for (int64_t b = 0; b < 2; b++)
            for (int64_t i = 0; i < 10; i++)
              *test_at(&run.f.query, b, 40 + i, 0, 0) = 0.25F * (float)i;
          generation_renew_problem();
        }
        for (int64_t b = 0; b < 2; b++)
          for (int64_t i = 0; i < 10; i++)
            *test_at(&run.f.query, b, 40 + i, 0, 0) = 0.25F * (float)i;
        generation_renew_problem();
        for (int t = 0; t < 5; t++)
          generation_advance(2, NULL);
        outputs[guessed] = generation_close_for_outputs();
      }
      for (int64_t b = 0; b < 2; b++)
        test_same_bits("regrown", (test_shape){{1, 1, 10, 7}}, outputs[1] + (b * 60 + 40) * 7,
                       outputs[0] + (b * 60 + 40) * 7);
      free(outputs[0]);
      free(outputs[1]);
    }
}

/* Entry 1 becomes entry 0, then both go their own way: the bits of two separate runs. In the
 * fixture both entries have the same first tokens. */
static void a_copied_entry_diverges(void **state) {
  enum { SHARED = 25, MORE = 8 };
  (void)state;
  for (int ring = 0; ring < 2; ring++) {
    float *outputs[2];
    for (int copied = 0; copied < 2; copied++) {
      generation_plan plan = {.c = generation_case(10)};
      plan.c.Lq = SHARED + MORE;
      plan.c.want = 0;
      if (ring)
        generation_set_ring(&plan, 10, 2, 13);
      generation_open(&plan);
      generation_share_tokens(SHARED);
      for (int64_t t = 0; t < SHARED; t++) {
        const int64_t counts[] = {1, copied ? 0 : 1};
        generation_advance(1, counts);
      }
      if (copied) {
        test_expect(mha_cache_copy_entry(run.cache, 0, 1, NULL), MHA_OK, NULL);
        run.length[1] = run.length[0];
        run.highest[1] = run.highest[0];
      }
      for (int64_t t = 0; t < MORE; t++)
        generation_advance(1, NULL);
      outputs[copied] = generation_close_for_outputs();
    }
    for (int64_t b = 0; b < 2; b++)
      test_same_bits("after the copy", (test_shape){{1, 1, MORE, 7}},
                     outputs[1] + (b * (SHARED + MORE) + SHARED) * 7,
                     outputs[0] + (b * (SHARED + MORE) + SHARED) * 7);
    free(outputs[0]);
    free(outputs[1]);
  }
}

static void a_reset_entry_is_a_new_one(void **state) {
  (void)state;
  for (int ring = 0; ring < 2; ring++) {
    generation_plan plan = {.c = generation_case(12)};
    if (ring)
      generation_set_ring(&plan, 4, 0, 6);
    generation_open(&plan);
    generation_finish(GENERATION_IN_CHUNKS);
    float *first = run.outputs;
    run.outputs = test_allocate((size_t)(2 * 21 * 7), sizeof *run.outputs);
    for (int64_t b = 0; b < 2; b++) {
      test_expect(mha_cache_reset(run.cache, run.entries[b], NULL), MHA_OK, NULL);
      run.length[b] = run.highest[b] = 0;
    }
    generation_finish(GENERATION_ONE_BY_ONE);
    generation_compare_with_whole();
    free(first);
    generation_close();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(b17_unwritten_rows_change_no_bit),
      cmocka_unit_test(broken_tokens_reach_those_that_see_them),
      cmocka_unit_test(threads_and_results_change_no_bit),
      cmocka_unit_test(a_caller_s_loop_changes_no_bit),
      cmocka_unit_test(the_same_call_twice),
      cmocka_unit_test(truncation_then_regrowth),
      cmocka_unit_test(a_copied_entry_diverges),
      cmocka_unit_test(a_reset_entry_is_a_new_one),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
