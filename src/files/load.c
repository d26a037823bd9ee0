/* Owns mha_weights_load: from files to a layer. The numbers are read once, into memory that the
 * layer then borrows and gives back at its end. */
#define _XOPEN_SOURCE 700

#include "../arguments.h"
#include "../error.h"
#include "../memory.h"
#include "../weights.h"
#include "names.h"
#include "npy.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* What stands behind the borrowed pointers; the layer's backing. */
typedef struct folder {
  mha_npy_array parts[MHA_N_PARTS]; /* data NULL = no such file */
  mha_allocator allocator;          /* of this struct */
  const char *path, *prefix;        /* the caller's, while the files are read */
} folder;

static void release_folder(void *state) {
  folder *f = state;
  const mha_allocator allocator = f->allocator;
  for (int part = 0; part < MHA_N_PARTS; part++)
    mha_npy_array_release(&f->parts[part]);
  mha_memory_release(&allocator, f, sizeof *f);
}

/* Whether something exists at `path`; other reasons not to reach it are errors. */
static mha_status look_up(const char *path, struct stat *info, bool *exists, mha_error *error) {
  *exists = stat(path, info) == 0;
  if (*exists || errno == ENOENT)
    return MHA_OK;
  return mha_npy_fail_system(path, "examined", errno, error);
}

static mha_status check_folder(const char *path, mha_error *error) {
  struct stat info;
  bool exists = false;
  const mha_status status = look_up(path, &info, &exists, error);
  if (status)
    return status;
  if (!exists)
    return mha_fail(error, MHA_ERROR_IO, "%s does not exist; rule: path is a folder of .npy files",
                    mha_npy_shown_path(path));
  if (S_ISDIR(info.st_mode))
    return MHA_OK;
  return S_ISREG(info.st_mode)
             ? mha_fail(error, MHA_ERROR_UNSUPPORTED,
                        "%s is a file; rule: this version loads a folder of .npy files",
                        mha_npy_shown_path(path))
             : mha_fail(error, MHA_ERROR_IO,
                        "%s is neither a folder nor a regular file; rule: path is a folder of .npy "
                        "files",
                        mha_npy_shown_path(path));
}

/* The path of a part's file; false if it is too long. */
static bool part_path(const folder *f, mha_part part, char path[MHA_NPY_PATH_BYTES]) {
  const int length = snprintf(path, MHA_NPY_PATH_BYTES, "%s/%s%s.npy", f->path, f->prefix,
                              mha_part_folder_name(part));
  return length >= 0 && length < MHA_NPY_PATH_BYTES;
}

/* Reads one part if its file is there; a matrix must be. */
static mha_status read_part(folder *f, mha_part part, mha_error *error) {
  char path[MHA_NPY_PATH_BYTES];
  struct stat info;
  bool exists = false;
  if (!part_path(f, part, path))
    return mha_fail(error, MHA_ERROR_IO, "the path of %s.npy is too long; rule: below %d bytes",
                    mha_part_folder_name(part), MHA_NPY_PATH_BYTES);
  const mha_status status = look_up(path, &info, &exists, error);
  if (status)
    return status;
  if (exists)
    return mha_npy_read(path, MHA_NPY_FLOATS, &f->allocator, &f->parts[part], error);
  if (!mha_part_is_matrix(part))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_WEIGHTS,
                  "%s does not exist; rule: a layer needs the matrices W_Q, W_K, W_V and W_O",
                  mha_npy_shown_path(path));
}

/* A part's file with its shape, or NULL where there is none. */
static const mha_npy_array *shown_part(const folder *f, mha_part part,
                                       char path[MHA_NPY_PATH_BYTES], char shape[128]) {
  const mha_npy_array *array = &f->parts[part];
  if (!array->data)
    return NULL;
  (void)part_path(f, part, path);
  (void)mha_npy_shape_text(array->rank, array->shape, shape, 128);
  return array;
}

/* An empty matrix would leave sizes 0, which stands for "derive". */
static mha_status check_rank(const folder *f, mha_part part, mha_error *error) {
  char path[MHA_NPY_PATH_BYTES];
  char found[128];
  const mha_npy_array *array = shown_part(f, part, path, found);
  const int rank = mha_part_is_matrix(part) ? 2 : 1;
  if (!array || (array->rank == rank && array->n_elements > 0))
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_WEIGHTS, "%s has shape %s; rule: %s is %s, none of them 0",
                  mha_npy_shown_path(path), found, mha_part_folder_name(part),
                  mha_part_letters(part));
}

static mha_status check_shape(const folder *f, mha_part part, const mha_config *c,
                              mha_error *error) {
  char path[MHA_NPY_PATH_BYTES];
  char found[128];
  char expected[128];
  int64_t shape[2] = {0, 0};
  const mha_npy_array *array = shown_part(f, part, path, found);
  if (!array)
    return MHA_OK;
  const int rank = mha_part_shape(part, c, shape);
  if (rank == array->rank && memcmp(shape, array->shape, (size_t)rank * sizeof shape[0]) == 0)
    return MHA_OK;
  if (rank == 0)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "config has H = %lld, G = %lld, d = %lld, dv = %lld; rule: their products do "
                    "not overflow",
                    (long long)c->n_heads, (long long)c->n_kv_heads, (long long)c->head_size,
                    (long long)c->value_head_size);
  return mha_fail(error, MHA_ERROR_WEIGHTS,
                  "%s has shape %s, but %s is expected; rule: %s is %s with H = %lld, G = %lld, "
                  "d = %lld, dv = %lld",
                  mha_npy_shown_path(path), found,
                  mha_npy_shape_text(rank, shape, expected, sizeof expected),
                  mha_part_folder_name(part), mha_part_letters(part), (long long)c->n_heads,
                  (long long)c->n_kv_heads, (long long)c->head_size, (long long)c->value_head_size);
}

/* ---- Sizes that follow from the shapes ------------------------------------------------------- */

static mha_status check_config(const mha_config *c, mha_error *error) {
  const struct {
    int64_t value;
    const char *name;
  } sizes[] = {
      {c->n_kv_heads, "config.n_kv_heads (G)"},
      {c->head_size, "config.head_size (d)"},
      {c->value_head_size, "config.value_head_size (dv)"},
      {c->query_width, "config.query_width (Eq)"},
      {c->key_width, "config.key_width (Ek)"},
      {c->value_width, "config.value_width (Ev)"},
      {c->output_width, "config.output_width (Eo)"},
  };
  mha_status status = mha_require_at_least(c->n_heads, 1, "config.n_heads (H)", error);
  for (size_t i = 0; !status && i < sizeof sizes / sizeof sizes[0]; i++)
    status = mha_require_at_least(sizes[i].value, 0, sizes[i].name, error);
  return status;
}

static void derive_width(int64_t *width, int64_t found) {
  if (*width == 0)
    *width = found;
}

/* Fills *size from the columns of `part`, which `heads` heads share, unless it was given. */
static mha_status derive_head_size(const folder *f, mha_part part, int64_t heads, const char *rule,
                                   int64_t *size, mha_error *error) {
  char path[MHA_NPY_PATH_BYTES];
  char found[128];
  const mha_npy_array *array = shown_part(f, part, path, found);
  if (*size != 0 || !array)
    return MHA_OK;
  if (array->shape[1] % heads != 0)
    return mha_fail(error, MHA_ERROR_HEADS, "%s has shape %s, for %lld heads; rule: %s",
                    mha_npy_shown_path(path), found, (long long)heads, rule);
  *size = array->shape[1] / heads;
  return MHA_OK;
}

/* Fills the sizes left 0: G = H, the head sizes, and the widths from the rows of W_Q, W_K, W_V and
 * the columns of W_O. */
static mha_status derive_sizes(const folder *f, mha_config *c, mha_error *error) {
  derive_width(&c->n_kv_heads, c->n_heads);
  derive_width(&c->query_width, f->parts[MHA_PART_WQ].shape[0]);
  derive_width(&c->key_width, f->parts[MHA_PART_WK].shape[0]);
  derive_width(&c->value_width, f->parts[MHA_PART_WV].shape[0]);
  derive_width(&c->output_width, f->parts[MHA_PART_WO].shape[1]);
  const mha_status status =
      derive_head_size(f, MHA_PART_WQ, c->n_heads, "d = columns of W_Q / H, without remainder",
                       &c->head_size, error);
  return status ? status
                : derive_head_size(f, MHA_PART_WV, c->n_kv_heads,
                                   "dv = columns of W_V / G, without remainder",
                                   &c->value_head_size, error);
}

/* ---- The folder ------------------------------------------------------------------------------ */

static mha_status read_folder(folder *f, mha_config *config, mha_error *error) {
  mha_status status = check_config(config, error);
  for (int part = 0; !status && part < MHA_N_PARTS; part++)
    status = read_part(f, (mha_part)part, error);
  for (int part = 0; !status && part < MHA_N_PARTS; part++)
    status = check_rank(f, (mha_part)part, error);
  if (!status)
    status = derive_sizes(f, config, error);
  for (int part = 0; !status && part < MHA_N_PARTS; part++)
    status = check_shape(f, (mha_part)part, config, error);
  return status;
}

static void point_to_parts(const folder *f, mha_matrices *matrices) {
  MHA_INIT(matrices);
  matrices->orientation = MHA_IN_OUT;
  matrices->ownership = MHA_BORROW;
  matrices->query = f->parts[MHA_PART_WQ].data;
  matrices->key = f->parts[MHA_PART_WK].data;
  matrices->value = f->parts[MHA_PART_WV].data;
  matrices->output = f->parts[MHA_PART_WO].data;
  matrices->query_bias = f->parts[MHA_PART_BQ].data;
  matrices->key_bias = f->parts[MHA_PART_BK].data;
  matrices->value_bias = f->parts[MHA_PART_BV].data;
  matrices->output_bias = f->parts[MHA_PART_BO].data;
}

static mha_status load_folder(mha_config *config, const char *path, const char *prefix,
                              mha_weights **weights, mha_error *error) {
  const mha_allocator allocator = mha_memory_allocator(config->allocator);
  folder *f = mha_memory_allocate(&allocator, sizeof *f);
  if (!f)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "a list of files needs %zu bytes; rule: they must be there", sizeof *f);
  memset(f, 0, sizeof *f);
  f->allocator = allocator;
  f->path = path;
  f->prefix = prefix;
  const mha_status status = read_folder(f, config, error);
  if (status) {
    release_folder(f);
    return status;
  }
  mha_matrices matrices;
  point_to_parts(f, &matrices);
  return mha_weights_create_backed(config, &matrices, (mha_backing){release_folder, f}, weights,
                                   error);
}

mha_status mha_weights_load(const mha_config *config, const char *path, const char *prefix,
                            mha_weights **weights, mha_error *error) {
  mha_config known;
  mha_status status = mha_require(weights, "weights", error);
  if (status)
    return status;
  *weights = NULL;
  status = mha_read_struct(&known, sizeof known, sizeof known, config, "config", error);
  if (!status)
    status = mha_require(path, "path", error);
  if (!status)
    status = check_folder(path, error);
  if (status)
    return status;
  known.struct_size = sizeof known;
  return load_folder(&known, path, prefix ? prefix : "", weights, error);
}
