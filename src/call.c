/* Owns what every call with an attention step goes through, whoever made Q, K and V. */
#include "call.h"

#include "error.h"

mha_status mha_call_read_rules(mha_attention *rules, const mha_attention *given, mha_error *error) {
  if (given)
    return mha_read_struct(rules, sizeof *rules, MHA_FIRST_ATTENTION, given, "attention", error);
  MHA_INIT(rules);
  return MHA_OK;
}

mha_status mha_call_apply_rules(mha_call *call, const mha_attention *rules, bool key_is_query,
                                const mha_core_defaults *defaults, mha_error *error) {
  mha_core *core = &call->core;
  mha_status status = mha_visibility_init(&core->visibility, rules, key_is_query, error);
  if (!status)
    status = mha_core_rules(core, rules, defaults, error);
  if (!status)
    status = mha_visibility_ranges(&core->visibility, rules, &call->ranges, error);
  if (!status)
    status = mha_ranges_add(&call->ranges, "attention.sinks", core->sinks, core->visibility.H,
                            sizeof(float), false, error);
  if (!status)
    status = mha_results_init(&call->results, rules, &core->visibility, &call->ranges, error);
  if (status)
    return status;
  const mha_cut_sizes sizes = mha_core_cut_sizes(core);
  core->cut = mha_cut_call(&sizes);
  return mha_ranges_check(&call->ranges, error);
}

void mha_call_use_workspace(mha_call *call, const mha_workspace *workspace) {
  call->core.row_max = workspace->row_max;
  call->core.row_sum = workspace->row_sum;
  call->core.parts = workspace->parts;
  mha_attention_use_scratch(&call->core, workspace->workers, workspace->worker_bytes);
}

mha_status mha_call_run(const mha_call *call, const mha_context *context) {
  const mha_status status = mha_attention_run(&call->core, &context->threads);
  return status ? status : mha_observe(&call->core, &call->results, &context->threads);
}

mha_status mha_call_explain(mha_status status, mha_error *error) {
  if (status == MHA_ERROR_MEMORY)
    return mha_fail(error, status,
                    "the BLAS finds no memory for its own buffers; rule: it needs some for each "
                    "thread that multiplies");
  return status ? mha_fail(error, status,
                           "a product has a size or a stride beyond the BLAS's integer; rule: all "
                           "of them are at most %lld",
                           (long long)MHA_BLAS_MAX)
                : MHA_OK;
}
