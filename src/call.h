/* What mha_forward and mha_attend share: reading the rules, running the core, giving results. */
#ifndef MHA_SRC_CALL_H
#define MHA_SRC_CALL_H

#include "attention.h"
#include "context.h"
#include "observe.h"

/* One call: step 3 with its rules, what is asked for besides, and all arrays by address. */
typedef struct mha_call {
  mha_core core;
  mha_results results;
  mha_address_ranges ranges;
} mha_call;

/* Copies the caller's rules; NULL = all zero. */
mha_status mha_call_read_rules(mha_attention *rules, const mha_attention *given, mha_error *error);

/* Checks the rules and takes them over into a call whose core has its sizes: B, H, Lq, Lk of
 * core.visibility. */
mha_status mha_call_apply_rules(mha_call *call, const mha_attention *rules, bool key_is_query,
                                const mha_core_defaults *defaults, mha_error *error);

/* Points the core's statistics and scratch into the workspace. */
void mha_call_use_workspace(mha_call *call, const mha_workspace *workspace);

/* The sentence for a status that came out of computing, not of reading the arguments; MHA_OK
 * passes.
 */
mha_status mha_call_explain(mha_status status, mha_error *error);

/* Runs step 3 and fills in the results. */
mha_status mha_call_run(const mha_call *call, const mha_context *context);

#endif
