/* The reading of the arguments of step 3 alone, for the call itself and for its way back. */
#ifndef MHA_SRC_API_ATTEND_H
#define MHA_SRC_API_ATTEND_H

#include "attention/core.h"
#include "base/arguments.h"
#include "base/tensor.h"
#include "layer/scratch.h"

/* What the arguments are read for. */
typedef enum mha_attend_use {
  MHA_ATTEND_FORWARD, /* output is written */
  MHA_ATTEND_BACK,    /* the way back: output is what was written */
  MHA_ATTEND_AGAIN    /* the way back, for which it is computed again: output does not count */
} mha_attend_use;

typedef struct mha_attend_call {
  mha_attend_use use;
  mha_core core;
  mha_address_ranges ranges; /* all arrays, by address */
  mha_tensor_shape q, k, v;
} mha_attend_call;

/* Checks the arguments and fills in the call, whose use is set; what overlaps what is left to the
 * caller. */
mha_status mha_attend_read(mha_attend_call *call, const mha_tensor *q, const mha_tensor *k,
                           const mha_tensor *v, const mha_attend_args *given, mha_error *error);

/* Its sizes, for scratch. */
mha_call_size mha_attend_size(const mha_core *core);

#endif
