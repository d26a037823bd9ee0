/* Shapes of the arrays that options name. */
#ifndef MHA_SRC_CLI_SHAPE_H
#define MHA_SRC_CLI_SHAPE_H

#include "files/npy.h"

/* Fails with MHA_ERROR_SIZE: the array of the file `path` has not the shape that `rule` tells. */
mha_status mha_shape_fail(const char *path, const mha_npy_array *array, const char *rule,
                          mha_error *error);

#endif
