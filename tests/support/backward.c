/* Owns the asking for all gradients of a fixture's call. */
#include "backward.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void add(test_backward *back, test_fixture *f, const char *name, float **member,
                int64_t floats, bool is_there) {
  if (!is_there)
    return;
  assert_true(back->n < TEST_MAX_GRADIENTS);
  float *data = test_pool_floats(&f->pool, floats);
  const test_asked_gradient gradient = {name, member, data, floats};
  back->gradients[back->n++] = gradient;
  *member = data;
}

static void add_matrix(test_backward *back, test_fixture *f, const char *names[2], float **matrix,
                       float **bias, const test_matrix *m) {
  const int64_t rows = f->c.out_in ? m->out : m->in;
  const int64_t columns = f->c.out_in ? m->in : m->out;
  const int64_t ld = m->ld ? m->ld : columns;
  add(back, f, names[0], matrix, (rows - 1) * ld + columns, m->data != NULL);
  add(back, f, names[1], bias, m->out, m->bias != NULL);
}

static void build_layer(test_backward *back, test_fixture *f) {
  mha_backward_args *a = &back->args;
  const test_case *c = &f->c;
  const int64_t full = c->norm == MHA_NORM_FULL;
  const bool has_norm = c->norm != MHA_NORM_NONE;
  add(back, f, "back.d_query", &a->d_query, f->query.floats, true);
  add(back, f, "back.d_key", &a->d_key, f->key.floats, f->args.key != NULL);
  add(back, f, "back.d_value", &a->d_value, f->value.floats, f->args.value != NULL);
  add_matrix(back, f, (const char *[]){"back.d_wq", "back.d_bq"}, &a->d_wq, &a->d_bq, &f->wq);
  add_matrix(back, f, (const char *[]){"back.d_wk", "back.d_bk"}, &a->d_wk, &a->d_bk, &f->wk);
  add_matrix(back, f, (const char *[]){"back.d_wv", "back.d_bv"}, &a->d_wv, &a->d_bv, &f->wv);
  add_matrix(back, f, (const char *[]){"back.d_wo", "back.d_bo"}, &a->d_wo, &a->d_bo, &f->wo);
  add(back, f, "back.d_query_norm", &a->d_query_norm, (full ? c->H : 1) * c->d, has_norm);
  add(back, f, "back.d_key_norm", &a->d_key_norm, (full ? c->G : 1) * c->d, has_norm);
  add(back, f, "back.d_bias", &a->d_bias, f->bias_floats, c->has_bias);
  add(back, f, "back.d_alibi_slopes", &a->d_alibi_slopes, c->H, c->alibi);
  add(back, f, "back.d_sinks", &a->d_sinks, c->H, c->sinks);
}

static void build_core(test_backward *back, test_fixture *f) {
  mha_attend_backward_args *a = &back->attend;
  const test_case *c = &f->c;
  add(back, f, "back.d_q", &a->d_q, f->query.floats, true);
  add(back, f, "back.d_k", &a->d_k, f->key.floats, true);
  add(back, f, "back.d_v", &a->d_v, f->value.floats, true);
  add(back, f, "back.d_bias", &a->d_bias, f->bias_floats, c->has_bias);
  add(back, f, "back.d_alibi_slopes", &a->d_alibi_slopes, c->H, c->alibi);
  add(back, f, "back.d_sinks", &a->d_sinks, c->H, c->sinks);
}

void test_backward_build(test_backward *back, test_fixture *f) {
  const test_view *y = &f->output;
  MHA_INIT(&back->args);
  MHA_INIT(&back->attend);
  back->n = 0;
  if (f->c.core)
    build_core(back, f);
  else
    build_layer(back, f);
  back->dy_floats = y->batch * y->length * y->heads * y->size;
  back->dy = test_pool_floats(&f->pool, back->dy_floats);
  test_fill_normal(&f->random, back->dy, back->dy_floats, 1.0);
  back->args.dy = back->attend.dy = back->dy;
}

void test_backward_poison(const test_backward *back) {
  for (size_t i = 0; i < back->n; i++)
    test_fill_poison(back->gradients[i].data, back->gradients[i].floats);
}

void test_backward_expect_poison(const test_backward *back) {
  for (size_t i = 0; i < back->n; i++)
    for (int64_t at = 0; at < back->gradients[i].floats; at++)
      if (!test_is_poison(back->gradients[i].data[at]))
        test_failed("%s: element %" PRId64 " was written", back->gradients[i].name, at);
}

void test_backward_expect_written(const test_backward *back, const char *name) {
  for (size_t i = 0; i < back->n; i++)
    for (int64_t at = 0; at < back->gradients[i].floats; at++)
      if (strcmp(back->gradients[i].name, name) == 0 && test_is_poison(back->gradients[i].data[at]))
        test_failed("%s: element %" PRId64 " was not written", name, at);
}

mha_status test_backward_call(test_backward *back, test_fixture *f, mha_context *context,
                              const mha_weights *weights, mha_error *error) {
  if (!f->c.core)
    return mha_backward(context, weights, &f->args, &back->args, error);
  return mha_attend_backward(context, &f->q, &f->k, &f->v, &f->attend_args, &back->attend, error);
}

float *test_backward_copy(const test_backward *back) {
  int64_t n = 0;
  for (size_t i = 0; i < back->n; i++)
    n += back->gradients[i].floats;
  float *copy = test_allocate((size_t)n, sizeof *copy);
  float *to = copy;
  for (size_t i = 0; i < back->n; i++) {
    const test_asked_gradient *g = &back->gradients[i];
    memcpy(to, g->data, (size_t)g->floats * sizeof *to);
    to += g->floats;
  }
  return copy;
}

void test_backward_expect_bits(const test_backward *back, const float *copy) {
  for (size_t i = 0; i < back->n; i++) {
    const test_asked_gradient *g = &back->gradients[i];
    test_same_bits(g->name, (test_shape){{1, 1, 1, g->floats}}, g->data, copy);
    copy += g->floats;
  }
}
