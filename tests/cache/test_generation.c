/* A layer with a cache: the same tokens at once, in chunks or one by one, in full caches and rings,
 * appended and attended to in one call or apart; each call judged by itself. */
#include "generation.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- At once, in chunks, one by one ---------------------------------------------------------- */

static void every_mask_in_every_schedule(void **state) {
  const int64_t groups[] = {4, 2, 1};
  (void)state;
  for (int kind = 0; kind < GENERATION_MASKS; kind++)
    for (size_t g = 0; g < COUNT(groups); g++)
      for (int schedule = 0; schedule < GENERATION_SCHEDULES; schedule++) {
        generation_plan plan = {.c = generation_case((uint64_t)kind)};
        generation_set_mask(&plan.c, kind);
        plan.c.G = groups[g];
        plan.c.stage = (mha_stage)((kind + schedule) % 4);
        plan.entries = schedule % 2 ? 3 : 0;
        generation_try(&plan, (generation_schedule)schedule);
      }
}

/* B37: keys are cached as they were turned; chunks, offsets and tables do not matter. */
static void b37_cached_keys_and_positions(void **state) {
  (void)state;
  for (int rope = 1; rope <= 2; rope++)
    for (int norm = 0; norm <= 2; norm++)
      for (int how = 0; how < 4; how++)
        for (int schedule = 0; schedule < GENERATION_SCHEDULES; schedule++) {
          generation_plan plan = {.c = generation_case(7)};
          plan.c.rope = (mha_rope)rope;
          plan.c.norm = (mha_norm)norm;
          plan.c.rotary = how % 2 ? 2 : 4;
          plan.c.rope_tables = how == 1;
          plan.c.query_position = how == 2 ? 1000 : how == 1 ? 3 : 0;
          plan.c.positions_given = how == 3;
          generation_try(&plan, (generation_schedule)schedule);
        }
}

static test_case sample_case(test_random *random, uint64_t seed) {
  const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 3}, {8, 1}};
  const size_t h = (size_t)test_random_range(random, 0, COUNT(heads) - 1);
  test_case c = {.seed = seed,
                 .B = test_random_range(random, 1, 3),
                 .Lq = test_random_range(random, 1, 60),
                 .H = heads[h][0],
                 .G = heads[h][1],
                 .d = 2 * test_random_range(random, 1, 6),
                 .dv = test_random_range(random, 1, 9),
                 .Eq = 8,
                 .Eo = test_random_range(random, 1, 9),
                 .threads = test_random_range(random, 0, 7) ? 1 : 2,
                 .at_front = test_random_range(random, 0, 1),
                 .out_in = test_random_range(random, 0, 1),
                 .biases = (unsigned)test_random_range(random, 0, TEST_ALL),
                 .source = (test_source)test_random_range(random, TEST_CROSS, TEST_SELF),
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
                 .scale_given = test_random_range(random, 0, 2) == 0,
                 .scale = (float)test_random_uniform(random, -0.5, 0.5),
                 .norm = (mha_norm)test_random_range(random, 0, 2),
                 .rope = (mha_rope)test_random_range(random, 0, 2),
                 .want = (unsigned)test_random_range(random, 0, TEST_WANT_ALL),
                 .stage = (mha_stage)test_random_range(random, 0, 3)};
  c.Lk = c.Lq;
  c.query_position = c.key_position = test_random_range(random, 0, 1) * 11;
  c.rope_tables = test_random_range(random, 0, 1);
  return c;
}

static void a_sample_of_full_caches(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 21);
  for (uint64_t seed = 0; seed < (test_small() ? 40 : 120); seed++) {
    generation_plan plan = {.c = sample_case(&random, seed)};
    plan.capacity = plan.c.Lq + test_random_range(&random, 0, 1) * 5;
    plan.entries = test_random_range(&random, 0, 1) * GENERATION_MOST_ENTRIES;
    plan.gap = test_random_range(&random, 0, 1) * 3;
    generation_try(&plan,
                   (generation_schedule)test_random_range(&random, 0, GENERATION_SCHEDULES - 1));
  }
}

/* Windows that a ring holds, at the least capacities and odd ones; the sequence is many times as
 * long as the capacity. */
static void a_sample_of_rings(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 22);
  for (uint64_t seed = 0; seed < (test_small() ? 40 : 120); seed++) {
    generation_plan plan = {.c = sample_case(&random, seed)};
    plan.c.Lq = plan.c.Lk = test_random_range(&random, 30, 55);
    plan.c.window = true;
    plan.c.left = test_random_range(&random, 0, 12);
    plan.window = plan.c.left + 1;
    plan.rollback = test_random_range(&random, 0, 1) * 2;
    plan.capacity = plan.window + plan.rollback + test_random_range(&random, 0, 6);
    plan.entries = test_random_range(&random, 0, 1) * GENERATION_MOST_ENTRIES;
    generation_try(&plan,
                   (generation_schedule)test_random_range(&random, 0, GENERATION_SCHEDULES - 1));
  }
}

/* Long enough for the parts and tiles of the usual build: a prefill, then single tokens and small
 * chunks across 256 and 512 keys, and a ring of 300 across both. */
static void across_the_borders_of_parts(void **state) {
  const int64_t starts[] = {14, 126, 250, 506};
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (size_t at = 0; at < (test_small() ? 1 : COUNT(starts)); at++)
      for (int64_t n = 1; n <= 9; n += at % 2 ? 4 : 2) {
        generation_plan plan = {.c = {.seed = at,
                                      .Lq = starts[at] + 3 * n + 5,
                                      .H = 6,
                                      .G = 3,
                                      .d = 8,
                                      .Eq = 12,
                                      .source = TEST_SELF,
                                      .causal = true,
                                      .rope = MHA_ROPE_HALVES,
                                      .want = TEST_WANT_ALL,
                                      .stage = (mha_stage)(n % 4)}};
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

/* Fewer or more queries than new keys: query i sits at its own token, the i-th new one. */
static void queries_and_keys_of_different_counts(void **state) {
  (void)state;
  for (int64_t queries = 0; queries <= 5; queries++)
    for (int64_t keys = 0; keys <= 5; keys++)
      for (int counted = 0; counted < 2; counted++) {
        int64_t counts[GENERATION_MOST_ENTRIES] = {keys, keys / 2};
        generation_plan plan = {.c = generation_case(9)};
        plan.c.source = TEST_CROSS;
        plan.c.Lk = plan.c.Lq;
        plan.c.rope = MHA_ROPE_INTERLEAVED;
        generation_open(&plan);
        for (int round = 0; round < 3; round++)
          step_try((generation_step){
              .queries = queries, .keys = keys, .counts = counted ? counts : NULL});
        generation_close();
      }
}

/* B16: the newest key obeys the mask like any other. */
static void b16_the_newest_key_is_masked_too(void **state) {
  (void)state;
  for (int64_t hidden = 0; hidden < 4; hidden += 3) {
    generation_plan plan = {.c = generation_case(1)};
    plan.c.has_mask = true;
    generation_open(&plan);
    for (int64_t at = 0; at < run.f.mask_bytes; at++)
      run.f.mask[at] = at % run.f.c.Lk != hidden;
    generation_renew_problem();
    generation_advance(3, NULL);
    generation_step s = {.queries = 1, .keys = 1};
    step_call(&s);
    step_judge(&s);
    for (int64_t row = 0; row < run.f.c.B * run.f.c.H; row++)
      assert_true(s.weights[row * 4 + hidden] == 0.0F);
    step_free(&s);
    generation_close();
  }
}

/* ---- Append only, attend only ---------------------------------------------------------------- */

/* One call appends, another attends to what was appended, from a second layer too. */
static void appending_and_attending_apart(void **state) {
  (void)state;
  for (int64_t n = 1; n <= 9; n++)
    for (int rope = 0; rope <= 2; rope++) {
      mha_weights *other = NULL;
      generation_plan plan = {.c = generation_case(13)};
      plan.c.Lq = 300;
      plan.c.rope = (mha_rope)rope;
      plan.c.norm = (mha_norm)rope;
      plan.c.positions_given = rope && n % 2;
      generation_open(&plan);
      for (int round = 0; round < 3; round++) {
        generation_step grow = {
            .mode = MHA_CACHE_APPEND, .queries = round ? n : 250, .keys = round ? n : 250};
        step_prepare(&grow);
        grow.args.output = NULL;
        grow.args.rules = NULL;
        grow.args.results = NULL;
        test_expect(mha_forward(run.context, run.weights, &grow.args, NULL), MHA_OK, NULL);
        step_commit(&grow);
        step_free(&grow);
        generation_step look = {.mode = MHA_CACHE_ATTEND, .queries = n};
        step_prepare(&look);
        /* BOTTOM_RIGHT is off = length - n, which the rotary positions follow too */
        test_expect(mha_forward(run.context, run.weights, &look.args, NULL), MHA_OK, NULL);
        step_commit(&look);
        step_judge(&look);
        step_free(&look);
      }
      /* another layer's queries and output, over the same keys */
      test_expect(mha_weights_create(&run.f.config, &run.f.matrices, &other, NULL), MHA_OK, NULL);
      mha_weights_destroy(run.weights);
      for (int64_t at = 0; at < 10 * 16; at++)
        ((float *)(uintptr_t)run.f.wq.data)[at] *= -0.5F;
      test_expect(mha_weights_create(&run.f.config, &run.f.matrices, &run.weights, NULL), MHA_OK,
                  NULL);
      generation_renew_problem();
      step_try((generation_step){.mode = MHA_CACHE_ATTEND, .queries = n});
      mha_weights_destroy(other);
      generation_close();
    }
}

/* Two batch entries look at one entry of the cache; new_lengths counts queries. */
static void attending_to_one_entry_twice(void **state) {
  const int64_t counts[] = {3, 1}, entries[] = {1, 1};
  (void)state;
  generation_plan plan = {.c = generation_case(14), .entries = 2};
  generation_open(&plan);
  generation_share_tokens(21);
  generation_advance(15, NULL);
  generation_step s = {.mode = MHA_CACHE_ATTEND, .queries = 3, .counts = counts};
  step_prepare(&s);
  s.args.cache_entries = entries;
  test_expect(mha_forward(run.context, run.weights, &s.args, NULL), MHA_OK, NULL);
  step_judge(&s);
  step_free(&s);
  generation_close();
}

/* Nobody has a token yet: every query sees nothing, so each output row is the output's bias. */
static void attending_to_nothing(void **state) {
  (void)state;
  for (int ring = 0; ring < 2; ring++)
    for (int64_t n = 0; n <= 21; n += 7) {
      generation_plan plan = {.c = generation_case(24), .window = ring ? 6 : 0};
      generation_set_mask(&plan.c, ring ? 2 : 0);
      plan.c.Ek = plan.c.Ev = 5; /* attend only: no key is projected, whatever its width */
      plan.c.Lk = 21;
      plan.c.source = TEST_CROSS;
      plan.c.rope = MHA_ROPE_HALVES;
      generation_open(&plan);
      mha_forward_args *a = &run.f.args;
      a->cache = run.cache;
      a->cache_mode = MHA_CACHE_ATTEND;
      a->key = a->value = NULL;
      a->key_length = 0;
      a->query_length = n;
      a->flags = n == 0 ? MHA_ALLOW_EMPTY : 0;
      test_poison_results(&run.f);
      test_expect(mha_forward(run.context, run.weights, a, NULL), MHA_OK, NULL);
      for (int64_t at = 0; at < 2 * 21 * 7; at++) {
        const float bias = run.f.wo.bias[at % 7];
        assert_true(at < 2 * n * 7 ? run.f.output.data[at] == bias
                                   : test_is_poison(run.f.output.data[at]));
      }
      for (int64_t at = 0; at < 2 * n * 4; at++)
        assert_true(run.f.lse[at] == -INFINITY);
      for (int64_t at = 0; at < run.f.weights_n; at++) /* Lk is 0: there are none */
        assert_true(test_is_poison(run.f.weights[at]));
      generation_close();
    }
}

/* No entry, no row: nothing happens, in every mode, and pointers may be NULL. */
static void calls_without_rows(void **state) {
  (void)state;
  for (int mode = MHA_CACHE_APPEND_ATTEND; mode <= MHA_CACHE_ATTEND; mode++)
    for (int entries = 0; entries < 2; entries++) {
      mha_forward_args args;
      mha_error error;
      generation_plan plan = {.c = generation_case(25)};
      generation_open(&plan);
      generation_advance(4, NULL);
      MHA_INIT(&args);
      args.cache = run.cache;
      args.cache_mode = (int32_t)mode;
      args.batch = entries ? 2 : 0;
      args.query_length = entries ? 0 : 3;
      test_expect(mha_forward(run.context, run.weights, &args, &error), MHA_OK, &error);
      generation_advance(4, NULL);
      generation_close();
    }
}

typedef struct reader {
  pthread_t thread;
  const generation_step *step;
  float *output;
  mha_status status;
} reader;

enum { READERS = 4, ROUNDS = 20 };

static void *attend_often(void *argument) {
  reader *me = argument;
  mha_context *context = NULL;
  mha_context_options options;
  mha_forward_args args = me->step->args;
  MHA_INIT(&options);
  options.n_threads = 1;
  args.results = NULL;
  args.output = me->output;
  me->status = mha_context_create(&options, &context, NULL);
  for (int round = 0; !me->status && round < ROUNDS; round++)
    me->status = mha_forward(context, run.weights, &args, NULL);
  mha_context_destroy(context);
  return NULL;
}

/* Any number of contexts read one cache at once, with the same bits. */
static void many_readers(void **state) {
  reader readers[READERS];
  generation_plan plan = {.c = generation_case(15)};
  (void)state;
  plan.c.Lq = 300;
  generation_open(&plan);
  free(generation_advance_for_bits(300, NULL));
  generation_step s = {.mode = MHA_CACHE_ATTEND, .queries = 2};
  step_call(&s);
  step_judge(&s);
  for (int i = 0; i < READERS; i++) {
    readers[i].step = &s;
    readers[i].output = test_pool_floats(&s.pool, 2 * 2 * 7);
    assert_int_equal(pthread_create(&readers[i].thread, NULL, attend_often, &readers[i]), 0);
  }
  for (int i = 0; i < READERS; i++) {
    assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
    test_expect(readers[i].status, MHA_OK, NULL);
    test_same_bits("reader", (test_shape){{1, 2, 2, 7}}, readers[i].output, s.y);
  }
  step_free(&s);
  generation_close();
}

/* ---- Calls with a key of their own ----------------------------------------------------------- */

/* A layer without matrices: one head of 4, Q = query, K = key, V = value. */
typedef struct plain_layer {
  test_allocator allocator;
  mha_weights *weights;
  mha_context *context;
  mha_cache *cache;
  float query[2 * 20 * 4], key[2 * 20 * 4], output[2 * 20 * 4];
} plain_layer;

static plain_layer plain;

static void open_plain(void) {
  mha_config config;
  mha_matrices matrices;
  mha_context_options options;
  mha_cache_options o;
  memset(&plain, 0, sizeof plain);
  test_allocator_init(&plain.allocator);
  mha_config_init(&config, 4, 1);
  MHA_INIT(&matrices);
  MHA_INIT(&options);
  options.n_threads = 1;
  options.allocator = &plain.allocator.mha;
  MHA_INIT(&o);
  o.n_entries = 2;
  o.capacity = 64;
  o.n_kv_heads = 1;
  o.head_size = 4;
  test_expect(mha_weights_create(&config, &matrices, &plain.weights, NULL), MHA_OK, NULL);
  test_expect(mha_context_create(&options, &plain.context, NULL), MHA_OK, NULL);
  test_expect(mha_cache_create(&o, &plain.cache, NULL), MHA_OK, NULL);
  for (size_t i = 0; i < COUNT(plain.query); i++)
    plain.query[i] = plain.key[i] = 1.0F;
}

static void close_plain(void) {
  mha_cache_destroy(plain.cache);
  mha_context_destroy(plain.context);
  mha_weights_destroy(plain.weights);
  test_allocator_check(&plain.allocator);
}

static mha_forward_args plain_args(int64_t queries, int64_t keys) {
  mha_forward_args args;
  MHA_INIT(&args);
  args.batch = 2;
  args.query_length = queries;
  args.query = plain.query;
  args.key_length = keys;
  args.key = plain.key;
  args.output = plain.output;
  args.cache = plain.cache;
  return args;
}

/* Rows of queries behind new_lengths[b] see no key, also where no entry has padding among its keys.
 */
static void counts_hold_for_queries_too(void **state) {
  const int64_t counts[][2] = {{2, 2}, {2, 1}, {1, 2}};
  (void)state;
  for (size_t k = 0; k < COUNT(counts); k++) {
    open_plain();
    mha_forward_args args = plain_args(5, 2);
    args.new_lengths = counts[k];
    test_expect(mha_forward(plain.context, plain.weights, &args, NULL), MHA_OK, NULL);
    for (int64_t b = 0; b < 2; b++)
      for (int64_t i = 0; i < 5; i++)
        assert_true(plain.output[(b * 5 + i) * 4] == (i < counts[k][b] ? 1.0F : 0.0F));
    close_plain();
  }
}

/* What the cache knows itself, and results that nobody computes. */
static void what_append_only_refuses(void **state) {
  const int64_t lengths[3] = {0, 4, 10};
  float sink[200];
  (void)state;
  open_plain();
  for (int k = 0; k < 5; k++) {
    mha_rules rules;
    mha_results results;
    mha_error error;
    int64_t length = -1;
    mha_forward_args args = plain_args(0, 10);
    MHA_INIT(&rules);
    MHA_INIT(&results);
    args.cache_mode = MHA_CACHE_APPEND;
    args.rules = &rules;
    args.results = &results;
    if (k == 0)
      rules.query_lengths = lengths + 1;
    if (k == 1)
      rules.key_lengths = lengths + 1;
    if (k == 2)
      results.weights = sink;
    if (k == 3)
      results.log_sum_exp = sink;
    if (k == 4)
      rules.struct_size = 3;
    test_expect(mha_forward(plain.context, plain.weights, &args, &error),
                k < 2   ? MHA_ERROR_UNSUPPORTED
                : k < 4 ? MHA_ERROR_VALUE
                        : MHA_ERROR_STRUCT_SIZE,
                &error);
    test_expect(mha_cache_length(plain.cache, 0, &length, NULL), MHA_OK, NULL);
    assert_int_equal(length, 0);
  }
  close_plain();
}

/* More rows of key than queries. */
static void new_keys_take_no_memory(void **state) {
  (void)state;
  for (int64_t keys = 1; keys <= 20; keys++)
    for (int mode = 0; mode < 2; mode++) {
      mha_shape shape;
      open_plain();
      MHA_INIT(&shape);
      shape.batch = 2;
      shape.query_length = 1;
      shape.key_length = 64;
      shape.cached = 1;
      shape.cache_page_tokens = generation_cache_options().page_tokens;
      test_expect(mha_context_reserve(plain.context, plain.weights, &shape, NULL), MHA_OK, NULL);
      const int64_t calls = plain.allocator.calls;
      mha_forward_args args = plain_args(1, keys);
      args.cache_mode = mode ? MHA_CACHE_APPEND : MHA_CACHE_APPEND_ATTEND;
      test_expect(mha_forward(plain.context, plain.weights, &args, NULL), MHA_OK, NULL);
      assert_int_equal(plain.allocator.calls, calls);
      close_plain();
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_mask_in_every_schedule),
      cmocka_unit_test(b37_cached_keys_and_positions),
      cmocka_unit_test(a_sample_of_full_caches),
      cmocka_unit_test(a_sample_of_rings),
      cmocka_unit_test(across_the_borders_of_parts),
      cmocka_unit_test(queries_and_keys_of_different_counts),
      cmocka_unit_test(b16_the_newest_key_is_masked_too),
      cmocka_unit_test(appending_and_attending_apart),
      cmocka_unit_test(attending_to_one_entry_twice),
      cmocka_unit_test(attending_to_nothing),
      cmocka_unit_test(calls_without_rows),
      cmocka_unit_test(many_readers),
      cmocka_unit_test(counts_hold_for_queries_too),
      cmocka_unit_test(what_append_only_refuses),
      cmocka_unit_test(new_keys_take_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
