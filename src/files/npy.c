/* Owns the .npy format: header parser, conversion of the numbers, reader and writer.
 *
 * Layout of a file: "\x93NUMPY", major and minor version, header length (2 bytes in version 1.0,
 * 4 bytes in 2.0 and 3.0, little-endian), a Python dict literal with the keys descr, fortran_order
 * and shape, then the numbers and nothing else. */
#define _XOPEN_SOURCE 700

#include "npy.h"

#include "kind.h"
#include "mapping.h"
#include "path.h"

#include "base/error.h"
#include "base/memory.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Messages -------------------------------------------------------------------------------- */

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

/* ---- Conversion ------------------------------------------------------------------------------ */

size_t mha_npy_item_bytes(const mha_npy_header *header) {
  return types[header->type].bytes;
}

static size_t kind_bytes(mha_npy_kind kind) {
  return kind == MHA_NPY_FLOATS  ? sizeof(float)
         : kind == MHA_NPY_BYTES ? sizeof(uint8_t)
                                 : sizeof(int64_t);
}

static bool may_become(mha_npy_type type, mha_npy_kind kind) {
  switch (type) {
  case MHA_NPY_F2:
  case MHA_NPY_F4:
  case MHA_NPY_F8:
    return kind == MHA_NPY_FLOATS;
  case MHA_NPY_I4:
  case MHA_NPY_I8:
    return kind == MHA_NPY_INTEGERS;
  case MHA_NPY_U1:
  case MHA_NPY_B1:
    return kind != MHA_NPY_FLOATS;
  }
  return false;
}

mha_status mha_npy_check_kind(const char *name, const mha_npy_header *header, mha_npy_kind kind,
                              mha_error *error) {
  static const char *const rules[] = {
      [MHA_NPY_FLOATS] = "float16, float32 or float64",
      [MHA_NPY_BYTES] = "bool or uint8",
      [MHA_NPY_INTEGERS] = "bool, uint8, int32 or int64",
  };
  if (may_become(header->type, kind))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s holds the type \"%s\"; rule: %s is needed here",
                  mha_shown_path(name), types[header->type].text, rules[kind]);
}

/* The bits of one number, whatever the byte order of file and machine. */
static uint64_t load_bits(const unsigned char *source, size_t n, bool big_endian) {
  uint64_t bits = 0;
  for (size_t i = 0; i < n; i++)
    bits = bits << 8 | source[big_endian ? i : n - 1 - i];
  return bits;
}

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* 1 sign, 5 exponent, 10 mantissa bits; the exponent's bias grows from 15 to 127. */
static float half_value(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t exponent = bits >> 10 & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = (float)mantissa * 0x1p-24F;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return float_of_bits(sign | wide << 23 | mantissa << 13);
}

static float float_value(mha_npy_type type, uint64_t bits) {
  double wide;
  if (type == MHA_NPY_F2)
    return half_value((uint32_t)bits);
  if (type == MHA_NPY_F4)
    return float_of_bits((uint32_t)bits);
  memcpy(&wide, &bits, sizeof wide);
  return (float)wide;
}

static int64_t integer_value(mha_npy_type type, uint64_t bits) {
  int64_t value;
  if (type == MHA_NPY_I4 && (bits & UINT64_C(0x80000000)))
    bits |= UINT64_C(0xFFFFFFFF00000000);
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Where element `index` of the file lies in a row-major array; in a column-major file the first
 * dimension runs fastest. */
static int64_t row_major_place(const mha_npy_header *header, int64_t index) {
  int64_t place = 0;
  int64_t stride = header->n_elements;
  if (!header->column_major)
    return index;
  for (int axis = 0; axis < header->rank; axis++) {
    const int64_t extent = header->shape[axis];
    stride /= extent;
    place += index % extent * stride;
    index /= extent;
  }
  return place;
}

bool mha_machine_is_big_endian(void) {
  const uint16_t one = 1;
  unsigned char first;
  memcpy(&first, &one, 1);
  return first == 0;
}

void mha_npy_convert(const mha_npy_header *header, int64_t first, int64_t n, const void *source,
                     mha_npy_kind kind, void *target) {
  const unsigned char *bytes = source;
  const size_t item = types[header->type].bytes;
  if (header->type == MHA_NPY_F4 && !header->column_major && n > 0 &&
      header->big_endian == mha_machine_is_big_endian()) {
    memcpy((float *)target + first, source, (size_t)n * item);
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    const uint64_t bits = load_bits(bytes + (size_t)i * item, item, header->big_endian);
    const int64_t place = row_major_place(header, first + i);
    if (kind == MHA_NPY_FLOATS)
      ((float *)target)[place] = float_value(header->type, bits);
    else if (kind == MHA_NPY_BYTES)
      ((uint8_t *)target)[place] = (uint8_t)bits;
    else
      ((int64_t *)target)[place] = integer_value(header->type, bits);
  }
}

/* ---- Reading a file -------------------------------------------------------------------------- */

/* One file on its way into memory. */
typedef struct reading {
  const char *path;
  int file;
  unsigned char *buffer; /* the beginning of the file, later the numbers piece by piece */
  size_t buffer_bytes;
  mha_npy_header header;
} reading;

static mha_status read_header(reading *r, int64_t file_bytes, mha_npy_kind kind, mha_error *error) {
  const size_t most = MHA_NPY_HEADER_LIMIT + 12;
  const size_t n = file_bytes < (int64_t)most ? (size_t)file_bytes : most;
  mha_status status = mha_read_at(r->path, r->file, 0, r->buffer, n, error);
  if (!status)
    status = mha_npy_parse(r->path, r->buffer, n, file_bytes, &r->header, error);
  return status ? status : mha_npy_check_kind(r->path, &r->header, kind, error);
}

static mha_status read_numbers(reading *r, mha_npy_kind kind, void *target, mha_error *error) {
  const size_t item = mha_npy_item_bytes(&r->header);
  const int64_t most = (int64_t)(r->buffer_bytes / item);
  mha_status status = MHA_OK;
  for (int64_t first = 0; !status && first < r->header.n_elements; first += most) {
    const int64_t rest = r->header.n_elements - first;
    const int64_t n = rest < most ? rest : most;
    status = mha_read_at(r->path, r->file, r->header.data_offset + first * (int64_t)item, r->buffer,
                         (size_t)n * item, error);
    if (!status)
      mha_npy_convert(&r->header, first, n, r->buffer, kind, target);
  }
  return status;
}

static mha_status allocate_array(const reading *r, mha_npy_kind kind, mha_npy_array *array,
                                 mha_error *error) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, kind_bytes(kind), r->header.n_elements, 1, 1);
  if (layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s holds %" PRId64 " numbers; rule: their size fits the address space",
                    mha_shown_path(r->path), r->header.n_elements);
  array->data_bytes = layout.bytes ? layout.bytes : MHA_ALIGNMENT;
  array->data = mha_memory_allocate(&array->allocator, array->data_bytes);
  if (!array->data)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of %s", array->data_bytes,
                    mha_shown_path(r->path));
  array->rank = r->header.rank;
  memcpy(array->shape, r->header.shape, sizeof array->shape);
  array->n_elements = r->header.n_elements;
  return MHA_OK;
}

mha_status mha_npy_read(const char *path, mha_npy_kind kind, const mha_allocator *allocator,
                        mha_npy_array *array, mha_error *error) {
  reading r = {.path = path, .file = -1, .buffer_bytes = MHA_NPY_HEADER_LIMIT + MHA_ALIGNMENT};
  int64_t file_bytes = 0;
  memset(array, 0, sizeof *array);
  array->allocator = mha_memory_allocator(allocator);
  const mha_allocator memory = array->allocator;
  mha_status status = mha_open_regular(path, &r.file, &file_bytes, error);
  if (!status) {
    r.buffer = mha_memory_allocate(&memory, r.buffer_bytes);
    if (!r.buffer)
      status = mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes to read %s with",
                        r.buffer_bytes, mha_shown_path(path));
  }
  if (!status)
    status = read_header(&r, file_bytes, kind, error);
  if (!status)
    status = allocate_array(&r, kind, array, error);
  if (!status)
    status = read_numbers(&r, kind, array->data, error);
  mha_memory_release(&memory, r.buffer, r.buffer_bytes);
  if (r.file >= 0)
    (void)close(r.file);
  if (!status)
    return mha_succeed(error);
  mha_npy_array_release(array);
  return status;
}

void mha_npy_array_release(mha_npy_array *array) {
  if (array->data)
    mha_memory_release(&array->allocator, array->data, array->data_bytes);
  memset(array, 0, sizeof *array);
}

/* ---- Writing a file -------------------------------------------------------------------------- */

#define MAGIC_BYTES  10
#define HEADER_BYTES 256 /* 8 dimensions of 19 digits fit; numbers begin at a multiple of 64 */

static int header_text(int rank, const int64_t *shape, unsigned char *bytes) {
  char text[HEADER_BYTES];
  char dimensions[HEADER_BYTES - 60];
  (void)mha_shape_text(rank, shape, dimensions, sizeof dimensions);
  const int used = snprintf(text, sizeof text,
                            "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }", dimensions);
  const int total = (MAGIC_BYTES + used + 1 + 63) / 64 * 64;
  const int length = total - MAGIC_BYTES;
  memcpy(bytes, "\x93NUMPY\x01\x00", 8);
  bytes[8] = (unsigned char)(length & 0xFF);
  bytes[9] = (unsigned char)(length >> 8);
  memset(bytes + MAGIC_BYTES, ' ', (size_t)length - 1);
  memcpy(bytes + MAGIC_BYTES, text, (size_t)used);
  bytes[total - 1] = '\n';
  return total;
}

mha_status mha_npy_stage(const char *path, int rank, const int64_t *shape, const float *data,
                         mha_output *output, mha_error *error) {
  unsigned char header[HEADER_BYTES + 64];
  int64_t n = 1;
  output->has_temporary = 0;
  for (int axis = 0; axis < rank; axis++)
    if (rank > MHA_NPY_MAX_RANK || !mha_multiply(n, shape[axis], &n))
      return mha_fail(error, MHA_ERROR_OVERFLOW,
                      "the shape for %s has no size; rule: its "
                      "dimensions are not negative and their product fits 63 bits",
                      mha_shown_path(path));
  mha_status status = mha_output_open(path, output, error);
  if (!status)
    status = mha_output_write(output, header, (size_t)header_text(rank, shape, header), error);
  if (!status)
    status = mha_output_write_floats(output, data, n, error);
  return status ? status : mha_output_sync(output, error);
}

mha_status mha_npy_write(const char *path, int rank, const int64_t *shape, const float *data,
                         mha_error *error) {
  mha_output output;
  const mha_status status = mha_npy_stage(path, rank, shape, data, &output, error);
  return status ? status : mha_output_commit(&output, error);
}
