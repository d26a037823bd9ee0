/* Owns the judge's way back: step 3, then the preparation of Q and K, then the projections. */
#include "oracle_gradients.h"

#include <math.h>
#include <stdlib.h>

/* One of the three inputs on its way to Q, K or V, or concat on its way to the output. */
typedef struct step {
  const oracle_matrix *matrix;
  const double *x; /* [rows][in] */
  int64_t rows, in, heads, size;
  double *dy;    /* [rows][heads][size] */
  bool *reached; /* [rows][heads]: something is passed back to it */
  oracle_numbers *dx, *dw, *db;
  /* of Q and K */
  const double *norm; /* NULL = ones */
  oracle_numbers *dnorm;
  const int64_t *positions;
} step;

/* The way back through one problem. */
typedef struct pass {
  const oracle_problem *p;
  oracle_result forward;
  oracle_gradients *gradients;
  step query, key, value, output;
  double *df; /* [Lk]: of one row */
} pass;

/* ---- Memory ---------------------------------------------------------------------------------- */

static void *allocate(int64_t n, size_t element_bytes) {
  void *memory = calloc(n > 0 ? (size_t)n : 1, element_bytes);
  if (!memory)
    abort();
  return memory;
}

static oracle_numbers make_numbers(int64_t n) {
  return (oracle_numbers){allocate(n, sizeof(double)), allocate(n, sizeof(double)), n};
}

void oracle_numbers_free(oracle_numbers *numbers) {
  free(numbers->value);
  free(numbers->bound);
  *numbers = (oracle_numbers){NULL, NULL, 0};
}

static int64_t matrix_numbers(const oracle_matrix *matrix, int64_t in, int64_t out) {
  if (!matrix->numbers)
    return 0;
  return matrix->out_in ? (out - 1) * matrix->ld + in : (in - 1) * matrix->ld + out;
}

static void allocate_gradients(const oracle_problem *p, oracle_gradients *g) {
  const int64_t batch = p->query_starts ? 1 : p->B;
  const int64_t q = p->H * p->d, k = p->G * p->d, v = p->G * p->dv, concat = p->H * p->dv;
  const bool full = p->norm == ORACLE_NORM_FULL, any = p->norm != ORACLE_NORM_NONE;
  g->query = make_numbers(batch * p->Lq * p->Eq);
  g->key = make_numbers(batch * p->Lk * p->Ek);
  g->value = make_numbers(batch * p->Lk * p->Ev);
  g->wq = make_numbers(matrix_numbers(&p->wq, p->Eq, q));
  g->wk = make_numbers(matrix_numbers(&p->wk, p->Ek, k));
  g->wv = make_numbers(matrix_numbers(&p->wv, p->Ev, v));
  g->wo = make_numbers(matrix_numbers(&p->wo, concat, p->Eo));
  g->bq = make_numbers(p->wq.bias ? q : 0);
  g->bk = make_numbers(p->wk.bias ? k : 0);
  g->bv = make_numbers(p->wv.bias ? v : 0);
  g->bo = make_numbers(p->wo.bias ? p->Eo : 0);
  g->query_norm = make_numbers(!any ? 0 : full ? q : p->d);
  g->key_norm = make_numbers(!any ? 0 : full ? k : p->d);
  g->bias = make_numbers(p->bias ? p->B * p->H * p->Lq * p->Lk : 0);
  g->slopes = make_numbers(p->slopes ? p->H : 0);
  g->sinks = make_numbers(p->sinks ? p->H : 0);
}

enum { N_GRADIENTS = 16 };

static void list(oracle_gradients *g, oracle_numbers *all[N_GRADIENTS]) {
  oracle_numbers *const those[N_GRADIENTS] = {
      &g->query, &g->key, &g->value, &g->wq,   &g->wk,         &g->wv,       &g->wo,     &g->bq,
      &g->bk,    &g->bv,  &g->bo,    &g->bias, &g->query_norm, &g->key_norm, &g->slopes, &g->sinks};
  for (int i = 0; i < N_GRADIENTS; i++)
    all[i] = those[i];
}

void oracle_gradients_free(oracle_gradients *gradients) {
  oracle_numbers *all[N_GRADIENTS];
  list(gradients, all);
  for (int i = 0; i < N_GRADIENTS; i++)
    oracle_numbers_free(all[i]);
}

static void set_bounds(oracle_numbers *numbers) {
  double largest = 0;
  for (int64_t i = 0; i < numbers->n; i++)
    if (isfinite(numbers->value[i]))
      largest = fmax(largest, fabs(numbers->value[i]));
  for (int64_t i = 0; i < numbers->n; i++)
    numbers->bound[i] = 1e-5 * largest + 1e-6;
}

/* ---- Projections ----------------------------------------------------------------------------- */

static int64_t matrix_at(const oracle_matrix *matrix, int64_t i, int64_t o) {
  return matrix->out_in ? o * matrix->ld + i : i * matrix->ld + o;
}

/* y_o = Σ_i x_i·W_io + b_o of row r, whose dy_o is known: dx_i += dy_o·W_io, dW_io += x_i·dy_o,
 * db_o += dy_o. */
static void unproject_column(const step *s, int64_t r, int64_t o) {
  const double dy = s->dy[r * s->heads * s->size + o];
  if (s->db->n)
    s->db->value[o] += dy;
  if (!s->matrix->numbers)
    s->dx->value[r * s->in + o] += dy;
  for (int64_t i = 0; s->matrix->numbers && i < s->in; i++) {
    const int64_t at = matrix_at(s->matrix, i, o);
    s->dx->value[r * s->in + i] += dy * s->matrix->numbers[at];
    s->dw->value[at] += s->x[r * s->in + i] * dy;
  }
}

static void unproject(const step *s) {
  for (int64_t r = 0; r < s->rows; r++)
    for (int64_t h = 0; h < s->heads; h++)
      for (int64_t c = 0; s->reached[r * s->heads + h] && c < s->size; c++)
        unproject_column(s, r, h * s->size + c);
}

/* ---- Rotary positions and normalisation ------------------------------------------------------ */

/* (a, b) became (a·cos − b·sin, b·cos + a·sin). */
static void turn_back(const oracle_problem *p, int64_t position, double *d) {
  for (int64_t pair = 0; pair < p->rotary / 2; pair++) {
    const oracle_pair turned = oracle_rotation(p, position, pair);
    const double da = d[turned.first], db = d[turned.second];
    d[turned.first] = da * turned.cosine + db * turned.sine;
    d[turned.second] = db * turned.cosine - da * turned.sine;
  }
}

/* y_j = f·x_j·w_j with f = (Σx²/n + eps)^(−1/2), so ∂f/∂x_j = −f³·x_j/n:
 * dx_j = f·w_j·dy_j − f³·x_j/n·Σ_k dy_k·w_k·x_k, dw_j += f·x_j·dy_j. */
static void denormalise(const oracle_problem *p, int64_t n, const double *x, const double *weight,
                        double *d, double *dweight) {
  double squares = 0, along = 0;
  for (int64_t j = 0; j < n; j++) {
    squares += x[j] * x[j];
    along += d[j] * (weight ? weight[j] : 1.0) * x[j];
  }
  const double factor = 1.0 / sqrt(squares / (double)n + p->epsilon);
  for (int64_t j = 0; j < n; j++) {
    dweight[j] += factor * x[j] * d[j];
    d[j] = factor * (weight ? weight[j] : 1.0) * d[j] -
           factor * factor * factor * x[j] / (double)n * along;
  }
}

static bool reaches_row(const step *s, int64_t r) {
  for (int64_t h = 0; h < s->heads; h++)
    if (s->reached[r * s->heads + h])
      return true;
  return false;
}

/* dy of row r, from that of the prepared numbers to that of the projected ones. */
static void unprepare_row(const oracle_problem *p, step *s, int64_t r) {
  const int64_t width = s->heads * s->size;
  double *d = s->dy + r * width;
  bool *reached = s->reached + r * s->heads;
  for (int64_t h = 0; p->rope != ORACLE_ROPE_NONE && h < s->heads; h++)
    turn_back(p, s->positions[r], d + h * s->size);
  if (p->norm == ORACLE_NORM_NONE)
    return;
  oracle_numbers projected = make_numbers(width);
  oracle_project(s->matrix, s->x + r * s->in, 1, s->in, width, projected);
  if (p->norm == ORACLE_NORM_FULL)
    denormalise(p, width, projected.value, s->norm, d, s->dnorm->value);
  for (int64_t h = 0; h < s->heads; h++) {
    if (p->norm == ORACLE_NORM_PER_HEAD && reached[h])
      denormalise(p, s->size, projected.value + h * s->size, s->norm, d + h * s->size,
                  s->dnorm->value);
    if (p->norm == ORACLE_NORM_FULL) /* one head's numbers pass something back to all */
      reached[h] = true;
  }
  oracle_numbers_free(&projected);
}

static void unprepare(const oracle_problem *p, step *s) {
  for (int64_t r = 0; r < s->rows; r++)
    if (reaches_row(s, r))
      unprepare_row(p, s, r);
}

/* ---- Step 3 ---------------------------------------------------------------------------------- */

static bool is_seen(const oracle_row *row, int64_t j) {
  return !(isinf(row->final[j]) && row->final[j] < 0);
}

static double kept(const oracle_row *row, int64_t j) {
  return row->kept ? row->kept[j] : 1.0;
}

/* O_c = Σ_j P_j·m_j·V_jc: dV_jc += P_j·m_j·dO_c and dP_j = m_j·Σ_c dO_c·V_jc, here in df.
 * Returns Σ_j P_j·dP_j. */
static double back_to_weights(pass *t, const oracle_row *row, int64_t g, const double *dheads) {
  const int64_t dv = t->p->dv, width = t->p->G * dv;
  double sum = 0;
  for (int64_t j = 0; j < row->n_keys; j++) {
    const int64_t at = (row->first_key + j) * width + g * dv;
    if (!is_seen(row, j))
      continue;
    t->df[j] = 0;
    for (int64_t c = 0; c < dv; c++) {
      t->df[j] += kept(row, j) * dheads[c] * t->forward.v.value[at + c];
      t->value.dy[at + c] += row->weights[j] * kept(row, j) * dheads[c];
    }
    t->value.reached[(row->first_key + j) * t->p->G + g] = true;
    sum += row->weights[j] * t->df[j];
  }
  return sum;
}

/* F_j = capped_j + bias_j − slope·|i + off − j|, capped = c·tanh(s/c), s = scale·(q·k). */
static void back_from_score(pass *t, const oracle_row *row, int64_t g, int64_t j, double df) {
  const oracle_problem *p = t->p;
  const double scale = p->scale_given ? p->scale : 1.0 / sqrt((double)p->d);
  const double bend = p->softcap > 0 ? row->capped[j] / p->softcap : 0.0;
  const double ds = scale * df * (1.0 - bend * bend);
  const int64_t q = (row->query * p->H + row->h) * p->d;
  const int64_t k = ((row->first_key + j) * p->G + g) * p->d;
  const int64_t cell = ((row->b * p->H + row->h) * p->Lq + row->i) * p->Lk + j;
  if (p->bias)
    t->gradients->bias.value[cell] = df;
  if (p->slopes)
    t->gradients->slopes.value[row->h] -= df * fabs((double)(row->i + row->off - j));
  for (int64_t c = 0; c < p->d; c++) {
    t->query.dy[q + c] += ds * t->forward.k.value[k + c];
    t->key.dy[k + c] += ds * t->forward.q.value[q + c];
  }
  t->query.reached[row->query * p->H + row->h] = true;
  t->key.reached[(row->first_key + j) * p->G + g] = true;
}

/* P = softmax(F, sink), so ∂P_j/∂F_k = P_j·(δ_jk − P_k): dF_j = P_j·(dP_j − Σ_k P_k·dP_k), and of
 * the sink, whose dP is 0, −P_sink·Σ_k P_k·dP_k with P_sink = 1/(1 + exp(lse − sink)). */
static void back_through_row(void *user, const oracle_row *row) {
  pass *t = user;
  const oracle_problem *p = t->p;
  const int64_t g = row->h / (p->H / p->G);
  const double *dheads = t->output.dx->value + (row->query * p->H + row->h) * p->dv;
  const double sum = back_to_weights(t, row, g, dheads);
  for (int64_t j = 0; j < row->n_keys; j++)
    if (is_seen(row, j))
      back_from_score(t, row, g, j, row->weights[j] * (t->df[j] - sum));
  if (p->sinks && !(isinf(p->sinks[row->h]) && p->sinks[row->h] < 0))
    t->gradients->sinks.value[row->h] -= sum / (1.0 + exp(row->lse - p->sinks[row->h]));
}

/* ---- The whole ------------------------------------------------------------------------------- */

static step make_step(const oracle_matrix *matrix, const double *x, int64_t rows, int64_t in,
                      int64_t heads, int64_t size) {
  return (step){.matrix = matrix,
                .x = x,
                .rows = rows,
                .in = in,
                .heads = heads,
                .size = size,
                .dy = allocate(rows * heads * size, sizeof(double)),
                .reached = allocate(rows * heads, sizeof(bool))};
}

static void make_steps(pass *t) {
  const oracle_problem *p = t->p;
  oracle_gradients *g = t->gradients;
  const int64_t batch = p->query_starts ? 1 : p->B;
  step *q = &t->query, *k = &t->key, *v = &t->value;
  *q = make_step(&p->wq, p->query, batch * p->Lq, p->Eq, p->H, p->d);
  *k = make_step(&p->wk, p->key, batch * p->Lk, p->Ek, p->G, p->d);
  *v = make_step(&p->wv, p->value, batch * p->Lk, p->Ev, p->G, p->dv);
  q->dx = &g->query, q->dw = &g->wq, q->db = &g->bq;
  k->dx = &g->key, k->dw = &g->wk, k->db = &g->bk;
  v->dx = &g->value, v->dw = &g->wv, v->db = &g->bv;
  q->norm = p->query_norm, q->dnorm = &g->query_norm, q->positions = p->query_positions;
  k->norm = p->key_norm, k->dnorm = &g->key_norm, k->positions = p->key_positions;
}

/* Rows of the output that step 3 computes. */
static void mark_counted(const oracle_problem *p, bool *counted) {
  for (int64_t b = 0; b < p->B; b++) {
    const int64_t first = p->query_starts ? p->query_starts[b] : b * p->Lq;
    const int64_t n = p->query_starts    ? p->query_starts[b + 1] - first
                      : p->query_lengths ? p->query_lengths[b]
                                         : p->Lq;
    for (int64_t i = 0; i < n; i++)
      counted[first + i] = true;
  }
}

/* Step 5: d_wo, and what is passed back to concat; d_bo has every row of dy. */
static void back_through_output(pass *t, const double *dy, oracle_numbers *dconcat) {
  const oracle_problem *p = t->p;
  const int64_t rows = t->query.rows, n = rows * p->Eo;
  oracle_numbers none = {NULL, NULL, 0};
  step *s = &t->output;
  *s = make_step(&p->wo, t->forward.concat.value, rows, p->H * p->dv, 1, p->Eo);
  s->dx = dconcat, s->dw = &t->gradients->wo, s->db = &none;
  for (int64_t i = 0; i < n; i++)
    s->dy[i] = dy[i];
  for (int64_t i = 0; p->wo.bias && i < n; i++)
    t->gradients->bo.value[i % p->Eo] += dy[i];
  mark_counted(p, s->reached);
  unproject(s);
}

void oracle_differentiate(const oracle_problem *p, const double *dy, oracle_gradients *gradients) {
  pass t = {.p = p, .gradients = gradients, .df = allocate(p->Lk, sizeof(double))};
  oracle_numbers *all[N_GRADIENTS];
  allocate_gradients(p, gradients);
  list(gradients, all);
  oracle_solve(p, &t.forward);
  make_steps(&t);
  oracle_numbers dconcat = make_numbers(t.query.rows * p->H * p->dv);
  back_through_output(&t, dy, &dconcat);
  oracle_each_row(p, &t.forward, back_through_row, &t);
  unprepare(p, &t.query);
  unprepare(p, &t.key);
  step *steps[] = {&t.query, &t.key, &t.value, &t.output};
  for (int i = 0; i < 3; i++)
    unproject(steps[i]);
  for (int i = 0; i < N_GRADIENTS; i++)
    set_bounds(all[i]);
  for (int i = 0; i < 4; i++) {
    free(steps[i]->dy);
    free(steps[i]->reached);
  }
  oracle_numbers_free(&dconcat);
  oracle_free(&t.forward);
  free(t.df);
}

/* ---- Sums ------------------------------------------------------------------------------------ */

static void add(oracle_numbers *sum, const oracle_numbers *more) {
  for (int64_t i = 0; i < sum->n; i++)
    sum->value[i] += more->value[i];
  set_bounds(sum);
}

void oracle_gradients_share(oracle_gradients *g, bool key_is_value, bool query_is_key) {
  if (key_is_value)
    add(&g->key, &g->value);
  if (query_is_key)
    add(&g->query, &g->key);
}

void oracle_reduce_bias(const oracle_problem *p, const oracle_gradients *g, int64_t batch,
                        int64_t heads, int64_t rows, oracle_numbers *sum) {
  *sum = make_numbers(batch * heads * rows * p->Lk);
  for (int64_t cell = 0; cell < g->bias.n; cell++) {
    const int64_t j = cell % p->Lk, i = cell / p->Lk % p->Lq;
    const int64_t h = cell / p->Lk / p->Lq % p->H, b = cell / p->Lk / p->Lq / p->H;
    const int64_t at = ((b % batch * heads + h % heads) * rows + i % rows) * p->Lk + j;
    sum->value[at] += g->bias.value[cell];
  }
  set_bounds(sum);
}
