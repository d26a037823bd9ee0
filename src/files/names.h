/* Which tensor of a file is which part of a layer, by the names that are in use. */
#ifndef MHA_SRC_FILES_NAMES_H
#define MHA_SRC_FILES_NAMES_H

#include "tensors.h"

/* One way to name the parts of a layer; see families.h. */
typedef struct mha_name_family mha_name_family;

/* The tensors under one prefix, read as one family. Points into the tensors, and into the prefix
 * where one was given. */
typedef struct mha_layer_names {
  const mha_name_family *family;
  const char *family_name; /* such as "PyTorch, packed" */
  int32_t orientation;     /* mha_orientation */
  const char *prefix;      /* prefix_bytes bytes, not zero-terminated: print it with "%.*s" */
  int prefix_bytes;
  const mha_raw_tensor *parts[MHA_N_PARTS]; /* NULL = not there */
  int output_name; /* which of the family's names the output projection has */
  bool complete;   /* all matrices are there, and q_norm and k_norm both or none */
} mha_layer_names;

typedef void mha_layer_visitor(void *user, const mha_layer_names *layer);

/* Shows every layer, in the order of the names, incomplete ones included: whatever has a matrix or
 * bias of q, k or v under some prefix. Returns how many. `visitor` may be NULL. */
int64_t mha_names_visit(const mha_raw_tensors *tensors, mha_layer_visitor *visitor, void *user);

/* Finds the one layer under `prefix` (NULL = any) that is complete and has nothing unsupported.
 * `path` is for messages. WEIGHTS: none, several, or one with gaps; UNSUPPORTED: see below. */
mha_status mha_names_find(const mha_raw_tensors *tensors, const char *path, const char *prefix,
                          mha_layer_names *layer, mha_error *error);

/* The first tensor that belongs to the layer but to none of its parts, and so would change the
 * result in a way that is not computed; NULL = none. */
const mha_raw_tensor *mha_names_unsupported(const mha_raw_tensors *tensors,
                                            const mha_layer_names *layer);

/* What the part is called behind the prefix, or NULL where the family has no such part. */
const char *mha_names_part(const mha_layer_names *layer, mha_part part);

/* Writes what a layer that is not complete lacks, such as "x.k_proj.weight, x.v_proj.weight", cut
 * to `bytes`; returns `text`. */
char *mha_names_missing(const mha_layer_names *layer, char *text, size_t bytes);

/* What a part is called in a layer of MHA_OUT_IN (Hugging Face) or MHA_IN_OUT (the article), as
 * saved; NULL for the packed ones. */
const char *mha_part_saved_name(mha_part part, int32_t orientation);

#endif
