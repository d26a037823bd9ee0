/* Owns the description of step 3: where each head's rows lie, what becomes of a score, and the
 * sizes that follow. */
#include "core.h"

#include "engine/softmax.h"
#include "runtime/parallel.h"

#include <math.h>

/* ---- addresses ---- */

int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i) {
  const mha_visibility *v = &core->visibility;
  return v->query_starts ? h * v->Lq + v->query_starts[b] + i : (b * v->H + h) * v->Lq + i;
}

int64_t mha_core_entry(const mha_core *core, int64_t b, int64_t start, int64_t batch_stride,
                       int64_t row_stride) {
  return core->visibility.query_starts ? start * row_stride : b * batch_stride;
}

mha_view mha_core_query_rows(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                             int64_t i, int64_t n, int64_t size) {
  const int64_t start = mha_query_start(&core->visibility, b);
  const float *data = (const float *)heads->data +
                      mha_core_entry(core, b, start, heads->batch_stride, heads->row_stride) +
                      i * heads->row_stride + h * heads->head_stride;
  return mha_view_rows(data, n, size, heads->row_stride);
}

mha_view mha_core_queries(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n) {
  return mha_core_query_rows(core, &core->q, b, h, i, n, core->d);
}

mha_stored mha_core_rows(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                         mha_range keys, int64_t size) {
  const mha_visibility *v = &core->visibility;
  const int64_t g = h / (v->H / core->G);
  const int64_t row = v->cached ? mha_cache_rows_at(v->cached, b, keys.begin) : keys.begin;
  const int64_t entry = v->cached ? 0
                                  : mha_core_entry(core, b, mha_key_start(v, b),
                                                   heads->batch_stride, heads->row_stride);
  const int64_t first = entry + row * heads->row_stride + g * heads->head_stride;
  const mha_stored rows = {mha_element_at(heads->data, heads->element, first),
                           heads->element,
                           keys.end - keys.begin,
                           size,
                           heads->row_stride,
                           1};
  return rows;
}

int64_t mha_core_run(const mha_core *core, int64_t j) {
  const mha_cache_rows *cached = core->visibility.cached;
  return cached ? mha_cache_rows_run(cached, j) : INT64_MAX;
}

bool mha_core_is_scattered(const mha_core *core, mha_range keys) {
  return keys.end - keys.begin > mha_core_run(core, keys.begin);
}

mha_view mha_core_fetch(const mha_core *core, const mha_heads *heads, int64_t b, int64_t h,
                        mha_range keys, int64_t size, float *scratch) {
  if (!mha_core_is_scattered(core, keys)) {
    const mha_stored rows = mha_core_rows(core, heads, b, h, keys, size);
    return mha_numbers_fetch(&rows, scratch);
  }
  for (mha_range run = {keys.begin, keys.begin}; run.begin < keys.end; run.begin = run.end) {
    run.end = run.begin + mha_min(keys.end - run.begin, mha_core_run(core, run.begin));
    const mha_stored rows = mha_core_rows(core, heads, b, h, run, size);
    mha_numbers_gather(&rows, scratch + (run.begin - keys.begin) * size);
  }
  return mha_view_rows(scratch, keys.end - keys.begin, size, size);
}

float *mha_core_output(const mha_core *core, int64_t b, int64_t h, int64_t i) {
  return core->output +
         mha_core_entry(core, b, mha_query_start(&core->visibility, b), core->output_batch_stride,
                        core->output_row_stride) +
         i * core->output_row_stride + h * core->output_head_stride;
}

/* ---- passes ---- */

bool mha_core_serves(const mha_core *core, int64_t b) {
  const mha_visibility *v = &core->visibility;
  const int64_t keys = mha_min(mha_key_count(v, b), mha_key_span(v)); /* a ring has no more */
  return core->pass == MHA_PASS_ALL ||
         mha_cut_entry_is_few(mha_query_count(v, b), keys) == (core->pass == MHA_PASS_FEW);
}

int64_t mha_core_few_queries(const mha_core *core, int64_t b) {
  const mha_visibility *v = &core->visibility;
  return v->query_starts ? mha_query_count(v, b) : v->Lq;
}

/* ---- scores and sizes ---- */

/* Rows that meet each key, up to which multiplying it as it is stored is as fast as widening it
 * first (bench/README.md). */
enum { MOST_STORED_ROWS = 16 };

bool mha_core_multiplies_stored(const mha_core *core, int64_t b) {
  return core->cut.few &&
         mha_core_few_queries(core, b) * (core->visibility.H / core->G) <= MOST_STORED_ROWS;
}

float mha_core_score_factor(const mha_core *core) {
  if (core->cut.laid)
    return core->scale;
  return core->scale == 0.0f ? 0.0f : 1.0f;
}

bool mha_core_scores_are_plain(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  return core->softcap == 0.0f && !v->alibi_slopes && !v->bias && !v->attend;
}

void mha_core_advance_scores(const mha_core *core, mha_stage stage, int64_t b, int64_t h, int64_t i,
                             mha_range keys, float *scores) {
  const int64_t n = keys.end - keys.begin;
  const float factor = mha_core_score_factor(core);
  if (factor != 1.0f)
    mha_row_scale(scores, n, factor);
  if (stage != MHA_STAGE_SCALED && core->softcap > 0.0f)
    mha_row_softcap(scores, n, core->softcap);
  if (stage != MHA_STAGE_SCALED && stage != MHA_STAGE_CAPPED)
    mha_visibility_apply(&core->visibility, b, h, i, keys, scores);
}

float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum) {
  const float sink = core->sinks ? core->sinks[h] : -INFINITY;
  return sink == -INFINITY ? sum : sum + expf(sink - max);
}

mha_cut_sizes mha_core_cut_sizes(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  const mha_cut_sizes sizes = {v->B,
                               v->H,
                               core->G,
                               v->Lq,
                               mha_key_span(v),
                               core->d,
                               core->dv,
                               v->query_starts != NULL,
                               v->left >= 0,
                               core->is_laid,
                               core->k.element != MHA_F32 || core->v.element != MHA_F32,
                               v->cached && v->cached->pages,
                               v->cached != NULL,
                               0};
  return core->pass == MHA_PASS_FEW ? mha_cut_few_of_packed(&sizes) : sizes;
}

double mha_core_operations(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  const double entries = v->query_starts && !v->cached ? 1.0 : (double)v->B;
  const double rows = v->query_starts ? (double)v->Lq : (double)v->B * (double)v->Lq;
  const double numbers = (double)mha_key_span(v) * (double)(core->d + core->dv);
  const double products = 2.0 * numbers * (double)v->H * rows;
  const double reads = MHA_OPERATIONS_PER_READ * entries * numbers * (double)core->G;
  return core->cut.few && reads > products ? reads : products;
}
