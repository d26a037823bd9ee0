/* Owns trials of mha_attend: step 3 alone. */
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
} attend_trial;

static mha_status attend(fuzz_trial *trial, mha_context *context, bool again, mha_error *error) {
  const attend_trial *t = (const attend_trial *)trial;
  return mha_attend(t->no_context ? NULL : context, t->no_q ? NULL : &t->q, t->no_k ? NULL : &t->k,
                    t->no_v ? NULL : &t->v, t->no_args ? NULL : t->given[again], error);
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
  to->Lk = choose_length(r);
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
  const bool wrong_size = t.trial.hostile && fuzz_read_one_in(r, 12);
  if (wrong_size)
    fuzz_trial_refuse(&t.trial, true);
  else if (t.trial.hostile)
    spoil(&t);
  else if (fuzz_read_one_in(r, 4))
    reserve(&t);
  finish(&t, wrong_size);
  (void)fuzz_trial_run(&t.trial);
}
