/* Owns the use of a weights file that was accepted. */
#include "weights_file.h"

#include "fuzz.h"

#include "files/names.h"
#include "files/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ELEMENTS = 1 << 16 };

static void convert(const mha_raw_tensor *tensor) {
  if (tensor->element == MHA_RAW_OTHER || tensor->n_elements > MOST_ELEMENTS)
    return;
  const size_t bytes = (size_t)tensor->n_elements * sizeof(float);
  float *numbers = malloc(bytes + (bytes == 0));
  FUZZ_CHECK(numbers);
  mha_tensor_convert(tensor, numbers);
  if (mha_tensor_element(tensor) == MHA_F32)
    FUZZ_CHECK(memcmp(tensor->data, numbers, bytes) == 0);
  free(numbers);
}

void fuzz_use_tensor(const mha_raw_tensor *tensor, const uint8_t *data, size_t size) {
  char shape[32]; /* some are longer */
  volatile unsigned sum = 0;
  int64_t n = 1;
  bool empty = false;
  FUZZ_CHECK(!mha_name_fault(tensor->name));
  FUZZ_CHECK(tensor->rank >= 0 && tensor->rank <= MHA_MAX_RANK);
  FUZZ_CHECK(tensor->data >= data && tensor->bytes <= size &&
             (size_t)(tensor->data - data) <= size - tensor->bytes);
  for (int axis = 0; axis < tensor->rank; axis++)
    empty = empty || tensor->shape[axis] == 0;
  for (int axis = 0; axis < tensor->rank && !empty; axis++)
    n *= tensor->shape[axis]; /* the sanitizer watches */
  FUZZ_CHECK(tensor->n_elements == (empty ? 0 : n));
  for (size_t i = 0; i < tensor->bytes; i++)
    sum = sum + tensor->data[i];
  FUZZ_CHECK(strlen(mha_shape_text(tensor->rank, tensor->shape, shape, sizeof shape)) <
             sizeof shape);
  convert(tensor);
}

/* An mha_layer_visitor. */
static void use_layer(void *user, const mha_layer_names *layer) {
  const mha_raw_tensors *tensors = user;
  char missing[64];
  const mha_raw_tensor *unsupported = mha_names_unsupported(tensors, layer);
  FUZZ_CHECK(!unsupported ||
             (unsupported >= tensors->items && unsupported < tensors->items + tensors->n));
  FUZZ_CHECK(strlen(mha_names_missing(layer, missing, sizeof missing)) < sizeof missing);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const mha_raw_tensor *tensor = layer->parts[part];
    FUZZ_CHECK(!tensor || strncmp(tensor->name, layer->prefix, (size_t)layer->prefix_bytes) == 0);
  }
}

void fuzz_use_names(const mha_raw_tensors *tensors) {
  static const char *const prefixes[] = {NULL, "", "a.", "blk.0.", "\xff"};
  mha_raw_tensors copy = *tensors;
  const int64_t n_layers = mha_names_visit(tensors, use_layer, &copy);
  FUZZ_CHECK(n_layers >= 0 && mha_names_visit(tensors, NULL, NULL) == n_layers);
  for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
    mha_layer_names layer;
    mha_error error;
    if (mha_names_find(tensors, "fuzz", prefixes[i], &layer, &error) == MHA_OK)
      FUZZ_CHECK(layer.complete && !mha_names_unsupported(tensors, &layer));
    else
      FUZZ_CHECK(error.message[0] != '\0');
  }
}

/* One token through a layer reads all of its numbers, wherever they lie. */
static void compute(const mha_weights *weights) {
  static mha_context *context;
  mha_config config;
  mha_context_options options;
  mha_error error;
  MHA_INIT(&config);
  MHA_INIT(&options);
  options.n_threads = 1;
  if (!context)
    FUZZ_CHECK(mha_context_create(&options, &context, &error) == MHA_OK);
  FUZZ_CHECK(mha_weights_config(weights, &config, &error) == MHA_OK);
  if (config.key_width != config.query_width || config.value_width != config.query_width)
    return;
  float *x = calloc((size_t)config.query_width, sizeof *x);
  float *y = calloc((size_t)config.output_width, sizeof *y);
  FUZZ_CHECK(x && y);
  FUZZ_CHECK(mha_self_attention(context, weights, x, 1, 1, y, &error) == MHA_OK);
  free(y);
  free(x);
}

/* The same bytes as a file that is open: what it tells of itself, and every layer that loads, its
 * numbers converted and as they are. */
static void use_layers(mha_file *file, int64_t n_tensors, int64_t n_layers) {
  for (int64_t k = 0; k < n_layers; k++) {
    mha_layer_info layer;
    mha_config config;
    mha_weights *weights = NULL;
    mha_error error;
    MHA_INIT(&layer);
    MHA_INIT(&config);
    FUZZ_CHECK(mha_file_layer(file, k, &layer, &error) == MHA_OK);
    FUZZ_CHECK((layer.missing[0] == '\0') == (layer.is_complete != 0));
    for (int part = 0; part < MHA_N_PARTS; part++)
      FUZZ_CHECK(layer.parts[part] >= -1 && layer.parts[part] < n_tensors);
    config.n_heads = k % 4;
    config.norm_epsilon = k % 2 ? 1e-5F : 0.0F;
    config.rope = (int32_t)(k % 3);
    config.flags = k % 5 < 3 ? MHA_KEEP_TYPE : 0;
    const mha_status status = mha_weights_load_from(&config, file, layer.prefix, &weights, &error);
    FUZZ_CHECK((status == MHA_OK) == (weights != NULL));
    FUZZ_CHECK(status != MHA_OK || (layer.is_complete && !layer.unsupported));
    if (weights)
      compute(weights);
    mha_weights_destroy(weights);
  }
}

static void count_release(void *user) {
  ++*(int *)user;
}

void fuzz_use_file(const uint8_t *data, size_t size, int64_t n) {
  mha_file_options options;
  mha_file *file = NULL;
  mha_error error;
  int64_t n_tensors = -1;
  int64_t n_layers = -1;
  int released = 0;
  MHA_INIT(&options);
  options.release = count_release;
  options.release_user = &released;
  if (mha_file_open_bytes(data, size, &options, &file, &error) != MHA_OK)
    return;
  FUZZ_CHECK(mha_file_count(file, &n_tensors, &n_layers, &error) == MHA_OK);
  FUZZ_CHECK(n_tensors == n && n_layers >= 0 && n_layers <= n);
  for (int64_t i = 0; i < n_tensors; i++) {
    mha_tensor_info tensor;
    MHA_INIT(&tensor);
    FUZZ_CHECK(mha_file_tensor(file, i, &tensor, &error) == MHA_OK);
    FUZZ_CHECK(tensor.rank >= 0 && tensor.rank <= MHA_MAX_RANK);
  }
  mha_model_info model;
  MHA_INIT(&model);
  FUZZ_CHECK(mha_file_model(file, &model, &error) == MHA_OK);
  FUZZ_CHECK(model.n_heads >= 0 && model.rope_base >= 0.0 && model.norm_epsilon >= 0.0F);
  use_layers(file, n_tensors, n_layers);
  mha_file_destroy(file);
  FUZZ_CHECK(released == 1);
}
