/* Looking names up among tensors that are sorted by name. */
#ifndef MHA_SRC_FILES_LOOKUP_H
#define MHA_SRC_FILES_LOOKUP_H

#include "tensors.h"

/* Index of the first tensor whose name is not before the prefix and `rest` behind each other. */
int64_t mha_lookup_lower_bound(const mha_raw_tensors *tensors, const char *prefix, int prefix_bytes,
                               const char *rest);

/* The tensor of that name, or NULL. */
const mha_raw_tensor *mha_lookup_find(const mha_raw_tensors *tensors, const char *prefix,
                                      int prefix_bytes, const char *rest);

#endif
