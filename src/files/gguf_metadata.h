/* The metadata of a GGUF file: pairs of a key and a value of any type. */
#ifndef MHA_SRC_FILES_GGUF_METADATA_H
#define MHA_SRC_FILES_GGUF_METADATA_H

#include "gguf_bytes.h"

#include <stdbool.h>

typedef struct mha_gguf_metadata {
  mha_gguf_text architecture; /* general.architecture; text NULL = absent */
  uint32_t alignment;         /* general.alignment, 32 where it is absent: a power of two */
  mha_model_info model;       /* without the architecture, and what follows from it */
  bool rope_is_scaled;        /* there is a .rope.scaling.type other than "none" */
} mha_gguf_metadata;

/* Takes n_pairs pairs; every value is walked through, those that nobody asks for too. Errors:
 * FORMAT. */
mha_status mha_gguf_read_metadata(mha_gguf_bytes *b, int64_t n_pairs, mha_gguf_metadata *metadata);

/* Bytes that a pair has at least: the length of its key, its type, a value of one byte. */
enum { MHA_GGUF_PAIR_BYTES = 13 };

#endif
