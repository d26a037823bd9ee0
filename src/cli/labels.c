/* Owns the cutting of a text into labels. */
#include "labels.h"

#include "base/error.h"
#include "base/memory.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

/* Bytes of the label that `text`, not empty, begins with. The bytes of a character behind its first
 * are 10xxxxxx. */
static size_t label_bytes(const char *text, bool has_commas) {
  size_t bytes = 1;
  if (has_commas)
    return strcspn(text, ",");
  while (((unsigned char)text[bytes] & 0xC0U) == 0x80U)
    bytes++;
  return bytes;
}

/* Cuts into `items`, or only counts if that is NULL. */
static int64_t cut(const char *text, mha_label *items) {
  const bool has_commas = strchr(text, ',') != NULL;
  bool more = *text != '\0';
  int64_t n = 0;
  while (more) {
    const size_t bytes = label_bytes(text, has_commas);
    if (items)
      items[n] = (mha_label){text, bytes};
    n++;
    text += bytes;
    more = *text != '\0'; /* behind a comma, be it the last byte, stands one more label */
    text += more && has_commas;
  }
  return n;
}

mha_status mha_labels_cut(const char *text, int64_t n_tokens, mha_labels *labels,
                          mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  if (!text)
    return MHA_OK;
  const int64_t n = cut(text, NULL);
  if (n != n_tokens)
    return mha_fail(error, MHA_ERROR_LENGTH,
                    "--labels has %" PRId64 " labels for %" PRId64
                    " tokens; rule: one for each, with commas between, or one character each",
                    n, n_tokens);
  if (n == 0)
    return MHA_OK;
  labels->items = mha_memory_allocate(&memory, (size_t)n * sizeof *labels->items);
  if (!labels->items)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for %" PRId64 " labels", n);
  labels->n = cut(text, labels->items);
  return MHA_OK;
}

void mha_labels_release(mha_labels *labels) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  mha_memory_release(&memory, labels->items, (size_t)labels->n * sizeof *labels->items);
  *labels = (mha_labels){0};
}
