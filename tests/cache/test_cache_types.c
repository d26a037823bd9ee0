/* Caches that keep keys and values as another type than float32: each row is rounded once, when it
 * comes, and what is attended to is what the cache then holds. */
#include "generation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const int32_t types[] = {MHA_F16, MHA_BF16, MHA_Q8_0};

/* A small layer whose heads the type allows. */
static generation_plan plan_of(uint64_t seed, int32_t type) {
  generation_plan plan = {.c = generation_case(seed), .type = type};
  plan.c.d = type == MHA_Q8_0 ? 32 : 6;
  plan.c.dv = type == MHA_Q8_0 ? 64 : 5;
  return plan;
}

/* ---- Every call against the judge ------------------------------------------------------------ */

static void every_mask_in_every_schedule(void **state) {
  const int64_t groups[] = {4, 2, 1};
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int kind = 0; kind < GENERATION_MASKS; kind++)
      for (int schedule = 0; schedule < GENERATION_SCHEDULES; schedule++) {
        generation_plan plan = plan_of((uint64_t)kind, types[type]);
        generation_set_mask(&plan.c, kind);
        plan.c.G = groups[(kind + schedule) % 3];
        plan.c.stage = (mha_stage)((kind + schedule) % 4);
        plan.entries = schedule % 2 ? 3 : 0;
        generation_try(&plan, (generation_schedule)schedule);
      }
}

static void positions_and_norms(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int rope = 1; rope <= 2; rope++)
      for (int norm = 0; norm <= 2; norm++)
        for (int how = 0; how < 4; how++) {
          generation_plan plan = plan_of(7, types[type]);
          plan.c.rope = (mha_rope)rope;
          plan.c.norm = (mha_norm)norm;
          plan.c.rotary = how % 2 ? 2 : 6;
          plan.c.rope_tables = how == 1;
          plan.c.query_position = how == 2 ? 1000 : how == 1 ? 3 : 0;
          plan.c.positions_given = how == 3;
          generation_try(&plan, (generation_schedule)((rope + norm + how) % GENERATION_SCHEDULES));
        }
}

static void sample_sizes(test_random *random, generation_plan *plan) {
  const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 3}, {8, 1}, {16, 2}};
  const size_t h = (size_t)test_random_range(random, 0, COUNT(heads) - 1);
  test_case *c = &plan->c;
  plan->type = types[test_random_range(random, 0, COUNT(types) - 1)];
  const int64_t unit = plan->type == MHA_Q8_0 ? 32 : 2;
  c->H = heads[h][0];
  c->G = heads[h][1];
  c->d = unit * test_random_range(random, plan->type == MHA_Q8_0 ? 1 : 2, 3);
  c->dv = unit * test_random_range(random, 1, 3) - (plan->type == MHA_Q8_0 ? 0 : 1);
  c->Eq = test_random_range(random, 1, 12);
  c->Eo = test_random_range(random, 1, 9);
}

static generation_plan sample(test_random *random, uint64_t seed) {
  generation_plan plan = {.c = {.seed = seed,
                                .B = test_random_range(random, 1, 3),
                                .Lq = test_random_range(random, 1, 60),
                                .threads = 1 + (int)test_random_range(random, 0, 7) / 6,
                                .at_front = test_random_range(random, 0, 1),
                                .out_in = test_random_range(random, 0, 1),
                                .biases = (unsigned)test_random_range(random, 0, TEST_ALL),
                                .source = (test_source)test_random_range(random, 0, TEST_SELF),
                                .accumulate = test_random_range(random, 0, 3) == 0,
                                .causal = test_random_range(random, 0, 3) > 0,
                                .window = test_random_range(random, 0, 1),
                                .left = test_random_range(random, -1, 12),
                                .right = test_random_range(random, -1, 2),
                                .has_mask = test_random_range(random, 0, 2) == 0,
                                .has_bias = test_random_range(random, 0, 2) == 0,
                                .bias_hides = test_random_range(random, 0, 1),
                                .mask_extents = TEST_FULL,
                                .bias_extents = TEST_FULL,
                                .alibi = test_random_range(random, 0, 2) == 0,
                                .sinks = test_random_range(random, 0, 2) == 0,
                                .softcap = test_random_range(random, 0, 2) ? 0.0F : 2.0F,
                                .norm = (mha_norm)test_random_range(random, 0, 2),
                                .rope = (mha_rope)test_random_range(random, 0, 2),
                                .want = (unsigned)test_random_range(random, 0, TEST_WANT_ALL),
                                .stage = (mha_stage)test_random_range(random, 0, 3)}};
  sample_sizes(random, &plan);
  plan.c.Lk = plan.c.Lq;
  plan.c.query_position = plan.c.key_position = test_random_range(random, 0, 1) * 11;
  plan.entries = test_random_range(random, 0, 1) * GENERATION_MOST_ENTRIES;
  plan.gap = test_random_range(random, 0, 1) * 3;
  return plan;
}

static void a_sample_of_full_caches(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 41);
  for (uint64_t seed = 0; seed < (test_small() ? 40 : 120); seed++) {
    generation_plan plan = sample(&random, seed);
    plan.capacity = plan.c.Lq + test_random_range(&random, 0, 1) * 5;
    generation_try(&plan,
                   (generation_schedule)test_random_range(&random, 0, GENERATION_SCHEDULES - 1));
  }
}

static void a_sample_of_rings(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 42);
  for (uint64_t seed = 0; seed < (test_small() ? 40 : 120); seed++) {
    generation_plan plan = sample(&random, seed);
    plan.c.Lq = plan.c.Lk = test_random_range(&random, 30, 55);
    plan.c.window = true;
    plan.c.left = test_random_range(&random, 0, 12);
    plan.window = plan.c.left + 1;
    plan.rollback = test_random_range(&random, 0, 1) * 2;
    plan.capacity = plan.window + plan.rollback + test_random_range(&random, 0, 6);
    generation_try(&plan,
                   (generation_schedule)test_random_range(&random, 0, GENERATION_SCHEDULES - 1));
  }
}

/* The layer's matrices are stored too. */
static void stored_matrices(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int32_t matrix = MHA_F16; matrix <= MHA_Q4_0; matrix++)
      for (int schedule = 0; schedule < GENERATION_SCHEDULES; schedule++) {
        generation_plan plan = plan_of((uint64_t)matrix, types[type]);
        plan.c.d = plan.c.dv = 32;
        plan.c.Eq = 64;
        plan.c.Eo = 32;
        plan.c.rope = MHA_ROPE_HALVES;
        plan.c.out_in = schedule % 2;
        plan.c.query_type = plan.c.value_type = (int32_t)matrix;
        plan.c.key_type = MHA_F16;
        plan.c.output_type = MHA_Q8_0;
        generation_try(&plan, (generation_schedule)schedule);
      }
}

/* Across the tiles and parts of the usual build; a ring across both. */
static void across_the_borders_of_parts(void **state) {
  const int64_t starts[] = {14, 126, 250, 506};
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int ring = 0; ring < 2; ring++)
      for (size_t at = 0; at < (test_small() ? 1 : COUNT(starts)); at++) {
        const int64_t n = 1 + (int64_t)(at + type) * 2;
        generation_plan plan = {.c = {.seed = at,
                                      .Lq = starts[at] + 3 * n + 5,
                                      .H = 6,
                                      .G = 3,
                                      .d = 32,
                                      .Eq = 12,
                                      .source = TEST_SELF,
                                      .causal = true,
                                      .want = TEST_WANT_ALL,
                                      .stage = (mha_stage)(n % 4)},
                                .type = types[type]};
        if (ring)
          generation_set_ring(&plan, 100, 0, 301);
        generation_open(&plan);
        generation_prefill(starts[at]);
        for (int call = 0; call < 3; call++)
          generation_advance(n, NULL);
        for (int call = 0; call < 5; call++)
          generation_advance(1, NULL);
        generation_close();
      }
}

/* Up to 8 heads of a group times up to 8 queries, over few keys and over many. */
static void grouped_heads_and_queries(void **state) {
  const int64_t groups[] = {1, 3, 8};
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (size_t g = 0; g < COUNT(groups); g++)
      for (int64_t n = 1; n <= 8; n++)
        for (int64_t start = 3; start <= 70; start += 67) {
          generation_plan plan = plan_of((uint64_t)n, types[type]);
          plan.c.Lq = start + 2 * n;
          plan.c.G = 2;
          plan.c.H = 2 * groups[g];
          plan.c.stage = (mha_stage)(n % 4);
          generation_open(&plan);
          free(generation_advance_for_bits(start, NULL));
          generation_advance(n, NULL);
          generation_advance(n, NULL);
          generation_close();
        }
}

static void queries_and_keys_of_different_counts(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int64_t queries = 0; queries <= 5; queries++)
      for (int64_t keys = 0; keys <= 5; keys++) {
        int64_t counts[GENERATION_MOST_ENTRIES] = {keys, keys / 2};
        generation_plan plan = plan_of(9, types[type]);
        plan.c.source = TEST_CROSS;
        plan.c.Lk = plan.c.Lq;
        plan.c.rope = MHA_ROPE_INTERLEAVED;
        generation_open(&plan);
        for (int round = 0; round < 3; round++)
          step_try((generation_step){
              .queries = queries, .keys = keys, .counts = queries % 2 ? counts : NULL});
        generation_close();
      }
}

/* One call appends, another attends. */
static void appending_and_attending_apart(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int64_t n = 1; n <= 9; n += 2)
      for (int rope = 0; rope <= 2; rope++) {
        generation_plan plan = plan_of(13, types[type]);
        plan.c.Lq = 160;
        plan.c.rope = (mha_rope)rope;
        plan.c.norm = (mha_norm)rope;
        generation_open(&plan);
        for (int round = 0; round < 3; round++) {
          generation_step grow = {
              .mode = MHA_CACHE_APPEND, .queries = round ? n : 120, .keys = round ? n : 120};
          step_prepare(&grow);
          grow.args.output = NULL;
          grow.args.rules = NULL;
          grow.args.results = NULL;
          test_expect(mha_forward(run.context, run.weights, &grow.args, NULL), MHA_OK, NULL);
          step_commit(&grow);
          step_free(&grow);
          step_try((generation_step){.mode = MHA_CACHE_ATTEND, .queries = n});
        }
        generation_close();
      }
}

/* ---- What changes no bit --------------------------------------------------------------------- */

/* Bytes of all entries of the cache's keys or values. */
static unsigned char *all_numbers(bool values, size_t *bytes) {
  mha_tensor k, v;
  test_expect(mha_cache_view(run.cache, &k, &v, NULL), MHA_OK, NULL);
  const mha_tensor *t = values ? &v : &k;
  *bytes = mha_element_bytes(t->element, t->batch * t->batch_stride);
  return (unsigned char *)(uintptr_t)t->data;
}

/* Rows behind the length hold anything. */
static void unwritten_rows_change_no_bit(void **state) {
  const int fillings[] = {0, 0xff, 0x7c, 0x7f};
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int64_t n = 1; n <= 9; n += 4) {
      float *expected = NULL;
      for (size_t fill = 0; fill < COUNT(fillings); fill++) {
        generation_plan plan = plan_of(2, types[type]);
        const int64_t counts[] = {n, n / 2};
        plan.c.Lq = 200;
        plan.c.want = 0;
        generation_open(&plan);
        for (int values = 0; values < 2; values++) {
          size_t bytes = 0;
          unsigned char *numbers = all_numbers(values, &bytes);
          memset(numbers, fillings[fill], bytes);
        }
        free(generation_advance_for_bits(135, NULL));
        float *output = generation_advance_for_bits(n, counts);
        if (expected) {
          test_same_bits("output", (test_shape){{1, 2, n, run.f.c.Eo}}, output, expected);
          free(output);
        } else
          expected = output;
        generation_close();
      }
      free(expected);
    }
}

/* A call after the first 150 tokens: what queries see of them is in `outputs`. */
static float *outputs_behind(const generation_plan *plan, int64_t n, int spoil) {
  generation_open(plan);
  for (int64_t t = 0; t < 150; t += 25)
    free(generation_advance_for_bits(25, NULL));
  if (spoil >= 0)
    for (int64_t at = 0; at < (spoil % 2 ? run.f.c.dv : run.f.c.d); at += test_block_of(plan->type))
      test_spoil_stored(generation_cached_row(spoil % 2, 0, 120), plan->type, at, spoil / 2);
  for (int64_t t = 150; t + n <= 180; t += n) {
    float *output = generation_advance_for_bits(n, NULL);
    for (int64_t b = 0; b < 2; b++)
      memcpy(run.outputs + (b * 200 + t) * run.f.c.Eo, output + b * n * run.f.c.Eo,
             (size_t)(n * run.f.c.Eo) * sizeof(float));
    free(output);
  }
  return generation_close_for_outputs();
}

/* NaN or infinity in head 0 of token 120 of entry 0: queries that a window keeps from it keep every
 * bit, and so do the other entry and the heads of the other group; the others are no numbers. */
static void broken_tokens(const generation_plan *plan, int64_t n, int spoil) {
  const test_case *c = &plan->c;
  float *clean = outputs_behind(plan, n, -1), *spoiled = outputs_behind(plan, n, spoil);
  for (int64_t b = 0; b < 2; b++)
    for (int64_t t = 150; t + n <= 180; t++)
      for (int64_t j = 0; j < c->Eo; j++) {
        const int64_t at = (b * 200 + t) * c->Eo + j;
        const bool sees = b == 0 && t < 120 + c->left + 1 && j < c->Eo / 2;
        if (!sees && !test_equal_bits(clean[at], spoiled[at]))
          test_failed("token %d of entry %d changed", (int)t, (int)b);
        if (sees && (spoil % 2 || spoil < 2) && isfinite(spoiled[at]))
          test_failed("token %d sees it and is finite", (int)t);
      }
  free(clean);
  free(spoiled);
}

static void broken_tokens_reach_those_that_see_them(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int ring = 0; ring < 2; ring++)
      for (int spoil = 0; spoil < 4; spoil++)
        for (int64_t n = 1; n <= 11; n += 5) {
          generation_plan plan = plan_of(3, types[type]);
          plan.c.Lq = 200;
          plan.c.want = 0;
          plan.c.window = true;
          plan.c.left = 39;
          plan.c.right = -1;
          plan.c.absent = TEST_O;
          plan.c.biases = TEST_ALL;
          plan.c.Eo = plan.c.H * plan.c.dv;
          plan.window = ring ? 40 : 0;
          plan.capacity = ring ? 97 : 0;
          broken_tokens(&plan, n, spoil);
        }
}

/* Prefill in chunks, then steps of n tokens. */
static float *decode(const generation_plan *plan, int64_t start, int64_t n) {
  generation_open(plan);
  generation_prefill(start);
  free(generation_advance_for_bits(n, NULL));
  float *output = generation_advance_for_bits(n, NULL);
  generation_close();
  return output;
}

static void threads_and_results_change_no_bit(void **state) {
  const int64_t start = test_small() ? 60 : 270;
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int ring = 0; ring < 2; ring++)
      for (int64_t n = 1; n <= 9; n += 8) {
        float *first = NULL;
        for (int how = 0; how < 4; how++) {
          generation_plan plan = plan_of(4, types[type]);
          plan.c.Lq = start + 60;
          plan.c.H = 8;
          plan.c.d = plan.c.dv = 64;
          plan.c.rope = MHA_ROPE_HALVES;
          plan.c.threads = 1 + how % 3;
          plan.c.want = how ? TEST_WANT_ALL : 0;
          plan.c.stage = (mha_stage)(how % 4);
          if (ring)
            generation_set_ring(&plan, start / 2, 0, start / 2 + 40);
          float *output = decode(&plan, start, n);
          if (first) {
            test_same_bits("decode", (test_shape){{1, 2, n, 7}}, output, first);
            free(output);
          } else
            first = output;
        }
        free(first);
      }
}

/* ---- Going back, branching, starting anew ---------------------------------------------------- */

/* The input of tokens 40 to 49 becomes a function of `kind`. */
static void set_tokens(int kind) {
  for (int64_t b = 0; b < 2; b++)
    for (int64_t i = 0; i < 10; i++)
      *test_at(&run.f.query, b, 40 + i, 0, 0) = kind ? 3.0F + (float)kind : 0.25F * (float)i;
  generation_renew_problem();
}

/* Tokens that were taken back leave no trace. In a ring of blocks too. */
static void truncation_then_regrowth(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int ring = 0; ring < 2; ring++)
      for (int64_t guess = 1; guess <= 5; guess += 2) {
        float *outputs[2];
        for (int guessed = 0; guessed < 2; guessed++) {
          generation_plan plan = plan_of(8, types[type]);
          plan.entries = 3;
          plan.c.Lq = 60;
          plan.c.rope = MHA_ROPE_HALVES;
          plan.c.want = 0;
          if (ring)
            generation_set_ring(&plan, 7, 5, 17);
          generation_open(&plan);
          for (int t = 0; t < 40; t += 5)
            generation_advance(5, NULL);
          for (int round = 1; guessed && round < 3; round++) {
            set_tokens(round);
            generation_advance(guess, NULL);
            generation_truncate(40);
          }
          set_tokens(0);
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

/* Entry 1 becomes entry 0, byte by byte, then both go their own way. */
static void a_copied_entry_diverges(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int ring = 0; ring < 2; ring++) {
      generation_plan plan = plan_of(10, types[type]);
      const int64_t counts[] = {1, 0};
      plan.c.Lq = 33;
      if (ring)
        generation_set_ring(&plan, 10, 2, 13);
      generation_open(&plan);
      generation_share_tokens(25);
      for (int64_t t = 0; t < 25; t++)
        generation_advance(1, counts);
      test_expect(mha_cache_copy_entry(run.cache, 0, 1, NULL), MHA_OK, NULL);
      run.length[1] = run.length[0];
      run.highest[1] = run.highest[0];
      for (int values = 0; values < 2; values++) {
        const int64_t width = run.f.c.G * (values ? run.f.c.dv : run.f.c.d);
        for (int64_t t = ring ? 25 - 13 : 0; t < 25; t++)
          assert_memory_equal(generation_cached_row(values, 0, t),
                              generation_cached_row(values, 1, t),
                              mha_element_bytes(plan.type, width));
      }
      for (int64_t t = 0; t < 8; t++)
        generation_advance(1, NULL);
      generation_close();
    }
}

static void a_reset_entry_is_a_new_one(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int ring = 0; ring < 2; ring++) {
      generation_plan plan = plan_of(12, types[type]);
      if (ring)
        generation_set_ring(&plan, 4, 0, 6);
      generation_open(&plan);
      generation_finish(GENERATION_IN_CHUNKS);
      for (int64_t b = 0; b < 2; b++) {
        test_expect(mha_cache_reset(run.cache, run.entries[b], NULL), MHA_OK, NULL);
        run.length[b] = run.highest[b] = 0;
      }
      generation_finish(GENERATION_ONE_BY_ONE);
      generation_close();
    }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void reserve(int64_t queries) {
  mha_shape shape;
  mha_error error;
  MHA_INIT(&shape);
  shape.batch = run.f.c.B;
  shape.query_length = queries;
  shape.key_length = run.plan.capacity;
  shape.cached = 1;
  shape.cache_page_tokens = generation_cache_options().page_tokens;
  shape.cache_type = (int32_t)run.plan.type;
  test_expect(mha_context_reserve(run.context, run.weights, &shape, &error), MHA_OK, &error);
}

/* After one reserve no call takes memory, whatever the mode, few rows or many. */
static void no_step_takes_memory(const generation_plan *plan, int64_t most) {
  generation_open(plan);
  reserve(most);
  const int64_t calls = run.f.allocator.calls;
  for (int64_t t = 0; t + 3 * most <= run.f.c.Lq; t += most) {
    const int64_t n = 1 + t % most;
    free(generation_advance_for_bits(n, NULL));
    generation_step grow = {.mode = MHA_CACHE_APPEND, .queries = most - n, .keys = most - n};
    step_prepare(&grow);
    grow.args.output = NULL;
    grow.args.rules = NULL;
    grow.args.results = NULL;
    test_expect(mha_forward(run.context, run.weights, &grow.args, NULL), MHA_OK, NULL);
    step_commit(&grow);
    step_free(&grow);
    for (int64_t queries = 1; queries <= most; queries += 1 + queries / 2) {
      generation_step look = {.mode = MHA_CACHE_ATTEND, .queries = at_most(queries, run.length[0])};
      step_call(&look);
      step_free(&look);
    }
    if (run.f.allocator.calls != calls)
      test_failed("a call at %d tokens took memory", (int)run.length[0]);
  }
  generation_close();
}

static void calls_after_a_reserve_take_no_memory(void **state) {
  const int64_t chunks[] = {1, 2, 8, 9, 30};
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (size_t k = 0; k < COUNT(chunks); k++)
      for (int32_t matrix = MHA_F32; matrix <= MHA_Q4_0; matrix++)
        for (int ring = 0; ring < 2; ring++) {
          generation_plan plan = plan_of(3, types[type]);
          plan.c.Lq = 5 * chunks[k] + 90;
          plan.c.Eq = plan.c.Eo = 64;
          plan.c.d = plan.c.dv = 32;
          plan.c.threads = 1 + (int)k % 3;
          plan.c.out_in = k % 2;
          plan.c.query_type = plan.c.key_type = plan.c.value_type = plan.c.output_type =
              (int32_t)matrix;
          if (ring)
            generation_set_ring(&plan, 20, 0, 60);
          no_step_takes_memory(&plan, chunks[k]);
        }
}

/* A call that cannot have its scratch stores nothing; given it, it goes on. */
static void a_call_without_memory_stores_nothing(void **state) {
  (void)state;
  for (size_t type = 0; type < COUNT(types); type++)
    for (int mode = MHA_CACHE_APPEND_ATTEND; mode <= MHA_CACHE_APPEND; mode++) {
      generation_plan plan = plan_of(3, types[type]);
      generation_step s = {.mode = (mha_cache_mode)mode, .queries = 12, .keys = 12};
      unsigned char *before[2];
      size_t bytes[2];
      mha_error error;
      generation_open(&plan);
      generation_advance(2, NULL);
      mha_context_destroy(run.context); /* one without scratch */
      test_expect(mha_context_create(&run.f.options, &run.context, &error), MHA_OK, &error);
      step_prepare(&s);
      if (mode == MHA_CACHE_APPEND) {
        s.args.results = NULL;
        s.args.rules = NULL;
      }
      for (int values = 0; values < 2; values++) {
        const unsigned char *numbers = all_numbers(values, &bytes[values]);
        before[values] = test_allocate(bytes[values], 1);
        memcpy(before[values], numbers, bytes[values]);
      }
      run.f.allocator.fail_at = run.f.allocator.calls + 1;
      test_expect(mha_forward(run.context, run.weights, &s.args, &error), MHA_ERROR_MEMORY, &error);
      for (int values = 0; values < 2; values++) {
        assert_memory_equal(all_numbers(values, &bytes[values]), before[values], bytes[values]);
        free(before[values]);
      }
      for (int64_t at = 0; at < 2 * 12 * run.f.c.Eo; at++)
        assert_true(test_equal_bits(s.y[at], s.y_before[at]));
      run.f.allocator.fail_at = 0;
      test_expect(mha_forward(run.context, run.weights, &s.args, &error), MHA_OK, &error);
      step_commit(&s);
      if (mode == MHA_CACHE_APPEND_ATTEND)
        step_judge(&s);
      step_free(&s);
      generation_advance(3, NULL);
      generation_close();
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_mask_in_every_schedule),
      cmocka_unit_test(positions_and_norms),
      cmocka_unit_test(a_sample_of_full_caches),
      cmocka_unit_test(a_sample_of_rings),
      cmocka_unit_test(stored_matrices),
      cmocka_unit_test(across_the_borders_of_parts),
      cmocka_unit_test(grouped_heads_and_queries),
      cmocka_unit_test(queries_and_keys_of_different_counts),
      cmocka_unit_test(appending_and_attending_apart),
      cmocka_unit_test(unwritten_rows_change_no_bit),
      cmocka_unit_test(broken_tokens_reach_those_that_see_them),
      cmocka_unit_test(threads_and_results_change_no_bit),
      cmocka_unit_test(truncation_then_regrowth),
      cmocka_unit_test(a_copied_entry_diverges),
      cmocka_unit_test(a_reset_entry_is_a_new_one),
      cmocka_unit_test(calls_after_a_reserve_take_no_memory),
      cmocka_unit_test(a_call_without_memory_stores_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
