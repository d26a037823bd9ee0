/* Views [batch][length][heads][size] over lent arrays, in the layouts that callers have. */
#ifndef MHA_TESTS_FUZZ_TENSORS_H
#define MHA_TESTS_FUZZ_TENSORS_H

#include "session.h"

/* A tensor of these extents with numbers in it. Inputs may share entries or heads. */
mha_tensor fuzz_choose_tensor(fuzz_trial *trial, int64_t batch, int64_t length, int64_t heads,
                              int64_t size);
/* The same for an output, which may be written as a whole. */
mha_tensor fuzz_choose_output(fuzz_trial *trial, int64_t batch, int64_t length, int64_t heads,
                              int64_t size);
/* All four strides, those of a dense tensor filled in. */
mha_tensor fuzz_with_strides(const mha_tensor *tensor);
/* Rows from counts[b] on are not to be read; counts NULL = none. */
void fuzz_hide_rows(fuzz_trial *trial, const mha_tensor *tensor, const int64_t *counts);
/* Makes one thing in an input wrong. */
void fuzz_spoil_tensor(fuzz_trial *trial, mha_tensor *tensor);

#endif
