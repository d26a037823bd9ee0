/* Owns the header of the .npy format: a parser that trusts nothing.
 *
 * Layout of a file: "\x93NUMPY", major and minor version, header length (2 bytes in version 1.0,
 * 4 bytes in 2.0 and 3.0, little-endian), a Python dict literal with the keys descr, fortran_order
 * and shape, then the numbers and nothing else. */
#include "npy.h"

#include "kind.h"

#include "path.h"

#include "base/error.h"
#include "base/memory.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Scanning the dict literal --------------------------------------------------------------- */

/* A place in the file. Everything in [0, end) is in memory. */
typedef struct scanner {
  const char *name;
  const unsigned char *bytes;
  size_t at, end;
  mha_error *error;
} scanner;

static mha_status refuse(const scanner *s, size_t at, const char *what, const char *rule) {
  return mha_fail(s->error, MHA_ERROR_FORMAT, "%s: %s at byte %zu; rule: %s", s->name, what, at,
                  rule);
}

static mha_status refuse_type(const scanner *s, size_t at, const char *what) {
  return mha_fail(s->error, MHA_ERROR_UNSUPPORTED,
                  "%s holds %s, descr at byte %zu; rule: float16, float32, float64, bool, uint8, "
                  "int32 and int64 are loaded",
                  s->name, what, at);
}

static bool is_space(unsigned char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static bool is_digit(unsigned char c) {
  return c >= '0' && c <= '9';
}

static void skip_space(scanner *s) {
  while (s->at < s->end && is_space(s->bytes[s->at]))
    s->at++;
}

/* The next byte that is no space, or 0 at the end of the header; a 0 in the file fits no rule. */
static unsigned char peek(scanner *s) {
  skip_space(s);
  return s->at < s->end ? s->bytes[s->at] : 0;
}

static bool accept(scanner *s, unsigned char c) {
  if (peek(s) != c)
    return false;
  s->at++;
  return true;
}

static mha_status expect(scanner *s, unsigned char c, const char *rule) {
  if (accept(s, c))
    return MHA_OK;
  return refuse(s, s->at, s->at < s->end ? "an unexpected character" : "the header's early end",
                rule);
}

/* A quoted string of printable ASCII without escapes: [*begin, *begin + *length). */
static mha_status scan_string(scanner *s, size_t *begin, size_t *length) {
  const unsigned char quote = peek(s);
  if (quote != '\'' && quote != '"')
    return expect(s, '\'', "a quoted string stands here");
  *begin = ++s->at;
  while (s->at < s->end && s->bytes[s->at] != quote) {
    const unsigned char c = s->bytes[s->at];
    if (c < ' ' || c > '~' || c == '\\')
      return refuse(s, s->at, "an escape or a byte that is not printable ASCII",
                    "strings of the header are plain");
    s->at++;
  }
  *length = s->at - *begin;
  return expect(s, quote, "a string ends with the quote it began with");
}

static mha_status scan_dimension(scanner *s, int64_t *dimension) {
  const size_t begin = s->at;
  int64_t value = 0;
  if (s->bytes[begin] == '-')
    return refuse(s, begin, "a negative dimension", "dimensions are 0 or more");
  for (; s->at < s->end && is_digit(s->bytes[s->at]); s->at++)
    if (!mha_multiply(value, 10, &value) || !mha_add(value, s->bytes[s->at] - '0', &value))
      return refuse(s, begin, "a dimension that overflows", "dimensions fit 63 bits");
  if (s->at == begin)
    return refuse(s, begin, "no dimension", "shape is a tuple of decimal integers");
  if (s->bytes[begin] == '0' && s->at > begin + 1)
    return refuse(s, begin, "a dimension with a leading zero",
                  "shape is a tuple of decimal integers");
  *dimension = value;
  return MHA_OK;
}

/* ---- The three values of the dict ------------------------------------------------------------ */

static const struct {
  char text[3];
  unsigned char bytes;
} types[] = {
    [MHA_NPY_F2] = {"f2", 2}, [MHA_NPY_F4] = {"f4", 4}, [MHA_NPY_F8] = {"f8", 8},
    [MHA_NPY_I4] = {"i4", 4}, [MHA_NPY_I8] = {"i8", 8}, [MHA_NPY_U1] = {"u1", 1},
    [MHA_NPY_B1] = {"b1", 1},
};

/* Whether `text` is one of NumPy's other types: kind and size, dates with their unit. */
static bool names_numpy_type(const char *text, size_t length) {
  if (length == 0 || !memchr("biufcSaUVmM", text[0], 11))
    return false;
  for (size_t i = 1; i < length && text[0] != 'm' && text[0] != 'M'; i++)
    if (!is_digit((unsigned char)text[i]))
      return false;
  return true;
}

static mha_status refuse_descr(const scanner *s, size_t at, const char *text, size_t length) {
  char what[64];
  const size_t order = length > 0 && memchr("<>|=", text[0], 4) ? 1 : 0;
  if (length == order + 1 && text[order] == 'O')
    return refuse_type(s, at, "pickled objects");
  (void)snprintf(what, sizeof what, "the type \"%.32s\"", text);
  if (names_numpy_type(text + order, length - order))
    return refuse_type(s, at, what);
  return refuse(s, at, what, "descr is a byte order and a type, such as '<f4'");
}

static mha_status scan_descr(scanner *s, mha_npy_header *header) {
  size_t at = 0;
  size_t length = 0;
  char *text = header->descr; /* cutting makes no type of what is none */
  const unsigned char first = peek(s);
  (void)snprintf(text, sizeof header->descr, "structured");
  if (first == '[' || first == '(' || first == '{')
    return refuse_type(s, s->at, "a structured type");
  const mha_status status = scan_string(s, &at, &length);
  if (status)
    return status;
  length = length < sizeof header->descr ? length : sizeof header->descr - 1;
  memcpy(text, s->bytes + at, length);
  text[length] = '\0';
  const char order = length == 3 ? text[0] : '\0';
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    if (strcmp(order ? text + 1 : text, types[i].text) != 0)
      continue;
    if (order != '<' && order != '>' && (order != '|' || types[i].bytes > 1))
      return refuse(s, at, "a type without a byte order",
                    "'<' or '>' stands before a type of several bytes");
    header->type = (mha_npy_type)i;
    header->big_endian = order == '>';
    return MHA_OK;
  }
  return refuse_descr(s, at, text, length);
}

static mha_status scan_order(scanner *s, mha_npy_header *header) {
  const unsigned char first = peek(s);
  const char *word = first == 'T' ? "True" : "False";
  const size_t length = strlen(word);
  if (s->end - s->at < length || memcmp(s->bytes + s->at, word, length) != 0)
    return refuse(s, s->at, "no Python truth value", "fortran_order is True or False");
  s->at += length;
  header->column_major = first == 'T';
  return MHA_OK;
}

/* Dimensions one by one with a zero taken as one: their product bounds every stride. */
static mha_status scan_shape(scanner *s, mha_npy_header *header) {
  int64_t bound = 1;
  bool empty = false;
  bool comma = true;
  mha_status status = expect(s, '(', "shape is a tuple");
  const size_t begin = s->at;
  header->rank = 0;
  while (!status && peek(s) != ')') {
    int64_t dimension = 0;
    if (!comma || s->at == s->end)
      return expect(s, ')', "a tuple has commas between its elements and ends with ')'");
    if (header->rank == MHA_NPY_MAX_RANK) {
      (void)snprintf(header->descr, sizeof header->descr, "more than %d dimensions",
                     MHA_NPY_MAX_RANK);
      return mha_fail(s->error, MHA_ERROR_UNSUPPORTED,
                      "%s has more than %d dimensions at byte %zu; rule: at most %d are loaded",
                      s->name, MHA_NPY_MAX_RANK, s->at, MHA_NPY_MAX_RANK);
    }
    status = scan_dimension(s, &dimension);
    header->shape[header->rank++] = dimension;
    empty = empty || dimension == 0;
    if (!status && !mha_multiply(bound, dimension ? dimension : 1, &bound))
      return refuse(s, begin, "a shape whose product overflows", "it fits 63 bits");
    comma = !status && accept(s, ',');
  }
  if (status)
    return status;
  if (header->rank == 1 && !comma)
    return refuse(s, begin, "a number in brackets", "a tuple of one has a comma, as in (3,)");
  header->n_elements = empty ? 0 : bound;
  s->at++;
  return MHA_OK;
}

/* ---- The header ------------------------------------------------------------------------------ */

static const struct {
  const char *key;
  mha_status (*scan)(scanner *s, mha_npy_header *header);
} keys[] = {{"descr", scan_descr}, {"fortran_order", scan_order}, {"shape", scan_shape}};

enum { N_KEYS = sizeof keys / sizeof keys[0] };

static mha_status scan_entry(scanner *s, mha_npy_header *header, bool *found) {
  size_t at = 0;
  size_t length = 0;
  mha_status status = scan_string(s, &at, &length);
  if (status)
    return status;
  for (int i = 0; i < N_KEYS; i++) {
    if (length != strlen(keys[i].key) || memcmp(s->bytes + at, keys[i].key, length) != 0)
      continue;
    if (found[i])
      return refuse(s, at, "a key that was there before", "each key stands once");
    found[i] = true;
    status = expect(s, ':', "a colon follows a key");
    return status ? status : keys[i].scan(s, header);
  }
  return refuse(s, at, "an unknown key", "the keys are descr, fortran_order and shape");
}

static mha_status scan_dict(scanner *s, mha_npy_header *header) {
  bool found[N_KEYS] = {false};
  bool comma = true;
  mha_status status = expect(s, '{', "the header is a Python dict");
  while (!status && peek(s) != '}') {
    if (!comma)
      return expect(s, '}', "a dict has commas between its entries and ends with '}'");
    status = scan_entry(s, header, found);
    comma = !status && accept(s, ',');
  }
  for (int i = 0; !status && i < N_KEYS; i++)
    if (!found[i])
      status = mha_fail(s->error, MHA_ERROR_FORMAT,
                        "%s: no key %s before byte %zu; rule: the keys are descr, fortran_order "
                        "and shape",
                        s->name, keys[i].key, s->at);
  if (status)
    return status;
  s->at++;
  return peek(s) == 0 && s->at == s->end
             ? MHA_OK
             : refuse(s, s->at, "text after the dict", "spaces and a newline end the header");
}

/* Magic, version and length: sets s->at and s->end to the dict literal. */
static mha_status scan_preamble(scanner *s, size_t n_bytes, int64_t file_bytes) {
  static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
  size_t length = 0;
  const char *kind = mha_kind_of(s->bytes, n_bytes);
  if (kind && s->bytes[0] != magic[0])
    return mha_fail(s->error, MHA_ERROR_FORMAT, "%s seems to be %s; rule: an array is a .npy file",
                    s->name, kind);
  for (size_t i = 0; i < sizeof magic; i++)
    if (i >= n_bytes || s->bytes[i] != magic[i])
      return refuse(s, i, i < n_bytes ? "a wrong byte" : "the file's early end",
                    "a .npy file begins with \\x93NUMPY");
  if (n_bytes < 8)
    return refuse(s, n_bytes, "the file's early end", "two bytes of version follow the magic");
  const unsigned major = s->bytes[6];
  const unsigned minor = s->bytes[7];
  if (major < 1 || major > 3 || minor != 0)
    return mha_fail(s->error, MHA_ERROR_FORMAT,
                    "%s: version %u.%u at byte 6; rule: versions 1.0, 2.0 and 3.0 are loaded",
                    s->name, major, minor);
  s->at = major == 1 ? 10 : 12;
  if (n_bytes < s->at)
    return refuse(s, n_bytes, "the file's early end", "the header length follows the version");
  for (size_t i = s->at; i-- > 8;)
    length = length << 8 | s->bytes[i];
  if (length > MHA_NPY_HEADER_LIMIT)
    return mha_fail(s->error, MHA_ERROR_FORMAT,
                    "%s: a header length of %zu at byte 8; rule: at most %d", s->name, length,
                    MHA_NPY_HEADER_LIMIT);
  if (length > n_bytes - s->at)
    return mha_fail(s->error, MHA_ERROR_FORMAT,
                    "%s: a header length of %zu at byte 8, but %" PRId64 " bytes follow; rule: "
                    "the header lies within the file",
                    s->name, length, file_bytes - (int64_t)s->at);
  s->end = s->at + length;
  return MHA_OK;
}

static mha_status check_payload(const scanner *s, const mha_npy_header *header,
                                int64_t file_bytes) {
  char shape[128];
  int64_t needed = 0;
  const int64_t there = file_bytes - header->data_offset;
  (void)mha_shape_text(header->rank, header->shape, shape, sizeof shape);
  if (!mha_multiply(header->n_elements, types[header->type].bytes, &needed))
    return refuse(s, s->end, "numbers whose size overflows", "it fits 63 bits");
  if (there == needed)
    return MHA_OK;
  return mha_fail(s->error, MHA_ERROR_FORMAT,
                  "%s: %" PRId64 " bytes of numbers at byte %" PRId64 ", but shape %s of %s needs "
                  "%" PRId64 "; rule: the file ends with its last number",
                  s->name, there, header->data_offset, shape, types[header->type].text, needed);
}

mha_status mha_npy_parse(const char *name, const void *bytes, size_t n_bytes, int64_t file_bytes,
                         mha_npy_header *header, mha_error *error) {
  scanner s = {mha_shown_path(name), bytes, 0, 0, error};
  mha_npy_header parsed = {0};
  mha_status status = scan_preamble(&s, n_bytes, file_bytes);
  if (!status)
    status = scan_dict(&s, &parsed);
  if (status == MHA_ERROR_UNSUPPORTED)
    memcpy(header->descr, parsed.descr, sizeof header->descr);
  if (status)
    return status;
  parsed.data_offset = (int64_t)s.end;
  status = check_payload(&s, &parsed, file_bytes);
  if (status)
    return status;
  *header = parsed;
  return mha_succeed(error);
}

/* ---- The types ------------------------------------------------------------------------------- */

size_t mha_npy_item_bytes(const mha_npy_header *header) {
  return types[header->type].bytes;
}

const char *mha_npy_type_text(mha_npy_type type) {
  return types[type].text;
}
