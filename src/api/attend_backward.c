/* Owns mha_attend_backward: the way back through step 3 alone, on tensors of the caller's. The
 * forward call's own arguments are attend's. */
#include "attend.h"
#include "attention/attention.h"
#include "base/error.h"
#include "layer/back_scratch.h"
#include "masks.h"

typedef struct backward_call {
  mha_attend_call attend; /* the call whose way back it is */
  mha_attend_backward_args back;
  mha_tensor_shape dy; /* [B][Lq][H][dv] */
  mha_back_scratch scratch;
} backward_call;

/* ---- reading ---- */

static mha_status read_back(backward_call *c, const mha_attend_backward_args *given,
                            mha_error *error) {
  mha_attend_backward_args *a = &c->back;
  mha_status status =
      mha_read_struct(a, sizeof *a, MHA_FIRST_ATTEND_BACKWARD_ARGS, given, "back", error);
  if (!status)
    status = mha_require_flags(a->flags, 0, "back.flags", error);
  c->attend.use = a->log_sum_exp ? MHA_ATTEND_BACK : MHA_ATTEND_AGAIN;
  return status;
}

static mha_status add_dy(backward_call *c, mha_error *error) {
  const mha_attend_backward_args *a = &c->back;
  const mha_tensor_shape *q = &c->attend.q;
  const mha_tensor_shape shape = {q->batch,         q->length,          q->heads,
                                  c->attend.v.size, a->dy_batch_stride, a->dy_row_stride,
                                  a->dy_head_stride};
  c->dy = shape;
  return mha_tensor_read_rows(a->dy, "back.dy", &c->dy, &c->attend.ranges, error);
}

/* A tensor may be spread over entries and heads by strides of 0; its gradient may not. Gradients
 * may lie side by side in one block, as the parts of [B][L][3][H][d]. */
static mha_status add_gradient(backward_call *c, const char *name, const float *data,
                               const mha_tensor_shape *s, mha_error *error) {
  mha_address_ranges *ranges = &c->attend.ranges;
  const mha_step steps[] = {
      {s->batch, s->batch_stride}, {s->length, s->row_stride}, {s->heads, s->head_stride}};
  if (data && mha_tensor_overlaps_itself(s))
    return mha_fail(error, MHA_ERROR_OVERLAP,
                    "%s has batch, row and head strides %lld, %lld, %lld; rule: no two elements of "
                    "a gradient share an address",
                    name, (long long)s->batch_stride, (long long)s->row_stride,
                    (long long)s->head_stride);
  const mha_status status = mha_tensor_add_range(ranges, s, name, data, MHA_F32, true, error);
  if (!status)
    mha_ranges_have_steps(ranges, name, steps, 3, s->size);
  return status;
}

static mha_status add_per_head(backward_call *c, const char *name, const float *gradient,
                               bool is_there, const char *thing, mha_error *error) {
  if (gradient && !is_there)
    return mha_fail(error, MHA_ERROR_WEIGHTS, "%s is given; rule: NULL without %s", name, thing);
  return mha_ranges_add(&c->attend.ranges, name, gradient, c->attend.q.heads, sizeof(float), true,
                        error);
}

static mha_status add_gradients(backward_call *c, mha_error *error) {
  const mha_attend_backward_args *a = &c->back;
  const mha_core *core = &c->attend.core;
  const mha_visibility *v = &core->visibility;
  mha_status status = add_gradient(c, "back.d_q", a->d_q, &c->attend.q, error);
  if (!status)
    status = add_gradient(c, "back.d_k", a->d_k, &c->attend.k, error);
  if (!status)
    status = add_gradient(c, "back.d_v", a->d_v, &c->attend.v, error);
  if (!status && a->d_bias && !v->bias)
    status =
        mha_fail(error, MHA_ERROR_WEIGHTS, "back.d_bias is given; rule: NULL without rules.bias");
  if (!status)
    status = mha_masks_add_bias_gradient(v, "back.d_bias", a->d_bias, &c->attend.ranges, error);
  if (!status)
    status = add_per_head(c, "back.d_alibi_slopes", a->d_alibi_slopes, v->alibi_slopes != NULL,
                          "rules.alibi_slopes", error);
  if (!status)
    status = add_per_head(c, "back.d_sinks", a->d_sinks, core->sinks != NULL, "rules.sinks", error);
  return status;
}

/* Rows of the statistics: [B][H][Lq]. */
static int64_t statistic_count(const mha_core *core) {
  const mha_visibility *v = &core->visibility;
  return (v->query_starts ? 1 : v->B) * v->H * v->Lq;
}

static mha_status read_call(backward_call *c, const mha_tensor *q, const mha_tensor *k,
                            const mha_tensor *v, const mha_attend_args *args,
                            const mha_attend_backward_args *back, mha_error *error) {
  mha_status status = read_back(c, back, error);
  if (!status)
    status = mha_attend_read(&c->attend, q, k, v, args, error);
  if (!status)
    status = add_dy(c, error);
  if (!status)
    status = add_gradients(c, error);
  if (!status)
    status = mha_ranges_add(&c->attend.ranges, "back.log_sum_exp", c->back.log_sum_exp,
                            statistic_count(&c->attend.core), sizeof(float), false, error);
  return status ? status : mha_ranges_check(&c->attend.ranges, error);
}

/* ---- computing ---- */

/* The statistics that a log-sum-exp stands for: P = exp(F - lse)/1. */
static void use_log_sum_exp(const backward_call *c, mha_core *core) {
  const int64_t n = statistic_count(core);
  core->row_max = c->scratch.kept.row_max;
  core->row_sum = c->scratch.kept.row_sum;
  for (int64_t r = 0; r < n; r++) {
    core->row_max[r] = c->back.log_sum_exp[r];
    core->row_sum[r] = 1.0f;
  }
}

/* The forward call once more, its output dense in scratch. */
static mha_status attend_again(const backward_call *c, mha_core *core, mha_context *context,
                               mha_error *error) {
  mha_call_size size = mha_attend_size(core);
  size.kept = true;
  size.before = c->scratch.before;
  const mha_status status = mha_scratch_take(context, NULL, &size, core, NULL, error);
  if (status)
    return status;
  core->output = c->scratch.kept.concat;
  core->output_head_stride = core->dv;
  core->output_row_stride = core->visibility.H * core->dv;
  core->output_batch_stride = core->visibility.Lq * core->output_row_stride;
  core->row_max = c->scratch.kept.row_max;
  core->row_sum = c->scratch.kept.row_sum;
  return mha_explain(mha_attention_run(core, &context->threads), error);
}

static mha_gradient_heads gradient_of(float *data, const mha_tensor_shape *s) {
  const mha_gradient_heads heads = {data, s->batch_stride, s->row_stride, s->head_stride};
  return heads;
}

static mha_status back(const backward_call *c, const mha_core *core, mha_context *context) {
  const mha_attend_backward_args *a = &c->back;
  mha_gradient g = {.core = *core,
                    .dy = {a->dy, MHA_F32, c->dy.batch_stride, c->dy.row_stride, c->dy.head_stride},
                    .q = gradient_of(a->d_q, &c->attend.q),
                    .k = gradient_of(a->d_k, &c->attend.k),
                    .v = gradient_of(a->d_v, &c->attend.v),
                    .bias = a->d_bias,
                    .slopes = a->d_alibi_slopes,
                    .sinks = a->d_sinks,
                    .accumulate = a->accumulate != 0,
                    .accumulate_heads = a->accumulate != 0};
  g.core.engine = context->engine;
  mha_gradient_use(&g, context->arena, &c->scratch.gradient);
  return mha_gradient_run(&g, &context->threads);
}

/* Between entering the context and leaving it. */
static mha_status compute(backward_call *c, mha_context *context, mha_error *error) {
  mha_core core = c->attend.core;
  const mha_call_size size = mha_attend_size(&core);
  const bool again = c->attend.use == MHA_ATTEND_AGAIN;
  mha_status status = mha_back_scratch_take(context, NULL, &size, again, &c->scratch, error);
  if (status)
    return status;
  if (again)
    status = attend_again(c, &core, context, error);
  else
    use_log_sum_exp(c, &core);
  return status ? status : mha_explain(back(c, &core, context), error);
}

mha_status mha_attend_backward(mha_context *context, const mha_tensor *q, const mha_tensor *k,
                               const mha_tensor *v, const mha_attend_args *args,
                               const mha_attend_backward_args *given, mha_error *error) {
  backward_call c = {.attend = {.use = MHA_ATTEND_BACK}};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = read_call(&c, q, k, v, args, given, error);
  if (!status)
    status = mha_context_enter(context, error);
  if (status)
    return status;
  status = compute(&c, context, error);
  mha_context_leave(context);
  return status ? status : mha_succeed(error);
}
