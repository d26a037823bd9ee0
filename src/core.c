/* Owns the description of step 3: scale, softcap and sinks, the views of each head's rows, and the
 * product that makes scores. */
#include "core.h"

#include "error.h"
#include "softmax.h"

#include <math.h>

/* ---- rules ---- */

static mha_status check_sinks(const float *sinks, int64_t H, mha_error *error) {
  for (int64_t h = 0; sinks && h < H; h++)
    if (isnan(sinks[h]) || sinks[h] == INFINITY)
      return mha_fail(error, MHA_ERROR_VALUE,
                      "sinks[%lld] is %g; rule: finite, or -inf for no sink", (long long)h,
                      (double)sinks[h]);
  return MHA_OK;
}

mha_status mha_core_rules(mha_core *core, const mha_attention *rules, float scale, float softcap,
                          mha_error *error) {
  core->scale = rules->flags & MHA_SCALE ? rules->scale : scale;
  core->softcap = rules->flags & MHA_SOFTCAP || rules->softcap != 0.0f ? rules->softcap : softcap;
  core->sinks = rules->sinks;
  mha_status status = mha_require_flags(rules->flags, MHA_SCALE | MHA_SOFTCAP | MHA_WINDOW,
                                        "attention.flags", error);
  if (!status)
    status = mha_require_finite(core->scale, "scale", error);
  if (!status)
    status = mha_require_finite(core->softcap, "softcap", error);
  if (!status && core->softcap < 0.0f)
    return mha_fail(error, MHA_ERROR_VALUE, "softcap is %g; rule: at least 0",
                    (double)core->softcap);
  return status ? status : check_sinks(core->sinks, core->visibility.H, error);
}

/* ---- addresses ---- */

int64_t mha_core_row_index(const mha_core *core, int64_t b, int64_t h, int64_t i) {
  const mha_visibility *v = &core->visibility;
  return v->query_starts ? h * v->Lq + v->query_starts[b] + i : (b * v->H + h) * v->Lq + i;
}

/* Entry b begins at its own batch stride or, packed, at its first row. */
static int64_t entry_offset(bool packed, int64_t b, int64_t start, int64_t batch_stride,
                            int64_t row_stride) {
  return packed ? start * row_stride : b * batch_stride;
}

/* Rows [i, i + n) of one head: [n][size]. */
static mha_view head_rows(const mha_heads *heads, bool packed, int64_t b, int64_t start,
                          int64_t head, int64_t i, int64_t n, int64_t size) {
  const float *data = heads->data +
                      entry_offset(packed, b, start, heads->batch_stride, heads->row_stride) +
                      i * heads->row_stride + head * heads->head_stride;
  return mha_view_rows(data, n, size, heads->row_stride);
}

static mha_view query_rows(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n) {
  const mha_visibility *v = &core->visibility;
  return head_rows(&core->q, v->query_starts != NULL, b, mha_query_start(v, b), h, i, n, core->d);
}

static mha_view key_rows(const mha_core *core, int64_t b, int64_t h, mha_range keys) {
  const mha_visibility *v = &core->visibility;
  const int64_t g = h / (v->H / core->G);
  return head_rows(&core->k, v->key_starts != NULL, b, mha_key_start(v, b), g, keys.begin,
                   keys.end - keys.begin, core->d);
}

mha_view mha_core_values(const mha_core *core, int64_t b, int64_t h, mha_range keys) {
  const mha_visibility *v = &core->visibility;
  const int64_t g = h / (v->H / core->G);
  return head_rows(&core->v, v->key_starts != NULL, b, mha_key_start(v, b), g, keys.begin,
                   keys.end - keys.begin, core->dv);
}

float *mha_core_output(const mha_core *core, int64_t b, int64_t h, int64_t i) {
  const mha_visibility *v = &core->visibility;
  return core->output +
         entry_offset(v->query_starts != NULL, b, mha_query_start(v, b), core->output_batch_stride,
                      core->output_row_stride) +
         i * core->output_row_stride + h * core->output_head_stride;
}

/* ---- scores ---- */

mha_status mha_core_scores(const mha_core *core, int64_t b, int64_t h, int64_t i, int64_t n,
                           mha_range keys, float *scores, int64_t stride) {
  const mha_view q = query_rows(core, b, h, i, n);
  const mha_view k = key_rows(core, b, h, keys);
  /* A scale of 0 must not reach the BLAS: 0·NaN is NaN. */
  const bool zero = core->scale == 0.0f;
  const mha_status status =
      mha_blas_multiply(zero ? 1.0f : core->scale, q, mha_view_transposed(k), 0.0f, scores, stride);
  for (int64_t r = 0; zero && r < n; r++)
    mha_row_scale(scores + r * stride, keys.end - keys.begin, 0.0f);
  return status;
}

float mha_core_denominator(const mha_core *core, int64_t h, float max, float sum) {
  const float sink = core->sinks ? core->sinks[h] : -INFINITY;
  return sink == -INFINITY ? sum : sum + expf(sink - max);
}

double mha_core_operations(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  const double entries = v->query_starts ? 1.0 : (double)v->B;
  return 2.0 * entries * (double)v->H * (double)v->Lq * (double)v->Lk *
         (double)(core->d + core->dv);
}
