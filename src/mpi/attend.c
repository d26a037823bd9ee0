/* Owns mha_mpi_attend: step 3 by positions, for those who project themselves. */
#include "base/error.h"
#include "base/tensor.h"
#include "call.h"
#include "ring.h"

#include <string.h>

typedef struct core_call {
  mha_mpi_ring ring;
  mha_mpi_spread spread;
  mha_attend_args args;
  mha_results results;
  mha_tensor_shape q, k, v, output;
  const mha_tensor *keys, *values; /* the caller's */
} core_call;

/* ---- reading ---- */

static mha_status check_sizes(const core_call *c, mha_error *error) {
  const mha_tensor_shape *q = &c->q;
  const mha_tensor_shape *k = &c->k;
  const mha_tensor_shape *v = &c->v;
  if (q->batch != k->batch || q->batch != v->batch || k->length != v->length ||
      k->heads != v->heads || q->size != k->size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "k is [%lld][%lld][%lld][%lld], v [%lld][%lld][%lld][%lld]; rule: for q of "
                    "[%lld][%lld][%lld][%lld] [B][Lk][G][d] and [B][Lk][G][dv]",
                    (long long)k->batch, (long long)k->length, (long long)k->heads,
                    (long long)k->size, (long long)v->batch, (long long)v->length,
                    (long long)v->heads, (long long)v->size, (long long)q->batch,
                    (long long)q->length, (long long)q->heads, (long long)q->size);
  if (q->heads % k->heads != 0)
    return mha_fail(error, MHA_ERROR_HEADS, "q has %lld heads, k %lld; rule: a multiple of them",
                    (long long)q->heads, (long long)k->heads);
  return MHA_OK;
}

static mha_status read_tensors(core_call *c, const mha_tensor *q, const mha_tensor *k,
                               const mha_tensor *v, mha_error *error) {
  mha_address_ranges ranges = {.n = 0};
  mha_status status = mha_tensor_read(q, "q", &c->q, &ranges, error);
  if (!status)
    status = mha_tensor_read_stored(k, "k", &c->k, &ranges, error);
  if (!status)
    status = mha_tensor_read_stored(v, "v", &c->v, &ranges, error);
  if (!status)
    status = check_sizes(c, error);
  c->keys = k;
  c->values = v;
  const mha_attend_args *a = &c->args;
  c->output = (mha_tensor_shape){
      c->q.batch,           c->q.length,          c->q.heads, c->v.size, a->output_batch_stride,
      a->output_row_stride, a->output_head_stride};
  if (!status)
    status = mha_tensor_read_output(a->output, "args.output", &c->output, &ranges, error);
  return status ? status : mha_ranges_check(&ranges, error);
}

static mha_status read_args(core_call *c, const mha_attend_args *args, mha_error *error) {
  mha_status status =
      mha_read_struct(&c->args, sizeof c->args, MHA_FIRST_ATTEND_ARGS, args, "args", error);
  if (!status && c->args.results)
    status = mha_read_struct(&c->results, sizeof c->results, MHA_FIRST_RESULTS, c->args.results,
                             "results", error);
  if (!status && (c->results.weights || c->results.average))
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "results.%s is given where rows are spread; rule: NULL",
                      c->results.weights ? "weights" : "average");
  if (!status && c->args.n_sequences != 0)
    status =
        mha_fail(error, MHA_ERROR_UNSUPPORTED,
                 "args.n_sequences is %lld where rows are spread; rule: 0, packed rows are not",
                 (long long)c->args.n_sequences);
  return status;
}

static void fill_ring(core_call *c) {
  mha_mpi_ring *r = &c->ring;
  r->B = c->q.batch;
  r->H = c->q.heads;
  r->G = c->k.heads;
  r->d = c->q.size;
  r->dv = c->v.size;
  r->order = c->spread.order;
}

static void add_facts(mha_mpi_facts *facts, const core_call *c) {
  mha_mpi_fact(facts, "spread.order", c->spread.order);
  mha_mpi_fact(facts, "q.batch", c->q.batch);
  mha_mpi_fact(facts, "q.size", c->q.size);
  mha_mpi_fact(facts, "k.heads", c->k.heads);
  mha_mpi_fact(facts, "v.size", c->v.size);
  mha_mpi_fact(facts, "results.log_sum_exp", c->results.log_sum_exp != NULL);
  mha_mpi_local_rules_facts(facts, &c->ring.rules, c->q.batch, 0);
}

/* ---- rows that travel ---- */

/* As float32, dense [B][Lk][G][size]. */
static mha_status gather(const mha_tensor *given, const mha_tensor_shape *s, float *to,
                         mha_error *error) {
  mha_status status = MHA_OK;
  for (int64_t b = 0; !status && b < s->batch; b++)
    for (int64_t i = 0; !status && i < s->length; i++)
      for (int64_t h = 0; !status && h < s->heads; h++, to += s->size) {
        const int64_t at = b * s->batch_stride + i * s->row_stride + h * s->head_stride;
        const char *from = (const char *)given->data + mha_element_bytes(given->element, at);
        status = mha_element_convert(given->element, from, MHA_F32, to, s->size, error);
      }
  return status;
}

static void write_output(const core_call *c) {
  const mha_tensor_shape *s = &c->output;
  const float *from = c->ring.concat;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < s->length; i++)
      for (int64_t h = 0; h < s->heads; h++, from += s->size)
        memcpy(c->args.output + b * s->batch_stride + i * s->row_stride + h * s->head_stride, from,
               (size_t)s->size * sizeof *from);
}

/* ---- the call ---- */

static mha_status ready(core_call *c, mha_error *error) {
  mha_layout layout = {0};
  mha_status status = mha_mpi_ring_check(&c->ring, error);
  if (status)
    return status;
  mha_mpi_ring_plan(&c->ring, &layout);
  status = mha_mpi_team_provide(c->ring.team, &layout, error);
  return status ? status : mha_mpi_ring_reserve(&c->ring, error);
}

static mha_status run(core_call *c, const mha_tensor *q, mha_error *error) {
  mha_mpi_ring *r = &c->ring;
  float *k = r->traveller[0];
  const mha_tensor rows = {
      q->data,         c->q.batch,       c->q.length, c->q.heads, c->q.size, c->q.batch_stride,
      c->q.row_stride, c->q.head_stride, 1,           MHA_F32,    0};
  mha_error unsaid;
  mha_status gathered = gather(c->keys, &c->k, k, error);
  if (!gathered)
    gathered = gather(c->values, &c->v, k + r->B * r->keys.rows * r->G * r->d, error);
  mha_status status = mha_mpi_ring_run(r, &rows, gathered ? &unsaid : error);
  if (!status && !gathered)
    status = mha_mpi_ring_finish(r, error);
  return gathered ? gathered : status;
}

static mha_status attend(core_call *c, const mha_tensor *q, const mha_tensor *k,
                         const mha_tensor *v, const mha_attend_args *args,
                         const mha_mpi_spread *spread, mha_error *error) {
  mha_mpi_facts facts = {.n = 0};
  mha_status status = mha_require(c->ring.context, "context", error);
  if (!status)
    status = mha_mpi_spread_read(spread, &c->spread, error);
  if (!status)
    status = read_args(c, args, error);
  if (!status)
    status = read_tensors(c, q, k, v, error);
  if (!status)
    status = mha_mpi_local_rules(c->args.rules, c->q.heads, 0, c->q.heads, &c->ring.rules, error);
  fill_ring(c);
  if (!status)
    add_facts(&facts, c);
  status = mha_mpi_agree(c->ring.team, MHA_MPI_CORE, status, &facts, error);
  if (status)
    return status;
  status = mha_mpi_ring_gather(&c->ring, c->q.length, c->k.length, error);
  if (!status)
    status = ready(c, error);
  status = mha_mpi_agree(c->ring.team, MHA_MPI_READY, status, NULL, error);
  if (status)
    return status;
  mha_mpi_ring_place(&c->ring);
  status = mha_mpi_agree(c->ring.team, MHA_MPI_DONE, run(c, q, error), NULL, error);
  if (status)
    return status;
  mha_mpi_ring_show(&c->ring, c->results.log_sum_exp);
  write_output(c);
  return MHA_OK;
}

mha_status mha_mpi_attend(mha_mpi_team *team, mha_context *context, const mha_tensor *q,
                          const mha_tensor *k, const mha_tensor *v, const mha_attend_args *args,
                          const mha_mpi_spread *spread, mha_error *error) {
  mha_error unwanted = {.status = MHA_OK};
  mha_error *told = error ? error : &unwanted;
  core_call c = {.ring = {.team = team, .context = context}};
  mha_status status = mha_require(team, "team", told);
  if (!status)
    status = attend(&c, q, k, v, args, spread, told);
  return status ? status : mha_succeed(told);
}
