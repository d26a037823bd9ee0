/* Owns the weights of a tile of queries once more, and the gradient of its scores:
 *
 *   S = scale·Q·Kᵀ, dP = dO·Vᵀ                     [rows][keys]   products
 *   P = exp(F - max)/denominator                   F: the final scores, by the rules
 *   dP = dP∘factors                                of dropout
 *   dF = P∘(dP - D), D_i = Σ_c dO_ic·O_ic          ("FlashAttention", 2022)
 *   dS = dF∘(1 - (capped/c)²)
 *
 * Five products meet the rows of a head, three of them several times, so they are gathered: a
 * head's rows lie apart, which the BLAS would pay for whenever it packs them. It is also the place
 * where numbers that are not finite are taken out: 0·NaN is NaN and would reach what does not see
 * it. A query that meets one takes no part in products; its gradients become NaN where it sees. */
#include "back.h"

#include "base/memory.h"
#include "dropout.h"
#include "engine/derivative.h"
#include "engine/softmax.h"
#include "engine/vector.h"

#include <math.h>
#include <string.h>

/* Larger tiles are packed less often, smaller ones stay in a cache. */
#ifndef MHA_BACK_QUERIES
#define MHA_BACK_QUERIES 384
#endif
#ifndef MHA_BACK_KEYS
#define MHA_BACK_KEYS 384
#endif
_Static_assert(MHA_EDGE_TILE <= MHA_BACK_KEYS, "the scratch of a task holds MHA_BACK_KEYS keys");

/* ---- the cut ---- */

/* n rows in tiles of at most `most`, none of them much shorter than the others. */
static int64_t share_out(int64_t n, int64_t most) {
  const int64_t tiles = mha_max(mha_divide_up(n, most), 1);
  const int64_t lanes = mha_divide_up(mha_divide_up(n, tiles), MHA_LANES);
  return mha_max(mha_min(lanes * MHA_LANES, most), 1);
}

mha_cut mha_back_cut(const mha_cut_sizes *s) {
  const int64_t keys = share_out(s->span, MHA_BACK_KEYS);
  const mha_cut cut = {.heads = 1,
                       .queries = share_out(s->Lq, MHA_BACK_QUERIES),
                       .tile_keys = keys,
                       .product_keys = keys,
                       .parts = 1};
  return cut;
}

/* ---- scratch ---- */

/* By the largest tiles, so that it grows with the sizes: narrow tiles, too, are no wider. */
static int64_t row_stride(int64_t span) {
  return mha_min(span, MHA_BACK_KEYS);
}

mha_back_offsets mha_back_plan(const mha_cut_sizes *s, mha_layout *layout) {
  const int64_t n = mha_min(s->Lq, MHA_BACK_QUERIES);
  const int64_t keys = row_stride(s->span);
  mha_back_offsets at;
  at.k = mha_layout_add(layout, sizeof(float), s->span, s->d, 1);
  at.v = mha_layout_add(layout, sizeof(float), s->span, s->dv, 1);
  at.d_k = mha_layout_add(layout, sizeof(float), s->span, s->d, 1);
  at.d_v = mha_layout_add(layout, sizeof(float), s->span, s->dv, 1);
  at.q = mha_layout_add(layout, sizeof(float), n, s->d, 1);
  at.dy = mha_layout_add(layout, sizeof(float), n, s->dv, 1);
  at.d_q = mha_layout_add(layout, sizeof(float), n, s->d, 1);
  at.bad_keys = mha_layout_add(layout, 1, s->span, 1, 1);
  at.bad_queries = mha_layout_add(layout, 1, n, 1, 1);
  at.weights = mha_layout_add(layout, sizeof(float), n, keys, 1);
  at.gradient = mha_layout_add(layout, sizeof(float), n, keys, 1);
  at.dots = mha_layout_add(layout, sizeof(float), n, 1, 1);
  at.sums = mha_layout_add(layout, sizeof(double), n, 1, 1);
  at.totals = mha_layout_add(layout, sizeof(double), n, 1, 1);
  at.capped = mha_layout_add(layout, sizeof(float), keys, 1, 1);
  at.factors = mha_layout_add(layout, sizeof(float), keys, 1, 1);
  return at;
}

mha_back mha_back_begin(const mha_gradient *call, mha_back_stage stage, int32_t worker) {
  const mha_back_offsets *at = &call->scratch_at;
  char *base = call->scratch + (size_t)worker * call->scratch_bytes;
  const mha_back back = {.call = call,
                         .stage = stage,
                         .k = (void *)(base + at->k),
                         .v = (void *)(base + at->v),
                         .q = (void *)(base + at->q),
                         .dy = (void *)(base + at->dy),
                         .d_k = (void *)(base + at->d_k),
                         .d_v = (void *)(base + at->d_v),
                         .d_q = (void *)(base + at->d_q),
                         .bad_keys = (void *)(base + at->bad_keys),
                         .bad_queries = (void *)(base + at->bad_queries),
                         .weights = (void *)(base + at->weights),
                         .gradient = (void *)(base + at->gradient),
                         .stride = row_stride(mha_key_span(&call->core.visibility)),
                         .dots = (void *)(base + at->dots),
                         .sums = (void *)(base + at->sums),
                         .totals = (void *)(base + at->totals),
                         .capped = (void *)(base + at->capped),
                         .factors = (void *)(base + at->factors)};
  return back;
}

/* ---- keys ---- */

static void fetch_ahead(const mha_stored *rows, int64_t r) {
  if (r + MHA_ROWS_AHEAD < rows->rows)
    mha_memory_fetch(
        mha_element_at(rows->data, rows->element, (r + MHA_ROWS_AHEAD) * rows->row_stride), 1, 0,
        mha_element_bytes(rows->element, rows->columns));
}

/* Row r of an array of any type as float32; false, and 0, if a number in it is not finite. */
static bool gather_row(float *to, const mha_stored *rows, int64_t r) {
  const void *row = mha_element_at(rows->data, rows->element, r * rows->row_stride);
  fetch_ahead(rows, r);
  if (rows->element == MHA_F32) {
    if (mha_row_copy_finite(to, row, rows->columns))
      return true;
  } else {
    mha_numbers_widen(to, row, rows->element, rows->columns);
    if (mha_row_is_finite(to, rows->columns))
      return true;
  }
  memset(to, 0, (size_t)rows->columns * sizeof *to);
  return false;
}

/* What is bad about a key. A bad V is seen by bad queries alone, or weighs 0; so is a bad K, unless
 * a softcap makes something finite of its scores. */
enum { BAD_K = 1, BAD_V = 2 };

void mha_back_take_keys(mha_back *back, int64_t b, int64_t g) {
  const mha_core *core = &back->call->core;
  const mha_visibility *v = &core->visibility;
  const mha_range keys = mha_present_keys(v, b);
  const int64_t h = g * (v->H / core->G);
  back->b = b;
  back->g = g;
  back->has_bad_keys = false;
  if (mha_range_is_empty(keys) || mha_query_count(v, b) == 0) /* perhaps nobody made them */
    return;
  const mha_stored k_rows = mha_core_rows(core, &core->k, b, h, keys, core->d);
  const mha_stored v_rows = mha_core_rows(core, &core->v, b, h, keys, core->dv);
  for (int64_t j = 0; j < keys.end; j++) {
    const int bad_k = gather_row(back->k + j * core->d, &k_rows, j) ? 0 : BAD_K;
    const int bad_v = gather_row(back->v + j * core->dv, &v_rows, j) ? 0 : BAD_V;
    back->bad_keys[j] = (uint8_t)(bad_k | bad_v);
    back->has_bad_keys |= back->bad_keys[j] != 0;
  }
}

/* ---- queries ---- */

static int64_t row_index(const mha_back *back, int64_t r) {
  return mha_core_row_index(&back->call->core, back->b, back->h, back->i + r);
}

/* D of a row that sees keys, and whether its query is bad. */
static bool judge_query(mha_back *back, const mha_stored *output, int64_t r, bool is_good) {
  const mha_core *core = &back->call->core;
  const int64_t index = row_index(back, r);
  const float *o = (const float *)output->data + r * output->row_stride;
  const float dot = (float)mha_row_dot(back->dy + r * core->dv, o, core->dv);
  const bool is_bad =
      !is_good || !isfinite(core->row_max[index] + core->row_sum[index]) || !isfinite(dot);
  back->dots[r] = is_bad ? NAN : dot;
  return is_bad;
}

static void take_query(mha_back *back, const mha_stored *q, const mha_stored *dy,
                       const mha_stored *output, int64_t r) {
  const mha_core *core = &back->call->core;
  const bool sees = core->row_max[row_index(back, r)] != -INFINITY;
  const bool q_is_good = gather_row(back->q + r * core->d, q, r);
  const bool dy_is_good = gather_row(back->dy + r * core->dv, dy, r);
  fetch_ahead(output, r);
  back->dots[r] = 0.0f;
  back->sums[r] = back->totals[r] = 0.0;
  back->bad_queries[r] = sees && judge_query(back, output, r, q_is_good && dy_is_good);
  back->has_bad_queries |= back->bad_queries[r] != 0;
  if (sees && !back->bad_queries[r])
    return;
  memset(back->q + r * core->d, 0, (size_t)core->d * sizeof(float));
  memset(back->dy + r * core->dv, 0, (size_t)core->dv * sizeof(float));
}

void mha_back_take_queries(mha_back *back, int64_t h, int64_t i, int64_t n) {
  const mha_core *core = &back->call->core;
  back->h = h;
  back->i = i;
  back->live = mha_max(0, mha_min(n, mha_query_count(&core->visibility, back->b) - i));
  back->has_bad_queries = false;
  const mha_heads o = {core->output, MHA_F32, core->output_batch_stride, core->output_row_stride,
                       core->output_head_stride};
  const mha_stored q = mha_stored_view(mha_core_queries(core, back->b, h, i, back->live));
  const mha_stored dy = mha_stored_view(
      mha_core_query_rows(core, &back->call->dy, back->b, h, i, back->live, core->dv));
  const mha_stored output =
      mha_stored_view(mha_core_query_rows(core, &o, back->b, h, i, back->live, core->dv));
  for (int64_t r = 0; r < back->live; r++)
    take_query(back, &q, &dy, &output, r);
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

/* A tile that weighs less has nothing to take it from. */
#define LEAST_WEIGHT 1e-6

/* A shift of its scores changes no softmax, so a row of dF sums to 0, or with a sink to P_sink·D.
 * What rounding has left of that is taken from the keys of its last tile by their weights: a row
 * with few keys, and sums over many rows, would show it. */
static void settle_sum(const mha_back *back, int64_t r, float denominator, const float *weights,
                       float *gradient, int64_t n) {
  const mha_core *core = &back->call->core;
  const double sink = 1.0 - (double)core->row_sum[row_index(back, r)] / (double)denominator;
  const double left = back->sums[r] - (core->sinks ? sink * (double)back->dots[r] : 0.0);
  const double weight = mha_row_sum(weights, n);
  if (weight > LEAST_WEIGHT && isfinite(left))
    mha_vector_add_scaled(gradient, weights, (float)(-left / weight), n);
}

/* Whether a row meets, under a softcap, a K that is not finite: its scores were finite, and its
 * gradients are not. */
static bool meets_bad_key(const mha_back *back, mha_range mine, const float *scores) {
  for (int64_t j = mine.begin; j < mine.end; j++)
    if (back->bad_keys[j] & BAD_K && scores[j - mine.begin] != -INFINITY)
      return true;
  return false;
}

/* From final scores and dP, both of the keys `mine`, to P and dF. */
static void make_final(const mha_back *back, int64_t r, mha_range mine, float *weights,
                       float *gradient) {
  const mha_core *core = &back->call->core;
  const int64_t n = mine.end - mine.begin;
  const float max = core->row_max[row_index(back, r)];
  const float denominator =
      mha_core_denominator(core, back->h, max, core->row_sum[row_index(back, r)]);
  for (int64_t j = 0; back->has_bad_keys && j < n; j++)
    if (back->bad_keys[mine.begin + j])
      weights[j] = -INFINITY;
  back->sums[r] +=
      mha_row_softmax_back(weights, gradient, n, max, 1.0f / denominator, back->dots[r]);
  if (mine.end >= mha_visible_keys(&core->visibility, back->b, back->i + r).end)
    settle_sum(back, r, denominator, weights, gradient, n);
}

/* On from dF, where more than the scale lies between the final scores and q·k. */
static void make_scaled(mha_back *back, int64_t r, mha_range mine, float *weights,
                        float *gradient) {
  const mha_core *core = &back->call->core;
  const mha_visibility *v = &core->visibility;
  const int64_t n = mine.end - mine.begin;
  const double own = (double)(back->i + r) + (double)mha_own_key_offset(v, back->b);
  if (v->alibi_slopes)
    back->slope += mha_row_alibi_back(gradient, (float)((double)mine.begin - own), n);
  if (core->softcap > 0.0f) {
    mha_row_softcap_back(gradient, back->capped, core->softcap, n);
    back->totals[r] += mha_row_sum(gradient, n);
  }
  if (core->dropout.threshold != 0)
    mha_row_multiply(weights, back->factors, n);
}

/* The scaled scores and dP of a row become weights and gradient, for the keys that it may see. */
static void turn_row(mha_back *back, int64_t r, mha_range mine, float *weights, float *gradient) {
  const mha_core *core = &back->call->core;
  const int64_t n = mine.end - mine.begin;
  advance(back, r, mine, weights);
  if (back->has_bad_keys && core->softcap > 0.0f && meets_bad_key(back, mine, weights))
    back->bad_queries[r] = back->has_bad_queries = true;
  if (back->bad_queries[r]) {
    make_bad(weights, gradient, n);
    return;
  }
  if (core->dropout.threshold != 0) {
    mha_dropout_factors(core, back->b, back->h, back->i + r, mine, back->factors);
    mha_row_multiply(gradient, back->factors, n);
  }
  make_final(back, r, mine, weights, gradient);
  if (back->stage == MHA_BACK_SCALED)
    make_scaled(back, r, mine, weights, gradient);
}

static void clear_outside(float *row, mha_range keys, mha_range mine) {
  memset(row, 0, (size_t)(mine.begin - keys.begin) * sizeof *row);
  memset(row + (mine.end - keys.begin), 0, (size_t)(keys.end - mine.end) * sizeof *row);
}

static void finish_row(mha_back *back, int64_t r, mha_range keys) {
  const mha_core *core = &back->call->core;
  float *weights = back->weights + r * back->stride;
  float *gradient = back->gradient + r * back->stride;
  mha_range mine =
      mha_range_intersect(mha_visible_keys(&core->visibility, back->b, back->i + r), keys);
  if (mha_range_is_empty(mine) || core->row_max[row_index(back, r)] == -INFINITY)
    mine.begin = mine.end = keys.begin;
  clear_outside(weights, keys, mine);
  clear_outside(gradient, keys, mine);
  const int64_t first = mine.begin - keys.begin;
  if (!mha_range_is_empty(mine))
    turn_row(back, r, mine, weights + first, gradient + first);
}

/* ---- one tile ---- */

/* A scale of 0 is left to the rules, see mha_core_score_factor. */
static mha_status multiply(const mha_back *back, mha_range rows, mha_range keys) {
  const mha_core *core = &back->call->core;
  const int64_t n = rows.end - rows.begin;
  const int64_t m = keys.end - keys.begin;
  const float scale = core->scale == 0.0f ? 1.0f : core->scale;
  const mha_view q = mha_view_rows(back->q + rows.begin * core->d, n, core->d, core->d);
  const mha_view k = mha_view_rows(back->k + keys.begin * core->d, m, core->d, core->d);
  const mha_view dy = mha_view_rows(back->dy + rows.begin * core->dv, n, core->dv, core->dv);
  const mha_view v = mha_view_rows(back->v + keys.begin * core->dv, m, core->dv, core->dv);
  const int64_t first = rows.begin * back->stride;
  const mha_status status = core->engine->multiply(scale, q, mha_view_transposed(k), 0.0f,
                                                   back->weights + first, back->stride);
  return status ? status
                : core->engine->multiply(1.0f, dy, mha_view_transposed(v), 0.0f,
                                         back->gradient + first, back->stride);
}

mha_status mha_back_tile(mha_back *back, mha_range rows, mha_range keys) {
  const mha_status status = multiply(back, rows, keys);
  for (int64_t r = rows.begin; !status && r < rows.end; r++)
    finish_row(back, r, keys);
  return status;
}
