/* Owns what a weights path holds: the tensors of a safetensors or GGUF file, or one per .npy file
 * of a folder. */
#define _XOPEN_SOURCE     700
#define _FILE_OFFSET_BITS 64

#include "tensors.h"

#include "base/error.h"
#include "base/memory.h"
#include "gguf.h"
#include "kind.h"
#include "mapping.h"
#include "npy.h"
#include "path.h"
#include "safetensors.h"
#include "text.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* One block of memory. Of a file: one map and what was parsed. Of a folder: a map for each tensor,
 * then the tensors and their names. */
struct mha_tensor_store {
  mha_allocator allocator;
  size_t bytes;           /* of the block */
  mha_safetensors parsed; /* of a file, this or the next one */
  mha_gguf parsed_gguf;
  int64_t n_maps;
  mha_mapping *maps;
  char *types; /* of a folder: MHA_NPY_DESCR_BYTES for each array that npy.h does not load */
};

typedef struct mha_tensor_store tensor_store;

#define WEIGHTS_RULE "weights are a safetensors or GGUF file, or a folder of .npy files"

static mha_status fail_memory(const char *path, mha_error *error) {
  return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the list of tensors in %s",
                  mha_shown_path(path));
}

/* ---- One file -------------------------------------------------------------------------------- */

/* Tells of a file that is none of this kind what it seems to be: the length of a header that it
 * does not have helps nobody. */
static mha_status check_kind(const char *path, const unsigned char *bytes, size_t n,
                             mha_error *error) {
  if (mha_kind_may_be_safetensors(bytes, n))
    return MHA_OK;
  if (n == 0)
    return mha_fail(error, MHA_ERROR_FORMAT, "%s is empty; rule: " WEIGHTS_RULE,
                    mha_shown_path(path));
  const char *kind = mha_kind_of(bytes, n);
  const bool has_header = n <= 8 || bytes[8] == '{' || memcmp(bytes + 4, "\0\0\0\0", 4) == 0;
  if (!kind && has_header) /* a broken one, which its parser judges better */
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_FORMAT, "%s seems to be %s; rule: " WEIGHTS_RULE,
                  mha_shown_path(path), kind ? kind : "a file of another kind");
}

/* The store of one file, whose map is closed; NULL = no memory. */
static tensor_store *make_store(const mha_allocator *allocator) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(tensor_store), 1, 1, 1);
  const size_t map_at = mha_layout_add(&layout, sizeof(mha_mapping), 1, 1, 1);
  unsigned char *block = mha_memory_allocate(allocator, layout.bytes);
  if (!block)
    return NULL;
  memset(block, 0, layout.bytes);
  tensor_store *store = (tensor_store *)(void *)block;
  store->allocator = *allocator;
  store->bytes = layout.bytes;
  store->n_maps = 1;
  store->maps = (mha_mapping *)(void *)(block + map_at);
  return store;
}

static mha_status parse_gguf(const char *name, mha_raw_tensors *tensors, mha_error *error) {
  tensor_store *store = tensors->store;
  mha_gguf *parsed = &store->parsed_gguf;
  const mha_status status = mha_gguf_parse(name, store->maps->bytes, store->maps->n_bytes,
                                           &store->allocator, parsed, error);
  tensors->n = parsed->n;
  tensors->items = parsed->items;
  tensors->model = parsed->model;
  tensors->rope_is_scaled = parsed->rope_is_scaled;
  return status;
}

/* Parses the bytes that the store's map shows. */
static mha_status parse_file(const char *name, mha_raw_tensors *tensors, mha_error *error) {
  tensor_store *store = tensors->store;
  if (mha_kind_is_gguf(store->maps->bytes, store->maps->n_bytes))
    return parse_gguf(name, tensors, error);
  mha_status status = check_kind(name, store->maps->bytes, store->maps->n_bytes, error);
  if (!status)
    status = mha_safetensors_parse(name, store->maps->bytes, store->maps->n_bytes,
                                   &store->allocator, &store->parsed, error);
  tensors->n = store->parsed.n;
  tensors->items = store->parsed.items;
  return status;
}

static mha_status open_file(const char *path, bool read_into_memory, const mha_allocator *allocator,
                            mha_raw_tensors *tensors, mha_error *error) {
  tensors->store = make_store(allocator);
  if (!tensors->store)
    return fail_memory(path, error);
  const mha_status status =
      mha_mapping_open(path, read_into_memory, allocator, tensors->store->maps, error);
  return status ? status : parse_file(path, tensors, error);
}

/* ---- The names in a folder ------------------------------------------------------------------- */

/* Length of the tensor's name in the name of a file, 0 if it is the file of none: those that begin
 * with a dot are hidden. */
static size_t tensor_name_bytes(const char *file) {
  static const char ending[] = ".npy";
  const size_t bytes = strlen(file);
  const size_t ending_bytes = sizeof ending - 1;
  if (file[0] == '.' || bytes <= ending_bytes || strcmp(file + bytes - ending_bytes, ending) != 0)
    return 0;
  return bytes - ending_bytes;
}

/* The name of the folder's next .npy file, of *bytes without the ending; NULL at the end, or with
 * errno set where reading fails. */
static const char *next_file(DIR *folder, size_t *bytes) {
  const struct dirent *entry = NULL;
  do {
    errno = 0;
    entry = readdir(folder);
    *bytes = entry ? tensor_name_bytes(entry->d_name) : 0;
  } while (entry && *bytes == 0);
  return entry ? entry->d_name : NULL;
}

static mha_status count_files(const char *path, DIR *folder, int64_t *n, size_t *text_bytes,
                              mha_error *error) {
  size_t bytes = 0;
  for (; next_file(folder, &bytes); *n += 1)
    *text_bytes += bytes + 1;
  return errno ? mha_fail_system(path, "read", errno, error) : MHA_OK;
}

/* Makes the store for n tensors; returns the place of their names, or NULL without memory. */
static char *allocate_folder(const mha_allocator *allocator, int64_t n, size_t text_bytes,
                             mha_raw_tensors *tensors) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(tensor_store), 1, 1, 1);
  const size_t maps_at = mha_layout_add(&layout, sizeof(mha_mapping), n, 1, 1);
  const size_t items_at = mha_layout_add(&layout, sizeof(mha_raw_tensor), n, 1, 1);
  const size_t types_at = mha_layout_add(&layout, MHA_NPY_DESCR_BYTES, n, 1, 1);
  const size_t texts_at = mha_layout_add(&layout, 1, (int64_t)text_bytes, 1, 1);
  unsigned char *block = layout.overflow ? NULL : mha_memory_allocate(allocator, layout.bytes);
  if (!block)
    return NULL;
  memset(block, 0, layout.bytes);
  tensor_store *store = (tensor_store *)(void *)block;
  store->allocator = *allocator;
  store->bytes = layout.bytes;
  store->maps = (mha_mapping *)(void *)(block + maps_at);
  store->types = (char *)block + types_at;
  tensors->store = store;
  tensors->items = (mha_raw_tensor *)(void *)(block + items_at);
  return (char *)block + texts_at;
}

/* Names the tensors after the files. A folder that has got more since they were counted, n with
 * text_bytes bytes of names, is refused. */
static mha_status keep_names(const char *path, DIR *folder, int64_t n, size_t text_bytes,
                             char *texts, mha_raw_tensors *tensors, mha_error *error) {
  size_t bytes = 0;
  for (const char *file = next_file(folder, &bytes); file; file = next_file(folder, &bytes)) {
    if (tensors->n == n || bytes + 1 > text_bytes)
      return mha_fail(error, MHA_ERROR_IO,
                      "%s changes while it is read; rule: a folder of weights stays as it is",
                      mha_shown_path(path));
    memcpy(texts, file, bytes);
    texts[bytes] = '\0';
    tensors->items[tensors->n++].name = texts;
    texts += bytes + 1;
    text_bytes -= bytes + 1;
  }
  return errno ? mha_fail_system(path, "read", errno, error) : MHA_OK;
}

static mha_status list_folder(const char *path, DIR *folder, const mha_allocator *allocator,
                              mha_raw_tensors *tensors, mha_error *error) {
  int64_t n = 0;
  size_t text_bytes = 0;
  const mha_status status = count_files(path, folder, &n, &text_bytes, error);
  if (status)
    return status;
  char *texts = allocate_folder(allocator, n, text_bytes, tensors);
  if (!texts)
    return fail_memory(path, error);
  rewinddir(folder);
  return keep_names(path, folder, n, text_bytes, texts, tensors, error);
}

/* ---- A .npy file ----------------------------------------------------------------------------- */

/* For each type the element and both spellings, little-endian first. */
static const struct {
  mha_raw_type element;
  const char *text[2];
} npy_types[] = {
    [MHA_NPY_F2] = {MHA_RAW_F16, {"<f2", ">f2"}},   [MHA_NPY_F4] = {MHA_RAW_F32, {"<f4", ">f4"}},
    [MHA_NPY_F8] = {MHA_RAW_F64, {"<f8", ">f8"}},   [MHA_NPY_I4] = {MHA_RAW_OTHER, {"<i4", ">i4"}},
    [MHA_NPY_I8] = {MHA_RAW_OTHER, {"<i8", ">i8"}}, [MHA_NPY_U1] = {MHA_RAW_OTHER, {"|u1", "|u1"}},
    [MHA_NPY_B1] = {MHA_RAW_OTHER, {"|b1", "|b1"}},
};

/* An array of one dimension is row-major however it is called. */
static void describe_array(const mha_npy_header *header, const mha_mapping *map,
                           mha_raw_tensor *tensor) {
  tensor->type = npy_types[header->type].text[header->big_endian];
  tensor->element = npy_types[header->type].element;
  tensor->big_endian = header->big_endian;
  tensor->column_major = header->column_major && header->rank > 1;
  tensor->rank = header->rank;
  memcpy(tensor->shape, header->shape, sizeof tensor->shape);
  tensor->n_elements = header->n_elements;
  tensor->data = map->bytes + header->data_offset;
  tensor->bytes = map->n_bytes - (size_t)header->data_offset;
}

_Static_assert(MHA_MAX_RANK == MHA_NPY_MAX_RANK, "shapes are copied whole");

/* An array that the parser does not support, but that is one, has no numbers here. */
static mha_status open_array(const char *path, bool read_into_memory,
                             const mha_allocator *allocator, mha_mapping *map, char *type,
                             mha_raw_tensor *tensor, mha_error *error) {
  mha_npy_header header = {.rank = 0};
  mha_status status = mha_mapping_open(path, read_into_memory, allocator, map, error);
  if (status)
    return status;
  status = mha_npy_parse(path, map->bytes, map->n_bytes, (int64_t)map->n_bytes, &header, error);
  if (!status)
    describe_array(&header, map, tensor);
  if (status != MHA_ERROR_UNSUPPORTED)
    return status;
  mha_mapping_close(map);
  memcpy(type, header.descr, sizeof header.descr);
  tensor->type = type;
  tensor->element = MHA_RAW_OTHER;
  return MHA_OK;
}

static mha_status open_entry(const char *folder, bool read_into_memory,
                             const mha_allocator *allocator, mha_mapping *map, char *type,
                             mha_raw_tensor *tensor, mha_error *error) {
  char path[MHA_PATH_BYTES];
  char shown[MHA_SHOWN_BYTES];
  const char *fault = mha_name_fault(tensor->name);
  (void)mha_shown_text(tensor->name, strlen(tensor->name), shown);
  if (fault)
    return mha_fail(error, MHA_ERROR_FORMAT,
                    "%s: the name of the file \"%s.npy\" %s; rule: the names of tensors are UTF-8 "
                    "without control characters",
                    mha_shown_path(folder), shown, fault);
  const int length = snprintf(path, sizeof path, "%s/%s.npy", folder, tensor->name);
  if (length < 0 || (size_t)length >= sizeof path)
    return mha_fail(error, MHA_ERROR_IO, "the path of %s.npy is too long; rule: below %d bytes",
                    shown, MHA_PATH_BYTES);
  return open_array(path, read_into_memory, allocator, map, type, tensor, error);
}

/* ---- A folder -------------------------------------------------------------------------------- */

static int by_name(const void *left, const void *right) {
  return strcmp(((const mha_raw_tensor *)left)->name, ((const mha_raw_tensor *)right)->name);
}

static mha_status open_folder(const char *path, bool read_into_memory,
                              const mha_allocator *allocator, mha_raw_tensors *tensors,
                              mha_error *error) {
  DIR *folder = opendir(path);
  if (!folder)
    return mha_fail_system(path, "opened", errno, error);
  mha_status status = list_folder(path, folder, allocator, tensors, error);
  (void)closedir(folder);
  if (!status && tensors->n == 0)
    status =
        mha_fail(error, MHA_ERROR_FORMAT, "%s is a folder without .npy files; rule: " WEIGHTS_RULE,
                 mha_shown_path(path));
  if (!status)
    qsort(tensors->items, (size_t)tensors->n, sizeof tensors->items[0], by_name);
  for (int64_t i = 0; !status && i < tensors->n; i++) {
    tensor_store *store = tensors->store;
    status = open_entry(path, read_into_memory, allocator, &store->maps[i],
                        store->types + i * MHA_NPY_DESCR_BYTES, &tensors->items[i], error);
    store->n_maps = i + 1;
  }
  tensors->is_folder = true;
  return status;
}

/* ---- Either ---------------------------------------------------------------------------------- */

static mha_status refuse_path(const char *path, const char *what, mha_error *error) {
  return mha_fail(error, MHA_ERROR_IO, "%s %s; rule: " WEIGHTS_RULE, mha_shown_path(path), what);
}

mha_status mha_tensors_open(const char *path, bool read_into_memory, const mha_allocator *allocator,
                            mha_raw_tensors *tensors, mha_error *error) {
  struct stat info;
  const mha_allocator memory = mha_memory_allocator(allocator);
  memset(tensors, 0, sizeof *tensors);
  if (stat(path, &info) != 0)
    return errno == ENOENT ? refuse_path(path, "does not exist", error)
                           : mha_fail_system(path, "examined", errno, error);
  mha_status status = MHA_OK;
  if (S_ISDIR(info.st_mode))
    status = open_folder(path, read_into_memory, &memory, tensors, error);
  else if (S_ISREG(info.st_mode))
    status = open_file(path, read_into_memory, &memory, tensors, error);
  else
    status = refuse_path(path, "is neither a folder nor a regular file", error);
  if (!status)
    return mha_succeed(error);
  mha_tensors_close(tensors);
  return status;
}

mha_status mha_tensors_open_bytes(const char *name, const void *bytes, size_t n_bytes,
                                  const mha_allocator *allocator, mha_raw_tensors *tensors,
                                  mha_error *error) {
  const mha_allocator memory = mha_memory_allocator(allocator);
  memset(tensors, 0, sizeof *tensors);
  tensors->store = make_store(&memory);
  if (!tensors->store)
    return fail_memory(name, error);
  tensors->store->maps->bytes = bytes;
  tensors->store->maps->n_bytes = n_bytes;
  const mha_status status = parse_file(name, tensors, error);
  if (!status)
    return mha_succeed(error);
  mha_tensors_close(tensors);
  return status;
}

void mha_tensors_close(mha_raw_tensors *tensors) {
  tensor_store *store = tensors->store;
  if (store) {
    const mha_allocator allocator = store->allocator;
    for (int64_t i = 0; i < store->n_maps; i++)
      mha_mapping_close(&store->maps[i]);
    mha_safetensors_release(&store->parsed);
    mha_gguf_release(&store->parsed_gguf);
    mha_memory_release(&allocator, store, store->bytes);
  }
  memset(tensors, 0, sizeof *tensors);
}
