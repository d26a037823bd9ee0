/* Owns the way through a GGUF file's bytes: lengths that are checked before anything is touched,
 * and messages that tell the place. */
#include "gguf_bytes.h"

#include "text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- Messages -------------------------------------------------------------------------------- */

static mha_status fail_at(const mha_gguf_bytes *b, mha_status status, size_t at, const char *rule,
                          const char *format, va_list arguments) {
  char shown[MHA_SHOWN_BYTES] = "";
  char what[200];
  (void)vsnprintf(what, sizeof what, format, arguments);
  if (b->within.text)
    (void)mha_shown_text(b->within.text, b->within.n, shown);
  return mha_fail(b->error, status, "%s%s%s%s%s at byte %zu; rule: %s", b->name,
                  b->within.text ? ": \"" : " ", shown, b->within.text ? "\" " : "", what, at,
                  rule);
}

mha_status mha_gguf_refuse(const mha_gguf_bytes *b, size_t at, const char *rule, const char *format,
                           ...) {
  va_list arguments;
  va_start(arguments, format);
  const mha_status status = fail_at(b, MHA_ERROR_FORMAT, at, rule, format, arguments);
  va_end(arguments);
  return status;
}

mha_status mha_gguf_fail_unsupported(const mha_gguf_bytes *b, size_t at, const char *rule,
                                     const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const mha_status status = fail_at(b, MHA_ERROR_UNSUPPORTED, at, rule, format, arguments);
  va_end(arguments);
  return status;
}

/* ---- Taking ---------------------------------------------------------------------------------- */

size_t mha_gguf_left(const mha_gguf_bytes *b) {
  return b->n - b->at;
}

mha_status mha_gguf_take(mha_gguf_bytes *b, uint64_t n, const char *what,
                         const unsigned char **taken) {
  if (n > mha_gguf_left(b))
    return mha_gguf_refuse(b, b->at, "the file holds all that it promises",
                           "has %s of %" PRIu64 " bytes, but %zu follow", what, n,
                           mha_gguf_left(b));
  *taken = b->bytes + b->at;
  b->at += (size_t)n;
  return MHA_OK;
}

uint64_t mha_gguf_number(const unsigned char *bytes, size_t n_bytes) {
  uint64_t number = 0;
  for (size_t i = n_bytes; i-- > 0;)
    number = number << 8 | bytes[i];
  return number;
}

mha_status mha_gguf_take_u32(mha_gguf_bytes *b, const char *what, uint32_t *value) {
  const unsigned char *bytes = NULL;
  const mha_status status = mha_gguf_take(b, 4, what, &bytes);
  if (!status)
    *value = (uint32_t)mha_gguf_number(bytes, 4);
  return status;
}

mha_status mha_gguf_take_u64(mha_gguf_bytes *b, const char *what, uint64_t *value) {
  const unsigned char *bytes = NULL;
  const mha_status status = mha_gguf_take(b, 8, what, &bytes);
  if (!status)
    *value = mha_gguf_number(bytes, 8);
  return status;
}

mha_status mha_gguf_take_text(mha_gguf_bytes *b, const char *what, mha_gguf_text *text) {
  const unsigned char *bytes = NULL;
  uint64_t n = 0;
  mha_status status = mha_gguf_take_u64(b, what, &n);
  if (!status)
    status = mha_gguf_take(b, n, what, &bytes);
  if (!status)
    *text = (mha_gguf_text){(const char *)bytes, (size_t)n};
  return status;
}

const char *mha_gguf_copy_name(mha_gguf_text text, char *copy) {
  memcpy(copy, text.text, text.n);
  copy[text.n] = '\0';
  return memchr(copy, '\0', text.n) ? "holds a zero byte" : mha_name_fault(copy);
}
