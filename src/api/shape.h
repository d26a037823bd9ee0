/* A shape that a caller asks scratch or a tape for. */
#ifndef MHA_SRC_API_SHAPE_H
#define MHA_SRC_API_SHAPE_H

#include "layer/scratch.h"

/* Checks a shape and takes it over; weights NULL = of mha_attend. */
mha_status mha_shape_read(const mha_weights *weights, const mha_shape *given, mha_call_size *size,
                          mha_error *error);

#endif
