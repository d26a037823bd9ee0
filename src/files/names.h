/* Which tensor of a file is which part of a layer. */
#ifndef MHA_SRC_FILES_NAMES_H
#define MHA_SRC_FILES_NAMES_H

#include "mha.h"

#include <stdbool.h>

/* The parts of a layer, matrices first. */
typedef enum mha_part {
  MHA_PART_WQ,
  MHA_PART_WK,
  MHA_PART_WV,
  MHA_PART_WO,
  MHA_PART_BQ,
  MHA_PART_BK,
  MHA_PART_BV,
  MHA_PART_BO
} mha_part;

enum { MHA_N_PARTS = 8 };

/* Matrices have rank 2 and must be there; biases have rank 1 and may be absent. */
bool mha_part_is_matrix(mha_part part);

/* Its name in a folder of .npy files, "W_Q" or "b_Q", without the ending. */
const char *mha_part_folder_name(mha_part part);

/* Its shape in the letters of mha.h, such as "[Eq][H·d]", for messages. */
const char *mha_part_letters(mha_part part);

/* Its shape as MHA_IN_OUT from a config whose sizes are all filled in; returns the rank, or 0 if a
 * product overflows. */
int mha_part_shape(mha_part part, const mha_config *config, int64_t shape[2]);

#endif
