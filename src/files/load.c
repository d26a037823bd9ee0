/* Owns mha_weights_load: from files to a layer. Numbers that can be used where they lie are
 * borrowed from the files; all others are converted once, into one block of memory that the layer
 * gives back at its end. */
#include "base/arguments.h"
#include "base/error.h"
#include "base/memory.h"
#include "file.h"
#include "path.h"
#include "sizes.h"

#include <string.h>

/* What stands behind the borrowed pointers, in front of the converted numbers. */
typedef struct loaded {
  mha_file *file;          /* a reference, where numbers are used as they lie in it */
  mha_allocator allocator; /* of this block */
  size_t bytes;
} loaded;

static void release_loaded(void *state) {
  loaded *l = state;
  const mha_allocator allocator = l->allocator;
  const size_t bytes = l->bytes;
  mha_file_destroy(l->file);
  mha_memory_release(&allocator, l, bytes);
}

/* ---- Numbers --------------------------------------------------------------------------------- */

static mha_status check_types(const mha_layer_names *layer, const char *path, mha_error *error) {
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_raw_tensor *tensor = layer->parts[part];
    if (tensor && tensor->element == MHA_RAW_OTHER)
      return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "%s: %s holds the type \"%s\"; rule: float32, float64, float16 or bfloat16",
                      mha_shown_path(path), mha_shown_path(tensor->name), tensor->type);
  }
  return MHA_OK;
}

static mha_layout plan_block(const mha_layer_names *layer) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(loaded), 1, 1, 1);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_raw_tensor *tensor = layer->parts[part];
    if (tensor && !mha_tensor_is_usable(tensor))
      (void)mha_layout_add(&layout, sizeof(float), tensor->n_elements, 1, 1);
  }
  return layout;
}

/* Points `numbers` at each part's float32 numbers, in the file or in the block. Returns whether
 * some are in the file. */
static bool collect_numbers(const mha_layer_names *layer, char *block,
                            const float *numbers[MHA_N_PARTS]) {
  bool in_file = false;
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(loaded), 1, 1, 1);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_raw_tensor *tensor = layer->parts[part];
    numbers[part] = NULL;
    if (!tensor)
      continue;
    if (mha_tensor_is_usable(tensor)) {
      numbers[part] = (const float *)(const void *)tensor->data;
      in_file = true;
      continue;
    }
    float *converted =
        (void *)(block + mha_layout_add(&layout, sizeof *converted, tensor->n_elements, 1, 1));
    mha_tensor_convert(tensor, converted);
    numbers[part] = converted;
  }
  return in_file;
}

/* ---- Matrices -------------------------------------------------------------------------------- */

/* q, k and v lie in one matrix one after the other: as rows (OUT_IN, dense) or as columns (IN_OUT),
 * where each row is as long as the three together. */
static void split_matrix(const mha_config *c, const float *packed, mha_matrices *m) {
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size;
  const bool in_out = m->orientation == MHA_IN_OUT;
  const int64_t step = in_out ? 1 : c->query_width;
  m->query = packed;
  m->key = packed + q * step;
  m->value = packed + (q + k) * step;
  m->query_ld = m->key_ld = m->value_ld = in_out ? q + k + v : c->query_width;
}

static void split_bias(const mha_config *c, const float *packed, mha_matrices *m) {
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  m->query_bias = packed;
  m->key_bias = packed + q;
  m->value_bias = packed + q + k;
}

static void point_to_numbers(const mha_config *c, int32_t orientation,
                             const float *const numbers[MHA_N_PARTS], mha_matrices *m) {
  MHA_INIT(m);
  m->orientation = orientation;
  m->ownership = MHA_BORROW;
  m->query = numbers[MHA_PART_WQ];
  m->key = numbers[MHA_PART_WK];
  m->value = numbers[MHA_PART_WV];
  m->output = numbers[MHA_PART_WO];
  m->query_bias = numbers[MHA_PART_BQ];
  m->key_bias = numbers[MHA_PART_BK];
  m->value_bias = numbers[MHA_PART_BV];
  m->output_bias = numbers[MHA_PART_BO];
  m->query_norm = numbers[MHA_PART_QUERY_NORM];
  m->key_norm = numbers[MHA_PART_KEY_NORM];
  m->sinks = numbers[MHA_PART_SINKS];
  if (numbers[MHA_PART_WQKV])
    split_matrix(c, numbers[MHA_PART_WQKV], m);
  if (numbers[MHA_PART_BQKV])
    split_bias(c, numbers[MHA_PART_BQKV], m);
}

/* ---- The layer ------------------------------------------------------------------------------- */

static mha_status make_layer(const mha_config *config, const mha_layer_names *layer, mha_file *file,
                             mha_weights **weights, mha_error *error) {
  const mha_layout plan = plan_block(layer);
  const mha_allocator allocator = mha_memory_allocator(config->allocator);
  const float *numbers[MHA_N_PARTS];
  mha_matrices matrices;
  if (plan.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the converted numbers exceed the address space; rule: they must fit");
  loaded *block = mha_memory_allocate(&allocator, plan.bytes);
  if (!block)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the converted numbers need %zu bytes; rule: they must be there", plan.bytes);
  const bool in_file = collect_numbers(layer, (char *)block, numbers);
  point_to_numbers(config, layer->orientation, numbers, &matrices);
  *block = (loaded){in_file ? mha_file_retain(file) : NULL, allocator, plan.bytes};
  matrices.release = release_loaded;
  matrices.release_user = block;
  const mha_status status = mha_weights_create(config, &matrices, weights, error);
  if (status)
    release_loaded(block);
  return status;
}

static mha_status load(const mha_config *given, mha_file *file, const char *prefix,
                       mha_weights **weights, mha_error *error) {
  mha_config config;
  mha_layer_names layer;
  mha_status status =
      mha_read_struct(&config, sizeof config, MHA_FIRST_CONFIG, given, "config", error);
  config.struct_size = sizeof config;
  if (!status)
    status = mha_names_find(&file->tensors, file->path, prefix, &layer, error);
  if (!status)
    status = check_types(&layer, file->path, error);
  if (!status)
    status = mha_sizes_derive(&layer, file->path, &config, error);
  if (status)
    return status;
  return make_layer(&config, &layer, file, weights, error);
}

mha_status mha_weights_load_from(const mha_config *config, mha_file *file, const char *prefix,
                                 mha_weights **weights, mha_error *error) {
  mha_status status = mha_require(weights, "weights", error);
  if (status)
    return status;
  *weights = NULL;
  status = mha_require(file, "file", error);
  return status ? status : load(config, file, prefix, weights, error);
}

mha_status mha_weights_load(const mha_config *config, const char *path, const char *prefix,
                            mha_weights **weights, mha_error *error) {
  mha_config known;
  mha_file_options options;
  mha_file *file = NULL;
  mha_status status = mha_require(weights, "weights", error);
  if (status)
    return status;
  *weights = NULL;
  status = mha_read_struct(&known, sizeof known, MHA_FIRST_CONFIG, config, "config", error);
  if (status)
    return status;
  MHA_INIT(&options);
  options.allocator = known.allocator;
  status = mha_file_open(path, &options, &file, error);
  if (!status)
    status = load(config, file, prefix, weights, error);
  mha_file_destroy(file);
  return status;
}
