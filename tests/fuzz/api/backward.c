/* Owns the way back of a layer call that has been chosen: gradients, tapes, and what is wrong about
 * them. */
#include "forward.h"

#include <stdio.h>
#include <stdlib.h>

bool fuzz_goes_back(const fuzz_forward *t) {
  return t->way == FUZZ_BACK || t->way == FUZZ_BACK_WITH_TAPE;
}

static bool has_rows(const fuzz_forward *t) {
  return t->entries > 0 && t->args.query_length > 0;
}

/* ---- gradients ---- */

static void want_input(fuzz_forward *t, float **member, int64_t length, int64_t width,
                       int64_t batch_stride, int64_t row_stride, bool is_there) {
  const int64_t B = t->entries;
  const int64_t row = fuzz_row_step(row_stride, width);
  const int64_t batch = fuzz_batch_step(batch_stride, row_stride, length, width);
  const int64_t n = B > 0 && length > 0 ? (B - 1) * batch + (length - 1) * row + width : 0;
  const float *data = fuzz_want_gradient(&t->trial, &t->gradients, member, n, is_there);
  for (int64_t b = 0; data && b < B; b++)
    for (int64_t i = 0; i < length; i++)
      fuzz_pool_allow(&t->trial.pool, data + b * batch + i * row, (size_t)width * sizeof *data);
}

static void want_matrix(fuzz_forward *t, float **member, int64_t in, int64_t out, int64_t ld,
                        const mha_matrices *m, bool is_there) {
  const bool in_out = m->orientation == MHA_IN_OUT;
  const int64_t rows = in_out ? in : out;
  const int64_t columns = in_out ? out : in;
  const int64_t step = ld && rows > 1 ? ld : columns;
  const int64_t n = (rows - 1) * step + columns;
  const float *data = fuzz_want_gradient(&t->trial, &t->gradients, member, n, is_there);
  for (int64_t k = 0; data && k < rows; k++)
    fuzz_pool_allow(&t->trial.pool, data + k * step, (size_t)columns * sizeof *data);
}

static void want_weights(fuzz_forward *t, const mha_matrices *m) {
  const mha_config *c = &t->layer->config;
  const int64_t *ld = t->layer->ld;
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size;
  const int64_t concat = c->n_heads * c->value_head_size;
  fuzz_gradients *g = &t->gradients;
  mha_backward_args *a = &t->back;
  want_matrix(t, &a->d_wq, c->query_width, q, ld[0], m, m->query != NULL);
  want_matrix(t, &a->d_wk, c->key_width, k, ld[1], m, m->key != NULL);
  want_matrix(t, &a->d_wv, c->value_width, v, ld[2], m, m->value != NULL);
  want_matrix(t, &a->d_wo, concat, c->output_width, ld[3], m, m->output != NULL);
  fuzz_want_vector(&t->trial, g, &a->d_bq, q, m->query_bias != NULL);
  fuzz_want_vector(&t->trial, g, &a->d_bk, k, m->key_bias != NULL);
  fuzz_want_vector(&t->trial, g, &a->d_bv, v, m->value_bias != NULL);
  fuzz_want_vector(&t->trial, g, &a->d_bo, c->output_width, m->output_bias != NULL);
  const bool full = c->norm == MHA_NORM_FULL;
  const bool norm = c->norm != MHA_NORM_NONE;
  fuzz_want_vector(&t->trial, g, &a->d_query_norm, full ? q : c->head_size, norm);
  fuzz_want_vector(&t->trial, g, &a->d_key_norm, full ? k : c->head_size, norm);
}

/* [entries][Lq][Eo], of which rows beyond a length are read for d_bo alone. */
static void choose_dy(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  const int64_t width = t->layer->config.output_width;
  const int64_t Lq = t->args.query_length;
  const int64_t pad = fuzz_read_one_in(r, 3) ? fuzz_read(r, 1, 3) : 0;
  const int64_t row = width + pad;
  const int64_t n = has_rows(t) ? t->entries * Lq * row - pad : 0;
  float *dy = fuzz_pool_floats(&t->trial.pool, n);
  fuzz_read_floats(r, dy, n);
  t->back.dy = dy;
  t->back.dy_row_stride = pad > 0 ? row : 0;
  const int64_t *counts = t->rules.query_lengths;
  for (int64_t b = 0; counts && !t->back.d_bo && b < t->entries; b++)
    for (int64_t i = counts[b]; i < Lq; i++)
      fuzz_pool_hide(&t->trial.pool, dy + (b * Lq + i) * row, (size_t)width * sizeof *dy);
}

void fuzz_choose_back(fuzz_forward *t) {
  const mha_forward_args *f = &t->args;
  const mha_config *c = &t->layer->config;
  const mha_rules *rules = &t->rules.rules;
  fuzz_gradients *g = &t->gradients;
  mha_backward_args *a = &t->back;
  mha_matrices m;
  MHA_INIT(a);
  MHA_INIT(&m);
  FUZZ_CHECK(mha_weights_matrices(t->layer->weights, &m, NULL) == MHA_OK);
  fuzz_pool_forbid(&t->trial.pool); /* what the forward call writes is not looked at */
  fuzz_begin_gradients(&t->trial, g);
  want_input(t, &a->d_query, f->query_length, c->query_width, f->query_batch_stride,
             f->query_row_stride, true);
  want_input(t, &a->d_key, t->rows, c->key_width, f->key_batch_stride, f->key_row_stride,
             f->key != NULL);
  want_input(t, &a->d_value, t->rows, c->value_width, f->value_batch_stride, f->value_row_stride,
             f->value != NULL);
  want_weights(t, &m);
  fuzz_want_bias(&t->trial, g, &a->d_bias, rules);
  fuzz_want_vector(&t->trial, g, &a->d_alibi_slopes, c->n_heads, rules->alibi_slopes != NULL);
  fuzz_want_vector(&t->trial, g, &a->d_sinks, c->n_heads, rules->sinks || m.sinks);
  a->accumulate = g->accumulate;
  choose_dy(t);
  if (t->cache)
    t->trial.expect = FUZZ_FAILURE;
}

/* ---- tapes ---- */

static mha_tape *make_tape(const fuzz_allocator *allocator) {
  mha_tape *tape = NULL;
  FUZZ_CHECK(mha_tape_create(&allocator->mha, &tape, NULL) == MHA_OK && tape);
  return tape;
}

/* Always in the first run, so that what is refused is refused in both. */
void fuzz_choose_tapes(fuzz_forward *t) {
  fuzz_session *s = t->trial.session;
  t->tapes[0] = make_tape(&s->memory);
  if (t->cache || t->trial.hostile || t->trial.left % 2 == 0)
    t->tapes[1] = make_tape(&s->plain_memory);
  t->args.tape = t->tapes[0];
  if (t->cache)
    t->trial.expect = FUZZ_FAILURE;
}

void fuzz_end_tapes(fuzz_forward *t) {
  mha_tape_destroy(t->tapes[0]);
  mha_tape_destroy(t->tapes[1]);
}

/* A tape that the plain context fills; none if it does not. */
static void fill_tape(fuzz_forward *t) {
  mha_forward_args a = t->args;
  mha_tape *tape = make_tape(&t->trial.session->home);
  const int64_t n = t->entries * a.query_length * t->layer->config.output_width;
  float *output = malloc((size_t)(n > 0 ? n : 1) * sizeof *output);
  FUZZ_CHECK(output);
  a.output = output;
  a.output_batch_stride = a.output_row_stride = 0;
  a.accumulate = 0;
  a.rules = t->rules.given[0];
  a.tape = tape;
  fuzz_pool_close(&t->trial.pool);
  const mha_status status = mha_forward(t->trial.session->plain, t->weights, &a, NULL);
  fuzz_pool_open(&t->trial.pool);
  free(output);
  if (status)
    mha_tape_destroy(tape);
  else
    t->tapes[0] = tape;
}

/* ---- what is refused ---- */

void fuzz_spoil_back(fuzz_forward *t) {
  fuzz_reader *r = t->trial.reader;
  mha_backward_args *a = &t->back;
  bool certain = true;
  switch (fuzz_read(r, 0, 6)) {
  case 0:
    t->back_given[0] = t->back_given[1] = fuzz_trial_struct(&t->trial, a, sizeof *a, true);
    break;
  case 1:
    t->no_back = true;
    break;
  case 2:
    a->dy = NULL;
    certain = has_rows(t);
    break;
  case 3:
    a->flags = UINT32_C(1) << fuzz_read(r, 0, 31);
    break;
  case 4: {
    const bool rows = fuzz_read_one_in(r, 2);
    *(rows ? &a->dy_row_stride : &a->dy_batch_stride) = fuzz_read_no_size(r);
    certain = has_rows(t) && (rows ? t->args.query_length : t->entries) > 1;
    break;
  }
  case 5:
    t->tapes[0] = make_tape(&t->trial.session->home); /* empty */
    break;
  default: {
    const void *neighbours[] = {a->dy, t->args.query, t->layer->borrowed};
    const int64_t which = fuzz_read(r, 0, 2);
    certain = fuzz_spoil_gradients(&t->trial, &t->gradients,
                                   which == 2 || has_rows(t) ? neighbours[which] : NULL);
  }
  }
  fuzz_trial_refuse(&t->trial, certain);
}

/* ---- the call ---- */

void fuzz_finish_back(fuzz_forward *t) {
  const bool is_right = t->trial.expect == FUZZ_SUCCESS && !t->cache;
  if (t->way == FUZZ_BACK_WITH_TAPE && is_right && !t->tapes[0])
    fill_tape(t);
  if (!t->tapes[0])
    t->trial.no_allocation &= t->way == FUZZ_BACK;
  for (int run = 0; run < 2 && !t->back_given[run]; run++) {
    mha_backward_args a = t->back;
    /* sometimes in one run alone */
    a.tape = run == 0 || !is_right || t->trial.left % 2 == 0 ? t->tapes[0] : NULL;
    t->back_given[run] = fuzz_trial_struct(&t->trial, &a, sizeof a, false);
  }
}
