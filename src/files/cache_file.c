/* Owns mha_cache_save and mha_cache_load: an entry of a cache as a safetensors file, and back. What
 * such a file holds is said in mha.h; that it does is checked here, all of it. */
#include "base/arithmetic.h"
#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "cache/cache.h"
#include "mapping.h"
#include "npy.h"
#include "path.h"
#include "safetensors.h"
#include "text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The version of the format, under its key. */
static const char version_key[] = "libmha.cache";
static const char version[] = "1";

/* ---- saving ---------------------------------------------------------------------------------- */

/* The keys or the values of an entry as the writer asks for them. */
typedef struct entry_rows {
  const mha_cache *cache;
  int64_t entry, first;
  bool values;
} entry_rows;

static int64_t find_rows(const void *user, int64_t row, const void **data) {
  const entry_rows *rows = user;
  const void *k = NULL;
  const void *v = NULL;
  const int64_t n = mha_cache_token(rows->cache, rows->entry, rows->first + row, &k, &v);
  *data = rows->values ? v : k;
  return n;
}

/* What a row of one head is as a dimension: numbers, or the bytes of a type with blocks. */
static int64_t row_extent(int32_t element, int64_t size) {
  return mha_element_block(element) > 1 ? (int64_t)mha_element_bytes(element, size) : size;
}

static mha_status write_entry(const mha_cache *cache, int64_t entry, const char *path,
                              mha_error *error) {
  enum { LENGTH, G, D, DV, N_NUMBERS };
  const mha_cache_options *o = &cache->sizes;
  const mha_cache_held held = mha_cache_hold(cache, entry);
  const int64_t numbers[N_NUMBERS] = {held.length, o->n_kv_heads, o->head_size, o->value_head_size};
  char texts[N_NUMBERS][24];
  for (int i = 0; i < N_NUMBERS; i++)
    (void)snprintf(texts[i], sizeof texts[i], "%" PRId64, numbers[i]);
  const mha_text_pair pairs[] = {{version_key, version},    {"type", mha_element_name(o->type)},
                                 {"length", texts[LENGTH]}, {"n_kv_heads", texts[G]},
                                 {"head_size", texts[D]},   {"value_head_size", texts[DV]}};
  const entry_rows k = {cache, entry, held.first, false};
  const entry_rows v = {cache, entry, held.first, true};
  const mha_row_source sources[] = {{find_rows, &k}, {find_rows, &v}};
  const int64_t n = held.length - held.first;
  const mha_tensor_to_write tensors[] = {
      {.name = "k",
       .rank = 3,
       .shape = {n, o->n_kv_heads, row_extent(o->type, o->head_size)},
       .element = o->type,
       .rows = &sources[0]},
      {.name = "v",
       .rank = 3,
       .shape = {n, o->n_kv_heads, row_extent(o->type, o->value_head_size)},
       .element = o->type,
       .rows = &sources[1]}};
  const mha_file_to_write file = {pairs, sizeof pairs / sizeof *pairs, tensors,
                                  sizeof tensors / sizeof *tensors};
  return mha_safetensors_write(path, &file, error);
}

mha_status mha_cache_save(const mha_cache *cache, int64_t entry, const char *path,
                          mha_error *error) {
  mha_status status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_require(path, "path", error);
  if (!status)
    status = mha_cache_require_entry(cache, entry, "entry", error);
  if (!status)
    status = mha_cache_enter_to_read(cache, error);
  if (status)
    return status;
  status = write_entry(cache, entry, path, error);
  mha_cache_leave_read(cache);
  return status ? status : mha_succeed(error);
}

/* ---- reading what a file says ---------------------------------------------------------------- */

/* A file that is being read. */
typedef struct entry_file {
  const char *path; /* as messages show it */
  mha_safetensors parsed;
  int32_t type;
  int64_t n_kv_heads, head_size, value_head_size;
  mha_cache_held held;
  mha_raw_tensor k, v; /* as arrays of `type` */
} entry_file;

static mha_status find_text(const entry_file *f, const char *key, const char **text,
                            mha_error *error) {
  *text = mha_safetensors_metadata(&f->parsed, key);
  return *text ? MHA_OK
               : mha_fail(error, MHA_ERROR_FORMAT,
                          "%s has no %s in its metadata; rule: a file of mha_cache_save has",
                          f->path, key);
}

/* A count in decimal digits, and nothing else. */
static bool parse_count(const char *text, int64_t *count) {
  *count = 0;
  for (const char *c = text; *c; c++)
    if (*c < '0' || *c > '9' || !mha_multiply(*count, 10, count) ||
        !mha_add(*count, *c - '0', count))
      return false;
  return text[0] != '\0';
}

static mha_status read_count(const entry_file *f, const char *key, int64_t lowest, int64_t *count,
                             mha_error *error) {
  char shown[MHA_SHOWN_BYTES];
  const char *text = NULL;
  const mha_status status = find_text(f, key, &text, error);
  if (status || (parse_count(text, count) && *count >= lowest))
    return status;
  return mha_fail(error, MHA_ERROR_FORMAT, "%s has %s \"%s\"; rule: a count of %" PRId64 " or more",
                  f->path, key, mha_shown_text(text, strlen(text), shown), lowest);
}

static mha_status read_type(entry_file *f, mha_error *error) {
  static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16, MHA_Q8_0};
  char shown[MHA_SHOWN_BYTES];
  const char *text = NULL;
  const mha_status status = find_text(f, "type", &text, error);
  for (size_t i = 0; !status && i < sizeof types / sizeof *types; i++)
    if (strcmp(text, mha_element_name(types[i])) == 0) {
      f->type = types[i];
      return MHA_OK;
    }
  return status
             ? status
             : mha_fail(error, MHA_ERROR_FORMAT, "%s has type \"%s\"; rule: F32, F16, BF16 or Q8_0",
                        f->path, mha_shown_text(text, strlen(text), shown));
}

static mha_status read_metadata(entry_file *f, mha_error *error) {
  char shown[MHA_SHOWN_BYTES];
  const char *text = NULL;
  mha_status status = find_text(f, version_key, &text, error);
  if (!status && strcmp(text, version) != 0)
    status = mha_fail(error, MHA_ERROR_FORMAT, "%s has %s \"%s\"; rule: this version reads \"%s\"",
                      f->path, version_key, mha_shown_text(text, strlen(text), shown), version);
  if (!status)
    status = read_type(f, error);
  if (!status)
    status = read_count(f, "length", 0, &f->held.length, error);
  if (!status)
    status = read_count(f, "n_kv_heads", 1, &f->n_kv_heads, error);
  if (!status)
    status = read_count(f, "head_size", 1, &f->head_size, error);
  if (!status)
    status = read_count(f, "value_head_size", 1, &f->value_head_size, error);
  return status;
}

/* ---- its tensors ----------------------------------------------------------------------------- */

static mha_raw_type raw_type(int32_t type) {
  switch (type) {
  case MHA_F16:
    return MHA_RAW_F16;
  case MHA_BF16:
    return MHA_RAW_BF16;
  case MHA_Q8_0:
    return MHA_RAW_Q8_0;
  default:
    return MHA_RAW_F32;
  }
}

/* Takes a tensor [n][G][size] of the file's type; n is as many as it has. */
static mha_status take_tensor(const entry_file *f, const mha_raw_tensor *tensor, int64_t size,
                              mha_raw_tensor *taken, mha_error *error) {
  const bool blocks = mha_element_block(f->type) > 1;
  const char *type = blocks ? "U8" : mha_element_name(f->type);
  char shape[128];
  int64_t extent = size;
  bool fits = size % mha_element_block(f->type) == 0;
  if (fits && blocks)
    fits = mha_element_extent(f->type, size, &extent);
  fits = fits && strcmp(tensor->type, type) == 0 && tensor->rank == 3 &&
         tensor->shape[1] == f->n_kv_heads;
  if (!fits || tensor->shape[2] != extent)
    return mha_fail(error, MHA_ERROR_FORMAT,
                    "%s: tensor \"%s\" is %s %s; rule: by the metadata %s (tokens, %lld, %lld)",
                    f->path, tensor->name, tensor->type,
                    mha_shape_text(tensor->rank, tensor->shape, shape, 100), type,
                    (long long)f->n_kv_heads, (long long)extent);
  *taken = *tensor;
  taken->element = raw_type(f->type);
  taken->shape[2] = size;
  taken->n_elements =
      tensor->shape[0] * f->n_kv_heads * size; /* no more than four times its bytes */
  return MHA_OK;
}

static mha_status take_tensors(entry_file *f, mha_error *error) {
  const mha_safetensors *p = &f->parsed;
  if (p->n != 2 || strcmp(p->items[0].name, "k") != 0 || strcmp(p->items[1].name, "v") != 0)
    return mha_fail(error, MHA_ERROR_FORMAT, "%s has %lld tensors; rule: k and v, and no other",
                    f->path, (long long)p->n);
  mha_status status = take_tensor(f, &p->items[0], f->head_size, &f->k, error);
  if (!status)
    status = take_tensor(f, &p->items[1], f->value_head_size, &f->v, error);
  if (status)
    return status;
  const int64_t n = f->k.shape[0];
  if (n != f->v.shape[0] || n > f->held.length)
    return mha_fail(error, MHA_ERROR_FORMAT,
                    "%s has %lld keys, %lld values and length %lld; rule: as many keys as values, "
                    "at most the length",
                    f->path, (long long)n, (long long)f->v.shape[0], (long long)f->held.length);
  f->held.first = f->held.length - n;
  return MHA_OK;
}

static mha_status check_fit(const entry_file *f, const mha_cache *cache, mha_error *error) {
  const mha_cache_options *o = &cache->sizes;
  if (f->n_kv_heads != o->n_kv_heads || f->head_size != o->head_size ||
      f->value_head_size != o->value_head_size)
    return mha_fail(error, MHA_ERROR_SIZE,
                    "%s has G = %lld, d = %lld, dv = %lld; rule: as the cache, %lld, %lld, %lld",
                    f->path, (long long)f->n_kv_heads, (long long)f->head_size,
                    (long long)f->value_head_size, (long long)o->n_kv_heads,
                    (long long)o->head_size, (long long)o->value_head_size);
  if (f->type != MHA_F32 && f->type != o->type)
    return mha_fail(error, MHA_ERROR_UNSUPPORTED, "%s is %s; rule: F32, or as the cache, %s",
                    f->path, mha_element_name(f->type), mha_element_name(o->type));
  return MHA_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

static mha_status replace(const entry_file *f, mha_cache *cache, int64_t entry, const void *k,
                          const void *v, mha_error *error) {
  mha_status status = mha_cache_enter(cache, true, error);
  if (status)
    return status;
  status = mha_cache_replace(cache, entry, &f->held, f->type, k, v, f->path, error);
  mha_cache_leave(cache, true);
  return status;
}

/* Copies a tensor's bytes, each number in the machine's order; blocks begin with the only number
 * that has one. Nothing is rounded on the way. */
static void copy_numbers(const mha_raw_tensor *tensor, int32_t type, unsigned char *to) {
  const bool blocks = mha_element_block(type) > 1;
  const size_t step = mha_element_bytes(type, mha_element_block(type));
  const size_t number = blocks ? MHA_BLOCK_SCALE_BYTES : step;
  if (tensor->bytes > 0)
    memcpy(to, tensor->data, tensor->bytes);
  for (size_t at = 0; mha_machine_is_big_endian() && at < tensor->bytes; at += step)
    for (size_t i = 0; i < number / 2; i++) {
      const unsigned char first = to[at + i];
      to[at + i] = to[at + number - 1 - i];
      to[at + number - 1 - i] = first;
    }
}

/* Of numbers that cannot be used where they lie a copy is made. */
static mha_status replace_by_copy(const entry_file *f, mha_cache *cache, int64_t entry,
                                  mha_error *error) {
  mha_layout layout = {0};
  const size_t k = mha_layout_add(&layout, f->k.bytes, 1, 1, 1);
  const size_t v = mha_layout_add(&layout, f->v.bytes, 1, 1, 1);
  if (layout.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW, "a copy of %s fits no address space", f->path);
  unsigned char *memory = mha_memory_allocate(&cache->allocator, layout.bytes);
  if (!memory)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "a copy of %s needs %zu bytes; rule: they must be there", f->path,
                    layout.bytes);
  copy_numbers(&f->k, f->type, memory + k);
  copy_numbers(&f->v, f->type, memory + v);
  const mha_status status = replace(f, cache, entry, memory + k, memory + v, error);
  mha_memory_release(&cache->allocator, memory, layout.bytes);
  return status;
}

static mha_status load(entry_file *f, mha_cache *cache, int64_t entry, mha_error *error) {
  mha_status status = read_metadata(f, error);
  if (!status)
    status = take_tensors(f, error);
  if (!status)
    status = check_fit(f, cache, error);
  if (status)
    return status;
  if (f->k.n_elements > 0 && (mha_tensor_element(&f->k) < 0 || mha_tensor_element(&f->v) < 0))
    return replace_by_copy(f, cache, entry, error);
  return replace(f, cache, entry, f->k.data, f->v.data, error);
}

mha_status mha_cache_load(const char *path, mha_cache *cache, int64_t entry, mha_error *error) {
  mha_mapping mapping = {0};
  mha_status status = mha_require(path, "path", error);
  if (!status)
    status = mha_require(cache, "cache", error);
  if (!status)
    status = mha_cache_require_entry(cache, entry, "entry", error);
  if (!status)
    status = mha_mapping_open(path, false, &cache->allocator, &mapping, error);
  if (status)
    return status;
  entry_file f = {.path = mha_shown_path(path)};
  status = mha_safetensors_parse(path, mapping.bytes, mapping.n_bytes, &cache->allocator, &f.parsed,
                                 error);
  if (!status)
    status = load(&f, cache, entry, error);
  mha_safetensors_release(&f.parsed);
  mha_mapping_close(&mapping);
  return status ? status : mha_succeed(error);
}
