/* Owns mha_project_inputs and mha_project_output: a layer call's steps before and after the
 * attention, for those who do step 3 themselves. */
#include "base/error.h"
#include "forward_call.h"

/* Reads a call that has no cache, without what is asked for beside the output, and where `back`
 * without that. */
static mha_status read_call(mha_forward_call *c, mha_context *context, const mha_weights *weights,
                            const mha_forward_args *given, bool back, mha_error *error) {
  mha_forward_args args;
  *c = (mha_forward_call){
      .names = &mha_forward_names_of_args, .weights = weights, .context = context, .back = back};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(weights, "weights", error);
  if (!status)
    status = mha_read_struct(&args, sizeof args, MHA_FIRST_FORWARD_ARGS, given, "args", error);
  if (!status && args.cache)
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "args.cache is given; rule: NULL, the rows of this call go to no cache");
  if (status)
    return status;
  args.struct_size = sizeof args;
  args.results = NULL;
  args.tape = NULL;
  return mha_forward_read(c, &args, error);
}

static mha_status check_places(const float *q, const float *k, const float *v, mha_error *error) {
  if (q || k || v)
    return !k == !v ? MHA_OK
                    : mha_fail(error, MHA_ERROR_NULL,
                               "%s is NULL and %s is not; rule: both are wanted or none",
                               k ? "v" : "k", k ? "k" : "v");
  return mha_fail(error, MHA_ERROR_NULL, "q, k and v are NULL; rule: something is wanted");
}

static mha_status add_places(mha_forward_call *c, const mha_kept *places, mha_error *error) {
  mha_status status = mha_ranges_add_rows(&c->ranges, "q", places->q, &c->q, true, error);
  if (!status)
    status = mha_ranges_add_rows(&c->ranges, "k", places->k, &c->k, true, error);
  if (!status)
    status = mha_ranges_add_rows(&c->ranges, "v", places->v, &c->v, true, error);
  return status ? status : mha_ranges_check(&c->ranges, error);
}

mha_status mha_project_inputs(mha_context *context, const mha_weights *weights,
                              const mha_forward_args *args, float *q, float *k, float *v,
                              mha_error *error) {
  mha_forward_call c;
  const mha_kept places = {.q = q, .k = k, .v = v};
  mha_status status = read_call(&c, context, weights, args, true, error);
  if (!status)
    status = check_places(q, k, v, error);
  if (!status)
    status = add_places(&c, &places, error);
  c.kept = &places;
  c.attends = q != NULL;
  c.append = k != NULL;
  if (!status && c.query.batch > 0)
    status = mha_forward_project(&c, error);
  return status ? status : mha_succeed(error);
}

mha_status mha_project_output(mha_context *context, const mha_weights *weights,
                              const mha_forward_args *args, const float *concat, mha_error *error) {
  mha_forward_call c;
  const mha_kept none = {0};
  mha_status status = read_call(&c, context, weights, args, false, error);
  const bool has_rows = !status && c.query.batch > 0 && c.query.length > 0;
  if (has_rows)
    status = mha_require(concat, "concat", error);
  if (!status)
    status = mha_ranges_add_rows(&c.ranges, "concat", concat, &c.concat, false, error);
  if (!status)
    status = mha_ranges_check(&c.ranges, error);
  c.kept = &none;
  if (!status && has_rows)
    status = mha_forward_finish(&c, concat, error);
  return status ? status : mha_succeed(error);
}
