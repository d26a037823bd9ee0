/* Owns the layout of a way back's scratch: what lasts through the call, and behind it, in the same
 * place one after the other, what the forward steps, step 3 on its way back, and the projections on
 * theirs take. */
#include "back_scratch.h"

#include "prepare.h"
#include "weight_gradient.h"

typedef struct plan {
  mha_layout layout; /* what lasts */
  size_t bytes;      /* of everything */
  mha_kept_offsets kept;
  size_t d_concat, d_q, d_k, d_v, key_sums, sums_q, sums_k, widened, panels;
  int64_t widened_floats;
  mha_gradient_scratch gradient;
} plan;

/* ---- what lasts ---- */

static size_t add_rows(plan *p, int64_t entries, int64_t length, int64_t width) {
  return mha_layout_add(&p->layout, sizeof(float), entries, length, width);
}

static size_t add_sums(plan *p, const mha_weights *w, int64_t heads) {
  const mha_preparing rows = {.weights = w, .heads = heads};
  return mha_layout_add(&p->layout, sizeof(double), mha_prepare_sums(&rows), 1, 1);
}

static void add_layer(plan *p, const mha_weights *w, const mha_kept_size *s, bool again) {
  const mha_kept_size nothing = {.entries = 0};
  p->kept = mha_kept_plan(w, again ? s : &nothing, &p->layout);
  p->d_concat = add_rows(p, s->entries, s->Lq, w->output.in);
  p->d_q = add_rows(p, s->entries, s->Lq, w->query.out);
  p->d_k = add_rows(p, s->entries, s->Lk, w->key.out);
  p->d_v = add_rows(p, s->entries, s->Lk, w->value.out);
  p->key_sums = mha_layout_add(&p->layout, sizeof(double), w->key.out, 1, 1);
  p->sums_q = add_sums(p, w, w->config.n_heads);
  p->sums_k = add_sums(p, w, w->config.n_kv_heads);
}

/* Step 3 alone: its output where it is computed again, and the row statistics. */
static void add_core(plan *p, const mha_cut_sizes *s, int64_t entries, bool again) {
  int64_t width = 0;
  p->layout.overflow |= !mha_multiply(s->H, s->dv, &width);
  p->kept.concat = add_rows(p, again ? entries : 0, s->Lq, width);
  p->kept.row_max = add_rows(p, entries, s->Lq, s->H);
  p->kept.row_sum = add_rows(p, entries, s->Lq, s->H);
}

/* ---- what comes and goes ---- */

static void take_larger(plan *p, const mha_layout *layout) {
  p->layout.overflow |= layout->overflow;
  if (layout->bytes > p->bytes)
    p->bytes = layout->bytes;
}

static void add_projections(plan *p, const mha_weights *w, const mha_kept_size *s,
                            int32_t n_threads) {
  const mha_projection *all[] = {&w->query, &w->key, &w->value, &w->output};
  mha_layout layout = {.bytes = p->layout.bytes};
  int64_t rows = 0;
  int64_t tasks = 0;
  layout.overflow |= !mha_multiply(s->entries, mha_max(s->Lq, s->Lk), &rows);
  for (int k = 0; k < 4; k++) {
    const mha_projection back = mha_projection_back(all[k]);
    p->widened_floats = mha_max(p->widened_floats, mha_widened_floats(&back, rows));
    layout.overflow |= !mha_add(tasks, mha_weight_gradient_tasks(all[k]), &tasks);
  }
  p->widened = mha_layout_add(&layout, sizeof(float), n_threads, p->widened_floats, 1);
  p->panels = mha_layout_add(&layout, 1, mha_min(tasks, n_threads),
                             (int64_t)mha_weight_gradient_bytes(), 1);
  take_larger(p, &layout);
}

static mha_status add_forward(plan *p, const mha_context *context, const mha_weights *weights,
                              const mha_call_size *size, mha_error *error) {
  mha_call_size forward = *size;
  mha_layout layout = {0};
  forward.kept = true;
  forward.before = p->layout.bytes;
  const mha_status status = mha_scratch_measure(context, weights, &forward, &layout.bytes, error);
  take_larger(p, &layout);
  return status;
}

/* ---- all of it ---- */

static mha_status make_plan(const mha_context *context, const mha_weights *weights,
                            const mha_call_size *size, bool again, plan *p, mha_error *error) {
  const plan nothing = {.layout = {0}};
  const mha_cut_sizes *s = &size->core;
  const int64_t entries = s->packed ? 1 : s->B;
  const mha_kept_size kept = {entries, s->B, s->Lq, s->span, s->packed};
  mha_status status = MHA_OK;
  *p = nothing;
  if (weights)
    add_layer(p, weights, &kept, again);
  else
    add_core(p, s, entries, again);
  mha_layout layout = {.bytes = p->layout.bytes};
  p->gradient = mha_gradient_plan(s, context->threads.n, &layout);
  take_larger(p, &layout);
  if (weights)
    add_projections(p, weights, &kept, context->threads.n);
  if (again && !p->layout.overflow)
    status = add_forward(p, context, weights, size, error);
  if (p->bytes == 0) /* a call without rows; arrays of no bytes lie somewhere */
    p->bytes = 1;
  if (status || !p->layout.overflow)
    return status;
  return mha_scratch_overflow(size, error);
}

mha_status mha_back_scratch_measure(const mha_context *context, const mha_weights *weights,
                                    const mha_call_size *size, bool again, size_t *bytes,
                                    mha_error *error) {
  plan p;
  const mha_status status = make_plan(context, weights, size, again, &p, error);
  *bytes = status ? 0 : p.bytes;
  return status;
}

static float *floats_at(const mha_context *context, size_t offset) {
  return (float *)(void *)(context->arena + offset);
}

static void place(const mha_context *context, const mha_weights *weights, const plan *p,
                  mha_back_scratch *s) {
  if (weights) {
    s->kept = mha_kept_at(context->arena, &p->kept, weights);
    s->d_concat = floats_at(context, p->d_concat);
    s->d_q = floats_at(context, p->d_q);
    s->d_k = floats_at(context, p->d_k);
    s->d_v = floats_at(context, p->d_v);
    s->key_sums = (double *)(void *)(context->arena + p->key_sums);
    s->sums_q = (double *)(void *)(context->arena + p->sums_q);
    s->sums_k = (double *)(void *)(context->arena + p->sums_k);
    s->widening.room = floats_at(context, p->widened);
    s->widening.floats = p->widened_floats;
    s->panels = context->arena + p->panels;
  } else {
    s->kept.concat = floats_at(context, p->kept.concat);
    s->kept.row_max = floats_at(context, p->kept.row_max);
    s->kept.row_sum = floats_at(context, p->kept.row_sum);
  }
  s->gradient = p->gradient;
  s->before = p->layout.bytes;
}

mha_status mha_back_scratch_take(mha_context *context, const mha_weights *weights,
                                 const mha_call_size *size, bool again, mha_back_scratch *scratch,
                                 mha_error *error) {
  plan p;
  mha_status status = make_plan(context, weights, size, again, &p, error);
  if (!status)
    status = mha_scratch_provide(context, weights, size, again ? 1 : 0, p.bytes, error);
  if (!status)
    place(context, weights, &p, scratch);
  return status;
}
