/* Owns the projections. The rows of a call are cut into panels, one product each, so that all
 * threads have work; where the rows of all entries are evenly spaced they count as one long run,
 * since few large products are faster than many small ones. */
#include "project.h"

#include "base/memory.h"
#include "engine/packed.h"
#include "engine/softmax.h"
#include "engine/vector.h"

#include <string.h>

/* Panels are at most this large: wider ones gain nothing, since the BLAS packs the rows of a panel
 * once for each, and these already make that a small part. */
#ifndef MHA_PANEL_ROWS
#define MHA_PANEL_ROWS 256
#endif
#ifndef MHA_PANEL_COLUMNS
#define MHA_PANEL_COLUMNS 1024
#endif
/* Few rows are cut into narrower panels, so that there are some for several threads; below this
 * width packing costs the product more than threads gain. */
#define MIN_PANELS        4
#define MIN_PANEL_COLUMNS 384

/* Packed matrices: nothing is packed for a panel, so it may be smaller; the rows of X and Y that it
 * has stay in a second-level cache. */
#ifndef MHA_PACKED_PANEL_ROWS
#define MHA_PACKED_PANEL_ROWS 132 /* eleven times what a kernel takes */
#endif
#ifndef MHA_PACKED_PANEL_COLUMNS
#define MHA_PACKED_PANEL_COLUMNS 256
#endif

/* Matrices of other types than float32 are widened for each panel, in pieces that stay in a cache
 * while they are multiplied, so a panel has more rows; few rows are multiplied with the matrix as
 * it is stored. */
#define WIDENED_PANEL_ROWS (2 * MHA_PANEL_ROWS)
#ifndef MHA_WIDENED_FLOATS
#define MHA_WIDENED_FLOATS (INT64_C(1024) * 512)
#endif
#ifndef MHA_FEW_STORED_ROWS
#define MHA_FEW_STORED_ROWS 32
#endif
/* Rows of a piece are a multiple of this, which is whole blocks. */
enum { PIECE_ROWS = 64 };

#define MAX_PROJECTIONS 3

/* Rows of an entry up to which they count as few. */
#ifndef MHA_FEW_ROWS
#define MHA_FEW_ROWS 16
#endif

/* Stored rows per part of a single row's product, and parts at most. */
#ifndef MHA_PART_ROWS
#define MHA_PART_ROWS 1024 /* a width of 768 is not cut */
#endif
enum { MOST_PARTS = 4 };

/* Panels that a page has to have for rows to be projected straight into it, if they are many. */
#define PAGE_PANELS INT64_C(4)

/* How one projection is cut: `runs` runs of at most run_rows rows, or one row into parts. */
typedef struct cut {
  const mha_engine *engine;
  const mha_projecting *p;
  mha_widening widening;
  bool is_packed; /* multiplied by kernels */
  mha_packed packed;
  int64_t parts; /* 0 = not cut along the matrix's rows */
  bool merged;   /* all entries are one run */
  int64_t runs, run_rows;
  int64_t row_panels, column_panels; /* per run */
  int64_t panel_rows, panel_columns;
  int64_t first_task;
} cut;

typedef struct project_job {
  cut cuts[MAX_PROJECTIONS];
  int n;
} project_job;

/* Columns per panel: an even share in whole vectors. A single row is bound by reading the matrix,
 * which is fastest in long pieces: where a panel is a part of each stored row, it is a wide one. */
static int64_t choose_columns(const mha_projection *w, int64_t rows, int64_t row_panels) {
  const int64_t columns = w->out;
  if (rows == 1 && w->matrix && w->out_stride == 1)
    return mha_min(columns, INT64_C(4) * MHA_PANEL_COLUMNS);
  const int64_t wanted = mha_min(MIN_PANELS / mha_max(row_panels, 1), columns / MIN_PANEL_COLUMNS);
  const int64_t panels = mha_max(mha_divide_up(columns, MHA_PANEL_COLUMNS), wanted);
  const int64_t whole = mha_max(MHA_LANES, mha_element_block(w->element));
  return mha_min(mha_divide_up(mha_divide_up(columns, panels), whole) * whole, columns);
}

static bool is_stored(const mha_projection *w) {
  return w->matrix && w->element != MHA_F32;
}

/* Rows of W, all of them or a multiple of PIECE_ROWS, that are widened together. */
static int64_t piece_rows(const mha_projection *w, int64_t columns) {
  const int64_t fit = MHA_WIDENED_FLOATS / columns / PIECE_ROWS * PIECE_ROWS;
  return mha_min(mha_max(fit, PIECE_ROWS), w->in);
}

static int64_t part_count(const mha_projection *w) {
  return w->matrix && w->out_stride == 1 ? mha_min(w->in / MHA_PART_ROWS, MOST_PARTS) : 0;
}

int64_t mha_partial_floats(const mha_projection *projection) {
  return part_count(projection) * projection->out;
}

int64_t mha_widened_floats(const mha_projection *w, int64_t rows) {
  if (!is_stored(w) || rows <= MHA_FEW_STORED_ROWS)
    return 0;
  const int64_t block = mha_element_block(w->element);
  const int64_t columns = mha_min(mha_divide_up(MHA_PANEL_COLUMNS, block) * block, w->out);
  return mha_min(columns * w->in, mha_max(MHA_WIDENED_FLOATS, columns * PIECE_ROWS));
}

/* By the smallest panels that any way to cut it makes, or the parts of a single row. */
bool mha_projection_tasks(const mha_projection *w, int64_t entries, int64_t length,
                          int64_t *tasks) {
  int64_t rows = is_stored(w) ? WIDENED_PANEL_ROWS : MHA_PANEL_ROWS;
  int64_t columns = mha_min(MHA_PANEL_COLUMNS, MIN_PANEL_COLUMNS);
  if (w->packed) {
    rows = mha_min(rows, MHA_PACKED_PANEL_ROWS);
    columns = mha_min(columns, MHA_PACKED_PANEL_COLUMNS);
  }
  if (!mha_multiply(entries, length / rows + 1, tasks) ||
      !mha_multiply(*tasks, mha_divide_up(w->out, columns), tasks))
    return false;
  *tasks = mha_max(*tasks, part_count(w));
  return true;
}

static bool is_single_row(const mha_projecting *p) {
  return p->x_shape.batch == 1 && p->x_shape.length == 1;
}

/* Whether the first row is computed. */
static bool is_live(const mha_projecting *p) {
  return (p->live.counts ? p->live.counts[0] : p->live.limit) > 0;
}

/* Kernels are for dense rows. A single one is bound by reading the matrix, and what reads several
 * of its rows side by side is faster than a packed one from end to end; few rows are where a matrix
 * that is stored smaller than its packed form is read faster. */
static bool use_kernels(const mha_context *context, const mha_projecting *p, mha_packed *packed) {
  const mha_projection *w = p->projection;
  const int64_t few = is_stored(w) ? MHA_FEW_STORED_ROWS : 1;
  return context->kernels && w->packed && p->x_shape.batch * p->x_shape.length > few &&
         p->x_shape.row_stride == w->in && (p->cached || p->y_shape.row_stride == w->out) &&
         mha_packed_find(context->kernels, w->packed, w->in, w->out, packed);
}

static cut make_cut(const mha_context *context, const mha_projecting *p, mha_widening widening) {
  cut c = {.engine = context->engine, .p = p, .widening = widening};
  c.is_packed = use_kernels(context, p, &c.packed);
  c.panel_rows = c.is_packed                ? MHA_PACKED_PANEL_ROWS
                 : is_stored(p->projection) ? WIDENED_PANEL_ROWS
                                            : MHA_PANEL_ROWS;
  if (!c.is_packed && p->partial && part_count(p->projection) > 1 && is_single_row(p) && is_live(p))
    c.parts = part_count(p->projection);
  c.merged = !p->live.counts && mha_rows_are_even(&p->x_shape) &&
             (p->cached ? p->x_shape.batch == 1 : mha_rows_are_even(&p->y_shape));
  c.runs = c.merged ? 1 : p->x_shape.batch;
  c.run_rows = c.merged ? p->x_shape.batch * p->x_shape.length : p->x_shape.length;
  c.row_panels = mha_divide_up(c.run_rows, c.panel_rows);
  c.panel_columns = c.is_packed ? MHA_PACKED_PANEL_COLUMNS
                                : choose_columns(p->projection, c.run_rows, c.row_panels);
  c.column_panels = mha_divide_up(p->projection->out, c.panel_columns);
  return c;
}

static int64_t task_count(const cut *c) {
  return c->parts > 0 ? c->parts : c->runs * c->row_panels * c->column_panels;
}

static double operation_count(const cut *c) {
  const mha_projection *w = c->p->projection;
  const double rows = (double)c->runs * (double)c->run_rows;
  const double per_element = 2.0 * rows;
  const double least = rows > 0 ? MHA_OPERATIONS_PER_READ : 0.0;
  return (per_element > least ? per_element : least) * (double)w->in * (double)w->out;
}

/* ---- one panel ---- */

/* Rows [row, row + rows) of a run, columns [column, column + columns). */
typedef struct panel {
  const mha_engine *engine;
  const mha_packed *packed; /* or NULL */
  const mha_projecting *p;
  float *widened; /* room for pieces of the matrix */
  const float *x;
  float *y;
  int64_t y_stride;
  int64_t rows, column, columns;
} panel;

static void add_bias(const panel *q) {
  const float *bias = q->p->projection->bias;
  for (int64_t r = 0; bias && r < q->rows; r++) {
    float *y = q->y + r * q->y_stride;
    mha_vector_add(y, bias + q->column, q->columns);
  }
}

static void set_bias(const panel *q) {
  const float *bias = q->p->projection->bias;
  for (int64_t r = 0; r < q->rows; r++) {
    float *y = q->y + r * q->y_stride;
    if (bias)
      memcpy(y, bias + q->column, (size_t)q->columns * sizeof *y);
    else
      memset(y, 0, (size_t)q->columns * sizeof *y);
  }
}

/* y = b or y += b: what the product is added to. */
static void start_from_bias(const panel *q) {
  if (q->p->accumulate)
    add_bias(q);
  else
    set_bias(q);
}

static void add_identity(const panel *q) {
  for (int64_t r = 0; r < q->rows; r++) {
    const float *x = q->x + r * q->p->x_shape.row_stride + q->column;
    float *y = q->y + r * q->y_stride;
    mha_vector_add(y, x, q->columns);
  }
}

/* Y = X·W + beta·Y for a matrix that is widened piece by piece: X of some columns times the rows of
 * W that meet them. */
static mha_status add_pieces(const panel *q, mha_view x, const mha_stored *matrix, float beta) {
  const int64_t step = piece_rows(q->p->projection, q->columns);
  mha_status status = MHA_OK;
  for (int64_t first = 0; !status && first < matrix->rows; first += step) {
    const int64_t rows = mha_min(matrix->rows - first, step);
    const mha_stored piece = mha_stored_row_block(*matrix, first, rows);
    status = q->engine->multiply(1.0f, mha_view_columns(x, first, rows),
                                 mha_numbers_fetch(&piece, q->widened), first > 0 ? 1.0f : beta,
                                 q->y, q->y_stride);
  }
  return status;
}

static mha_status add_product(const panel *q, bool onto_nothing) {
  const mha_projection *w = q->p->projection;
  const mha_view x = mha_view_rows(q->x, q->rows, w->in, q->p->x_shape.row_stride);
  const mha_stored matrix = mha_stored_columns(mha_projection_matrix(w), q->column, q->columns);
  const float beta = onto_nothing ? 0.0f : 1.0f;
  if (is_stored(w) && q->rows > MHA_FEW_STORED_ROWS)
    return add_pieces(q, x, &matrix, beta);
  return mha_numbers_multiply(q->engine, 1.0f, x, &matrix, beta, q->y, q->y_stride);
}

static mha_status project_panel(const panel *q) {
  const mha_projection *w = q->p->projection;
  const bool onto_nothing = !w->bias && !q->p->accumulate && w->matrix && !q->packed;
  if (!onto_nothing)
    start_from_bias(q);
  if (q->packed)
    mha_packed_multiply(q->packed, q->rows, q->x, q->column, q->columns, q->y);
  else if (w->matrix)
    return add_product(q, onto_nothing);
  else
    add_identity(q);
  return MHA_OK;
}

/* ---- the list of panels ---- */

static const cut *find_cut(const project_job *job, int64_t index) {
  int k = job->n - 1;
  while (job->cuts[k].first_task > index)
    k--;
  return &job->cuts[k];
}

/* Rows of the run that are computed. */
static int64_t live_rows(const cut *c, int64_t run) {
  if (c->merged)
    return c->p->x_shape.batch == 1 ? c->p->live.limit : c->run_rows;
  return c->p->live.counts ? mha_min(c->p->live.counts[run], c->run_rows) : c->run_rows;
}

/* Where a row of a run goes. */
static float *row_place(const mha_projecting *p, int64_t run, int64_t row) {
  if (p->cached)
    return p->y + mha_cache_rows_place(p->cached, run, row) * p->projection->out;
  return p->y + run * p->y_shape.batch_stride + row * p->y_shape.row_stride;
}

static panel make_panel(const cut *c, int32_t worker, int64_t run, int64_t row, int64_t rows,
                        int64_t column) {
  const mha_projecting *p = c->p;
  const int64_t left = p->projection->out - column;
  const panel q = {
      .engine = c->engine,
      .packed = c->is_packed ? &c->packed : NULL,
      .p = p,
      .widened = c->widening.room + worker * c->widening.floats,
      .x = p->x + run * p->x_shape.batch_stride + row * p->x_shape.row_stride,
      .y = row_place(p, run, row) + column,
      .y_stride = p->cached ? p->projection->out : p->y_shape.row_stride,
      .rows = rows,
      .column = column,
      .columns = mha_min(left, c->panel_columns),
  };
  return q;
}

/* Rows [row, end) of a run that are computed; those of a ring in up to two panels. */
static mha_status project_rows(const cut *c, int32_t worker, int64_t run, int64_t row, int64_t end,
                               int64_t column) {
  const mha_cache_rows *cached = c->p->cached;
  mha_status status = MHA_OK;
  while (!status && row < end) {
    int64_t rows = end - row;
    if (cached)
      rows = mha_min(rows, mha_cache_rows_run(cached, mha_cache_rows_before(cached, run) + row));
    const panel q = make_panel(c, worker, run, row, rows, column);
    status = project_panel(&q);
    row += rows;
  }
  return status;
}

/* ---- the parts of a single row ---- */

/* The partial sum of stored rows [first, end) of the matrix: x[first, end)·W[first, end). */
static mha_status project_part(const cut *c, int64_t part) {
  const mha_projection *w = c->p->projection;
  const int64_t first = part * w->in / c->parts;
  const int64_t end = (part + 1) * w->in / c->parts;
  const mha_view x = mha_view_rows(c->p->x + first, 1, end - first, end - first);
  const mha_stored rows = mha_stored_row_block(mha_projection_matrix(w), first, end - first);
  return mha_numbers_multiply(c->engine, 1.0f, x, &rows, 0.0f, c->p->partial + part * w->out,
                              w->out);
}

/* y = b, or y += b, and the partial sums in their order. */
static void add_parts(const cut *c) {
  const mha_projection *w = c->p->projection;
  panel whole = make_panel(c, 0, 0, 0, 1, 0);
  whole.columns = w->out;
  start_from_bias(&whole);
  for (int64_t part = 0; part < c->parts; part++)
    mha_vector_add(whole.y, c->p->partial + part * w->out, w->out);
}

/* ---- the tasks ---- */

static mha_status project_task(void *argument, int64_t index, int32_t worker) {
  const project_job *job = argument;
  const cut *c = find_cut(job, index);
  const int64_t local = index - c->first_task;
  if (c->parts > 0)
    return project_part(c, local);
  const int64_t column = local % c->column_panels * c->panel_columns;
  const int64_t row = local / c->column_panels % c->row_panels * c->panel_rows;
  const int64_t run = local / c->column_panels / c->row_panels;
  const int64_t end = mha_min(row + c->panel_rows, c->run_rows);
  const int64_t live = live_rows(c, run);
  const int64_t live_end = mha_max(row, mha_min(live, end));
  const mha_status status = project_rows(c, worker, run, row, live_end, column);
  if (c->p->fill && end > live_end) {
    const panel rest = make_panel(c, worker, run, live_end, end - live_end, column);
    start_from_bias(&rest);
  }
  return status;
}

int64_t mha_gathered_rows(int64_t entries, int64_t rows) {
  return entries > 1 ? mha_min(rows, MHA_FEW_ROWS) : 0;
}

int64_t mha_paged_rows(int64_t page_tokens, int64_t rows) {
  return page_tokens > 0 && page_tokens < PAGE_PANELS * MHA_PANEL_ROWS && rows > MHA_FEW_ROWS ? rows
                                                                                              : 0;
}

mha_status mha_project(const mha_context *context, const mha_projecting *projections, int n,
                       mha_widening widening) {
  project_job job = {.n = n};
  mha_task_list list = {.work = project_task, .job = &job};
  for (int k = 0; k < n; k++) {
    job.cuts[k] = make_cut(context, &projections[k], widening);
    job.cuts[k].first_task = list.n_tasks;
    list.n_tasks += task_count(&job.cuts[k]);
    list.operations += operation_count(&job.cuts[k]);
  }
  const mha_status status = mha_parallel_run(&context->threads, &list);
  for (int k = 0; !status && k < n; k++)
    if (job.cuts[k].parts > 0)
      add_parts(&job.cuts[k]);
  return status;
}
