/* The generator of kernels. */
#ifndef MHA_SRC_ENGINE_XSMM_H
#define MHA_SRC_ENGINE_XSMM_H

#include "kernels.h"

/* NULL where kernels can be generated and run, otherwise why not, as a clause. */
const char *mha_xsmm_missing(void);

/* The instruction set of the kernels, as libxsmm names it. */
const char *mha_xsmm_target(void);

/* Writes the code of a shape for `rows` rows into `code`, which has `room` bytes; returns how many
 * it takes, 0 = the generator cannot. From any thread. */
size_t mha_xsmm_generate(const mha_kernel_shape *shape, int rows, void *code, size_t room);

#endif
