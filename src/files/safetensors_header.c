/* Owns the header's text: its length, an outline that bounds what the parser will take, and the
 * parse itself. */
#include "safetensors_header.h"

#include "safetensors.h"
#include "text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LENGTH_BYTES 8

/* ---- Messages -------------------------------------------------------------------------------- */

mha_status mha_header_refuse(const mha_header_source *s, const char *rule, const char *format,
                             ...) {
  char what[200];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return mha_fail(s->error, MHA_ERROR_FORMAT, "%s: %s; rule: %s", s->name, what, rule);
}

mha_status mha_header_refuse_tensor(const mha_header_source *s, const char *tensor,
                                    const char *rule, const char *format, ...) {
  char shown[MHA_SHOWN_BYTES];
  char what[200];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return mha_fail(s->error, MHA_ERROR_FORMAT, "%s: tensor \"%s\" %s; rule: %s", s->name,
                  mha_shown_text(tensor, strlen(tensor), shown), what, rule);
}

mha_status mha_header_fail_memory(const mha_header_source *s) {
  return mha_fail(s->error, MHA_ERROR_MEMORY, "no memory for the header of %s", s->name);
}

/* ---- The header as text ---------------------------------------------------------------------- */

static mha_status find_header(mha_header_source *s, const unsigned char *bytes, size_t n_bytes,
                              size_t *header_bytes) {
  uint64_t length = 0;
  if (n_bytes < LENGTH_BYTES)
    return mha_header_refuse(s, "a safetensors file begins with the 8 bytes of its header's length",
                             "the file holds %zu bytes", n_bytes);
  for (size_t i = LENGTH_BYTES; i-- > 0;)
    length = length << 8 | bytes[i];
  const size_t rest = n_bytes - LENGTH_BYTES;
  if (length > MHA_SAFETENSORS_HEADER_LIMIT)
    return mha_header_refuse(s, "at most 100000000", "a header length of %" PRIu64, length);
  if (length > rest)
    return mha_header_refuse(s, "the header lies within the file",
                             "a header length of %" PRIu64 ", but %zu bytes follow", length, rest);
  if (length == 0)
    return mha_header_refuse(s, "the header is a JSON object", "a header length of 0");
  if (bytes[LENGTH_BYTES] != '{')
    return mha_header_refuse(s, "the header begins with '{'", "byte 8 is 0x%02X",
                             bytes[LENGTH_BYTES]);
  *header_bytes = (size_t)length;
  s->data = bytes + LENGTH_BYTES + *header_bytes;
  s->data_bytes = rest - *header_bytes;
  return MHA_OK;
}

/* More than any file of weights has: dimensions of a shape, which is the deepest bracket,
 * {name: {"shape": [...]}}; members of the metadata; tensors; and commas in all, some seven for
 * each tensor. */
enum {
  DEEPEST_BRACKET = 3,
  MOST_ELEMENTS = 64,
  MOST_MEMBERS = 65536,
  MOST_TENSORS = 262144,
  MOST_COMMAS = 8 * MOST_TENSORS
};

/* The end of the string that begins at text[at], or n. */
static size_t skip_string(const char *text, size_t n, size_t at) {
  for (at++; at < n && text[at] != '"'; at++)
    at += text[at] == '\\';
  return at < n ? at : n;
}

/* What stands between brackets, one within the other. */
typedef struct outline {
  char open[DEEPEST_BRACKET + 1]; /* by depth; 0 = outside */
  int commas[DEEPEST_BRACKET + 1];
  int depth;
  int all_commas;
} outline;

static int most_parts(const outline *o) {
  if (o->open[o->depth] == '[')
    return MOST_ELEMENTS;
  return o->depth == 1 ? MOST_TENSORS : MOST_MEMBERS;
}

/* A tree takes many times the bytes of its text. Brackets and commas are counted before it is made,
 * so that what a hostile header costs is bounded by what a large honest one does. */
static mha_status check_outline(const mha_header_source *s, const char *text, size_t n) {
  static const char rule[] = "no file of weights has as many";
  outline o = {.depth = 0};
  for (size_t at = 0; at < n; at++) {
    const char c = text[at];
    if (c == '"') {
      at = skip_string(text, n, at);
    } else if (c == '{' || c == '[') {
      if (o.depth == DEEPEST_BRACKET)
        return mha_header_refuse(s, "brackets nest three deep", "a bracket %d deep at byte %zu",
                                 o.depth + 1, LENGTH_BYTES + at);
      o.open[++o.depth] = c;
      o.commas[o.depth] = 0;
    } else if ((c == '}' || c == ']') && o.depth > 0) {
      o.depth--;
    } else if (c == ',' && o.depth > 0) {
      if (++o.commas[o.depth] >= most_parts(&o))
        return mha_header_refuse(s, rule, "more than %d parts between brackets at byte %zu",
                                 most_parts(&o), LENGTH_BYTES + at);
      if (++o.all_commas > MOST_COMMAS)
        return mha_header_refuse(s, rule, "more than %d commas at byte %zu", MOST_COMMAS,
                                 LENGTH_BYTES + at);
    }
  }
  return MHA_OK;
}

/* jansson's sentence without the quotation that it may end with, and what stands before the place
 * where it stopped. */
static mha_status refuse_json(const mha_header_source *s, const char *text, size_t n,
                              const json_error_t *fault) {
  char reason[MHA_SHOWN_BYTES];
  char before[MHA_SHOWN_BYTES];
  const char *near = strstr(fault->text, " near ");
  const size_t reason_bytes = near ? (size_t)(near - fault->text) : strlen(fault->text);
  const size_t end = fault->position > 0 ? (size_t)fault->position : 0;
  const size_t at = end < n ? end : n;
  size_t begin = at > 48 ? at - 48 : 0;
  while (begin < at && ((unsigned char)text[begin] & 0xC0U) == 0x80U)
    begin++;
  return mha_header_refuse(s, "the header is one JSON object in UTF-8, each key once",
                           "%s at byte %zu, behind %s",
                           mha_shown_text(fault->text, reason_bytes, reason), LENGTH_BYTES + at,
                           mha_shown_text(text + begin, at - begin, before));
}

/* jansson reports a string that it has no memory for as bad syntax, but malloc sets errno. */
static mha_status parse_json(const mha_header_source *s, const char *text, size_t n,
                             json_t **root) {
  json_error_t fault;
  errno = 0;
  *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &fault);
  if (*root)
    return MHA_OK;
  if (errno == ENOMEM || json_error_code(&fault) == json_error_out_of_memory ||
      fault.text[0] == '\0')
    return mha_header_fail_memory(s);
  return refuse_json(s, text, n, &fault);
}

mha_status mha_header_parse(mha_header_source *s, const unsigned char *bytes, size_t n_bytes,
                            json_t **root) {
  size_t header_bytes = 0;
  *root = NULL;
  mha_status status = find_header(s, bytes, n_bytes, &header_bytes);
  if (!status)
    status = check_outline(s, (const char *)bytes + LENGTH_BYTES, header_bytes);
  return status ? status : parse_json(s, (const char *)bytes + LENGTH_BYTES, header_bytes, root);
}
