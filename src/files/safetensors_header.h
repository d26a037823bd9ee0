/* The header of a safetensors file as text, before and until it is a JSON value. */
#ifndef MHA_SRC_FILES_SAFETENSORS_HEADER_H
#define MHA_SRC_FILES_SAFETENSORS_HEADER_H

#include "base/error.h"

#include <jansson.h>

/* The file that is being read. */
typedef struct mha_header_source {
  const char *name;          /* for messages */
  const unsigned char *data; /* what follows the header */
  size_t data_bytes;
  mha_error *error;
} mha_header_source;

/* What breaks the format, in the file or in one of its tensors; always fails. */
mha_status mha_header_refuse(const mha_header_source *s, const char *rule, const char *format, ...)
    MHA_PRINTF(3, 4);
mha_status mha_header_refuse_tensor(const mha_header_source *s, const char *tensor,
                                    const char *rule, const char *format, ...) MHA_PRINTF(4, 5);

/* Always fails: there is no memory. */
mha_status mha_header_fail_memory(const mha_header_source *s);

/* Makes a JSON value of the header of a file in memory and notes where the data begin; free it with
 * json_decref. NULL on failure. */
mha_status mha_header_parse(mha_header_source *s, const unsigned char *bytes, size_t n_bytes,
                            json_t **root);

#endif
