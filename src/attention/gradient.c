/* Owns the way back through step 3 as tasks, and who adds what to whom:
 *
 *   dV += P̃ᵀ·dO      [keys][dv]      P̃: the weights that dropout left
 *   dK += scale·dSᵀ·Q [keys][d]
 *   dQ += scale·dS·K  [rows][d]
 *
 * for each tile of queries over each tile of keys that it sees. A task has the query heads of one
 * key head one after the other, so that nobody else adds to its keys. Where key heads are too few
 * to give several threads work, every query head is a task, or some tiles of its queries; the tasks
 * of a key head then add to shares of their own, which are added up in their order. All of this
 * depends on shapes alone: the same bits for any number of threads.
 *
 * What is added to all keys alike, as bk is, changes no softmax, so without softcap and sinks its
 * gradient is 0: a sum over dK would show the rounding of all of its rows. By way of the queries
 *
 *   Σ_j dK_j = scale·Σ_i (Σ_j dS_ij)·Q_i,   Σ_j dS_ij = P_sink·D_i without a softcap
 *
 * it is nearly exact. */
#include "gradient.h"

#include "back.h"
#include "engine/vector.h"
#include "gradient_bias.h"

#include <math.h>
#include <string.h>

/* Tasks that a call has at least, as far as its queries allow it. */
#ifndef MHA_BACK_TASKS
#define MHA_BACK_TASKS 8
#endif

/* ---- the cut ---- */

static mha_gradient_cut cut_call(const mha_cut_sizes *s) {
  const int64_t group = s->H / s->G;
  mha_gradient_cut cut = {.heads = group, .chunks = 1, .shares = 1};
  const int64_t groups = mha_min(s->B, MHA_BACK_TASKS) * mha_min(s->G, MHA_BACK_TASKS);
  if (groups >= MHA_BACK_TASKS || groups == 0)
    return cut;
  const int64_t heads = s->B * mha_min(s->H, MHA_BACK_TASKS);
  const int64_t tiles = mha_divide_up(mha_max(s->Lq, 1), mha_back_cut(s).queries);
  cut.heads = 1;
  cut.chunks = mha_min(mha_divide_up(MHA_BACK_TASKS, heads), tiles);
  cut.shares = group * cut.chunks;
  return cut;
}

int64_t mha_gradient_most_shared_entries(void) {
  return MHA_BACK_TASKS - 1;
}

/* Rows of K, of all entries. */
static bool key_rows(const mha_cut_sizes *s, int64_t *rows) {
  return mha_multiply(s->packed ? 1 : s->B, s->span, rows);
}

static bool task_count(const mha_cut_sizes *s, int64_t *tasks) {
  return mha_multiply(s->B, s->G, tasks) && mha_multiply(*tasks, cut_call(s).shares, tasks);
}

/* At least the tasks of any of the call's lists. */
static int64_t most_tasks(const mha_cut_sizes *s) {
  int64_t tasks = 0;
  int64_t most = INT64_MAX;
  if (mha_multiply(s->B, s->H, &tasks) &&
      mha_multiply(tasks, mha_divide_up(s->Lq, mha_back_cut(s).queries) + 1, &tasks))
    most = tasks;
  return most;
}

mha_gradient_scratch mha_gradient_plan(const mha_cut_sizes *s, int32_t n_threads,
                                       mha_layout *layout) {
  mha_layout worker = {0};
  mha_gradient_scratch at;
  int64_t rows = 0;
  int64_t shared = 0;
  int64_t tasks = 0;
  int64_t sums = 0;
  (void)mha_back_plan(s, &worker);
  layout->overflow |= worker.overflow || !key_rows(s, &rows) || !task_count(s, &tasks) ||
                      !mha_multiply(cut_call(s).chunks, s->H, &sums);
  if (cut_call(s).shares > 1)
    layout->overflow |=
        !mha_multiply(s->G, cut_call(s).shares, &shared) || !mha_multiply(shared, rows, &shared);
  at.shared_k = mha_layout_add(layout, sizeof(float), shared, s->d, 1);
  at.shared_v = mha_layout_add(layout, sizeof(float), shared, s->dv, 1);
  at.sums = mha_layout_add(layout, sizeof(double), s->B, sums, 2);
  at.worker_bytes = worker.bytes;
  at.moved = mha_layout_add(layout, sizeof(double), s->B, sums, s->d);
  at.workers =
      mha_layout_add(layout, 1, mha_min(most_tasks(s), n_threads), (int64_t)at.worker_bytes, 1);
  return at;
}

void mha_gradient_use(mha_gradient *call, char *arena, const mha_gradient_scratch *at) {
  const mha_cut_sizes sizes = mha_core_cut_sizes(&call->core);
  mha_layout layout = {0};
  call->core.cut = mha_back_cut(&sizes);
  call->cut = cut_call(&sizes);
  call->shared_k = (float *)(void *)(arena + at->shared_k);
  call->shared_v = (float *)(void *)(arena + at->shared_v);
  call->sums = (double *)(void *)(arena + at->sums);
  call->moved = (double *)(void *)(arena + at->moved);
  call->scratch = arena + at->workers;
  call->scratch_bytes = at->worker_bytes;
  call->scratch_at = mha_back_plan(&sizes, &layout);
}

/* ---- addresses ---- */

/* Row `row` of a head's gradient of entry b, whose packed rows begin at `start`. */
static float *gradient_row(const mha_gradient *call, const mha_gradient_heads *heads, int64_t b,
                           int64_t start, int64_t row, int64_t head) {
  return heads->data +
         mha_core_entry(&call->core, b, start, heads->batch_stride, heads->row_stride) +
         row * heads->row_stride + head * heads->head_stride;
}

/* One of a group's shares, as heads. */
static mha_gradient_heads share_of(const mha_gradient *call, float *shared, int64_t share,
                                   int64_t size) {
  const mha_visibility *v = &call->core.visibility;
  const int64_t rows = (v->query_starts ? 1 : v->B) * v->Lk;
  const mha_gradient_heads heads = {shared + share * rows * size, v->Lk * size, size,
                                    call->cut.shares * rows * size};
  return heads;
}

/* Rows of entry b: packed those of the sequence, otherwise all, whatever its length. */
static int64_t rows_of(const mha_visibility *v, int64_t b, bool keys) {
  if (v->query_starts)
    return keys ? mha_key_count(v, b) : mha_query_count(v, b);
  return keys ? v->Lk : v->Lq;
}

static void clear_rows(const mha_gradient *call, const mha_gradient_heads *heads, int64_t b,
                       int64_t start, mha_range rows, int64_t head, int64_t size) {
  for (int64_t j = rows.begin; heads->data && j < rows.end; j++)
    memset(gradient_row(call, heads, b, start, j, head), 0, (size_t)size * sizeof(float));
}

/* Puts dense rows where they belong, or adds them to what is there. */
static void deliver(const mha_gradient *call, const mha_gradient_heads *heads, bool add, int64_t b,
                    int64_t start, mha_range rows, int64_t head, const float *from, int64_t size) {
  for (int64_t j = rows.begin; heads->data && j < rows.end; j++, from += size) {
    float *to = gradient_row(call, heads, b, start, j, head);
    if (j + MHA_ROWS_AHEAD < rows.end)
      mha_memory_fetch(to + MHA_ROWS_AHEAD * heads->row_stride, 1, 0, (size_t)size * sizeof *to);
    if (add)
      mha_vector_add(to, from, size);
    else
      memcpy(to, from, (size_t)size * sizeof *to);
  }
}

/* ---- one tile ---- */

static void make_nan(float *numbers, int64_t n) {
  for (int64_t c = 0; c < n; c++)
    numbers[c] = NAN;
}

/* A bad query makes NaN of its own gradient and of those that it sees, and joins no product. */
static void spread(mha_back *back, mha_range rows, mha_range keys) {
  const mha_core *core = &back->call->core;
  for (int64_t r = rows.begin; r < rows.end; r++) {
    float *gradient = back->gradient + r * back->stride;
    for (int64_t j = keys.begin; back->bad_queries[r] && j < keys.end; j++) {
      if (gradient[j - keys.begin] == 0.0f)
        continue;
      gradient[j - keys.begin] = 0.0f;
      back->slope = NAN;
      make_nan(back->d_k + j * core->d, core->d);
      make_nan(back->d_v + j * core->dv, core->dv);
      make_nan(back->d_q + r * core->d, core->d);
    }
  }
}

/* dV, dK and dQ of one tile. A scale of 0 lets nothing through, and must not reach a product. */
static mha_status add_products(const mha_back *back, mha_range rows, mha_range keys) {
  const mha_gradient *call = back->call;
  const mha_core *core = &call->core;
  const int64_t n = rows.end - rows.begin;
  const int64_t m = keys.end - keys.begin;
  const int64_t d = core->d;
  const int64_t dv = core->dv;
  const mha_view p = mha_view_rows(back->weights + rows.begin * back->stride, n, m, back->stride);
  const mha_view g = mha_view_rows(back->gradient + rows.begin * back->stride, n, m, back->stride);
  mha_status status = MHA_OK;
  if (call->v.data)
    status = core->engine->multiply(1.0f, mha_view_transposed(p),
                                    mha_view_rows(back->dy + rows.begin * dv, n, dv, dv), 1.0f,
                                    back->d_v + keys.begin * dv, dv);
  if (!status && call->k.data && core->scale != 0.0f)
    status = core->engine->multiply(core->scale, mha_view_transposed(g),
                                    mha_view_rows(back->q + rows.begin * d, n, d, d), 1.0f,
                                    back->d_k + keys.begin * d, d);
  if (!status && call->q.data && core->scale != 0.0f)
    status =
        core->engine->multiply(core->scale, g, mha_view_rows(back->k + keys.begin * d, m, d, d),
                               1.0f, back->d_q + rows.begin * d, d);
  return status;
}

/* ---- one task ---- */

/* P_sink of a row. A sink far above the row's maximum takes everything. */
static double sink_share(const mha_core *core, int64_t h, float max, float sum) {
  const double sink = core->sinks ? exp((double)core->sinks[h] - (double)max) : 0.0;
  return isinf(sink) ? 1.0 : sink / ((double)sum + sink);
}

/* P_sink·D of query r of the tile. */
static double sink_gradient(const mha_back *back, int64_t r) {
  const mha_core *core = &back->call->core;
  const int64_t index = mha_core_row_index(core, back->b, back->h, back->i + r);
  const float max = core->row_max[index];
  return max == -INFINITY
             ? 0.0
             : sink_share(core, back->h, max, core->row_sum[index]) * (double)back->dots[r];
}

static double sink_sum(const mha_back *back) {
  double sum = 0.0;
  for (int64_t r = 0; r < back->live; r++)
    sum += sink_gradient(back, r);
  return sum;
}

/* moved [d] += scale·(Σ_j dS_ij)·Q_i over the tile's queries. */
static void add_moved(const mha_back *back, double *moved) {
  const mha_core *core = &back->call->core;
  for (int64_t r = 0; r < back->live; r++) {
    const double total = core->softcap > 0.0f ? back->totals[r] : sink_gradient(back, r);
    if (total != 0.0)
      mha_vector_gather(moved, back->q + r * core->d, (double)core->scale * total, core->d);
  }
}

/* One tile of queries over the keys that it sees. */
static mha_status back_queries(mha_back *back, int64_t h, int64_t i, int64_t n) {
  const mha_gradient *call = back->call;
  const mha_core *core = &call->core;
  const mha_visibility *v = &core->visibility;
  mha_back_take_queries(back, h, i, n);
  memset(back->d_q, 0, (size_t)(n * core->d) * sizeof(float));
  mha_tile_walk walk = mha_walk_visible(v, &core->cut, back->b, i, back->live);
  mha_status status = MHA_OK;
  while (!status && mha_walk_next(&walk)) {
    status = mha_back_tile(back, walk.rows, walk.keys);
    if (!status && back->has_bad_queries)
      spread(back, walk.rows, walk.keys);
    if (!status)
      status = add_products(back, walk.rows, walk.keys);
  }
  const mha_range rows = {i, i + (call->accumulate_heads ? back->live : n)};
  deliver(call, &call->q, call->accumulate_heads, back->b, mha_query_start(v, back->b), rows, h,
          back->d_q, core->d);
  return status;
}

/* Every chunks-th tile of head h: under a causal mask the later ones have more to do. */
static mha_status back_head(mha_back *back, int64_t h, int64_t chunk) {
  const mha_gradient *call = back->call;
  const mha_visibility *v = &call->core.visibility;
  const int64_t T = call->core.cut.queries;
  const int64_t n = rows_of(v, back->b, false);
  const int64_t index = (back->b * call->cut.chunks + chunk) * v->H + h;
  mha_status status = MHA_OK;
  double sink = 0.0;
  double *moved = call->moved + index * call->core.d;
  back->slope = 0.0;
  if (call->key_sums)
    memset(moved, 0, (size_t)call->core.d * sizeof *moved);
  for (int64_t i = chunk * T; !status && i < n; i += call->cut.chunks * T) {
    status = back_queries(back, h, i, mha_min(T, n - i));
    if (call->sinks)
      sink += sink_sum(back);
    if (call->key_sums)
      add_moved(back, moved);
  }
  call->sums[index] = back->slope;
  call->sums[v->B * call->cut.chunks * v->H + index] = sink;
  return status;
}

/* What the heads of a task made of a key head, to its share or to where it is wanted. */
static void deliver_keys(const mha_back *back, int64_t share) {
  const mha_gradient *call = back->call;
  const mha_core *core = &call->core;
  const int64_t start = mha_key_start(&core->visibility, back->b);
  const bool is_shared = call->cut.shares > 1;
  const bool add = call->accumulate_heads && !is_shared;
  /* rows beyond a length keep what is there */
  const mha_range rows = {0, add ? mha_key_count(&core->visibility, back->b)
                                 : rows_of(&core->visibility, back->b, true)};
  mha_gradient_heads k = call->k;
  mha_gradient_heads v = call->v;
  if (is_shared && k.data)
    k = share_of(call, call->shared_k, share, core->d);
  if (is_shared && v.data)
    v = share_of(call, call->shared_v, share, core->dv);
  deliver(call, &k, add, back->b, start, rows, back->g, back->d_k, core->d);
  deliver(call, &v, add, back->b, start, rows, back->g, back->d_v, core->dv);
}

static mha_status back_task(void *job, int64_t index, int32_t worker) {
  const mha_gradient *call = job;
  const mha_core *core = &call->core;
  const mha_visibility *v = &core->visibility;
  const mha_gradient_cut *cut = &call->cut;
  const int64_t share = index % cut->shares;
  const int64_t b = index / cut->shares / core->G;
  const int64_t g = index / cut->shares % core->G;
  const int64_t first = g * (v->H / core->G) + share / cut->chunks;
  const int64_t rows = rows_of(v, b, true);
  mha_back back = mha_back_begin(call, MHA_BACK_SCALED, worker);
  mha_status status = MHA_OK;
  mha_back_take_keys(&back, b, g);
  memset(back.d_k, 0, (size_t)(rows * core->d) * sizeof(float));
  memset(back.d_v, 0, (size_t)(rows * core->dv) * sizeof(float));
  for (int64_t h = first; !status && h < first + cut->heads; h++)
    status = back_head(&back, h, share % cut->chunks);
  deliver_keys(&back, share);
  return status;
}

/* ---- what several tasks made ---- */

/* Row j of a key head: the shares in their order, onto what is there or onto nothing. */
static void add_shares(const mha_gradient *call, const mha_gradient_heads *whole, float *shared,
                       int64_t b, int64_t g, int64_t j, int64_t size) {
  const mha_visibility *v = &call->core.visibility;
  const int64_t start = mha_key_start(v, b);
  float *row = gradient_row(call, whole, b, start, j, g);
  mha_vector_start_rows(call->accumulate_heads ? 1.0f : 0.0f, row, 1, size, size);
  for (int64_t share = 0; share < call->cut.shares; share++) {
    const mha_gradient_heads heads = share_of(call, shared, share, size);
    mha_vector_add(row, gradient_row(call, &heads, b, start, j, g), size);
  }
}

static mha_status share_task(void *job, int64_t index, int32_t worker) {
  (void)worker;
  const mha_gradient *call = job;
  const mha_core *core = &call->core;
  const int64_t b = index / core->G;
  const int64_t g = index % core->G;
  const mha_visibility *v = &core->visibility;
  /* rows beyond a length keep what is there */
  const int64_t n = call->accumulate_heads ? mha_key_count(v, b) : rows_of(v, b, true);
  for (int64_t j = 0; j < n; j++) {
    if (call->k.data)
      add_shares(call, &call->k, call->shared_k, b, g, j, core->d);
    if (call->v.data)
      add_shares(call, &call->v, call->shared_v, b, g, j, core->dv);
  }
  return MHA_OK;
}

static mha_status merge_shares(mha_gradient *call, const mha_threads *threads) {
  const mha_core *core = &call->core;
  const mha_visibility *v = &core->visibility;
  const double numbers = (double)call->cut.shares * (double)v->Lk * (double)(core->d + core->dv);
  const mha_task_list list = {.work = share_task,
                              .job = call,
                              .n_tasks = v->B * core->G,
                              .operations = MHA_OPERATIONS_PER_READ * numbers * (double)core->G};
  return call->cut.shares > 1 ? mha_parallel_run(threads, &list) : MHA_OK;
}

/* A gradient per head: the tasks' sums in their order. Both enter the loss with a minus. */
static void merge_sums(const mha_gradient *call, const double *sums, float *gradient) {
  const mha_visibility *v = &call->core.visibility;
  for (int64_t h = 0; gradient && h < v->H; h++) {
    double sum = 0.0;
    for (int64_t k = 0; k < v->B * call->cut.chunks; k++)
      sum -= sums[k * v->H + h];
    gradient[h] = (float)(call->accumulate ? (double)gradient[h] + sum : sum);
  }
}

static void merge_moved(const mha_gradient *call) {
  const mha_core *core = &call->core;
  const mha_visibility *v = &core->visibility;
  const int64_t group = v->H / core->G;
  memset(call->key_sums, 0, (size_t)(core->G * core->d) * sizeof *call->key_sums);
  for (int64_t k = 0; k < v->B * call->cut.chunks; k++)
    for (int64_t h = 0; h < v->H; h++)
      for (int64_t c = 0; c < core->d; c++)
        call->key_sums[h / group * core->d + c] += call->moved[(k * v->H + h) * core->d + c];
}

/* Packed rows behind the last sequence belong to nobody. */
static void clear_unowned(const mha_gradient *call) {
  const mha_core *core = &call->core;
  const mha_visibility *v = &core->visibility;
  if (!v->query_starts || call->accumulate_heads)
    return;
  const mha_range queries = {v->query_starts[v->B], v->Lq};
  const mha_range keys = {v->key_starts[v->B], v->Lk};
  for (int64_t h = 0; h < v->H; h++)
    clear_rows(call, &call->q, 0, 0, queries, h, core->d);
  for (int64_t g = 0; g < core->G; g++) {
    clear_rows(call, &call->k, 0, 0, keys, g, core->d);
    clear_rows(call, &call->v, 0, 0, keys, g, core->dv);
  }
}

static bool wants_more_than_bias(const mha_gradient *call) {
  return call->q.data || call->k.data || call->v.data || call->slopes || call->sinks ||
         call->key_sums;
}

mha_status mha_gradient_run(const mha_gradient *given, const mha_threads *threads) {
  mha_gradient call = *given;
  const mha_cut_sizes sizes = mha_core_cut_sizes(&call.core);
  mha_task_list list = {
      .work = back_task, .job = &call, .operations = 2.5 * mha_core_operations(&call.core)};
  if (!task_count(&sizes, &list.n_tasks))
    return MHA_ERROR_OVERFLOW;
  mha_status status = MHA_OK;
  if (wants_more_than_bias(&call))
    status = mha_parallel_run(threads, &list);
  if (!status)
    status = merge_shares(&call, threads);
  if (!status && call.bias)
    status = mha_gradient_bias_run(&call, threads);
  if (status)
    return status;
  clear_unowned(&call);
  if (call.key_sums)
    merge_moved(&call);
  merge_sums(&call, call.sums, call.slopes);
  merge_sums(&call, call.sums + sizes.B * call.cut.chunks * sizes.H, call.sinks);
  return MHA_OK;
}
