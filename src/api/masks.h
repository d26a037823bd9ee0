/* Masks and biases of a call. */
#ifndef MHA_SRC_API_MASKS_H
#define MHA_SRC_API_MASKS_H

#include "attention/visibility.h"
#include "base/arguments.h"

/* Checks both against the sizes of `visibility` and takes them over; data NULL = there is none. */
mha_status mha_masks_read(const mha_mask *mask, const mha_bias *bias, mha_visibility *visibility,
                          mha_error *error);

/* Adds what was taken over to the ranges that no output may overlap. */
mha_status mha_masks_ranges(const mha_visibility *visibility, mha_address_ranges *ranges,
                            mha_error *error);

/* Checks that no two numbers of the bias that was taken over share an address, and adds an output
 * that lies as it does. */
mha_status mha_masks_add_bias_gradient(const mha_visibility *visibility, const char *name,
                                       const float *data, mha_address_ranges *ranges,
                                       mha_error *error);

#endif
