/* Owns trials of step 3 alone: mha_attend and mha_attend_backward. */
#include "gradients.h"
#include "rules.h"
#include "session.h"
#include "tensors.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct attend_trial {
  fuzz_trial trial; /* first */
  fuzz_rules rules;
  mha_tensor q, k, v, output;
  int64_t n_sequences;
  uint32_t flags;
  int32_t reserved;
  const mha_attend_args *given[2];
  bool no_context, no_args, no_q, no_k, no_v;
  bool goes_back;
  /* on the way back */
  mha_attend_backward_args back;
  const mha_attend_backward_args *back_given[2];
  fuzz_gradients gradients;
  bool no_back;
} attend_trial;

static mha_status attend(fuzz_trial *trial, mha_context *context, bool again, mha_error *error) {
  const attend_trial *t = (const attend_trial *)trial;
  const mha_attend_args *args = t->no_args ? NULL : t->given[again];
  const mha_tensor *q = t->no_q ? NULL : &t->q;
  const mha_tensor *k = t->no_k ? NULL : &t->k;
  const mha_tensor *v = t->no_v ? NULL : &t->v;
  if (t->no_context)
    context = NULL;
  if (!t->goes_back)
    return mha_attend(context, q, k, v, args, error);
  return mha_attend_backward(context, q, k, v, args, t->no_back ? NULL : t->back_given[again],
                             error);
}

/* ---- choices ---- */

static int64_t choose_length(fuzz_reader *r) {
  return fuzz_read_one_in(r, 3) ? fuzz_read(r, 0, 40) : fuzz_read(r, 1, 5);
}

static void choose_tensors(attend_trial *t, fuzz_rules_for *to) {
  static const int64_t counts[] = {2, 1, 4, 3, 6};
  static const int64_t sizes[] = {2, 1, 3, 4, 5, 8, 9};
  fuzz_reader *r = t->trial.reader;
  const int64_t share = fuzz_read(r, 1, 3);
  to->packed = fuzz_read_one_in(r, 4);
  to->B = fuzz_read_one_in(r, 8) ? 0 : fuzz_read(r, 1, 3);
  to->H = counts[fuzz_read(r, 0, 4)];
  to->Lq = choose_length(r);
  to->key_rows = to->Lk = choose_length(r);
  const int64_t G = to->H % share == 0 ? to->H / share : 1;
  const int64_t d = sizes[fuzz_read(r, 0, 6)];
  const int64_t dv = fuzz_read_one_in(r, 3) ? sizes[fuzz_read(r, 0, 6)] : d;
  const int64_t entries = to->packed ? 1 : to->B;
  t->n_sequences = to->packed ? to->B : 0;
  t->q = fuzz_choose_tensor(&t->trial, entries, to->Lq, to->H, d);
  t->k = fuzz_choose_tensor(&t->trial, entries, to->Lk, G, d);
  t->v = fuzz_choose_tensor(&t->trial, entries, to->Lk, G, dv);
  t->output = fuzz_choose_output(&t->trial, entries, to->Lq, to->H, dv);
}

static bool has_rows(const attend_trial *t) {
  return t->q.batch > 0 && t->q.length > 0;
}

/* ---- what is refused ---- */

static bool spoil_pointers(attend_trial *t) {
  switch (fuzz_read(t->trial.reader, 0, 5)) {
  case 0:
    t->no_context = true;
    return true;
  case 1:
    t->no_q = true;
    return true;
  case 2:
    t->no_k = true;
    return true;
  case 3:
    t->no_v = true;
    return true;
  case 4:
    t->no_args = true;
    return true;
  default:
    t->output.data = NULL;
    return has_rows(t);
  }
}

/* The output's strides, or where it lies. */
static bool spoil_output(attend_trial *t) {
  fuzz_reader *r = t->trial.reader;
  int64_t *strides[] = {&t->output.batch_stride, &t->output.row_stride, &t->output.head_stride};
  const int64_t counts[] = {t->output.batch, t->output.length, t->output.heads};
  const int64_t kind = fuzz_read(r, 0, 4);
  if (kind < 3) {
    t->output = fuzz_with_strides(&t->output);
    *strides[kind] = fuzz_read_one_in(r, 3) ? 0 : fuzz_read_no_size(r);
    return has_rows(t) && counts[kind] > 1;
  }
  const mha_tensor *onto = kind == 3 ? &t->q : fuzz_read_one_in(r, 2) ? &t->k : &t->v;
  if (!has_rows(t) || onto->length == 0)
    return false;
  t->output.data = onto->data;
  return true;
}

/* k and v no longer fit q, or each other. */
static void spoil_extents(attend_trial *t) {
  int64_t *sizes[] = {&t->k.heads, &t->v.heads,  &t->k.size,
                      &t->k.batch, &t->v.length, &t->k.length};
  (*sizes[fuzz_read(t->trial.reader, 0, 5)])++;
}

static bool spoil_fit(attend_trial *t) {
  fuzz_reader *r = t->trial.reader;
  const int64_t kind = fuzz_read(r, 0, 3);
  if (kind == 0)
    t->flags |= UINT32_C(1) << fuzz_read(r, 0, 4);
  else if (kind == 1)
    t->reserved = fuzz_read_no_enumerator(r, 0, 0);
  else if (kind == 2)
    t->n_sequences = t->rules.to.packed ? -1 : 1;
  else
    spoil_extents(t);
  return true;
}

/* Far more keys than there is memory for, of which none behind key_lengths is touched. */
static void stretch_keys(attend_trial *t) {
  if (!t->rules.key_lengths || t->rules.rules.attend.data || t->rules.rules.bias.data ||
      t->rules.weights || t->rules.average || t->rules.log_sum_exp)
    return;
  t->k = fuzz_with_strides(&t->k);
  t->v = fuzz_with_strides(&t->v);
  t->k.length = t->v.length = INT64_C(1) << fuzz_read(t->trial.reader, 20, 48);
}

static void spoil(attend_trial *t) {
  mha_tensor *tensors[] = {&t->q, &t->k, &t->v};
  switch (fuzz_read(t->trial.reader, 0, 7)) {
  case 0:
    fuzz_trial_refuse(&t->trial, spoil_pointers(t));
    break;
  case 1:
    fuzz_trial_refuse(&t->trial, spoil_output(t));
    break;
  case 2:
    fuzz_trial_refuse(&t->trial, spoil_fit(t));
    break;
  case 3:
  case 4:
    fuzz_spoil_tensor(&t->trial, tensors[fuzz_read(t->trial.reader, 0, 2)]);
    break;
  case 5:
    stretch_keys(t);
    fuzz_trial_refuse(&t->trial, false);
    break;
  default:
    fuzz_spoil_rules(&t->trial, &t->rules);
  }
}

/* ---- the way back ---- */

/* Not of a tensor that entries or heads share. */
static void want_tensor(attend_trial *t, float **member, const mha_tensor *tensor) {
  const mha_tensor s = fuzz_with_strides(tensor);
  const bool empty = s.batch == 0 || s.length == 0;
  const int64_t n = empty ? 0
                          : (s.batch - 1) * s.batch_stride + (s.length - 1) * s.row_stride +
                                (s.heads - 1) * s.head_stride + s.size;
  if (!empty && ((s.batch > 1 && s.batch_stride == 0) || (s.heads > 1 && s.head_stride == 0)))
    return;
  const float *data = fuzz_want_gradient(&t->trial, &t->gradients, member, n, true);
  for (int64_t b = 0; data && b < s.batch; b++)
    for (int64_t i = 0; i < s.length; i++)
      for (int64_t h = 0; h < s.heads; h++)
        fuzz_pool_allow(&t->trial.pool,
                        data + b * s.batch_stride + i * s.row_stride + h * s.head_stride,
                        (size_t)s.size * sizeof *data);
}

static void choose_back(attend_trial *t) {
  mha_attend_backward_args *a = &t->back;
  fuzz_gradients *g = &t->gradients;
  const mha_rules *rules = &t->rules.rules;
  const int64_t H = t->q.heads;
  MHA_INIT(a);
  fuzz_pool_forbid(&t->trial.pool);
  fuzz_begin_gradients(&t->trial, g);
  a->accumulate = g->accumulate;
  want_tensor(t, &a->d_q, &t->q);
  want_tensor(t, &a->d_k, &t->k);
  want_tensor(t, &a->d_v, &t->v);
  fuzz_want_bias(&t->trial, g, &a->d_bias, rules);
  fuzz_want_vector(&t->trial, g, &a->d_alibi_slopes, H, rules->alibi_slopes != NULL);
  fuzz_want_vector(&t->trial, g, &a->d_sinks, H, rules->sinks != NULL);
  const mha_tensor dy = fuzz_choose_tensor(&t->trial, t->q.batch, t->q.length, H, t->v.size);
  fuzz_hide_rows(&t->trial, &dy, t->rules.query_lengths);
  a->dy = dy.data;
  a->dy_batch_stride = dy.batch_stride;
  a->dy_row_stride = dy.row_stride;
  a->dy_head_stride = dy.head_stride;
  /* all three 0 would be dense */
  if (dy.size_stride == 1 && !dy.batch_stride && !dy.row_stride && !dy.head_stride)
    t->trial.expect = FUZZ_ANYTHING;
}

static void spoil_back(attend_trial *t) {
  fuzz_reader *r = t->trial.reader;
  mha_attend_backward_args *a = &t->back;
  bool certain = true;
  switch (fuzz_read(r, 0, 4)) {
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
  default:
    certain = fuzz_spoil_gradients(&t->trial, &t->gradients, has_rows(t) ? t->q.data : NULL);
  }
  fuzz_trial_refuse(&t->trial, certain);
}

/* On the way back some of what is wrong is not looked at. */
static void spoil_way_back(attend_trial *t) {
  if (fuzz_read_one_in(t->trial.reader, 2)) {
    spoil_back(t);
    return;
  }
  spoil(t);
  if (t->trial.expect == FUZZ_FAILURE)
    t->trial.expect = FUZZ_ANYTHING;
}

/* What the forward call gives, by the plain context. */
static void use_log_sum_exp(attend_trial *t) {
  const int64_t rows = t->q.batch * t->q.length * t->q.heads;
  mha_attend_args a = *t->given[0];
  mha_results results;
  MHA_INIT(&results);
  a.struct_size = sizeof a;
  float *lse = fuzz_pool_floats(&t->trial.pool, rows);
  a.output = fuzz_pool_floats(&t->trial.pool, rows * t->v.size);
  a.output_batch_stride = a.output_row_stride = a.output_head_stride = 0;
  results.log_sum_exp = lse;
  a.results = &results;
  fuzz_pool_close(&t->trial.pool);
  const mha_status status = mha_attend(t->trial.session->plain, &t->q, &t->k, &t->v, &a, NULL);
  fuzz_pool_open(&t->trial.pool);
  if (status)
    return;
  a.results = NULL;
  t->back.log_sum_exp = lse;
  t->given[0] = t->given[1] = fuzz_trial_struct(&t->trial, &a, sizeof a, false);
}

static void finish_back(attend_trial *t) {
  if (t->trial.left % 4 == 3 && t->trial.expect == FUZZ_SUCCESS)
    use_log_sum_exp(t);
  for (int run = 0; run < 2 && !t->back_given[run]; run++)
    t->back_given[run] = fuzz_trial_struct(&t->trial, &t->back, sizeof t->back, false);
}

/* ---- the call ---- */

static void reserve(attend_trial *t) {
  mha_shape shape;
  MHA_INIT(&shape);
  shape.packed = t->rules.to.packed;
  shape.batch = t->rules.to.B;
  shape.query_length = t->q.length;
  shape.key_length = t->k.length;
  shape.n_heads = t->q.heads;
  shape.value_head_size = t->v.size;
  shape.n_kv_heads = t->k.heads;
  shape.head_size = t->q.size;
  shape.backward = t->goes_back ? MHA_BACKWARD_ALONE : MHA_BACKWARD_NONE;
  fuzz_enlarge_shape(&t->trial, &shape);
  FUZZ_CHECK(mha_context_reserve(t->trial.session->context, NULL, &shape, NULL) == MHA_OK);
  t->trial.no_allocation = true;
}

static void finish(attend_trial *t, bool hostile) {
  mha_attend_args args;
  fuzz_finish_rules(&t->trial, &t->rules);
  MHA_INIT(&args);
  args.n_sequences = t->n_sequences;
  args.flags = t->flags;
  args.reserved = t->reserved;
  args.output = (float *)(uintptr_t)t->output.data;
  args.output_batch_stride = t->output.batch_stride;
  args.output_row_stride = t->output.row_stride;
  args.output_head_stride = t->output.head_stride;
  for (int run = 0; run < 2; run++) {
    args.rules = t->rules.given[run];
    args.results = t->rules.wanted[run];
    t->given[run] = run == 1 && hostile ? t->given[0]
                                        : fuzz_trial_struct(&t->trial, &args, sizeof args, hostile);
  }
}

void fuzz_try_attend(fuzz_session *session) {
  attend_trial t = {.n_sequences = 0};
  fuzz_rules_for to = {.B = 0};
  fuzz_trial_begin(&t.trial, session);
  fuzz_reader *r = t.trial.reader;
  t.trial.make = attend;
  choose_tensors(&t, &to);
  fuzz_choose_rules(&t.trial, &t.rules, &to);
  t.flags = fuzz_choose_flags(&t.trial, to.B == 0 || to.Lq == 0 || to.Lk == 0);
  fuzz_hide_rows(&t.trial, &t.q, t.rules.query_lengths);
  fuzz_hide_rows(&t.trial, &t.k, t.rules.key_lengths);
  fuzz_hide_rows(&t.trial, &t.v, t.rules.key_lengths);
  t.goes_back = t.trial.left % 2 == 1;
  if (t.goes_back)
    choose_back(&t);
  const bool wrong_size = t.trial.hostile && fuzz_read_one_in(r, 12);
  if (wrong_size)
    fuzz_trial_refuse(&t.trial, true);
  else if (t.trial.hostile && t.goes_back)
    spoil_way_back(&t);
  else if (t.trial.hostile)
    spoil(&t);
  else if (fuzz_read_one_in(r, 4))
    reserve(&t);
  finish(&t, wrong_size);
  if (t.goes_back)
    finish_back(&t);
  (void)fuzz_trial_run(&t.trial);
}
