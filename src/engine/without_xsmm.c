/* Stands in the place of xsmm.c where the library was built without libxsmm: there are no kernels.
 */
#include "xsmm.h"

const char *mha_xsmm_missing(void) {
  return "this library was built without libxsmm";
}

const char *mha_xsmm_target(void) {
  return "none";
}

size_t mha_xsmm_generate(const mha_kernel_shape *shape, int rows, void *code, size_t room) {
  (void)shape, (void)rows, (void)code, (void)room;
  return 0;
}
