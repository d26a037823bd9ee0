/* Arrays that the command computes and writes as .npy files. */
#ifndef MHA_SRC_CLI_ARRAYS_H
#define MHA_SRC_CLI_ARRAYS_H

#include "files/npy.h"

/* Begins with {0}. */
typedef struct mha_array {
  float *data; /* NULL = not asked for */
  size_t bytes;
  int rank;
  int64_t shape[MHA_NPY_MAX_RANK];
  int64_t row_stride; /* from one to the next along the first dimension of a matrix that is not
                         dense; otherwise 0 */
} mha_array;

/* Makes memory for the shape, all 0. `path` is the file that the numbers are for, in messages:
 * OVERFLOW, MEMORY. Release in any case. */
mha_status mha_array_make(mha_array *array, const char *path, int rank, const int64_t *shape,
                          mha_error *error);

/* The same for a matrix [rows][columns] whose rows are row_stride apart, at least `columns`. */
mha_status mha_array_make_matrix(mha_array *array, const char *path, int64_t rows, int64_t columns,
                                 int64_t row_stride, mha_error *error);

/* Stages it as mha_npy_stage does. The rows of a matrix are moved together. */
mha_status mha_array_stage(mha_array *array, const char *path, mha_output *file, mha_error *error);

void mha_array_release(mha_array *array);

#endif
