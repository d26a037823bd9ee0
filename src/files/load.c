/* Owns mha_weights_load: from files to a layer. Numbers that can be used where they lie are
 * borrowed from the files; all others are converted once, into one block of memory that the layer
 * gives back at its end. */
#include "../arguments.h"
#include "../error.h"
#include "../memory.h"
#include "../weights.h"
#include "path.h"
#include "sizes.h"

#include <string.h>

/* What stands behind the borrowed pointers; the layer's backing, in front of the converted numbers.
 */
typedef struct loaded {
  mha_file_tensors tensors;
  mha_allocator allocator; /* of this block */
  size_t bytes;
} loaded;

static void release_loaded(void *state) {
  loaded *l = state;
  const mha_allocator allocator = l->allocator;
  const size_t bytes = l->bytes;
  mha_tensors_close(&l->tensors);
  mha_memory_release(&allocator, l, bytes);
}

/* ---- Numbers --------------------------------------------------------------------------------- */

static mha_status check_types(const mha_layer_names *layer, const char *path, mha_error *error) {
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_file_tensor *tensor = layer->parts[part];
    if (tensor && tensor->element == MHA_FILE_OTHER)
      return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "%s: %s holds the type \"%s\"; rule: float32, float64, float16 or bfloat16",
                      mha_shown_path(path), mha_shown_path(tensor->name), tensor->type);
  }
  return MHA_OK;
}

/* Whether a tensor's numbers are used where they lie. What was read into memory is not kept for a
 * layer that is a small part of it. */
static bool is_borrowed(const mha_file_tensor *tensor, bool in_place) {
  return in_place && mha_tensor_is_usable(tensor);
}

static bool is_worth_keeping(const mha_file_tensors *tensors, const mha_layer_names *layer) {
  size_t all = 0;
  size_t used = 0;
  for (int64_t i = 0; i < tensors->n; i++)
    all += tensors->items[i].bytes;
  for (int part = 0; part < MHA_N_PARTS; part++)
    used += layer->parts[part] ? layer->parts[part]->bytes : 0;
  return used >= all / 2;
}

static mha_layout plan_block(const mha_layer_names *layer, bool in_place) {
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(loaded), 1, 1, 1);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_file_tensor *tensor = layer->parts[part];
    if (tensor && !is_borrowed(tensor, in_place))
      (void)mha_layout_add(&layout, sizeof(float), tensor->n_elements, 1, 1);
  }
  return layout;
}

/* Points `numbers` at each part's float32 numbers, in the file or in the block. Returns whether
 * some are in the file. */
static bool collect_numbers(const mha_layer_names *layer, bool in_place, char *block,
                            const float *numbers[MHA_N_PARTS]) {
  bool in_file = false;
  mha_layout layout = {0};
  (void)mha_layout_add(&layout, sizeof(loaded), 1, 1, 1);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_file_tensor *tensor = layer->parts[part];
    numbers[part] = NULL;
    if (!tensor)
      continue;
    if (is_borrowed(tensor, in_place)) {
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

/* Takes over `tensors` whatever the outcome. */
static mha_status make_layer(const mha_config *config, const mha_layer_names *layer, bool in_memory,
                             mha_file_tensors *tensors, mha_weights **weights, mha_error *error) {
  const bool in_place = !in_memory || is_worth_keeping(tensors, layer);
  const mha_layout plan = plan_block(layer, in_place);
  const mha_allocator allocator = mha_memory_allocator(config->allocator);
  const float *numbers[MHA_N_PARTS];
  mha_matrices matrices;
  loaded *block = plan.overflow ? NULL : mha_memory_allocate(&allocator, plan.bytes);
  if (!block) {
    mha_tensors_close(tensors);
    return plan.overflow
               ? mha_fail(error, MHA_ERROR_OVERFLOW,
                          "the converted numbers exceed the address space; rule: they must fit")
               : mha_fail(error, MHA_ERROR_MEMORY,
                          "the converted numbers need %zu bytes; rule: they must be there",
                          plan.bytes);
  }
  const bool in_file = collect_numbers(layer, in_place, (char *)block, numbers);
  point_to_numbers(config, layer->orientation, numbers, &matrices);
  if (!in_file)
    mha_tensors_close(tensors);
  *block = (loaded){*tensors, allocator, plan.bytes};
  return mha_weights_create_backed(config, &matrices, (mha_backing){release_loaded, block}, weights,
                                   error);
}

static mha_status load(mha_config *config, const char *path, const char *prefix,
                       mha_weights **weights, mha_error *error) {
  mha_file_tensors tensors;
  mha_layer_names layer;
  const bool read_into_memory = (config->flags & MHA_READ_FILE) != 0;
  config->flags &= ~MHA_READ_FILE;
  mha_status status = mha_tensors_open(path, read_into_memory, config->allocator, &tensors, error);
  if (status)
    return status;
  status = mha_names_find(&tensors, path, prefix, &layer, error);
  if (!status)
    status = check_types(&layer, path, error);
  if (!status)
    status = mha_sizes_derive(&layer, path, config, error);
  if (!status)
    return make_layer(config, &layer, read_into_memory, &tensors, weights, error);
  mha_tensors_close(&tensors);
  return status;
}

mha_status mha_weights_load(const mha_config *config, const char *path, const char *prefix,
                            mha_weights **weights, mha_error *error) {
  mha_config known;
  mha_status status = mha_require(weights, "weights", error);
  if (status)
    return status;
  *weights = NULL;
  status = mha_read_struct(&known, sizeof known, MHA_FIRST_CONFIG, config, "config", error);
  if (!status)
    status = mha_require(path, "path", error);
  if (status)
    return status;
  known.struct_size = sizeof known;
  return load(&known, path, prefix, weights, error);
}
