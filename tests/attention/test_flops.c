/* Every product goes through the BLAS, and through nothing but the caller's buffers and the scratch
 * handed out by the caller's allocator. This program has its own cblas_sgemm, cblas_sgemv and
 * cblas_sdot, which the library calls instead of the BLAS's; they record the call and pass it on.
 */
#define _GNU_SOURCE 1 /* RTLD_NEXT */
#include "fixture.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* cblas.h is not needed: these are its values and types for 32-bit integers. */
enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, NO_TRANSPOSE = 111 };

typedef void sgemm_function(int order, int transpose_a, int transpose_b, int m, int n, int k,
                            float alpha, const float *a, int lda, const float *b, int ldb,
                            float beta, float *c, int ldc);
typedef void sgemv_function(int order, int transpose, int m, int n, float alpha, const float *a,
                            int lda, const float *x, int incx, float beta, float *y, int incy);
sgemm_function cblas_sgemm;
typedef float sdot_function(int n, const float *x, int incx, const float *y, int incy);
sgemv_function cblas_sgemv;
sdot_function cblas_sdot;

/* ---- Recording ------------------------------------------------------------------------------- */

typedef struct operand {
  char name;
  const float *begin, *end;
} operand;

typedef struct product {
  int64_t flops;
  float alpha;
  operand operands[3];
} product;

#define MAX_PRODUCTS (1 << 20) /* enough where a build has tiny tiles */
static product products[MAX_PRODUCTS];
static atomic_int n_products;

static product *next_product(void) {
  const int at = atomic_fetch_add(&n_products, 1);
  if (at >= MAX_PRODUCTS)
    abort();
  return &products[at];
}

/* rows × columns numbers in the given order, as stored, with a leading dimension. */
static operand matrix(char name, const float *data, int order, int rows, int columns, int ld) {
  const int64_t lines = order == ROW_MAJOR ? rows : columns;
  const int64_t line = order == ROW_MAJOR ? columns : rows;
  return (operand){name, data, data + (lines - 1) * ld + line};
}

static operand vector(char name, const float *data, int n, int increment) {
  return (operand){name, data, data + (int64_t)(n - 1) * increment + 1};
}

/* The BLAS's own function, found behind this program's. */
static void find(const char *name, void *function, size_t bytes) {
  void *symbol = dlsym(RTLD_NEXT, name);
  if (!symbol)
    abort();
  memcpy(function, &symbol, bytes);
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  const bool plain_a = transpose_a == NO_TRANSPOSE, plain_b = transpose_b == NO_TRANSPOSE;
  sgemm_function *real = NULL;
  product *p = next_product();
  p->flops = INT64_C(2) * m * n * k;
  p->alpha = alpha;
  p->operands[0] = matrix('A', a, order, plain_a ? m : k, plain_a ? k : m, lda);
  p->operands[1] = matrix('B', b, order, plain_b ? k : n, plain_b ? n : k, ldb);
  p->operands[2] = matrix('C', c, order, m, n, ldc);
  find("cblas_sgemm", &real, sizeof real);
  real(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_sgemv(int order, int transpose, int m, int n, float alpha, const float *a, int lda,
                 const float *x, int incx, float beta, float *y, int incy) {
  const bool plain = transpose == NO_TRANSPOSE;
  sgemv_function *real = NULL;
  product *p = next_product();
  p->flops = INT64_C(2) * m * n;
  p->alpha = alpha;
  p->operands[0] = matrix('A', a, order, m, n, lda);
  p->operands[1] = vector('x', x, plain ? n : m, incx);
  p->operands[2] = vector('y', y, plain ? m : n, incy);
  find("cblas_sgemv", &real, sizeof real);
  real(order, transpose, m, n, alpha, a, lda, x, incx, beta, y, incy);
}

/* The number that it returns goes to no operand. */
float cblas_sdot(int n, const float *x, int incx, const float *y, int incy) {
  sdot_function *real = NULL;
  product *p = next_product();
  p->flops = INT64_C(2) * n;
  p->alpha = 1.0F;
  p->operands[0] = vector('x', x, n, incx);
  p->operands[1] = vector('y', y, n, incy);
  p->operands[2] = p->operands[1];
  find("cblas_sdot", &real, sizeof real);
  return real(n, x, incx, y, incy);
}

static int64_t recorded_flops(void) {
  int64_t sum = 0;
  for (int i = 0; i < atomic_load(&n_products); i++)
    sum += products[i].flops;
  return sum;
}

/* ---- Where operands may lie ------------------------------------------------------------------ */

#define MAX_REGIONS 32
static test_range regions[MAX_REGIONS];
static int n_regions;

static void allow(const float *data, int64_t floats) {
  if (data && floats > 0)
    regions[n_regions++] = (test_range){(const char *)data, (const char *)(data + floats)};
}

static void allow_matrix(const test_fixture *f, const test_matrix *m) {
  const int64_t rows = f->c.out_in ? m->out : m->in, columns = f->c.out_in ? m->in : m->out;
  if (m->data)
    allow(m->data, (rows - 1) * m->ld + columns);
}

static bool lies_in(const operand *o, const test_range *range) {
  return (const char *)o->begin >= range->begin && (const char *)o->end <= range->end;
}

static bool is_allowed(const operand *o, const test_allocator *allocator) {
  for (int i = 0; i < n_regions; i++)
    if (lies_in(o, &regions[i]))
      return true;
  for (int i = 0; i < allocator->n_ranges; i++)
    if (lies_in(o, &allocator->ranges[i]))
      return true;
  return false;
}

static void check_operands(const test_fixture *f) {
  n_regions = 0;
  allow(f->query.data, f->query.floats);
  allow(f->key.data, f->key.floats);
  allow(f->value.data, f->value.floats);
  allow(f->output.data, f->output.floats);
  if (f->c.borrow) { /* a copy lies in what the allocator handed out */
    allow_matrix(f, &f->wq);
    allow_matrix(f, &f->wk);
    allow_matrix(f, &f->wv);
    allow_matrix(f, &f->wo);
  }
  for (int i = 0; i < atomic_load(&n_products); i++) {
    if (products[i].alpha == 0.0F)
      test_failed("product %d has alpha 0: A and B are not read", i);
    for (int o = 0; o < 3; o++)
      if (!is_allowed(&products[i].operands[o], &f->allocator))
        test_failed("operand %c of product %d lies outside every known buffer",
                    products[i].operands[o].name, i);
  }
}

/* ---- The tests ------------------------------------------------------------------------------- */

static test_fixture fixture; /* one at a time; too large for a stack */

static int64_t projection_flops(const test_case *c) {
  const int64_t queries = c->B * c->Lq, keys = c->B * c->Lk;
  int64_t sum = 0;
  if (!(c->absent & TEST_Q))
    sum += queries * c->Eq * c->H * c->d;
  if (!(c->absent & TEST_K))
    sum += keys * c->Ek * c->G * c->d;
  if (!(c->absent & TEST_V))
    sum += keys * c->Ev * c->G * c->dv;
  if (!(c->absent & TEST_O))
    sum += queries * c->H * c->dv * c->Eo;
  return 2 * sum;
}

static int64_t head_flops(const test_case *c) {
  return 2 * c->B * c->H * c->Lq * c->Lk * (c->d + c->dv);
}

static int64_t run_recorded(const test_case *c) {
  test_build(&fixture, c);
  atomic_store(&n_products, 0);
  test_run(&fixture);
  const int64_t flops = recorded_flops();
  check_operands(&fixture);
  test_judge_now(&fixture); /* the products that were counted are those that made the result */
  return flops;
}

static void expect_flops(const test_case *c) {
  const int64_t flops = run_recorded(c);
  const int64_t expected = projection_flops(&fixture.c) + head_flops(&fixture.c);
  if (flops != expected)
    test_failed("%" PRId64 " floating-point operations, the formula says %" PRId64, flops,
                expected);
  test_release(&fixture);
}

/* Four projections and both products of every head, nothing twice and nothing by hand. */
static void the_formula_of_a_layer(void **state) {
  const int64_t lengths[][2] = {{1, 1},   {1, 33},    {7, 7},     {2, 300},   {64, 64},
                                {130, 5}, {257, 129}, {100, 600}, {513, 520}, {300, 1}};
  (void)state;
  for (size_t i = 0; i < (test_small() ? 4 : sizeof lengths / sizeof *lengths); i++)
    for (int variant = 0; variant < 16; variant++)
      expect_flops(&(test_case){.seed = i,
                                .B = variant & 1 ? 2 : 1,
                                .Lq = lengths[i][0],
                                .Lk = lengths[i][1],
                                .H = 4,
                                .G = variant & 2 ? 2 : 4,
                                .d = 5,
                                .dv = 3,
                                .Eq = 9,
                                .Ek = 7,
                                .Ev = 11,
                                .Eo = 13,
                                .out_in = variant & 4,
                                .borrow = variant & 8,
                                .threads = 1 + variant % 3,
                                .weight_layout = variant & 1 ? TEST_GAPS : TEST_APART,
                                .layout = (test_layout)(variant % 3),
                                .biases = variant & 4 ? TEST_ALL : 0,
                                .accumulate = variant & 2,
                                .source = TEST_CROSS});
}

static void self_attention(void **state) {
  (void)state;
  for (int64_t L = 1; L <= 600; L = L * 2 + 1)
    expect_flops(&(test_case){.seed = (uint64_t)L,
                              .B = 2,
                              .Lq = L,
                              .H = 2,
                              .d = 8,
                              .source = TEST_SELF,
                              .threads = 2,
                              .biases = TEST_ALL});
}

/* A few rows times large matrices, where other routines of the BLAS may be faster. */
static void few_rows(void **state) {
  (void)state;
  for (int64_t L = 1; L <= 9; L++)
    for (int variant = 0; variant < 4; variant++)
      expect_flops(&(test_case){.seed = (uint64_t)L,
                                .Lq = L,
                                .Lk = variant & 2 ? 3000 : 5,
                                .H = 4,
                                .d = 70,
                                .Eq = variant & 2 ? 20 : 300,
                                .out_in = variant & 1,
                                .borrow = true,
                                .weight_layout = TEST_GAPS,
                                .layout = TEST_PADDED,
                                .accumulate = variant & 1});
}

/* The identity costs nothing. */
static void absent_matrices_cost_nothing(void **state) {
  (void)state;
  for (unsigned absent = 0; absent <= TEST_ALL; absent++)
    expect_flops(
        &(test_case){.seed = absent, .Lq = 20, .Lk = 30, .H = 2, .d = 4, .absent = absent});
}

static void the_core_alone(void **state) {
  (void)state;
  for (int layout = TEST_DENSE; layout <= TEST_HEAD_FIRST; layout++)
    expect_flops(&(test_case){.seed = 1,
                              .core = true,
                              .B = 2,
                              .Lq = 300,
                              .Lk = 530,
                              .H = 4,
                              .G = 2,
                              .d = 6,
                              .dv = 4,
                              .layout = (test_layout)layout,
                              .threads = 2,
                              .softcap = 3.0F,
                              .alibi = true,
                              .sinks = true});
}

/* Keys beyond a length cost nothing, in the projections and in the heads. */
static void lengths_cut_the_products(void **state) {
  enum { LQ = 40, LK = 700, KEYS = 333, QUERIES = 21, H = 2, D = 4, E = 8 };
  (void)state;
  const test_case c = {
      .seed = 1, .Lq = LQ, .Lk = LK, .H = H, .d = D, .key_lengths = true, .query_lengths = true};
  test_build(&fixture, &c);
  fixture.key_lengths[0] = KEYS;
  fixture.query_lengths[0] = QUERIES;
  test_fill_normal(&fixture.random, fixture.query.data, QUERIES * E, 1.0);
  test_fill_normal(&fixture.random, fixture.key.data, KEYS * E, 1.0);
  test_fill_normal(&fixture.random, fixture.value.data, KEYS * E, 1.0);
  atomic_store(&n_products, 0);
  test_run(&fixture);
  const int64_t flops = recorded_flops();
  check_operands(&fixture);
  const int64_t expected = INT64_C(2) * (2 * QUERIES * E * E + 2 * KEYS * E * E) +
                           INT64_C(2) * H * QUERIES * KEYS * 2 * D;
  if (flops != expected)
    test_failed("%" PRId64 " floating-point operations, within the lengths there are %" PRId64,
                flops, expected);
  test_release(&fixture);
}

/* Hidden tiles cost nothing: a causal mask spares nearly half, a window all but its band. */
static void hidden_tiles_cost_nothing(void **state) {
  (void)state;
  if (test_small())
    skip(); /* tiles are hidden only where there are many */
  test_case c = {.seed = 1, .core = true, .Lq = 2048, .Lk = 2048, .d = 2, .causal = true};
  int64_t flops = run_recorded(&c);
  const int64_t full = head_flops(&fixture.c);
  if (flops * 100 > full * 65)
    test_failed("causal: %" PRId64 " of %" PRId64 " floating-point operations", flops, full);
  test_release(&fixture);
  c.causal = false;
  c.window = true;
  c.left = 16;
  c.right = 16;
  flops = run_recorded(&c);
  if (flops * 100 > full * 40)
    test_failed("window: %" PRId64 " of %" PRId64 " floating-point operations", flops, full);
  test_release(&fixture);
}

/* Packed sequences cost what they cost one by one, and rows that belong to none cost nothing. */
static void packed_sequences_waste_nothing(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < 20; seed++) {
    const test_case c = {.seed = seed,
                         .B = 5,
                         .Lq = 90,
                         .Lk = 130,
                         .H = 2,
                         .d = 4,
                         .packed = true,
                         .packed_tail = seed & 2,
                         .core = seed & 1};
    const int64_t flops = run_recorded(&c);
    test_case owned = fixture.c; /* one entry of all rows that belong to a sequence */
    owned.B = 1;
    owned.Lq = fixture.query_starts[c.B];
    owned.Lk = fixture.key_starts[c.B];
    int64_t expected = projection_flops(&owned);
    for (int64_t b = 0; b < c.B; b++)
      expected += 2 * owned.H * (owned.d + owned.dv) *
                  (fixture.query_starts[b + 1] - fixture.query_starts[b]) *
                  (fixture.key_starts[b + 1] - fixture.key_starts[b]);
    if (flops != expected)
      test_failed("%" PRId64 " floating-point operations, the sequences have %" PRId64, flops,
                  expected);
    test_release(&fixture);
  }
}

/* A scale of 0 still reads Q and K. */
static void no_product_has_alpha_zero(void **state) {
  (void)state;
  expect_flops(&(test_case){
      .seed = 1, .Lq = 9, .Lk = 12, .H = 2, .d = 4, .scale_given = true, .scale = 0.0F});
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_formula_of_a_layer),
      cmocka_unit_test(self_attention),
      cmocka_unit_test(few_rows),
      cmocka_unit_test(absent_matrices_cost_nothing),
      cmocka_unit_test(the_core_alone),
      cmocka_unit_test(lengths_cut_the_products),
      cmocka_unit_test(hidden_tiles_cost_nothing),
      cmocka_unit_test(packed_sequences_waste_nothing),
      cmocka_unit_test(no_product_has_alpha_zero),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
