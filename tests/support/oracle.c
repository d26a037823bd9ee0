/* Owns the judge's arithmetic: the five steps, who attends to whom, and the bounds. */
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Unit roundoff of float32. */
static const double u = 1.0 / 16777216.0;

/* Where one sequence lies and how much of it counts. */
typedef struct sequence {
  int64_t first_query, n_queries; /* rows of storage */
  int64_t first_key;
  int64_t length_q, length_k; /* rows that count */
  int64_t off;
} sequence;

/* One row of scores: one sequence, one head, one query. */
typedef struct row {
  double *s[3]; /* scaled, capped, final; [length_k] */
  double *t[2]; /* T without and with bias and ALiBi; [length_k] */
  double *p;    /* weights; [length_k] */
  double lse;
  double largest_t; /* S: over the visible keys */
} row;

static oracle_numbers make_numbers(int64_t n) {
  const size_t count = n > 0 ? (size_t)n : 1;
  oracle_numbers numbers = {calloc(count, sizeof(double)), calloc(count, sizeof(double)), n};
  if (!numbers.value || !numbers.bound)
    abort();
  return numbers;
}

static void free_numbers(oracle_numbers *numbers) {
  free(numbers->value);
  free(numbers->bound);
  *numbers = (oracle_numbers){NULL, NULL, 0};
}

/* ---- Projections ---------------------------------------------------------------------------- */

static double weight_at(const oracle_matrix *matrix, int64_t i, int64_t o) {
  if (!matrix->numbers)
    return i == o ? 1.0 : 0.0;
  return matrix->out_in ? matrix->numbers[o * matrix->ld + i] : matrix->numbers[i * matrix->ld + o];
}

/* Row r of the result: every sum runs over `in` in its order, for all columns side by side. */
void oracle_project(const oracle_matrix *matrix, const double *x, int64_t rows, int64_t in,
                    int64_t out, oracle_numbers y) {
  const int64_t down = matrix->out_in ? 1 : matrix->ld, across = matrix->out_in ? matrix->ld : 1;
  for (int64_t r = 0; r < rows; r++) {
    double *restrict sum = y.value + r * out, *restrict size = y.bound + r * out;
    for (int64_t o = 0; o < out; o++) {
      /* an identity step copies: nothing of the other columns enters, NaN included */
      const double copied = matrix->numbers ? 0.0 : x[r * in + o];
      const double b = matrix->bias ? matrix->bias[o] : 0.0;
      sum[o] = b + copied;
      size[o] = fabs(b) + fabs(copied);
    }
    for (int64_t i = 0; matrix->numbers && i < in; i++)
      for (int64_t o = 0; o < out; o++) {
        const double term = x[r * in + i] * matrix->numbers[i * down + o * across];
        sum[o] += term;
        size[o] += fabs(term);
      }
    for (int64_t o = 0; o < out; o++) {
      const bool biased = matrix->bias && matrix->bias[o] != 0.0;
      size[o] *= (double)(matrix->numbers ? in + 1 : biased) * u;
    }
  }
}

static oracle_numbers rows_of(oracle_numbers numbers, int64_t first, int64_t width) {
  return (oracle_numbers){numbers.value + first * width, numbers.bound + first * width, 0};
}

static void project_rows(const oracle_matrix *matrix, const double *x, int64_t first, int64_t rows,
                         int64_t in, int64_t out, oracle_numbers y) {
  oracle_project(matrix, x + first * in, rows, in, out, rows_of(y, first, out));
}

/* ---- Normalisation and rotary positions ------------------------------------------------------ */

void oracle_normalise(double *x, double *bound, int64_t n, const double *weight, double epsilon) {
  long double squares = 0, drift = 0;
  for (int64_t j = 0; j < n; j++) {
    squares += (long double)x[j] * (long double)x[j];
    drift += fabsl((long double)x[j]) * (long double)bound[j];
  }
  const long double mean = squares / (long double)n + (long double)epsilon;
  const double factor = (double)(1.0L / sqrtl(mean));
  const double change = (double)(drift / (mean * (long double)n));
  for (int64_t j = 0; j < n; j++) {
    const double w = weight ? weight[j] : 1.0;
    x[j] *= factor * w;
    bound[j] = bound[j] * fabs(factor * w) + fabs(x[j]) * (change + 4 * u);
  }
}

/* Pair `pair` of a head, elements *first and *second, by the formula or the tables. */
static void pair_of(const oracle_problem *p, int64_t pair, int64_t *first, int64_t *second) {
  const bool halves = p->rope == ORACLE_ROPE_HALVES;
  *first = halves ? pair : 2 * pair;
  *second = halves ? pair + p->rotary / 2 : 2 * pair + 1;
}

/* base^(-2·pair/rotary); the powers of one problem are asked for again and again. */
static long double frequency(const oracle_problem *p, int64_t pair) {
  enum { MOST = 512 };
  static _Thread_local long double known[MOST];
  static _Thread_local double base;
  static _Thread_local int64_t rotary;
  if (base != p->rope_base || rotary != p->rotary) {
    memset(known, 0, sizeof known);
    base = p->rope_base;
    rotary = p->rotary;
  }
  if (pair < MOST && known[pair] > 0)
    return known[pair];
  const long double power =
      powl((long double)p->rope_base, -2.0L * (long double)pair / (long double)p->rotary);
  if (pair < MOST)
    known[pair] = power;
  return power;
}

oracle_pair oracle_rotation(const oracle_problem *p, int64_t position, int64_t pair) {
  const long double angle = (long double)position * frequency(p, pair);
  const int64_t at = position * (p->rotary / 2) + pair;
  oracle_pair turned = {0, 0, p->cosines ? p->cosines[at] : (double)cosl(angle),
                        p->sines ? p->sines[at] : (double)sinl(angle)};
  pair_of(p, pair, &turned.first, &turned.second);
  return turned;
}

void oracle_turn(const oracle_problem *p, int64_t position, double *x, double *bound) {
  for (int64_t pair = 0; pair < p->rotary / 2; pair++) {
    const oracle_pair turned = oracle_rotation(p, position, pair);
    const int64_t first = turned.first, second = turned.second;
    const double c = turned.cosine, s = turned.sine;
    const double a = x[first], b = x[second], ea = bound[first], eb = bound[second];
    const double rounding = 4 * u * (fabs(a) + fabs(b));
    x[first] = a * c - b * s;
    x[second] = b * c + a * s;
    bound[first] = fabs(c) * ea + fabs(s) * eb + rounding;
    bound[second] = fabs(c) * eb + fabs(s) * ea + rounding;
  }
}

/* Rows [first, first + rows) of Q or K. */
static void prepare_rows(const oracle_problem *p, const double *weight, const int64_t *positions,
                         int64_t first, int64_t rows, int64_t heads, oracle_numbers y) {
  const int64_t width = heads * p->d;
  for (int64_t r = first; r < first + rows; r++) {
    double *x = y.value + r * width, *bound = y.bound + r * width;
    if (p->norm == ORACLE_NORM_FULL)
      oracle_normalise(x, bound, width, weight, p->epsilon);
    for (int64_t h = 0; h < heads; h++) {
      if (p->norm == ORACLE_NORM_PER_HEAD)
        oracle_normalise(x + h * p->d, bound + h * p->d, p->d, weight, p->epsilon);
      if (p->rope != ORACLE_ROPE_NONE)
        oracle_turn(p, positions[r], x + h * p->d, bound + h * p->d);
    }
  }
}

/* ---- Who attends to whom --------------------------------------------------------------------- */

static sequence sequence_of(const oracle_problem *p, int64_t b) {
  sequence s;
  if (p->query_starts) {
    s.first_query = p->query_starts[b];
    s.first_key = p->key_starts[b];
    s.n_queries = s.length_q = p->query_starts[b + 1] - p->query_starts[b];
    s.length_k = p->key_starts[b + 1] - p->key_starts[b];
  } else {
    s.first_query = b * p->Lq;
    s.first_key = b * p->Lk;
    s.n_queries = p->Lq;
    s.length_q = p->query_lengths ? p->query_lengths[b] : p->Lq;
    s.length_k = p->key_lengths ? p->key_lengths[b] : p->Lk;
  }
  s.off = 0;
  if (p->alignment == ORACLE_BOTTOM_RIGHT)
    s.off = s.length_k - s.length_q;
  if (p->alignment == ORACLE_OFFSET)
    s.off = p->offsets[b];
  return s;
}

static int64_t cell(const oracle_problem *p, int64_t b, int64_t h, int64_t i, int64_t j) {
  return ((b * p->H + h) * p->Lq + i) * p->Lk + j;
}

/* Everything but an additive −inf, which leaves by the final score. */
static bool visible(const oracle_problem *p, const sequence *s, int64_t b, int64_t h, int64_t i,
                    int64_t j) {
  const int64_t own = i + s->off;
  if (i >= s->length_q || j >= s->length_k)
    return false;
  if (p->causal && j > own)
    return false;
  if (p->windowed && p->window_left >= 0 && j < own - p->window_left)
    return false;
  if (p->windowed && p->window_right >= 0 && j > own + p->window_right)
    return false;
  return !p->attend || p->attend[cell(p, b, h, i, j)] != 0;
}

/* ---- One row of scores ----------------------------------------------------------------------- */

/* −inf, as a final score, hides its key, whatever caused it. */
static bool is_hidden(double final) {
  return isinf(final) && final < 0;
}

static double final_score(const oracle_problem *p, const sequence *s, int64_t b, int64_t h,
                          int64_t i, int64_t j, double capped, double *t) {
  double score = capped;
  if (!visible(p, s, b, h, i, j))
    return -INFINITY;
  if (p->bias) {
    const double bias = p->bias[cell(p, b, h, i, j)];
    if (is_hidden(bias))
      return -INFINITY;
    score += bias;
    *t += fabs(bias);
  }
  if (p->slopes) {
    const double alibi = p->slopes[h] * fabs((double)(i + s->off - j));
    score -= alibi;
    *t += fabs(alibi);
  }
  return score;
}

/* Scores of one query with the keys of its head, [d][length_k]: every sum runs over d in its order,
 * for all keys side by side. */
static void score_row(const oracle_problem *p, const sequence *s, const double *q,
                      const double *keys, int64_t b, int64_t h, int64_t i, row *r) {
  const double scale = p->scale_given ? p->scale : 1.0 / sqrt((double)p->d);
  const int64_t n = s->length_k;
  double *restrict dot = r->s[0], *restrict size = r->t[0];
  for (int64_t j = 0; j < n; j++)
    dot[j] = size[j] = 0;
  for (int64_t c = 0; c < p->d; c++)
    for (int64_t j = 0; j < n; j++) {
      dot[j] += q[c] * keys[c * n + j];
      size[j] += fabs(q[c] * keys[c * n + j]);
    }
  for (int64_t j = 0; j < n; j++) {
    r->s[0][j] *= scale;
    r->s[1][j] = p->softcap > 0 ? p->softcap * tanh(r->s[0][j] / p->softcap) : r->s[0][j];
    r->t[0][j] *= fabs(scale);
    r->t[1][j] = r->t[0][j];
    r->s[2][j] = final_score(p, s, b, h, i, j, r->s[1][j], &r->t[1][j]);
  }
}

/* exp over a row with the largest number taken out first; a sink has a share and no value. */
static void softmax_row(const row *r, int64_t n, double sink, double *sum, double *shift) {
  double largest = -INFINITY;
  for (int64_t j = 0; j < n; j++)
    largest = fmax(largest, r->s[2][j]);
  *shift = fmax(largest, sink);
  *sum = 0;
  for (int64_t j = 0; j < n; j++) {
    r->p[j] = is_hidden(r->s[2][j]) ? 0.0 : exp(r->s[2][j] - *shift);
    *sum += r->p[j];
  }
  for (int64_t j = 0; j < n; j++)
    r->p[j] /= *sum + exp(sink - *shift);
}

static void weigh_row(const oracle_problem *p, int64_t h, int64_t n, row *r) {
  bool seen = false, broken = false;
  r->largest_t = 0;
  for (int64_t j = 0; j < n; j++) {
    const double score = r->s[2][j];
    if (is_hidden(score))
      continue;
    seen = true;
    broken = broken || isnan(score) || isinf(score);
    r->largest_t = fmax(r->largest_t, r->t[1][j]);
  }
  r->lse = -INFINITY;
  memset(r->p, 0, (size_t)n * sizeof *r->p);
  if (broken) {
    r->lse = NAN;
    r->largest_t = 0; /* NaN has no bound */
    for (int64_t j = 0; j < n; j++)
      r->p[j] = is_hidden(r->s[2][j]) ? 0.0 : NAN;
  } else if (seen) {
    const double sink = p->sinks ? p->sinks[h] : -INFINITY;
    double sum = 0, shift = 0, unused = 0;
    /* log-sum-exp leaves the sink out, and takes its own maximum, so that a large sink cannot
     * push its sum to 0 */
    softmax_row(r, n, -INFINITY, &sum, &shift);
    r->lse = shift + log(sum);
    if (p->sinks)
      softmax_row(r, n, sink, &sum, &unused);
  }
}

static void store_head(const oracle_problem *p, const sequence *s, int64_t b, int64_t h, int64_t i,
                       const row *r, oracle_result *result) {
  const int64_t g = h / (p->H / p->G);
  const int64_t at = (s->first_query + i) * p->H * p->dv + h * p->dv;
  double *restrict sum = result->concat.value + at, *restrict size = result->concat.bound + at;
  for (int64_t j = 0; j < s->length_k; j++) {
    const double *v = result->v.value + (s->first_key + j) * p->G * p->dv + g * p->dv;
    if (is_hidden(r->s[2][j]))
      continue;
    const double weight = p->kept ? r->p[j] * p->kept[cell(p, b, h, i, j)] : r->p[j];
    for (int64_t c = 0; c < p->dv; c++) {
      sum[c] += weight * v[c];
      size[c] += weight * fabs(v[c]);
    }
  }
  for (int64_t c = 0; c < p->dv; c++)
    size[c] = 4 * u * (4 + r->largest_t) * size[c] + 1e-6;
}

static void store_lse(const oracle_problem *p, const sequence *s, int64_t b, int64_t h, int64_t i,
                      const row *r, oracle_result *result) {
  const int64_t at = p->query_starts ? h * p->Lq + s->first_query + i : (b * p->H + h) * p->Lq + i;
  result->lse.value[at] = r->lse;
  result->lse.bound[at] = 8 * u * (4 + r->largest_t) + 2e-6;
}

static void store_stages(const oracle_problem *p, const sequence *s, int64_t b, int64_t h,
                         int64_t i, const row *r, oracle_result *result) {
  if (p->query_starts)
    return;
  for (int64_t j = 0; j < s->length_k; j++) {
    const int64_t at = cell(p, b, h, i, j);
    const int64_t mean = (b * p->Lq + i) * p->Lk + j;
    for (int stage = 0; stage < 3; stage++) {
      result->stage[stage].value[at] = r->s[stage][j];
      result->stage[stage].bound[at] = 8 * u * (4 + r->t[stage == 2][j]) + 2e-6;
    }
    result->stage[3].value[at] = r->p[j];
    if (!is_hidden(r->s[2][j])) /* a hidden key weighs exactly 0 */
      result->stage[3].bound[at] = 4 * u * (4 + r->largest_t) * r->p[j] + 1e-6;
    result->average.value[mean] += r->p[j] / (double)p->H;
    result->average.bound[mean] += result->stage[3].bound[at] / (double)p->H;
  }
}

/* ---- The whole ------------------------------------------------------------------------------- */

/* The keys of one head, [d][length_k]. */
static void turn_keys(const oracle_problem *p, const sequence *s, int64_t g,
                      const oracle_result *result, double *keys) {
  for (int64_t j = 0; j < s->length_k; j++)
    for (int64_t c = 0; c < p->d; c++)
      keys[c * s->length_k + j] = result->k.value[(s->first_key + j) * p->G * p->d + g * p->d + c];
}

/* What is done with a row of scores. */
typedef void use_row(void *user, const oracle_problem *p, const sequence *s, int64_t b, int64_t h,
                     int64_t i, const row *r);

static void store_row(void *user, const oracle_problem *p, const sequence *s, int64_t b, int64_t h,
                      int64_t i, const row *r) {
  oracle_result *result = user;
  store_head(p, s, b, h, i, r, result);
  store_lse(p, s, b, h, i, r, result);
  store_stages(p, s, b, h, i, r, result);
}

static void attend(const oracle_problem *p, int64_t b, const oracle_result *result, use_row *use,
                   void *user) {
  const sequence s = sequence_of(p, b);
  const size_t n = s.length_k > 0 ? (size_t)s.length_k : 1;
  double *memory = calloc((6 + (size_t)p->d) * n, sizeof *memory), *keys = memory + 6 * n;
  if (!memory)
    abort();
  row r = {.s = {memory, memory + n, memory + 2 * n},
           .t = {memory + 3 * n, memory + 4 * n},
           .p = memory + 5 * n};
  for (int64_t h = 0; h < p->H; h++) {
    turn_keys(p, &s, h / (p->H / p->G), result, keys);
    for (int64_t i = 0; i < s.length_q; i++) {
      const double *q = result->q.value + (s.first_query + i) * p->H * p->d + h * p->d;
      score_row(p, &s, q, keys, b, h, i, &r);
      weigh_row(p, h, s.length_k, &r);
      use(user, p, &s, b, h, i, &r);
    }
  }
  free(memory);
}

typedef struct shown {
  oracle_visitor *visit;
  void *user;
} shown;

static void show_row(void *user, const oracle_problem *p, const sequence *s, int64_t b, int64_t h,
                     int64_t i, const row *r) {
  const shown *to = user;
  const oracle_row shown_row = {b,
                                h,
                                i,
                                s->first_query + i,
                                s->first_key,
                                s->length_k,
                                s->off,
                                r->s[1],
                                r->s[2],
                                r->p,
                                r->lse,
                                p->kept ? p->kept + cell(p, b, h, i, 0) : NULL};
  to->visit(to->user, &shown_row);
}

void oracle_each_row(const oracle_problem *p, const oracle_result *result, oracle_visitor *visit,
                     void *user) {
  shown to = {visit, user};
  for (int64_t b = 0; b < p->B; b++)
    attend(p, b, result, show_row, &to);
}

/* What a row shows that is not computed at all: −inf as a score, 0 as a weight or a result. */
static void allocate_result(const oracle_problem *p, oracle_result *result) {
  const bool packed = p->query_starts != NULL;
  const int64_t B = packed ? 1 : p->B;
  result->q = make_numbers(B * p->Lq * p->H * p->d);
  result->k = make_numbers(B * p->Lk * p->G * p->d);
  result->v = make_numbers(B * p->Lk * p->G * p->dv);
  result->concat = make_numbers(B * p->Lq * p->H * p->dv);
  result->output = make_numbers(B * p->Lq * p->Eo);
  result->lse = make_numbers(B * p->H * p->Lq);
  result->average = make_numbers(packed ? 0 : B * p->Lq * p->Lk);
  for (int stage = 0; stage < 4; stage++)
    result->stage[stage] = make_numbers(packed ? 0 : B * p->H * p->Lq * p->Lk);
  for (int64_t i = 0; i < result->lse.n; i++)
    result->lse.value[i] = -INFINITY;
  for (int stage = 0; stage < 3; stage++)
    for (int64_t i = 0; i < result->stage[stage].n; i++)
      result->stage[stage].value[i] = -INFINITY;
}

/* Layer output: the bound of the attention result through |Wo|, + 2e-6 + 5e-6·|y|. */
static void finish(const oracle_problem *p, oracle_result *result) {
  const int64_t rows = (p->query_starts ? 1 : p->B) * p->Lq, in = p->H * p->dv;
  const bool copied = !p->wo.numbers && !p->wo.bias && !p->residual;
  oracle_project(&p->wo, result->concat.value, rows, in, p->Eo, result->output);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < p->Eo; o++) {
      double *y = &result->output.value[r * p->Eo + o];
      double bound = 0;
      for (int64_t i = p->wo.numbers ? 0 : o; i < (p->wo.numbers ? in : o + 1); i++)
        bound += result->concat.bound[r * in + i] * fabs(weight_at(&p->wo, i, o));
      if (p->residual)
        *y += p->residual[r * p->Eo + o];
      result->output.bound[r * p->Eo + o] = copied ? bound : bound + 2e-6 + 5e-6 * fabs(*y);
    }
}

void oracle_solve(const oracle_problem *p, oracle_result *result) {
  allocate_result(p, result);
  for (int64_t b = 0; b < p->B; b++) {
    const sequence s = sequence_of(p, b);
    project_rows(&p->wq, p->query, s.first_query, s.length_q, p->Eq, p->H * p->d, result->q);
    project_rows(&p->wk, p->key, s.first_key, s.length_k, p->Ek, p->G * p->d, result->k);
    project_rows(&p->wv, p->value, s.first_key, s.length_k, p->Ev, p->G * p->dv, result->v);
    prepare_rows(p, p->query_norm, p->query_positions, s.first_query, s.length_q, p->H, result->q);
    prepare_rows(p, p->key_norm, p->key_positions, s.first_key, s.length_k, p->G, result->k);
    attend(p, b, result, store_row, result);
  }
  finish(p, result);
}

void oracle_free(oracle_result *result) {
  oracle_numbers *all[] = {&result->q,   &result->k,       &result->v,     &result->concat,
                           &result->lse, &result->average, &result->output};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    free_numbers(all[i]);
  for (int stage = 0; stage < 4; stage++)
    free_numbers(&result->stage[stage]);
}
