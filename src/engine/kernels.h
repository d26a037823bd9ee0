/* Kernels: machine code for products of one shape each, generated ahead of the calls that use
 * them. */
#ifndef MHA_SRC_ENGINE_KERNELS_H
#define MHA_SRC_ENGINE_KERNELS_H

#include "mha.h"

#include <stdbool.h>

/* C = A·B or, to add, C += A·B, with B [inner][columns] and any number of rows of A and C. Each
 * element is one sum over `inner`, in order. */
typedef struct mha_kernel_shape {
  int64_t columns, inner;
  int64_t a_stride, b_stride, c_stride; /* between rows; at least their lengths */
  bool add;
} mha_kernel_shape;

/* What the generator makes: the product for a fixed number of rows. */
typedef void mha_kernel_code(const float *b, const float *a, float *c);

/* Rows that one piece of code takes at most: in registers they are two blocks of 6 or four of 3,
 * as the vectors of an instruction set have it. */
#define MHA_KERNEL_ROWS 12

typedef struct mha_kernel {
  mha_kernel_shape shape;
  mha_kernel_code *by_rows[MHA_KERNEL_ROWS]; /* [r] takes r + 1 rows */
} mha_kernel;

/* Reads no element but those of A, B and, to add, C. */
void mha_kernel_run(const mha_kernel *kernel, int64_t rows, const float *a, const float *b,
                    float *c);

/* Whether there can be a kernel of this shape. */
bool mha_kernel_is_possible(const mha_kernel_shape *shape);

/* NULL where kernels can be generated, otherwise why not, as a clause. */
const char *mha_kernels_missing(void);

/* The instruction set that they are generated for. */
const char *mha_kernels_target(void);

/* The kernels of one context. */
typedef struct mha_kernels mha_kernels;

/* None yet. NULL = no memory. */
mha_kernels *mha_kernels_create(const mha_allocator *allocator);
void mha_kernels_destroy(mha_kernels *kernels);

/* Generates those of n possible shapes that are not there yet: all, or MHA_ERROR_MEMORY and none.
 */
mha_status mha_kernels_prepare(mha_kernels *kernels, const mha_kernel_shape *shapes, int n);

/* Takes back what was generated since mha_kernels_mark. */
const void *mha_kernels_mark(const mha_kernels *kernels);
void mha_kernels_undo(mha_kernels *kernels, const void *mark);

/* The kernel of a shape, or NULL; it stays where it is. */
const mha_kernel *mha_kernels_find(const mha_kernels *kernels, const mha_kernel_shape *shape);

#endif
