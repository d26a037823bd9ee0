/* Owns mha_attend: step 3 alone, on tensors that the caller projected. */
#include "attend.h"

#include "attention/attention.h"
#include "attention/observe.h"
#include "base/error.h"
#include "layer/scratch.h"
#include "rules.h"

static mha_heads heads_of(const void *data, int32_t element, const mha_tensor_shape *s) {
  const mha_heads heads = {data, element, s->batch_stride, s->row_stride, s->head_stride};
  return heads;
}

/* On the way back what was written is read, or not looked at. */
static mha_status read_output(mha_attend_call *c, const mha_attend_args *args, mha_error *error) {
  mha_core *core = &c->core;
  mha_tensor_shape s = {c->q.batch,
                        c->q.length,
                        c->q.heads,
                        c->v.size,
                        args->output_batch_stride,
                        args->output_row_stride,
                        args->output_head_stride};
  mha_status status = MHA_OK;
  if (c->use == MHA_ATTEND_FORWARD)
    status = mha_tensor_read_output(args->output, "args.output", &s, &c->ranges, error);
  else if (c->use == MHA_ATTEND_BACK)
    status = mha_tensor_read_rows(args->output, "args.output", &s, &c->ranges, error);
  core->output = args->output;
  core->output_batch_stride = s.batch_stride;
  core->output_row_stride = s.row_stride;
  core->output_head_stride = s.head_stride;
  return status;
}

/* ---- the call ---- */

static mha_status check_fit(const mha_tensor_shape *q, const mha_tensor_shape *k,
                            const mha_tensor_shape *v, mha_error *error) {
  if (k->size != q->size)
    return mha_fail(error, MHA_ERROR_SIZE, "k.size is %lld; rule: d, %lld as in q",
                    (long long)k->size, (long long)q->size);
  if (k->batch != q->batch || v->batch != q->batch)
    return mha_fail(error, MHA_ERROR_SIZE, "k.batch and v.batch are %lld and %lld; rule: B, %lld",
                    (long long)k->batch, (long long)v->batch, (long long)q->batch);
  if (v->length != k->length || v->heads != k->heads)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "v has length %lld and %lld heads; rule: Lk and G, %lld and %lld as in k",
                    (long long)v->length, (long long)v->heads, (long long)k->length,
                    (long long)k->heads);
  if (q->heads % k->heads != 0)
    return mha_fail(error, MHA_ERROR_HEADS,
                    "q.heads is %lld and k.heads %lld; rule: H is a multiple of G",
                    (long long)q->heads, (long long)k->heads);
  return MHA_OK;
}

/* Packed input is one long entry of n_sequences sequences. */
static mha_status check_sequences(const mha_attend_args *args, const mha_asked *asked,
                                  const mha_tensor_shape *q, int64_t *B, mha_error *error) {
  const bool packed = mha_rules_are_packed(asked);
  *B = packed ? args->n_sequences : q->batch;
  if (!packed)
    return args->n_sequences == 0
               ? MHA_OK
               : mha_fail(error, MHA_ERROR_SIZE,
                          "args.n_sequences is %lld without rules.query_starts; rule: 0 then",
                          (long long)args->n_sequences);
  if (q->batch != 1)
    return mha_fail(error, MHA_ERROR_SIZE, "q.batch is %lld; rule: 1 with packed input",
                    (long long)q->batch);
  mha_status status = mha_require_at_least(args->n_sequences, 0, "args.n_sequences", error);
  if (!status && q->length > 0)
    status = mha_require_meant(args->flags, args->n_sequences, "args.n_sequences", asked,
                               "rules.query_starts", error);
  return status;
}

/* Extents lie beside their pointer, but so do those of a tensor that was half filled in. Those of k
 * and v agree with one another and, in batch, with q. */
static mha_status check_meant(const mha_attend_args *args, const mha_tensor *q, const mha_tensor *k,
                              mha_error *error) {
  const struct {
    int64_t size;
    const char *name;
    const void *given;
    const char *given_name;
  } sizes[] = {{q->batch, "q.batch", q->data, "q.data"},
               {q->batch, "q.batch", args->output, "args.output"},
               {q->length, "q.length", q->data, "q.data"},
               {q->length, "q.length", args->output, "args.output"},
               {k->length, "k.length", k->data, "k.data"}};
  mha_status status = mha_require_flags(args->flags, MHA_ALLOW_EMPTY, "args.flags", error);
  if (!status)
    status = mha_require_reserved(args->reserved, "args.reserved", error);
  for (size_t i = 0; !status && i < sizeof sizes / sizeof *sizes; i++)
    status = mha_require_meant(args->flags, sizes[i].size, sizes[i].name, sizes[i].given,
                               sizes[i].given_name, error);
  return status;
}

mha_status mha_attend_read(mha_attend_call *c, const mha_tensor *q, const mha_tensor *k,
                           const mha_tensor *v, const mha_attend_args *given, mha_error *error) {
  mha_attend_args args;
  mha_asked asked;
  mha_core *core = &c->core;
  mha_address_ranges *ranges = &c->ranges;
  mha_status status =
      mha_read_struct(&args, sizeof args, MHA_FIRST_ATTEND_ARGS, given, "args", error);
  if (!status && c->use != MHA_ATTEND_FORWARD)
    args.results = NULL;
  if (!status && c->use == MHA_ATTEND_AGAIN)
    args.output = NULL;
  if (!status)
    status = mha_rules_read(&asked, args.rules, args.results, error);
  if (!status)
    status = mha_tensor_read(q, "q", &c->q, ranges, error);
  if (!status)
    status = mha_tensor_read_stored(k, "k", &c->k, ranges, error);
  if (!status)
    status = mha_tensor_read_stored(v, "v", &c->v, ranges, error);
  if (!status)
    status = check_fit(&c->q, &c->k, &c->v, error);
  if (!status)
    status = check_meant(&args, q, k, error);
  if (!status)
    status = check_sequences(&args, &asked, &c->q, &core->visibility.B, error);
  if (!status)
    status = read_output(c, &args, error);
  if (status)
    return status;
  core->visibility.H = c->q.heads;
  core->visibility.Lq = c->q.length;
  core->visibility.Lk = c->k.length;
  core->q = heads_of(q->data, MHA_F32, &c->q);
  core->k = heads_of(k->data, k->element, &c->k);
  core->v = heads_of(v->data, v->element, &c->v);
  core->G = c->k.heads;
  core->d = c->q.size;
  core->dv = c->v.size;
  const mha_rules_defaults defaults = {mha_default_scale(c->q.size), 0.0f, NULL};
  return mha_rules_apply(&asked, false, &defaults, core, ranges, error);
}

mha_call_size mha_attend_size(const mha_core *core) {
  const mha_call_size size = {.core = mha_core_cut_sizes(core),
                              .strides = {core->q.row_stride, core->v.row_stride},
                              .names = {"q.batch", "q.length", "k.length"}};
  return size;
}

/* Between entering the context and leaving it. */
static mha_status compute(mha_core *core, mha_context *context, mha_error *error) {
  const mha_call_size size = mha_attend_size(core);
  /* packed rows behind the last sequence are written, also where there is none */
  if ((size.core.B == 0 && !size.core.packed) || size.core.Lq == 0)
    return MHA_OK;
  mha_status status = mha_scratch_take(context, NULL, &size, core, NULL, error);
  if (status)
    return status;
  status = mha_attention_run(core, &context->threads);
  if (!status)
    status = mha_observe(core, &context->threads);
  return mha_explain(status, error);
}

mha_status mha_attend(mha_context *context, const mha_tensor *q, const mha_tensor *k,
                      const mha_tensor *v, const mha_attend_args *args, mha_error *error) {
  mha_attend_call c = {.use = MHA_ATTEND_FORWARD};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_attend_read(&c, q, k, v, args, error);
  if (!status)
    status = mha_ranges_check(&c.ranges, error);
  if (!status)
    status = mha_context_enter(context, error);
  if (status)
    return status;
  status = compute(&c.core, context, error);
  mha_context_leave(context);
  return status ? status : mha_succeed(error);
}
