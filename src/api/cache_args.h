/* What a layer call says of its cache. */
#ifndef MHA_SRC_API_CACHE_ARGS_H
#define MHA_SRC_API_CACHE_ARGS_H

#include "layer/forward.h"

/* What belongs to a cache needs one; what a mode does not use must not be given. */
mha_status mha_cache_args_check(const mha_forward_args *args, mha_error *error);

/* Enters the call's cache, finds out what its entries hold, and adds it to the call's ranges. End
 * with mha_cache_args_end in any case. */
mha_status mha_cache_args_read(mha_forward_call *call, mha_error *error);

/* Leaves the cache, if it was entered; if the call succeeded, the new rows count from now on. */
void mha_cache_args_end(mha_forward_call *call, bool success);

#endif
