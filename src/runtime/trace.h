/* Shows the steps of a call to whoever asked for it. */
#ifndef MHA_SRC_RUNTIME_TRACE_H
#define MHA_SRC_RUNTIME_TRACE_H

#include "base/arguments.h"
#include "context.h"

/* Shows an array [B][L][width]. Nothing happens without a trace function. */
void mha_trace_rows(const mha_context *context, const char *name, const float *data,
                    const mha_rows_shape *shape);

/* Shows an array of rank 4 by its shape and strides. */
void mha_trace_view(const mha_context *context, const char *name, const float *data,
                    const int64_t shape[4], const int64_t strides[4]);

#endif
