/* What a picture is drawn with. Lengths are whole pixels. */
#ifndef MHA_SRC_CLI_DRAWING_H
#define MHA_SRC_CLI_DRAWING_H

#include "labels.h"

#include "base/error.h"
#include "files/output.h"

#include <stdbool.h>

/* Text on its way to the file; begin with output and error alone. The first failure stays in
 * `status`; what follows is dropped. */
typedef struct mha_drawing {
  mha_output *output;
  mha_error *error;
  mha_status status;
  size_t used;
  char buffer[16 * 1024];
} mha_drawing;

/* At most 511 bytes in one call. */
void mha_drawing_put(mha_drawing *d, const char *format, ...) MHA_PRINTF(2, 3);

void mha_drawing_flush(mha_drawing *d);

/* A column holds any Latin letter of 12 pixels; a Chinese character is given two. */
enum { MHA_FONT = 12, MHA_COLUMN = 8, MHA_LINE = 14 };

/* Puts the label of token i: given or, where `labels` is NULL, its index. What is too long ends
 * with an ellipsis. */
void mha_drawing_put_label(mha_drawing *d, const mha_label *labels, int64_t i);

/* Width of the widest of n labels as they are put. */
int mha_drawing_label_width(const mha_label *labels, int64_t n);

/* Weights become levels 0 .. MHA_N_LEVELS - 1; MHA_LEVEL_NAN stands beside them. */
enum { MHA_N_LEVELS = 256, MHA_LEVEL_NAN = MHA_N_LEVELS };

/* The level of a weight on a scale that ends at `top`. */
int mha_drawing_level(float weight, double top);

/* Whether text on the level's colour has to be white. */
bool mha_drawing_level_is_dark(int level);

/* The first round number that is not below `largest`, its rounding to float32 aside; 1 for what a
 * sum in float32 leaves above it, and where there is nothing to show. */
double mha_drawing_top(float largest);

/* Puts `#rrggbb`. */
void mha_drawing_put_colour(mha_drawing *d, int level);

#endif
