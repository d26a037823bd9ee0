/* Owns the sentence about an array of a file whose shape does not fit. */
#include "shape.h"

#include "base/error.h"
#include "files/path.h"
#include "files/text.h"

mha_status mha_shape_fail(const char *path, const mha_npy_array *array, const char *rule,
                          mha_error *error) {
  char shape[128];
  return mha_fail(error, MHA_ERROR_SIZE, "%s has shape %s; rule: %s", mha_shown_path(path),
                  mha_shape_text(array->rank, array->shape, shape, sizeof shape), rule);
}
