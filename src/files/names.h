/* Which tensor of a file is which part of a layer, by the names that are in use. */
#ifndef MHA_SRC_FILES_NAMES_H
#define MHA_SRC_FILES_NAMES_H

#include "tensors.h"

/* The parts of a layer: matrices, biases, the rest. QKV is one tensor that holds the rows (OUT_IN)
 * or columns (IN_OUT) of q, k and v one after the other; a family has either it or the three. */
typedef enum mha_part {
  MHA_PART_WQ,
  MHA_PART_WK,
  MHA_PART_WV,
  MHA_PART_WQKV,
  MHA_PART_WO,
  MHA_PART_BQ,
  MHA_PART_BK,
  MHA_PART_BV,
  MHA_PART_BQKV,
  MHA_PART_BO,
  MHA_PART_QUERY_NORM,
  MHA_PART_KEY_NORM,
  MHA_PART_SINKS
} mha_part;

enum { MHA_N_PARTS = 13 };

/* One way to name the parts of a layer; see names.c. */
typedef struct mha_name_family mha_name_family;

/* The tensors under one prefix, read as one family. Points into the tensors, and into the prefix
 * where one was given. */
typedef struct mha_layer_names {
  const mha_name_family *family;
  const char *family_name; /* such as "PyTorch, packed" */
  int32_t orientation;     /* mha_orientation */
  const char *prefix;      /* prefix_bytes bytes, not zero-terminated: print it with "%.*s" */
  int prefix_bytes;
  const mha_file_tensor *parts[MHA_N_PARTS]; /* NULL = not there */
  int output_name; /* which of the family's names the output projection has */
  bool complete;   /* all matrices are there, and q_norm and k_norm both or none */
} mha_layer_names;

typedef void mha_layer_visitor(void *user, const mha_layer_names *layer);

/* Shows every layer, in the order of the names, incomplete ones included: whatever has a matrix or
 * bias of q, k or v under some prefix. Returns how many. `visitor` may be NULL. */
int64_t mha_names_visit(const mha_file_tensors *tensors, mha_layer_visitor *visitor, void *user);

/* Finds the one layer under `prefix` (NULL = any) that is complete and has nothing unsupported.
 * `path` is for messages. WEIGHTS: none, several, or one with gaps; UNSUPPORTED: see below. */
mha_status mha_names_find(const mha_file_tensors *tensors, const char *path, const char *prefix,
                          mha_layer_names *layer, mha_error *error);

/* The first tensor that belongs to the layer but to none of its parts, and so would change the
 * result in a way that is not computed; NULL = none. */
const mha_file_tensor *mha_names_unsupported(const mha_file_tensors *tensors,
                                             const mha_layer_names *layer);

/* Writes what a layer that is not complete lacks, such as "x.k_proj.weight, x.v_proj.weight", cut
 * to `bytes`; returns `text`. */
char *mha_names_missing(const mha_layer_names *layer, char *text, size_t bytes);

/* What a part is called in a layer of MHA_OUT_IN (Hugging Face) or MHA_IN_OUT (the article), as
 * saved; NULL for the packed ones. */
const char *mha_part_saved_name(mha_part part, int32_t orientation);

#endif
