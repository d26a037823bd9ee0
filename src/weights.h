/* One layer: config, matrices, biases. */
#ifndef MHA_SRC_WEIGHTS_H
#define MHA_SRC_WEIGHTS_H

#include "config.h"
#include "mha.h"

#include <stdatomic.h>

/* Memory behind borrowed matrices that belongs to the layer: release(state) is called once, when
 * the layer ends, or at once if its creation fails. release NULL = nothing to give back. */
typedef struct mha_backing {
  void (*release)(void *state);
  void *state;
} mha_backing;

/* One projection, y = x·W + b: x [rows][in], W [in][out] seen through its strides. */
typedef struct mha_projection {
  const float *matrix; /* NULL = identity, in = out */
  const float *bias;   /* [out] or NULL */
  int64_t in, out;
  int64_t in_stride, out_stride; /* distance between neighbours along each dimension; one is 1 */
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
  mha_backing backing;
  mha_allocator allocator;
  size_t bytes; /* of this object with the copied numbers behind it */
};

/* mha_weights_create, and the layer takes over `backing` whatever the outcome. */
mha_status mha_weights_create_backed(const mha_config *config, const mha_matrices *matrices,
                                     mha_backing backing, mha_weights **weights, mha_error *error);

#endif
