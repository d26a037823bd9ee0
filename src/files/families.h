/* The ways in which the parts of a layer are named: one family for each. */
#ifndef MHA_SRC_FILES_FAMILIES_H
#define MHA_SRC_FILES_FAMILIES_H

#include "names.h"

typedef struct mha_output_names {
  const char *matrix, *bias;
} mha_output_names;

struct mha_name_family {
  const char *name;
  int32_t orientation;
  const char *holder; /* the module that holds q, k and v, dot included, or "" */
  const char *own;    /* how the names of the layer begin where others share its prefix, or "" */
  const char *parts[MHA_N_PARTS];  /* NULL = not in this family; those of the output are below */
  const mha_output_names *outputs; /* one of them */
  int n_outputs;
};

extern const mha_name_family mha_name_families[];
extern const int mha_n_name_families;

/* For messages: the query matrix of each family, behind whatever prefix and holder. */
#define QUERY_NAMES                                                                                \
  "in_proj_weight, q_proj_weight, q_proj.weight, query.weight, c_attn.weight, attn_q.weight, "     \
  "attn_qkv.weight or W_Q"

#endif
