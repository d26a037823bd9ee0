/* Attention weights as a picture: one heat map for each head, in SVG 1.1. */
#ifndef MHA_SRC_CLI_SVG_H
#define MHA_SRC_CLI_SVG_H

#include "labels.h"

#include "files/output.h"

/* Most queries and most keys of one map, and most cells of one picture. */
enum { MHA_SVG_MAX_SIDE = 512, MHA_SVG_MAX_CELLS = 2 * 1024 * 1024 };

typedef struct mha_heat_maps {
  int64_t n_entries, n_heads, n_queries, n_keys;
  const float *weights;          /* [n_entries][n_heads][n_queries][n_keys], each at least 0 */
  const mha_label *query_labels; /* [n_queries], or NULL = their indices */
  const mha_label *key_labels;   /* [n_keys], likewise */
} mha_heat_maps;

/* Whether a picture of these sizes is drawn. `path` is for the message: SIZE. */
mha_status mha_svg_check(const char *path, const mha_heat_maps *maps, mha_error *error);

/* Draws to a temporary file and syncs it, as mha_npy_stage does. All maps share one scale of
 * colours, from white at 0 to dark blue at a round number that no weight exceeds, and one for
 * what is not a number. */
mha_status mha_svg_stage(const char *path, const mha_heat_maps *maps, mha_output *output,
                         mha_error *error);

#endif
