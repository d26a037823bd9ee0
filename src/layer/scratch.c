/* Owns the layout of a call's scratch: the layer's buffers, then what step 3 takes. */
#include "scratch.h"

#include "attention/attention.h"
#include "base/error.h"
#include "engine/packed.h"

/* A call's sizes in its context, and offsets of the workspace's arrays, in the order of its struct.
 */
typedef struct plan {
  mha_cut_sizes sizes;
  mha_layout layout;
  size_t q, k, v, concat, partial, widened;
  int64_t widened_floats;
  mha_attention_scratch attention;
} plan;

static size_t add_rows(mha_layout *layout, const mha_projection *projection, int64_t B, int64_t L) {
  return mha_layout_add(layout, sizeof(float), B, L, projection->out);
}

/* Room for matrices that are widened, for as many workers as a list of projections has work for. */
static void add_widened(plan *p, const mha_weights *weights, int64_t entries, int64_t queries,
                        int64_t keys, int32_t n_threads) {
  const struct {
    const mha_projection *projection;
    int64_t length;
  } all[] = {{&weights->query, queries},
             {&weights->key, keys},
             {&weights->value, keys},
             {&weights->output, queries}};
  int64_t together = 0;
  for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
    int64_t rows = 0;
    int64_t tasks = 0;
    p->layout.overflow |=
        !mha_multiply(entries, all[k].length, &rows) ||
        !mha_projection_tasks(all[k].projection, entries, all[k].length, &tasks) ||
        !mha_add(together, tasks, &together);
    p->widened_floats = mha_max(p->widened_floats, mha_widened_floats(all[k].projection, rows));
  }
  p->widened =
      mha_layout_add(&p->layout, sizeof(float), mha_min(together, n_threads), p->widened_floats, 1);
}

static void add_buffers(plan *p, const mha_weights *weights, const mha_call_size *size,
                        int32_t n_threads) {
  const mha_cut_sizes *s = &size->core;
  const int64_t entries = s->packed ? 1 : s->B;
  const int64_t inputs = mha_partial_floats(&weights->query) + mha_partial_floats(&weights->key) +
                         mha_partial_floats(&weights->value);
  const int64_t here = size->kept ? 0 : entries;
  p->q = add_rows(&p->layout, &weights->query, here, s->Lq);
  p->k = add_rows(&p->layout, &weights->key, here, size->key_rows);
  p->v = add_rows(&p->layout, &weights->value, here, size->key_rows);
  /* the concatenation is as wide as the output projection's input */
  p->concat = mha_layout_add(&p->layout, sizeof(float), here, s->Lq, weights->output.in);
  p->partial = mha_layout_add(&p->layout, sizeof(float),
                              mha_max(inputs, mha_partial_floats(&weights->output)), 1, 1);
  add_widened(p, weights, entries, s->Lq, size->new_rows, n_threads);
}

/* Whether keys are laid out is the context's affair; rows of Q and V must be such as kernels take.
 */
static mha_cut_sizes sizes_in(const mha_context *context, const mha_call_size *size) {
  mha_kernel_shape shapes[MHA_LAID_SHAPES];
  mha_cut_sizes sizes = size->core;
  sizes.laid = context->kernels && mha_laid_shapes(&sizes, &size->strides, shapes) > 0;
  return sizes;
}

mha_status mha_scratch_overflow(const mha_call_size *size, mha_error *error) {
  const mha_cut_sizes *s = &size->core;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s is %lld, %s %lld, %s %lld; rule: their products with the heads and widths "
                  "must not overflow",
                  size->names.batch, (long long)s->B, size->names.query_length, (long long)s->Lq,
                  size->names.key_length, (long long)s->span);
}

static mha_status make_plan(const mha_context *context, const mha_weights *weights,
                            const mha_call_size *size, plan *p, mha_error *error) {
  const plan nothing = {.layout = {.bytes = size->before}};
  *p = nothing;
  p->sizes = sizes_in(context, size);
  const mha_cut_sizes *s = &p->sizes;
  if (weights)
    add_buffers(p, weights, size, context->threads.n);
  p->attention = mha_attention_plan(s, context->threads.n, &p->layout);
  if (p->layout.bytes ==
      0) /* rows that go to a cache need none; arrays of no bytes lie somewhere */
    (void)mha_layout_add(&p->layout, 1, 1, 1, 1);
  if (!p->layout.overflow)
    return MHA_OK;
  return mha_scratch_overflow(size, error);
}

mha_laid_strides mha_scratch_strides(const mha_weights *weights) {
  const mha_laid_strides strides = {weights->query.out, weights->value.out};
  return strides;
}

mha_status mha_scratch_measure(const mha_context *context, const mha_weights *weights,
                               const mha_call_size *size, size_t *bytes, mha_error *error) {
  plan p;
  const mha_status status = make_plan(context, weights, size, &p, error);
  *bytes = p.layout.bytes;
  return status;
}

/* ---- kernels ---- */

enum { MOST_SHAPES = MHA_LAID_SHAPES + 4 * MHA_PACKED_SHAPES };

static int add_packed(const mha_projection *p, mha_kernel_shape *shapes) {
  return p->packed ? mha_packed_shapes(p->in, p->out, shapes) : 0;
}

static mha_status generate(mha_context *context, const mha_weights *weights,
                           const mha_call_size *size, mha_error *error) {
  mha_kernel_shape shapes[MOST_SHAPES];
  int n = 0;
  if (weights) {
    n += add_packed(&weights->query, shapes + n);
    n += add_packed(&weights->key, shapes + n);
    n += add_packed(&weights->value, shapes + n);
    n += add_packed(&weights->output, shapes + n);
  }
  const mha_cut_sizes sizes = sizes_in(context, size);
  if (mha_cut_call(&sizes).laid)
    n += mha_laid_shapes(&sizes, &size->strides, shapes + n);
  const mha_status status = mha_kernels_prepare(context->kernels, shapes, n);
  if (status)
    return mha_fail(error, status,
                    "the call's kernels need memory that can be run; rule: it must be there, and "
                    "the system must allow it");
  return MHA_OK;
}

mha_status mha_scratch_provide(mha_context *context, const mha_weights *weights,
                               const mha_call_size *sizes, int n, size_t bytes, mha_error *error) {
  mha_kernels *kernels = context->kernels;
  const void *mark = kernels ? mha_kernels_mark(kernels) : NULL;
  mha_status status = MHA_OK;
  for (int k = 0; !status && kernels && k < n; k++)
    status = generate(context, weights, &sizes[k], error);
  if (!status)
    status = mha_context_grow(context, bytes, error);
  if (status && kernels)
    mha_kernels_undo(kernels, mark);
  return status;
}

/* ---- taking ---- */

mha_status mha_scratch_take(mha_context *context, const mha_weights *weights,
                            const mha_call_size *size, mha_core *core, mha_scratch *w,
                            mha_error *error) {
  plan p;
  mha_status status = make_plan(context, weights, size, &p, error);
  if (!status)
    status = mha_scratch_provide(context, weights, size, 1, p.layout.bytes, error);
  if (status)
    return status;
  if (weights) {
    w->q = (float *)(void *)(context->arena + p.q);
    w->k = (float *)(void *)(context->arena + p.k);
    w->v = (float *)(void *)(context->arena + p.v);
    w->concat = (float *)(void *)(context->arena + p.concat);
    w->partial = (float *)(void *)(context->arena + p.partial);
    w->widening.room = (float *)(void *)(context->arena + p.widened);
    w->widening.floats = p.widened_floats;
  }
  core->engine = context->engine;
  core->is_laid = p.sizes.laid;
  mha_attention_use(core, context->arena, &p.attention, context->kernels, &size->strides);
  return MHA_OK;
}
