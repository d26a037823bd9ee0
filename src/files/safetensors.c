/* Owns the reading of the safetensors format. jansson's allocations are the C library's: its
 * allocator could be replaced for the whole process only.
 *
 * The reader takes jansson's tree for what it is, a JSON value of any form, and looks at it twice:
 * first at the form of each entry, so that what is allocated is bounded by what is there, then at
 * the numbers. */
#include "safetensors.h"

#include "base/error.h"
#include "base/memory.h"
#include "path.h"
#include "safetensors_header.h"
#include "text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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

/* ---- The form of its entries ----------------------------------------------------------------- */

static mha_status check_metadata(const mha_header_source *s, json_t *metadata) {
  static const char rule[] = "__metadata__ is an object of strings";
  char shown[MHA_SHOWN_BYTES];
  const char *key = NULL;
  json_t *value = NULL;
  if (!json_is_object(metadata))
    return mha_header_refuse(s, rule, "__metadata__ is no object");
  json_object_foreach(metadata, key, value) {
    if (!json_is_string(value))
      return mha_header_refuse(s, rule, "the value of \"%s\" in __metadata__ is no string",
                               mha_shown_text(key, strlen(key), shown));
  }
  return MHA_OK;
}

static mha_status check_form(const mha_header_source *s, const char *name, json_t *entry) {
  static const char rule[] = "a tensor is an object of dtype, shape and data_offsets";
  const char *fault = mha_name_fault(name);
  if (fault)
    return mha_header_refuse_tensor(s, name, "names are text without control characters", "%s",
                                    fault);
  if (!json_is_object(entry))
    return mha_header_refuse_tensor(s, name, rule, "is no object");
  if (!json_is_string(json_object_get(entry, "dtype")))
    return mha_header_refuse_tensor(s, name, rule, "has no string dtype");
  if (!json_is_array(json_object_get(entry, "shape")))
    return mha_header_refuse_tensor(s, name, rule, "has no array shape");
  if (!json_is_array(json_object_get(entry, "data_offsets")))
    return mha_header_refuse_tensor(s, name, rule, "has no array data_offsets");
  if (json_object_size(entry) != 3)
    return mha_header_refuse_tensor(s, name, rule, "has %zu members", json_object_size(entry));
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

/* What a header holds. */
typedef struct header_size {
  int64_t tensors, pairs;
  size_t text_bytes;
} header_size;

static void count_metadata(json_t *metadata, header_size *size) {
  const char *key = NULL;
  json_t *value = NULL;
  json_object_foreach(metadata, key, value) {
    size->pairs++;
    size->text_bytes += strlen(key) + strlen(json_string_value(value)) + 2;
  }
}

/* Counts the tensors, the metadata and the bytes of their text; afterwards each has the right form.
 */
static mha_status check_entries(const mha_header_source *s, json_t *root, header_size *size) {
  const char *name = NULL;
  json_t *entry = NULL;
  json_object_foreach(root, name, entry) {
    const bool is_tensor = strcmp(name, metadata_key) != 0;
    const mha_status status = is_tensor ? check_form(s, name, entry) : check_metadata(s, entry);
    if (status)
      return status;
    if (is_tensor) {
      size->tensors++;
      size->text_bytes += text_bytes(name, entry);
    } else {
      count_metadata(entry, size);
    }
  }
  return MHA_OK;
}

/* ---- One tensor ------------------------------------------------------------------------------ */

/* A zero in the shape is taken as a one: the product bounds every stride. */
static mha_status read_shape(const mha_header_source *s, json_t *shape, mha_raw_tensor *tensor) {
  static const char dimensions_rule[] = "dimensions are integers, 0 or more";
  int64_t bound = 1;
  bool empty = false;
  const size_t rank = json_array_size(shape);
  for (size_t axis = 0; axis < rank; axis++) {
    json_t *number = json_array_get(shape, axis);
    const int64_t dimension = json_integer_value(number);
    if (!json_is_integer(number))
      return mha_header_refuse_tensor(s, tensor->name, dimensions_rule,
                                      "has a shape whose element %zu is no integer", axis);
    if (dimension < 0)
      return mha_header_refuse_tensor(s, tensor->name, dimensions_rule,
                                      "has a shape whose element %zu is %" PRId64, axis, dimension);
    if (!mha_multiply(bound, dimension ? dimension : 1, &bound))
      return mha_header_refuse_tensor(s, tensor->name, "it fits 63 bits",
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

static mha_status read_offsets(const mha_header_source *s, json_t *offsets,
                               mha_raw_tensor *tensor) {
  json_t *first = json_array_get(offsets, 0);
  json_t *second = json_array_get(offsets, 1);
  const int64_t begin = json_integer_value(first);
  const int64_t end = json_integer_value(second);
  if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(second))
    return mha_header_refuse_tensor(s, tensor->name, "data_offsets are two integers",
                                    "has data_offsets of %zu elements%s", json_array_size(offsets),
                                    json_array_size(offsets) == 2 ? " that are not both integers"
                                                                  : "");
  if (begin < 0 || end < begin)
    return mha_header_refuse_tensor(s, tensor->name, "0 <= begin <= end",
                                    "has data_offsets [%" PRId64 ", %" PRId64 "]", begin, end);
  if ((uint64_t)end > s->data_bytes)
    return mha_header_refuse_tensor(s, tensor->name, "tensors lie within the file",
                                    "has data_offsets [%" PRId64 ", %" PRId64
                                    "], but %zu bytes follow the "
                                    "header, %" PRIu64 " too few",
                                    begin, end, s->data_bytes, (uint64_t)end - s->data_bytes);
  tensor->data = s->data + begin;
  tensor->bytes = (size_t)(end - begin);
  return MHA_OK;
}

/* Whether the shape of a known type fills the tensor's bytes. */
static mha_status check_size(const mha_header_source *s, const mha_raw_tensor *tensor, int bits) {
  char shape[128];
  int64_t needed = 0;
  if (!mha_multiply(tensor->n_elements, bits, &needed))
    return mha_header_refuse_tensor(s, tensor->name, "it fits 63 bits",
                                    "has a size in bits that overflows");
  if (needed % 8 == 0 && (uint64_t)needed / 8 == tensor->bytes)
    return MHA_OK;
  (void)mha_shape_text(tensor->rank, tensor->shape, shape, 100);
  return mha_header_refuse_tensor(s, tensor->name, "shape and dtype fill the data_offsets",
                                  "has %zu bytes, but shape %s of %s needs %" PRId64 "%s",
                                  tensor->bytes, shape, tensor->type, needed / 8,
                                  needed % 8 ? " and a part of one" : "");
}

/* Copies a text to *place and moves *place behind it. */
static const char *keep_text(char **place, const char *text) {
  const size_t bytes = strlen(text) + 1;
  char *kept = memcpy(*place, text, bytes);
  *place += bytes;
  return kept;
}

static mha_status read_tensor(const mha_header_source *s, const char *name, json_t *entry,
                              char **place, mha_raw_tensor *tensor) {
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

static mha_status read_tensors(const mha_header_source *s, json_t *root, char **texts,
                               mha_safetensors *parsed) {
  const char *name = NULL;
  json_t *entry = NULL;
  int64_t next = 0;
  json_object_foreach(root, name, entry) {
    if (strcmp(name, metadata_key) == 0)
      continue;
    const mha_status status = read_tensor(s, name, entry, texts, &parsed->items[next++]);
    if (status)
      return status;
  }
  parsed->n = next;
  return MHA_OK;
}

static void keep_metadata(json_t *root, char *texts, mha_safetensors *parsed) {
  const char *key = NULL;
  json_t *value = NULL;
  json_object_foreach(json_object_get(root, metadata_key), key, value) {
    mha_text_pair *pair = &parsed->pairs[parsed->n_pairs++];
    pair->key = keep_text(&texts, key);
    pair->value = keep_text(&texts, json_string_value(value));
  }
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
static mha_status check_coverage(const mha_header_source *s, const mha_raw_tensor *items,
                                 int64_t n) {
  static const char rule[] = "tensors cover the bytes behind the header, each byte once";
  const unsigned char *at = s->data;
  for (int64_t i = 0; i < n; i++) {
    char before[MHA_SHOWN_BYTES];
    const mha_raw_tensor *item = &items[i];
    const size_t begin = (size_t)(item->data - s->data);
    if (item->data > at)
      return mha_header_refuse_tensor(s, item->name, rule,
                                      "begins at %zu, behind a hole of %zu bytes", begin,
                                      (size_t)(item->data - at));
    if (item->data < at)
      return mha_header_refuse_tensor(
          s, item->name, rule, "begins at %zu, %zu bytes before the end of \"%s\"", begin,
          (size_t)(at - item->data),
          mha_shown_text(items[i - 1].name, strlen(items[i - 1].name), before));
    at += item->bytes;
  }
  const size_t rest = s->data_bytes - (size_t)(at - s->data);
  return rest == 0 ? MHA_OK : mha_header_refuse(s, rule, "%zu bytes follow the last tensor", rest);
}

/* Makes room for what there is, which is something; returns the place of its text, or NULL without
 * memory. */
static char *allocate(const header_size *size, mha_safetensors *parsed) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(mha_raw_tensor), size->tensors, 1, 1);
  const size_t pairs_at = mha_layout_add(&layout, sizeof(mha_text_pair), size->pairs, 1, 1);
  const size_t text_at = mha_layout_add(&layout, 1, (int64_t)size->text_bytes, 1, 1);
  unsigned char *block =
      layout.overflow ? NULL : mha_memory_allocate(&parsed->allocator, layout.bytes);
  if (!block)
    return NULL;
  parsed->memory = block;
  parsed->memory_bytes = layout.bytes;
  parsed->items = (mha_raw_tensor *)(void *)block;
  parsed->pairs = (mha_text_pair *)(void *)(block + pairs_at);
  return (char *)block + text_at;
}

static mha_status read_tree(const mha_header_source *s, json_t *root, mha_safetensors *parsed) {
  header_size size = {0};
  mha_status status = check_entries(s, root, &size);
  if (status || (size.tensors == 0 && size.pairs == 0))
    return status ? status : check_coverage(s, NULL, 0);
  char *texts = allocate(&size, parsed);
  if (!texts)
    return mha_header_fail_memory(s);
  const int64_t n = size.tensors;
  status = read_tensors(s, root, &texts, parsed);
  if (status)
    return status;
  keep_metadata(root, texts, parsed);
  qsort(parsed->items, (size_t)n, sizeof parsed->items[0], by_place);
  status = check_coverage(s, parsed->items, n);
  if (!status)
    qsort(parsed->items, (size_t)n, sizeof parsed->items[0], by_name);
  return status;
}

mha_status mha_safetensors_parse(const char *name, const void *bytes, size_t n_bytes,
                                 const mha_allocator *allocator, mha_safetensors *parsed,
                                 mha_error *error) {
  mha_header_source s = {.name = mha_shown_path(name), .error = error};
  json_t *root = NULL;
  memset(parsed, 0, sizeof *parsed);
  parsed->allocator = mha_memory_allocator(allocator);
  mha_status status = mha_header_parse(&s, bytes, n_bytes, &root);
  if (!status)
    status = read_tree(&s, root, parsed);
  json_decref(root);
  if (!status)
    return mha_succeed(error);
  mha_safetensors_release(parsed);
  return status;
}

const char *mha_safetensors_metadata(const mha_safetensors *parsed, const char *key) {
  for (int64_t i = 0; i < parsed->n_pairs; i++)
    if (strcmp(parsed->pairs[i].key, key) == 0)
      return parsed->pairs[i].value;
  return NULL;
}

void mha_safetensors_release(mha_safetensors *parsed) {
  if (parsed->memory)
    mha_memory_release(&parsed->allocator, parsed->memory, parsed->memory_bytes);
  memset(parsed, 0, sizeof *parsed);
}
