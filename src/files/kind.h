/* What a file seems to be, told by its first bytes: for messages about files of another kind. */
#ifndef MHA_SRC_FILES_KIND_H
#define MHA_SRC_FILES_KIND_H

#include <stdbool.h>
#include <stddef.h>

/* So many bytes at the beginning are enough. */
#define MHA_KIND_BYTES 4096

/* Whether a file that begins with these n bytes may be a safetensors file: every valid one may. */
bool mha_kind_may_be_safetensors(const void *bytes, size_t n);

/* Whether a file that begins with these n bytes is a GGUF file, be it a broken one. */
bool mha_kind_is_gguf(const void *bytes, size_t n);

/* The kind of a file that begins with these n bytes, as the end of a sentence that begins with the
 * file: "... seems to be a GGUF file". NULL if it is not known here. A file's name is not asked.
 */
const char *mha_kind_of(const void *bytes, size_t n);

#endif
