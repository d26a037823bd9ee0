/* Owns the choice of rules, good and bad. */
#include "rules.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- lengths and sequences ---- */

int64_t *fuzz_choose_starts(fuzz_trial *t, int64_t n, int64_t rows) {
  int64_t *starts = fuzz_pool_integers(&t->pool, n + 1);
  starts[0] = 0;
  for (int64_t b = 0; b < n; b++)
    starts[b + 1] = starts[b] + fuzz_read(t->reader, 0, rows - starts[b]);
  return starts;
}

static void choose_lengths(fuzz_trial *t, fuzz_rules *r) {
  const fuzz_rules_for *to = &r->to;
  if (to->packed && to->cached) {
    r->query_starts = to->query_starts;
    r->key_starts = to->key_starts;
  } else if (to->packed) {
    r->query_starts = fuzz_choose_starts(t, to->B, to->Lq);
    if (!to->key_is_query || fuzz_read_one_in(t->reader, 3))
      r->key_starts = fuzz_choose_starts(t, to->B, to->key_rows);
  } else if (!to->cached) {
    r->query_lengths = fuzz_choose_counts(t, to->B, to->Lq);
    r->key_lengths = fuzz_choose_counts(t, to->B, to->Lk);
  }
  r->rules.query_starts = r->query_starts;
  r->rules.key_starts = r->key_starts;
  r->rules.query_lengths = r->query_lengths;
  r->rules.key_lengths = r->key_lengths;
}

static void choose_alignment(fuzz_trial *t, fuzz_rules *r) {
  fuzz_reader *reader = t->reader;
  mha_rules *a = &r->rules;
  a->causal = fuzz_read_one_in(reader, 2) ? (int32_t)fuzz_read(reader, -1, 2) : 0;
  a->alignment = (int32_t)fuzz_read(reader, MHA_ALIGN_TOP_LEFT, MHA_ALIGN_OFFSET);
  a->offset = fuzz_read_any(reader);
  if (fuzz_read_one_in(reader, 4)) {
    int64_t *offsets = fuzz_pool_integers(&t->pool, r->to.B);
    for (int64_t b = 0; b < r->to.B; b++)
      offsets[b] = fuzz_read_any(reader);
    a->offsets = offsets;
  }
}

static int64_t choose_side(fuzz_reader *reader) {
  const int64_t side = fuzz_read_any(reader);
  return side < -1 ? -1 : side;
}

/* A ring needs its window or a narrower one. */
static void choose_window(fuzz_trial *t, fuzz_rules *r) {
  mha_rules *a = &r->rules;
  if (r->to.window > 0) {
    a->flags |= MHA_WINDOW;
    a->window_left = fuzz_read(t->reader, 0, r->to.window - 1);
    a->window_right = choose_side(t->reader);
  } else if (fuzz_read_one_in(t->reader, 3)) {
    a->flags |= MHA_WINDOW;
    a->window_left = choose_side(t->reader);
    a->window_right = choose_side(t->reader);
  }
}

/* ---- masks ---- */

/* [batch][heads][rows][columns] of a mask or a bias, the strides filled in. */
typedef struct extents {
  int64_t batch, heads, rows, columns, batch_stride, head_stride, row_stride;
} extents;

static extents choose_extents(fuzz_trial *t, const fuzz_rules_for *to, int64_t *elements) {
  fuzz_reader *reader = t->reader;
  const int64_t pad = fuzz_read_one_in(reader, 3) ? fuzz_read(reader, 1, 3) : 0;
  extents e = {.batch = fuzz_read_one_in(reader, 2) ? to->B : 1,
               .heads = fuzz_read_one_in(reader, 2) ? to->H : 1,
               .rows = fuzz_read_one_in(reader, 2) ? to->Lq : 1,
               .columns = to->Lk};
  const int64_t row = to->Lk + pad;
  const int64_t head = e.rows * row + pad;
  const int64_t batch = e.heads * head + pad;
  *elements = e.batch == 0 || e.rows == 0
                  ? 0
                  : (e.batch - 1) * batch + (e.heads - 1) * head + (e.rows - 1) * row + e.columns;
  if (pad > 0) {
    e.row_stride = row;
    e.head_stride = head;
    e.batch_stride = batch;
  }
  return e;
}

static void choose_mask(fuzz_trial *t, fuzz_rules *r) {
  mha_mask *m = &r->rules.attend;
  int64_t n = 0;
  const extents e = choose_extents(t, &r->to, &n);
  uint8_t *data = fuzz_pool_take(&t->pool, n, 1);
  const int64_t step = fuzz_read(t->reader, 1, 7);
  for (int64_t k = 0; k < n; k++)
    data[k] = (uint8_t)(k % step * 3);
  const mha_mask mask = {data,           e.batch,       e.heads,      e.rows, e.columns,
                         e.batch_stride, e.head_stride, e.row_stride, 0,      0};
  *m = mask;
}

static void choose_bias(fuzz_trial *t, fuzz_rules *r) {
  mha_bias *a = &r->rules.bias;
  int64_t n = 0;
  const extents e = choose_extents(t, &r->to, &n);
  float *data = fuzz_pool_floats(&t->pool, n);
  fuzz_read_floats(t->reader, data, n);
  const mha_bias bias = {data,           e.batch,       e.heads,      e.rows,  e.columns,
                         e.batch_stride, e.head_stride, e.row_stride, MHA_F32, 0};
  *a = bias;
}

/* ---- scores ---- */

/* One of four times, by `left` from 0 to 63. Seed and call need no choice of their own. */
static void choose_dropout(mha_rules *a, int64_t left) {
  static const float shares[] = {0.5f, 0.1f, 0.9f, FLT_TRUE_MIN, 1.0f - 0x1p-24f};
  if (left % 4 != 3)
    return;
  a->dropout = shares[left / 4 % (int64_t)(sizeof shares / sizeof *shares)];
  a->dropout_seed = (uint64_t)a->offset;
  a->dropout_call = (uint64_t)left << 31;
}

static void choose_scores(fuzz_trial *t, fuzz_rules *r) {
  fuzz_reader *reader = t->reader;
  mha_rules *a = &r->rules;
  const bool scaled = fuzz_read_one_in(reader, 4);
  choose_dropout(a, fuzz_read_left(reader));
  if (scaled) {
    a->flags |= MHA_SCALE;
    a->scale = fuzz_read_finite(reader);
  }
  if (fuzz_read_one_in(reader, 4)) {
    a->flags |= fuzz_read_one_in(reader, 2) ? MHA_SOFTCAP : 0;
    a->softcap = fabsf(fuzz_read_finite(reader));
  }
  if (fuzz_read_one_in(reader, 4)) {
    float *slopes = fuzz_pool_floats(&t->pool, r->to.H);
    fuzz_read_finites(reader, slopes, r->to.H);
    a->alibi_slopes = slopes;
  }
  if (fuzz_read_one_in(reader, 4)) {
    float *sinks = fuzz_pool_floats(&t->pool, r->to.H);
    fuzz_read_finites(reader, sinks, r->to.H);
    if (fuzz_read_one_in(reader, 3))
      sinks[r->to.H - 1] = -INFINITY;
    a->sinks = sinks;
  }
  if (!r->to.packed && fuzz_read_one_in(reader, 4))
    choose_mask(t, r);
  if (!r->to.packed && fuzz_read_one_in(reader, 4))
    choose_bias(t, r);
}

/* ---- results ---- */

/* n numbers, dense; for a run or for both. */
static float *choose_result(fuzz_trial *t, int64_t n, int runs) {
  float *data = fuzz_pool_output(&t->pool, n, runs, true);
  fuzz_pool_allow(&t->pool, data, (size_t)n * sizeof *data);
  return data;
}

static void choose_results(fuzz_trial *t, fuzz_rules *r) {
  fuzz_reader *reader = t->reader;
  const fuzz_rules_for *to = &r->to;
  const int64_t rows = (to->packed ? 1 : to->B) * to->Lq;
  r->asks = 1 + (int)fuzz_read(reader, 0, 2);
  r->results.stage = (int32_t)fuzz_read(reader, MHA_STAGE_WEIGHTS, MHA_STAGE_FINAL);
  if (!to->packed && fuzz_read_one_in(reader, 2))
    r->weights = choose_result(t, rows * to->H * to->Lk, r->asks);
  if (!to->packed && fuzz_read_one_in(reader, 3))
    r->average = choose_result(t, rows * to->Lk, r->asks);
  if (fuzz_read_one_in(reader, 2))
    r->log_sum_exp = choose_result(t, rows * to->H, r->asks);
}

void fuzz_choose_rules(fuzz_trial *trial, fuzz_rules *rules, const fuzz_rules_for *to) {
  const fuzz_rules begin = {.to = *to};
  *rules = begin;
  rules->exist =
      to->packed || to->window > 0 || fuzz_read_one_in(trial->reader, 2) || trial->hostile;
  MHA_INIT(&rules->rules);
  MHA_INIT(&rules->results);
  if (!rules->exist)
    return;
  choose_lengths(trial, rules);
  choose_alignment(trial, rules);
  choose_window(trial, rules);
  choose_scores(trial, rules);
  if (!to->append_only)
    choose_results(trial, rules);
}

/* ---- what is refused ---- */

static int64_t out_of(fuzz_reader *reader, int64_t highest) {
  return fuzz_read_one_in(reader, 2) ? highest + 1 : fuzz_read_no_size(reader);
}

/* A softcap or a dropout. */
static void spoil_share(fuzz_reader *reader, mha_rules *a) {
  const bool finite = !fuzz_read_one_in(reader, 2);
  const int64_t left = fuzz_read_left(reader);
  float *share = left % 2 ? &a->dropout : &a->softcap;
  *share = !finite ? fuzz_read_not_finite(reader) : left % 4 == 3 ? 1.0f : -1.0f;
}

static void spoil_numbers(fuzz_reader *reader, fuzz_rules *r) {
  mha_rules *a = &r->rules;
  switch (fuzz_read(reader, 0, 5)) {
  case 0:
    a->flags |= UINT32_C(8) << fuzz_read(reader, 0, 28);
    break;
  case 1:
    a->alignment = fuzz_read_no_enumerator(reader, MHA_ALIGN_TOP_LEFT, MHA_ALIGN_OFFSET);
    break;
  case 2:
    r->results.stage = fuzz_read_no_enumerator(reader, MHA_STAGE_WEIGHTS, MHA_STAGE_FINAL);
    break;
  case 3:
    a->flags |= MHA_SCALE;
    a->scale = fuzz_read_not_finite(reader);
    break;
  case 4:
    spoil_share(reader, a);
    break;
  default:
    a->flags |= MHA_WINDOW;
    *(fuzz_read_one_in(reader, 2) ? &a->window_left : &a->window_right) =
        fuzz_read_one_in(reader, 2) ? INT64_MIN : -2;
  }
}

/* One of the slopes or sinks that are there. */
static bool spoil_heads(fuzz_trial *t, fuzz_rules *r) {
  float *numbers = fuzz_pool_floats(&t->pool, r->to.H);
  memset(numbers, 0, (size_t)r->to.H * sizeof *numbers);
  numbers[fuzz_read(t->reader, 0, r->to.H - 1)] = fuzz_read_one_in(t->reader, 2) ? NAN : INFINITY;
  if (fuzz_read_one_in(t->reader, 2))
    r->rules.alibi_slopes = numbers;
  else
    r->rules.sinks = numbers;
  return true;
}

static bool spoil_lengths(fuzz_trial *t, const fuzz_rules *r) {
  const bool keys = r->key_lengths && fuzz_read_one_in(t->reader, 2);
  int64_t *lengths = keys ? r->key_lengths : r->query_lengths;
  if (!lengths || r->to.B == 0)
    return false;
  lengths[fuzz_read(t->reader, 0, r->to.B - 1)] = out_of(t->reader, keys ? r->to.Lk : r->to.Lq);
  return true;
}

static bool spoil_starts(fuzz_trial *t, const fuzz_rules *r) {
  const bool keys = r->key_starts && fuzz_read_one_in(t->reader, 2);
  int64_t *starts = keys ? r->key_starts : r->query_starts;
  if (!starts)
    return false;
  if (fuzz_read_one_in(t->reader, 2))
    starts[0] = fuzz_read_one_in(t->reader, 2) ? 1 : fuzz_read_no_size(t->reader);
  else
    starts[r->to.B] = out_of(t->reader, keys ? r->to.key_rows : r->to.Lq);
  return true;
}

/* Extents and strides of a mask or bias. Returns whether the contract refuses them. */
static bool spoil_extents(fuzz_trial *t, const fuzz_rules_for *to, int64_t *sizes[4],
                          int64_t *strides[3]) {
  const int64_t full[] = {to->B, to->H, to->Lq, to->Lk};
  const int64_t which = fuzz_read(t->reader, 0, 6);
  if (which < 4) {
    *sizes[which] = fuzz_read_one_in(t->reader, 2) && full[which] > 0
                        ? full[which] + 1
                        : fuzz_read_no_size(t->reader);
    return true;
  }
  /* bytes, so that the address space is larger than usual */
  *strides[which - 4] = fuzz_read_one_in(t->reader, 2) ? INT64_MAX : -1;
  return *sizes[which - 4] > 1 && to->Lk > 0;
}

static bool spoil_masks(fuzz_trial *t, fuzz_rules *r) {
  mha_mask *m = &r->rules.attend;
  mha_bias *a = &r->rules.bias;
  int64_t *mask_sizes[] = {&m->batch, &m->heads, &m->rows, &m->columns};
  int64_t *mask_strides[] = {&m->batch_stride, &m->head_stride, &m->row_stride};
  int64_t *bias_sizes[] = {&a->batch, &a->heads, &a->rows, &a->columns};
  int64_t *bias_strides[] = {&a->batch_stride, &a->head_stride, &a->row_stride};
  if (m->data)
    return spoil_extents(t, &r->to, mask_sizes, mask_strides);
  return a->data && spoil_extents(t, &r->to, bias_sizes, bias_strides);
}

/* Results that overlap each other or an input, or that do not go together with the call. */
static bool spoil_results(fuzz_trial *t, fuzz_rules *r) {
  float *const inputs[] = {(float *)(void *)r->query_lengths, (float *)(void *)r->query_starts,
                           r->to.Lk > 0 ? (float *)(uintptr_t)r->rules.bias.data : NULL,
                           (float *)(uintptr_t)r->rules.alibi_slopes};
  float *onto = inputs[fuzz_read(t->reader, 0, 3)];
  if (r->log_sum_exp && r->average && r->to.Lk > 0)
    r->log_sum_exp = r->average;
  else if (onto)
    r->log_sum_exp = onto;
  else
    return false;
  return true;
}

/* Members that do not go together. */
static bool spoil_company(fuzz_trial *t, fuzz_rules *r) {
  int64_t *zeros = fuzz_pool_integers(&t->pool, r->to.B + 1);
  memset(zeros, 0, (size_t)(r->to.B + 1) * sizeof *zeros);
  switch (fuzz_read(t->reader, 0, 3)) {
  case 0:
    if (r->to.append_only || (r->to.packed && r->to.cached)) /* they say what is appended */
      return false;
    r->rules.key_starts = zeros;
    return !r->to.packed;
  case 1:
    r->rules.key_lengths = zeros;
    return r->to.packed || r->to.cached;
  case 2:
    if (r->to.packed)
      r->rules.key_starts = NULL;
    return r->to.packed && !r->to.key_is_query;
  default:
    if (r->to.packed)
      r->rules.attend.data = (const uint8_t *)zeros;
    return r->to.packed;
  }
}

/* A ring needs its window from the first token on. */
static bool spoil_ring(fuzz_reader *reader, fuzz_rules *r) {
  if (r->to.window == 0)
    return false;
  if (fuzz_read_one_in(reader, 2))
    r->rules.flags &= ~MHA_WINDOW;
  else
    r->rules.window_left = fuzz_read_one_in(reader, 2) ? -1 : r->to.window;
  return true;
}

void fuzz_spoil_rules(fuzz_trial *trial, fuzz_rules *rules) {
  const fuzz_rules_for *to = &rules->to;
  bool certain = true;
  switch (fuzz_read(trial->reader, 0, 10)) {
  case 0:
  case 1:
    spoil_numbers(trial->reader, rules);
    break;
  case 2:
    certain = spoil_heads(trial, rules);
    break;
  case 3:
    certain = spoil_lengths(trial, rules);
    break;
  case 4:
    certain = spoil_starts(trial, rules);
    break;
  case 5:
    certain = spoil_masks(trial, rules);
    break;
  case 6:
    certain = spoil_results(trial, rules);
    break;
  case 7:
    certain = spoil_company(trial, rules);
    break;
  case 8:
    certain = spoil_ring(trial->reader, rules);
    break;
  case 9:
    rules->given[0] = fuzz_trial_struct(trial, &rules->rules, sizeof rules->rules, true);
    break;
  default:
    rules->wanted[0] = fuzz_trial_struct(trial, &rules->results, sizeof rules->results, true);
  }
  if (certain) /* results would otherwise be a second fault, of one run; of no rows, they are none
                */
    rules->asks = FUZZ_BOTH_RUNS;
  fuzz_trial_refuse(trial, certain && (rules->given[0] || rules->wanted[0] ||
                                       (!to->append_only && to->B > 0 && to->Lq > 0)));
}

void fuzz_finish_rules(fuzz_trial *trial, fuzz_rules *rules) {
  mha_results asked = rules->results;
  asked.weights = rules->weights;
  asked.average = rules->average;
  asked.log_sum_exp = rules->log_sum_exp;
  const bool spoiled_rules = rules->given[0] != NULL;
  const bool spoiled_results = rules->wanted[0] != NULL;
  rules->given[1] = rules->given[0];
  rules->wanted[1] = rules->wanted[0];
  for (int run = 0; run < 2 && rules->exist; run++) {
    const mha_results *a = rules->asks & (run + 1) ? &asked : &rules->results;
    if (!spoiled_rules)
      rules->given[run] = fuzz_trial_struct(trial, &rules->rules, sizeof rules->rules, false);
    if (!spoiled_results)
      rules->wanted[run] = fuzz_trial_struct(trial, a, sizeof *a, false);
  }
}
