/* Layers whose matrices are stored as any type, against the judge, who gets the same numbers
 * widened: each matrix of its own type, every way to lay and give them, few rows and many, and what
 * must not change a bit. */
#include "fixture.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { N_TYPES = MHA_Q4_0 + 1 };

/* Sizes of heads such that blocks of 32 fit every stored row, and heads cut them. */
static const int64_t heads_of_blocks[][4] = {
    {4, 2, 16, 16}, {8, 4, 8, 8},   {2, 1, 32, 64}, {4, 4, 32, 32},
    {3, 1, 64, 32}, {6, 2, 48, 16}, {8, 1, 32, 32}, {16, 16, 4, 2},
};
static const int64_t heads_of_any[][4] = {
    {4, 2, 5, 3}, {1, 1, 1, 1}, {6, 3, 7, 9}, {3, 3, 17, 33}, {8, 1, 12, 4}, {2, 2, 40, 31},
};
static const int64_t rows_to_try[] = {1, 2, 7, 8, 9, 17, 60};

static void set_types(test_case *c, const int32_t types[4]) {
  c->query_type = (int32_t)types[0];
  c->key_type = (int32_t)types[1];
  c->value_type = (int32_t)types[2];
  c->output_type = (int32_t)types[3];
}

static bool has_blocks(const test_case *c) {
  return test_block_of(c->query_type) * test_block_of(c->key_type) * test_block_of(c->value_type) *
             test_block_of(c->output_type) >
         1;
}

/* ---- Products of options --------------------------------------------------------------------- */

/* All 625 ways to give four matrices five types, in both orientations; few rows or many. */
static void every_type_of_every_matrix(void **state) {
  (void)state;
  for (int32_t all = 0; all < N_TYPES * N_TYPES * N_TYPES * N_TYPES; all += test_small() ? 13 : 1)
    for (int out_in = 0; out_in < 2; out_in++) {
      const int32_t types[] = {all % 5, all / 5 % 5, all / 25 % 5, all / 125};
      test_case c = {.seed = (uint64_t)all,
                     .Lq = all % 2 ? 3 : 11,
                     .Lk = all % 3 ? 12 : 2,
                     .H = 2,
                     .G = 1,
                     .d = 32,
                     .Eq = 32,
                     .Ek = 64,
                     .Ev = 32,
                     .Eo = 96,
                     .out_in = out_in,
                     .borrow = all % 4 < 2,
                     .odd_addresses = all % 2,
                     .biases = (unsigned)(all * 7 % 16)};
      set_types(&c, types);
      test_check(&c);
    }
}

/* Wq, Wk and Wv of one type, apart, with gaps or in one block; every set of biases. */
static void every_way_to_lay_them(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type < N_TYPES; type++)
    for (int out_in = 0; out_in < 2; out_in++)
      for (int borrow = 0; borrow < 2; borrow++)
        for (int layout = TEST_APART; layout <= TEST_IN_BLOCK; layout++)
          for (size_t k = 0; k < COUNT(rows_to_try); k += test_small() ? 3 : 1) {
            test_case c = {.seed = k,
                           .B = 1 + (int64_t)(k % 2) * 2,
                           .Lq = rows_to_try[k],
                           .H = 4,
                           .G = 2,
                           .d = 16,
                           .Eq = 96,
                           .Eo = 64,
                           .out_in = out_in,
                           .borrow = borrow,
                           .odd_addresses = k % 3 == 1,
                           .weight_layout = (test_weight_layout)layout,
                           .source = TEST_SELF,
                           .biases = (unsigned)(k * 5 % 16)};
            const int32_t types[] = {type, type, type, MHA_F16 + (type + out_in) % 4};
            set_types(&c, types);
            test_check(&c);
          }
}

/* A few rows are multiplied with the matrix as it is stored, more with it widened: every count
 * about that border, rows of one entry or of several, dense or far apart. */
static void few_rows_and_many(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type < N_TYPES; type++)
    for (int64_t B = 1; B <= 3; B++)
      for (int64_t L = 1; L <= 20; L += test_small() ? 4 : 1)
        for (int variant = 0; variant < 4; variant++) {
          const int32_t types[] = {type, type, type, type};
          test_case c = {.seed = (uint64_t)(L + 100 * variant),
                         .B = B,
                         .Lq = L,
                         .Lk = 21 - L,
                         .H = 2,
                         .G = 1,
                         .d = 32,
                         .Eq = 64,
                         .Eo = 160,
                         .out_in = variant % 2,
                         .layout = (test_layout)((variant + L) % 3),
                         .accumulate = variant / 2,
                         .key_lengths = L % 4 == 3,
                         .query_lengths = L % 5 == 3,
                         .biases = variant / 2 ? TEST_ALL : 0};
          set_types(&c, types);
          test_check(&c);
        }
}

/* An absent matrix is the identity whatever its type says. */
static void absent_matrices(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type < N_TYPES; type++)
    for (unsigned absent = 0; absent <= TEST_ALL; absent++)
      for (int64_t L = 2; L <= 12; L += 10) {
        const int32_t types[] = {type, type, type, type};
        test_case c = {.seed = absent,
                       .B = 2,
                       .Lq = L,
                       .Lk = 13 - L,
                       .H = 2,
                       .d = 32,
                       .out_in = absent % 2,
                       .layout = absent % 3 ? TEST_PADDED : TEST_DENSE,
                       .accumulate = absent % 4 == 3,
                       .absent = absent,
                       .biases = TEST_ALL};
        set_types(&c, types);
        test_check(&c);
      }
}

/* Rows and widths beyond the panels and pieces in which a matrix is widened, and one row whose
 * product is cut into parts. */
static void wide_layers(void **state) {
  const int64_t sizes[][4] = {/* Lq, Eq, H·d, Eo */
                              {9, 1120, 1056, 2112}, {600, 96, 64, 1056}, {1, 4160, 64, 96},
                              {20, 64, 2080, 96},    {1, 64, 4128, 4224}, {8, 1024, 512, 544},
                              {2, 2048, 96, 512}};
  (void)state;
  for (size_t k = 0; k < (test_small() ? 1 : COUNT(sizes)); k++)
    for (int32_t type = MHA_F16; type < N_TYPES; type++)
      for (int out_in = 0; out_in < 2; out_in++) {
        const int32_t types[] = {type, MHA_F16, MHA_Q8_0, type};
        test_case c = {.seed = k,
                       .Lq = sizes[k][0],
                       .Lk = 7,
                       .H = 2,
                       .d = sizes[k][2] / 2,
                       .dv = 32,
                       .Eq = sizes[k][1],
                       .Ek = 64,
                       .Ev = 32,
                       .Eo = sizes[k][3],
                       .out_in = out_in,
                       .threads = 1 + out_in,
                       .biases = out_in ? TEST_ALL : 0,
                       .want = TEST_WANT_LSE};
        set_types(&c, types);
        test_check(&c);
      }
}

/* ---- A sample of everything ------------------------------------------------------------------ */

static void sample_rules(test_random *random, test_case *c) {
  c->causal = test_random_range(random, 0, 1);
  c->alignment = (mha_alignment)test_random_range(random, 0, 2);
  c->offset = test_random_range(random, -4, 4);
  c->window = test_random_range(random, 0, 3) == 0;
  c->left = test_random_range(random, -1, 9);
  c->right = test_random_range(random, -1, 9);
  c->has_mask = !c->packed && test_random_range(random, 0, 2) == 0;
  c->has_bias = !c->packed && test_random_range(random, 0, 2) == 0;
  c->mask_extents = (unsigned)test_random_range(random, 0, TEST_FULL);
  c->bias_extents = (unsigned)test_random_range(random, 0, TEST_FULL);
  c->alibi = test_random_range(random, 0, 2) == 0;
  c->sinks = test_random_range(random, 0, 2) == 0;
  c->softcap = test_random_range(random, 0, 2) ? 0.0F : 2.0F;
  c->query_lengths = !c->packed && test_random_range(random, 0, 2) == 0;
  c->key_lengths = !c->packed && test_random_range(random, 0, 2) == 0;
  c->want = (unsigned)(c->packed ? test_random_range(random, 0, 1) * TEST_WANT_LSE
                                 : test_random_range(random, 0, TEST_WANT_ALL));
  c->stage = (mha_stage)test_random_range(random, 0, 3);
}

static void sample_heads(test_random *random, test_case *c) {
  const bool blocks = has_blocks(c);
  const size_t n = blocks ? COUNT(heads_of_blocks) : COUNT(heads_of_any);
  const size_t which = (size_t)test_random_range(random, 0, (int64_t)n - 1);
  const int64_t *heads = blocks ? heads_of_blocks[which] : heads_of_any[which];
  const int64_t unit = blocks ? 32 : test_random_range(random, 1, 40);
  c->H = heads[0];
  c->G = heads[1];
  c->d = heads[2];
  c->dv = heads[3];
  c->Eq = unit * test_random_range(random, 1, 4);
  c->Ek = c->weight_layout == TEST_IN_BLOCK ? c->Eq : unit * test_random_range(random, 1, 4);
  c->Ev = c->weight_layout == TEST_IN_BLOCK ? c->Eq : unit * test_random_range(random, 1, 4);
  c->Eo = unit * test_random_range(random, 1, 4);
}

static test_case sample_case(test_random *random, uint64_t seed) {
  int32_t types[4];
  test_case c = {.seed = seed,
                 .B = 1 + 2 * test_random_range(random, 0, 1),
                 .Lq = rows_to_try[test_random_range(random, 0, COUNT(rows_to_try) - 1)],
                 .Lk = test_random_range(random, 1, 70),
                 .at_front = test_random_range(random, 0, 1),
                 .out_in = test_random_range(random, 0, 1),
                 .borrow = test_random_range(random, 0, 1),
                 .odd_addresses = test_random_range(random, 0, 1),
                 .weight_layout = (test_weight_layout)test_random_range(random, 0, TEST_IN_BLOCK),
                 .biases = (unsigned)test_random_range(random, 0, TEST_ALL),
                 .source = (test_source)test_random_range(random, TEST_CROSS, TEST_SELF),
                 .layout = (test_layout)test_random_range(random, 0, TEST_LENGTH_FIRST),
                 .accumulate = test_random_range(random, 0, 2) == 0,
                 .packed = test_random_range(random, 0, 3) == 0,
                 .packed_tail = test_random_range(random, 0, 1),
                 .norm = (mha_norm)test_random_range(random, 0, 2),
                 .rope = (mha_rope)test_random_range(random, 0, 2)};
  for (int k = 0; k < 4; k++)
    types[k] = (int32_t)test_random_range(random, 0, N_TYPES - 1);
  if (c.weight_layout == TEST_IN_BLOCK)
    types[1] = types[2] = types[0];
  set_types(&c, types);
  sample_heads(random, &c);
  sample_rules(random, &c);
  if (c.source != TEST_CROSS) /* one array for two */
    c.Ev = c.Ek;
  if (c.source == TEST_SELF)
    c.Ek = c.Ev = c.Eq;
  if (c.d < 4) /* the contract's bounds behind a normalisation */
    c.norm = MHA_NORM_NONE;
  if (c.d % 2)
    c.rope = MHA_ROPE_NONE;
  if (c.packed && c.layout == TEST_LENGTH_FIRST)
    c.layout = TEST_DENSE;
  return c;
}

static void a_sample(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 31);
  for (uint64_t seed = 0; seed < (test_small() ? 60 : 400); seed++) {
    const test_case c = sample_case(&random, seed);
    test_check(&c);
  }
}

/* ---- What changes no bit --------------------------------------------------------------------- */

static test_fixture f; /* one at a time; too large for a stack */

/* The same case with 1, 2 and 3 threads, with all results and none. */
static void expect_one_set_of_bits(test_case c) {
  float *first = NULL;
  const unsigned want = c.packed ? TEST_WANT_LSE : TEST_WANT_ALL;
  for (int run = 0; run < 6; run++) {
    c.threads = 1 + run % 3;
    c.want = run < 3 ? 0 : want;
    test_build(&f, &c);
    test_run_for_bits(&f, &first);
  }
  free(first);
}

static void threads_and_results_change_no_bit(void **state) {
  test_random random;
  (void)state;
  test_random_seed(&random, 32);
  for (uint64_t seed = 0; seed < (test_small() ? 20 : 100); seed++)
    expect_one_set_of_bits(sample_case(&random, seed));
  /* large enough for several threads in the usual build */
  for (int32_t type = MHA_F16; type < N_TYPES; type++)
    for (int64_t L = 4; L <= 70; L += 66) {
      const int32_t types[] = {type, type, MHA_F32, type};
      test_case c = {.seed = 1,
                     .B = 2,
                     .Lq = L,
                     .H = 8,
                     .G = 2,
                     .d = 64,
                     .Eq = test_small() ? 128 : 1088,
                     .out_in = type % 2,
                     .source = TEST_SELF,
                     .causal = true};
      set_types(&c, types);
      expect_one_set_of_bits(c);
    }
}

/* Copied or borrowed, at any address: the same numbers. */
static void where_they_lie_changes_no_bit(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type < N_TYPES; type++)
    for (size_t k = 0; k < COUNT(rows_to_try); k++)
      for (int out_in = 0; out_in < 2; out_in++) {
        float *first = NULL;
        for (int how = 0; how < 8; how++) {
          const int32_t types[] = {type, type, type, type};
          test_case c = {.seed = 3,
                         .Lq = rows_to_try[k],
                         .H = 2,
                         .d = 32,
                         .Eq = 96,
                         .source = TEST_SELF,
                         .out_in = out_in,
                         .borrow = how & 1,
                         .odd_addresses = how & 2,
                         .at_front = how & 4};
          set_types(&c, types);
          test_build(&f, &c);
          test_run_for_bits(&f, &first);
        }
        free(first);
      }
}

/* Each sequence has its rows, few or many, on its own: what is in the others changes none of its
 * bits. */
static bool is_of_entry_0(const void *user, int64_t b, int64_t i) {
  (void)user;
  (void)i;
  return b == 0;
}

static void other_entries_change_no_bit(void **state) {
  (void)state;
  for (int32_t type = MHA_F16; type < N_TYPES; type++)
    for (size_t k = 0; k < COUNT(rows_to_try); k++)
      for (int layout = TEST_DENSE; layout <= TEST_LENGTH_FIRST; layout++) {
        const int32_t types[] = {type, type, type, type};
        test_case c = {.seed = 3,
                       .B = 3,
                       .Lq = rows_to_try[k],
                       .H = 2,
                       .d = 32,
                       .Eq = 96,
                       .source = TEST_SELF,
                       .layout = (test_layout)layout,
                       .out_in = k % 2};
        set_types(&c, types);
        test_build(&f, &c);
        test_run(&f);
        float *before = test_gather(&f.output);
        for (int64_t i = 0; i < f.c.Lq; i++)
          *test_at(&f.query, 1 + i % 2, i, 0, 5) = i % 3 ? 1e30F : test_poison();
        test_run(&f);
        test_same_rows(&f, before, is_of_entry_0, NULL);
        free(before);
        test_release(&f);
      }
}

/* ---- Room for each worker -------------------------------------------------------------------- */

/* A single row is cut into parts while many rows are cut into panels, whose matrix is widened: in
 * one list of tasks, of which any worker may take any. Each needs room of its own for a matrix, and
 * the scratch ends at a guard page. Who takes what is not foreseeable, so there are many calls. */
static void every_worker_has_room(void **state) {
  (void)state;
  for (int32_t query_type = MHA_F32; query_type <= MHA_F16; query_type++) {
    const int32_t types[] = {query_type, MHA_F16, MHA_F16, MHA_F32};
    test_case c = {.seed = 1,
                   .Lq = 1,
                   .Lk = 300,
                   .H = 2,
                   .d = 8,
                   .Eq = 4160,
                   .Ek = 2048,
                   .Eo = 16,
                   .threads = 6};
    set_types(&c, types);
    test_build(&f, &c);
    for (int call = 0; call < (test_small() ? 2 : 40); call++)
      test_run(&f);
    test_judge_now(&f);
    test_release(&f);
  }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static int64_t at_least_one(int64_t n) {
  return n > 1 ? n : 1;
}

/* After a reserve for the largest shape no call up to it takes memory, few rows or many. */
static void expect_no_memory(const test_case *largest) {
  static test_allocator allocator;
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_context_options options;
  mha_shape shape;
  mha_error error;
  test_allocator_init(&allocator);
  MHA_INIT(&options);
  options.n_threads = largest->threads;
  options.allocator = &allocator.mha;
  MHA_INIT(&shape);
  shape.packed = largest->packed;
  shape.batch = largest->B;
  shape.query_length = largest->Lq;
  shape.key_length = largest->Lk;
  test_expect(mha_context_create(&options, &context, &error), MHA_OK, &error);
  for (int64_t L = 0; L <= largest->Lq; L += 1 + L / 3)
    for (int64_t B = 1; B <= largest->B; B++) {
      test_case c = *largest;
      c.Lq = at_least_one(L);
      c.Lk = at_least_one(largest->Lk - L);
      c.B = B;
      test_build(&f, &c);
      f.config.allocator = NULL;
      if (!weights) {
        f.matrices.ownership = MHA_COPY;
        test_expect(mha_weights_create(&f.config, &f.matrices, &weights, &error), MHA_OK, &error);
        test_expect(mha_context_reserve(context, weights, &shape, &error), MHA_OK, &error);
      }
      const int64_t calls = allocator.calls;
      test_poison_results(&f);
      test_expect(mha_forward(context, weights, &f.args, &error), MHA_OK, &error);
      if (allocator.calls != calls)
        test_failed("the call took memory");
      test_release(&f);
    }
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&allocator);
}

static void calls_after_a_reserve_take_no_memory(void **state) {
  const int64_t lengths[][2] = {{1, 9}, {8, 8}, {9, 60}, {60, 9}, {70, 70}};
  (void)state;
  for (int32_t type = 0; type < N_TYPES; type++)
    for (size_t k = 0; k < COUNT(lengths); k++)
      for (int packed = 0; packed < 2; packed++)
        for (int threads = 1; threads <= 3; threads += 2) {
          const int32_t types[] = {type, MHA_F32, type, type};
          test_case c = {.seed = k,
                         .B = 3,
                         .Lq = lengths[k][0],
                         .Lk = lengths[k][1],
                         .H = 4,
                         .G = 2,
                         .d = 32,
                         .Eq = 160,
                         .packed = packed,
                         .out_in = k % 2,
                         .threads = threads};
          set_types(&c, types);
          expect_no_memory(&c);
        }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_type_of_every_matrix),
      cmocka_unit_test(every_way_to_lay_them),
      cmocka_unit_test(few_rows_and_many),
      cmocka_unit_test(absent_matrices),
      cmocka_unit_test(wide_layers),
      cmocka_unit_test(a_sample),
      cmocka_unit_test(threads_and_results_change_no_bit),
      cmocka_unit_test(where_they_lie_changes_no_bit),
      cmocka_unit_test(other_entries_change_no_bit),
      cmocka_unit_test(every_worker_has_room),
      cmocka_unit_test(calls_after_a_reserve_take_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
