/* What must hold for every way back, whatever the rules: threads, tapes and the choice of gradients
 * change no bit; nothing comes from or goes to a token that nobody sees. */
#include "backward_fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static test_back s; /* one at a time; too large for a stack */

static const unsigned inputs = 1U << TEST_D_QUERY | 1U << TEST_D_KEY | 1U << TEST_D_VALUE;

/* ---- Random calls ---------------------------------------------------------------------------- */

/* Layers and cores by turns. Every fifth call is long: several tiles of queries and keys, one or
 * two heads, so that a key head is shared among tasks. */
static test_back_case draw(test_random *r, uint64_t seed) {
  test_back_case c = test_back_draw(r, seed, seed % 2);
  test_case *f = &c.forward;
  if (seed % 5 == 0 && f->absent == 0) {
    const int64_t group = f->H / f->G;
    f->B = 1;
    f->G = 1;
    f->H = group > 1 ? 2 : 1;
    f->Lq = test_small() ? 70 : 300;
    f->Lk = test_small() ? 150 : 530;
  }
  return c;
}

typedef void property(test_random *r);

/* `check` for the cases that `draw` and then `adapt` say. */
static void each(uint64_t first, uint64_t n, void (*adapt)(test_back_case *), property *check) {
  test_random r;
  test_random_seed(&r, first);
  for (uint64_t seed = first; seed < first + (test_small() ? n / 5 : n); seed++) {
    test_back_case c = draw(&r, seed);
    if (adapt)
      adapt(&c);
    test_back_build(&s, &c);
    test_back_run(&s);
    check(&r);
    test_back_release(&s);
  }
}

/* ---- Bits ------------------------------------------------------------------------------------ */

static void with_other_threads(test_random *r) {
  float *first = test_back_copy(&s);
  (void)r;
  for (int32_t threads = 1; threads <= 3; threads++) {
    test_back_use_threads(&s, threads);
    if (s.c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    test_back_same(&s, first, NULL, NULL);
  }
  free(first);
}

static void threads_change_no_bit(void **state) {
  (void)state;
  each(1000, 80, NULL, with_other_threads);
}

static void keep(test_back_case *c) {
  c->kept = true;
}

/* The core's log-sum-exp makes other bits than its maxima and sums; the judge sees to both. */
static void without_tape(test_random *r) {
  (void)r;
  if (s.f.c.core)
    return;
  float *first = test_back_copy(&s);
  mha_tape_destroy(s.tape);
  s.tape = NULL;
  test_back_run(&s);
  test_back_same(&s, first, NULL, NULL);
  free(first);
}

static void a_tape_changes_no_bit(void **state) {
  (void)state;
  each(2000, 60, keep, without_tape);
}

static void with_fewer(test_random *r) {
  const unsigned all = s.wanted;
  float *first = test_back_copy(&s);
  for (int k = 0; k < TEST_GRADIENTS; k++)
    if (all & (1U << k)) {
      s.wanted = 1U << k;
      test_back_run(&s);
      test_back_same(&s, first, NULL, NULL);
    }
  for (int few = 0; few < 4; few++) {
    s.wanted = all & (unsigned)test_random_bits(r);
    test_back_run(&s);
    test_back_same(&s, first, NULL, NULL);
  }
  s.wanted = 0;
  test_back_run(&s);
  s.wanted = all;
  free(first);
}

static void fewer_gradients_change_no_bit(void **state) {
  (void)state;
  each(3000, 80, NULL, with_fewer);
}

static void ask_for_all(test_back_case *c) {
  c->forward.want = TEST_WANT_ALL;
  if (c->forward.packed)
    c->forward.want = TEST_WANT_LSE;
  c->kept = true;
}

static float *results(void) {
  const int64_t parts[] = {s.f.output.floats, s.f.weights_n, s.f.average_n, s.f.lse_n};
  const float *from[] = {s.f.output.data, s.f.weights, s.f.average, s.f.lse};
  float *all = test_allocate((size_t)(parts[0] + parts[1] + parts[2] + parts[3]), sizeof *all);
  for (int64_t k = 0, at = 0; k < 4; at += parts[k++])
    if (parts[k] > 0)
      memcpy(all + at, from[k], (size_t)parts[k] * sizeof *all);
  return all;
}

static void forward_again(test_random *r) {
  mha_tape *tape = s.tape;
  (void)r;
  test_back_forward(&s);
  float *with = results();
  s.tape = NULL;
  test_back_forward(&s);
  float *without = results();
  s.tape = tape;
  const int64_t n = s.f.output.floats + s.f.weights_n + s.f.average_n + s.f.lse_n;
  test_same_bits("results", (test_shape){{1, 1, 1, n}}, without, with);
  free(with);
  free(without);
}

static void a_tape_changes_no_bit_of_the_forward_call(void **state) {
  (void)state;
  each(4000, 150, ask_for_all, forward_again);
}

/* ---- Accumulating ---------------------------------------------------------------------------- */

static void overwrite_all(test_back_case *c) {
  c->accumulate = false;
}

static double largest(const test_gradient *g, const float *numbers) {
  double size = 0;
  for (int64_t at = 0; at < g->floats; at++)
    if (!isnan(numbers[at])) /* a gap */
      size = fmax(size, fabs((double)numbers[at]));
  return size;
}

/* Onto zeros, twice: each sum is rounded on its way, by parts in 2^24 of what its numbers are. */
static void accumulate_twice(test_random *r) {
  float *once = test_back_copy(&s), *at = once;
  mha_error error;
  (void)r;
  test_back_clear(&s);
  s.args.accumulate = s.attend_args.accumulate = 1;
  test_back_run(&s);
  test_expect(test_back_call(&s, &error), MHA_OK, &error);
  for (int k = 0; k < TEST_GRADIENTS; k++) {
    const test_gradient *g = &s.gradients[k];
    const double bound = 4e-6 * largest(g, at) + 1e-6;
    for (int64_t row = 0; row < g->rows; row++)
      for (int64_t c = 0; c < g->columns; c++) {
        const double one = (double)at[g->row_at[row] + c];
        test_near(g->name, (double)test_back_at(&s, (test_gradient_name)k, row, c), 2 * one, bound);
      }
    at += g->floats;
  }
  free(once);
}

static void accumulating_adds(void **state) {
  (void)state;
  each(5000, 150, overwrite_all, accumulate_twice);
}

/* ---- Who sees whom --------------------------------------------------------------------------- */

/* [B][H][Lq][Lk] of the call at hand; of a packed one nothing is known but what is in a sequence.
 */
static bool *sees;

static bool seen(int64_t b, int64_t h, int64_t i, int64_t j) {
  const test_case *c = &s.f.c;
  return sees[((b * c->H + h) * c->Lq + i) * c->Lk + j];
}

static void find_who_sees(void) {
  const test_case *c = &s.f.c;
  oracle_result result;
  test_ask_oracle(&s.f, &result);
  sees = test_allocate((size_t)(c->B * c->H * c->Lq * c->Lk), sizeof *sees);
  for (int64_t row = 0, at = 0; row < c->B * c->H * c->Lq; row++)
    for (int64_t j = 0; j < c->Lk; j++, at++) {
      const int64_t b = row / c->Lq / c->H, h = row / c->Lq % c->H, i = row % c->Lq;
      sees[at] = c->packed ? test_reads_query(&s.f, 0, i) && test_reads_key(&s.f, 0, j)
                           : test_reads_query(&s.f, b, i) && test_reads_key(&s.f, b, j) &&
                                 test_sees(&s.f, &result, b, h, i, j);
    }
  oracle_free(&result);
}

/* Whether any query of heads [h, h + n) sees key j. */
static bool key_counts(int64_t b, int64_t h, int64_t n, int64_t j) {
  for (int64_t k = h; k < h + n; k++)
    for (int64_t i = 0; i < s.f.c.Lq; i++)
      if (seen(b, k, i, j))
        return true;
  return false;
}

/* Whether query i of any of those heads sees a key. */
static bool query_counts(int64_t b, int64_t h, int64_t n, int64_t i) {
  for (int64_t k = h; k < h + n; k++)
    for (int64_t j = 0; j < s.f.c.Lk; j++)
      if (seen(b, k, i, j))
        return true;
  return false;
}

/* The heads that one of the view's is read by: of the core those that share it, of a layer all. */
static int64_t heads_of(const test_view *v) {
  return s.f.c.H / v->heads;
}

/* Whether anything passes through row i of head h of a view: query and dy, or key and value. */
static bool counts(const test_view *v, int64_t b, int64_t i, int64_t h) {
  const int64_t n = heads_of(v);
  const bool as_query = v == &s.f.query || v == &s.dy;
  if (s.f.c.source == TEST_SELF && v != &s.dy)
    return query_counts(b, 0, n, i) || key_counts(b, 0, n, i);
  return as_query ? query_counts(b, h * n, n, i) : key_counts(b, h * n, n, i);
}

static void set_row(test_view *v, int64_t b, int64_t i, int64_t h, float number) {
  for (int64_t c = 0; c < v->size; c++)
    *test_at(v, b, i, h, c) = number;
}

/* Sets every row that nothing passes through; returns how many there are. */
static int64_t set_unseen(float number) {
  test_view *views[] = {&s.f.query, &s.f.key, &s.f.value, &s.dy};
  int64_t n = 0;
  for (size_t k = 0; k < COUNT(views); k++) {
    test_view *v = views[k];
    if ((k == 1 && s.f.c.source == TEST_SELF) || (k == 2 && s.f.c.source != TEST_CROSS))
      continue;
    for (int64_t at = 0; at < v->batch * v->length * v->heads; at++) {
      const int64_t h = at % v->heads, i = at / v->heads % v->length, b = at / v->heads / v->length;
      if (counts(v, b, i, h))
        continue;
      set_row(v, b, i, h, number);
      n++;
    }
    test_store(v);
  }
  return n;
}

static void expect_zero(test_gradient_name which, int64_t row) {
  const test_gradient *g = &s.gradients[which];
  for (int64_t c = 0; c < g->columns; c++)
    if (test_back_at(&s, which, row, c) != 0.0F)
      test_failed("%s, row %" PRId64 ", column %" PRId64 " is %g, and nobody sees it", g->name, row,
                  c, (double)test_back_at(&s, which, row, c));
}

static void unseen_rows_are_zero(void) {
  const test_view *views[] = {&s.f.query, &s.f.key, &s.f.value};
  for (int k = 0; k < 3; k++) {
    const test_view *v = views[k];
    if (!s.gradients[k].data)
      continue;
    for (int64_t at = 0; at < v->batch * v->length * v->heads; at++)
      if (!counts(v, at / v->heads / v->length, at / v->heads % v->length, at % v->heads))
        expect_zero((test_gradient_name)k, at);
  }
}

/* Whether any of the scores that a number of the bias is added to counts. */
static bool bias_counts(int64_t e, int64_t head, int64_t row, int64_t j) {
  const test_case *c = &s.f.c;
  const mha_bias *m = &s.f.rules.bias;
  for (int64_t b = m->batch > 1 ? e : 0; b < (m->batch > 1 ? e + 1 : c->B); b++)
    for (int64_t h = m->heads > 1 ? head : 0; h < (m->heads > 1 ? head + 1 : c->H); h++)
      for (int64_t i = m->rows > 1 ? row : 0; i < (m->rows > 1 ? row + 1 : c->Lq); i++)
        if (seen(b, h, i, j))
          return true;
  return false;
}

static void hidden_biases_are_zero(void) {
  const mha_bias *m = &s.f.rules.bias;
  for (int64_t at = 0; s.f.bias && at < m->batch * m->heads * m->rows; at++)
    for (int64_t j = 0; j < m->columns; j++) {
      const float got = test_back_at(&s, TEST_D_BIAS, at, j);
      if (!bias_counts(at / m->rows / m->heads, at / m->rows % m->heads, at % m->rows, j) &&
          got != 0.0F)
        test_failed("d_bias, row %" PRId64 ", column %" PRId64 " is %g, its keys are hidden", at, j,
                    (double)got);
    }
}

static int64_t n_unseen;

/* Rows of dy are bo's, seen or not. */
static void spoil_unseen(test_random *r) {
  const float fills[] = {NAN, INFINITY, -INFINITY, 1e30F, -3.0F};
  (void)r;
  s.wanted &= ~(1U << TEST_D_BO);
  find_who_sees();
  unseen_rows_are_zero();
  hidden_biases_are_zero();
  n_unseen += set_unseen(0.25F);
  if (s.c.kept)
    test_back_forward(&s);
  test_back_run(&s);
  float *first = test_back_copy(&s);
  for (size_t k = 0; k < COUNT(fills); k++) {
    set_unseen(fills[k]);
    if (s.c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    test_back_same(&s, first, NULL, NULL);
  }
  free(first);
  free(sees);
}

/* Numbers of blocks cannot all be set; short lengths hide more. */
static void hide_much(test_back_case *c) {
  test_case *f = &c->forward;
  c->accumulate = false;
  if (f->k_type == MHA_Q8_0)
    f->k_type = MHA_F16;
  if (f->v_type == MHA_Q8_0)
    f->v_type = MHA_BF16;
  if (f->seed % 3 == 0 && !f->packed) {
    f->has_mask = true;
    f->mask_extents = (unsigned)(f->seed / 3 % 2 ? TEST_FULL_BATCH : TEST_FULL_ROWS);
  }
}

static void unseen_tokens_change_no_bit(void **state) {
  (void)state;
  n_unseen = 0;
  each(6000, 110, hide_much, spoil_unseen);
  assert_true(n_unseen > 100);
}

/* ---- NaN that is seen ------------------------------------------------------------------------ */

static bool *is_bad; /* [B][H][Lq]: a query that met it */

static bool bad(int64_t b, int64_t h, int64_t i) {
  return is_bad[(b * s.f.c.H + h) * s.f.c.Lq + i];
}

static bool head_is_bad(int64_t h) {
  for (int64_t b = 0; b < s.f.c.B; b++)
    for (int64_t i = 0; i < s.f.c.Lq; i++)
      if (bad(b, h, i))
        return true;
  return false;
}

static bool any_is_bad(void) {
  for (int64_t h = 0; h < s.f.c.H; h++)
    if (head_is_bad(h))
      return true;
  return false;
}

/* Whether a bad query of heads [h, h + n) sees key j. */
static bool key_meets(int64_t b, int64_t h, int64_t n, int64_t j) {
  for (int64_t k = h; k < h + n; k++)
    for (int64_t i = 0; i < s.f.c.Lq; i++)
      if (bad(b, k, i) && seen(b, k, i, j))
        return true;
  return false;
}

static bool query_meets(int64_t b, int64_t h, int64_t n, int64_t i) {
  for (int64_t k = h; k < h + n; k++)
    if (bad(b, k, i))
      return true;
  return false;
}

/* Full extents. */
static bool bias_meets(int64_t row, int64_t j) {
  const test_case *c = &s.f.c;
  const int64_t i = row % c->Lq, h = row / c->Lq % c->H, b = row / c->Lq / c->H;
  return bad(b, h, i) && seen(b, h, i, j);
}

static bool input_meets(test_gradient_name which, int64_t row) {
  const test_view *views[] = {&s.f.query, &s.f.key, &s.f.value};
  const test_view *v = views[which];
  const int64_t n = heads_of(v);
  const int64_t h = row % v->heads, i = row / v->heads % v->length, b = row / v->heads / v->length;
  return which == TEST_D_QUERY ? query_meets(b, h * n, n, i) : key_meets(b, h * n, n, i);
}

static bool meets(test_gradient_name which, int64_t row, int64_t column) {
  if (which == TEST_D_BIAS)
    return bias_meets(row, column);
  if (which == TEST_D_SLOPES || which == TEST_D_SINKS)
    return head_is_bad(column);
  if (which == TEST_D_BO)
    return false;
  return inputs & (1U << which) ? input_meets(which, row) : any_is_bad();
}

static bool keeps_its_bits(const void *user, test_gradient_name which, int64_t row,
                           int64_t column) {
  (void)user;
  return !meets(which, row, column);
}

/* d_v is Σ P·dO, which knows no V: whether NaN in V reaches it is not said. Columns of matrices and
 * biases belong to heads, which may have met nothing. */
static void nan_where_it_meets(bool of_value) {
  const test_gradient_name all[] = {TEST_D_QUERY, TEST_D_KEY,    TEST_D_VALUE,
                                    TEST_D_BIAS,  TEST_D_SLOPES, TEST_D_SINKS};
  for (size_t k = 0; k < COUNT(all); k++) {
    const test_gradient *g = &s.gradients[all[k]];
    if (!g->data || (of_value && all[k] == TEST_D_VALUE))
      continue;
    for (int64_t row = 0; row < g->rows; row++)
      for (int64_t c = 0; c < g->columns; c++)
        if (meets(all[k], row, c) && !isnan(test_back_at(&s, all[k], row, c)))
          test_failed("%s, row %" PRId64 ", column %" PRId64 " is %g, and meets NaN", g->name, row,
                      c, (double)test_back_at(&s, all[k], row, c));
  }
}

/* Queries that meet row i of head h of the view. */
static void find_bad(const test_view *v, int64_t b, int64_t i, int64_t h) {
  const test_case *c = &s.f.c;
  const int64_t n = heads_of(v);
  const bool as_query = v == &s.f.query || v == &s.dy;
  is_bad = test_allocate((size_t)(c->B * c->H * c->Lq), sizeof *is_bad);
  for (int64_t k = h * n; k < (h + 1) * n; k++)
    for (int64_t q = 0; q < c->Lq; q++)
      is_bad[(b * c->H + k) * c->Lq + q] =
          as_query ? q == i && query_counts(b, k, 1, i) : seen(b, k, q, i);
}

static void spoil_one(test_random *r) {
  test_view *views[] = {&s.f.query, &s.f.key, &s.f.value, &s.dy};
  s.wanted &= ~(1U << TEST_D_BO);
  float *first = test_back_copy(&s);
  find_who_sees();
  for (int k = 0; k < 4; k++) {
    test_view *v = views[k];
    const int64_t b = test_random_range(r, 0, v->batch - 1);
    const int64_t i = test_random_range(r, 0, v->length - 1);
    const int64_t h = test_random_range(r, 0, v->heads - 1);
    float *old = test_allocate((size_t)v->size, sizeof *old);
    memcpy(old, test_at(v, b, i, h, 0), (size_t)v->size * sizeof *old);
    find_bad(v, b, i, h);
    set_row(v, b, i, h, NAN);
    test_store(v);
    if (s.c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    test_back_same(&s, first, keeps_its_bits, NULL);
    nan_where_it_meets(k == 2);
    memcpy(test_at(v, b, i, h, 0), old, (size_t)v->size * sizeof *old);
    test_store(v);
    free(old);
    free(is_bad);
  }
  free(sees);
  free(first);
}

/* What NaN meets is told from who sees whom: weights that dropout or a scale of 0 takes out of it
 * are another matter. */
static void plain(test_back_case *c) {
  test_case *f = &c->forward;
  hide_much(c);
  f->packed = f->query_lengths = f->key_lengths = false;
  f->source = TEST_CROSS;
  f->dropout = 0.0F;
  f->scale_given = false;
  f->bias_extents = TEST_FULL;
  f->absent = 0;
}

static void seen_nan_reaches_what_it_meets(void **state) {
  (void)state;
  each(7000, 80, plain, spoil_one);
}

/* ---- Rows beyond a length -------------------------------------------------------------------- */

/* The view's rows before `live` in memory whose other rows are inaccessible. One entry. */
static float *cut(test_pool *pool, const test_view *v, int64_t live) {
  const int64_t width = v->heads * v->size;
  float *data = test_pool_cut(pool, v->length * width, live * width);
  memcpy(data, v->data, (size_t)(live * width) * sizeof *data);
  return data;
}

/* When something is added to, rows beyond a length of the gradients are not touched either. */
static void cut_gradients(test_pool *pool, int64_t queries, int64_t keys) {
  const int64_t live[] = {queries, keys, keys};
  const test_view *views[] = {&s.f.query, &s.f.key, &s.f.value};
  for (int k = 0; k < 3; k++) {
    test_view before = *views[k];
    before.data = s.gradients[k].before;
    s.gradients[k].data = cut(pool, &before, live[k]);
  }
}

static void same_live_rows(const float *copy, int64_t queries, int64_t keys) {
  const int64_t live[] = {queries, keys, keys};
  for (int k = 0; k < 3; k++) {
    const test_gradient *g = &s.gradients[k];
    test_same_bits(g->name, (test_shape){{1, 1, 1, live[k] * g->floats / g->shape.n[1]}}, g->data,
                   copy);
    copy += g->floats;
  }
}

/* Two key heads, which tasks share, or eight, each a task of its own. */
static void check_cut(int64_t heads, bool core, bool kept) {
  enum { LQ = 1100, LK = 900, QUERIES = 13, KEYS = 21 };
  test_pool pool = {0};
  mha_error error;
  test_back_build(&s, &(test_back_case){.forward = {.seed = 5,
                                                    .core = core,
                                                    .Lq = LQ,
                                                    .Lk = LK,
                                                    .H = heads,
                                                    .d = 4,
                                                    .query_lengths = true,
                                                    .key_lengths = true},
                                        .accumulate = true,
                                        .kept = kept});
  const test_view *views[] = {&s.f.query, &s.f.key, &s.f.value, &s.dy};
  const int64_t live[] = {QUERIES, KEYS, KEYS, QUERIES};
  s.f.query_lengths[0] = QUERIES;
  s.f.key_lengths[0] = KEYS;
  for (int k = 0; k < 4; k++)
    for (int64_t i = 0; i < live[k]; i++)
      for (int64_t h = 0; h < views[k]->heads; h++)
        test_fill_normal(&s.f.random, test_at(views[k], 0, i, h, 0), views[k]->size, 1.0);
  for (int k = 0; k < 3; k++)
    test_fill_normal(&s.f.random, s.gradients[k].before, s.gradients[k].floats, 1.0);
  if (kept)
    test_back_forward(&s);
  test_back_run(&s);
  float *first = test_back_copy(&s);
  s.f.q.data = s.f.args.query = cut(&pool, &s.f.query, QUERIES);
  s.f.k.data = s.f.args.key = cut(&pool, &s.f.key, KEYS);
  s.f.v.data = s.f.args.value = cut(&pool, &s.f.value, KEYS);
  s.args.dy = s.attend_args.dy = cut(&pool, &s.dy, QUERIES);
  cut_gradients(&pool, QUERIES, KEYS);
  s.wanted &= inputs;
  if (kept)
    test_back_forward(&s);
  test_expect(test_back_call(&s, &error), MHA_OK, &error);
  same_live_rows(first, QUERIES, KEYS);
  free(first);
  test_back_release(&s);
  test_pool_free(&pool);
}

static void rows_beyond_a_length_are_not_touched(void **state) {
  (void)state;
  for (int variant = 0; variant < 8; variant++)
    check_cut(variant & 4 ? 8 : 2, variant & 1, variant & 2);
}

/* ---- The trace ------------------------------------------------------------------------------- */

enum { MOST_STEPS = 16 };

typedef struct shown {
  const char *name;
  float *numbers; /* dense */
  test_shape shape;
} shown;

static struct {
  shown steps[MOST_STEPS];
  int n;
} trace;

static void remember(void *user, const mha_trace_step *step) {
  (void)user;
  assert_true(trace.n < MOST_STEPS);
  const bool four = step->rank == 4;
  shown *to = &trace.steps[trace.n++];
  int64_t n[4] = {four ? step->shape[0] : 1, step->shape[four ? 1 : 0], step->shape[four ? 2 : 1],
                  step->shape[four ? 3 : 2]};
  int64_t at[4] = {four ? step->strides[0] : 0, step->strides[four ? 1 : 0],
                   step->strides[four ? 2 : 1], step->strides[four ? 3 : 2]};
  to->name = step->name;
  memcpy(to->shape.n, n, sizeof n);
  to->numbers = test_allocate((size_t)(n[0] * n[1] * n[2] * n[3]), sizeof *to->numbers);
  float *number = to->numbers;
  for (int64_t a = 0; a < n[0]; a++)
    for (int64_t b = 0; b < n[1]; b++)
      for (int64_t c = 0; c < n[2]; c++)
        for (int64_t d = 0; d < n[3]; d++)
          *number++ = step->data[a * at[0] + b * at[1] + c * at[2] + d * at[3]];
}

static void forget(void) {
  for (int k = 0; k < trace.n; k++)
    free(trace.steps[k].numbers);
  trace.n = 0;
}

/* Order and number of steps: d_Q, d_K and d_V where something that is wanted needs them. */
static void expect_steps(void) {
  static const char *const names[] = {"d_concat", "d_heads", "d_Q",   "d_K",
                                      "d_V",      "d_query", "d_key", "d_value"};
  int at = 0;
  for (size_t k = 0; k < COUNT(names); k++) {
    const bool there = k < 5 || s.gradients[k - 5].data;
    if (!there)
      continue;
    assert_true(at < trace.n);
    assert_string_equal(trace.steps[at].name, names[k]);
    at++;
  }
  assert_int_equal(at, trace.n);
}

/* d_concat [B][Lq][H·dv] by the judge: dy·Woᵀ, 0 in rows that are not computed. */
static double *judge_concat(const oracle_problem *p, double *bound) {
  const int64_t width = p->H * p->dv;
  double *concat = test_allocate((size_t)(s.dy.batch * p->Lq * width), sizeof *concat), most = 0;
  for (int64_t row = 0; row < s.dy.batch * p->Lq; row++)
    for (int64_t c = 0; c < width && test_reads_query(&s.f, row / p->Lq, row % p->Lq); c++) {
      double sum = 0;
      for (int64_t o = 0; o < p->Eo; o++) {
        const int64_t at = p->wo.out_in ? o * p->wo.ld + c : c * p->wo.ld + o;
        const double weight = p->wo.numbers ? p->wo.numbers[at] : o == c ? 1.0 : 0.0;
        sum += weight == 0 ? 0 : weight * (double)*test_at(&s.dy, row / p->Lq, row % p->Lq, 0, o);
      }
      concat[row * width + c] = sum;
      most = fmax(most, fabs(sum));
    }
  *bound = 1e-5 * most + 1e-6;
  return concat;
}

static void compare_step(const char *name, const oracle_numbers *expected) {
  for (int k = 0; k < trace.n; k++)
    if (strcmp(trace.steps[k].name, name) == 0) {
      const shown *step = &trace.steps[k];
      assert_int_equal(step->shape.n[0] * step->shape.n[1] * step->shape.n[2] * step->shape.n[3],
                       expected->n);
      test_compare(name, step->shape, step->numbers, expected->value, expected->bound);
    }
}

/* heads [B][H][Lq][dv] are concat's columns. */
static void compare_heads(void) {
  const shown *concat = &trace.steps[0], *heads = &trace.steps[1];
  const int64_t *n = heads->shape.n;
  for (int64_t at = 0; at < n[0] * n[1] * n[2] * n[3]; at++) {
    const int64_t c = at % n[3], i = at / n[3] % n[2], h = at / n[3] / n[2] % n[1];
    const int64_t b = at / n[3] / n[2] / n[1];
    assert_true(test_equal_bits(heads->numbers[at],
                                concat->numbers[(b * n[2] + i) * n[1] * n[3] + h * n[3] + c]));
  }
}

/* Step 3 alone, on the prepared Q, K and V, as a problem of its own. */
static void judge_steps(void) {
  oracle_problem p;
  oracle_result forward;
  oracle_gradients g;
  double bound;
  test_problem(&s.f, &p);
  oracle_solve(&p, &forward);
  double *concat = judge_concat(&p, &bound);
  oracle_problem core = p;
  core.wq = core.wk = core.wv = core.wo = (oracle_matrix){0};
  core.Eq = p.H * p.d;
  core.Ek = p.G * p.d;
  core.Ev = p.G * p.dv;
  core.Eo = p.H * p.dv;
  core.query = forward.q.value;
  core.key = forward.k.value;
  core.value = forward.v.value;
  core.residual = NULL;
  core.norm = ORACLE_NORM_NONE;
  core.rope = ORACLE_ROPE_NONE;
  oracle_differentiate(&core, concat, &g);
  oracle_numbers expected = {concat, test_allocate((size_t)forward.concat.n, sizeof *concat),
                             forward.concat.n};
  for (int64_t k = 0; k < expected.n; k++)
    expected.bound[k] = bound;
  compare_step("d_concat", &expected);
  compare_step("d_Q", &g.query);
  compare_step("d_K", &g.key);
  compare_step("d_V", &g.value);
  oracle_numbers_free(&expected);
  oracle_gradients_free(&g);
  oracle_free(&forward);
  test_problem_free(&p);
}

/* The last steps are the gradients themselves. */
static void compare_inputs(void) {
  for (int k = 0, at = 5; k < 3; k++) {
    const test_gradient *g = &s.gradients[k];
    if (!g->data)
      continue;
    const float *number = trace.steps[at++].numbers;
    for (int64_t row = 0; row < g->rows; row++)
      for (int64_t c = 0; c < g->columns; c++)
        assert_true(test_equal_bits(*number++, test_back_at(&s, (test_gradient_name)k, row, c)));
  }
}

static void with_trace(test_random *r) {
  mha_error error;
  (void)r;
  if (s.f.c.core)
    return;
  float *first = test_back_copy(&s);
  test_expect(mha_context_trace(s.context, remember, NULL, &error), MHA_OK, &error);
  test_back_run(&s);
  test_back_same(&s, first, NULL, NULL);
  expect_steps();
  compare_heads();
  judge_steps();
  compare_inputs();
  forget();
  s.wanted &= 1U << TEST_D_BO; /* which needs none of the steps */
  test_back_run(&s);
  assert_int_equal(trace.n, 0);
  free(first);
}

static void a_trace_shows_the_steps(void **state) {
  (void)state;
  each(8000, 80, NULL, with_trace);
}

/* ---- Scores without measure ------------------------------------------------------------------ */

static void expect_finite(void) {
  for (int k = 0; k < TEST_GRADIENTS; k++) {
    const test_gradient *g = &s.gradients[k];
    for (int64_t row = 0; row < g->rows; row++)
      for (int64_t c = 0; c < g->columns; c++)
        if (!isfinite(test_back_at(&s, (test_gradient_name)k, row, c)))
          test_failed("%s, row %" PRId64 ", column %" PRId64 " is %g", g->name, row, c,
                      (double)test_back_at(&s, (test_gradient_name)k, row, c));
  }
}

static test_back_case huge(uint64_t seed, bool core, bool kept) {
  return (test_back_case){.forward = {.seed = seed,
                                      .core = core,
                                      .B = 2,
                                      .Lq = 9,
                                      .Lk = 40,
                                      .H = 2,
                                      .d = 4,
                                      .Eq = 6,
                                      .has_bias = true,
                                      .bias_extents = TEST_FULL,
                                      .sinks = seed % 2,
                                      .alibi = seed % 3 == 0},
                          .kept = kept};
}

/* Biases of ±1e30, beside which nothing else counts. A log-sum-exp of 1e30 + ln n has no room for
 * ln n, so with one the gradients are finite, but those of other weights. */
static void huge_biases(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 24; seed++) {
    const test_back_case c = huge(seed, seed & 4, seed & 8);
    const bool forgets = c.forward.core && c.kept;
    test_back_build(&s, &c);
    for (int64_t k = 0; k < s.f.bias_floats; k++)
      s.f.bias[k] = test_random_range(&s.f.random, 0, 1) ? 1e30F : -1e30F;
    if (c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    expect_finite();
    if (!forgets)
      test_back_judge(&s);
    test_back_release(&s);
  }
}

/* Queries so large that scores are about ±1e30. */
static void huge_scores(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 24; seed++) {
    test_back_case c = huge(seed, true, seed & 8);
    c.forward.softcap = seed % 5 == 0 ? 3.0F : 0.0F;
    test_back_build(&s, &c);
    for (int64_t k = 0; k < s.f.query.floats; k++)
      s.f.query.data[k] *= 1e30F;
    if (c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    expect_finite();
    test_back_release(&s);
  }
}

/* A constant changes no softmax. At 1000 a score's last bit is 6e-5, and a gradient off by that. */
static void constant_scores(void **state) {
  const float constants[] = {-1000.0F, 1000.0F};
  (void)state;
  for (uint64_t seed = 0; seed < 16; seed++) {
    test_back_case c = huge(seed, seed & 4, seed & 8);
    c.forward.sinks = false;
    test_back_build(&s, &c);
    for (int64_t k = 0; k < s.f.bias_floats; k++)
      s.f.bias[k] = 0.0F;
    if (c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    float *first = test_back_copy(&s), *at = first;
    for (int64_t k = 0; k < s.f.bias_floats; k++)
      s.f.bias[k] = constants[seed % 2];
    if (c.kept)
      test_back_forward(&s);
    test_back_run(&s);
    expect_finite();
    for (int k = 0; k < TEST_GRADIENTS; k++) {
      const test_gradient *g = &s.gradients[k];
      const double bound = 1e-3 * largest(g, at) + 1e-5;
      for (int64_t n = 0; n < g->floats; n++)
        test_near(g->name, (double)g->data[n], (double)at[n], bound);
      at += g->floats;
    }
    free(first);
    test_back_release(&s);
  }
}

/* ---- by hand ---- */

/* Two queries and three keys of one number each, of which the second key is infinite; a softcap
 * makes finite scores of it. The mask says who sees that key. */
static void step_back(const uint8_t attend[6], float d_q[2], float d_k[3], float d_v[3]) {
  static const float q[] = {1, -2};
  static const float k[] = {0.5F, INFINITY, 0.25F};
  static const float v[] = {1, 2, 3};
  static const float dy[] = {1, 0.5F};
  const mha_tensor query = {.data = q, .batch = 1, .length = 2, .heads = 1, .size = 1};
  const mha_tensor key = {.data = k, .batch = 1, .length = 3, .heads = 1, .size = 1};
  const mha_tensor value = {.data = v, .batch = 1, .length = 3, .heads = 1, .size = 1};
  mha_rules rules;
  mha_attend_args args;
  mha_attend_backward_args back;
  mha_context *context = NULL;
  mha_error error;
  MHA_INIT(&rules);
  rules.softcap = 5;
  rules.attend.data = attend;
  rules.attend.batch = rules.attend.heads = 1;
  rules.attend.rows = 2;
  rules.attend.columns = 3;
  MHA_INIT(&args);
  args.rules = &rules;
  MHA_INIT(&back);
  back.dy = dy;
  back.d_q = d_q;
  back.d_k = d_k;
  back.d_v = d_v;
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_attend_backward(context, &query, &key, &value, &args, &back, &error), MHA_OK,
              &error);
  mha_context_destroy(context);
}

static void an_infinite_key_under_a_softcap(void **state) {
  static const uint8_t seen[] = {1, 1, 1, 1, 0, 1};
  static const uint8_t hidden[] = {1, 0, 1, 1, 0, 1};
  float d_q[2];
  float d_k[3];
  float d_v[3];
  (void)state;
  step_back(seen, d_q, d_k, d_v);
  assert_true(isnan(d_q[0]) && isfinite(d_q[1]));
  for (int j = 0; j < 3; j++)
    assert_true(isnan(d_k[j]) && isnan(d_v[j]));
  step_back(hidden, d_q, d_k, d_v);
  assert_true(isfinite(d_q[0]) && isfinite(d_q[1]) && d_q[0] != 0);
  assert_true(isfinite(d_k[0]) && isfinite(d_k[2]) && isfinite(d_v[0]) && isfinite(d_v[2]));
  assert_true(d_k[1] == 0 && d_v[1] == 0);
}

/* A key token with NaN that head 0 hides: nothing of that head becomes NaN, the columns of the
 * matrices' gradients included. */
static void nan_that_one_head_hides(void **state) {
  enum { E = 4, L = 3 };
  static const uint8_t attend[] = {0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  float numbers[4][E * E];
  float query[L * E];
  float key[L * E];
  float dy[L * E];
  float d_wk[E * E];
  float d_wq[E * E];
  test_random r;
  mha_config config;
  mha_matrices matrices;
  mha_rules rules;
  mha_forward_args args;
  mha_backward_args back;
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  test_random_seed(&r, 3);
  test_fill_normal(&r, numbers[0], 4 * E * E, 0.5);
  test_fill_normal(&r, query, L * E, 1);
  test_fill_normal(&r, key, L * E, 1);
  test_fill_normal(&r, dy, L * E, 1);
  key[1] = NAN;
  mha_config_init(&config, E, 2);
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = numbers[0];
  matrices.key = numbers[1];
  matrices.value = numbers[2];
  matrices.output = numbers[3];
  MHA_INIT(&rules);
  rules.attend.data = attend;
  rules.attend.batch = 1;
  rules.attend.heads = 2;
  rules.attend.rows = rules.attend.columns = L;
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = args.key_length = L;
  args.query = query;
  args.key = key;
  args.rules = &rules;
  MHA_INIT(&back);
  back.dy = dy;
  back.d_wq = d_wq;
  back.d_wk = d_wk;
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_backward(context, weights, &args, &back, &error), MHA_OK, &error);
  for (int i = 0; i < E; i++)
    for (int c = 0; c < E; c++) {
      const bool finite = c < E / 2; /* columns of head 0 */
      assert_int_equal(isfinite(d_wk[i * E + c]) != 0, finite);
      assert_int_equal(isfinite(d_wq[i * E + c]) != 0, finite);
    }
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

/* One array read as queries of two numbers and as keys of four, in rows of four: a hidden key with
 * NaN where the queries end does not reach the gradient of Wk. */
static void one_array_of_two_widths(void **state) {
  enum { E = 4, L = 2 };
  static const uint8_t attend[] = {1, 0, 1, 0};
  static const float x[L * E] = {1, 2, 3, 4, 5, 6, 7, NAN};
  static const float dy[L * 2] = {1, -1, 2, 0.5F};
  static const float w[E * 2] = {1, 2, 3, -1, 0.5F, 2, 1, 1};
  float d_wk[E * 2];
  mha_config config;
  mha_matrices matrices;
  mha_rules rules;
  mha_forward_args args;
  mha_backward_args back;
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  (void)state;
  mha_config_init(&config, 2, 1);
  config.key_width = config.value_width = E;
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = matrices.key = matrices.value = matrices.output = w;
  MHA_INIT(&rules);
  rules.attend.data = attend;
  rules.attend.batch = rules.attend.heads = 1;
  rules.attend.rows = rules.attend.columns = L;
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = args.key_length = L;
  args.query = args.key = x;
  args.query_row_stride = args.key_row_stride = E;
  args.rules = &rules;
  MHA_INIT(&back);
  back.dy = dy;
  back.d_wk = d_wk;
  test_expect(mha_weights_create(&config, &matrices, &weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  back.d_wq = (float[4]){0}; /* queries are looked through first */
  test_expect(mha_backward(context, weights, &args, &back, &error), MHA_OK, &error);
  for (int i = 0; i < E * 2; i++)
    assert_true(isfinite(d_wk[i]));
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(threads_change_no_bit),
      cmocka_unit_test(a_tape_changes_no_bit),
      cmocka_unit_test(a_tape_changes_no_bit_of_the_forward_call),
      cmocka_unit_test(fewer_gradients_change_no_bit),
      cmocka_unit_test(accumulating_adds),
      cmocka_unit_test(unseen_tokens_change_no_bit),
      cmocka_unit_test(seen_nan_reaches_what_it_meets),
      cmocka_unit_test(rows_beyond_a_length_are_not_touched),
      cmocka_unit_test(a_trace_shows_the_steps),
      cmocka_unit_test(an_infinite_key_under_a_softcap),
      cmocka_unit_test(nan_that_one_head_hides),
      cmocka_unit_test(one_array_of_two_widths),
      cmocka_unit_test(huge_biases),
      cmocka_unit_test(huge_scores),
      cmocka_unit_test(constant_scores),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
