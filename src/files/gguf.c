/* Owns the reading of the GGUF format.
 *
 * The descriptions of the tensors are walked through twice: first to find where they end, so that
 * what is allocated is bounded by what is there, then to read them. */
#include "gguf.h"

#include "base/memory.h"
#include "gguf_metadata.h"
#include "model.h"
#include "path.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* More than any file of weights has; and what the description of a tensor takes at least. */
enum { MOST_PAIRS = 65536, MOST_TENSORS = 262144, DESCRIPTION_BYTES = 24 };

/* "type " and ten digits, the zero included: no more than a description's numbers. */
enum { TYPE_TEXT_BYTES = 16 };

/* By their number in the file; no text = not known. A block is `block` numbers in `bytes` bytes. */
static const struct {
  const char *text;
  int64_t block, bytes;
  mha_raw_type element;
} types[] = {
    [0] = {"F32", 1, 4, MHA_RAW_F32},           [1] = {"F16", 1, 2, MHA_RAW_F16},
    [2] = {"Q4_0", 32, 18, MHA_RAW_Q4_0},       [3] = {"Q4_1", 32, 20, MHA_RAW_OTHER},
    [6] = {"Q5_0", 32, 22, MHA_RAW_OTHER},      [7] = {"Q5_1", 32, 24, MHA_RAW_OTHER},
    [8] = {"Q8_0", 32, 34, MHA_RAW_Q8_0},       [9] = {"Q8_1", 32, 36, MHA_RAW_OTHER},
    [10] = {"Q2_K", 256, 84, MHA_RAW_OTHER},    [11] = {"Q3_K", 256, 110, MHA_RAW_OTHER},
    [12] = {"Q4_K", 256, 144, MHA_RAW_OTHER},   [13] = {"Q5_K", 256, 176, MHA_RAW_OTHER},
    [14] = {"Q6_K", 256, 210, MHA_RAW_OTHER},   [15] = {"Q8_K", 256, 292, MHA_RAW_OTHER},
    [16] = {"IQ2_XXS", 256, 66, MHA_RAW_OTHER}, [17] = {"IQ2_XS", 256, 74, MHA_RAW_OTHER},
    [18] = {"IQ3_XXS", 256, 98, MHA_RAW_OTHER}, [19] = {"IQ1_S", 256, 50, MHA_RAW_OTHER},
    [20] = {"IQ4_NL", 32, 18, MHA_RAW_OTHER},   [21] = {"IQ3_S", 256, 110, MHA_RAW_OTHER},
    [22] = {"IQ2_S", 256, 82, MHA_RAW_OTHER},   [23] = {"IQ4_XS", 256, 136, MHA_RAW_OTHER},
    [24] = {"I8", 1, 1, MHA_RAW_OTHER},         [25] = {"I16", 1, 2, MHA_RAW_OTHER},
    [26] = {"I32", 1, 4, MHA_RAW_OTHER},        [27] = {"I64", 1, 8, MHA_RAW_OTHER},
    [28] = {"F64", 1, 8, MHA_RAW_F64},          [29] = {"IQ1_M", 256, 56, MHA_RAW_OTHER},
    [30] = {"BF16", 1, 2, MHA_RAW_BF16},        [34] = {"TQ1_0", 256, 54, MHA_RAW_OTHER},
    [35] = {"TQ2_0", 256, 66, MHA_RAW_OTHER},   [39] = {"MXFP4", 32, 17, MHA_RAW_OTHER},
};

/* The file that is being read, and where its numbers lie. */
typedef struct reader {
  mha_gguf_bytes b;
  mha_gguf_metadata metadata;
  int64_t n_tensors, n_pairs;
  const unsigned char *data;
  size_t data_bytes;
  char *texts; /* where the next text goes */
} reader;

static bool is_known(uint32_t type) {
  return type < sizeof types / sizeof types[0] && types[type].text;
}

/* ---- The head -------------------------------------------------------------------------------- */

static mha_status check_version(reader *r) {
  static const char magic_rule[] = "a GGUF file begins with \"GGUF\"";
  const unsigned char *magic = NULL;
  uint32_t version = 0;
  mha_status status = mha_gguf_take(&r->b, 4, "a beginning", &magic);
  if (!status && memcmp(magic, "GGUF", 4) != 0)
    status = mha_gguf_refuse(&r->b, 0, magic_rule, "does not");
  if (!status)
    status = mha_gguf_take_u32(&r->b, "a version", &version);
  if (status || version == 2 || version == 3)
    return status;
  if (version > 0 && (version & 0xFFFFU) == 0)
    return mha_gguf_fail_unsupported(&r->b, 4, "a little-endian file",
                                     "is big-endian by its version, 0x%08" PRIX32, version);
  return mha_gguf_fail_unsupported(&r->b, 4, "2 or 3", "is of version %" PRIu32, version);
}

/* A count of things of which each takes so many bytes at least. */
static mha_status take_count(reader *r, const char *what, int64_t most, size_t least_bytes,
                             int64_t *n) {
  uint64_t count = 0;
  const mha_status status = mha_gguf_take_u64(&r->b, what, &count);
  if (status)
    return status;
  if (count > (uint64_t)most)
    return mha_gguf_refuse(&r->b, r->b.at - 8, "no file of weights has as many",
                           "has %s of %" PRIu64, what, count);
  if (count > mha_gguf_left(&r->b) / least_bytes)
    return mha_gguf_refuse(&r->b, r->b.at - 8, "the file holds all that it promises",
                           "has %s of %" PRIu64 ", but %zu bytes follow", what, count,
                           mha_gguf_left(&r->b));
  *n = (int64_t)count;
  return MHA_OK;
}

static mha_status read_head(reader *r) {
  mha_status status = check_version(r);
  if (!status)
    status = take_count(r, "a tensor count", MOST_TENSORS, DESCRIPTION_BYTES, &r->n_tensors);
  if (!status)
    status = take_count(r, "a metadata count", MOST_PAIRS, MHA_GGUF_PAIR_BYTES, &r->n_pairs);
  return status ? status : mha_gguf_read_metadata(&r->b, r->n_pairs, &r->metadata);
}

/* ---- One tensor ------------------------------------------------------------------------------ */

/* What a description says, of which only the lengths are checked. */
typedef struct description {
  mha_gguf_text name;
  uint32_t rank, type;
  uint64_t offset;
  const unsigned char *dimensions; /* 8 bytes each */
  size_t dimensions_at, offset_at; /* in the file */
} description;

static mha_status take_description(reader *r, description *d) {
  mha_gguf_bytes *b = &r->b;
  b->within.text = NULL;
  mha_status status = mha_gguf_take_text(b, "a tensor's name", &d->name);
  if (status)
    return status;
  b->within = d->name;
  status = mha_gguf_take_u32(b, "a rank", &d->rank);
  d->dimensions_at = b->at;
  if (!status)
    status = mha_gguf_take(b, UINT64_C(8) * d->rank, "dimensions", &d->dimensions);
  if (!status && d->rank > MHA_MAX_RANK)
    return mha_gguf_fail_unsupported(b, d->dimensions_at - 4, "at most 8 are loaded",
                                     "has %" PRIu32 " dimensions", d->rank);
  if (!status)
    status = mha_gguf_take_u32(b, "a type", &d->type);
  d->offset_at = b->at;
  return status ? status : mha_gguf_take_u64(b, "an offset", &d->offset);
}

/* A zero in the shape is taken as a one: the product bounds every stride. */
static mha_status read_shape(const reader *r, const description *d, mha_raw_tensor *tensor) {
  int64_t bound = 1;
  bool empty = false;
  tensor->rank = (int)d->rank;
  for (uint32_t k = 0; k < d->rank; k++) {
    const size_t at = d->dimensions_at + (size_t)8 * k;
    const uint64_t dimension = mha_gguf_number(d->dimensions + (size_t)8 * k, 8);
    if (dimension > INT64_MAX)
      return mha_gguf_refuse(&r->b, at, "a dimension fits 63 bits", "has a dimension of %" PRIu64,
                             dimension);
    if (!mha_multiply(bound, dimension ? (int64_t)dimension : 1, &bound))
      return mha_gguf_refuse(&r->b, at, "it fits 63 bits", "has a shape whose product overflows");
    empty = empty || dimension == 0;
    tensor->shape[d->rank - 1 - k] = (int64_t)dimension;
  }
  tensor->n_elements = empty ? 0 : bound;
  return MHA_OK;
}

/* Bytes of a tensor of a type that is known, whose rows are whole blocks. */
static mha_status read_size(const reader *r, const description *d, mha_raw_tensor *tensor) {
  const int64_t block = types[d->type].block;
  const int64_t row = tensor->rank > 0 ? tensor->shape[tensor->rank - 1] : 1;
  int64_t bytes = 0;
  if (row % block != 0)
    return mha_gguf_refuse(&r->b, d->dimensions_at, "rows are whole blocks",
                           "has rows of %" PRId64 " numbers in blocks of %" PRId64, row, block);
  if (!mha_multiply(tensor->n_elements / block, types[d->type].bytes, &bytes))
    return mha_gguf_refuse(&r->b, d->dimensions_at, "it fits 63 bits",
                           "has a size in bytes that overflows");
  const size_t left = r->data_bytes - (size_t)(tensor->data - r->data);
  if ((uint64_t)bytes > left)
    return mha_gguf_refuse(&r->b, d->offset_at, "tensors lie within the file",
                           "has %" PRId64 " bytes of %s at offset %" PRIu64
                           ", but the file has %zu",
                           bytes, tensor->type, d->offset, left);
  tensor->bytes = (size_t)bytes;
  return MHA_OK;
}

static mha_status read_place(const reader *r, const description *d, mha_raw_tensor *tensor) {
  if (d->offset % r->metadata.alignment != 0)
    return mha_gguf_refuse(&r->b, d->offset_at, "a multiple of the alignment",
                           "has the offset %" PRIu64 " at an alignment of %" PRIu32, d->offset,
                           r->metadata.alignment);
  if (d->offset > r->data_bytes)
    return mha_gguf_refuse(&r->b, d->offset_at, "tensors lie within the file",
                           "has the offset %" PRIu64 ", but the file has %zu bytes of numbers",
                           d->offset, r->data_bytes);
  tensor->data = r->data + (size_t)d->offset;
  return MHA_OK;
}

/* Copies the name, and the type's text where that is not known. */
static mha_status keep_texts(reader *r, const description *d, mha_raw_tensor *tensor) {
  tensor->name = r->texts;
  const char *fault = mha_gguf_copy_name(d->name, r->texts);
  r->texts += d->name.n + 1;
  if (fault)
    return mha_gguf_refuse(&r->b, d->dimensions_at - 4 - d->name.n,
                           "names are text without control characters", "%s", fault);
  tensor->type = is_known(d->type) ? types[d->type].text : r->texts;
  tensor->element = is_known(d->type) ? types[d->type].element : MHA_RAW_OTHER;
  if (!is_known(d->type))
    r->texts += snprintf(r->texts, TYPE_TEXT_BYTES, "type %" PRIu32, d->type) + 1;
  return MHA_OK;
}

static mha_status read_tensor(reader *r, mha_raw_tensor *tensor) {
  description d;
  memset(tensor, 0, sizeof *tensor);
  mha_status status = take_description(r, &d);
  if (!status)
    status = keep_texts(r, &d, tensor);
  if (!status)
    status = read_shape(r, &d, tensor);
  if (!status)
    status = read_place(r, &d, tensor);
  return status || !is_known(d.type) ? status : read_size(r, &d, tensor);
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

/* Whether it is of a type whose size is not known: the only ones with numbers and no bytes. */
static bool is_open(const mha_raw_tensor *tensor) {
  return tensor->n_elements > 0 && tensor->bytes == 0;
}

/* The tensors, sorted by place, do not overlap. One of an unknown size reaches to the next one, or
 * to the end of the file. */
static mha_status check_places(reader *r, mha_raw_tensor *items) {
  const mha_raw_tensor *before = NULL;
  for (int64_t i = 0; i < r->n_tensors; i++) {
    char shown[MHA_SHOWN_BYTES];
    mha_raw_tensor *item = &items[i];
    if (is_open(item))
      item->bytes = (size_t)((i + 1 < r->n_tensors ? items[i + 1].data : r->data + r->data_bytes) -
                             item->data);
    const size_t begin = (size_t)(item->data - r->b.bytes);
    r->b.within = (mha_gguf_text){item->name, strlen(item->name)};
    if (is_open(item))
      return mha_gguf_refuse(&r->b, begin, "tensors do not overlap", "has no room for its numbers");
    if (item->bytes > 0 && before && item->data < before->data + before->bytes)
      return mha_gguf_refuse(&r->b, begin, "tensors do not overlap",
                             "begins before the end of \"%s\"",
                             mha_shown_text(before->name, strlen(before->name), shown));
    if (item->bytes > 0)
      before = item;
  }
  return MHA_OK;
}

static mha_status check_names(reader *r, const mha_raw_tensor *items) {
  for (int64_t i = 1; i < r->n_tensors; i++) {
    r->b.within = (mha_gguf_text){items[i].name, strlen(items[i].name)};
    if (strcmp(items[i - 1].name, items[i].name) == 0)
      return mha_gguf_refuse(&r->b, (size_t)(items[i].data - r->b.bytes), "each name once",
                             "is the name of two tensors, one with numbers");
  }
  return MHA_OK;
}

/* Takes the descriptions for their lengths alone; tells how many bytes they have. */
static mha_status measure_descriptions(reader *r, size_t *n_bytes) {
  const size_t begin = r->b.at;
  description d;
  mha_status status = MHA_OK;
  for (int64_t i = 0; !status && i < r->n_tensors; i++)
    status = take_description(r, &d);
  *n_bytes = r->b.at - begin;
  if (status)
    return status;
  r->b.within.text = NULL;
  const size_t over = r->b.at % r->metadata.alignment;
  const size_t padding = over > 0 ? r->metadata.alignment - over : 0;
  const size_t left = mha_gguf_left(&r->b);
  r->data = r->b.bytes + r->b.at + (padding < left ? padding : left);
  r->data_bytes = left - (padding < left ? padding : left);
  r->b.at = begin;
  return MHA_OK;
}

static mha_status read_tensors(reader *r, mha_raw_tensor *items) {
  mha_status status = MHA_OK;
  for (int64_t i = 0; !status && i < r->n_tensors; i++)
    status = read_tensor(r, &items[i]);
  if (status || r->n_tensors == 0)
    return status;
  qsort(items, (size_t)r->n_tensors, sizeof items[0], by_place);
  status = check_places(r, items);
  if (status)
    return status;
  qsort(items, (size_t)r->n_tensors, sizeof items[0], by_name);
  return check_names(r, items);
}

static mha_status read_model(reader *r, mha_gguf *parsed) {
  parsed->model = r->metadata.model;
  parsed->rope_is_scaled = r->metadata.rope_is_scaled;
  if (!r->metadata.architecture.text)
    return MHA_OK;
  r->b.within = (mha_gguf_text){"general.architecture", strlen("general.architecture")};
  const char *fault = mha_gguf_copy_name(r->metadata.architecture, r->texts);
  if (fault)
    return mha_gguf_refuse(&r->b,
                           (size_t)(r->metadata.architecture.text - (const char *)r->b.bytes),
                           "it is text without control characters", "%s", fault);
  parsed->model.architecture = r->texts;
  parsed->model.rope = mha_model_rope(r->texts);
  r->texts += r->metadata.architecture.n + 1;
  return MHA_OK;
}

/* Makes room for the tensors and all text: a description has more bytes than its name and a type's
 * text with their zeros. */
static mha_status allocate(reader *r, size_t description_bytes, mha_gguf *parsed) {
  mha_layout layout = {0};
  const size_t n_text = description_bytes + r->metadata.architecture.n + 1;
  (void)mha_layout_add(&layout, sizeof(mha_raw_tensor), r->n_tensors, 1, 1);
  const size_t text_at = mha_layout_add(&layout, 1, (int64_t)n_text, 1, 1);
  parsed->memory = layout.overflow ? NULL : mha_memory_allocate(&parsed->allocator, layout.bytes);
  if (!parsed->memory)
    return mha_fail(r->b.error, MHA_ERROR_MEMORY, "no memory for the header of %s", r->b.name);
  parsed->memory_bytes = layout.bytes;
  parsed->items = parsed->memory;
  r->texts = (char *)parsed->memory + text_at;
  return MHA_OK;
}

mha_status mha_gguf_parse(const char *name, const void *bytes, size_t n_bytes,
                          const mha_allocator *allocator, mha_gguf *parsed, mha_error *error) {
  size_t description_bytes = 0;
  reader r = {.b = {.name = mha_shown_path(name), .bytes = bytes, .n = n_bytes, .error = error}};
  memset(parsed, 0, sizeof *parsed);
  parsed->allocator = mha_memory_allocator(allocator);
  mha_status status = read_head(&r);
  if (!status)
    status = measure_descriptions(&r, &description_bytes);
  if (!status)
    status = allocate(&r, description_bytes, parsed);
  if (!status)
    status = read_model(&r, parsed);
  if (!status)
    status = read_tensors(&r, parsed->items);
  if (status) {
    mha_gguf_release(parsed);
    return status;
  }
  parsed->n = r.n_tensors;
  return mha_succeed(error);
}

void mha_gguf_release(mha_gguf *parsed) {
  if (parsed->memory)
    mha_memory_release(&parsed->allocator, parsed->memory, parsed->memory_bytes);
  memset(parsed, 0, sizeof *parsed);
}
