/* The judge of gradients is judged: by differences of the judge's own forward pass, on small random
 * layers over the product of options, and by NaN in what nobody sees. */
#include "backward_fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The four-point difference (8·(L(h) − L(−h)) − (L(2h) − L(−2h)))/12h leaves out h⁴/30 of the fifth
 * derivative, 3e-14 of it, and magnifies the loss's rounding, some 1e-15, by 1/h. */
static const double step = 1e-3;

/* Both errors together are at most 5e-10 of a gradient's largest element over the layers below, the
 * most for slopes, whose distances make the fifth derivative large. A wrong factor or sign is
 * larger by orders of magnitude. */
static const double relative = 1e-8;

/* A problem, dy, and the gradients in question; one at a time, too large for a stack. */
static struct {
  test_fixture f;
  oracle_problem p;
  test_random random;
  double *dy;
  oracle_gradients g;
} s;

static double *random_numbers(int64_t n) {
  double *numbers = test_allocate((size_t)n, sizeof *numbers);
  for (int64_t i = 0; i < n; i++)
    numbers[i] = test_random_normal(&s.random);
  return numbers;
}

static void open_problem(const test_case *c) {
  test_build(&s.f, c);
  test_problem(&s.f, &s.p);
  test_random_seed(&s.random, c->seed + 1);
  s.dy = random_numbers((c->packed ? 1 : s.p.B) * s.p.Lq * s.p.Eo);
  oracle_differentiate(&s.p, s.dy, &s.g);
}

static void close_problem(void) {
  oracle_gradients_free(&s.g);
  test_problem_free(&s.p);
  free(s.dy);
  test_release(&s.f);
}

/* ---- Differences ----------------------------------------------------------------------------- */

static double loss(void) {
  oracle_result result;
  double sum = 0;
  oracle_solve(&s.p, &result);
  for (int64_t i = 0; i < result.output.n; i++)
    sum += s.dy[i] * result.output.value[i];
  oracle_free(&result);
  return sum;
}

enum { MOST_ARRAYS = 3 };

/* Arrays of the problem that move together, n numbers each. */
typedef struct place {
  const char *name;
  const double *arrays[MOST_ARRAYS]; /* NULL behind the last */
  int64_t n;
} place;

/* The loss where the arrays have moved by `distance` along the direction. */
static double loss_at(const place *where, const double *direction, double distance) {
  double *before[MOST_ARRAYS] = {NULL};
  for (int a = 0; a < MOST_ARRAYS && where->arrays[a]; a++) {
    double *numbers = (double *)(uintptr_t)where->arrays[a];
    before[a] = test_allocate((size_t)where->n, sizeof(double));
    memcpy(before[a], numbers, (size_t)where->n * sizeof(double));
    for (int64_t i = 0; i < where->n; i++)
      if (direction[i] != 0)
        numbers[i] += distance * direction[i];
  }
  const double result = loss();
  for (int a = 0; a < MOST_ARRAYS && where->arrays[a]; a++) {
    memcpy((double *)(uintptr_t)where->arrays[a], before[a], (size_t)where->n * sizeof(double));
    free(before[a]);
  }
  return result;
}

/* `got` is what the gradient says of the direction; `size` that gradient's largest element. */
static void check_direction(const place *where, int64_t element, const double *direction,
                            double got, double size) {
  const double near = loss_at(where, direction, step) - loss_at(where, direction, -step);
  const double far = loss_at(where, direction, 2 * step) - loss_at(where, direction, -2 * step);
  const double expected = (8 * near - far) / (12 * step);
  if (!(fabs(got - expected) <= relative * size + 1e-10))
    test_failed("d_%s[%" PRId64 "]: got %.12g, the difference is %.12g (largest element %.3g)",
                where->name, element, got, expected, size);
}

static double largest(const oracle_numbers *gradient) {
  double size = 0;
  for (int64_t i = 0; i < gradient->n; i++)
    size = fmax(size, fabs(gradient->value[i]));
  return size;
}

/* A few elements each on its own, and all together along a random direction of length 1. */
static void check_place(const place *where, const oracle_numbers *gradient) {
  enum { FEW = 12 };
  const int64_t n = gradient->n;
  if (!where->arrays[0] || n == 0)
    return;
  assert_int_equal(n, where->n);
  double *direction = random_numbers(n), length = 0, along = 0;
  for (int64_t i = 0; i < n; i++)
    length += direction[i] * direction[i];
  for (int64_t i = 0; i < n; i++) {
    direction[i] /= sqrt(length);
    along += direction[i] * gradient->value[i];
  }
  const double size = largest(gradient);
  check_direction(where, -1, direction, along, size * sqrt((double)n));
  memset(direction, 0, (size_t)n * sizeof *direction);
  for (int64_t few = 0; few < (n < FEW ? n : FEW); few++) {
    const int64_t i = n <= FEW ? few : test_random_range(&s.random, 0, n - 1);
    direction[i] = 1;
    check_direction(where, i, direction, gradient->value[i], size);
    direction[i] = 0;
  }
  free(direction);
}

/* ---- Places ---------------------------------------------------------------------------------- */

static void check_layer(void) {
  const oracle_problem *p = &s.p;
  oracle_gradients *g = &s.g;
  const struct {
    place where;
    const oracle_numbers *gradient;
  } all[] = {
      {{"query", {p->query}, g->query.n}, &g->query},
      {{"key", {p->key}, g->key.n}, &g->key},
      {{"value", {p->value}, g->value.n}, &g->value},
      {{"wq", {p->wq.numbers}, g->wq.n}, &g->wq},
      {{"wk", {p->wk.numbers}, g->wk.n}, &g->wk},
      {{"wv", {p->wv.numbers}, g->wv.n}, &g->wv},
      {{"wo", {p->wo.numbers}, g->wo.n}, &g->wo},
      {{"bq", {p->wq.bias}, p->H * p->d}, &g->bq},
      {{"bk", {p->wk.bias}, p->G * p->d}, &g->bk},
      {{"bv", {p->wv.bias}, p->G * p->dv}, &g->bv},
      {{"bo", {p->wo.bias}, p->Eo}, &g->bo},
      {{"query_norm", {p->query_norm}, g->query_norm.n}, &g->query_norm},
      {{"key_norm", {p->key_norm}, g->key_norm.n}, &g->key_norm},
      {{"bias", {p->bias}, p->B * p->H * p->Lq * p->Lk}, &g->bias},
      {{"slopes", {p->slopes}, p->H}, &g->slopes},
      {{"sinks", {p->sinks}, p->H}, &g->sinks},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    check_place(&all[i].where, all[i].gradient);
}

/* Where one array serves as several, those move together. */
static void check_shared(void) {
  const oracle_problem *p = &s.p;
  if (s.f.c.source == TEST_CROSS)
    return;
  const bool self = s.f.c.source == TEST_SELF;
  oracle_gradients_share(&s.g, true, self);
  const place key = {"key, the value too", {p->key, p->value}, s.g.key.n};
  const place query = {"query, all three", {p->query, p->key, p->value}, s.g.query.n};
  check_place(self ? &query : &key, self ? &s.g.query : &s.g.key);
}

/* A bias given with fewer extents: all cells that one number serves move together. */
static void check_reduced_bias(void) {
  const oracle_problem *p = &s.p;
  const unsigned extents = s.f.c.bias_extents;
  const int64_t batch = extents & TEST_FULL_BATCH ? p->B : 1;
  const int64_t heads = extents & TEST_FULL_HEADS ? p->H : 1;
  const int64_t rows = extents & TEST_FULL_ROWS ? p->Lq : 1, n = batch * heads * rows * p->Lk;
  const place full = {"bias, reduced", {p->bias}, s.g.bias.n};
  oracle_numbers reduced;
  if (!p->bias || n == 0)
    return;
  oracle_reduce_bias(p, &s.g, batch, heads, rows, &reduced);
  assert_int_equal(reduced.n, n);
  double *few = random_numbers(n), *direction = test_allocate((size_t)full.n, sizeof *direction);
  double along = 0;
  for (int64_t i = 0; i < n; i++)
    along += few[i] * reduced.value[i];
  for (int64_t b = 0, at = 0; b < p->B; b++)
    for (int64_t h = 0; h < p->H; h++)
      for (int64_t i = 0; i < p->Lq; i++)
        for (int64_t j = 0; j < p->Lk; j++, at++) {
          const int64_t entry = batch > 1 ? b : 0, head = heads > 1 ? h : 0, row = rows > 1 ? i : 0;
          direction[at] = few[((entry * heads + head) * rows + row) * p->Lk + j];
        }
  check_direction(&full, -1, direction, along, largest(&reduced) * sqrt((double)n));
  oracle_numbers_free(&reduced);
  free(direction);
  free(few);
}

/* ---- Random layers --------------------------------------------------------------------------- */

static bool coin(test_random *random) {
  return test_random_range(random, 0, 1) == 1;
}

static bool rarely(test_random *random) {
  return test_random_range(random, 0, 3) == 0;
}

static void draw_sizes(test_random *r, test_case *c) {
  c->B = test_random_range(r, 1, 3);
  c->Lq = test_random_range(r, 1, 5);
  c->Lk = test_random_range(r, 1, 6);
  c->G = test_random_range(r, 1, 2);
  c->H = c->G * test_random_range(r, 1, 2);
  c->d = 2 * test_random_range(r, 1, 3);
  c->dv = test_random_range(r, 1, 5);
  c->source = (test_source)test_random_range(r, 0, 2);
  c->core = rarely(r);
  c->out_in = coin(r);
  c->weight_layout = coin(r) ? TEST_GAPS : TEST_APART;
  c->biases = (unsigned)test_random_range(r, 0, TEST_ALL);
  c->absent = rarely(r) ? (unsigned)test_random_range(r, 0, TEST_ALL) : 0;
  c->Eq = test_random_range(r, 3, 7);
  c->Ek = c->source == TEST_SELF ? c->Eq : test_random_range(r, 3, 7);
  c->Ev = c->source == TEST_CROSS ? test_random_range(r, 3, 7) : c->Ek;
  c->Eo = test_random_range(r, 3, 7);
  if (c->absent) { /* the widths that any of the identities needs */
    c->H = c->G;
    c->dv = c->d;
    c->Eq = c->Ek = c->Ev = c->Eo = c->H * c->d;
  }
}

static void draw_scores(test_random *r, test_case *c) {
  c->alibi = rarely(r);
  c->sinks = rarely(r);
  c->scale_given = coin(r);
  c->scale = rarely(r) ? 0.0F : (float)test_random_uniform(r, -1.0, 1.0);
  c->softcap = rarely(r) ? (float)test_random_uniform(r, 0.5, 3.0) : 0.0F;
  c->dropout = rarely(r) ? 0.3F : 0.0F;
  c->dropout_seed = test_random_bits(r);
  if (c->core)
    return;
  c->norm = (mha_norm)test_random_range(r, 0, 2);
  c->norm_ones = rarely(r);
  c->rope = (mha_rope)test_random_range(r, 0, 2);
  c->rotary = 2 * test_random_range(r, 1, c->d / 2);
  c->rope_base = coin(r) ? 100.0 : 0.0;
  c->rope_tables = rarely(r);
  c->query_position = test_random_range(r, 0, 4);
  c->key_position = test_random_range(r, 0, 4);
  c->positions_given = rarely(r);
}

static test_case draw_case(test_random *random, uint64_t seed) {
  test_case c = {.seed = seed};
  draw_sizes(random, &c);
  test_draw_visibility(random, &c, 3);
  draw_scores(random, &c);
  return c;
}

static void agrees_with_differences(void **state) {
  (void)state;
  test_random random;
  test_random_seed(&random, 20);
  const uint64_t n = test_small() ? 20 : 400;
  for (uint64_t seed = 1; seed <= n; seed++) {
    const test_case c = draw_case(&random, seed);
    open_problem(&c);
    check_layer();
    check_reduced_bias();
    check_shared();
    close_problem();
  }
}

/* ---- What nobody sees ------------------------------------------------------------------------ */

static bool is_hidden_key(int64_t b, int64_t j) {
  return b == 0 && j == 2;
}

static bool is_blind_query(int64_t b, int64_t i) {
  return b == 1 && i == 1;
}

/* Key 2 of entry 0 is hidden from all, query 1 of entry 1 sees nothing; the rest is random. */
static void hide(void) {
  const oracle_problem *p = &s.p;
  unsigned char *attend = (unsigned char *)(uintptr_t)p->attend;
  for (int64_t b = 0; b < p->B; b++)
    for (int64_t h = 0; h < p->H; h++)
      for (int64_t i = 0; i < p->Lq; i++)
        for (int64_t j = 0; j < p->Lk; j++)
          if (is_hidden_key(b, j) || is_blind_query(b, i))
            attend[((b * p->H + h) * p->Lq + i) * p->Lk + j] = 0;
}

static void spoil_row(const double *rows, int64_t length, int64_t b, int64_t row, int64_t width) {
  double *numbers = (double *)(uintptr_t)rows + (b * length + row) * width;
  for (int64_t c = 0; c < width; c++)
    numbers[c] = NAN;
}

static void same_numbers(const char *name, const oracle_numbers *got,
                         const oracle_numbers *expected) {
  for (int64_t i = 0; i < got->n; i++)
    if (memcmp(&got->value[i], &expected->value[i], sizeof(double)) != 0)
      test_failed("d_%s[%" PRId64 "] is %.17g, without NaN %.17g", name, i, got->value[i],
                  expected->value[i]);
}

static void same_gradients(const oracle_gradients *a, const oracle_gradients *b) {
  const struct {
    const char *name;
    const oracle_numbers *a, *b;
  } all[] = {{"query", &a->query, &b->query},
             {"key", &a->key, &b->key},
             {"value", &a->value, &b->value},
             {"wq", &a->wq, &b->wq},
             {"wk", &a->wk, &b->wk},
             {"wv", &a->wv, &b->wv},
             {"wo", &a->wo, &b->wo},
             {"bq", &a->bq, &b->bq},
             {"bk", &a->bk, &b->bk},
             {"bv", &a->bv, &b->bv},
             {"bo", &a->bo, &b->bo},
             {"query_norm", &a->query_norm, &b->query_norm},
             {"bias", &a->bias, &b->bias},
             {"key_norm", &a->key_norm, &b->key_norm},
             {"slopes", &a->slopes, &b->slopes},
             {"sinks", &a->sinks, &b->sinks}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    same_numbers(all[i].name, all[i].a, all[i].b);
}

static test_case layer_with_all(uint64_t seed, mha_norm norm) {
  return (test_case){.seed = seed,
                     .B = 2,
                     .Lq = 4,
                     .Lk = 5,
                     .H = 4,
                     .G = 2,
                     .d = 4,
                     .dv = 3,
                     .Eq = 6,
                     .Ek = 5,
                     .Ev = 7,
                     .Eo = 3,
                     .biases = TEST_ALL,
                     .has_mask = true,
                     .mask_extents = TEST_FULL,
                     .has_bias = true,
                     .bias_extents = TEST_FULL,
                     .alibi = true,
                     .sinks = true,
                     .softcap = 2.0F,
                     .norm = norm,
                     .rope = MHA_ROPE_HALVES};
}

static void expect_zeros(const char *name, const oracle_numbers *gradient, int64_t row,
                         int64_t width) {
  for (int64_t c = 0; c < width; c++)
    if (gradient->value[row * width + c] != 0)
      test_failed("d_%s[%" PRId64 "][%" PRId64 "] is %g", name, row, c,
                  gradient->value[row * width + c]);
}

static void unseen_nan_reaches_nothing(void **state) {
  (void)state;
  for (int norm = MHA_NORM_NONE; norm <= MHA_NORM_FULL; norm++) {
    const test_case c = layer_with_all(7, (mha_norm)norm);
    oracle_gradients spoilt;
    open_problem(&c);
    const oracle_problem *p = &s.p;
    hide();
    oracle_gradients_free(&s.g);
    oracle_differentiate(p, s.dy, &s.g);
    spoil_row(p->query, p->Lq, 1, 1, p->Eq);
    spoil_row(p->key, p->Lk, 0, 2, p->Ek);
    spoil_row(p->value, p->Lk, 0, 2, p->Ev);
    oracle_differentiate(p, s.dy, &spoilt);
    same_gradients(&spoilt, &s.g);
    expect_zeros("query", &spoilt.query, p->Lq + 1, p->Eq);
    expect_zeros("key", &spoilt.key, 2, p->Ek);
    expect_zeros("value", &spoilt.value, 2, p->Ev);
    oracle_gradients_free(&spoilt);
    close_problem();
  }
}

/* A row of the query that sees something, but NaN: what it meets is NaN, the other entry is not. */
static void seen_nan_reaches_what_it_meets(void **state) {
  (void)state;
  const test_case c = layer_with_all(8, MHA_NORM_NONE);
  oracle_gradients spoilt;
  open_problem(&c);
  const oracle_problem *p = &s.p;
  spoil_row(p->query, p->Lq, 0, 0, p->Eq);
  oracle_differentiate(p, s.dy, &spoilt);
  for (int64_t i = 0; i < p->Eq; i++)
    assert_true(isnan(spoilt.query.value[i]));
  assert_true(isnan(spoilt.wq.value[0]));
  assert_true(isnan(spoilt.wk.value[0]));
  for (int64_t i = p->Lq * p->Eq; i < spoilt.query.n; i++)
    assert_true(spoilt.query.value[i] == s.g.query.value[i]);
  for (int64_t i = p->Lk * p->Ek; i < spoilt.key.n; i++)
    assert_true(spoilt.key.value[i] == s.g.key.value[i]);
  oracle_gradients_free(&spoilt);
  close_problem();
}

/* Columns of Wk [Ek][G·d] of one key head. */
static void same_columns(const oracle_gradients *a, const oracle_gradients *b, int64_t g) {
  const oracle_problem *p = &s.p;
  for (int64_t i = 0; i < p->Ek; i++)
    for (int64_t c = g * p->d; c < (g + 1) * p->d; c++)
      assert_true(a->wk.value[i * p->wk.ld + c] == b->wk.value[i * p->wk.ld + c]);
  for (int64_t c = g * p->d; c < (g + 1) * p->d; c++)
    assert_true(a->bk.value[c] == b->bk.value[c]);
}

/* A key that only the heads of key head 0 see: key head 1 has no part in its NaN. */
static void hidden_in_a_head_reaches_nothing_there(void **state) {
  (void)state;
  for (int norm = MHA_NORM_NONE; norm <= MHA_NORM_PER_HEAD; norm++) {
    const test_case c = layer_with_all(10, (mha_norm)norm);
    oracle_gradients spoilt;
    open_problem(&c);
    const oracle_problem *p = &s.p;
    unsigned char *attend = (unsigned char *)(uintptr_t)p->attend;
    for (int64_t row = 0; row < p->B * p->H * p->Lq; row++)
      attend[row * p->Lk + 3] = row / p->Lq % p->H < p->H / p->G;
    oracle_gradients_free(&s.g);
    oracle_differentiate(p, s.dy, &s.g);
    spoil_row(p->key, p->Lk, 0, 3, p->Ek);
    oracle_differentiate(p, s.dy, &spoilt);
    assert_true(isnan(spoilt.wk.value[0]));
    assert_true(isnan(spoilt.bk.value[0]));
    same_columns(&spoilt, &s.g, 1);
    oracle_gradients_free(&spoilt);
    close_problem();
  }
}

/* Rows beyond query_lengths are bo and nothing else. */
static void rows_beyond_a_length_count_for_bo(void **state) {
  (void)state;
  test_case c = layer_with_all(9, MHA_NORM_PER_HEAD);
  c.query_lengths = true;
  oracle_gradients other;
  open_problem(&c);
  const oracle_problem *p = &s.p;
  s.f.query_lengths[0] = 2;
  s.f.query_lengths[1] = p->Lq;
  for (int64_t i = 0; i < p->B * p->Lq * p->Eq; i++)
    if (isnan(p->query[i])) /* was beyond the length that the fixture drew */
      ((double *)(uintptr_t)p->query)[i] = 0.5;
  oracle_gradients_free(&s.g);
  oracle_differentiate(p, s.dy, &s.g);
  for (int64_t o = 0; o < p->Eo; o++)
    s.dy[2 * p->Eo + o] += (double)(o + 1);
  oracle_differentiate(p, s.dy, &other);
  for (int64_t o = 0; o < p->Eo; o++) {
    test_near("d_bo", other.bo.value[o] - s.g.bo.value[o], (double)(o + 1), 1e-12);
    other.bo.value[o] = s.g.bo.value[o];
    s.dy[2 * p->Eo + o] = NAN;
  }
  same_gradients(&other, &s.g);
  oracle_gradients_free(&other);
  oracle_differentiate(p, s.dy, &other);
  for (int64_t o = 0; o < p->Eo; o++) {
    assert_true(isnan(other.bo.value[o]));
    other.bo.value[o] = s.g.bo.value[o];
  }
  same_gradients(&other, &s.g);
  oracle_gradients_free(&other);
  close_problem();
}

static void sink_of_minus_infinity_is_none(void **state) {
  (void)state;
  test_case c = layer_with_all(11, MHA_NORM_NONE);
  oracle_gradients without;
  open_problem(&c);
  oracle_problem p = s.p;
  for (int64_t h = 0; h < p.H; h++)
    ((double *)(uintptr_t)p.sinks)[h] = -INFINITY;
  oracle_gradients_free(&s.g);
  oracle_differentiate(&s.p, s.dy, &s.g);
  for (int64_t h = 0; h < p.H; h++)
    assert_true(s.g.sinks.value[h] == 0);
  p.sinks = NULL;
  oracle_differentiate(&p, s.dy, &without);
  same_gradients(&without, &s.g);
  oracle_gradients_free(&without);
  close_problem();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(agrees_with_differences),
      cmocka_unit_test(unseen_nan_reaches_nothing),
      cmocka_unit_test(seen_nan_reaches_what_it_meets),
      cmocka_unit_test(hidden_in_a_head_reaches_nothing_there),
      cmocka_unit_test(rows_beyond_a_length_count_for_bo),
      cmocka_unit_test(sink_of_minus_infinity_is_none),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
