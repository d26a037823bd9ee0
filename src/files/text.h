/* Text that comes from outside: whether it may name a tensor, and how it looks in a message. */
#ifndef MHA_SRC_FILES_TEXT_H
#define MHA_SRC_FILES_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What forbids `text` as a name, as the end of a sentence ("is not UTF-8", "holds a control
 * character"), or NULL. */
const char *mha_name_fault(const char *text);

/* Whether the n bytes are UTF-8, be it cut at the end, without control characters but those between
 * words and lines. */
bool mha_text_is_plain(const unsigned char *bytes, size_t n);

/* Room for mha_shown_text, zero included. */
#define MHA_SHOWN_BYTES 68

/* Copies the first n bytes of `text` for a message: control characters and what is not UTF-8 become
 * '?', and what is long is cut between two characters and ends with "...". Returns `shown`. */
char *mha_shown_text(const char *text, size_t n, char shown[MHA_SHOWN_BYTES]);

/* Writes a shape as Python does, "(7, 8)", "(7,)" or "()", cut to `bytes`; returns `text`. */
char *mha_shape_text(int rank, const int64_t *shape, char *text, size_t bytes);

/* Whether a text begins or ends so. */
bool mha_starts_with(const char *text, const char *start);
bool mha_ends_with(const char *text, const char *end);

#endif
