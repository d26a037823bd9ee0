/* Owns the weights of a tile of queries once more, and the gradient of its scores:
 *
 *   S = scale·Q·Kᵀ, dP = dO·Vᵀ                     [rows][keys]   products
 *   P = exp(F - max)/denominator                   F: the final scores, by the rules
 *   dP = dP∘factors                                of dropout
 *   dF = P∘(dP - D), D_i = Σ_c dO_ic·O_ic          ("FlashAttention", 2022)
 *   dS = dF∘(1 - (capped/c)²)
 *
 * 0·NaN is NaN, so a number that is not finite would reach what does not see it. Where a head has
 * one, rows of Q, K, V and dO with such numbers are replaced by 0 in copies: a query that meets one
 * is bad, takes no part in products, and its gradients become NaN where it sees. */
#include "back.h"

#include "dropout.h"
#include "engine/derivative.h"
#include "engine/softmax.h"
#include "engine/vector.h"

#include <math.h>
#include <string.h>

#ifndef MHA_BACK_QUERIES
#define MHA_BACK_QUERIES MHA_QUERY_TILE
#endif
#ifndef MHA_BACK_KEYS
#define MHA_BACK_KEYS MHA_KEY_TILE
#endif
_Static_assert(MHA_EDGE_TILE <= MHA_BACK_KEYS, "the scratch of a task holds MHA_BACK_KEYS keys");

/* ---- scratch ---- */

mha_cut mha_back_cut(void) {
  const mha_cut cut = {.heads = 1,
                       .queries = MHA_BACK_QUERIES,
                       .tile_keys = MHA_BACK_KEYS,
                       .product_keys = MHA_BACK_KEYS,
                       .parts = 1};
  return cut;
}

static int64_t row_stride(int64_t span) {
  return mha_min(span, MHA_BACK_KEYS);
}

mha_back_offsets mha_back_plan(const mha_cut_sizes *s, mha_layout *layout) {
  const int64_t n = mha_min(s->Lq, MHA_BACK_QUERIES);
  const int64_t keys = row_stride(s->span);
  int64_t d = 0;
  int64_t dv = 0;
  layout->overflow |= !mha_add(s->d, 1, &d) || !mha_add(s->dv, 1, &dv);
  mha_back_offsets at;
  at.weights = mha_layout_add(layout, sizeof(float), n, keys, 1);
  at.gradient = mha_layout_add(layout, sizeof(float), n, keys, 1);
  at.dots = mha_layout_add(layout, sizeof(float), n, 1, 1);
  at.sums = mha_layout_add(layout, sizeof(double), n, 1, 1);
  at.totals = mha_layout_add(layout, sizeof(double), n, 1, 1);
  at.capped = mha_layout_add(layout, sizeof(float), keys, 1, 1);
  at.factors = mha_layout_add(layout, sizeof(float), keys, 1, 1);
  at.keys = mha_layout_add(layout, sizeof(float), keys, d, 1);
  at.values = mha_layout_add(layout, sizeof(float), keys, dv, 1);
  at.queries = mha_layout_add(layout, sizeof(float), n, d, 1);
  at.dy = mha_layout_add(layout, sizeof(float), n, dv, 1);
  at.bad_queries = mha_layout_add(layout, 1, n, 1, 1);
  at.bad_keys = mha_layout_add(layout, 1, keys, 1, 1);
  return at;
}

mha_back mha_back_begin(const mha_gradient *call, mha_back_stage stage, int32_t worker) {
  const mha_back_offsets *at = &call->scratch_at;
  char *base = call->scratch + (size_t)worker * call->scratch_bytes;
  const mha_back back = {.call = call,
                         .stage = stage,
                         .weights = (void *)(base + at->weights),
                         .gradient = (void *)(base + at->gradient),
                         .stride = row_stride(mha_key_span(&call->core.visibility)),
                         .dots = (void *)(base + at->dots),
                         .sums = (void *)(base + at->sums),
                         .totals = (void *)(base + at->totals),
                         .capped = (void *)(base + at->capped),
                         .factors = (void *)(base + at->factors),
                         .key_room = (void *)(base + at->keys),
                         .value_room = (void *)(base + at->values),
                         .query_room = (void *)(base + at->queries),
                         .dy_room = (void *)(base + at->dy),
                         .bad_queries = (void *)(base + at->bad_queries),
                         .bad_keys = (void *)(base + at->bad_keys)};
  return back;
}

/* ---- rows ---- */

/* dO of queries [i, i + n): [n][dv]. */
static mha_view dy_rows(const mha_back *back, int64_t i, int64_t n) {
  const mha_core *core = &back->call->core;
  const mha_heads *dy = &back->call->dy;
  const mha_visibility *v = &core->visibility;
  const int64_t first = (v->query_starts ? mha_query_start(v, back->b) * dy->row_stride
                                         : back->b * dy->batch_stride) +
                        i * dy->row_stride + back->h * dy->head_stride;
  return mha_view_rows((const float *)dy->data + first, n, core->dv, dy->row_stride);
}

/* Keys or values of one tile as float32. */
static mha_view key_rows(const mha_back *back, const mha_heads *heads, mha_range keys, int64_t size,
                         float *room) {
  const mha_stored rows = mha_core_rows(&back->call->core, heads, back->b, back->h, keys, size);
  return mha_numbers_fetch(&rows, room);
}

static bool are_finite(mha_view rows) {
  for (int64_t r = 0; r < rows.rows; r++)
    if (!mha_row_is_finite(rows.data + r * rows.row_stride, rows.columns))
      return false;
  return true;
}

bool mha_back_is_clean(const mha_back *back) {
  const mha_core *core = &back->call->core;
  const mha_visibility *v = &core->visibility;
  const int64_t n = mha_query_count(v, back->b);
  const mha_range present = mha_present_keys(v, back->b);
  bool clean =
      are_finite(mha_core_queries(core, back->b, back->h, 0, n)) && are_finite(dy_rows(back, 0, n));
  for (int64_t j = present.begin; clean && j < present.end; j += MHA_BACK_KEYS) {
    const mha_range keys = {j, mha_min(j + MHA_BACK_KEYS, present.end)};
    clean = are_finite(key_rows(back, &core->k, keys, core->d, back->key_room)) &&
            are_finite(key_rows(back, &core->v, keys, core->dv, back->value_room));
  }
  return clean;
}

/* The BLAS takes the same way through a copy as through the thing itself: beyond whether there are
 * gaps between rows, bits do not depend on the leading dimension (see poison.c). */
static mha_view copy_rows(mha_view rows, float *room) {
  const int64_t stride = rows.row_stride == rows.columns ? rows.columns : rows.columns + 1;
  for (int64_t r = 0; rows.data != room && r < rows.rows; r++)
    memcpy(room + r * stride, rows.data + r * rows.row_stride, (size_t)rows.columns * sizeof *room);
  return mha_view_rows(room, rows.rows, rows.columns, rows.data == room ? rows.row_stride : stride);
}

static void clear_row(float *room, mha_view copy, int64_t r) {
  memset(room + r * copy.row_stride, 0, (size_t)copy.columns * sizeof *room);
}

/* ---- queries ---- */

static float row_maximum(const mha_back *back, int64_t r) {
  const mha_core *core = &back->call->core;
  return core->row_max[mha_core_row_index(core, back->b, back->h, back->i + r)];
}

static float find_dot(const mha_back *back, int64_t r) {
  const mha_core *core = &back->call->core;
  return (float)mha_row_dot(back->dy.data + r * back->dy.row_stride,
                            mha_core_output(core, back->b, back->h, back->i + r), core->dv);
}

/* Rows of Q and dO that no product may meet become 0: of bad queries, and of those that see no key,
 * which pass nothing back. */
static void replace_queries(mha_back *back) {
  const mha_core *core = &back->call->core;
  const mha_view q = copy_rows(back->q, back->query_room);
  const mha_view dy = copy_rows(back->dy, back->dy_room);
  for (int64_t r = 0; r < back->live; r++) {
    const int64_t index = mha_core_row_index(core, back->b, back->h, back->i + r);
    const bool sees = core->row_max[index] != -INFINITY;
    back->bad_queries[r] = sees && (!isfinite(core->row_max[index] + core->row_sum[index]) ||
                                    !isfinite(back->dots[r]) ||
                                    !mha_row_is_finite(q.data + r * q.row_stride, q.columns) ||
                                    !mha_row_is_finite(dy.data + r * dy.row_stride, dy.columns));
    if (!sees || back->bad_queries[r]) {
      clear_row(back->query_room, q, r);
      clear_row(back->dy_room, dy, r);
    }
  }
  back->q = q;
  back->dy = dy;
}

void mha_back_take(mha_back *back, int64_t i, int64_t n) {
  const mha_core *core = &back->call->core;
  back->i = i;
  back->n = n;
  back->live = mha_max(0, mha_min(n, mha_query_count(&core->visibility, back->b) - i));
  back->q = mha_core_queries(core, back->b, back->h, i, back->live);
  back->dy = dy_rows(back, i, back->live);
  for (int64_t r = 0; r < back->live; r++)
    back->dots[r] = row_maximum(back, r) == -INFINITY ? 0.0f : find_dot(back, r);
  memset(back->sums, 0, (size_t)back->live * sizeof *back->sums);
  memset(back->totals, 0, (size_t)back->live * sizeof *back->totals);
  if (!back->clean)
    replace_queries(back);
}

/* ---- keys ---- */

/* Keys and values with a number that is not finite are seen by bad queries alone, or weigh 0. */
static void replace_keys(mha_back *back) {
  const mha_view k = copy_rows(back->k, back->key_room);
  const mha_view v = copy_rows(back->v, back->value_room);
  for (int64_t j = 0; j < k.rows; j++) {
    back->bad_keys[j] = !mha_row_is_finite(k.data + j * k.row_stride, k.columns) ||
                        !mha_row_is_finite(v.data + j * v.row_stride, v.columns);
    if (back->bad_keys[j]) {
      clear_row(back->key_room, k, j);
      clear_row(back->value_room, v, j);
    }
  }
  back->k = k;
  back->v = v;
}

static void take_keys(mha_back *back, mha_range keys) {
  const mha_core *core = &back->call->core;
  back->k = key_rows(back, &core->k, keys, core->d, back->key_room);
  back->v = key_rows(back, &core->v, keys, core->dv, back->value_room);
  if (!back->clean)
    replace_keys(back);
}

/* ---- one row ---- */

/* Final scores of a row for the keys it may see. What the softcap gave is kept for its derivative.
 */
static void advance(const mha_back *back, int64_t r, mha_range mine, float *scores) {
  const mha_core *core = &back->call->core;
  const int64_t i = back->i + r;
  const int64_t n = mine.end - mine.begin;
  if (core->softcap > 0.0f) {
    memcpy(back->capped, scores, (size_t)n * sizeof *scores);
    mha_core_advance_scores(core, MHA_STAGE_CAPPED, back->b, back->h, i, mine, back->capped);
  }
  mha_core_advance_scores(core, MHA_STAGE_FINAL, back->b, back->h, i, mine, scores);
}

static void make_bad(float *weights, float *gradient, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    gradient[j] = weights[j] == -INFINITY ? 0.0f : NAN;
    weights[j] = 0.0f;
  }
}

/* A shift of its scores changes no softmax, so a row of dF sums to 0, or with a sink to P_sink·D.
 * What rounding has left of that is taken from the keys of its last tile by their weights: sums
 * over many rows, such as the gradient of bk, which is 0, would show it. */
static void settle_sum(const mha_back *back, int64_t r, float denominator, const float *weights,
                       float *gradient, int64_t n) {
  const mha_core *core = &back->call->core;
  const int64_t index = mha_core_row_index(core, back->b, back->h, back->i + r);
  const double sink = 1.0 - (double)core->row_sum[index] / (double)denominator;
  const double left = back->sums[r] - (core->sinks ? sink * (double)back->dots[r] : 0.0);
  const double weight = mha_row_sum(weights, n);
  if (weight > 0.0 && isfinite(left))
    mha_vector_add_scaled(gradient, weights, (float)(-left / weight), n);
}

/* From final scores and dP, both of the n keys from `first` of the tile on, to P and dF. */
static void make_final(const mha_back *back, int64_t r, int64_t first, bool is_last, float *weights,
                       float *gradient, int64_t n) {
  const mha_core *core = &back->call->core;
  const int64_t index = mha_core_row_index(core, back->b, back->h, back->i + r);
  const float max = core->row_max[index];
  const float denominator = mha_core_denominator(core, back->h, max, core->row_sum[index]);
  mha_row_weights(weights, n, max, 1.0f / denominator);
  for (int64_t j = 0; !back->clean && j < n; j++)
    if (back->bad_keys[first + j])
      weights[j] = 0.0f;
  back->sums[r] += mha_row_softmax_back(gradient, weights, back->dots[r], n);
  if (is_last)
    settle_sum(back, r, denominator, weights, gradient, n);
}

/* The scaled scores and dP of a row become weights and gradient, for the keys `mine` of it that it
 * may see, of which the first is number `first` of the tile. */
static void turn_row(mha_back *back, int64_t r, mha_range mine, int64_t first, float *weights,
                     float *gradient) {
  const mha_core *core = &back->call->core;
  const mha_visibility *v = &core->visibility;
  const int64_t n = mine.end - mine.begin;
  const bool drops = core->dropout.threshold != 0;
  advance(back, r, mine, weights);
  if (!back->clean && back->bad_queries[r]) {
    make_bad(weights, gradient, n);
    return;
  }
  if (drops) {
    mha_dropout_factors(core, back->b, back->h, back->i + r, mine, back->factors);
    mha_row_multiply(gradient, back->factors, n);
  }
  make_final(back, r, first, mine.end >= mha_visible_keys(v, back->b, back->i + r).end, weights,
             gradient, n);
  if (back->stage == MHA_BACK_FINAL)
    return;
  if (v->alibi_slopes)
    back->slope += mha_row_alibi_back(
        gradient,
        (float)((double)(mine.begin - back->i - r) - (double)mha_own_key_offset(v, back->b)), n);
  if (core->softcap > 0.0f) {
    mha_row_softcap_back(gradient, back->capped, core->softcap, n);
    back->totals[r] += mha_row_sum(gradient, n);
  }
  if (drops)
    mha_row_multiply(weights, back->factors, n);
}

static void clear_outside(float *row, mha_range keys, mha_range mine) {
  memset(row, 0, (size_t)(mine.begin - keys.begin) * sizeof *row);
  memset(row + (mine.end - keys.begin), 0, (size_t)(keys.end - mine.end) * sizeof *row);
}

static void finish_row(mha_back *back, int64_t r, mha_range keys) {
  const mha_visibility *v = &back->call->core.visibility;
  float *weights = back->weights + r * back->stride;
  float *gradient = back->gradient + r * back->stride;
  mha_range mine = mha_range_intersect(mha_visible_keys(v, back->b, back->i + r), keys);
  if (mha_range_is_empty(mine) || row_maximum(back, r) == -INFINITY)
    mine.begin = mine.end = keys.begin;
  clear_outside(weights, keys, mine);
  clear_outside(gradient, keys, mine);
  const int64_t first = mine.begin - keys.begin;
  if (!mha_range_is_empty(mine))
    turn_row(back, r, mine, first, weights + first, gradient + first);
}

/* ---- one tile ---- */

/* A scale of 0 is left to the rules, see mha_core_score_factor. */
static mha_status multiply(const mha_back *back, mha_range rows) {
  const mha_core *core = &back->call->core;
  const int64_t n = rows.end - rows.begin;
  const float scale = core->scale == 0.0f ? 1.0f : core->scale;
  const mha_status status = core->engine->multiply(
      scale, mha_view_row_block(back->q, rows.begin, n), mha_view_transposed(back->k), 0.0f,
      back->weights + rows.begin * back->stride, back->stride);
  if (status)
    return status;
  return core->engine->multiply(1.0f, mha_view_row_block(back->dy, rows.begin, n),
                                mha_view_transposed(back->v), 0.0f,
                                back->gradient + rows.begin * back->stride, back->stride);
}

mha_status mha_back_tile(mha_back *back, mha_range rows, mha_range keys) {
  take_keys(back, keys);
  const mha_status status = multiply(back, rows);
  for (int64_t r = rows.begin; !status && r < rows.end; r++)
    finish_row(back, r, keys);
  return status;
}
