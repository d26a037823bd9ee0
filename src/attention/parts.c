/* Owns the parts of the keys. Each leaves its m, l and O behind; merging them is the rule by which
 * one part's tiles follow one another, in the order of the keys:
 *
 *   m = max m_u,  l = Σ l_u·exp(m_u - m),  O = Σ O_u·exp(m_u - m)                               */
#include "parts.h"

#include "engine/softmax.h"
#include "engine/vector.h"

#include <math.h>
#include <string.h>

/* ---- where they lie ---- */

/* Results of the parts: m, l, poison [parts][rows·H] and O [parts][rows·H][dv], where an entry's
 * rows are [H][Lq] and, packed, Lq is its own. */
typedef struct part_results {
  float *max, *sum, *poison, *output;
} part_results;

/* Rows of one part. */
static bool rows_per_part(const mha_cut_sizes *s, int64_t *rows) {
  *rows = s->rows;
  return (s->rows > 0 || mha_multiply(s->B, s->Lq, rows)) && mha_multiply(*rows, s->H, rows);
}

static bool part_rows(const mha_cut_sizes *s, int64_t *rows) {
  return rows_per_part(s, rows) &&
         mha_multiply(*rows, mha_cut_most_parts(s->Lq, s->span, s->packed), rows);
}

bool mha_parts_floats(const mha_cut_sizes *sizes, int64_t *floats) {
  int64_t row = 0;
  return part_rows(sizes, floats) && mha_add(sizes->dv, 3, &row) &&
         mha_multiply(*floats, row, floats);
}

static part_results part_results_of(const mha_core *core) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  int64_t rows = 0;
  (void)part_rows(&sizes, &rows);
  const part_results p = {core->parts, core->parts + rows, core->parts + 2 * rows,
                          core->parts + 3 * rows};
  return p;
}

/* How far the rows of one part are from those of the next. */
static int64_t part_step(const mha_core *core) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  int64_t rows = 0;
  (void)rows_per_part(&sizes, &rows);
  return rows;
}

/* Index of the first row of head h in a part of entry b. Packed, there is room for all queries or,
 * if those are fewer, for the most few ones of each entry. */
static int64_t part_row(const mha_core *core, int64_t b, int64_t part, int64_t h) {
  const mha_visibility *v = &core->visibility;
  const bool all = v->query_starts && part_step(core) == v->Lq * v->H;
  const int64_t first = all ? mha_query_start(v, b) : b * core->cut.queries;
  return part * part_step(core) + first * v->H + h * mha_core_few_queries(core, b);
}

/* Strips of heads, the last of which may have fewer. */
static int64_t strip_count(const mha_core *core) {
  const int64_t H = core->visibility.H;
  return H / core->cut.heads + (H % core->cut.heads != 0);
}

bool mha_parts_are_left(const mha_core *core) {
  return core->cut.few && (core->cut.parts > 1 || core->pass == MHA_PASS_FEW);
}

void mha_parts_place(mha_rows *rows, int64_t part) {
  const mha_core *core = rows->core;
  mha_block *k = &rows->block;
  const part_results p = part_results_of(core);
  const int64_t row = part_row(core, k->b, part, k->h);
  rows->max = p.max + row;
  rows->sum = p.sum + row;
  rows->poison = p.poison + row;
  k->output = p.output + row * core->dv;
  k->output_row_stride = core->dv;
  k->output_head_stride = k->n * core->dv;
}

/* ---- their tasks ---- */

int64_t mha_parts_count(const mha_core *core) {
  return core->visibility.B * strip_count(core) * core->cut.parts;
}

/* Parts follow one another within a strip, as they lie in memory. */
int64_t mha_parts_locate(const mha_core *core, int64_t index, mha_block *k) {
  const int64_t part = index % core->cut.parts;
  index /= core->cut.parts;
  k->h = index % strip_count(core) * core->cut.heads;
  k->heads = mha_min(core->cut.heads, core->visibility.H - k->h);
  k->b = index / strip_count(core);
  k->i = 0;
  k->n = mha_core_few_queries(core, k->b);
  return part;
}

/* ---- merging the parts ---- */

/* m and l of row (b, h, i) over all parts; poison likewise. l is NaN if that of a part is. */
static void merge_statistics(const mha_core *core, const part_results *p, int64_t first, float *max,
                             float *sum, float *poison) {
  const int64_t step = part_step(core);
  *max = -INFINITY;
  *sum = 0.0f;
  *poison = -INFINITY;
  for (int64_t u = 0; u < core->cut.parts; u++) {
    const int64_t row = first + u * step;
    *max = p->max[row] > *max || isnan(p->max[row]) ? p->max[row] : *max;
    *poison = p->poison[row] > *poison ? p->poison[row] : *poison;
  }
  for (int64_t u = 0; u < core->cut.parts; u++) {
    const int64_t row = first + u * step;
    if (p->max[row] != -INFINITY)
      *sum += p->sum[row] * mha_exp(p->max[row] - *max);
  }
}

/* One row: O = Σ exp(m_u - m)·O_u over the parts u, in their order. */
static void merge_row(const mha_core *core, const part_results *p, int64_t b, int64_t h,
                      int64_t i) {
  const int64_t first = part_row(core, b, 0, h) + i;
  const int64_t index = mha_core_row_index(core, b, h, i);
  float *row = mha_core_output(core, b, h, i);
  float poison = 0.0f;
  merge_statistics(core, p, first, &core->row_max[index], &core->row_sum[index], &poison);
  memset(row, 0, (size_t)core->dv * sizeof *row);
  for (int64_t u = 0; u < core->cut.parts; u++) {
    const int64_t part = first + u * part_step(core);
    const float factor =
        p->max[part] == -INFINITY ? 0.0f : mha_exp(p->max[part] - core->row_max[index]);
    if (factor == 0.0f) /* a sum that overflowed would still count */
      continue;
    mha_vector_add_scaled(row, p->output + part * core->dv, factor, core->dv);
  }
  mha_rows_finish_one(core, h, core->row_max[index], core->row_sum[index], poison, row);
}

/* One task: an entry and a head. */
static mha_status merge_task(void *job, int64_t index, int32_t worker) {
  (void)worker;
  const mha_core *core = job;
  const mha_visibility *v = &core->visibility;
  const part_results p = part_results_of(core);
  const int64_t n =
      mha_core_serves(core, index / v->H) ? mha_core_few_queries(core, index / v->H) : 0;
  for (int64_t i = 0; i < n; i++)
    merge_row(core, &p, index / v->H, index % v->H, i);
  return MHA_OK;
}

mha_status mha_parts_merge(mha_core *core, const mha_threads *threads) {
  const mha_visibility *v = &core->visibility;
  const int64_t entries = v->B * v->H;
  const mha_task_list merge = {.work = merge_task,
                               .job = core,
                               .n_tasks = entries,
                               .operations = 2.0 * (double)(entries * core->cut.queries) *
                                             (double)(core->cut.parts * core->dv)};
  return mha_parallel_run(threads, &merge);
}
