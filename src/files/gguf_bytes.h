/* The bytes of a GGUF file, taken from the front to the back, none beyond the end. */
#ifndef MHA_SRC_FILES_GGUF_BYTES_H
#define MHA_SRC_FILES_GGUF_BYTES_H

#include "base/error.h"

/* Text as it lies in the file: n bytes of anything. */
typedef struct mha_gguf_text {
  const char *text;
  size_t n;
} mha_gguf_text;

/* The file that is being read. */
typedef struct mha_gguf_bytes {
  const char *name; /* for messages */
  const unsigned char *bytes;
  size_t n;
  size_t at;            /* what is taken next */
  mha_gguf_text within; /* the entry that is being read, for messages; text NULL = none */
  mha_error *error;
} mha_gguf_bytes;

/* What breaks the format at byte `at`, in the entry that is being read; always fails. */
mha_status mha_gguf_refuse(const mha_gguf_bytes *b, size_t at, const char *rule, const char *format,
                           ...) MHA_PRINTF(4, 5);
/* What is sound but not read here; always fails. */
mha_status mha_gguf_fail_unsupported(const mha_gguf_bytes *b, size_t at, const char *rule,
                                     const char *format, ...) MHA_PRINTF(4, 5);

/* How many bytes are left. */
size_t mha_gguf_left(const mha_gguf_bytes *b);

/* Takes n bytes, or fails where fewer are left. `what` names them, such as "the tensor count". */
mha_status mha_gguf_take(mha_gguf_bytes *b, uint64_t n, const char *what,
                         const unsigned char **taken);
mha_status mha_gguf_take_u32(mha_gguf_bytes *b, const char *what, uint32_t *value);
mha_status mha_gguf_take_u64(mha_gguf_bytes *b, const char *what, uint64_t *value);
/* Takes a length of 8 bytes and so many bytes. */
mha_status mha_gguf_take_text(mha_gguf_bytes *b, const char *what, mha_gguf_text *text);

/* The number of n_bytes little-endian bytes, at most 8. */
uint64_t mha_gguf_number(const unsigned char *bytes, size_t n_bytes);

/* What forbids a text as a name, as mha_name_fault says it, or NULL. `copy` has room for n + 1
 * bytes and holds the text afterwards, zero-terminated. */
const char *mha_gguf_copy_name(mha_gguf_text text, char *copy);

#endif
