/* Owns mha_backward: the reading of what comes from above and of the gradients that are wanted,
 * each of which lies as the thing itself. The forward call's own arguments are forward_call's. */
#include "base/error.h"
#include "base/tensor.h"
#include "cache_args.h"
#include "forward_call.h"
#include "layer/backward.h"
#include "masks.h"

/* ---- gradients ---- */

/* Fails with WEIGHTS where a gradient is wanted of something that is not there. */
static mha_status require_thing(const float *gradient, bool is_there, const char *name,
                                const char *thing, mha_error *error) {
  return gradient && !is_there
             ? mha_fail(error, MHA_ERROR_WEIGHTS, "%s is given; rule: NULL without %s", name, thing)
             : MHA_OK;
}

static mha_status check_things(const mha_backward_call *c, const mha_forward_args *given,
                               mha_error *error) {
  const mha_backward_args *a = &c->back;
  const mha_weights *w = c->forward.weights;
  const mha_core *core = &c->forward.core;
  const bool norm = w->config.norm != MHA_NORM_NONE;
  const struct {
    const float *gradient;
    bool is_there;
    const char *name, *thing;
  } all[] = {{a->d_key, given->key != NULL, "back.d_key", "args.key"},
             {a->d_value, given->value != NULL, "back.d_value", "args.value"},
             {a->d_wq, w->query.matrix != NULL, "back.d_wq", "a matrix Wq"},
             {a->d_wk, w->key.matrix != NULL, "back.d_wk", "a matrix Wk"},
             {a->d_wv, w->value.matrix != NULL, "back.d_wv", "a matrix Wv"},
             {a->d_wo, w->output.matrix != NULL, "back.d_wo", "a matrix Wo"},
             {a->d_bq, w->query.bias != NULL, "back.d_bq", "a bias bq"},
             {a->d_bk, w->key.bias != NULL, "back.d_bk", "a bias bk"},
             {a->d_bv, w->value.bias != NULL, "back.d_bv", "a bias bv"},
             {a->d_bo, w->output.bias != NULL, "back.d_bo", "a bias bo"},
             {a->d_query_norm, norm, "back.d_query_norm", "config.norm"},
             {a->d_key_norm, norm, "back.d_key_norm", "config.norm"},
             {a->d_bias, core->visibility.bias != NULL, "back.d_bias", "rules.bias"},
             {a->d_alibi_slopes, core->visibility.alibi_slopes != NULL, "back.d_alibi_slopes",
              "rules.alibi_slopes"},
             {a->d_sinks, core->sinks != NULL, "back.d_sinks", "sinks"}};
  mha_status status = MHA_OK;
  for (size_t k = 0; !status && k < sizeof all / sizeof *all; k++)
    status = require_thing(all[k].gradient, all[k].is_there, all[k].name, all[k].thing, error);
  return status;
}

/* ---- addresses ---- */

/* The gradient of an input, with the input's strides. Three of them may be the columns of one
 * block. */
static mha_status add_input(mha_backward_call *c, const char *name, const float *gradient,
                            const mha_rows_shape *shape, mha_error *error) {
  mha_address_ranges *ranges = &c->forward.ranges;
  mha_rows_shape s = *shape;
  mha_status status = gradient ? mha_resolve_strides(&s, true, name, error) : MHA_OK;
  if (!status)
    status = mha_ranges_add_rows(ranges, name, gradient, shape, true, error);
  const mha_step steps[] = {{s.batch, s.batch_stride}, {s.length, s.row_stride}};
  if (!status)
    mha_ranges_have_steps(ranges, name, steps, 2, s.width);
  return status;
}

/* The gradient of a matrix, whose stored rows are a leading dimension apart. */
static mha_status add_matrix(mha_backward_call *c, const char *name, const float *gradient,
                             const mha_projection *p, mha_error *error) {
  mha_address_ranges *ranges = &c->forward.ranges;
  const bool by_in = c->forward.weights->orientation != MHA_OUT_IN;
  const mha_projection g = mha_projection_gradient(p, by_in);
  /* a leading dimension without a matrix was not checked */
  const int64_t elements =
      gradient ? (p->in - 1) * g.in_stride + (p->out - 1) * g.out_stride + 1 : 0;
  const mha_step row = {by_in ? p->in : p->out, p->given_ld};
  const mha_status status =
      mha_ranges_add(ranges, name, gradient, elements, sizeof(float), true, error);
  if (!status)
    mha_ranges_have_steps(ranges, name, &row, 1, by_in ? p->out : p->in);
  return status;
}

static mha_status add_arrays(mha_backward_call *c, mha_error *error) {
  const mha_backward_args *a = &c->back;
  const mha_forward_call *f = &c->forward;
  const mha_weights *w = f->weights;
  mha_status status = add_input(c, "back.d_query", a->d_query, &f->query, error);
  if (!status)
    status = add_input(c, "back.d_key", a->d_key, &f->key, error);
  if (!status)
    status = add_input(c, "back.d_value", a->d_value, &f->value, error);
  if (!status)
    status = add_matrix(c, "back.d_wq", a->d_wq, &w->query, error);
  if (!status)
    status = add_matrix(c, "back.d_wk", a->d_wk, &w->key, error);
  if (!status)
    status = add_matrix(c, "back.d_wv", a->d_wv, &w->value, error);
  if (!status)
    status = add_matrix(c, "back.d_wo", a->d_wo, &w->output, error);
  if (!status)
    status = mha_masks_add_bias_gradient(&f->core.visibility, "back.d_bias", a->d_bias,
                                         &c->forward.ranges, error);
  return status;
}

static mha_status add_vectors(mha_backward_call *c, mha_error *error) {
  const mha_backward_args *a = &c->back;
  const mha_weights *w = c->forward.weights;
  const mha_config *k = &w->config;
  const bool full = k->norm == MHA_NORM_FULL;
  const struct {
    const char *name;
    const float *data;
    int64_t n;
  } all[] = {{"back.d_bq", a->d_bq, w->query.out},
             {"back.d_bk", a->d_bk, w->key.out},
             {"back.d_bv", a->d_bv, w->value.out},
             {"back.d_bo", a->d_bo, w->output.out},
             {"back.d_query_norm", a->d_query_norm, full ? w->query.out : k->head_size},
             {"back.d_key_norm", a->d_key_norm, full ? w->key.out : k->head_size},
             {"back.d_alibi_slopes", a->d_alibi_slopes, k->n_heads},
             {"back.d_sinks", a->d_sinks, k->n_heads}};
  mha_status status = MHA_OK;
  for (size_t i = 0; !status && i < sizeof all / sizeof *all; i++)
    status = mha_ranges_add(&c->forward.ranges, all[i].name, all[i].data, all[i].n, sizeof(float),
                            true, error);
  return status;
}

/* What comes from above. */
static mha_status add_dy(mha_backward_call *c, mha_error *error) {
  const mha_backward_args *a = &c->back;
  mha_rows_shape shape = c->forward.output;
  shape.batch_stride = a->dy_batch_stride;
  shape.row_stride = a->dy_row_stride;
  mha_status status = mha_resolve_strides(&shape, false, "back.dy", error);
  if (!status && shape.batch > 0 && shape.length > 0)
    status = mha_require(a->dy, "back.dy", error);
  c->dy = shape;
  return status ? status
                : mha_ranges_add_rows(&c->forward.ranges, "back.dy", a->dy, &shape, false, error);
}

/* ---- the call ---- */

static mha_status read_back(mha_backward_call *c, const mha_backward_args *given,
                            mha_error *error) {
  mha_backward_args *a = &c->back;
  mha_status status = mha_read_struct(a, sizeof *a, MHA_FIRST_BACKWARD_ARGS, given, "back", error);
  return status ? status : mha_require_flags(a->flags, 0, "back.flags", error);
}

static mha_status read_call(mha_backward_call *c, const mha_forward_args *args,
                            const mha_backward_args *back, mha_error *error) {
  mha_status status = read_back(c, back, error);
  if (!status)
    status = mha_forward_read(&c->forward, args, error);
  if (!status)
    status = check_things(c, args, error);
  if (!status)
    status = add_dy(c, error);
  if (!status)
    status = add_arrays(c, error);
  if (!status)
    status = add_vectors(c, error);
  if (!status)
    status = mha_ranges_check(&c->forward.ranges, error);
  if (status)
    return status;
  c->d_key = args->key ? c->back.d_key : c->back.d_query;
  c->d_value = args->value ? c->back.d_value : c->d_key;
  if (!c->back.tape)
    return MHA_OK;
  const mha_kept_size size = mha_forward_kept_size(&c->forward);
  c->kept = &c->back.tape->kept;
  return mha_tape_check(c->back.tape, c->forward.weights, &size, error);
}

mha_status mha_backward(mha_context *context, const mha_weights *weights,
                        const mha_forward_args *args, const mha_backward_args *back,
                        mha_error *error) {
  mha_backward_call c = {.forward = {.names = &mha_forward_names_of_args,
                                     .weights = weights,
                                     .context = context,
                                     .back = true}};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(weights, "weights", error);
  if (status)
    return status;
  status = read_call(&c, args, back, error);
  if (!status)
    status = mha_backward_run(&c, error);
  mha_cache_args_end(&c.forward, false);
  return status ? status : mha_succeed(error);
}
