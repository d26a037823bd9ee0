/* Owns mha_weights_load: from files to a layer. Numbers that can be used where they lie are
 * borrowed from the files; all others are converted once, into one block of memory that the layer
 * gives back at its end. */
#include "base/arguments.h"
#include "base/element.h"
#include "base/error.h"
#include "base/memory.h"
#include "file.h"
#include "model.h"
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
      return mha_fail(
          error, MHA_ERROR_UNSUPPORTED,
          "%s: %s holds the type \"%s\"; rule: float32, float64, float16, bfloat16, Q8_0 or "
          "Q4_0",
          mha_shown_path(path), mha_shown_path(tensor->name), tensor->type);
  }
  return MHA_OK;
}

/* A part's numbers, in the file or in the block. */
typedef struct numbers {
  const void *data; /* NULL = no such part, or still to be converted */
  int32_t element;  /* mha_element */
} numbers;

/* Whether the three of a packed matrix of this type begin with whole blocks: as rows always. */
static bool splits_between_blocks(const mha_config *c, int32_t orientation, int32_t element) {
  const int64_t block = mha_element_block(element);
  return orientation == MHA_OUT_IN ||
         ((c->n_heads * c->head_size) % block == 0 && (c->n_kv_heads * c->head_size) % block == 0);
}

/* The type in which a part is used where it lies: float32, and what MHA_KEEP_TYPE lets a matrix
 * keep; -1 = it is converted. */
static int32_t used_type(const mha_config *c, const mha_layer_names *layer, mha_part part) {
  const int32_t element = mha_tensor_element(layer->parts[part]);
  if (element == MHA_F32 || element < 0)
    return element;
  if (!(c->flags & MHA_KEEP_TYPE) || part > MHA_PART_WO)
    return -1;
  return part == MHA_PART_WQKV && !splits_between_blocks(c, layer->orientation, element) ? -1
                                                                                         : element;
}

/* Points at the numbers that are used where they lie. Returns whether there are some. */
static bool borrow_numbers(const mha_config *c, const mha_layer_names *layer,
                           numbers found[MHA_N_PARTS]) {
  bool in_file = false;
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_raw_tensor *tensor = layer->parts[part];
    const int32_t element = tensor ? used_type(c, layer, (mha_part)part) : -1;
    found[part] = (numbers){element < 0 ? NULL : tensor->data, element < 0 ? MHA_F32 : element};
    in_file = in_file || element >= 0;
  }
  return in_file;
}

static mha_layout plan_block(const mha_layer_names *layer, const numbers found[MHA_N_PARTS]) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(loaded), 1, 1, 1);
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (layer->parts[part] && !found[part].data)
      (void)mha_layout_add(&layout, sizeof(float), layer->parts[part]->n_elements, 1, 1);
  return layout;
}

/* Converts all others into the block. */
static void convert_numbers(const mha_layer_names *layer, char *block, numbers found[MHA_N_PARTS]) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(loaded), 1, 1, 1);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_raw_tensor *tensor = layer->parts[part];
    if (!tensor || found[part].data)
      continue;
    float *converted =
        (void *)(block + mha_layout_add(&layout, sizeof *converted, tensor->n_elements, 1, 1));
    mha_tensor_convert(tensor, converted);
    found[part].data = converted;
  }
}

/* ---- Matrices -------------------------------------------------------------------------------- */

/* q, k and v lie in one matrix one after the other: as rows (OUT_IN, dense) or as columns (IN_OUT),
 * where each row is as long as the three together. */
static void split_matrix(const mha_config *c, const numbers *packed, mha_matrices *m) {
  const int64_t q = c->n_heads * c->head_size;
  const int64_t k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size;
  const bool in_out = m->orientation == MHA_IN_OUT;
  const int64_t step = in_out ? 1 : c->query_width;
  m->query = packed->data;
  m->key = mha_element_at(packed->data, packed->element, q * step);
  m->value = mha_element_at(packed->data, packed->element, (q + k) * step);
  m->query_element = m->key_element = m->value_element = packed->element;
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
                             const numbers found[MHA_N_PARTS], mha_matrices *m) {
  MHA_INIT(m);
  m->orientation = orientation;
  m->ownership = MHA_BORROW;
  m->query = found[MHA_PART_WQ].data;
  m->query_element = found[MHA_PART_WQ].element;
  m->key = found[MHA_PART_WK].data;
  m->key_element = found[MHA_PART_WK].element;
  m->value = found[MHA_PART_WV].data;
  m->value_element = found[MHA_PART_WV].element;
  m->output = found[MHA_PART_WO].data;
  m->output_element = found[MHA_PART_WO].element;
  m->query_bias = found[MHA_PART_BQ].data;
  m->key_bias = found[MHA_PART_BK].data;
  m->value_bias = found[MHA_PART_BV].data;
  m->output_bias = found[MHA_PART_BO].data;
  m->query_norm = found[MHA_PART_QUERY_NORM].data;
  m->key_norm = found[MHA_PART_KEY_NORM].data;
  m->sinks = found[MHA_PART_SINKS].data;
  if (found[MHA_PART_WQKV].data)
    split_matrix(c, &found[MHA_PART_WQKV], m);
  if (found[MHA_PART_BQKV].data)
    split_bias(c, found[MHA_PART_BQKV].data, m);
}

/* ---- The layer ------------------------------------------------------------------------------- */

static mha_status make_layer(const mha_config *config, const mha_layer_names *layer, mha_file *file,
                             mha_weights **weights, mha_error *error) {
  numbers found[MHA_N_PARTS];
  mha_matrices matrices;
  const bool in_file = borrow_numbers(config, layer, found);
  const mha_layout plan = plan_block(layer, found);
  const mha_allocator allocator = mha_memory_allocator(config->allocator);
  if (plan.overflow)
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "the converted numbers exceed the address space; rule: they must fit");
  loaded *block = mha_memory_allocate(&allocator, plan.bytes);
  if (!block)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the converted numbers need %zu bytes; rule: they must be there", plan.bytes);
  convert_numbers(layer, (char *)block, found);
  point_to_numbers(config, layer->orientation, found, &matrices);
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
    status = mha_model_check_rope(&file->tensors, file->path, &config, error);
  if (status)
    return status;
  mha_model_complete(&file->tensors, &layer, &config);
  status = mha_sizes_derive(&layer, file->path, &config, error);
  return status ? status : make_layer(&config, &layer, file, weights, error);
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
