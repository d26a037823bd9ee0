/* What the fuzz targets of weights files do with a file that was accepted. They abort where a
 * promise is broken. */
#ifndef MHA_TESTS_WEIGHTS_FILE_H
#define MHA_TESTS_WEIGHTS_FILE_H

#include "files/tensors.h"

/* Reads a tensor of the file of `size` bytes at `data`, and converts it. */
void fuzz_use_tensor(const mha_raw_tensor *tensor, const uint8_t *data, size_t size);
/* Looks for layers among the tensors. */
void fuzz_use_names(const mha_raw_tensors *tensors);
/* Opens the same bytes, of n tensors, as a file: what it tells of itself, every layer that loads,
 * and one token through it. */
void fuzz_use_file(const uint8_t *data, size_t size, int64_t n);

#endif
