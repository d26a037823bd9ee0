/* One layer: config, matrices, biases. */
#ifndef MHA_SRC_LAYER_WEIGHTS_H
#define MHA_SRC_LAYER_WEIGHTS_H

#include "config.h"
#include "mha.h"

#include <stdatomic.h>

/* One projection, y = x·W + b: x [rows][in], W [in][out] seen through its strides. */
typedef struct mha_projection {
  const float *matrix; /* NULL = identity, in = out */
  const float *bias;   /* [out] or NULL */
  int64_t in, out;
  int64_t in_stride, out_stride; /* distance between neighbours along each dimension; one is 1 */
  const float *packed;           /* the matrix once more, for kernels, or NULL; see packed.h */
} mha_projection;

struct mha_weights {
  atomic_int references;
  mha_config config; /* all sizes derived, allocator NULL */
  float scale;       /* config.scale or 1/√d */
  int32_t orientation;
  mha_projection query, key, value, output;
  const float *query_norm, *key_norm; /* as config.norm has them; NULL = ones */
  const float *sinks;                 /* [H] or NULL */
  double *rope_frequencies;           /* [rotary_size/2], of positions that are computed */
  mha_release_function *release;      /* of what is borrowed, or NULL */
  void *release_user;
  mha_allocator allocator;
  size_t bytes; /* of this object with the copied numbers behind it */
};

#endif
