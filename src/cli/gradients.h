/* The way back in `mha run`: what comes from above, the gradients, and their files. */
#ifndef MHA_SRC_CLI_GRADIENTS_H
#define MHA_SRC_CLI_GRADIENTS_H

#include "arrays.h"
#include "calls.h"
#include "options.h"
#include "results.h"

enum { MHA_N_GRADIENTS = 16 };

/* Begins with {0}. */
typedef struct mha_gradients {
  bool wanted;
  char folder[MHA_PATH_BYTES]; /* without a slash at its end, unless it is the root */
  char paths[MHA_N_GRADIENTS][MHA_PATH_BYTES];
  bool made_folder;
  mha_npy_array dy;
  mha_tape *tape;
  mha_array arrays[MHA_N_GRADIENTS]; /* data is NULL where layer or call have no such thing */
  mha_backward_args args;
} mha_gradients;

/* The arrays that went into a call; data is NULL where one was not given. */
typedef struct mha_gradient_sources {
  const mha_npy_array *query, *key, *value, *bias;
} mha_gradient_sources;

/* Takes the folder from the options and names the files in it, all that there may be, for
 * mha_results_check. Fails with IO where a path would be too long. */
mha_status mha_gradients_name(const mha_options *options, mha_gradients *g,
                              mha_result results[MHA_N_GRADIENTS], mha_error *error);

/* Reads dy and makes the tape, which *args is given, and memory for the gradient of everything that
 * the layer and the call have. Does nothing where gradients are not wanted. Release in any case. */
mha_status mha_gradients_prepare(const mha_options *options, const mha_weights *weights,
                                 const mha_gradient_sources *sources, mha_forward_args *args,
                                 mha_gradients *g, mha_error *error);

/* Goes the way back, after the call of mha_forward, where gradients are wanted. */
mha_status mha_gradients_compute(const mha_calls *calls, mha_context *context,
                                 const mha_weights *weights, const mha_forward_args *args,
                                 const mha_gradients *g, mha_error *error);

/* Makes the folder, where there is none and gradients are wanted; signals then remove it as long as
 * nothing is in it. */
mha_status mha_gradients_make_folder(mha_gradients *g, mha_error *error);

/* Leaves the folder alone from now on, or, where `failed`, removes it if it was made and is empty.
 */
void mha_gradients_leave_folder(mha_gradients *g, bool failed);

void mha_gradients_release(mha_gradients *g);

#endif
