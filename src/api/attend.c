/* Owns mha_attend: step 3 alone, on tensors that the caller projected. */
#include "attention/attention.h"
#include "attention/observe.h"
#include "base/error.h"
#include "base/tensor.h"
#include "layer/scratch.h"
#include "rules.h"

static mha_heads heads_of(const void *data, int32_t element, const mha_tensor_shape *s) {
  const mha_heads heads = {data, element, s->batch_stride, s->row_stride, s->head_stride};
  return heads;
}

static mha_status read_output(mha_core *core, mha_address_ranges *ranges,
                              const mha_attend_args *args, const mha_tensor_shape *q, int64_t dv,
                              mha_error *error) {
  mha_tensor_shape s = {q->batch,
                        q->length,
                        q->heads,
                        dv,
                        args->output_batch_stride,
                        args->output_row_stride,
                        args->output_head_stride};
  const mha_status status = mha_tensor_read_output(args->output, "args.output", &s, ranges, error);
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

static mha_status read_call(mha_core *core, const mha_tensor *q, const mha_tensor *k,
                            const mha_tensor *v, const mha_attend_args *given, mha_error *error) {
  mha_attend_args args;
  mha_asked asked;
  mha_address_ranges all = {.n = 0};
  mha_address_ranges *ranges = &all;
  mha_tensor_shape qs = {0};
  mha_tensor_shape ks = {0};
  mha_tensor_shape vs = {0};
  mha_status status =
      mha_read_struct(&args, sizeof args, MHA_FIRST_ATTEND_ARGS, given, "args", error);
  if (!status)
    status = mha_rules_read(&asked, args.rules, args.results, error);
  if (!status)
    status = mha_tensor_read(q, "q", &qs, ranges, error);
  if (!status)
    status = mha_tensor_read_stored(k, "k", &ks, ranges, error);
  if (!status)
    status = mha_tensor_read_stored(v, "v", &vs, ranges, error);
  if (!status)
    status = check_fit(&qs, &ks, &vs, error);
  if (!status)
    status = check_meant(&args, q, k, error);
  if (!status)
    status = check_sequences(&args, &asked, &qs, &core->visibility.B, error);
  if (!status)
    status = read_output(core, ranges, &args, &qs, vs.size, error);
  if (status)
    return status;
  core->visibility.H = qs.heads;
  core->visibility.Lq = qs.length;
  core->visibility.Lk = ks.length;
  core->q = heads_of(q->data, MHA_F32, &qs);
  core->k = heads_of(k->data, k->element, &ks);
  core->v = heads_of(v->data, v->element, &vs);
  core->G = ks.heads;
  core->d = qs.size;
  core->dv = vs.size;
  const mha_rules_defaults defaults = {mha_default_scale(qs.size), 0.0f, NULL};
  status = mha_rules_apply(&asked, false, &defaults, core, ranges, error);
  return status ? status : mha_ranges_check(ranges, error);
}

/* Between entering the context and leaving it. */
static mha_status compute(mha_core *core, mha_context *context, mha_error *error) {
  const mha_call_size size = {mha_core_cut_sizes(core),
                              0,
                              0,
                              {core->q.row_stride, core->v.row_stride},
                              {"q.batch", "q.length", "k.length"}};
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
  mha_core core = {.G = 0};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = read_call(&core, q, k, v, args, error);
  if (!status)
    status = mha_context_enter(context, error);
  if (status)
    return status;
  status = compute(&core, context, error);
  mha_context_leave(context);
  return status ? status : mha_succeed(error);
}
