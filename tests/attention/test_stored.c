/* mha_attend with keys and values that are stored as any type, against the judge, who gets them
 * widened: few queries, which multiply them as they are stored, and many; what no query sees, and
 * what it may not read. */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { N_TYPES = MHA_Q8_0 + 1, N_PAIRS = N_TYPES * N_TYPES };

static test_fixture f; /* one at a time; too large for a stack */

/* Types of k and v by number; 0 is float32 for both. */
static void set_types(test_case *c, int pair) {
  c->k_type = (int32_t)(pair / N_TYPES % N_TYPES);
  c->v_type = (int32_t)(pair % N_TYPES);
}

/* Head sizes that the types allow, by number. */
static void set_heads(test_case *c, size_t which) {
  const int64_t heads[][2] = {{4, 4}, {4, 2}, {6, 1}, {1, 1}, {3, 3}, {8, 1}, {16, 2}};
  const int64_t free_sizes[] = {5, 32, 3, 40, 17, 64};
  const int64_t blocks[] = {32, 64, 32, 96};
  c->H = heads[which % COUNT(heads)][0];
  c->G = heads[which % COUNT(heads)][1];
  c->d = c->k_type == MHA_Q8_0 ? blocks[which % 4] : free_sizes[which % 6];
  c->dv = c->v_type == MHA_Q8_0 ? blocks[which / 2 % 4] : free_sizes[which / 2 % 6];
}

/* Rules by number, so that neighbouring sizes meet different ones. */
static void set_rules(test_case *c, uint64_t rules) {
  c->causal = rules % 9 == 1 || rules % 9 == 7;
  c->alignment = rules % 9 == 7 ? MHA_ALIGN_OFFSET : MHA_ALIGN_BOTTOM_RIGHT;
  c->offset = c->Lk / 2;
  c->window = rules % 9 == 2 || rules % 9 == 7;
  c->left = rules % 9 == 7 ? -1 : c->Lk / 3;
  c->right = rules % 9 == 7 ? 3 : 0;
  c->has_mask = rules % 9 == 3 || rules % 9 == 8;
  c->has_bias = c->bias_hides = rules % 9 == 4;
  c->mask_extents = c->bias_extents = TEST_FULL;
  c->alibi = rules % 9 == 5 || rules % 9 == 8;
  c->softcap = rules % 9 == 6 ? 2.0F : 0.0F;
  c->sinks = rules % 9 == 2 || rules % 9 == 8;
  c->key_lengths = rules % 9 == 0 || rules % 9 == 8;
  c->query_lengths = rules % 9 == 8;
}

static test_case case_of(uint64_t seed, int pair, int64_t Lq, int64_t Lk) {
  test_case c = {.seed = seed,
                 .core = true,
                 .B = 1 + (int64_t)(seed / 2 % 2),
                 .Lq = Lq,
                 .Lk = Lk,
                 .at_front = seed % 3 == 1,
                 .odd_addresses = seed % 5 < 2,
                 .layout = (test_layout)(seed / 3 % 4),
                 .want = seed % 2 ? TEST_WANT_ALL : 0,
                 .stage = (mha_stage)(seed / 2 % 4)};
  set_types(&c, pair);
  set_heads(&c, seed);
  set_rules(&c, seed);
  return c;
}

/* ---- Against the judge ----------------------------------------------------------------------- */

/* Around the ratio of keys to queries, tiles and parts, at one query to some more than are few. */
static void few_queries(void **state) {
  const int64_t lengths[] = {1,  2,  7,  8,   9,   15,  16,  17,  24,  33,  63,
                             64, 65, 72, 129, 255, 256, 257, 511, 513, 1025};
  uint64_t seed = 0;
  (void)state;
  for (size_t at = 0; at < (test_small() ? 13 : COUNT(lengths)); at++)
    for (int64_t Lq = 1; Lq <= 9; Lq += lengths[at] > 300 ? 4 : 1)
      for (int pair = 1 + (int)(seed % 2); pair < N_PAIRS; pair += test_small() ? 4 : 2, seed++) {
        const test_case c = case_of(seed, pair, Lq, lengths[at]);
        test_check(&c);
      }
}

static void many_queries(void **state) {
  const int64_t lengths[][2] = {{17, 5},  {17, 70},   {60, 60},   {33, 300},
                                {129, 9}, {130, 131}, {257, 129}, {70, 513}};
  uint64_t seed = 0;
  (void)state;
  for (size_t at = 0; at < (test_small() ? 4 : COUNT(lengths)); at++)
    for (int pair = 1; pair < N_PAIRS; pair++, seed++) {
      const test_case c = case_of(seed, pair, lengths[at][0], lengths[at][1]);
      test_check(&c);
    }
}

/* Up to 8 queries times up to 8 heads of a group: few enough to be multiplied as they are stored,
 * or not. */
static void grouped_heads_and_queries(void **state) {
  const int64_t groups[] = {1, 2, 3, 5, 8};
  (void)state;
  for (size_t g = 0; g < COUNT(groups); g++)
    for (int64_t Lq = 1; Lq <= 8; Lq++)
      for (int32_t type = MHA_F16; type < N_TYPES; type++)
        for (int layout = TEST_DENSE; layout <= TEST_HEAD_FIRST; layout += 3) {
          test_case c = {.seed = (uint64_t)Lq,
                         .core = true,
                         .Lq = Lq,
                         .Lk = 65 + Lq,
                         .H = 2 * groups[g],
                         .G = 2,
                         .d = 32,
                         .dv = 64,
                         .layout = (test_layout)layout,
                         .causal = true,
                         .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                         .want = TEST_WANT_ALL};
          c.k_type = c.v_type = (int32_t)type;
          test_check(&c);
        }
}

/* Every stage of the weights at one and at many queries. */
static void every_stage_and_rule(void **state) {
  (void)state;
  for (uint64_t rules = 0; rules < 9; rules++)
    for (int stage = 0; stage < 4; stage++)
      for (int pair = 5; pair < N_PAIRS; pair += 5) /* both of one type */
        for (int64_t Lq = 1; Lq <= 25; Lq += 8) {
          test_case c = case_of(rules * 8, pair, Lq, 150);
          set_rules(&c, rules);
          c.stage = (mha_stage)stage;
          c.want = TEST_WANT_ALL;
          test_check(&c);
        }
}

static void packed_sequences(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < (test_small() ? 12 : 60); seed++) {
    test_case c = case_of(seed, 1 + (int)(seed % (N_PAIRS - 1)), 1 + (int64_t)(seed * 7 % 90),
                          1 + (int64_t)(seed * 11 % 150));
    c.B = 1 + (int64_t)(seed % 7);
    c.packed = true;
    c.packed_tail = seed % 4 > 1;
    c.layout = (test_layout)(seed % 2);
    c.query_lengths = c.key_lengths = c.has_mask = c.has_bias = false;
    c.want = TEST_WANT_LSE;
    test_check(&c);
  }
}

/* Heads and entries that share one array: strides of 0. */
static void strides_of_zero(void **state) {
  (void)state;
  for (int pair = 5; pair < N_PAIRS; pair += 5)
    for (int64_t Lq = 1; Lq <= 33; Lq += 16) {
      test_case c = {.seed = (uint64_t)Lq,
                     .core = true,
                     .B = 2,
                     .Lq = Lq,
                     .Lk = 70,
                     .H = 4,
                     .G = 2,
                     .d = 32,
                     .layout = TEST_PADDED};
      set_types(&c, pair);
      test_build(&f, &c);
      test_view *views[] = {&f.key, &f.value};
      for (size_t k = 0; k < COUNT(views); k++)
        views[k]->head_stride = views[k]->batch_stride = 0;
      f.k.head_stride = f.k.batch_stride = f.v.head_stride = f.v.batch_stride = 0;
      test_run(&f);
      test_judge_now(&f);
      test_release(&f);
    }
}

/* ---- Bits ------------------------------------------------------------------------------------ */

static void threads_and_results_change_no_bit(void **state) {
  const int64_t lengths[][2] = {{1, 1500}, {5, 500}, {40, 200}};
  (void)state;
  for (size_t at = 0; at < (test_small() ? 2 : COUNT(lengths)); at++)
    for (int pair = 1; pair < N_PAIRS; pair += 3) {
      float *first = NULL;
      for (int run = 0; run < 6; run++) {
        test_case c = {.seed = 1,
                       .core = true,
                       .B = 2,
                       .Lq = lengths[at][0],
                       .Lk = lengths[at][1],
                       .H = 8,
                       .G = 4,
                       .d = 64,
                       .layout = (test_layout)(pair % 4),
                       .threads = 1 + run % 3,
                       .odd_addresses = run == 4,
                       .causal = true,
                       .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                       .want = run < 3 ? 0 : TEST_WANT_ALL};
        set_types(&c, pair);
        test_build(&f, &c);
        test_run_for_bits(&f, &first);
      }
      free(first);
    }
}

/* ---- What is not seen ------------------------------------------------------------------------ */

/* The numbers of a view, to be put back. */
typedef struct saved {
  float *data;
  unsigned char *stored;
} saved;

static size_t stored_bytes(const test_view *v) {
  return v->stored ? mha_element_bytes((int32_t)v->type, v->floats) : 0;
}

static saved save(const test_view *v) {
  const saved s = {test_allocate((size_t)v->floats, sizeof *v->data),
                   test_allocate(stored_bytes(v), 1)};
  memcpy(s.data, v->data, (size_t)v->floats * sizeof *v->data);
  if (v->stored)
    memcpy(s.stored, v->stored, stored_bytes(v));
  return s;
}

static void put_back(const test_view *v, saved s) {
  memcpy(v->data, s.data, (size_t)v->floats * sizeof *v->data);
  if (v->stored)
    memcpy(v->stored, s.stored, stored_bytes(v));
  free(s.data);
  free(s.stored);
}

/* Number c of a head of row j becomes NaN or infinite, its block too. The floats follow with
 * test_widen. */
static void spoil(const test_view *v, int64_t b, int64_t j, int64_t h, int64_t c, bool infinite) {
  float *at = test_at(v, b, j, h, c);
  if (!v->stored)
    *at = infinite ? INFINITY : NAN;
  else
    test_spoil_stored(v->stored, v->type, at - v->data, infinite);
}

/* All of a row. */
static void spoil_row(const test_view *v, int64_t b, int64_t j, bool infinite) {
  for (int64_t h = 0; h < v->heads; h++)
    for (int64_t c = 0; c < v->size; c += v->stored ? test_block_of(v->type) : 1)
      spoil(v, b, j, h, c, infinite);
}

typedef struct unseen_key {
  const oracle_result *result;
  int64_t b, j;
} unseen_key;

static bool does_not_see(const void *user, int64_t b, int64_t i) {
  const unseen_key *key = user;
  bool sees = false;
  for (int64_t h = 0; b == key->b && h < f.c.H; h++)
    sees = sees || test_sees(&f, key->result, b, h, i, key->j);
  return !sees;
}

/* Masks that differ by row, at few queries and at many. */
static test_case partly_visible(int variant, int pair) {
  test_case c = {.seed = (uint64_t)variant,
                 .core = true,
                 .B = 2,
                 .Lq = variant & 1 ? 3 : 37,
                 .Lk = 70,
                 .H = 4,
                 .G = 2,
                 .d = 32,
                 .layout = variant & 16 ? TEST_HEAD_FIRST : TEST_DENSE,
                 .causal = (variant & 2) != 0,
                 .alignment = MHA_ALIGN_BOTTOM_RIGHT,
                 .window = (variant & 4) != 0,
                 .left = 9,
                 .right = 3,
                 .has_mask = (variant & 8) != 0,
                 .mask_extents = TEST_FULL,
                 .key_lengths = (variant & 12) == 4,
                 .want = TEST_WANT_ALL};
  set_types(&c, pair);
  return c;
}

static void not_seen_by_everyone(const oracle_result *result, const float *clean) {
  for (int64_t j = 0; j < 70; j += test_small() ? 34 : 17)
    for (int how = 0; how < 6; how++) {
      const unseen_key key = {result, 1, j};
      const saved k = save(&f.key), v = save(&f.value);
      if (how % 3 != 1)
        spoil_row(&f.key, 1, j, how / 3);
      if (how % 3 != 0)
        spoil_row(&f.value, 1, j, how / 3);
      test_run(&f);
      test_same_rows(&f, clean, does_not_see, &key);
      put_back(&f.key, k);
      put_back(&f.value, v);
    }
}

static void nan_or_inf_that_is_not_seen(void **state) {
  (void)state;
  for (int variant = 0; variant < 32; variant += test_small() ? 5 : 1)
    for (int pair = 1 + variant % 3; pair < N_PAIRS; pair += 3) {
      const test_case c = partly_visible(variant, pair);
      oracle_result result;
      test_build(&f, &c);
      test_ask_oracle(&f, &result);
      test_run(&f);
      test_judge(&f, &result);
      float *clean = test_gather(&f.output);
      not_seen_by_everyone(&result, clean);
      free(clean);
      oracle_free(&result);
      test_release(&f);
    }
}

/* Keys that nobody sees at all, in every tile, and their values. */
static void all_that_is_hidden_is_nan(void **state) {
  (void)state;
  for (int pair = 1; pair < N_PAIRS; pair++)
    for (int64_t Lq = 1; Lq <= 33; Lq += 16)
      for (int infinite = 0; infinite < 2; infinite++) {
        test_case c = {.seed = 4,
                       .core = true,
                       .Lq = Lq,
                       .Lk = 400,
                       .H = 2,
                       .G = 1,
                       .d = 32,
                       .dv = 320,
                       .has_mask = true};
        set_types(&c, pair);
        test_build(&f, &c);
        test_run(&f);
        float *clean = test_gather(&f.output);
        for (int64_t j = 0; j < f.mask_bytes; j++)
          if (!f.mask[j]) {
            spoil_row(&f.key, 0, j, infinite);
            if (j % 2)
              spoil_row(&f.value, 0, j, infinite);
            else /* a single number, far behind in its row */
              spoil(&f.value, 0, j, 0, 300, infinite);
          }
        test_run(&f);
        test_same_output(&f, clean);
        free(clean);
        test_release(&f);
      }
}

static void nan_in_a_visible_key(void **state) {
  (void)state;
  for (int variant = 0; variant < 32; variant++)
    for (int pair = 4; pair < N_PAIRS; pair += variant % 2 ? 1 : 3) {
      const test_case c = partly_visible(variant, pair);
      oracle_result result;
      test_build(&f, &c);
      test_run(&f);
      float *clean = test_gather(&f.output);
      test_ask_oracle(&f, &result);
      const unseen_key key = {&result, 0, 33};
      spoil(&f.key, 0, 33, 1, 5, false);
      test_widen(&f.key);
      test_run(&f);
      test_same_rows(&f, clean, does_not_see, &key);
      test_judge_now(&f); /* the judge has NaN in the rows that see it */
      oracle_free(&result);
      free(clean);
      test_release(&f);
    }
}

/* A visible NaN makes NaN, in the columns of its block at least; an infinity something that is not
 * finite. Rows that do not see it, and heads that have other values, keep their bits. */
static void nan_or_inf_in_a_visible_value(void **state) {
  (void)state;
  for (int variant = 0; variant < 64; variant++)
    for (int pair = 1; pair < N_PAIRS; pair += variant % 2 ? 1 : 3) {
      const test_case c = partly_visible(variant % 32, pair);
      oracle_result result;
      test_build(&f, &c);
      test_run(&f);
      float *clean = test_gather(&f.output);
      test_ask_oracle(&f, &result);
      const unseen_key key = {&result, 1, 61};
      spoil(&f.value, 1, 61, 0, 7, variant >= 32);
      test_run(&f);
      test_same_rows(&f, clean, does_not_see, &key);
      for (int64_t i = 0; i < c.Lq; i++)
        for (int64_t h = 0; h < c.H; h++) {
          const float *row = test_at(&f.output, 1, i, h, 0);
          const float *was = clean + ((c.Lq + i) * c.H + h) * 32;
          if (h >= 2 || !test_sees(&f, &result, 1, h, i, 61))
            test_same_bits("row", (test_shape){{1, 1, 1, 32}}, row, was);
          else if (variant < 32 ? !isnan(row[7]) : isfinite(row[7]))
            test_failed("row %d of head %d sees it and shows %g", (int)i, (int)h, (double)row[7]);
        }
      oracle_free(&result);
      free(clean);
      test_release(&f);
    }
}

/* ---- What is not read ------------------------------------------------------------------------ */

/* The last entry's rows beyond its length lie in pages that cannot be read. */
static void put_on_the_edge(test_view *v, mha_tensor *tensor, int64_t rows) {
  const size_t row_bytes = mha_element_bytes((int32_t)v->type, v->heads * v->size);
  const size_t bytes = (size_t)(v->length + rows) * row_bytes;
  const int64_t floats = (int64_t)(2 * (size_t)v->length * row_bytes / sizeof(float));
  float *edge = test_pool_cut(&f.pool, floats, (int64_t)(bytes / sizeof(float)));
  assert_int_equal(bytes % sizeof(float), 0);
  memcpy(edge, v->stored ? (const void *)v->stored : v->data, bytes);
  tensor->data = edge;
}

static void keys_beyond_key_lengths(void **state) {
  const int64_t lengths[][2] = {{1, 600}, {7, 600}, {40, 600}, {9, 34}};
  (void)state;
  for (size_t at = 0; at < COUNT(lengths); at++)
    for (int64_t rows = 0; rows <= 30; rows += 30)
      for (int pair = 1; pair < N_PAIRS; pair++) {
        test_case c = {.seed = 5,
                       .core = true,
                       .B = 2,
                       .Lq = lengths[at][0],
                       .Lk = lengths[at][1],
                       .H = 2,
                       .G = 1,
                       .d = 32,
                       .key_lengths = true,
                       .want = TEST_WANT_ALL};
        set_types(&c, pair);
        test_build(&f, &c);
        f.key_lengths[0] = c.Lk;
        f.key_lengths[1] = rows;
        test_fill_normal(&f.random, f.key.data, f.key.floats, 1.0);
        test_fill_normal(&f.random, f.value.data, f.value.floats, 1.0);
        test_store(&f.key);
        test_store(&f.value);
        put_on_the_edge(&f.key, &f.k, rows);
        put_on_the_edge(&f.value, &f.v, rows);
        test_run(&f);
        test_judge_now(&f);
        test_release(&f);
      }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* After a reserve for a shape and a type, calls up to it take no memory. cached: as for a cache's
 * view, or without a word of one. */
static void expect_no_memory_after_reserve(test_case c, int cached) {
  mha_context *context = NULL;
  mha_shape shape;
  mha_error error;
  MHA_INIT(&shape);
  shape.batch = c.B;
  shape.query_length = c.Lq;
  shape.key_length = c.Lk;
  shape.n_heads = c.H;
  shape.n_kv_heads = c.G;
  shape.head_size = c.d;
  shape.value_head_size = c.dv;
  shape.cached = cached;
  shape.cache_type = (int32_t)(c.k_type > c.v_type ? c.k_type : c.v_type);
  test_build(&f, &c);
  test_expect(mha_context_create(&f.options, &context, &error), MHA_OK, &error);
  test_expect(mha_context_reserve(context, NULL, &shape, &error), MHA_OK, &error);
  const int64_t calls = f.allocator.calls;
  test_release(&f);
  for (int64_t Lq = 1; Lq <= c.Lq; Lq += 1 + Lq / 2)
    for (int64_t Lk = 1; Lk <= c.Lk; Lk += 1 + Lk / 2) {
      test_allocator own = f.allocator;
      test_case smaller = c;
      smaller.Lq = Lq;
      smaller.Lk = Lk;
      smaller.layout = (test_layout)(Lk % 4);
      test_build(&f, &smaller);
      f.allocator = own;
      test_poison_results(&f);
      test_expect(test_call(&f, context, NULL, &error), MHA_OK, &error);
      if (f.allocator.calls != calls)
        test_failed("the call took memory");
      test_release(&f);
    }
  mha_context_destroy(context);
  test_allocator_check(&f.allocator);
}

static void calls_after_a_reserve_take_no_memory(void **state) {
  const int64_t lengths[][2] = {{1, 300}, {8, 70}, {40, 300}, {60, 60}};
  (void)state;
  for (size_t at = 0; at < COUNT(lengths); at++)
    for (int pair = 5; pair < N_PAIRS; pair += 5)
      for (int cached = 0; cached < 2; cached++) {
        test_case c = {.seed = 6,
                       .core = true,
                       .B = 2,
                       .Lq = lengths[at][0],
                       .Lk = lengths[at][1],
                       .H = 4,
                       .G = 2,
                       .d = 64,
                       .dv = 32,
                       .threads = 1 + pair / 5};
        set_types(&c, pair);
        expect_no_memory_after_reserve(c, cached);
      }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(few_queries),
      cmocka_unit_test(many_queries),
      cmocka_unit_test(grouped_heads_and_queries),
      cmocka_unit_test(every_stage_and_rule),
      cmocka_unit_test(packed_sequences),
      cmocka_unit_test(strides_of_zero),
      cmocka_unit_test(threads_and_results_change_no_bit),
      cmocka_unit_test(nan_or_inf_that_is_not_seen),
      cmocka_unit_test(all_that_is_hidden_is_nan),
      cmocka_unit_test(nan_in_a_visible_key),
      cmocka_unit_test(nan_or_inf_in_a_visible_value),
      cmocka_unit_test(keys_beyond_key_lengths),
      cmocka_unit_test(calls_after_a_reserve_take_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
