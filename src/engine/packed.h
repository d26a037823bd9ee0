/* Matrices packed for kernels: their columns in blocks, each dense. */
#ifndef MHA_SRC_ENGINE_PACKED_H
#define MHA_SRC_ENGINE_PACKED_H

#include "kernels.h"
#include "numbers.h"

/* Columns of a block; the last one is filled up with zeros. */
#define MHA_PACKED_COLUMNS 64

/* Numbers of a packed W [in][out]; false if they overflow. */
bool mha_packed_floats(int64_t in, int64_t out, int64_t *floats);

/* W [in][out], of any type, as [out/64][in][64]. */
void mha_packed_fill(float *packed, const mha_stored *w);

/* Kernels of a packed matrix: for whole and for remaining columns, whole and remaining rows. */
enum { MHA_PACKED_SHAPES = 4 };

/* Their shapes, for rows of X and Y that are dense; returns how many, 0 = there can be none. */
int mha_packed_shapes(int64_t in, int64_t out, mha_kernel_shape shapes[MHA_PACKED_SHAPES]);

/* A packed matrix with its kernels. */
typedef struct mha_packed {
  const float *data;
  int64_t in, out;
  const mha_kernel *kernels[2][2]; /* [remaining columns][remaining rows], NULL = none remain */
} mha_packed;

/* False if one of its kernels is not there. */
bool mha_packed_find(const mha_kernels *kernels, const float *data, int64_t in, int64_t out,
                     mha_packed *packed);

/* Y += X·W for columns [first, first + columns) of W, whole blocks unless they end with W. X
 * [rows][in] and Y [rows][out] are dense, y being the first of those columns. */
void mha_packed_multiply(const mha_packed *w, int64_t rows, const float *x, int64_t first,
                         int64_t columns, float *y);

#endif
