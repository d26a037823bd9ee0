/* Owns mha_mpi_backward. What belongs to this process's heads is written where it stays; what all
 * processes have a part of lies in scratch, one thing behind the other, and is summed up in one go:
 *
 *   inputs, norm weights, bo, a bias for all heads      every process has a part of it
 *   Wk, Wv, bk, bv of key heads that several hold       [G] heads, 0 but for the process's own */
#include "base/error.h"
#include "call.h"

#include <string.h>

/* A gradient that is a sum: `n` numbers of scratch, which are `outer` times `rows` times `columns`
 * of what the caller receives. */
typedef struct summed {
  float *caller; /* NULL = not wanted */
  size_t at;
  int64_t n;                          /* numbers in scratch */
  int64_t outer, rows, columns;       /* of the thing */
  int64_t outer_stride, row_stride;   /* where the caller wants it */
  int64_t scratch_outer, scratch_row; /* where it lies in scratch */
  int64_t shift;                      /* of its first number in scratch */
} summed;

enum { QUERY, KEY, VALUE, QUERY_NORM, KEY_NORM, BO, BIAS, WK, WV, BK, BV, N_SUMMED };

typedef struct back_call {
  mha_mpi_call call;
  mha_backward_args given, back;
  mha_matrices matrices; /* of the share */
  summed sums[N_SUMMED];
  int64_t n; /* numbers of all sums */
  size_t at_sums, at_k, at_v, at_copies[3];
  float *all;   /* [n] and one that is not 0 where a process failed */
  float *k, *v; /* gradients of Wk and Wv that several processes have, as those lie */
  int64_t k_span, v_span;
} back_call;

/* ---- reading ---- */

static mha_status refuse(const back_call *c, mha_error *error) {
  const mha_mpi_weights *w = c->call.weights;
  if (c->call.team->place.by_positions > 1)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "team has %d processes by positions; rule: gradients are by heads alone",
                    (int)c->call.team->place.by_positions);
  if (w->n > 1 && (w->absent[0] || w->absent[1] || w->absent[2]))
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "weights have no %s; rule: with %d processes gradients pass through matrices",
                    w->absent[0]   ? "Wq"
                    : w->absent[1] ? "Wk"
                                   : "Wv",
                    (int)w->n);
  if (c->call.local.given.cache)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "args.cache is given; rule: nothing passes back through a cache");
  return MHA_OK;
}

static mha_status read_call(back_call *c, const mha_forward_args *args,
                            const mha_backward_args *back, mha_error *error) {
  mha_mpi_call *f = &c->call;
  mha_status status = mha_require(f->context, "context", error);
  if (!status)
    status = mha_require(f->weights, "weights", error);
  if (!status)
    status = mha_mpi_local_read(f->weights, args, &f->local, error);
  if (!status)
    status =
        mha_read_struct(&c->given, sizeof c->given, MHA_FIRST_BACKWARD_ARGS, back, "back", error);
  MHA_INIT(&c->matrices);
  if (!status)
    status = mha_weights_matrices(f->weights->layer, &c->matrices, error);
  c->given.struct_size = sizeof c->given;
  c->back = c->given;
  return status ? status : refuse(c, error);
}

static void add_facts(mha_mpi_facts *facts, const back_call *c) {
  const mha_backward_args *b = &c->given;
  const float *const wanted[] = {b->d_query,    b->d_key,  b->d_value,        b->d_wq,
                                 b->d_wk,       b->d_wv,   b->d_wo,           b->d_bq,
                                 b->d_bk,       b->d_bv,   b->d_bo,           b->d_query_norm,
                                 b->d_key_norm, b->d_bias, b->d_alibi_slopes, b->d_sinks};
  int64_t bits = 0;
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
    bits |= (int64_t)(wanted[i] != NULL) << i;
  mha_mpi_fact(facts, "which gradients are wanted of back", bits);
  mha_mpi_fact(facts, "back.accumulate", b->accumulate != 0);
  mha_mpi_fact(facts, "back.tape", b->tape != NULL);
  mha_mpi_fact(facts, "back.dy", b->dy != NULL);
  mha_mpi_local_facts(facts, &c->call.local, c->call.weights, true);
}

/* ---- what is summed up ---- */

/* An input, of which rows are read here, before mha_backward looks at them. */
static mha_status want_rows(summed *s, float *caller, const float *x, mha_rows_shape shape,
                            const char *name, mha_error *error) {
  int64_t entry = 0;
  if (!caller)
    return MHA_OK;
  mha_status status = mha_require_at_least(shape.batch, 0, "args.batch", error);
  if (!status)
    status = mha_require_at_least(shape.length, 0, "the length of an input", error);
  if (!status)
    status = mha_resolve_strides(&shape, false, name, error);
  if (!status && shape.batch > 0 && shape.length > 0)
    status = mha_require(x, name, error);
  if (!status && !mha_multiply(shape.length, shape.width, &entry))
    status =
        mha_fail(error, MHA_ERROR_OVERFLOW, "%s has %lld rows; rule: their numbers can be counted",
                 name, (long long)shape.length);
  *s = (summed){.caller = caller,
                .outer = shape.batch,
                .rows = shape.length,
                .columns = shape.width,
                .outer_stride = shape.batch_stride,
                .row_stride = shape.row_stride,
                .scratch_outer = entry,
                .scratch_row = shape.width};
  return status;
}

/* Gradients of inputs that were given. */
static mha_status want_inputs(back_call *c, mha_error *error) {
  const mha_forward_args *a = &c->call.local.given;
  const mha_config *k = &c->call.weights->whole;
  const mha_backward_args *b = &c->back;
  const int64_t B = c->call.local.rules.query_starts ? 1 : a->batch;
  const int64_t Lk = a->key ? a->key_length : a->query_length;
  const mha_rows_shape query = {B, a->query_length, k->query_width, a->query_batch_stride,
                                a->query_row_stride};
  const mha_rows_shape key = {B, Lk, k->key_width, a->key_batch_stride, a->key_row_stride};
  const mha_rows_shape value = {B, Lk, k->value_width, a->value_batch_stride, a->value_row_stride};
  if ((b->d_key && !a->key) || (b->d_value && !a->value))
    return mha_fail(error, MHA_ERROR_WEIGHTS, "back.%s is given; rule: NULL without args.%s",
                    b->d_key && !a->key ? "d_key" : "d_value",
                    b->d_key && !a->key ? "key" : "value");
  if (b->d_bo && !c->call.weights->has_output_bias)
    return mha_fail(error, MHA_ERROR_WEIGHTS, "back.d_bo is given; rule: NULL without a bias bo");
  mha_status status = want_rows(&c->sums[QUERY], b->d_query, a->query, query, "args.query", error);
  if (!status)
    status = want_rows(&c->sums[KEY], b->d_key, a->key, key, "args.key", error);
  return status ? status
                : want_rows(&c->sums[VALUE], b->d_value, a->value, value, "args.value", error);
}

static void want_vector(summed *s, float *caller, int64_t n) {
  *s = (summed){.caller = caller, .outer = 1, .rows = 1, .columns = n};
}

/* A bias for all heads, with the strides of the bias itself, in scratch too. */
static void want_bias(summed *s, float *caller, const mha_bias *b) {
  const int64_t row = b->rows > 1 && b->row_stride ? b->row_stride : b->columns;
  const int64_t batch = b->batch > 1 && b->batch_stride ? b->batch_stride : b->rows * row;
  *s = (summed){.caller = caller,
                .outer = b->batch,
                .rows = b->rows,
                .columns = b->columns,
                .outer_stride = batch,
                .row_stride = row,
                .scratch_outer = batch,
                .scratch_row = row,
                .n = caller ? (b->batch - 1) * batch + b->rows * row : 0};
}

/* Columns [first, first + width) of a matrix [E][..], of which scratch has those of each key head
 * side by side, and the caller the process's own. */
static void want_matrix(const back_call *c, summed *s, float *caller, int64_t E, int64_t width,
                        int64_t ld) {
  const mha_mpi_weights *w = c->call.weights;
  const bool in_out = c->matrices.orientation != MHA_OUT_IN;
  const int64_t rows = in_out ? E : width;
  *s = (summed){.caller = caller,
                .outer = 1,
                .rows = rows,
                .columns = in_out ? width : E,
                .row_stride = ld,
                .scratch_row = in_out ? width : E,
                .n = w->whole.n_kv_heads * E * width,
                .shift = w->first_kv_head * E * width};
}

/* The same of a bias. */
static void want_heads(const back_call *c, summed *s, float *caller, int64_t width) {
  const mha_mpi_weights *w = c->call.weights;
  want_vector(s, caller, width);
  s->n = w->whole.n_kv_heads * width;
  s->shift = w->first_kv_head * width;
}

/* Whether the call's bias is one for all heads. */
static bool bias_is_shared(const back_call *c) {
  const mha_rules *given = c->call.local.given.rules;
  return given && given->bias.data && given->bias.heads == 1;
}

static void want_all(back_call *c) {
  const mha_mpi_weights *w = c->call.weights;
  const mha_config *k = &w->whole;
  const mha_backward_args *b = &c->back;
  const mha_bias *bias = &c->call.local.rules.bias;
  const bool full = k->norm == MHA_NORM_FULL; /* of one process alone */
  want_vector(&c->sums[QUERY_NORM], b->d_query_norm, k->head_size * (full ? k->n_heads : 1));
  want_vector(&c->sums[KEY_NORM], b->d_key_norm, k->head_size * (full ? k->n_kv_heads : 1));
  want_vector(&c->sums[BO], w->has_output_bias ? b->d_bo : NULL, k->output_width);
  if (bias_is_shared(c))
    want_bias(&c->sums[BIAS], b->d_bias, bias);
  if (w->sharers == 1)
    return;
  want_matrix(c, &c->sums[WK], b->d_wk, k->key_width, k->head_size, c->call.weights->ld[1]);
  want_matrix(c, &c->sums[WV], b->d_wv, k->value_width, k->value_head_size, c->call.weights->ld[2]);
  want_heads(c, &c->sums[BK], b->d_bk, k->head_size);
  want_heads(c, &c->sums[BV], b->d_bv, k->value_head_size);
}

/* ---- scratch ---- */

/* First to last number of a share's Wk or Wv, as it lies. */
static int64_t span(const back_call *c, int64_t E, int64_t width, int64_t ld) {
  const bool in_out = c->matrices.orientation != MHA_OUT_IN;
  return in_out ? (E - 1) * ld + width : (width - 1) * ld + E;
}

static void plan(back_call *c, mha_layout *layout) {
  const mha_mpi_weights *w = c->call.weights;
  int64_t n = 0;
  for (int i = 0; i < N_SUMMED; i++) {
    summed *s = &c->sums[i];
    int64_t all = 0;
    if (!s->caller)
      continue;
    layout->overflow |= s->n == 0 && (!mha_multiply(s->outer, s->rows, &all) ||
                                      !mha_multiply(all, s->columns, &all));
    if (s->n == 0)
      s->n = all;
    s->at = (size_t)n;
    layout->overflow |= !mha_add(n, s->n, &n);
  }
  c->n = n;
  c->at_sums = mha_layout_add(layout, sizeof(float), n + 1, 1, 1);
  c->k_span = c->sums[WK].caller
                  ? span(c, w->whole.key_width, w->whole.head_size, c->call.weights->ld[1])
                  : 0;
  c->v_span = c->sums[WV].caller
                  ? span(c, w->whole.value_width, w->whole.value_head_size, c->call.weights->ld[2])
                  : 0;
  c->at_k = mha_layout_add(layout, sizeof(float), c->k_span, 1, 1);
  c->at_v = mha_layout_add(layout, sizeof(float), c->v_span, 1, 1);
  for (int i = QUERY; i <= VALUE; i++)
    c->at_copies[i] =
        mha_layout_add(layout, sizeof(float), c->sums[i].caller ? c->sums[i].n : 0, 1, 1);
}

static void place(back_call *c) {
  char *scratch = c->call.team->scratch;
  c->all = (void *)(scratch + c->at_sums);
  c->k = (void *)(scratch + c->at_k);
  c->v = (void *)(scratch + c->at_v);
  memset(c->all, 0, (size_t)(c->n + 1) * sizeof *c->all);
  if (c->k_span > 0)
    memset(c->k, 0, (size_t)c->k_span * sizeof *c->k);
  if (c->v_span > 0)
    memset(c->v, 0, (size_t)c->v_span * sizeof *c->v);
}

/* ---- the local call ---- */

static float *sum_at(const back_call *c, int which) {
  const summed *s = &c->sums[which];
  return s->caller ? c->all + s->at + s->shift : NULL;
}

/* An input whose gradient is wanted is given without gaps, so that the gradient has none. */
static const float *make_dense(const back_call *c, int which, const float *x, int64_t *batch_stride,
                               int64_t *row_stride) {
  const summed *s = &c->sums[which];
  float *copy = (void *)(c->call.team->scratch + c->at_copies[which]);
  float *to = copy;
  if (!s->caller)
    return x;
  *batch_stride = s->scratch_outer;
  *row_stride = s->scratch_row;
  for (int64_t b = 0; b < s->outer; b++)
    for (int64_t i = 0; i < s->rows; i++, to += s->columns)
      memcpy(to, x + b * s->outer_stride + i * s->row_stride, (size_t)s->columns * sizeof *to);
  return copy;
}

static void use_dense_inputs(back_call *c) {
  mha_forward_args *a = &c->call.local.args;
  a->query = make_dense(c, QUERY, a->query, &a->query_batch_stride, &a->query_row_stride);
  a->key = make_dense(c, KEY, a->key, &a->key_batch_stride, &a->key_row_stride);
  a->value = make_dense(c, VALUE, a->value, &a->value_batch_stride, &a->value_row_stride);
}

static float *from(float *gradient, int64_t first) {
  return gradient ? gradient + first : NULL;
}

/* Gradients of matrices and biases of the process's heads, within those of the whole layer. */
static void aim_at_own(back_call *c) {
  const mha_mpi_weights *w = c->call.weights;
  const mha_mpi_columns at = mha_mpi_share_columns(w);
  mha_backward_args *b = &c->back;
  const bool in_out = c->matrices.orientation != MHA_OUT_IN;
  b->d_alibi_slopes = from(b->d_alibi_slopes, w->first_head);
  b->d_sinks = from(b->d_sinks, w->first_head);
  if (!bias_is_shared(c))
    b->d_bias = from(b->d_bias, w->first_head * c->call.local.rules.bias.head_stride);
  if (w->is_loaded)
    return;
  b->d_wq = from(b->d_wq, in_out ? at.q : at.q * w->ld[0]);
  b->d_wk = from(b->d_wk, in_out ? at.k : at.k * w->ld[1]);
  b->d_wv = from(b->d_wv, in_out ? at.v : at.v * w->ld[2]);
  b->d_wo = from(b->d_wo, in_out ? at.concat * w->ld[3] : at.concat);
  b->d_bq = from(b->d_bq, at.q);
  b->d_bk = from(b->d_bk, at.k);
  b->d_bv = from(b->d_bv, at.v);
}

/* And of what is summed up: the caller's places are kept in the sums. */
static void aim_at_sums(back_call *c) {
  const mha_mpi_weights *w = c->call.weights;
  mha_backward_args *b = &c->back;
  b->d_query = sum_at(c, QUERY);
  b->d_key = sum_at(c, KEY);
  b->d_value = sum_at(c, VALUE);
  b->d_query_norm = sum_at(c, QUERY_NORM);
  b->d_key_norm = sum_at(c, KEY_NORM);
  b->d_bo = sum_at(c, BO);
  if (w->absent[3])
    b->d_bo = from(b->d_bo, mha_mpi_share_columns(w).concat);
  else if (w->head > 0)
    b->d_bo = NULL;
  if (c->sums[BIAS].caller)
    b->d_bias = sum_at(c, BIAS);
  if (w->sharers == 1)
    return;
  c->sums[WK].caller = b->d_wk;
  c->sums[WV].caller = b->d_wv;
  c->sums[BK].caller = b->d_bk;
  c->sums[BV].caller = b->d_bv;
  b->d_wk = b->d_wk ? c->k : NULL;
  b->d_wv = b->d_wv ? c->v : NULL;
  b->d_bk = sum_at(c, BK);
  b->d_bv = sum_at(c, BV);
}

static void aim_at_dy(back_call *c) {
  const mha_mpi_weights *w = c->call.weights;
  mha_backward_args *b = &c->back;
  if (!w->absent[3] || !b->dy)
    return;
  mha_mpi_local_strides(c->call.local.given.query_length, w->whole.output_width,
                        &b->dy_batch_stride, &b->dy_row_stride);
  b->dy += mha_mpi_share_columns(w).concat;
}

/* ---- the sum ---- */

static void copy_matrix(const back_call *c, int which, const float *gradient, int64_t ld) {
  const summed *s = &c->sums[which];
  float *to = sum_at(c, which);
  for (int64_t row = 0; s->caller && row < s->rows; row++)
    memcpy(to + row * s->scratch_row, gradient + row * ld, (size_t)s->columns * sizeof *to);
}

static void give(const back_call *c, const summed *s) {
  const float *sum = c->all + s->at + s->shift;
  for (int64_t b = 0; s->caller && b < s->outer; b++)
    for (int64_t i = 0; i < s->rows; i++) {
      const float *x = sum + b * s->scratch_outer + i * s->scratch_row;
      float *y = s->caller + b * s->outer_stride + i * s->row_stride;
      for (int64_t e = 0; e < s->columns; e++)
        y[e] = c->given.accumulate ? y[e] + x[e] : x[e];
    }
}

static mha_status sum(back_call *c, mha_status status, mha_error *error) {
  mha_error unsaid;
  if (status)
    memset(c->all, 0, (size_t)c->n * sizeof *c->all);
  c->all[c->n] = status ? 1.0f : 0.0f;
  const mha_status sent = mha_mpi_sum(c->call.team, c->all, c->n + 1, status ? &unsaid : error);
  if (sent)
    return status ? status : sent;
  if (c->all[c->n] != 0.0f)
    return mha_mpi_agree(c->call.team, MHA_MPI_DONE, status, NULL, error);
  for (int i = 0; i < N_SUMMED; i++)
    give(c, &c->sums[i]);
  return MHA_OK;
}

/* ---- the call ---- */

static mha_status ready(back_call *c, mha_error *error) {
  mha_layout layout = {0};
  mha_status status = want_inputs(c, error);
  if (status)
    return status;
  want_all(c);
  plan(c, &layout);
  status = mha_mpi_team_provide(c->call.team, &layout, error);
  return status ? status
                : mha_mpi_call_reserve(
                      &c->call, c->given.tape ? MHA_BACKWARD_WITH_TAPE : MHA_BACKWARD_ALONE, error);
}

static mha_status backward(back_call *c, const mha_forward_args *args,
                           const mha_backward_args *back, mha_error *error) {
  mha_mpi_team *team = c->call.team;
  mha_mpi_facts facts = {.n = 0};
  mha_status status = read_call(c, args, back, error);
  if (!status)
    add_facts(&facts, c);
  status = mha_mpi_agree(team, MHA_MPI_BACK, status, &facts, error);
  if (status)
    return status;
  status = mha_mpi_agree(team, MHA_MPI_READY, ready(c, error), NULL, error);
  if (status)
    return status;
  place(c);
  use_dense_inputs(c);
  aim_at_own(c);
  aim_at_sums(c);
  aim_at_dy(c);
  const double begin = mha_mpi_now(team);
  status =
      mha_backward(c->call.context, c->call.weights->layer, &c->call.local.args, &c->back, error);
  mha_mpi_tell(team, MHA_MPI_COMPUTE, 0, begin, 0);
  if (!status) {
    copy_matrix(c, WK, c->k, c->call.weights->ld[1]);
    copy_matrix(c, WV, c->v, c->call.weights->ld[2]);
  }
  return sum(c, status, error);
}

mha_status mha_mpi_backward(mha_mpi_team *team, mha_context *context,
                            const mha_mpi_weights *weights, const mha_forward_args *args,
                            const mha_backward_args *back, mha_error *error) {
  mha_error unwanted = {.status = MHA_OK};
  mha_error *told = error ? error : &unwanted;
  back_call c = {.call = {.team = team, .context = context, .weights = weights}};
  mha_status status = mha_require(team, "team", told);
  if (!status)
    status = backward(&c, args, back, told);
  return status ? status : mha_succeed(told);
}
