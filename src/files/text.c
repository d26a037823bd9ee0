/* Owns UTF-8 and control characters. */
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Bytes that a sequence beginning with `first` has; 0 = none begins so. */
static size_t promised_bytes(unsigned char first) {
  if (first < 0x80)
    return 1;
  if (first < 0xC2 || first > 0xF4)
    return 0;
  return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

/* Bytes of the UTF-8 sequence at the beginning of text[0 .. n), n > 0; 0 if there is none. By RFC
 * 3629: shortest forms, no surrogates, nothing beyond U+10FFFF. */
static size_t sequence_bytes(const unsigned char *text, size_t n) {
  const unsigned char first = text[0];
  const size_t bytes = promised_bytes(first);
  if (bytes > n)
    return 0;
  for (size_t i = 1; i < bytes; i++)
    if ((text[i] & 0xC0U) != 0x80U)
      return 0;
  if ((first == 0xE0 && text[1] < 0xA0) || (first == 0xED && text[1] > 0x9F) ||
      (first == 0xF0 && text[1] < 0x90) || (first == 0xF4 && text[1] > 0x8F))
    return 0;
  return bytes;
}

/* U+0000 to U+001F and U+007F to U+009F. */
static bool is_control(const unsigned char *sequence) {
  return sequence[0] < 0x20 || sequence[0] == 0x7F || (sequence[0] == 0xC2 && sequence[1] < 0xA0);
}

const char *mha_name_fault(const char *text) {
  const unsigned char *next = (const unsigned char *)text;
  for (size_t left = strlen(text); left > 0;) {
    const size_t bytes = sequence_bytes(next, left);
    if (bytes == 0)
      return "is not UTF-8";
    if (is_control(next))
      return "holds a control character";
    next += bytes;
    left -= bytes;
  }
  return NULL;
}

bool mha_text_is_plain(const unsigned char *bytes, size_t n) {
  for (size_t at = 0; at < n;) {
    const size_t used = sequence_bytes(bytes + at, n - at);
    if (used == 0)
      return at > 0 && promised_bytes(bytes[at]) > n - at;
    if (is_control(bytes + at) && (bytes[at] < '\t' || bytes[at] > '\r'))
      return false;
    at += used;
  }
  return true;
}

char *mha_shown_text(const char *text, size_t n, char shown[MHA_SHOWN_BYTES]) {
  static const char mark[] = "...";
  const size_t room = MHA_SHOWN_BYTES - sizeof mark;
  const unsigned char *source = (const unsigned char *)text;
  size_t used = 0;
  size_t at = 0;
  while (at < n) {
    const size_t bytes = sequence_bytes(source + at, n - at);
    const bool plain = bytes > 0 && !is_control(source + at);
    const size_t step = plain ? bytes : 1;
    if (used + step > room)
      break;
    if (plain)
      memcpy(shown + used, source + at, bytes);
    else
      shown[used] = '?';
    used += step;
    at += bytes > 0 ? bytes : 1;
  }
  memcpy(shown + used, mark, sizeof mark);
  if (at == n)
    shown[used] = '\0';
  return shown;
}

char *mha_shape_text(int rank, const int64_t *shape, char *text, size_t bytes) {
  size_t used = (size_t)snprintf(text, bytes, "(");
  for (int axis = 0; axis < rank && used < bytes; axis++)
    used +=
        (size_t)snprintf(text + used, bytes - used, "%s%" PRId64, axis ? ", " : "", shape[axis]);
  if (used < bytes)
    (void)snprintf(text + used, bytes - used, rank == 1 ? ",)" : ")");
  return text;
}

bool mha_starts_with(const char *name, const char *start) {
  return strncmp(name, start, strlen(start)) == 0;
}

bool mha_ends_with(const char *name, const char *end) {
  const size_t name_bytes = strlen(name);
  const size_t end_bytes = strlen(end);
  return name_bytes >= end_bytes && strcmp(name + name_bytes - end_bytes, end) == 0;
}
