/* Owns the gradients of matrices and biases. Each task has a panel of a matrix and adds all rows of
 * the call to it, a chunk of rows to a product:
 *
 *   dW [in][out] = Xᵀ·dY       dWᵀ [out][in] = dYᵀ·X       as W lies
 *
 * so who sums what is fixed by shapes. A token that nobody sees has a gradient of 0, but its X may
 * hold NaN, and 0·NaN is NaN; so may dy of a query that sees no key, where concat is 0. Here what
 * is multiplied by exactly 0 is 0: rows of X, or of dy, with a number that is not finite are left
 * out of the products and added number by number. */
#include "weight_gradient.h"

#include "engine/softmax.h"
#include "engine/vector.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

/* A panel is at most so wide and high, a chunk so many rows. */
#ifndef MHA_GRADIENT_PANEL
#define MHA_GRADIENT_PANEL 512
#endif
#ifndef MHA_GRADIENT_ROWS
#define MHA_GRADIENT_ROWS 512
#endif
enum { MOST_GRADIENTS = 4, BIAS_COLUMNS = 256, BIAS_ROWS = 8, SCAN_TASKS = 32 };

/* How one gradient is cut. */
typedef struct cut {
  const mha_weight_gradient *w;
  int64_t runs, run_rows; /* rows of all entries are one run where they are evenly spaced */
  bool merged;
  int64_t in_panels, out_panels, in_columns, out_columns;
  int64_t first_task;
  const float *watched; /* X or, of Wo, dY: what the caller gave */
  const mha_rows_shape *watched_shape;
  int scanned_by;        /* the first cut that watches the same rows */
  atomic_bool is_spoilt; /* one of them is not finite */
} cut;

typedef struct job {
  cut cuts[MOST_GRADIENTS];
  int n;
  bool accumulate;
  const mha_engine *engine;
  char *scratch;
} job;

/* ---- rows ---- */

/* Rows of a run that were computed. */
static int64_t live_rows(const cut *c, int64_t run) {
  const mha_weight_gradient *w = c->w;
  if (w->live.counts)
    return mha_min(w->live.counts[run], c->run_rows);
  return c->w->x_shape.batch == 1 ? mha_min(w->live.limit, c->run_rows) : c->run_rows;
}

static const float *row_at(const float *data, const mha_rows_shape *shape, int64_t run,
                           int64_t row) {
  return data + run * shape->batch_stride + row * shape->row_stride;
}

static cut make_cut(const mha_weight_gradient *w) {
  cut c = {.w = w};
  const mha_projection *p = w->projection;
  c.watched = w->is_output ? w->dy : w->x;
  c.watched_shape = w->is_output ? &w->dy_shape : &w->x_shape;
  c.merged = !w->live.counts && mha_rows_are_even(&w->x_shape) && mha_rows_are_even(&w->dy_shape);
  c.runs = c.merged ? mha_min(w->x_shape.batch, 1) : w->x_shape.batch;
  c.run_rows = c.merged ? w->x_shape.batch * w->x_shape.length : w->x_shape.length;
  c.in_panels = mha_divide_up(p->in, MHA_GRADIENT_PANEL);
  c.out_panels = mha_divide_up(p->out, MHA_GRADIENT_PANEL);
  c.in_columns = mha_divide_up(mha_divide_up(p->in, c.in_panels), MHA_LANES) * MHA_LANES;
  c.out_columns = mha_divide_up(mha_divide_up(p->out, c.out_panels), MHA_LANES) * MHA_LANES;
  return c;
}

int64_t mha_weight_gradient_tasks(const mha_projection *p) {
  return mha_divide_up(p->in, MHA_GRADIENT_PANEL) * mha_divide_up(p->out, MHA_GRADIENT_PANEL);
}

/* ---- what is not finite ---- */

static bool row_is_finite(const cut *c, int64_t run, int64_t row) {
  return mha_row_is_finite(row_at(c->watched, c->watched_shape, run, row), c->watched_shape->width);
}

static mha_status scan_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  job *j = argument;
  cut *c = &j->cuts[index / SCAN_TASKS];
  const int64_t part = index % SCAN_TASKS;
  const bool is_first = c->scanned_by == index / SCAN_TASKS;
  for (int64_t run = 0; is_first && run < c->runs; run++) {
    const int64_t live = live_rows(c, run);
    for (int64_t r = live * part / SCAN_TASKS; r < live * (part + 1) / SCAN_TASKS; r++)
      if (!row_is_finite(c, run, r))
        atomic_store(&c->is_spoilt, true);
  }
  return MHA_OK;
}

static bool watch_the_same(const cut *a, const cut *b) {
  const mha_rows_shape *s = a->watched_shape;
  const mha_rows_shape *t = b->watched_shape;
  return a->watched == b->watched && s->batch == t->batch && s->length == t->length &&
         s->width == t->width && s->batch_stride == t->batch_stride &&
         s->row_stride == t->row_stride && a->w->live.counts == b->w->live.counts &&
         a->w->live.limit == b->w->live.limit;
}

/* Query, key and value are often one array. */
static int find_scanner(const job *j, int k) {
  int first = 0;
  while (!watch_the_same(&j->cuts[first], &j->cuts[k]))
    first++;
  return first;
}

static bool is_spoilt(const job *j, const cut *c) {
  return atomic_load(&j->cuts[c->scanned_by].is_spoilt);
}

/* ---- one panel ---- */

typedef struct panel {
  const cut *c;
  const mha_engine *engine;
  bool is_spoilt;
  int64_t in, in_columns, out, out_columns; /* first and how many */
  float *room;
} panel;

/* Numbers of a chunk of one factor. */
static int64_t chunk_floats(void) {
  return INT64_C(1) * MHA_GRADIENT_ROWS * (MHA_GRADIENT_PANEL + MHA_LANES + 1);
}

size_t mha_weight_gradient_bytes(void) {
  return sizeof(float) * (size_t)chunk_floats();
}

/* Columns of a chunk of what is watched, in a copy: rows that are not finite are 0. It has gaps
 * between its rows where the thing has, see poison.c. */
static mha_view clean_rows(const panel *p, int64_t run, int64_t row, int64_t rows, int64_t column,
                           int64_t columns) {
  const mha_rows_shape *shape = p->c->watched_shape;
  const int64_t stride = shape->row_stride == columns ? columns : columns + 1;
  for (int64_t r = 0; r < rows; r++) {
    float *to = p->room + r * stride;
    if (row_is_finite(p->c, run, row + r))
      memcpy(to, row_at(p->c->watched, shape, run, row + r) + column, (size_t)columns * sizeof *to);
    else
      memset(to, 0, (size_t)columns * sizeof *to);
  }
  return mha_view_rows(p->room, rows, columns, stride);
}

static mha_view factor(const panel *p, bool is_dy, int64_t run, int64_t row, int64_t rows) {
  const mha_weight_gradient *w = p->c->w;
  const float *data = is_dy ? w->dy : w->x;
  const mha_rows_shape *shape = is_dy ? &w->dy_shape : &w->x_shape;
  const int64_t column = is_dy ? p->out : p->in;
  const int64_t columns = is_dy ? p->out_columns : p->in_columns;
  if (p->is_spoilt && is_dy == w->is_output)
    return clean_rows(p, run, row, rows, column, columns);
  return mha_view_rows(row_at(data, shape, run, row) + column, rows, columns, shape->row_stride);
}

/* The rows that the products leave out. */
static void add_bad_rows(const panel *p, int64_t run, int64_t row, int64_t rows) {
  const mha_weight_gradient *w = p->c->w;
  const mha_projection *q = w->projection;
  for (int64_t r = row; r < row + rows; r++) {
    const float *x = row_at(w->x, &w->x_shape, run, r) + p->in;
    const float *dy = row_at(w->dy, &w->dy_shape, run, r) + p->out;
    if (row_is_finite(p->c, run, r))
      continue;
    for (int64_t i = 0; i < p->in_columns; i++)
      for (int64_t k = 0; x[i] != 0.0f && k < p->out_columns; k++)
        if (dy[k] != 0.0f)
          w->matrix[(p->in + i) * q->in_stride + (p->out + k) * q->out_stride] += x[i] * dy[k];
  }
}

static float *panel_begin(const panel *p) {
  const mha_weight_gradient *w = p->c->w;
  return w->matrix + p->in * w->projection->in_stride + p->out * w->projection->out_stride;
}

static mha_status add_chunk(const panel *p, int64_t run, int64_t row, int64_t rows) {
  const mha_weight_gradient *w = p->c->w;
  const mha_projection *q = w->projection;
  const mha_view x = factor(p, false, run, row, rows);
  const mha_view dy = factor(p, true, run, row, rows);
  float *to = panel_begin(p);
  const mha_status status =
      q->out_stride == 1
          ? p->engine->multiply(1.0f, mha_view_transposed(x), dy, 1.0f, to, q->in_stride)
          : p->engine->multiply(1.0f, mha_view_transposed(dy), x, 1.0f, to, q->out_stride);
  if (!status && p->is_spoilt)
    add_bad_rows(p, run, row, rows);
  return status;
}

static mha_status run_panel(const panel *p, bool accumulate) {
  const mha_weight_gradient *w = p->c->w;
  const mha_projection *q = w->projection;
  const bool by_in = q->out_stride == 1;
  mha_status status = MHA_OK;
  mha_vector_start_rows(
      accumulate ? 1.0f : 0.0f, panel_begin(p), by_in ? p->in_columns : p->out_columns,
      by_in ? p->out_columns : p->in_columns, by_in ? q->in_stride : q->out_stride);
  for (int64_t run = 0; !status && run < p->c->runs; run++) {
    const int64_t live = live_rows(p->c, run);
    for (int64_t row = 0; !status && row < live; row += MHA_GRADIENT_ROWS)
      status = add_chunk(p, run, row, mha_min(live - row, MHA_GRADIENT_ROWS));
  }
  return status;
}

/* ---- the lists ---- */

static const cut *find_cut(const job *j, int64_t index) {
  int k = j->n - 1;
  while (j->cuts[k].first_task > index)
    k--;
  return &j->cuts[k];
}

static mha_status panel_task(void *argument, int64_t index, int32_t worker) {
  const job *j = argument;
  const cut *c = find_cut(j, index);
  const mha_projection *q = c->w->projection;
  const int64_t local = index - c->first_task;
  panel p = {.c = c,
             .engine = j->engine,
             .is_spoilt = is_spoilt(j, c),
             .in = local / c->out_panels * c->in_columns,
             .out = local % c->out_panels * c->out_columns,
             .room = (float *)(void *)(j->scratch + (size_t)worker * mha_weight_gradient_bytes())};
  p.in_columns = mha_min(c->in_columns, q->in - p.in);
  p.out_columns = mha_min(c->out_columns, q->out - p.out);
  return p.in_columns > 0 && p.out_columns > 0 ? run_panel(&p, j->accumulate) : MHA_OK;
}

/* sums [columns] += rows [first, first + n) of dY, a few in float32 and then in double. */
static void add_rows(const mha_weight_gradient *w, int64_t b, int64_t first, int64_t n,
                     int64_t column, int64_t columns, double *sums) {
  float few[BIAS_COLUMNS] = {0};
  for (int64_t r = first; r < first + n; r++)
    mha_vector_add(few, row_at(w->dy, &w->dy_shape, b, r) + column, columns);
  mha_vector_gather(sums, few, 1.0, columns);
}

/* Columns of one bias: its rows in their order. */
static mha_status bias_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  const job *j = argument;
  const cut *c = find_cut(j, index);
  const mha_weight_gradient *w = c->w;
  const int64_t column = (index - c->first_task) * BIAS_COLUMNS;
  const int64_t columns = mha_min(BIAS_COLUMNS, w->projection->out - column);
  double sums[BIAS_COLUMNS] = {0};
  for (int64_t b = 0; b < w->dy_shape.batch; b++) {
    const int64_t live = w->live.counts ? w->live.counts[b] : w->live.limit;
    const int64_t rows = w->is_output ? w->dy_shape.length : mha_min(live, w->dy_shape.length);
    for (int64_t r = 0; r < rows; r += BIAS_ROWS)
      add_rows(w, b, r, mha_min(rows - r, BIAS_ROWS), column, columns, sums);
  }
  for (int64_t i = 0; i < columns; i++) {
    float *to = w->bias + column + i;
    const double sum = w->sums && isfinite(sums[i]) ? w->sums[column + i] : sums[i];
    *to = (float)(j->accumulate ? (double)*to + sum : sum);
  }
  return MHA_OK;
}

static double operations(const mha_weight_gradient *w) {
  const mha_projection *p = w->projection;
  return 2.0 * (double)w->x_shape.batch * (double)w->x_shape.length * (double)p->in *
         (double)p->out;
}

static mha_status run_matrices(const mha_context *context, job *j) {
  mha_task_list scan = {.work = scan_task, .job = j, .n_tasks = (int64_t)j->n * SCAN_TASKS};
  mha_task_list list = {.work = panel_task, .job = j};
  for (int k = 0; k < j->n; k++) {
    cut *c = &j->cuts[k];
    c->first_task = list.n_tasks;
    c->scanned_by = find_scanner(j, k);
    if (!c->w->matrix)
      continue;
    list.n_tasks += mha_weight_gradient_tasks(c->w->projection);
    list.operations += operations(c->w);
    scan.operations += MHA_OPERATIONS_PER_READ * (double)c->runs * (double)c->run_rows *
                       (double)c->watched_shape->width;
  }
  const mha_status status = mha_parallel_run(&context->threads, &scan);
  return status ? status : mha_parallel_run(&context->threads, &list);
}

static mha_status run_biases(const mha_context *context, job *j) {
  mha_task_list list = {.work = bias_task, .job = j};
  for (int k = 0; k < j->n; k++) {
    cut *c = &j->cuts[k];
    c->first_task = list.n_tasks;
    if (!c->w->bias)
      continue;
    list.n_tasks += mha_divide_up(c->w->projection->out, BIAS_COLUMNS);
    list.operations += MHA_OPERATIONS_PER_READ * (double)c->runs * (double)c->run_rows *
                       (double)c->w->dy_shape.width;
  }
  return mha_parallel_run(&context->threads, &list);
}

mha_status mha_weight_gradients(const mha_context *context, const mha_weight_gradient *gradients,
                                int n, bool accumulate, char *scratch) {
  job j = {.n = n, .accumulate = accumulate, .engine = context->engine, .scratch = scratch};
  for (int k = 0; k < n; k++)
    j.cuts[k] = make_cut(&gradients[k]);
  const mha_status status = run_matrices(context, &j);
  return status ? status : run_biases(context, &j);
}
