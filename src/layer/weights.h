/* One layer: config, matrices, biases. */
#ifndef MHA_SRC_LAYER_WEIGHTS_H
#define MHA_SRC_LAYER_WEIGHTS_H

#include "config.h"
#include "engine/numbers.h"
#include "mha.h"

#include <stdatomic.h>

/* One projection, y = x·W + b: x [rows][in], W [in][out] seen through its strides. */
typedef struct mha_projection {
  const void *matrix; /* NULL = identity, in = out */
  int32_t element;    /* mha_element of matrix */
  const float *bias;  /* [out] or NULL */
  int64_t in, out;
  int64_t in_stride, out_stride; /* distance between neighbours along each dimension; one is 1 */
  const float *packed;           /* the matrix once more, for kernels, or NULL; see packed.h */
  int64_t given_ld; /* the caller's, also where the matrix is a copy without gaps: its gradient's */
} mha_projection;

/* The matrix as it is stored, [in][out]; it is not NULL. */
static inline mha_stored mha_projection_matrix(const mha_projection *p) {
  const mha_stored matrix = {p->matrix, p->element, p->in, p->out, p->in_stride, p->out_stride};
  return matrix;
}

/* The gradient of a matrix, as the caller's matrix lies: its sizes and strides alone. Rows of one
 * number without gaps, [out][1], are one row [1][out]: a product's result needs a leading dimension
 * of at least its columns. */
static inline mha_projection mha_projection_gradient(const mha_projection *p, bool in_out) {
  mha_projection gradient = {.in = p->in, .out = p->out, .in_stride = 1, .out_stride = p->given_ld};
  if (in_out || p->given_ld == 1) {
    gradient.in_stride = in_out ? p->given_ld : p->out;
    gradient.out_stride = 1;
  }
  return gradient;
}

/* The way back of it, dx = dy·Wᵀ, as a projection: Wᵀ is W seen with its strides exchanged. */
static inline mha_projection mha_projection_back(const mha_projection *p) {
  const mha_projection back = {.matrix = p->matrix,
                               .element = p->element,
                               .in = p->out,
                               .out = p->in,
                               .in_stride = p->out_stride,
                               .out_stride = p->in_stride};
  return back;
}

struct mha_weights {
  atomic_int references;
  uint64_t serial;   /* no other layer of the process has it; from 1 */
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

/* mha_weights_create for a place that is there, where the layer's own copies of all matrices are of
 * the type `kept`, a known one or MHA_AS_GIVEN; what is borrowed stays as it is. */
enum { MHA_AS_GIVEN = -1 };
mha_status mha_weights_create_as(const mha_config *config, const mha_matrices *matrices,
                                 int32_t kept, mha_weights **weights, mha_error *error);

#endif
