/* A shape that a caller asks scratch or a tape for. */
#ifndef MHA_SRC_API_SHAPE_H
#define MHA_SRC_API_SHAPE_H

#include "layer/scratch.h"

typedef struct mha_shape_asked {
  mha_call_size size;
  bool cached;      /* keys are in a cache */
  int32_t backward; /* mha_backward_use */
} mha_shape_asked;

/* Checks a shape and takes it over; weights NULL = of mha_attend. */
mha_status mha_shape_read(const mha_weights *weights, const mha_shape *given,
                          mha_shape_asked *asked, mha_error *error);

#endif
