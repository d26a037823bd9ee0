/* Owns the safetensors format. The only file that knows jansson, whose allocations are the C
 * library's: its allocator could be replaced for the whole process only.
 *
 * The reader takes jansson's tree for what it is, a JSON value of any form, and looks at it twice:
 * first at the form of each entry, so that what is allocated is bounded by what is there, then at
 * the numbers. */
#include "safetensors.h"

#include "base/error.h"
#include "base/memory.h"
#include "output.h"
#include "text.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LENGTH_BYTES 8

static const char metadata_key[] = "__metadata__";

static const struct {
  char text[12];
  int bits; /* of one element */
  mha_raw_type element;
} types[] = {
    {"F32", 32, MHA_RAW_F32},      {"F64", 64, MHA_RAW_F64},      {"F16", 16, MHA_RAW_F16},
    {"BF16", 16, MHA_RAW_BF16},    {"BOOL", 8, MHA_RAW_OTHER},    {"U8", 8, MHA_RAW_OTHER},
    {"I8", 8, MHA_RAW_OTHER},      {"F8_E5M2", 8, MHA_RAW_OTHER}, {"F8_E4M3", 8, MHA_RAW_OTHER},
    {"F8_E8M0", 8, MHA_RAW_OTHER}, {"I16", 16, MHA_RAW_OTHER},    {"U16", 16, MHA_RAW_OTHER},
    {"I32", 32, MHA_RAW_OTHER},    {"U32", 32, MHA_RAW_OTHER},    {"I64", 64, MHA_RAW_OTHER},
    {"U64", 64, MHA_RAW_OTHER},    {"C64", 64, MHA_RAW_OTHER},    {"F4", 4, MHA_RAW_OTHER},
    {"F6_E2M3", 6, MHA_RAW_OTHER}, {"F6_E3M2", 6, MHA_RAW_OTHER},
};

/* ---- Messages -------------------------------------------------------------------------------- */

/* The file that is being read. */
typedef struct source {
  const char *name;          /* for messages */
  const unsigned char *data; /* what follows the header */
  size_t data_bytes;
  mha_error *error;
} source;

static mha_status refuse(const source *s, const char *rule, const char *format, ...)
    MHA_PRINTF(3, 4);
static mha_status refuse_tensor(const source *s, const char *tensor, const char *rule,
                                const char *format, ...) MHA_PRINTF(4, 5);

static mha_status refuse(const source *s, const char *rule, const char *format, ...) {
  char what[200];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return mha_fail(s->error, MHA_ERROR_FORMAT, "%s: %s; rule: %s", s->name, what, rule);
}

static mha_status refuse_tensor(const source *s, const char *tensor, const char *rule,
                                const char *format, ...) {
  char shown[MHA_SHOWN_BYTES];
  char what[200];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return mha_fail(s->error, MHA_ERROR_FORMAT, "%s: tensor \"%s\" %s; rule: %s", s->name,
                  mha_shown_text(tensor, strlen(tensor), shown), what, rule);
}

static mha_status fail_memory(const source *s) {
  return mha_fail(s->error, MHA_ERROR_MEMORY, "no memory for the header of %s", s->name);
}

/* ---- The header as text ---------------------------------------------------------------------- */

static mha_status find_header(source *s, const unsigned char *bytes, size_t n_bytes,
                              size_t *header_bytes) {
  uint64_t length = 0;
  if (n_bytes < LENGTH_BYTES)
    return refuse(s, "a safetensors file begins with the 8 bytes of its header's length",
                  "the file holds %zu bytes", n_bytes);
  for (size_t i = LENGTH_BYTES; i-- > 0;)
    length = length << 8 | bytes[i];
  const size_t rest = n_bytes - LENGTH_BYTES;
  if (length > MHA_SAFETENSORS_HEADER_LIMIT)
    return refuse(s, "at most 100000000", "a header length of %" PRIu64, length);
  if (length > rest)
    return refuse(s, "the header lies within the file",
                  "a header length of %" PRIu64 ", but %zu bytes follow", length, rest);
  if (length == 0)
    return refuse(s, "the header is a JSON object", "a header length of 0");
  if (bytes[LENGTH_BYTES] != '{')
    return refuse(s, "the header begins with '{'", "byte 8 is 0x%02X", bytes[LENGTH_BYTES]);
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
static mha_status check_outline(const source *s, const char *text, size_t n) {
  static const char rule[] = "no file of weights has as many";
  outline o = {.depth = 0};
  for (size_t at = 0; at < n; at++) {
    const char c = text[at];
    if (c == '"') {
      at = skip_string(text, n, at);
    } else if (c == '{' || c == '[') {
      if (o.depth == DEEPEST_BRACKET)
        return refuse(s, "brackets nest three deep", "a bracket %d deep at byte %zu", o.depth + 1,
                      LENGTH_BYTES + at);
      o.open[++o.depth] = c;
      o.commas[o.depth] = 0;
    } else if ((c == '}' || c == ']') && o.depth > 0) {
      o.depth--;
    } else if (c == ',' && o.depth > 0) {
      if (++o.commas[o.depth] >= most_parts(&o))
        return refuse(s, rule, "more than %d parts between brackets at byte %zu", most_parts(&o),
                      LENGTH_BYTES + at);
      if (++o.all_commas > MOST_COMMAS)
        return refuse(s, rule, "more than %d commas at byte %zu", MOST_COMMAS, LENGTH_BYTES + at);
    }
  }
  return MHA_OK;
}

/* jansson's sentence without the quotation that it may end with, and what stands before the place
 * where it stopped. */
static mha_status refuse_json(const source *s, const char *text, size_t n,
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
  return refuse(s, "the header is one JSON object in UTF-8, each key once",
                "%s at byte %zu, behind %s", mha_shown_text(fault->text, reason_bytes, reason),
                LENGTH_BYTES + at, mha_shown_text(text + begin, at - begin, before));
}

/* jansson reports a string that it has no memory for as bad syntax, but malloc sets errno. */
static mha_status parse_json(const source *s, const char *text, size_t n, json_t **root) {
  json_error_t fault;
  errno = 0;
  *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &fault);
  if (*root)
    return MHA_OK;
  if (errno == ENOMEM || json_error_code(&fault) == json_error_out_of_memory ||
      fault.text[0] == '\0')
    return fail_memory(s);
  return refuse_json(s, text, n, &fault);
}

/* ---- The form of its entries ----------------------------------------------------------------- */

static mha_status check_metadata(const source *s, json_t *metadata) {
  static const char rule[] = "__metadata__ is an object of strings";
  char shown[MHA_SHOWN_BYTES];
  const char *key = NULL;
  json_t *value = NULL;
  if (!json_is_object(metadata))
    return refuse(s, rule, "__metadata__ is no object");
  json_object_foreach(metadata, key, value) {
    if (!json_is_string(value))
      return refuse(s, rule, "the value of \"%s\" in __metadata__ is no string",
                    mha_shown_text(key, strlen(key), shown));
  }
  return MHA_OK;
}

static mha_status check_form(const source *s, const char *name, json_t *entry) {
  static const char rule[] = "a tensor is an object of dtype, shape and data_offsets";
  const char *fault = mha_name_fault(name);
  if (fault)
    return refuse_tensor(s, name, "names are text without control characters", "%s", fault);
  if (!json_is_object(entry))
    return refuse_tensor(s, name, rule, "is no object");
  if (!json_is_string(json_object_get(entry, "dtype")))
    return refuse_tensor(s, name, rule, "has no string dtype");
  if (!json_is_array(json_object_get(entry, "shape")))
    return refuse_tensor(s, name, rule, "has no array shape");
  if (!json_is_array(json_object_get(entry, "data_offsets")))
    return refuse_tensor(s, name, rule, "has no array data_offsets");
  if (json_object_size(entry) != 3)
    return refuse_tensor(s, name, rule, "has %zu members", json_object_size(entry));
  return MHA_OK;
}

/* The index in `types`, or -1. */
static int known_type(const char *text) {
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (strcmp(text, types[i].text) == 0)
      return (int)i;
  return -1;
}

static const char *type_text(json_t *entry) {
  return json_string_value(json_object_get(entry, "dtype"));
}

/* Bytes of the text that an entry needs: its name, and its type if that is not known. */
static size_t text_bytes(const char *name, json_t *entry) {
  char shown[MHA_SHOWN_BYTES];
  const char *type = type_text(entry);
  const size_t name_bytes = strlen(name) + 1;
  return known_type(type) >= 0 ? name_bytes
                               : name_bytes + strlen(mha_shown_text(type, strlen(type), shown)) + 1;
}

/* Counts the tensors and the bytes of their text; afterwards each has the right form. */
static mha_status check_entries(const source *s, json_t *root, int64_t *n, size_t *bytes) {
  const char *name = NULL;
  json_t *entry = NULL;
  json_object_foreach(root, name, entry) {
    const bool is_tensor = strcmp(name, metadata_key) != 0;
    const mha_status status = is_tensor ? check_form(s, name, entry) : check_metadata(s, entry);
    if (status)
      return status;
    if (is_tensor) {
      *n += 1;
      *bytes += text_bytes(name, entry);
    }
  }
  return MHA_OK;
}

/* ---- One tensor ------------------------------------------------------------------------------ */

/* A zero in the shape is taken as a one: the product bounds every stride. */
static mha_status read_shape(const source *s, json_t *shape, mha_raw_tensor *tensor) {
  static const char dimensions_rule[] = "dimensions are integers, 0 or more";
  int64_t bound = 1;
  bool empty = false;
  const size_t rank = json_array_size(shape);
  for (size_t axis = 0; axis < rank; axis++) {
    json_t *number = json_array_get(shape, axis);
    const int64_t dimension = json_integer_value(number);
    if (!json_is_integer(number))
      return refuse_tensor(s, tensor->name, dimensions_rule,
                           "has a shape whose element %zu is no integer", axis);
    if (dimension < 0)
      return refuse_tensor(s, tensor->name, dimensions_rule,
                           "has a shape whose element %zu is %" PRId64, axis, dimension);
    if (!mha_multiply(bound, dimension ? dimension : 1, &bound))
      return refuse_tensor(s, tensor->name, "it fits 63 bits",
                           "has a shape whose product overflows");
    empty = empty || dimension == 0;
    if (axis < MHA_MAX_RANK)
      tensor->shape[axis] = dimension;
  }
  if (rank > MHA_MAX_RANK) {
    char shown[MHA_SHOWN_BYTES];
    return mha_fail(s->error, MHA_ERROR_UNSUPPORTED,
                    "%s: tensor \"%s\" has %zu dimensions; rule: at most %d are loaded", s->name,
                    mha_shown_text(tensor->name, strlen(tensor->name), shown), rank, MHA_MAX_RANK);
  }
  tensor->rank = (int)rank;
  tensor->n_elements = empty ? 0 : bound;
  return MHA_OK;
}

static mha_status read_offsets(const source *s, json_t *offsets, mha_raw_tensor *tensor) {
  json_t *first = json_array_get(offsets, 0);
  json_t *second = json_array_get(offsets, 1);
  const int64_t begin = json_integer_value(first);
  const int64_t end = json_integer_value(second);
  if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(second))
    return refuse_tensor(s, tensor->name, "data_offsets are two integers",
                         "has data_offsets of %zu elements%s", json_array_size(offsets),
                         json_array_size(offsets) == 2 ? " that are not both integers" : "");
  if (begin < 0 || end < begin)
    return refuse_tensor(s, tensor->name, "0 <= begin <= end",
                         "has data_offsets [%" PRId64 ", %" PRId64 "]", begin, end);
  if ((uint64_t)end > s->data_bytes)
    return refuse_tensor(s, tensor->name, "tensors lie within the file",
                         "has data_offsets [%" PRId64 ", %" PRId64 "], but %zu bytes follow the "
                         "header, %" PRIu64 " too few",
                         begin, end, s->data_bytes, (uint64_t)end - s->data_bytes);
  tensor->data = s->data + begin;
  tensor->bytes = (size_t)(end - begin);
  return MHA_OK;
}

/* Whether the shape of a known type fills the tensor's bytes. */
static mha_status check_size(const source *s, const mha_raw_tensor *tensor, int bits) {
  char shape[128];
  int64_t needed = 0;
  if (!mha_multiply(tensor->n_elements, bits, &needed))
    return refuse_tensor(s, tensor->name, "it fits 63 bits", "has a size in bits that overflows");
  if (needed % 8 == 0 && (uint64_t)needed / 8 == tensor->bytes)
    return MHA_OK;
  (void)mha_shape_text(tensor->rank, tensor->shape, shape, 100);
  return refuse_tensor(s, tensor->name, "shape and dtype fill the data_offsets",
                       "has %zu bytes, but shape %s of %s needs %" PRId64 "%s", tensor->bytes,
                       shape, tensor->type, needed / 8, needed % 8 ? " and a part of one" : "");
}

/* Copies a text to *place and moves *place behind it. */
static const char *keep_text(char **place, const char *text) {
  const size_t bytes = strlen(text) + 1;
  char *kept = memcpy(*place, text, bytes);
  *place += bytes;
  return kept;
}

static mha_status read_tensor(const source *s, const char *name, json_t *entry, char **place,
                              mha_raw_tensor *tensor) {
  char shown[MHA_SHOWN_BYTES];
  const char *text = type_text(entry);
  const int type = known_type(text);
  memset(tensor, 0, sizeof *tensor);
  tensor->name = keep_text(place, name);
  tensor->type =
      type >= 0 ? types[type].text : keep_text(place, mha_shown_text(text, strlen(text), shown));
  tensor->element = type >= 0 ? types[type].element : MHA_RAW_OTHER;
  mha_status status = read_shape(s, json_object_get(entry, "shape"), tensor);
  if (!status)
    status = read_offsets(s, json_object_get(entry, "data_offsets"), tensor);
  return status || type < 0 ? status : check_size(s, tensor, types[type].bits);
}

static mha_status read_tensors(const source *s, json_t *root, char *texts,
                               mha_safetensors *parsed) {
  const char *name = NULL;
  json_t *entry = NULL;
  int64_t next = 0;
  json_object_foreach(root, name, entry) {
    if (strcmp(name, metadata_key) == 0)
      continue;
    const mha_status status = read_tensor(s, name, entry, &texts, &parsed->items[next++]);
    if (status)
      return status;
  }
  parsed->n = next;
  return MHA_OK;
}

/* ---- All tensors ----------------------------------------------------------------------------- */

static int by_place(const void *left, const void *right) {
  const mha_raw_tensor *a = left;
  const mha_raw_tensor *b = right;
  if (a->data != b->data)
    return a->data < b->data ? -1 : 1;
  return a->bytes < b->bytes ? -1 : a->bytes > b->bytes;
}

static int by_name(const void *left, const void *right) {
  return strcmp(((const mha_raw_tensor *)left)->name, ((const mha_raw_tensor *)right)->name);
}

/* The tensors, sorted by place, follow each other without a step. */
static mha_status check_coverage(const source *s, const mha_raw_tensor *items, int64_t n) {
  static const char rule[] = "tensors cover the bytes behind the header, each byte once";
  const unsigned char *at = s->data;
  for (int64_t i = 0; i < n; i++) {
    char before[MHA_SHOWN_BYTES];
    const mha_raw_tensor *item = &items[i];
    const size_t begin = (size_t)(item->data - s->data);
    if (item->data > at)
      return refuse_tensor(s, item->name, rule, "begins at %zu, behind a hole of %zu bytes", begin,
                           (size_t)(item->data - at));
    if (item->data < at)
      return refuse_tensor(s, item->name, rule, "begins at %zu, %zu bytes before the end of \"%s\"",
                           begin, (size_t)(at - item->data),
                           mha_shown_text(items[i - 1].name, strlen(items[i - 1].name), before));
    at += item->bytes;
  }
  const size_t rest = s->data_bytes - (size_t)(at - s->data);
  return rest == 0 ? MHA_OK : refuse(s, rule, "%zu bytes follow the last tensor", rest);
}

/* Makes room for n > 0 tensors; returns the place of their text, or NULL without memory. */
static char *allocate(int64_t n, size_t n_text, mha_safetensors *parsed) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(mha_raw_tensor), n, 1, 1);
  const size_t text_at = mha_layout_add(&layout, 1, (int64_t)n_text, 1, 1);
  unsigned char *block =
      layout.overflow ? NULL : mha_memory_allocate(&parsed->allocator, layout.bytes);
  if (!block)
    return NULL;
  parsed->memory_bytes = layout.bytes;
  parsed->items = (mha_raw_tensor *)(void *)block;
  return (char *)block + text_at;
}

static mha_status read_tree(const source *s, json_t *root, mha_safetensors *parsed) {
  int64_t n = 0;
  size_t n_text = 0;
  mha_status status = check_entries(s, root, &n, &n_text);
  if (status || n == 0)
    return status ? status : check_coverage(s, NULL, 0);
  char *texts = allocate(n, n_text, parsed);
  if (!texts)
    return fail_memory(s);
  status = read_tensors(s, root, texts, parsed);
  if (status)
    return status;
  qsort(parsed->items, (size_t)n, sizeof parsed->items[0], by_place);
  status = check_coverage(s, parsed->items, n);
  if (!status)
    qsort(parsed->items, (size_t)n, sizeof parsed->items[0], by_name);
  return status;
}

mha_status mha_safetensors_parse(const char *name, const void *bytes, size_t n_bytes,
                                 const mha_allocator *allocator, mha_safetensors *parsed,
                                 mha_error *error) {
  source s = {.name = mha_shown_path(name), .error = error};
  size_t header_bytes = 0;
  json_t *root = NULL;
  memset(parsed, 0, sizeof *parsed);
  parsed->allocator = mha_memory_allocator(allocator);
  mha_status status = find_header(&s, bytes, n_bytes, &header_bytes);
  if (!status)
    status = check_outline(&s, (const char *)bytes + LENGTH_BYTES, header_bytes);
  if (!status)
    status = parse_json(&s, (const char *)bytes + LENGTH_BYTES, header_bytes, &root);
  if (!status)
    status = read_tree(&s, root, parsed);
  json_decref(root);
  if (!status)
    return mha_succeed(error);
  mha_safetensors_release(parsed);
  return status;
}

void mha_safetensors_release(mha_safetensors *parsed) {
  if (parsed->items)
    mha_memory_release(&parsed->allocator, parsed->items, parsed->memory_bytes);
  memset(parsed, 0, sizeof *parsed);
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* The header with its length before it. */
typedef struct header {
  unsigned char *bytes;
  size_t n;
  mha_allocator allocator;
} header;

static mha_status check_name(const char *path, const mha_tensor_to_write *tensor,
                             mha_error *error) {
  char shown[MHA_SHOWN_BYTES];
  const char *fault = mha_name_fault(tensor->name);
  if (!fault && strcmp(tensor->name, metadata_key) == 0)
    fault = "is reserved";
  if (!fault)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_VALUE,
                  "the tensor name \"%s\" for %s %s; rule: names are UTF-8 without control "
                  "characters, and not __metadata__",
                  mha_shown_text(tensor->name, strlen(tensor->name), shown), mha_shown_path(path),
                  fault);
}

/* Adds one entry; jansson takes NULL, for want of memory, as a failure. The parts belong to the
 * tree once they are handed over, whatever comes of it. */
static bool add_entry(json_t *root, const mha_tensor_to_write *tensor, int64_t begin, int64_t end) {
  json_t *shape = json_array();
  json_t *offsets = json_array();
  json_t *entry = json_object();
  int failed = 0;
  for (int axis = 0; axis < tensor->rank; axis++)
    failed |= json_array_append_new(shape, json_integer(tensor->shape[axis]));
  failed |= json_array_append_new(offsets, json_integer(begin));
  failed |= json_array_append_new(offsets, json_integer(end));
  failed |= json_object_set_new(entry, "dtype", json_string("F32"));
  failed |= json_object_set_new(entry, "shape", shape);
  failed |= json_object_set_new(entry, "data_offsets", offsets);
  failed |= json_object_set_new(root, tensor->name, entry);
  return failed == 0;
}

/* *end = begin + the bytes of the tensor. */
static bool end_of(const mha_tensor_to_write *tensor, int64_t begin, int64_t *end) {
  int64_t bytes = sizeof(float);
  for (int axis = 0; axis < tensor->rank; axis++)
    if (!mha_multiply(bytes, tensor->shape[axis], &bytes))
      return false;
  return mha_add(begin, bytes, end);
}

static mha_status build_tree(const char *path, const mha_tensor_to_write *tensors, int n,
                             json_t *root, mha_error *error) {
  int64_t begin = 0;
  for (int i = 0; i < n; i++) {
    char shown[MHA_SHOWN_BYTES];
    const mha_tensor_to_write *tensor = &tensors[i];
    int64_t end = 0;
    const mha_status status = check_name(path, tensor, error);
    if (status)
      return status;
    (void)mha_shown_text(tensor->name, strlen(tensor->name), shown);
    if (json_object_get(root, tensor->name))
      return mha_fail(error, MHA_ERROR_VALUE,
                      "the tensor name \"%s\" for %s stands twice; rule: each name once", shown,
                      mha_shown_path(path));
    if (!end_of(tensor, begin, &end))
      return mha_fail(error, MHA_ERROR_OVERFLOW,
                      "the end of tensor \"%s\" in %s overflows; rule: it fits 63 bits", shown,
                      mha_shown_path(path));
    if (!add_entry(root, tensor, begin, end))
      return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                      mha_shown_path(path));
    begin = end;
  }
  return MHA_OK;
}

/* The tree as text, filled up with spaces so that the numbers begin at a multiple of 8. */
static mha_status print_tree(const char *path, const json_t *root, header *made, mha_error *error) {
  const size_t used = json_dumpb(root, NULL, 0, JSON_COMPACT);
  const size_t length = (used + 7) / 8 * 8;
  if (length > MHA_SAFETENSORS_HEADER_LIMIT)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the header of %s has %zu bytes; rule: at most 100000000", mha_shown_path(path),
                    length);
  made->n = LENGTH_BYTES + length;
  made->bytes = mha_memory_allocate(&made->allocator, made->n);
  if (used == 0 || !made->bytes ||
      json_dumpb(root, (char *)made->bytes + LENGTH_BYTES, used, JSON_COMPACT) != used)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                    mha_shown_path(path));
  for (size_t i = 0; i < LENGTH_BYTES; i++)
    made->bytes[i] = (unsigned char)((uint64_t)length >> 8 * i & 0xFFU);
  memset(made->bytes + LENGTH_BYTES + used, ' ', length - used);
  return MHA_OK;
}

/* Row by row, which may lie further apart than they are long. */
static mha_status write_numbers(mha_output *output, const mha_tensor_to_write *tensor,
                                mha_error *error) {
  const int64_t rows = tensor->rank == 2 ? tensor->shape[0] : 1;
  const int64_t width = tensor->rank == 0 ? 1 : tensor->shape[tensor->rank - 1];
  mha_status status = MHA_OK;
  if (tensor->row_stride == width)
    return mha_output_write_floats(output, tensor->data, rows * width, error);
  for (int64_t row = 0; !status && row < rows; row++)
    status = mha_output_write_floats(output, tensor->data + row * tensor->row_stride, width, error);
  return status;
}

static mha_status write_file(const char *path, const header *made,
                             const mha_tensor_to_write *tensors, int n, mha_error *error) {
  mha_output output;
  mha_status status = mha_output_open(path, &output, error);
  if (status)
    return status;
  status = mha_output_write(&output, made->bytes, made->n, error);
  for (int i = 0; !status && i < n; i++)
    status = write_numbers(&output, &tensors[i], error);
  if (!status)
    status = mha_output_sync(&output, error);
  return status ? status : mha_output_commit(&output, error);
}

mha_status mha_safetensors_write(const char *path, const mha_tensor_to_write *tensors, int n,
                                 mha_error *error) {
  header made = {NULL, 0, mha_memory_allocator(NULL)};
  json_t *root = json_object();
  mha_status status = root ? build_tree(path, tensors, n, root, error)
                           : mha_fail(error, MHA_ERROR_MEMORY, "no memory for the header of %s",
                                      mha_shown_path(path));
  if (!status)
    status = print_tree(path, root, &made, error);
  json_decref(root);
  if (!status)
    status = write_file(path, &made, tensors, n, error);
  mha_memory_release(&made.allocator, made.bytes, made.n);
  return status;
}
