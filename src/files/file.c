/* Owns mha_file: what a path or bytes in memory hold, found out once. */
#include "file.h"

#include "base/arguments.h"
#include "base/error.h"
#include "base/memory.h"

#include <string.h>

enum { MISSING_BYTES = 1024 };

/* What the caller wants; the file's path or its bytes, of which one is there. */
typedef struct source {
  const char *path;
  const void *bytes;
  size_t n_bytes;
  mha_file_options options;
} source;

static mha_status read_options(source *from, const mha_file_options *given, mha_error *error) {
  mha_file_options *o = &from->options;
  mha_status status = MHA_OK;
  MHA_INIT(o);
  if (given)
    status = mha_read_struct(o, sizeof *o, MHA_FIRST_FILE_OPTIONS, given, "options", error);
  if (!status)
    status = mha_require_flags(o->flags, from->path ? MHA_READ_FILE : 0, "options.flags", error);
  if (!status)
    status = mha_require_reserved(o->reserved, "options.reserved", error);
  if (!status && from->path && o->release)
    status = mha_fail(error, MHA_ERROR_VALUE,
                      "options.release is given with a path; rule: only bytes are given back");
  return status;
}

/* ---- the layers ---- */

/* What the layers' texts take, or where they go. */
typedef struct collection {
  mha_file *file; /* NULL = only counted */
  char *text;
  int64_t n;
  size_t text_bytes;
} collection;

static const char *keep_text(collection *c, const char *text, size_t bytes) {
  char *const kept = c->text;
  c->text_bytes += bytes + 1;
  if (!c->file)
    return NULL;
  memcpy(kept, text, bytes);
  kept[bytes] = '\0';
  c->text += bytes + 1;
  return kept;
}

/* An mha_layer_visitor. */
static void collect_layer(void *user, const mha_layer_names *layer) {
  collection *c = user;
  char missing[MISSING_BYTES] = "";
  if (!layer->complete)
    (void)mha_names_missing(layer, missing, sizeof missing);
  const char *prefix = keep_text(c, layer->prefix, (size_t)layer->prefix_bytes);
  const char *lacks = keep_text(c, missing, strlen(missing));
  if (c->file) {
    c->file->layers[c->n] = *layer;
    c->file->prefixes[c->n] = prefix;
    c->file->missing[c->n] = lacks;
  }
  c->n++;
}

/* ---- opening ---- */

static mha_status open_tensors(const source *from, mha_raw_tensors *tensors, mha_error *error) {
  const mha_file_options *o = &from->options;
  if (from->path)
    return mha_tensors_open(from->path, (o->flags & MHA_READ_FILE) != 0, o->allocator, tensors,
                            error);
  return mha_tensors_open_bytes("the bytes", from->bytes, from->n_bytes, o->allocator, tensors,
                                error);
}

/* Makes the object of tensors that are open; takes them over if it succeeds. */
static mha_file *make_file(const source *from, const mha_raw_tensors *tensors) {
  const char *path = from->path ? from->path : "the bytes";
  const mha_allocator allocator = mha_memory_allocator(from->options.allocator);
  collection found = {.file = NULL};
  mha_layout layout = {0};
  (void)mha_names_visit(tensors, collect_layer, &found);
  (void)mha_layout_add(&layout, sizeof(mha_file), 1, 1, 1);
  const size_t layers_at = mha_layout_add(&layout, sizeof(mha_layer_names), found.n, 1, 1);
  const size_t prefixes_at = mha_layout_add(&layout, sizeof(char *), found.n, 1, 1);
  const size_t missing_at = mha_layout_add(&layout, sizeof(char *), found.n, 1, 1);
  const size_t path_at = mha_layout_add(&layout, 1, (int64_t)strlen(path) + 1, 1, 1);
  const size_t text_at = mha_layout_add(&layout, 1, (int64_t)found.text_bytes, 1, 1);
  char *block = layout.overflow ? NULL : mha_memory_allocate(&allocator, layout.bytes);
  if (!block)
    return NULL;
  mha_file *file = (void *)block;
  memset(file, 0, sizeof *file);
  file->allocator = allocator;
  file->bytes = layout.bytes;
  file->path = memcpy(block + path_at, path, strlen(path) + 1);
  file->tensors = *tensors;
  file->n_layers = found.n;
  file->layers = (void *)(block + layers_at);
  file->prefixes = (void *)(block + prefixes_at);
  file->missing = (void *)(block + missing_at);
  file->release = from->options.release;
  file->release_user = from->options.release_user;
  atomic_init(&file->references, 1);
  collection kept = {.file = file, .text = block + text_at};
  (void)mha_names_visit(&file->tensors, collect_layer, &kept);
  return file;
}

static mha_status open_source(source *from, const mha_file_options *options, mha_file **file,
                              mha_error *error) {
  mha_raw_tensors tensors;
  mha_status status = read_options(from, options, error);
  if (!status)
    status = open_tensors(from, &tensors, error);
  if (status)
    return status;
  *file = make_file(from, &tensors);
  if (*file)
    return mha_succeed(error);
  mha_tensors_close(&tensors);
  return mha_fail(error, MHA_ERROR_MEMORY,
                  "the file's list of layers needs memory; rule: it must "
                  "be there");
}

mha_status mha_file_open(const char *path, const mha_file_options *options, mha_file **file,
                         mha_error *error) {
  source from = {.path = path};
  mha_status status = mha_require(file, "file", error);
  if (status)
    return status;
  *file = NULL;
  status = mha_require(path, "path", error);
  return status ? status : open_source(&from, options, file, error);
}

mha_status mha_file_open_bytes(const void *bytes, size_t n_bytes, const mha_file_options *options,
                               mha_file **file, mha_error *error) {
  source from = {.bytes = bytes, .n_bytes = n_bytes};
  mha_status status = mha_require(file, "file", error);
  if (status)
    return status;
  *file = NULL;
  status = mha_require(bytes, "bytes", error);
  return status ? status : open_source(&from, options, file, error);
}

mha_file *mha_file_retain(mha_file *file) {
  atomic_fetch_add(&file->references, 1);
  return file;
}

void mha_file_destroy(mha_file *file) {
  if (!file || atomic_fetch_sub(&file->references, 1) != 1)
    return;
  const mha_allocator allocator = file->allocator;
  mha_release_function *const release = file->release;
  void *const user = file->release_user;
  mha_tensors_close(&file->tensors);
  mha_memory_release(&allocator, file, file->bytes);
  if (release)
    release(user);
}

/* ---- asking ---- */

mha_status mha_file_model(const mha_file *file, mha_model_info *info, mha_error *error) {
  mha_model_info told;
  mha_status status = mha_require(file, "file", error);
  if (!status)
    status = mha_read_struct(&told, sizeof told, MHA_FIRST_MODEL_INFO, info, "info", error);
  if (status)
    return status;
  mha_write_struct(info, &file->tensors.model, sizeof file->tensors.model);
  return mha_succeed(error);
}

mha_status mha_file_count(const mha_file *file, int64_t *n_tensors, int64_t *n_layers,
                          mha_error *error) {
  const mha_status status = mha_require(file, "file", error);
  if (status)
    return status;
  if (n_tensors)
    *n_tensors = file->tensors.n;
  if (n_layers)
    *n_layers = file->n_layers;
  return mha_succeed(error);
}

static mha_status check_index(int64_t index, int64_t n, const char *what, mha_error *error) {
  return index >= 0 && index < n
             ? MHA_OK
             : mha_fail(error, MHA_ERROR_LENGTH,
                        "index is %lld in a file of %lld %s; rule: 0 up to that, not included",
                        (long long)index, (long long)n, what);
}

mha_status mha_file_tensor(const mha_file *file, int64_t index, mha_tensor_info *info,
                           mha_error *error) {
  mha_tensor_info told;
  mha_status status = mha_require(file, "file", error);
  if (!status)
    status = mha_read_struct(&told, sizeof told, MHA_FIRST_TENSOR_INFO, info, "info", error);
  if (!status)
    status = check_index(index, file->tensors.n, "tensors", error);
  if (status)
    return status;
  const mha_raw_tensor *t = &file->tensors.items[index];
  told.name = t->name;
  told.type = t->type;
  told.is_loaded = t->element != MHA_RAW_OTHER;
  told.rank = t->data ? t->rank : -1;
  told.is_column_major = t->column_major;
  memset(told.shape, 0, sizeof told.shape);
  memcpy(told.shape, t->shape, (size_t)t->rank * sizeof told.shape[0]);
  told.data = t->data;
  told.bytes = t->bytes;
  mha_write_struct(info, &told, sizeof told);
  return mha_succeed(error);
}

mha_status mha_file_layer(const mha_file *file, int64_t index, mha_layer_info *info,
                          mha_error *error) {
  mha_layer_info told;
  mha_status status = mha_require(file, "file", error);
  if (!status)
    status = mha_read_struct(&told, sizeof told, MHA_FIRST_LAYER_INFO, info, "info", error);
  if (!status)
    status = check_index(index, file->n_layers, "layers", error);
  if (status)
    return status;
  const mha_layer_names *layer = &file->layers[index];
  const mha_raw_tensor *unsupported = mha_names_unsupported(&file->tensors, layer);
  told.prefix = file->prefixes[index];
  told.family = layer->family_name;
  told.orientation = layer->orientation;
  told.is_complete = layer->complete;
  told.missing = file->missing[index];
  told.unsupported = unsupported ? unsupported->name : NULL;
  for (int part = 0; part < MHA_N_PARTS; part++)
    told.parts[part] = layer->parts[part] ? layer->parts[part] - file->tensors.items : -1;
  mha_write_struct(info, &told, sizeof told);
  return mha_succeed(error);
}
