/* Owns mha_attend: step 3 alone, on tensors that the caller projected. */
#include "blas.h"
#include "call.h"
#include "error.h"
#include "memory.h"
#include "weights.h"

/* ---- tensors ---- */

/* Strides of [B][L][heads][size]. */
typedef struct tensor_shape {
  int64_t batch, length, heads, size;
  int64_t batch_stride, row_stride, head_stride;
} tensor_shape;

static mha_status make_dense(tensor_shape *s, const char *name, mha_error *error) {
  s->head_stride = s->size;
  if (mha_multiply(s->heads, s->size, &s->row_stride) &&
      mha_multiply(s->length, s->row_stride, &s->batch_stride))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s has %lld rows of %lld heads of %lld; rule: the product must not overflow",
                  name, (long long)s->length, (long long)s->heads, (long long)s->size);
}

static mha_status check_strides(const tensor_shape *s, const char *name, mha_error *error) {
  if (s->row_stride < s->size || s->head_stride < 0 || s->batch_stride < 0)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has batch, row and head strides %lld, %lld, %lld; rule: none is negative "
                    "and the row stride at least the size, %lld",
                    name, (long long)s->batch_stride, (long long)s->row_stride,
                    (long long)s->head_stride, (long long)s->size);
  if (s->row_stride > MHA_BLAS_MAX || s->size > MHA_BLAS_MAX)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has row stride %lld and size %lld; rule: at most %lld, the BLAS's integer",
                    name, (long long)s->row_stride, (long long)s->size, (long long)MHA_BLAS_MAX);
  return MHA_OK;
}

/* Adds the tensor, from its first to behind its last element, to the call's ranges. */
static mha_status add_tensor(mha_address_ranges *ranges, const tensor_shape *s, const char *name,
                             const float *data, bool is_output, mha_error *error) {
  int64_t batches = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t elements = 0;
  if (s->batch == 0 || s->length == 0)
    return MHA_OK;
  if (!mha_multiply(s->batch - 1, s->batch_stride, &batches) ||
      !mha_multiply(s->length - 1, s->row_stride, &rows) ||
      !mha_multiply(s->heads - 1, s->head_stride, &heads) || !mha_add(batches, rows, &elements) ||
      !mha_add(elements, heads, &elements) || !mha_add(elements, s->size, &elements))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has batch, row and head strides %lld, %lld, %lld; rule: its extent must "
                    "not overflow",
                    name, (long long)s->batch_stride, (long long)s->row_stride,
                    (long long)s->head_stride);
  return mha_ranges_add(ranges, name, data, elements, sizeof(float), is_output, error);
}

static mha_status read_tensor(const mha_tensor *given, const char *name, mha_heads *heads,
                              tensor_shape *s, mha_address_ranges *ranges, mha_error *error) {
  mha_status status = mha_require(given, name, error);
  if (status)
    return status;
  const tensor_shape shape = {given->batch,      given->length,       given->heads,
                              given->size,       given->batch_stride, given->row_stride,
                              given->head_stride};
  *s = shape;
  if (s->batch < 0 || s->length < 0 || s->heads < 1 || s->size < 1)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "%s is [%lld][%lld][%lld][%lld]; rule: batch and length at least 0, heads and "
                    "size at least 1",
                    name, (long long)s->batch, (long long)s->length, (long long)s->heads,
                    (long long)s->size);
  const bool dense = !s->batch_stride && !s->row_stride && !s->head_stride && !given->size_stride;
  if (!dense && given->size_stride != 1)
    return mha_fail(error, MHA_ERROR_STRIDE,
                    "%s has size stride %lld; rule: 1, since BLAS needs a contiguous dimension",
                    name, (long long)given->size_stride);
  if (dense)
    status = make_dense(s, name, error);
  if (!status)
    status = check_strides(s, name, error);
  if (!status && !given->data && s->batch > 0 && s->length > 0)
    status = mha_fail(error, MHA_ERROR_NULL, "%s.data is NULL; rule: it must be given", name);
  if (!status)
    status = add_tensor(ranges, s, name, given->data, false, error);
  const mha_heads h = {given->data, s->batch_stride, s->row_stride, s->head_stride};
  *heads = h;
  return status;
}

/* ---- the output ---- */

/* Sorted by stride, each dimension of an output must step over all that the ones inside cover. */
static bool output_overlaps_itself(const tensor_shape *s) {
  int64_t stride[3] = {s->batch_stride, s->row_stride, s->head_stride};
  int64_t count[3] = {s->batch, s->length, s->heads};
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < 2; k++)
      if (stride[k] < stride[k + 1]) {
        const int64_t a = stride[k];
        const int64_t n = count[k];
        stride[k] = stride[k + 1];
        count[k] = count[k + 1];
        stride[k + 1] = a;
        count[k + 1] = n;
      }
  int64_t covered = s->size;
  if (s->batch == 0 || s->length == 0)
    return false;
  for (int k = 2; k >= 0; k--) {
    if (count[k] > 1 && stride[k] < covered)
      return true;
    covered += (count[k] - 1) * stride[k];
  }
  return false;
}

static mha_status read_output(mha_call *call, const mha_attend_args *args, const tensor_shape *q,
                              int64_t dv, mha_error *error) {
  tensor_shape s = *q;
  s.size = dv;
  s.batch_stride = args->output_batch_stride;
  s.row_stride = args->output_row_stride;
  s.head_stride = args->output_head_stride;
  mha_status status = MHA_OK;
  if (!s.batch_stride && !s.row_stride && !s.head_stride)
    status = make_dense(&s, "output", error);
  if (!status)
    status = check_strides(&s, "output", error);
  if (!status && !args->output && s.batch > 0 && s.length > 0)
    status = mha_require(args->output, "output", error);
  if (!status)
    status = add_tensor(&call->ranges, &s, "output", args->output, true, error);
  if (!status && output_overlaps_itself(&s))
    status = mha_fail(error, MHA_ERROR_OVERLAP,
                      "output has batch, row and head strides %lld, %lld, %lld; rule: no two "
                      "elements of an output share an address",
                      (long long)s.batch_stride, (long long)s.row_stride, (long long)s.head_stride);
  call->core.output = args->output;
  call->core.output_batch_stride = s.batch_stride;
  call->core.output_row_stride = s.row_stride;
  call->core.output_head_stride = s.head_stride;
  return status;
}

/* ---- the call ---- */

static mha_status check_fit(const tensor_shape *q, const tensor_shape *k, const tensor_shape *v,
                            mha_error *error) {
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
static mha_status check_sequences(const mha_attend_args *args, const mha_attention *rules,
                                  const tensor_shape *q, int64_t *B, mha_error *error) {
  const bool packed = rules->query_starts != NULL;
  *B = packed ? args->n_sequences : q->batch;
  if (!packed)
    return args->n_sequences == 0
               ? MHA_OK
               : mha_fail(error, MHA_ERROR_SIZE,
                          "n_sequences is %lld without query_starts; rule: 0 then",
                          (long long)args->n_sequences);
  if (q->batch != 1)
    return mha_fail(error, MHA_ERROR_SIZE, "q.batch is %lld; rule: 1 with packed input",
                    (long long)q->batch);
  return mha_require_at_least(args->n_sequences, 0, "n_sequences", error);
}

static mha_status read_call(mha_call *call, const mha_tensor *q, const mha_tensor *k,
                            const mha_tensor *v, const mha_attend_args *given, mha_error *error) {
  mha_attend_args args;
  mha_attention rules;
  tensor_shape qs = {0};
  tensor_shape ks = {0};
  tensor_shape vs = {0};
  mha_core *core = &call->core;
  mha_status status = mha_read_struct(&args, sizeof args, sizeof args, given, "args", error);
  if (!status)
    status = mha_call_read_rules(&rules, args.attention, error);
  if (!status)
    status = read_tensor(q, "q", &core->q, &qs, &call->ranges, error);
  if (!status)
    status = read_tensor(k, "k", &core->k, &ks, &call->ranges, error);
  if (!status)
    status = read_tensor(v, "v", &core->v, &vs, &call->ranges, error);
  if (!status)
    status = check_fit(&qs, &ks, &vs, error);
  if (!status)
    status = check_sequences(&args, &rules, &qs, &core->visibility.B, error);
  if (!status)
    status = read_output(call, &args, &qs, vs.size, error);
  if (status)
    return status;
  core->visibility.H = qs.heads;
  core->visibility.Lq = qs.length;
  core->visibility.Lk = ks.length;
  core->G = ks.heads;
  core->d = qs.size;
  core->dv = vs.size;
  return mha_call_apply_rules(call, &rules, false, mha_default_scale(qs.size), 0.0f, error);
}

mha_status mha_attend(mha_context *context, const mha_tensor *q, const mha_tensor *k,
                      const mha_tensor *v, const mha_attend_args *args, mha_error *error) {
  mha_call call = {.ranges = {0}};
  mha_workspace workspace;
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = read_call(&call, q, k, v, args, error);
  if (!status)
    status = mha_context_enter(context, error);
  if (status)
    return status;
  const mha_call_size size = mha_call_size_of(&call);
  if (size.B > 0 && size.Lq > 0) {
    status = mha_context_workspace(context, NULL, &size, &workspace, error);
    if (!status) {
      mha_call_use_workspace(&call, &workspace);
      status = mha_call_run(&call, context);
    }
  }
  mha_context_leave(context);
  return status ? status : mha_succeed(error);
}
