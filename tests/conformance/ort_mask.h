/* The masks of ONNX Runtime's own operators, each spelled in every way the library has for it. */
#ifndef MHA_TESTS_CONFORMANCE_ORT_MASK_H
#define MHA_TESTS_CONFORMANCE_ORT_MASK_H

#include "core.h"

typedef struct ort_mask {
  const uint8_t *keeps;   /* [B][rows][Lk], 0 = the operator adds `fill`; NULL = no mask */
  int64_t rows;           /* 1 or Lq */
  const int64_t *lengths; /* [B], where the case gives lengths */
  bool empties_a_row;     /* with causal, some query keeps no key */
  float fill;
} ort_mask;

typedef enum ort_spelling {
  ORT_LENGTHS, /* key_lengths */
  ORT_ATTEND,  /* a boolean mask */
  ORT_FILL,    /* the operator's own: a finite number added to the scores */
  ORT_N_SPELLINGS
} ort_spelling;

/* Reads the mask of the kind that "mask_kind" names, and checks it against the boolean or added
 * mask that was derived from it when the case was made. rules: causal and offset are set. */
bool ort_take_mask(conf_case *c, const conf_sizes *sizes, const mha_rules *rules, ort_mask *mask);

/* Adds the mask to `rules`. *applies is false where this spelling does not say the same. */
bool ort_spell_mask(conf_case *c, const conf_sizes *sizes, const ort_mask *mask,
                    ort_spelling spelling, mha_rules *rules, bool *applies);

#endif
