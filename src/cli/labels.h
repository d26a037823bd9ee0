/* Labels of tokens, as the command line gives them. */
#ifndef MHA_SRC_CLI_LABELS_H
#define MHA_SRC_CLI_LABELS_H

#include "mha.h"

/* A piece of the text that it was cut from. */
typedef struct mha_label {
  const char *text;
  size_t bytes;
} mha_label;

/* One for each token; begin with {0}. */
typedef struct mha_labels {
  mha_label *items; /* NULL = none were given */
  int64_t n;
} mha_labels;

/* Cuts `text` at its commas or, if it has none, into the code points of its UTF-8. NULL gives no
 * labels. `text` must stay alive; release in any case. Fails with MHA_ERROR_LENGTH unless there is
 * one for each token, or with MEMORY. */
mha_status mha_labels_cut(const char *text, int64_t n_tokens, mha_labels *labels, mha_error *error);

void mha_labels_release(mha_labels *labels);

#endif
