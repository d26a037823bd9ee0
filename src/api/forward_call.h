/* The reading of a layer call's arguments, for the call itself and for its way back. */
#ifndef MHA_SRC_API_FORWARD_CALL_H
#define MHA_SRC_API_FORWARD_CALL_H

#include "layer/forward.h"

/* Names of the arguments of mha_forward. */
extern const mha_forward_names mha_forward_names_of_args;

/* Checks the arguments and fills in the call, whose names, weights, context and `back` are set, and
 * the addresses of all that it reads and writes; what overlaps what is left to the caller. A cache
 * that it enters is left by mha_cache_args_end. */
mha_status mha_forward_read(mha_forward_call *call, const mha_forward_args *given,
                            mha_error *error);

#endif
