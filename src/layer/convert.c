/* Owns mha_weights_convert: a copy of a layer, its matrices in one type. */
#include "base/arguments.h"
#include "base/error.h"
#include "weights.h"

mha_status mha_weights_convert(const mha_weights *weights, int32_t element,
                               const mha_allocator *allocator, mha_weights **converted,
                               mha_error *error) {
  mha_matrices matrices;
  mha_status status = mha_require(converted, "converted", error);
  if (status)
    return status;
  *converted = NULL;
  status = mha_require(weights, "weights", error);
  if (!status && !mha_element_is_known(element))
    status = mha_fail(error, MHA_ERROR_VALUE, "element is %d; rule: a value of mha_element",
                      (int)element);
  MHA_INIT(&matrices);
  if (!status)
    status = mha_weights_matrices(weights, &matrices, error);
  if (status)
    return status;
  mha_config config = weights->config;
  config.struct_size = sizeof config;
  config.allocator = allocator;
  matrices.ownership = MHA_COPY;
  return mha_weights_create_as(&config, &matrices, element, converted, error);
}
