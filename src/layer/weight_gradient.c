/* Owns the gradients of matrices and biases. Each task has a panel of a matrix and adds all rows of
 * the call to it, a chunk of rows to a product:
 *
 *   dW [in][out] = Xᵀ·dY       dWᵀ [out][in] = dYᵀ·X       as W lies
 *
 * so who sums what is fixed by shapes. A token that nobody sees has a gradient of 0, but its X may
 * hold NaN, and 0·NaN is NaN: in chunks with such rows they are replaced by 0 where the other
 * factor is 0. */
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
enum { MOST_GRADIENTS = 4, BIAS_COLUMNS = 64, SCAN_TASKS = 32 };

/* How one gradient is cut. */
typedef struct cut {
  const mha_weight_gradient *w;
  int64_t runs, run_rows; /* rows of all entries are one run where they are evenly spaced */
  bool merged;
  int64_t in_panels, out_panels, in_columns, out_columns;
  int64_t first_task;
  atomic_bool is_spoilt; /* a row of X or dY is not finite */
} cut;

typedef struct job {
  cut cuts[MOST_GRADIENTS];
  int n;
  bool accumulate;
  const mha_engine *engine;
  char *scratch;
} job;

static int64_t divide_up(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

/* ---- rows ---- */

static bool is_evenly_spaced(const mha_rows_shape *shape) {
  return shape->batch <= 1 || shape->batch_stride == shape->length * shape->row_stride;
}

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
  c.merged = !w->live.counts && is_evenly_spaced(&w->x_shape) && is_evenly_spaced(&w->dy_shape);
  c.runs = c.merged ? mha_min(w->x_shape.batch, 1) : w->x_shape.batch;
  c.run_rows = c.merged ? w->x_shape.batch * w->x_shape.length : w->x_shape.length;
  c.in_panels = divide_up(p->in, MHA_GRADIENT_PANEL);
  c.out_panels = divide_up(p->out, MHA_GRADIENT_PANEL);
  c.in_columns = divide_up(divide_up(p->in, c.in_panels), MHA_LANES) * MHA_LANES;
  c.out_columns = divide_up(divide_up(p->out, c.out_panels), MHA_LANES) * MHA_LANES;
  return c;
}

int64_t mha_weight_gradient_tasks(const mha_projection *p) {
  return divide_up(p->in, MHA_GRADIENT_PANEL) * divide_up(p->out, MHA_GRADIENT_PANEL);
}

/* ---- what is not finite ---- */

static bool rows_are_finite(const float *data, const mha_rows_shape *shape, int64_t run,
                            int64_t first, int64_t end) {
  for (int64_t r = first; r < end; r++)
    if (!mha_row_is_finite(row_at(data, shape, run, r), shape->width))
      return false;
  return true;
}

static mha_status scan_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  job *j = argument;
  cut *c = &j->cuts[index / SCAN_TASKS];
  const int64_t part = index % SCAN_TASKS;
  for (int64_t run = 0; c->w->matrix && run < c->runs; run++) {
    const int64_t live = live_rows(c, run);
    const int64_t first = live * part / SCAN_TASKS;
    const int64_t end = live * (part + 1) / SCAN_TASKS;
    if (!rows_are_finite(c->w->x, &c->w->x_shape, run, first, end) ||
        !rows_are_finite(c->w->dy, &c->w->dy_shape, run, first, end))
      atomic_store(&c->is_spoilt, true);
  }
  return MHA_OK;
}

static bool is_zero(const float *row, int64_t n) {
  for (int64_t c = 0; c < n; c++)
    if (row[c] != 0.0f)
      return false;
  return true;
}

/* Columns of a chunk of one factor, [rows][columns] of data. Where the whole row is not finite and
 * the other factor's is 0, the row is 0 in a copy. The copy has gaps between its rows where the
 * thing has, see poison.c. */
static mha_view clean_rows(const float *data, const mha_rows_shape *shape, const float *other,
                           const mha_rows_shape *other_shape, int64_t rows, int64_t column,
                           int64_t columns, float *room) {
  const int64_t stride = shape->row_stride == columns ? columns : columns + 1;
  for (int64_t r = 0; r < rows; r++) {
    const float *row = data + r * shape->row_stride;
    float *to = room + r * stride;
    if (!mha_row_is_finite(row, shape->width) &&
        is_zero(other + r * other_shape->row_stride, other_shape->width))
      memset(to, 0, (size_t)columns * sizeof *to);
    else
      memcpy(to, row + column, (size_t)columns * sizeof *to);
  }
  return mha_view_rows(room, rows, columns, stride);
}

/* Numbers of a chunk of one factor. */
static int64_t chunk_floats(void) {
  return INT64_C(1) * MHA_GRADIENT_ROWS * (MHA_GRADIENT_PANEL + MHA_LANES + 1);
}

size_t mha_weight_gradient_bytes(void) {
  return 2 * sizeof(float) * (size_t)chunk_floats();
}

/* ---- one panel ---- */

typedef struct panel {
  const cut *c;
  const mha_engine *engine;
  int64_t in, in_columns, out, out_columns; /* first and how many */
  float *room;
} panel;

static mha_view x_rows(const panel *p, int64_t run, int64_t row, int64_t rows) {
  const mha_weight_gradient *w = p->c->w;
  const float *x = row_at(w->x, &w->x_shape, run, row);
  if (atomic_load(&p->c->is_spoilt))
    return clean_rows(x, &w->x_shape, row_at(w->dy, &w->dy_shape, run, row), &w->dy_shape, rows,
                      p->in, p->in_columns, p->room);
  return mha_view_rows(x + p->in, rows, p->in_columns, w->x_shape.row_stride);
}

static mha_view dy_rows(const panel *p, int64_t run, int64_t row, int64_t rows) {
  const mha_weight_gradient *w = p->c->w;
  const float *dy = row_at(w->dy, &w->dy_shape, run, row);
  float *room = p->room + chunk_floats();
  if (atomic_load(&p->c->is_spoilt))
    return clean_rows(dy, &w->dy_shape, row_at(w->x, &w->x_shape, run, row), &w->x_shape, rows,
                      p->out, p->out_columns, room);
  return mha_view_rows(dy + p->out, rows, p->out_columns, w->dy_shape.row_stride);
}

static mha_status add_chunk(const panel *p, int64_t run, int64_t row, int64_t rows) {
  const mha_weight_gradient *w = p->c->w;
  const mha_projection *q = w->projection;
  const mha_view x = x_rows(p, run, row, rows);
  const mha_view dy = dy_rows(p, run, row, rows);
  float *to = w->matrix + p->in * q->in_stride + p->out * q->out_stride;
  if (q->out_stride == 1)
    return p->engine->multiply(1.0f, mha_view_transposed(x), dy, 1.0f, to, q->in_stride);
  return p->engine->multiply(1.0f, mha_view_transposed(dy), x, 1.0f, to, q->out_stride);
}

static mha_status run_panel(const panel *p, bool accumulate) {
  const mha_weight_gradient *w = p->c->w;
  const mha_projection *q = w->projection;
  float *to = w->matrix + p->in * q->in_stride + p->out * q->out_stride;
  mha_status status = MHA_OK;
  if (q->out_stride == 1)
    mha_vector_start_rows(accumulate ? 1.0f : 0.0f, to, p->in_columns, p->out_columns,
                          q->in_stride);
  else
    mha_vector_start_rows(accumulate ? 1.0f : 0.0f, to, p->out_columns, p->in_columns,
                          q->out_stride);
  for (int64_t run = 0; !status && run < p->c->runs; run++) {
    const int64_t live = live_rows(p->c, run);
    for (int64_t row = 0; !status && row < live; row += MHA_GRADIENT_ROWS)
      status = add_chunk(p, run, row, mha_min(live - row, MHA_GRADIENT_ROWS));
  }
  return status;
}

/* ---- the lists ---- */

static mha_status panel_task(void *argument, int64_t index, int32_t worker) {
  const job *j = argument;
  int k = j->n - 1;
  while (j->cuts[k].first_task > index)
    k--;
  const cut *c = &j->cuts[k];
  const mha_projection *q = c->w->projection;
  const int64_t local = index - c->first_task;
  panel p = {.c = c,
             .engine = j->engine,
             .in = local / c->out_panels * c->in_columns,
             .out = local % c->out_panels * c->out_columns,
             .room = (float *)(void *)(j->scratch + (size_t)worker * mha_weight_gradient_bytes())};
  p.in_columns = mha_min(c->in_columns, q->in - p.in);
  p.out_columns = mha_min(c->out_columns, q->out - p.out);
  return p.in_columns > 0 && p.out_columns > 0 ? run_panel(&p, j->accumulate) : MHA_OK;
}

/* Columns of one bias: its rows in their order, in double. */
static mha_status bias_task(void *argument, int64_t index, int32_t worker) {
  (void)worker;
  const job *j = argument;
  int k = j->n - 1;
  while (j->cuts[k].first_task > index)
    k--;
  const cut *c = &j->cuts[k];
  const mha_weight_gradient *w = c->w;
  const int64_t column = (index - c->first_task) * BIAS_COLUMNS;
  const int64_t columns = mha_min(BIAS_COLUMNS, w->projection->out - column);
  double sums[BIAS_COLUMNS] = {0};
  for (int64_t b = 0; b < w->dy_shape.batch; b++) {
    const int64_t live = w->live.counts ? w->live.counts[b] : w->live.limit;
    const int64_t rows = w->all_rows ? w->dy_shape.length : mha_min(live, w->dy_shape.length);
    for (int64_t r = 0; r < rows; r++)
      mha_vector_gather(sums, row_at(w->dy, &w->dy_shape, b, r) + column, 1.0, columns);
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
    if (!c->w->matrix)
      continue;
    list.n_tasks += c->in_panels * c->out_panels;
    list.operations += operations(c->w);
    scan.operations += MHA_OPERATIONS_PER_READ * (double)c->runs * (double)c->run_rows *
                       (double)(c->w->x_shape.width + c->w->dy_shape.width);
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
    list.n_tasks += divide_up(c->w->projection->out, BIAS_COLUMNS);
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
