/* Owns the trials of mha_merge: parts of one shape, and one thing in them wrong. */
#include "tensors.h"

#include <math.h>
#include <string.h>

enum { MOST_PARTS = 4 };

typedef struct merge_trial {
  fuzz_trial trial;
  mha_tensor parts[MOST_PARTS], output;
  const float *lses[MOST_PARTS];
  mha_merge_args args;
  const mha_merge_args *given;
} merge_trial;

static mha_status merge(fuzz_trial *trial, mha_context *context, bool again, mha_error *error) {
  const merge_trial *t = (const merge_trial *)trial;
  (void)context, (void)again;
  return mha_merge(t->given, error);
}

/* Log-sum-exps: some of a query that saw no key. */
static const float *choose_sums(fuzz_trial *trial, int64_t n) {
  float *sums = fuzz_pool_floats(&trial->pool, n);
  fuzz_read_finites(trial->reader, sums, n);
  for (int64_t r = 0; r < n; r++)
    if (fuzz_read_one_in(trial->reader, 8))
      sums[r] = -INFINITY;
  return sums;
}

static void choose(merge_trial *t) {
  fuzz_reader *r = t->trial.reader;
  const int64_t B = fuzz_read(r, 0, 3);
  const int64_t L = fuzz_read(r, 0, 5);
  const int64_t H = fuzz_read(r, 1, 3);
  const int64_t dv = fuzz_read_one_in(r, 4) ? fuzz_read(r, 60, 70) : fuzz_read(r, 1, 5);
  MHA_INIT(&t->args);
  t->args.n_parts = fuzz_read(r, 1, MOST_PARTS);
  t->args.flags = fuzz_choose_flags(&t->trial, B == 0 || L == 0);
  for (int64_t u = 0; u < t->args.n_parts; u++) {
    t->parts[u] = fuzz_choose_tensor(&t->trial, B, L, H, dv);
    t->lses[u] = choose_sums(&t->trial, B * H * L);
  }
  t->output = fuzz_choose_output(&t->trial, B, L, H, dv);
  if (fuzz_read_one_in(r, 2)) {
    float *sinks = fuzz_pool_floats(&t->trial.pool, H);
    fuzz_read_finites(r, sinks, H);
    t->args.sinks = sinks;
  }
  if (fuzz_read_one_in(r, 2)) {
    t->args.log_sum_exp = fuzz_pool_output(&t->trial.pool, B * H * L, FUZZ_BOTH_RUNS, true);
    fuzz_pool_allow(&t->trial.pool, t->args.log_sum_exp, (size_t)(B * H * L) * sizeof(float));
  }
}

/* Returns whether the contract refuses it. */
static bool spoil(merge_trial *t) {
  fuzz_reader *r = t->trial.reader;
  const int64_t u = fuzz_read(r, 0, t->args.n_parts - 1);
  const bool rows = t->output.batch > 0 && t->output.length > 0;
  switch (fuzz_read(r, 0, 8)) {
  case 0:
    t->args.n_parts = fuzz_read_one_in(r, 2) ? INT64_MIN : -fuzz_read(r, 0, 3);
    return true;
  case 1:
    t->args.outputs = NULL;
    return true;
  case 2:
    t->args.log_sum_exps = NULL;
    return true;
  case 3:
    t->lses[u] = NULL;
    return rows;
  case 4:
    if (t->args.n_parts > 1) /* a single one would be larger than its array */
      t->parts[u].size++;
    return t->args.n_parts > 1;
  case 5:
    t->parts[u].element = fuzz_read_no_enumerator(r, MHA_F32, MHA_F32);
    return true;
  case 6:
    t->args.output = NULL;
    return rows;
  case 7:
    if (rows)
      t->args.log_sum_exp = t->args.output;
    return rows;
  default:
    fuzz_spoil_tensor(&t->trial, &t->parts[u]);
    return false;
  }
}

void fuzz_try_merge(fuzz_session *session) {
  merge_trial t;
  memset(&t, 0, sizeof t);
  fuzz_trial_begin(&t.trial, session);
  t.trial.make = merge;
  choose(&t);
  t.args.outputs = t.parts;
  t.args.log_sum_exps = t.lses;
  t.args.output = (float *)(uintptr_t)t.output.data;
  t.args.output_batch_stride = t.output.batch_stride;
  t.args.output_row_stride = t.output.row_stride;
  t.args.output_head_stride = t.output.head_stride;
  bool hostile_struct = false;
  if (t.trial.hostile && fuzz_read_one_in(t.trial.reader, 8))
    hostile_struct = true;
  if (hostile_struct)
    fuzz_trial_refuse(&t.trial, true);
  else if (t.trial.hostile) {
    const bool certain = spoil(&t);
    if (t.trial.hostile) /* a tensor has its own expectation */
      fuzz_trial_refuse(&t.trial, certain);
  }
  t.given = fuzz_trial_struct(&t.trial, &t.args, sizeof t.args, hostile_struct);
  (void)fuzz_trial_run(&t.trial);
}
