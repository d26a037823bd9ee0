/* Owns the layout of a call's scratch: the layer's buffers, then what step 3 takes. */
#include "scratch.h"

#include "attention/attention.h"
#include "base/error.h"
#include "project.h"

/* Offsets of the workspace's arrays; the order is that of the struct. */
typedef struct plan {
  mha_layout layout;
  size_t q, k, v, concat, partial;
  mha_attention_scratch attention;
} plan;

static size_t add_rows(mha_layout *layout, const mha_projection *projection, int64_t B, int64_t L) {
  return mha_layout_add(layout, sizeof(float), B, L, projection->out);
}

static void add_buffers(plan *p, const mha_weights *weights, const mha_call_size *size) {
  const mha_cut_sizes *s = &size->core;
  const int64_t entries = s->packed ? 1 : s->B;
  const int64_t inputs = mha_partial_floats(&weights->query) + mha_partial_floats(&weights->key) +
                         mha_partial_floats(&weights->value);
  p->q = add_rows(&p->layout, &weights->query, entries, s->Lq);
  p->k = add_rows(&p->layout, &weights->key, entries, size->key_rows);
  p->v = add_rows(&p->layout, &weights->value, entries, size->key_rows);
  /* the concatenation is as wide as the output projection's input */
  p->concat = mha_layout_add(&p->layout, sizeof(float), entries, s->Lq, weights->output.in);
  p->partial = mha_layout_add(&p->layout, sizeof(float),
                              mha_max(inputs, mha_partial_floats(&weights->output)), 1, 1);
}

static mha_status make_plan(const mha_weights *weights, const mha_call_size *size,
                            int32_t n_threads, plan *p, mha_error *error) {
  const mha_cut_sizes *s = &size->core;
  const plan nothing = {.layout = {0}};
  *p = nothing;
  if (weights)
    add_buffers(p, weights, size);
  p->attention = mha_attention_plan(s, n_threads, &p->layout);
  if (p->layout.bytes ==
      0) /* rows that go to a cache need none; arrays of no bytes lie somewhere */
    (void)mha_layout_add(&p->layout, 1, 1, 1, 1);
  if (!p->layout.overflow)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s is %lld, %s %lld, %s %lld; rule: their products with the heads and widths "
                  "must not overflow",
                  size->names.batch, (long long)s->B, size->names.query_length, (long long)s->Lq,
                  size->names.key_length, (long long)s->span);
}

mha_status mha_scratch_measure(const mha_weights *weights, const mha_call_size *size,
                               int32_t n_threads, size_t *bytes, mha_error *error) {
  plan p;
  const mha_status status = make_plan(weights, size, n_threads, &p, error);
  *bytes = p.layout.bytes;
  return status;
}

mha_status mha_scratch_take(mha_context *context, const mha_weights *weights,
                            const mha_call_size *size, mha_core *core, mha_scratch *w,
                            mha_error *error) {
  plan p;
  mha_status status = make_plan(weights, size, context->threads.n, &p, error);
  if (!status)
    status = mha_context_grow(context, p.layout.bytes, error);
  if (status)
    return status;
  if (weights) {
    w->q = (float *)(void *)(context->arena + p.q);
    w->k = (float *)(void *)(context->arena + p.k);
    w->v = (float *)(void *)(context->arena + p.v);
    w->concat = (float *)(void *)(context->arena + p.concat);
    w->partial = (float *)(void *)(context->arena + p.partial);
  }
  core->engine = context->engine;
  mha_attention_use(core, context->arena, &p.attention);
  return MHA_OK;
}
