/* Owns the bytes of the files from which layers are loaded, and the numbers that must arrive. */
#define _XOPEN_SOURCE 700

#include "layer_file.h"

#include "files/npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- A folder to work in --------------------------------------------------------------------- */

int layer_enter_folder(void **state) {
  (void)state;
  return test_folder_enter("test_layer") != 0 || mkdir("layer", 0700) != 0;
}

int layer_leave_folder(void **state) {
  (void)state;
  return layer_remove_file(NULL) != 0 || rmdir("layer") != 0 || test_folder_leave() != 0;
}

int layer_remove_folder(void **state) {
  (void)state;
  for (int part = 0; part < LAYER_PARTS; part++)
    layer_remove_part("", part);
  return 0;
}

int layer_remove_file(void **state) {
  (void)state;
  (void)unlink("layer.st");
  return 0;
}

/* ---- Loading --------------------------------------------------------------------------------- */

mha_config layer_heads(int64_t n_heads, int64_t n_kv_heads) {
  mha_config config;
  MHA_INIT(&config);
  config.n_heads = n_heads;
  config.n_kv_heads = n_kv_heads;
  return config;
}

mha_weights *layer_load(const mha_config *config, const char *prefix) {
  mha_weights *weights = NULL;
  mha_error error;
  test_expect(mha_weights_load(config, "layer.st", prefix, &weights, &error), MHA_OK, &error);
  return weights;
}

mha_status layer_load_with(uint32_t flags, const mha_config *config, const char *path,
                           mha_weights **weights, mha_error *error) {
  mha_file_options options;
  mha_file *file = NULL;
  MHA_INIT(&options);
  options.flags = flags;
  options.allocator = config->allocator;
  *weights = NULL;
  mha_status status = mha_file_open(path, &options, &file, error);
  if (!status)
    status = mha_weights_load_from(config, file, NULL, weights, error);
  mha_file_destroy(file);
  return status;
}

void layer_expect_refused(const char *path, const char *prefix, const mha_config *config,
                          mha_status status, const char *fragment) {
  mha_weights *weights = (mha_weights *)(void *)&status;
  mha_error error;
  memset(&error, 0xA5, sizeof error);
  test_expect(mha_weights_load(config, path, prefix, &weights, &error), status, &error);
  assert_null(weights);
  assert_int_equal(error.status, status);
  if (!strstr(error.message, fragment))
    test_failed("\"%s\" lacks \"%s\"", error.message, fragment);
  assert_int_equal(mha_weights_load(config, path, prefix, &weights, NULL), status);
}

/* ---- A layer in the folder `layer` ----------------------------------------------------------- */

const char *const layer_part_names[LAYER_PARTS] = {"W_Q", "W_K", "W_V", "W_O",
                                                   "b_Q", "b_K", "b_V", "b_O"};

static const struct {
  int rank;
  int64_t shape[2];
} odd_layer[LAYER_PARTS] = {
    {2, {EQ, H *D}}, {2, {EK, G *D}}, {2, {EV, G *DV}}, {2, {H * DV, EO}},
    {1, {H * D, 0}}, {1, {G * D, 0}}, {1, {G * DV, 0}}, {1, {EO, 0}},
};

/* What stands at index i of a part's file. */
static float number_at(int part, int64_t i) {
  return (float)(1000 * (part + 1)) + (float)i;
}

void layer_part_path(char path[256], const char *prefix, int part) {
  (void)snprintf(path, 256, "layer/%s%s.npy", prefix, layer_part_names[part]);
}

void layer_put_part(const char *prefix, int part, int rank, const int64_t *shape) {
  static float numbers[4096];
  char path[256];
  mha_error error;
  for (int64_t i = 0; i < 4096; i++)
    numbers[i] = number_at(part, i);
  layer_part_path(path, prefix, part);
  test_expect(mha_npy_write(path, rank, shape, numbers, &error), MHA_OK, &error);
}

void layer_put_parts(const char *prefix, unsigned which) {
  for (int part = 0; part < LAYER_PARTS; part++)
    if (which & 1U << part)
      layer_put_part(prefix, part, odd_layer[part].rank, odd_layer[part].shape);
}

void layer_remove_part(const char *prefix, int part) {
  char path[256];
  layer_part_path(path, prefix, part);
  (void)unlink(path);
}

static void check_projection(const mha_projection *p, int part, bool has_bias) {
  const float *matrix = p->matrix;
  assert_int_equal(p->element, MHA_F32);
  assert_int_equal(p->in, odd_layer[part].shape[0]);
  assert_int_equal(p->out, odd_layer[part].shape[1]);
  for (int64_t i = 0; i < p->in * p->out; i++)
    assert_true(matrix[i] == number_at(part, i));
  assert_int_equal(p->bias != NULL, has_bias);
  for (int64_t i = 0; p->bias && i < p->out; i++)
    assert_true(p->bias[i] == number_at(part + 4, i));
}

void layer_check_parts(const mha_weights *weights, unsigned which) {
  const mha_config *c = &weights->config;
  check_projection(&weights->query, 0, which & 0x10);
  check_projection(&weights->key, 1, which & 0x20);
  check_projection(&weights->value, 2, which & 0x40);
  check_projection(&weights->output, 3, which & 0x80);
  assert_int_equal(c->n_heads, H);
  assert_int_equal(c->n_kv_heads, G);
  assert_int_equal(c->head_size, D);
  assert_int_equal(c->value_head_size, DV);
  assert_int_equal(c->query_width, EQ);
  assert_int_equal(c->key_width, EK);
  assert_int_equal(c->value_width, EV);
  assert_int_equal(c->output_width, EO);
}

/* ---- The numbers of a layer ------------------------------------------------------------------ */

void layer_make_numbers(layer_numbers *n, const int64_t inputs[3], int64_t dv) {
  test_random random;
  *n = (layer_numbers){.heads = H, .kv_heads = G, .d = D, .dv = dv};
  const int64_t out[4] = {H * D, G * D, G * dv, EO};
  test_random_seed(&random, 5);
  for (int k = 0; k < 4; k++) {
    n->in[k] = k < 3 ? inputs[k] : H * dv;
    n->out[k] = out[k];
    for (int64_t i = 0; i < n->in[k] * n->out[k]; i++)
      n->matrices[k][i] = (float)test_random_range(&random, -15, 15) / 8.0F;
    for (int64_t i = 0; i < n->out[k]; i++)
      n->biases[k][i] = (float)test_random_range(&random, -15, 15) / 8.0F;
  }
}

const layer_naming layer_namings[LAYER_NAMINGS] = {
    [LAYER_TORCH] = {true,
                     {NULL, NULL, NULL, "out_proj.weight", "in_proj_weight"},
                     {NULL, NULL, NULL, "out_proj.bias", "in_proj_bias"}},
    [LAYER_GPT2] = {false,
                    {NULL, NULL, NULL, "c_proj.weight", "c_attn.weight"},
                    {NULL, NULL, NULL, "c_proj.bias", "c_attn.bias"}},
    [LAYER_TORCH_APART] = {true,
                           {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight",
                            NULL},
                           {NULL, NULL, NULL, "out_proj.bias", "in_proj_bias"}},
    [LAYER_HUGGING_FACE] = {true,
                            {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
                             NULL},
                            {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", NULL}},
    [LAYER_BERT] = {true,
                    {"self.query.weight", "self.key.weight", "self.value.weight",
                     "output.dense.weight", NULL},
                    {"self.query.bias", "self.key.bias", "self.value.bias", "output.dense.bias",
                     NULL}},
    [LAYER_ARTICLE] = {false,
                       {"W_Q", "W_K", "W_V", "W_O", NULL},
                       {"b_Q", "b_K", "b_V", "b_O", NULL}},
};

void layer_make_fitting(layer_numbers *n, int naming) {
  static const int64_t one[3] = {EQ, EQ, EQ};
  static const int64_t three[3] = {EQ, EK, EV};
  const bool packed = naming < LAYER_FIRST_SEPARATE;
  layer_make_numbers(n, packed ? one : three, packed ? D : DV);
}

/* ---- The same layer from memory -------------------------------------------------------------- */

static mha_weights *from_memory(const layer_numbers *n, bool out_in, bool biases) {
  static float turned[4][20 * 20];
  const float *lies[4];
  mha_config config = layer_heads(n->heads, n->kv_heads);
  mha_matrices m;
  mha_weights *weights = NULL;
  mha_error error;
  for (int k = 0; k < 4; k++) {
    lies[k] = out_in ? turned[k] : n->matrices[k];
    for (int64_t i = 0; i < n->in[k]; i++)
      for (int64_t o = 0; o < n->out[k]; o++)
        turned[k][o * n->in[k] + i] = n->matrices[k][i * n->out[k] + o];
  }
  config.head_size = n->d;
  config.value_head_size = n->dv;
  config.query_width = n->in[0];
  config.key_width = n->in[1];
  config.value_width = n->in[2];
  config.output_width = n->out[3];
  MHA_INIT(&m);
  m.orientation = out_in ? MHA_OUT_IN : MHA_IN_OUT;
  m.query = lies[0];
  m.key = lies[1];
  m.value = lies[2];
  m.output = lies[3];
  m.query_bias = biases ? n->biases[0] : NULL;
  m.key_bias = biases ? n->biases[1] : NULL;
  m.value_bias = biases ? n->biases[2] : NULL;
  m.output_bias = biases ? n->biases[3] : NULL;
  test_expect(mha_weights_create(&config, &m, &weights, &error), MHA_OK, &error);
  return weights;
}

enum { LQ = 5, LK = 6 };

/* Cross attention of the same inputs, [LQ][EO]. */
static void run_layer(const mha_weights *weights, float *output) {
  float inputs[3][LK * 20];
  test_random random;
  mha_context *context = NULL;
  mha_forward_args args;
  mha_error error;
  test_random_seed(&random, 6);
  for (int k = 0; k < 3; k++)
    test_fill_normal(&random, inputs[k], LK * 20, 0.25);
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = LQ;
  args.key_length = LK;
  args.query = inputs[0];
  args.key = inputs[1];
  args.value = inputs[2];
  args.output = output;
  test_fill_poison(output, LQ * EO);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_forward(context, weights, &args, &error), MHA_OK, &error);
  mha_context_destroy(context);
}

static void check_numbers(const mha_projection *p, const layer_numbers *n, int k, bool biases) {
  const float *matrix = p->matrix;
  assert_int_equal(p->in, n->in[k]);
  assert_int_equal(p->out, n->out[k]);
  for (int64_t i = 0; i < p->in; i++)
    for (int64_t o = 0; o < p->out; o++)
      assert_true(matrix[i * p->in_stride + o * p->out_stride] == n->matrices[k][i * p->out + o]);
  assert_int_equal(p->bias != NULL, biases);
  for (int64_t o = 0; biases && o < p->out; o++)
    assert_true(p->bias[o] == n->biases[k][o]);
}

void layer_check_same(const mha_weights *weights, const layer_numbers *n, bool out_in,
                      bool biases) {
  float got[LQ * EO];
  float expected[LQ * EO];
  check_numbers(&weights->query, n, 0, biases);
  check_numbers(&weights->key, n, 1, biases);
  check_numbers(&weights->value, n, 2, biases);
  check_numbers(&weights->output, n, 3, biases);
  mha_weights *reference = from_memory(n, out_in, biases);
  run_layer(reference, expected);
  run_layer(weights, got);
  test_same_bits("output", (test_shape){{1, 1, LQ, EO}}, got, expected);
  mha_weights_destroy(reference);
}

/* ---- A safetensors file, byte by byte -------------------------------------------------------- */

void layer_file_begin(layer_file *file) {
  (void)strcpy(file->header, "{\"__metadata__\":{\"made\":\"by hand\"}");
  file->n_data = 0;
}

void layer_file_put_bytes(layer_file *file, uint64_t bits, int n_bytes) {
  assert_true(file->n_data + 8 <= sizeof file->data);
  for (int i = 0; i < n_bytes; i++)
    file->data[file->n_data++] = (unsigned char)(bits >> (8 * i));
}

void layer_file_put_number(layer_file *file, const char *type, float number) {
  uint32_t bits;
  uint64_t wide;
  const double number_as_double = number;
  memcpy(&bits, &number, sizeof bits);
  memcpy(&wide, &number_as_double, sizeof wide);
  if (strcmp(type, "F64") == 0)
    layer_file_put_bytes(file, wide, 8);
  else if (strcmp(type, "BF16") == 0)
    layer_file_put_bytes(file, bits >> 16, 2);
  else if (strcmp(type, "F16") == 0)
    layer_file_put_bytes(
        file,
        (bits >> 16 & 0x8000) |
            (number == 0.0F ? 0 : ((bits >> 23 & 0xFF) - 112) << 10 | (bits >> 13 & 0x3FF)),
        2);
  else
    layer_file_put_bytes(file, bits, 4);
}

void layer_file_put_entry(layer_file *file, const char *prefix, const char *name, const char *type,
                          int rank, int64_t n1, int64_t n2, size_t begin) {
  char shape[64] = "";
  if (rank == 1)
    (void)snprintf(shape, sizeof shape, "%" PRId64, n1);
  if (rank == 2)
    (void)snprintf(shape, sizeof shape, "%" PRId64 ",%" PRId64, n1, n2);
  const size_t used = strlen(file->header);
  (void)snprintf(file->header + used, sizeof file->header - used,
                 ",\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", prefix,
                 name, type, shape, begin, file->n_data);
}

void layer_file_put_vector(layer_file *file, const char *prefix, const char *name, const char *type,
                           const float *vector, int64_t n) {
  const size_t begin = file->n_data;
  for (int64_t i = 0; i < n; i++)
    layer_file_put_number(file, type, vector[i]);
  layer_file_put_entry(file, prefix, name, type, 1, n, 0, begin);
}

void layer_file_end(layer_file *file, size_t offset) {
  FILE *to = fopen("layer.st", "wb");
  assert_non_null(to);
  (void)strcat(file->header, "}");
  while (strlen(file->header) % 4 != offset)
    (void)strcat(file->header, " ");
  const size_t n = strlen(file->header);
  for (int i = 0; i < 8; i++)
    assert_int_equal(fputc((int)(n >> (8 * i) & 0xFF), to) == EOF, 0);
  assert_int_equal(fwrite(file->header, 1, n, to), n);
  assert_int_equal(fwrite(file->data, 1, file->n_data, to), file->n_data);
  assert_int_equal(fclose(to), 0);
}

/* ---- A layer in it --------------------------------------------------------------------------- */

/* Row r of a matrix as it lies in the file. */
static void put_row(layer_file *file, const char *type, const layer_numbers *n, int k, bool out_in,
                    int64_t r) {
  const int64_t length = out_in ? n->in[k] : n->out[k];
  for (int64_t c = 0; c < length; c++)
    layer_file_put_number(file, type,
                          n->matrices[k][out_in ? c * n->out[k] + r : r * n->out[k] + c]);
}

/* The three in one: rows one after the other, or side by side. */
static void put_packed(layer_file *file, const char *prefix, const char *name, const char *type,
                       const layer_numbers *n, bool out_in) {
  const size_t begin = file->n_data;
  const int64_t total = n->out[0] + n->out[1] + n->out[2];
  for (int k = 0; out_in && k < 3; k++)
    for (int64_t r = 0; r < n->out[k]; r++)
      put_row(file, type, n, k, true, r);
  for (int64_t r = 0; !out_in && r < n->in[0]; r++)
    for (int k = 0; k < 3; k++)
      put_row(file, type, n, k, false, r);
  layer_file_put_entry(file, prefix, name, type, 2, out_in ? total : n->in[0],
                       out_in ? n->in[0] : total, begin);
}

static void put_matrix(layer_file *file, const char *prefix, const char *name, const char *type,
                       const layer_numbers *n, int k, bool out_in) {
  const size_t begin = file->n_data;
  const int64_t rows = out_in ? n->out[k] : n->in[k];
  for (int64_t r = 0; r < rows; r++)
    put_row(file, type, n, k, out_in, r);
  layer_file_put_entry(file, prefix, name, type, 2, rows, out_in ? n->in[k] : n->out[k], begin);
}

void layer_file_put_numbers(layer_file *file, const char *prefix, const layer_naming *as,
                            const char *type, const layer_numbers *n, bool biases,
                            const char *except) {
  for (int k = 0; k < 5; k++) {
    const char *name = as->matrices[k];
    if (name && strcmp(name, except) != 0 && k < LAYER_PACKED)
      put_matrix(file, prefix, name, type, n, k, as->out_in);
    else if (name && strcmp(name, except) != 0)
      put_packed(file, prefix, name, type, n, as->out_in);
  }
  for (int k = 0; biases && k < LAYER_PACKED; k++)
    if (as->biases[k])
      layer_file_put_vector(file, prefix, as->biases[k], type, n->biases[k], n->out[k]);
  if (biases && as->biases[LAYER_PACKED]) {
    float joined[60];
    int64_t used = 0;
    for (int k = 0; k < 3; used += n->out[k++])
      memcpy(joined + used, n->biases[k], (size_t)n->out[k] * sizeof(float));
    layer_file_put_vector(file, prefix, as->biases[LAYER_PACKED], type, joined, used);
  }
}

void layer_file_write(const char *prefix, const layer_naming *as, const char *type,
                      const layer_numbers *n, bool biases, size_t offset) {
  static layer_file file;
  layer_file_begin(&file);
  layer_file_put_numbers(&file, prefix, as, type, n, biases, "");
  layer_file_end(&file, offset);
}
