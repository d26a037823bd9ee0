/* Owns the fixture's way back: memory for gradients, the calls, and the comparison with the judge.
 */
#include "backward_fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Where gradients lie --------------------------------------------------------------------- */

static bool is_filled(const test_gradient *g) {
  return g->data != NULL;
}

/* Random numbers that the call adds to, or poison that it overwrites; gaps and rows that nobody
 * reads are poison in both. */
static void fill_before(test_back *t, test_gradient *g) {
  for (int64_t r = 0; t->c.accumulate && r < g->rows; r++)
    if (g->is_read[r])
      test_fill_normal(&t->f.random, g->before + g->row_at[r], g->columns, 1.0);
}

static void make_gradient(test_back *t, test_gradient_name which, const char *name, int64_t floats,
                          test_shape shape) {
  test_gradient *g = &t->gradients[which];
  g->name = name;
  g->floats = floats;
  g->shape = shape;
  g->rows = shape.n[0] * shape.n[1] * shape.n[2];
  g->columns = shape.n[3];
  g->data = test_pool_floats(&t->f.pool, floats);
  g->before = test_allocate((size_t)floats, sizeof *g->before);
  g->row_at = test_allocate((size_t)g->rows, sizeof *g->row_at);
  g->is_read = test_allocate((size_t)g->rows, sizeof *g->is_read);
  test_fill_poison(g->before, floats);
  for (int64_t r = 0; r < g->rows; r++) {
    g->row_at[r] = r * g->columns;
    g->is_read[r] = true;
  }
}

typedef bool reads(const test_fixture *f, int64_t b, int64_t i);

static bool reads_either(const test_fixture *f, int64_t b, int64_t i) {
  return test_reads_query(f, b, i) || test_reads_key(f, b, i);
}

static void make_input(test_back *t, test_gradient_name which, const char *name, const test_view *v,
                       reads *is_read) {
  test_gradient *g = &t->gradients[which];
  int64_t r = 0;
  make_gradient(t, which, name, v->floats, test_view_shape(v));
  for (int64_t b = 0; b < v->batch; b++)
    for (int64_t i = 0; i < v->length; i++)
      for (int64_t h = 0; h < v->heads; h++, r++) {
        g->row_at[r] = test_at(v, b, i, h, 0) - v->data;
        g->is_read[r] = is_read(&t->f, b, i);
      }
  fill_before(t, g);
}

static void make_inputs(test_back *t) {
  const test_fixture *f = &t->f;
  const bool self = f->c.source == TEST_SELF;
  make_input(t, TEST_D_QUERY, "d_query", &f->query, self ? reads_either : test_reads_query);
  if (!self)
    make_input(t, TEST_D_KEY, "d_key", &f->key, test_reads_key);
  if (f->c.source == TEST_CROSS)
    make_input(t, TEST_D_VALUE, "d_value", &f->value, test_reads_key);
}

static void make_vector(test_back *t, test_gradient_name which, const char *name, int64_t n) {
  make_gradient(t, which, name, n, (test_shape){{1, 1, 1, n}});
  fill_before(t, &t->gradients[which]);
}

static void make_matrix(test_back *t, test_gradient_name which, const char *name,
                        const test_matrix *m) {
  const int64_t rows = t->f.c.out_in ? m->out : m->in, columns = t->f.c.out_in ? m->in : m->out;
  test_gradient *g = &t->gradients[which];
  make_gradient(t, which, name, (rows - 1) * m->ld + columns, (test_shape){{1, 1, rows, columns}});
  g->judge_has_the_gaps = true;
  for (int64_t r = 0; r < rows; r++)
    g->row_at[r] = r * m->ld;
  fill_before(t, g);
}

static void make_layer(test_back *t) {
  static const char *const matrices[] = {"d_wq", "d_wk", "d_wv", "d_wo"};
  static const char *const biases[] = {"d_bq", "d_bk", "d_bv", "d_bo"};
  const test_fixture *f = &t->f;
  const test_matrix *all[] = {&f->wq, &f->wk, &f->wv, &f->wo};
  for (int w = 0; w < 4; w++) {
    if (all[w]->data)
      make_matrix(t, (test_gradient_name)(TEST_D_WQ + w), matrices[w], all[w]);
    if (all[w]->bias)
      make_vector(t, (test_gradient_name)(TEST_D_BQ + w), biases[w], all[w]->out);
  }
  if (f->c.norm != MHA_NORM_NONE) {
    const bool full = f->c.norm == MHA_NORM_FULL;
    make_vector(t, TEST_D_QUERY_NORM, "d_query_norm", full ? f->wq.out : f->c.d);
    make_vector(t, TEST_D_KEY_NORM, "d_key_norm", full ? f->wk.out : f->c.d);
  }
}

static void make_rules(test_back *t) {
  const mha_bias *b = &t->f.rules.bias;
  const int64_t H = t->f.c.H;
  if (t->f.slopes)
    make_vector(t, TEST_D_SLOPES, "d_alibi_slopes", H);
  if (t->f.sinks)
    make_vector(t, TEST_D_SINKS, "d_sinks", H);
  if (!t->f.bias)
    return;
  const int64_t row = b->row_stride ? b->row_stride : b->columns;
  const int64_t head = b->head_stride ? b->head_stride : b->rows * row;
  const int64_t batch = b->batch_stride ? b->batch_stride : b->heads * head;
  test_gradient *g = &t->gradients[TEST_D_BIAS];
  int64_t r = 0;
  make_gradient(t, TEST_D_BIAS, "d_bias", t->f.bias_floats,
                (test_shape){{b->batch, b->heads, b->rows, b->columns}});
  for (int64_t e = 0; e < b->batch; e++)
    for (int64_t h = 0; h < b->heads; h++)
      for (int64_t i = 0; i < b->rows; i++, r++)
        g->row_at[r] = e * batch + h * head + i * row;
  fill_before(t, g);
}

static void make_dy(test_back *t) {
  test_fixture *f = &t->f;
  const bool all_rows = f->wo.bias != NULL;
  t->dy = test_make_view(f, t->c.dy_layout, MHA_F32, f->c.Lq, f->output.heads, f->output.size);
  for (int64_t b = 0; b < t->dy.batch; b++)
    for (int64_t i = 0; i < t->dy.length; i++)
      for (int64_t h = 0; (all_rows || test_reads_query(f, b, i)) && h < t->dy.heads; h++)
        test_fill_normal(&f->random, test_at(&t->dy, b, i, h, 0), t->dy.size, 1.0);
}

/* ---- Building and running -------------------------------------------------------------------- */

void test_back_use_threads(test_back *t, int32_t threads) {
  mha_error error;
  mha_context_destroy(t->context);
  t->context = NULL;
  t->f.options.n_threads = threads;
  test_expect(mha_context_create(&t->f.options, &t->context, &error), MHA_OK, &error);
}

void test_back_forward(test_back *t) {
  mha_error error;
  t->f.args.tape = t->tape;
  test_poison_results(&t->f);
  test_expect(test_call(&t->f, t->context, t->weights, &error), MHA_OK, &error);
  t->f.args.tape = NULL;
}

static void back_arguments(test_back *t) {
  const bool strided = t->c.dy_layout != TEST_DENSE;
  MHA_INIT(&t->args);
  t->args.accumulate = t->c.accumulate;
  t->args.dy = t->dy.data;
  MHA_INIT(&t->attend_args);
  t->attend_args.accumulate = t->c.accumulate;
  t->attend_args.dy = t->dy.data;
  t->attend_args.log_sum_exp = t->c.kept ? t->f.lse : NULL;
  if (!strided)
    return;
  t->args.dy_batch_stride = t->attend_args.dy_batch_stride = t->dy.batch_stride;
  t->args.dy_row_stride = t->attend_args.dy_row_stride = t->dy.row_stride;
  t->attend_args.dy_head_stride = t->dy.head_stride;
}

void test_back_build(test_back *t, const test_back_case *c) {
  mha_error error;
  memset(t, 0, sizeof *t);
  t->c = *c;
  if (c->forward.core && c->kept)
    t->c.forward.want |= TEST_WANT_LSE;
  test_build(&t->f, &t->c.forward);
  if (!t->f.c.core)
    test_expect(mha_weights_create(&t->f.config, &t->f.matrices, &t->weights, &error), MHA_OK,
                &error);
  if (!t->f.c.core && c->kept)
    test_expect(mha_tape_create(&t->f.allocator.mha, &t->tape, &error), MHA_OK, &error);
  test_back_use_threads(t, t->f.options.n_threads);
  make_dy(t);
  make_inputs(t);
  make_layer(t);
  make_rules(t);
  for (int k = 0; k < TEST_GRADIENTS; k++)
    t->wanted |= is_filled(&t->gradients[k]) ? 1U << k : 0;
  back_arguments(t);
  if (c->kept)
    test_back_forward(t);
}

void test_back_release(test_back *t) {
  for (int k = 0; k < TEST_GRADIENTS; k++) {
    free(t->gradients[k].before);
    free(t->gradients[k].row_at);
    free(t->gradients[k].is_read);
  }
  mha_tape_destroy(t->tape);
  mha_context_destroy(t->context);
  mha_weights_destroy(t->weights);
  test_allocator_check(&t->f.allocator);
  test_release(&t->f);
}

void test_back_clear(test_back *t) {
  for (int k = 0; k < TEST_GRADIENTS; k++)
    for (int64_t at = 0; at < t->gradients[k].floats; at++)
      t->gradients[k].before[at] = 0.0F;
}

static float *wanted(const test_back *t, test_gradient_name which) {
  return t->wanted & (1U << which) ? t->gradients[which].data : NULL;
}

static mha_status call_attend(test_back *t, mha_error *error) {
  mha_attend_backward_args *a = &t->attend_args;
  mha_attend_args args = t->f.attend_args;
  a->d_q = wanted(t, TEST_D_QUERY);
  a->d_k = wanted(t, TEST_D_KEY);
  a->d_v = wanted(t, TEST_D_VALUE);
  a->d_bias = wanted(t, TEST_D_BIAS);
  a->d_alibi_slopes = wanted(t, TEST_D_SLOPES);
  a->d_sinks = wanted(t, TEST_D_SINKS);
  if (!a->log_sum_exp)
    args.output = NULL; /* not looked at, nor is what was asked for */
  return mha_attend_backward(t->context, &t->f.q, &t->f.k, &t->f.v, &args, a, error);
}

mha_status test_back_call(test_back *t, mha_error *error) {
  mha_backward_args *a = &t->args;
  mha_forward_args args = t->f.args;
  if (t->f.c.core)
    return call_attend(t, error);
  float **const all[TEST_GRADIENTS] = {
      &a->d_query,    &a->d_key,  &a->d_value,        &a->d_wq,   &a->d_wk, &a->d_wv,
      &a->d_wo,       &a->d_bq,   &a->d_bk,           &a->d_bv,   &a->d_bo, &a->d_query_norm,
      &a->d_key_norm, &a->d_bias, &a->d_alibi_slopes, &a->d_sinks};
  for (int k = 0; k < TEST_GRADIENTS; k++)
    *all[k] = wanted(t, (test_gradient_name)k);
  a->tape = t->tape;
  args.output = NULL; /* not looked at */
  if (t->call)
    return t->call(t->call_user, error);
  return mha_backward(t->context, t->weights, &args, a, error);
}

/* Fails where memory that is no element of the gradient, or of one that is not wanted, changed. */
static void check_gaps(const test_back *t, const test_gradient *g, bool is_wanted) {
  bool *written = test_allocate((size_t)g->floats, sizeof *written);
  for (int64_t r = 0; is_wanted && r < g->rows; r++)
    memset(written + g->row_at[r], 1, (size_t)g->columns);
  for (int64_t at = 0; at < g->floats; at++)
    if (!written[at] && !test_equal_bits(g->data[at], g->before[at]))
      test_failed("number %" PRId64 " of the memory of %s is a gap and was written", at, g->name);
  free(written);
  (void)t;
}

void test_back_run(test_back *t) {
  mha_error error;
  for (int k = 0; k < TEST_GRADIENTS; k++)
    if (t->gradients[k].floats > 0)
      memcpy(t->gradients[k].data, t->gradients[k].before,
             (size_t)t->gradients[k].floats * sizeof(float));
  test_expect(test_back_call(t, &error), MHA_OK, &error);
  for (int k = 0; k < TEST_GRADIENTS; k++)
    if (is_filled(&t->gradients[k]))
      check_gaps(t, &t->gradients[k], t->wanted & (1U << k));
}

/* ---- The judge ------------------------------------------------------------------------------- */

void test_back_ask(test_back *t, oracle_gradients *g) {
  oracle_problem p;
  float *dense = test_gather(&t->dy);
  const int64_t n = t->dy.batch * t->dy.length * t->dy.heads * t->dy.size;
  double *dy = test_allocate((size_t)n, sizeof *dy);
  for (int64_t i = 0; i < n; i++)
    dy[i] = (double)dense[i];
  test_problem(&t->f, &p);
  oracle_differentiate(&p, dy, g);
  oracle_gradients_share(g, t->f.c.source != TEST_CROSS, t->f.c.source == TEST_SELF);
  if (t->f.bias) {
    oracle_numbers reduced;
    const mha_bias *b = &t->f.rules.bias;
    oracle_reduce_bias(&p, g, b->batch, b->heads, b->rows, &reduced);
    oracle_numbers_free(&g->bias);
    g->bias = reduced;
  }
  test_problem_free(&p);
  free(dense);
  free(dy);
}

/* An element beyond all lengths: exactly 0, or exactly what was there. */
static void check_unread(const test_back *t, const test_gradient *g, int64_t r) {
  for (int64_t c = 0; c < g->columns; c++) {
    const float got = g->data[g->row_at[r] + c];
    const float expected = t->c.accumulate ? g->before[g->row_at[r] + c] : 0.0F;
    if (t->c.accumulate ? !test_equal_bits(got, expected) : got != 0.0F)
      test_failed("%s, row %" PRId64 ", column %" PRId64 ": nobody reads that row, got %g, not %g",
                  g->name, r, c, (double)got, (double)expected);
  }
}

/* One float32 addition onto what was there for each of a few partial sums. */
static const double rounding_of_before = 1e-6;

static void judge_gradient(const test_back *t, const test_gradient *g, const oracle_numbers *j) {
  const int64_t n = g->rows * g->columns;
  float *got = test_allocate((size_t)n, sizeof *got);
  double *expected = test_allocate((size_t)n, sizeof *expected);
  double *bound = test_allocate((size_t)n, sizeof *bound);
  if (!g->judge_has_the_gaps && j->n != n)
    test_failed("%s has %" PRId64 " numbers, the judge's %" PRId64, g->name, n, j->n);
  for (int64_t r = 0, k = 0; r < g->rows; r++) {
    if (!g->is_read[r])
      check_unread(t, g, r);
    for (int64_t c = 0; c < g->columns; c++, k++) {
      const int64_t at = g->row_at[r] + c, judged = g->judge_has_the_gaps ? at : k;
      const double before = t->c.accumulate ? (double)g->before[at] : 0.0;
      if (!g->is_read[r])
        continue;
      got[k] = g->data[at];
      expected[k] = j->value[judged] + before;
      bound[k] = j->bound[judged] + rounding_of_before * fabs(before);
    }
  }
  test_compare(g->name, g->shape, got, expected, bound);
  free(got);
  free(expected);
  free(bound);
}

void test_back_judge(test_back *t) {
  oracle_gradients g;
  test_back_ask(t, &g);
  const oracle_numbers *const all[TEST_GRADIENTS] = {
      &g.query, &g.key, &g.value, &g.wq,         &g.wk,       &g.wv,   &g.wo,     &g.bq,
      &g.bk,    &g.bv,  &g.bo,    &g.query_norm, &g.key_norm, &g.bias, &g.slopes, &g.sinks};
  for (int k = 0; k < TEST_GRADIENTS; k++)
    if (t->wanted & (1U << k))
      judge_gradient(t, &t->gradients[k], all[k]);
  oracle_gradients_free(&g);
}

void test_back_check(const test_back_case *c) {
  test_back *t = test_allocate(1, sizeof *t);
  test_back_build(t, c);
  test_back_run(t);
  test_back_judge(t);
  test_back_release(t);
  free(t);
}

/* ---- Bits ------------------------------------------------------------------------------------ */

float test_back_at(const test_back *t, test_gradient_name which, int64_t row, int64_t column) {
  const test_gradient *g = &t->gradients[which];
  return g->data[g->row_at[row] + column];
}

float *test_back_copy(const test_back *t) {
  int64_t n = 0;
  for (int k = 0; k < TEST_GRADIENTS; k++)
    n += t->gradients[k].floats;
  float *copy = test_allocate((size_t)n, sizeof *copy), *at = copy;
  for (int k = 0; k < TEST_GRADIENTS; k++) {
    const test_gradient *g = &t->gradients[k];
    if (g->floats > 0)
      memcpy(at, g->data, (size_t)g->floats * sizeof *at);
    at += g->floats;
  }
  return copy;
}

static void same_gradient(const test_gradient *g, test_gradient_name which, const float *copy,
                          test_back_keeps *keeps, const void *user) {
  for (int64_t r = 0; r < g->rows; r++)
    for (int64_t c = 0; c < g->columns; c++) {
      const int64_t at = g->row_at[r] + c;
      if (!test_equal_bits(g->data[at], copy[at]) && (!keeps || keeps(user, which, r, c)))
        test_failed("%s, row %" PRId64 ", column %" PRId64 ": got %.9g (%a), expected the bits of "
                    "%.9g (%a)",
                    g->name, r, c, (double)g->data[at], (double)g->data[at], (double)copy[at],
                    (double)copy[at]);
    }
}

void test_back_same(const test_back *t, const float *copy, test_back_keeps *keeps,
                    const void *user) {
  for (int k = 0; k < TEST_GRADIENTS; k++) {
    const test_gradient *g = &t->gradients[k];
    if (t->wanted & (1U << k))
      same_gradient(g, (test_gradient_name)k, copy, keeps, user);
    copy += g->floats;
  }
}

/* ---- Random calls ---------------------------------------------------------------------------- */

static bool coin(test_random *random) {
  return test_random_range(random, 0, 1) == 1;
}

static bool rarely(test_random *random) {
  return test_random_range(random, 0, 3) == 0;
}

static int32_t draw_type(test_random *r) {
  static const int32_t types[] = {MHA_F16, MHA_BF16, MHA_Q8_0, MHA_Q4_0};
  return types[test_random_range(r, 0, 3)];
}

/* Rows of whole blocks: all widths are multiples of 32 then. */
static void draw_types(test_random *r, test_case *c) {
  c->G = 1;
  c->H = test_random_range(r, 1, 2);
  c->d = c->dv = 32;
  c->odd_addresses = coin(r);
  if (c->core) {
    c->k_type = coin(r) ? draw_type(r) : MHA_F32;
    c->v_type = coin(r) ? draw_type(r) : MHA_F32;
    c->k_type = c->k_type == MHA_Q4_0 ? MHA_Q8_0 : c->k_type;
    c->v_type = c->v_type == MHA_Q4_0 ? MHA_F16 : c->v_type;
    return;
  }
  c->Eq = 32 * test_random_range(r, 1, 2);
  c->Ek = c->source == TEST_SELF ? c->Eq : 64;
  c->Ev = c->source == TEST_CROSS ? 32 : c->Ek;
  c->Eo = 64;
  c->query_type = c->key_type = c->value_type = draw_type(r);
  c->output_type = coin(r) ? draw_type(r) : MHA_F32;
}

static void draw_sizes(test_random *r, test_case *c) {
  c->B = test_random_range(r, 1, 3);
  c->Lq = test_random_range(r, 1, 20);
  c->Lk = test_random_range(r, 1, 30);
  c->G = test_random_range(r, 1, 3);
  c->H = c->G * test_random_range(r, 1, 3);
  c->d = 2 * test_random_range(r, 1, 8);
  c->dv = test_random_range(r, 1, 17);
  c->source = c->core ? TEST_CROSS : (test_source)test_random_range(r, 0, 2);
  c->Eq = test_random_range(r, 1, 20);
  c->Ek = c->source == TEST_SELF ? c->Eq : test_random_range(r, 1, 20);
  c->Ev = c->source == TEST_CROSS ? test_random_range(r, 1, 20) : c->Ek;
  c->Eo = test_random_range(r, 1, 20);
}

static void draw_layer(test_random *r, test_case *c) {
  c->out_in = coin(r);
  c->borrow = coin(r);
  c->weight_layout = (test_weight_layout)test_random_range(r, 0, 2);
  c->biases = (unsigned)test_random_range(r, 0, TEST_ALL);
  c->accumulate = rarely(r);
  if (rarely(r)) {
    draw_types(r, c);
  } else if (rarely(r) && !c->core) {
    /* the widths that any of the identities needs */
    c->absent = (unsigned)test_random_range(r, 0, TEST_ALL);
    c->G = c->H;
    c->dv = c->d;
    c->Eq = c->Ek = c->Ev = c->Eo = c->H * c->d;
  }
  if (c->weight_layout == TEST_IN_BLOCK && (c->Ek != c->Eq || c->Ev != c->Eq))
    c->weight_layout = TEST_GAPS;
}

void test_draw_visibility(test_random *r, test_case *c, int64_t reach) {
  c->causal = coin(r);
  c->window = rarely(r);
  c->left = test_random_range(r, -1, reach);
  c->right = test_random_range(r, -1, reach * 3 / 4);
  c->alignment = (mha_alignment)test_random_range(r, 0, 2);
  c->offset = test_random_range(r, -3, reach);
  c->offset_each = coin(r);
  c->packed = rarely(r);
  c->packed_tail = coin(r);
  if (c->packed) {
    c->Lq *= 3;
    c->Lk *= 3;
    return;
  }
  c->query_lengths = rarely(r);
  c->key_lengths = rarely(r);
  c->has_mask = rarely(r);
  c->has_bias = coin(r);
  c->bias_hides = coin(r);
  c->mask_strides = coin(r);
  c->mask_extents = (unsigned)test_random_range(r, 0, TEST_FULL);
  c->bias_extents = (unsigned)test_random_range(r, 0, TEST_FULL);
}

static void draw_scores(test_random *r, test_case *c) {
  /* A slope's gradient sums distances times numbers that sum to 0, so a single one is sometimes
   * small by cancellation. */
  c->alibi = rarely(r) && c->H > 1;
  c->sinks = rarely(r);
  c->scale_given = rarely(r);
  /* Around what heads of this size have: sharper scores magnify the rounding of the products. */
  c->scale = rarely(r) ? 0.0F : (float)(test_random_uniform(r, -1.5, 1.5) / sqrt((double)c->d));
  c->softcap = rarely(r) ? (float)test_random_uniform(r, 0.5, 3.0) : 0.0F;
  c->rules_in_call = coin(r);
  c->dropout = rarely(r) ? 0.3F : 0.0F;
  c->dropout_seed = test_random_bits(r);
  c->dropout_call = c->seed;
  if (c->core)
    return;
  /* A normalised multiple of one row of a matrix does not depend on the multiple: the gradient of
   * an input of that width is 0 but for what cancellation leaves. */
  if (rarely(r) && c->Eq > 3 && c->Ek > 3)
    c->norm = (mha_norm)test_random_range(r, 1, 2);
  c->norm_ones = rarely(r);
  c->rope = rarely(r) ? (mha_rope)test_random_range(r, 1, 2) : MHA_ROPE_NONE;
  c->rotary = 2 * test_random_range(r, 1, c->d / 2);
  c->rope_base = coin(r) ? 100.0 : 0.0;
  c->rope_tables = rarely(r);
  c->query_position = test_random_range(r, 0, 4);
  c->key_position = test_random_range(r, 0, 4);
  c->positions_given = rarely(r);
}

test_back_case test_back_draw(test_random *r, uint64_t seed, bool core) {
  test_back_case t = {.forward = {.seed = seed, .core = core}};
  test_case *c = &t.forward;
  draw_sizes(r, c);
  draw_layer(r, c);
  test_draw_visibility(r, c, 12);
  draw_scores(r, c);
  c->layout = (test_layout)test_random_range(r, 0, core ? 3 : 2);
  t.dy_layout = (test_layout)test_random_range(r, 0, core ? 3 : 2);
  c->threads = (int)test_random_range(r, 1, 3);
  c->at_front = coin(r);
  t.accumulate = rarely(r);
  t.kept = coin(r);
  return t;
}
