/* Owns the step trace: a look at the data where it lies, which changes nothing. */
#include "trace.h"

#include <string.h>

void mha_trace_rows(const mha_context *context, const char *name, const float *data,
                    const mha_rows_shape *shape) {
  if (!context->trace)
    return;
  const mha_trace_step step = {.name = name,
                               .data = data,
                               .rank = 3,
                               .shape = {shape->batch, shape->length, shape->width},
                               .strides = {shape->batch_stride, shape->row_stride, 1}};
  context->trace(context->trace_user, &step);
}

void mha_trace_view(const mha_context *context, const char *name, const float *data,
                    const int64_t shape[4], const int64_t strides[4]) {
  if (!context->trace)
    return;
  mha_trace_step step = {.name = name, .data = data, .rank = 4};
  memcpy(step.shape, shape, sizeof step.shape);
  memcpy(step.strides, strides, sizeof step.strides);
  context->trace(context->trace_user, &step);
}
