/* What a caller gives: structs that nobody prepared, sizes that were forgotten, sizes whose
 * products overflow, strides that do not count, arrays by address. */
#include "fixture.h"

#include "base/arguments.h"
#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_fixture fixture; /* one at a time; too large for a stack */

static void expect_message(mha_status got, mha_status expected, const mha_error *error,
                           const char *words) {
  test_expect(got, expected, error);
  if (!strstr(error->message, words) || !strstr(error->message, "; rule: "))
    test_failed("the message does not say \"%s\": \"%s\"", words, error->message);
}

/* ---- Structs --------------------------------------------------------------------------------- */

/* A struct of one release more than the first: `later` joined. */
typedef struct grown {
  size_t struct_size;
  int64_t first, later;
} grown;

static void an_older_callers_struct_is_not_overwritten(void **state) {
  const grown ours = {sizeof(grown), 1, 2};
  struct {
    size_t struct_size;
    int64_t first, neighbour;
  } theirs = {offsetof(grown, later), 0, 77};
  grown read;
  (void)state;
  test_expect(mha_read_struct(&read, sizeof read, offsetof(grown, later), &theirs, "theirs", NULL),
              MHA_OK, NULL);
  assert_int_equal(read.later, 0);
  mha_write_struct(&theirs, &ours, sizeof ours);
  assert_int_equal(theirs.struct_size, offsetof(grown, later));
  assert_int_equal(theirs.first, 1);
  assert_int_equal(theirs.neighbour, 77);
}

/* The other way round: a newer caller's struct keeps what this version does not know. */
static void a_newer_callers_struct_keeps_its_tail(void **state) {
  const grown ours = {offsetof(grown, later), 1, 55};
  grown theirs = {sizeof(grown), 0, 0};
  (void)state;
  mha_write_struct(&theirs, &ours, offsetof(grown, later));
  assert_int_equal(theirs.struct_size, sizeof(grown));
  assert_int_equal(theirs.first, 1);
  assert_int_equal(theirs.later, 0);
}

/* The struct ends where readable memory ends: whoever believes its size steps outside. */
static void sizes_that_nobody_set(void **state) {
  const size_t sizes[] = {MHA_MAX_STRUCT_BYTES + 1, (size_t)1 << 20, (size_t)0xabababab, SIZE_MAX};
  (void)state;
  for (size_t i = 0; i < COUNT(sizes); i++) {
    test_pool pool = {0};
    mha_error error;
    grown known;
    grown *given = test_pool_bytes(&pool, sizeof *given);
    memset(given, 0, sizeof *given);
    given->struct_size = sizes[i];
    expect_message(mha_read_struct(&known, sizeof known, sizeof known, given, "given", &error),
                   MHA_ERROR_STRUCT_SIZE, &error, "MHA_INIT(&given)");
    test_pool_free(&pool);
  }
}

static void a_config_that_is_not_there(void **state) {
  mha_config config;
  (void)state;
  mha_config_init_sized(NULL, sizeof config, 8, 2);
  memset(&config, 0xff, sizeof config);
  mha_config_init_sized(&config, offsetof(mha_config, scale), 8, 2);
  for (size_t i = 0; i < sizeof config; i++)
    assert_int_equal(((unsigned char *)&config)[i], 0xff);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

typedef struct layer {
  mha_weights *weights;
  mha_context *context;
} layer;

static layer open_layer(const test_case *c) {
  layer l = {NULL, NULL};
  test_build(&fixture, c);
  test_poison_results(&fixture);
  if (!c->core)
    test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &l.weights, NULL), MHA_OK,
                NULL);
  test_expect(mha_context_create(&fixture.options, &l.context, NULL), MHA_OK, NULL);
  return l;
}

static void close_layer(layer *l) {
  mha_context_destroy(l->context);
  mha_weights_destroy(l->weights);
  test_allocator_check(&fixture.allocator);
  test_release(&fixture);
}

/* The fixture's call as it is now fails and writes nothing. */
static void expect_call_fails(const layer *l, mha_status expected, const char *words) {
  mha_error error;
  expect_message(test_call(&fixture, l->context, l->weights, &error), expected, &error, words);
  for (int64_t at = 0; at < fixture.output.floats; at++)
    if (!test_equal_bits(fixture.output.data[at], fixture.before[at]))
      test_failed("output element %" PRId64 " was written", at);
}

static void expect_call_succeeds(const layer *l) {
  mha_error error;
  test_expect(test_call(&fixture, l->context, l->weights, &error), MHA_OK, &error);
}

/* ---- Sizes that were forgotten --------------------------------------------------------------- */

typedef struct forgotten {
  bool batch, query_length, key_length; /* which are 0 */
  bool query, key, output;              /* which are given */
  int32_t mode;
  bool cache;
  const char *words; /* NULL = nothing was forgotten */
} forgotten;

static const forgotten forgotten_sizes[] = {
    {.batch = true, .query = true, .output = true, .words = "args.batch is 0"},
    {.batch = true, .query = true, .words = "args.batch is 0 although args.query"},
    {.batch = true, .output = true, .words = "args.batch is 0 although args.output"},
    {.batch = true, .key = true, .words = "args.batch is 0 although args.key"},
    {.batch = true},
    {.query_length = true, .query = true, .output = true, .words = "args.query_length is 0"},
    {.query_length = true, .output = true, .words = "args.query_length is 0 although args.output"},
    {.query_length = true},
    {.query_length = true, .key_length = true},
    {.query = true, .key_length = true, .key = true, .output = true, .words = "args.key_length"},
    /* with a cache: the rows of the query are the keys */
    {.query_length = true, .query = true, .cache = true, .words = "args.query_length"},
    {.query_length = true,
     .query = true,
     .cache = true,
     .mode = MHA_CACHE_APPEND,
     .words = "args.query_length is 0 although args.query"},
    {.query_length = true,
     .query = true,
     .output = true,
     .cache = true,
     .mode = MHA_CACHE_ATTEND,
     .words = "args.query_length"},
    {.batch = true, .query = true, .cache = true, .mode = MHA_CACHE_ATTEND, .words = "args.batch"},
    /* or those of the key */
    {.query_length = true,
     .key_length = true,
     .key = true,
     .cache = true,
     .mode = MHA_CACHE_APPEND,
     .words = "args.key_length"},
    {.query_length = true, .key = true, .cache = true},
    /* append only: queries and output are not used */
    {.query_length = true,
     .query = true,
     .output = true,
     .key = true,
     .cache = true,
     .mode = MHA_CACHE_APPEND},
};

static void set_forgotten(const forgotten *row, mha_cache *cache) {
  mha_forward_args *a = &fixture.args;
  a->batch = row->batch ? 0 : a->batch;
  a->query_length = row->query_length ? 0 : a->query_length;
  a->key_length = row->key_length || !row->key ? 0 : a->key_length;
  a->query = row->query ? a->query : NULL;
  a->key = row->key ? a->key : NULL;
  a->value = row->key ? a->value : NULL;
  a->output = row->output ? a->output : NULL;
  a->cache_mode = row->mode;
  a->cache = row->cache ? cache : NULL;
}

static mha_cache *make_cache(const mha_weights *weights, int64_t entries, int64_t capacity) {
  mha_cache *cache = NULL;
  mha_cache_options options;
  mha_error error;
  MHA_INIT(&options);
  options.n_entries = entries;
  options.capacity = capacity;
  options.weights = weights;
  test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
  return cache;
}

static void sizes_that_were_forgotten(void **state) {
  (void)state;
  for (size_t i = 0; i < COUNT(forgotten_sizes); i++)
    for (int allowed = 0; allowed < 2; allowed++) {
      const forgotten *row = &forgotten_sizes[i];
      const test_case c = {.seed = 1, .B = 2, .Lq = 3, .Lk = 4, .H = 2, .d = 2};
      layer l = open_layer(&c);
      mha_cache *cache = make_cache(l.weights, 2, 9);
      set_forgotten(row, cache);
      fixture.args.flags = allowed ? MHA_ALLOW_EMPTY : 0;
      test_note("row %zu, allowed %d", i, allowed);
      if (row->words && !allowed)
        expect_call_fails(&l, MHA_ERROR_SIZE, row->words);
      else
        expect_call_succeeds(&l);
      mha_cache_destroy(cache);
      close_layer(&l);
    }
}

/* The same of mha_attend's tensors. */
static void extents_that_were_forgotten(void **state) {
  const char *const words[] = {"q.batch is 0", "q.length is 0", "k.length is 0"};
  (void)state;
  for (int which = 0; which < 3; which++)
    for (int allowed = 0; allowed < 2; allowed++)
      for (int given = 0; given < 2; given++) {
        const test_case c = {.seed = 1, .core = true, .B = 2, .Lq = 3, .Lk = 4, .H = 2, .d = 2};
        layer l = open_layer(&c);
        test_fixture *f = &fixture;
        if (which == 0)
          f->q.batch = f->k.batch = f->v.batch = 0;
        if (which == 1)
          f->q.length = 0;
        if (which == 2)
          f->k.length = f->v.length = 0;
        if (!given && which < 2)
          f->q.data = f->attend_args.output = NULL;
        if (!given)
          f->k.data = which == 1 ? f->k.data : NULL;
        f->attend_args.flags = allowed ? MHA_ALLOW_EMPTY : 0;
        test_note("extent %d, allowed %d, given %d", which, allowed, given);
        if (given && !allowed)
          expect_call_fails(&l, MHA_ERROR_SIZE, words[which]);
        else
          expect_call_succeeds(&l);
        close_layer(&l);
      }
}

static void flags_and_reserves_that_are_wrong(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++) {
    const test_case c = {.seed = 1, .core = core, .Lq = 3, .Lk = 4, .H = 2, .d = 2};
    layer l = open_layer(&c);
    fixture.args.flags = fixture.attend_args.flags = MHA_ALLOW_EMPTY | MHA_SCALE;
    expect_call_fails(&l, MHA_ERROR_VALUE, "args.flags");
    fixture.args.flags = fixture.attend_args.flags = 0;
    fixture.args.reserved = fixture.attend_args.reserved = 1;
    expect_call_fails(&l, MHA_ERROR_VALUE, "args.reserved");
    close_layer(&l);
  }
}

/* ---- Packed input without a sequence --------------------------------------------------------- */

static void forget_sequences(void) {
  static const int64_t starts[1] = {0};
  fixture.rules.query_starts = fixture.rules.key_starts = starts;
  fixture.args.batch = fixture.attend_args.n_sequences = 0;
  fixture.args.flags = fixture.attend_args.flags = 0;
}

/* All rows lie behind the last sequence and are written like queries that see no key. */
static void packed_rows_of_no_sequence(void **state) {
  (void)state;
  for (int which = 0; which < 8; which++) {
    const bool core = which & 1, accumulate = which & 2;
    const test_case c = {.seed = 3,
                         .core = core,
                         .packed = true,
                         .B = 2,
                         .Lq = which & 4 ? 600 : 5, /* more than a tile, too */
                         .Lk = 7,
                         .H = 4,
                         .G = 2,
                         .d = 2,
                         .dv = 3,
                         .norm = MHA_NORM_PER_HEAD,
                         .rope = MHA_ROPE_HALVES,
                         .biases = core ? 0 : TEST_ALL,
                         .accumulate = !core && accumulate,
                         .want = TEST_WANT_LSE};
    layer l = open_layer(&c);
    forget_sequences();
    test_note("which %d", which);
    expect_call_fails(&l, MHA_ERROR_SIZE, core ? "args.n_sequences is 0" : "args.batch is 0");
    fixture.args.flags = fixture.attend_args.flags = MHA_ALLOW_EMPTY;
    expect_call_succeeds(&l);
    const test_view *y = &fixture.output;
    for (int64_t i = 0; i < y->length; i++)
      for (int64_t h = 0; h < y->heads; h++)
        for (int64_t k = 0; k < y->size; k++) {
          const float *at = test_at(y, 0, i, h, k);
          const float bias = core ? 0.0F : fixture.wo.bias[k];
          const float before = fixture.c.accumulate ? fixture.before[at - y->data] : 0.0F;
          assert_true(*at == before + bias);
        }
    for (int64_t at = 0; at < fixture.lse_n; at++)
      assert_true(fixture.lse[at] == -INFINITY);
    close_layer(&l);
  }
}

/* ---- Products that overflow ------------------------------------------------------------------ */

static void rows_whose_number_overflows(void **state) {
  (void)state;
  test_case c = {.seed = 1, .B = 2, .Lq = 2, .Lk = 2, .H = 1, .d = 4};
  layer l = open_layer(&c);
  fixture.args.batch = 1024;
  fixture.args.key_length = INT64_C(1) << 53;
  fixture.args.key_batch_stride = fixture.args.value_batch_stride = 1; /* rows that overlap */
  fixture.args.query_batch_stride = 1;
  fixture.args.output_batch_stride = 0;
  expect_call_fails(&l, MHA_ERROR_OVERFLOW, "args.key has 1024 entries");
  close_layer(&l);
}

static void rows_that_become_too_many_numbers(void **state) {
  (void)state;
  test_case c = {.seed = 1, .Lq = 2, .Lk = 2, .H = 16, .d = 64, .Eq = 1, .Ek = 1, .Ev = 1, .Eo = 1};
  layer l = open_layer(&c);
  fixture.args.query_length = INT64_C(1) << 58;
  expect_call_fails(&l, MHA_ERROR_OVERFLOW, "args.query has 1 entries");
  close_layer(&l);
}

/* Rows that are padding count too: nothing could walk over them. */
static void padding_whose_number_overflows(void **state) {
  const int64_t counts[4] = {0, 0, 0, 0};
  (void)state;
  test_case c = {.seed = 1, .B = 4, .Lq = 1, .Lk = 1, .H = 1, .d = 1, .Eq = 1};
  layer l = open_layer(&c);
  mha_cache *cache = make_cache(l.weights, 4, 8);
  fixture.args.cache = cache;
  fixture.args.cache_mode = MHA_CACHE_APPEND;
  fixture.args.new_lengths = counts;
  fixture.args.key_length = (INT64_C(1) << 60) - 1;
  fixture.args.key_batch_stride = fixture.args.value_batch_stride = 1;
  expect_call_fails(&l, MHA_ERROR_OVERFLOW, "args.key has 4 entries");
  mha_cache_destroy(cache);
  close_layer(&l);
}

/* Tables of a layer without rotary positions are not looked at. */
static void tables_that_are_not_used(void **state) {
  static const float table[2] = {0};
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  test_case c = {.seed = 1, .Lq = 2, .Lk = 2, .H = 2, .d = 4};
  layer l = open_layer(&c);
  fixture.config.rope_cos = fixture.config.rope_sin = table;
  fixture.config.rope_positions = INT64_MAX;
  fixture.config.rotary_size = 4;
  test_expect(mha_weights_create(&fixture.config, &fixture.matrices, &weights, &error), MHA_OK,
              &error);
  test_expect(test_call(&fixture, l.context, weights, &error), MHA_OK, &error);
  mha_weights_destroy(weights);
  close_layer(&l);
}

static void more_sequences_than_can_be_counted(void **state) {
  (void)state;
  for (int core = 0; core < 2; core++) {
    test_case c = {.seed = 1, .core = core, .packed = true, .B = 2, .Lq = 4, .H = 1, .d = 2};
    layer l = open_layer(&c);
    fixture.args.batch = fixture.attend_args.n_sequences = INT64_MAX;
    expect_call_fails(&l, MHA_ERROR_OVERFLOW, "query_starts");
    close_layer(&l);
  }
}

/* ---- Strides that do not count --------------------------------------------------------------- */

static const int64_t odd_strides[] = {0, 1, -7, INT64_MAX, INT64_MIN};

/* Strides of extents of 1 are what NumPy makes of them. */
static void set_unit_strides(mha_tensor *t, int64_t stride) {
  mha_tensor s = *t;
  if (s.row_stride == 0) { /* dense so far */
    s.head_stride = s.size;
    s.row_stride = s.heads * s.size;
    s.batch_stride = s.length * s.row_stride;
  }
  s.size_stride = s.size == 1 ? stride : 1;
  s.head_stride = s.heads == 1 ? stride : s.head_stride;
  s.row_stride = s.length == 1 ? stride : s.row_stride;
  s.batch_stride = s.batch == 1 ? stride : s.batch_stride;
  *t = s;
}

/* Bit n of `units` makes extent n of batch, queries, keys, heads, size 1. */
static test_case unit_case(int units, bool core) {
  return (test_case){.seed = 7,
                     .core = core,
                     .B = units & 1 ? 1 : 2,
                     .Lq = units & 2 ? 1 : 3,
                     .Lk = units & 4 ? 1 : 40,
                     .H = units & 8 ? 1 : 2,
                     .d = units & 16 ? 1 : 3,
                     .Eq = 5,
                     .Eo = units & 16 ? 1 : 6,
                     .has_mask = true,
                     .has_bias = true,
                     .mask_extents = units & 4 ? TEST_FULL : TEST_FULL_HEADS,
                     .bias_extents = units & 2 ? TEST_FULL : TEST_FULL_ROWS};
}

static void strides_of_tensors(void **state) {
  (void)state;
  for (int units = 0; units < 32; units++)
    for (size_t i = 0; i < COUNT(odd_strides); i++) {
      const test_case c = unit_case(units, true);
      test_build(&fixture, &c);
      const mha_tensor q = fixture.q;
      set_unit_strides(&fixture.q, odd_strides[i]);
      set_unit_strides(&fixture.k, odd_strides[i]);
      set_unit_strides(&fixture.v, odd_strides[i]);
      mha_tensor y = {.batch = q.batch, .length = q.length, .heads = q.heads, .size = q.size};
      set_unit_strides(&y, odd_strides[i]);
      fixture.attend_args.output_batch_stride = y.batch_stride;
      fixture.attend_args.output_row_stride = y.row_stride;
      fixture.attend_args.output_head_stride = y.head_stride;
      test_note("units %d, stride %" PRId64, units, odd_strides[i]);
      oracle_result result;
      test_ask_oracle(&fixture, &result);
      test_run(&fixture);
      test_judge(&fixture, &result);
      oracle_free(&result);
      test_release(&fixture);
    }
}

static void set_unit_rows(int64_t length, int64_t *batch, int64_t *row, int64_t stride) {
  *batch = fixture.args.batch == 1 ? stride : 0;
  *row = length == 1 ? stride : 0;
}

static void set_unit_extents(int64_t stride) {
  mha_mask *m = &fixture.rules.attend;
  mha_bias *b = &fixture.rules.bias;
  m->batch_stride = m->batch == 1 ? stride : m->batch_stride;
  m->head_stride = m->heads == 1 ? stride : m->head_stride;
  m->row_stride = m->rows == 1 ? stride : m->row_stride;
  b->batch_stride = b->batch == 1 ? stride : b->batch_stride;
  b->head_stride = b->heads == 1 ? stride : b->head_stride;
  b->row_stride = b->rows == 1 ? stride : b->row_stride;
}

static void strides_of_rows_masks_and_matrices(void **state) {
  (void)state;
  for (int units = 0; units < 32; units++)
    for (size_t i = 0; i < COUNT(odd_strides); i++) {
      const int64_t stride = odd_strides[i];
      test_case c = unit_case(units, false);
      c.Eq = c.Ek = c.Ev = units & 16 ? 1 : 5; /* IN_OUT: a matrix of one row */
      test_build(&fixture, &c);
      mha_forward_args *a = &fixture.args;
      set_unit_rows(c.Lq, &a->query_batch_stride, &a->query_row_stride, stride);
      set_unit_rows(c.Lk, &a->key_batch_stride, &a->key_row_stride, stride);
      set_unit_rows(c.Lk, &a->value_batch_stride, &a->value_row_stride, stride);
      set_unit_rows(c.Lq, &a->output_batch_stride, &a->output_row_stride, stride);
      set_unit_extents(stride);
      mha_matrices *m = &fixture.matrices;
      if (units & 16)
        m->query_ld = m->key_ld = m->value_ld = stride;
      if (units & 8 && units & 16) /* H·dv = 1 */
        m->output_ld = stride;
      test_note("units %d, stride %" PRId64, units, stride);
      oracle_result result;
      test_ask_oracle(&fixture, &result);
      test_run(&fixture);
      test_judge(&fixture, &result);
      oracle_free(&result);
      test_release(&fixture);
    }
}

static void strides_of_ready_rows(void **state) {
  const float numbers[2] = {1.0F, 2.0F};
  (void)state;
  for (size_t i = 0; i < COUNT(odd_strides); i++) {
    mha_cache *cache = NULL;
    mha_cache_options options;
    mha_error error;
    mha_tensor k, v;
    const int64_t s = odd_strides[i];
    MHA_INIT(&options);
    options.n_entries = options.capacity = options.n_kv_heads = 1;
    options.head_size = 2;
    test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
    const mha_tensor rows = {numbers, 1, 1, 1, 2, s, s, s, 1, MHA_F32, 0};
    test_expect(mha_cache_append(cache, &rows, &rows, NULL, NULL, &error), MHA_OK, &error);
    test_expect(mha_cache_view(cache, &k, &v, &error), MHA_OK, &error);
    assert_memory_equal(k.data, numbers, sizeof numbers);
    assert_memory_equal(v.data, numbers, sizeof numbers);
    mha_cache_destroy(cache);
  }
}

/* ---- Arrays by address ----------------------------------------------------------------------- */

static void ranges_are_bounded(void **state) {
  struct {
    mha_address_ranges ranges;
    unsigned char fence[sizeof(mha_address_range)];
  } guarded = {.ranges = {.n = 0}};
  static const float numbers[1];
  mha_error error = {0};
  (void)state;
  memset(guarded.fence, 0x5a, sizeof guarded.fence);
  for (int i = 0; i < MHA_MAX_RANGES; i++)
    test_expect(mha_ranges_add(&guarded.ranges, "one", numbers, 1, sizeof(float), false, &error),
                MHA_OK, &error);
  expect_message(
      mha_ranges_add(&guarded.ranges, "the last straw", numbers, 1, sizeof(float), false, &error),
      MHA_ERROR_UNSUPPORTED, &error, "the last straw");
  assert_int_equal(guarded.ranges.n, MHA_MAX_RANGES);
  for (size_t i = 0; i < sizeof guarded.fence; i++)
    assert_int_equal(guarded.fence[i], 0x5a);
}

/* Rows of one array and of another, in floats from one address. */
typedef struct placed_rows {
  int64_t at, width;
  mha_step steps[MHA_MAX_STEPS];
} placed_rows;

static mha_status place(const placed_rows *a, const placed_rows *b, mha_error *error) {
  static const float numbers[1000];
  const placed_rows *both[] = {a, b};
  const char *names[] = {"first", "second"};
  mha_address_ranges ranges = {.n = 0};
  mha_status status = MHA_OK;
  for (int k = 0; !status && k < 2; k++) {
    const placed_rows *p = both[k];
    int64_t elements = p->width;
    for (int i = 0; i < MHA_MAX_STEPS; i++)
      elements += p->steps[i].count > 1 ? (p->steps[i].count - 1) * p->steps[i].stride : 0;
    status = mha_ranges_add(&ranges, names[k], numbers + 100 + p->at, elements, sizeof(float), true,
                            error);
    if (!status)
      mha_ranges_have_steps(&ranges, names[k], p->steps, MHA_MAX_STEPS, p->width);
  }
  return status ? status : mha_ranges_check(&ranges, error);
}

/* Whichever is added first. */
static void expect_placed(const placed_rows *a, const placed_rows *b, bool apart) {
  for (int turn = 0; turn < 2; turn++) {
    mha_error error = {0};
    test_note("%d wide at %d, %d wide at %d, turn %d", (int)a->width, (int)a->at, (int)b->width,
              (int)b->at, turn);
    const mha_status status = place(turn ? b : a, turn ? a : b, &error);
    if (apart)
      test_expect(status, MHA_OK, &error);
    else
      expect_message(status, MHA_ERROR_OVERLAP, &error, turn ? "first" : "second");
  }
  test_note("%s", "");
}

static void rows_side_by_side(void **state) {
  const placed_rows a = {0, 4, {{5, 10}}};
  const struct {
    placed_rows b;
    bool apart;
  } rows[] = {{{4, 6, {{5, 10}}}, true},   /* right behind, up to the next row */
              {{4, 7, {{5, 10}}}, false},  /* one column too many: into the next row */
              {{3, 2, {{5, 10}}}, false},  /* one column of the other's */
              {{5, 2, {{4, 10}}}, true},   /* fewer rows */
              {{24, 6, {{5, 10}}}, true},  /* from the third row on */
              {{26, 4, {{5, 10}}}, true},  /* up to the next row's beginning */
              {{26, 5, {{5, 10}}}, false}, /* and into it */
              {{-6, 6, {{5, 10}}}, true},  /* begins before */
              {{-5, 5, {{5, 10}}}, true},  /* likewise, with room in front */
              {{-5, 6, {{5, 10}}}, false}, /* reaches the first column */
              {{4, 5, {{5, 11}}}, false},  /* another period */
              {{4, 5, {{9, 5}}}, false},   /* no gaps */
              {{4, 6, {{1, 10}}}, false},  /* a single row has none */
              {{50, 40, {{1, 0}}}, true},  /* behind all of it */
              {{4, 2, {{5, 20}}}, false}}; /* a period twice as long is another one */
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    expect_placed(&a, &rows[i].b, rows[i].apart);
}

/* Several dimensions: what they have in common may be the gaps of any of them. */
static void blocks_side_by_side(void **state) {
  const struct {
    placed_rows a, b;
    bool apart;
  } rows[] = {/* [2][3][2][4] next to itself: in rows of 8 in 24, entries of 72 */
              {{0, 4, {{2, 72}, {3, 24}, {2, 4}}}, {8, 4, {{2, 72}, {3, 24}, {2, 4}}}, true},
              {{0, 4, {{2, 72}, {3, 24}, {2, 4}}}, {7, 4, {{2, 72}, {3, 24}, {2, 4}}}, false},
              {{0, 4, {{2, 72}, {3, 24}, {2, 4}}}, {17, 4, {{2, 72}, {3, 24}, {2, 4}}}, false},
              /* in any order of the dimensions */
              {{0, 4, {{2, 4}, {2, 72}, {3, 24}}}, {16, 4, {{3, 24}, {2, 4}, {2, 72}}}, true},
              /* heads alternate */
              {{0, 4, {{2, 24}, {3, 8}}}, {4, 4, {{2, 24}, {3, 8}}}, true},
              {{0, 4, {{2, 24}, {3, 8}}}, {5, 4, {{2, 24}, {3, 8}}}, false},
              /* entries alternate, whose rows have gaps that are not the other's */
              {{0, 4, {{2, 40}, {3, 6}}}, {20, 4, {{2, 40}, {3, 6}}}, true},
              {{0, 4, {{2, 40}, {3, 6}}}, {24, 4, {{2, 40}, {3, 6}}}, true},
              {{0, 4, {{2, 40}, {3, 6}}}, {25, 4, {{2, 40}, {3, 6}}}, false},
              /* the longer stride is no multiple: rows of one entry lie in gaps of another's */
              {{0, 4, {{2, 43}, {9, 10}}}, {5, 4, {{2, 43}, {9, 10}}}, false}};
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    expect_placed(&rows[i].a, &rows[i].b, rows[i].apart);
}

/* Steps belong to the array that was added last; one that was left out has none. */
static void steps_of_an_array_that_was_not_added(void **state) {
  static const float numbers[1];
  const mha_step step = {5, 10};
  const char *name = "there";
  mha_address_ranges ranges = {.n = 0};
  mha_error error = {0};
  (void)state;
  mha_ranges_have_steps(&ranges, name, &step, 1, 4);
  assert_int_equal(ranges.n, 0);
  test_expect(mha_ranges_add(&ranges, name, numbers, 44, sizeof(float), true, &error), MHA_OK,
              &error);
  test_expect(mha_ranges_add(&ranges, "missing", NULL, 44, sizeof(float), true, &error), MHA_OK,
              &error);
  mha_ranges_have_steps(&ranges, "missing", &step, 1, 4);
  for (int k = 0; k < MHA_MAX_STEPS; k++)
    assert_int_equal(ranges.items[0].gaps[k].period, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(an_older_callers_struct_is_not_overwritten),
      cmocka_unit_test(a_newer_callers_struct_keeps_its_tail),
      cmocka_unit_test(sizes_that_nobody_set),
      cmocka_unit_test(a_config_that_is_not_there),
      cmocka_unit_test(sizes_that_were_forgotten),
      cmocka_unit_test(extents_that_were_forgotten),
      cmocka_unit_test(flags_and_reserves_that_are_wrong),
      cmocka_unit_test(packed_rows_of_no_sequence),
      cmocka_unit_test(rows_whose_number_overflows),
      cmocka_unit_test(rows_that_become_too_many_numbers),
      cmocka_unit_test(padding_whose_number_overflows),
      cmocka_unit_test(tables_that_are_not_used),
      cmocka_unit_test(more_sequences_than_can_be_counted),
      cmocka_unit_test(strides_of_tensors),
      cmocka_unit_test(strides_of_rows_masks_and_matrices),
      cmocka_unit_test(strides_of_ready_rows),
      cmocka_unit_test(ranges_are_bounded),
      cmocka_unit_test(rows_side_by_side),
      cmocka_unit_test(blocks_side_by_side),
      cmocka_unit_test(steps_of_an_array_that_was_not_added),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
