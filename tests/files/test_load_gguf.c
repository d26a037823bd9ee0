/* Layers from GGUF files: those of tests/data/gguf to the bit, kept in their types or converted;
 * names, neighbours, what the metadata fills in, and what is held in memory. MHA_KEEP_TYPE of the
 * other kinds of files too. */
#include "gguf_image.h"
#include "layer_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define DATA(name)   MHA_TEST_DATA_DIR "/gguf/" name

enum { MOST = 64 * 192 }; /* numbers of the largest tensor */

static gguf_image f; /* the file of the running test */

/* ---- Files ----------------------------------------------------------------------------------- */

/* n little-endian float32 of a .npy file whose header has 128 bytes; zeros where there is none. */
static bool read_array(const char *model, const char *tensor, float *numbers, size_t n) {
  char path[1024];
  char start[129] = "";
  (void)snprintf(path, sizeof path, DATA("%s/%s.npy"), model, tensor);
  FILE *file = fopen(path, "rb");
  if (!file)
    return false;
  assert_int_equal(fread(start, 1, 128, file), 128);
  assert_non_null(strstr(start + 10, "'<f4', 'fortran_order': False"));
  assert_int_equal(fread(numbers, sizeof *numbers, n, file), n);
  assert_int_equal(fgetc(file), EOF);
  assert_int_equal(fclose(file), 0);
  return true;
}

static unsigned char *read_file(const char *path, size_t *n) {
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  *n = (size_t)ftell(file);
  unsigned char *bytes = test_allocate(*n, 1);
  rewind(file);
  assert_int_equal(fread(bytes, 1, *n, file), *n);
  assert_int_equal(fclose(file), 0);
  return bytes;
}

/* ---- The files of tests/data/gguf ------------------------------------------------------------ */

typedef struct model {
  const char *name, *architecture, *prefix;
  int64_t layers, width, heads, kv_heads, size;
  int32_t rope;
  int32_t elements[4]; /* of the four matrices */
  bool packed, biases, norms;
} model;

static const model models[] = {
    {"llama_q8_0",
     "llama",
     "blk.1.",
     2,
     64,
     4,
     2,
     16,
     MHA_ROPE_INTERLEAVED,
     {MHA_Q8_0, MHA_Q8_0, MHA_Q8_0, MHA_Q8_0},
     false,
     false,
     false},
    {"llama_q4_0",
     "llama",
     "blk.0.",
     1,
     64,
     4,
     1,
     32,
     MHA_ROPE_INTERLEAVED,
     {MHA_Q4_0, MHA_Q4_0, MHA_Q8_0, MHA_Q4_0},
     false,
     false,
     false},
    {"qwen2_bias_q8_0",
     "qwen2",
     "blk.0.",
     1,
     64,
     4,
     2,
     16,
     MHA_ROPE_HALVES,
     {MHA_Q8_0, MHA_Q8_0, MHA_Q8_0, MHA_Q8_0},
     false,
     true,
     false},
    {"qwen3_norms_bf16",
     "qwen3",
     "blk.0.",
     1,
     64,
     4,
     2,
     32,
     MHA_ROPE_HALVES,
     {MHA_BF16, MHA_BF16, MHA_BF16, MHA_BF16},
     false,
     false,
     true},
    {"gpt2_packed_f16",
     "gpt2",
     "blk.0.",
     1,
     64,
     4,
     4,
     16,
     MHA_ROPE_NONE,
     {MHA_F16, MHA_F16, MHA_F16, MHA_F16},
     true,
     true,
     false},
};

static const char *const matrix_names[] = {"attn_q", "attn_k", "attn_v", "attn_output"};

/* The numbers that one of the matrices, of [out][in], and its bias have to be. */
static void expected_numbers(const model *m, int k, size_t out, size_t in, float *matrix,
                             float *bias, bool *has_bias) {
  static float packed[MOST];
  char name[64];
  const size_t rows = (size_t)((m->heads + 2 * m->kv_heads) * m->size);
  const size_t first = (size_t)(k == 0 ? 0 : m->heads + (k - 1) * m->kv_heads) * (size_t)m->size;
  const bool part = m->packed && k < 3;
  (void)snprintf(name, sizeof name, "%s%s.weight", m->prefix, part ? "attn_qkv" : matrix_names[k]);
  assert_true(read_array(m->name, name, part ? packed : matrix, part ? rows * in : out * in));
  if (part)
    memcpy(matrix, packed + first * in, out * in * sizeof *matrix);
  (void)snprintf(name, sizeof name, "%s%s.bias", m->prefix, part ? "attn_qkv" : matrix_names[k]);
  *has_bias = read_array(m->name, name, part ? packed : bias, part ? rows : out);
  if (part)
    memcpy(bias, packed + first, out * sizeof *bias);
}

/* Row by row, as the leading dimension says. */
static void check_matrix(const void *data, int32_t element, int64_t ld, size_t out, size_t in,
                         const float *expected) {
  static float row[256];
  mha_error error;
  for (size_t r = 0; r < out; r++) {
    const char *at =
        (const char *)data + (r == 0 ? 0 : mha_element_bytes(element, (int64_t)r * ld));
    test_expect(mha_element_convert(element, at, MHA_F32, row, (int64_t)in, &error), MHA_OK,
                &error);
    assert_memory_equal(row, expected + r * in, in * sizeof *row);
  }
}

static void check_vector(const float *got, const char *model_name, const char *prefix,
                         const char *name, size_t n) {
  float expected[256];
  char full[64];
  (void)snprintf(full, sizeof full, "%s%s", prefix, name);
  assert_true(read_array(model_name, full, expected, n));
  assert_memory_equal(got, expected, n * sizeof *got);
}

static void check_layer(const model *m, const mha_weights *weights, bool kept) {
  static float expected[MOST];
  float bias[256];
  mha_matrices n;
  mha_error error;
  MHA_INIT(&n);
  test_expect(mha_weights_matrices(weights, &n, &error), MHA_OK, &error);
  const void *const data[] = {n.query, n.key, n.value, n.output};
  const int32_t elements[] = {n.query_element, n.key_element, n.value_element, n.output_element};
  const int64_t ld[] = {n.query_ld, n.key_ld, n.value_ld, n.output_ld};
  const float *const biases[] = {n.query_bias, n.key_bias, n.value_bias, n.output_bias};
  const size_t q = (size_t)(m->heads * m->size);
  const size_t kv = (size_t)(m->kv_heads * m->size);
  const size_t out[] = {q, kv, kv, (size_t)m->width};
  assert_int_equal(n.orientation, MHA_OUT_IN);
  for (int k = 0; k < 4; k++) {
    bool has_bias = false;
    const size_t in = k < 3 ? (size_t)m->width : q;
    expected_numbers(m, k, out[k], in, expected, bias, &has_bias);
    assert_int_equal(elements[k], kept ? m->elements[k] : MHA_F32);
    check_matrix(data[k], elements[k], ld[k], out[k], in, expected);
    assert_int_equal(has_bias, m->biases && (m->packed || k < 3));
    assert_int_equal(biases[k] != NULL, has_bias);
    if (has_bias)
      assert_memory_equal(biases[k], bias, out[k] * sizeof *bias);
  }
  assert_int_equal(n.query_norm != NULL, m->norms);
  assert_int_equal(n.key_norm != NULL, m->norms);
  if (m->norms) {
    check_vector(n.query_norm, m->name, m->prefix, "attn_q_norm.weight", (size_t)m->size);
    check_vector(n.key_norm, m->name, m->prefix, "attn_k_norm.weight", (size_t)m->size);
  }
  assert_null(n.sinks);
}

/* The metadata says all sizes, so an empty config is enough. */
static void check_config(const model *m, const mha_weights *weights) {
  mha_config config;
  mha_error error;
  MHA_INIT(&config);
  test_expect(mha_weights_config(weights, &config, &error), MHA_OK, &error);
  assert_int_equal(config.n_heads, m->heads);
  assert_int_equal(config.n_kv_heads, m->kv_heads);
  assert_int_equal(config.head_size, m->size);
  assert_int_equal(config.value_head_size, m->size);
  assert_int_equal(config.query_width, m->width);
  assert_int_equal(config.norm, m->norms ? MHA_NORM_PER_HEAD : MHA_NORM_NONE);
  assert_true(config.norm_epsilon == (m->norms ? 1e-6F : 0.0F));
  assert_int_equal(config.rope, MHA_ROPE_NONE);
}

/* As a path, read into memory, and as bytes at any alignment. */
static void every_file_loads_to_the_bit(void **state) {
  (void)state;
  for (size_t i = 0; i < COUNT(models); i++)
    for (int kept = 0; kept < 2; kept++)
      for (int way = 0; way < 4; way++) {
        char path[1024];
        size_t n = 0;
        mha_file_options options;
        mha_file *file = NULL;
        mha_weights *weights = NULL;
        mha_config config;
        mha_error error;
        test_note("%s, kept %d, way %d", models[i].name, kept, way);
        (void)snprintf(path, sizeof path, DATA("%s.gguf"), models[i].name);
        unsigned char *bytes = read_file(path, &n);
        unsigned char *moved = test_allocate(n + 1, 1);
        memcpy(moved + 1, bytes, n);
        MHA_INIT(&options);
        options.flags = way == 1 ? MHA_READ_FILE : 0;
        if (way < 2)
          test_expect(mha_file_open(path, &options, &file, &error), MHA_OK, &error);
        else
          test_expect(mha_file_open_bytes(way == 2 ? bytes : moved + 1, n, NULL, &file, &error),
                      MHA_OK, &error);
        MHA_INIT(&config);
        config.flags = kept ? MHA_KEEP_TYPE : 0;
        test_expect(mha_weights_load_from(&config, file, models[i].prefix, &weights, &error),
                    MHA_OK, &error);
        mha_file_destroy(file);
        check_layer(&models[i], weights, kept);
        check_config(&models[i], weights);
        if (kept && way > 1) {
          const unsigned char *begin = way == 2 ? bytes : moved + 1;
          assert_true((const unsigned char *)weights->key.matrix > begin &&
                      (const unsigned char *)weights->key.matrix < begin + n);
        }
        mha_weights_destroy(weights);
        free(moved);
        free(bytes);
      }
}

static void files_tell_their_models(void **state) {
  (void)state;
  for (size_t i = 0; i < COUNT(models); i++) {
    const model *m = &models[i];
    char path[1024];
    int64_t n_layers = 0;
    mha_file *file = NULL;
    mha_model_info info;
    mha_layer_info layer;
    mha_error error;
    test_note("%s", m->name);
    (void)snprintf(path, sizeof path, DATA("%s.gguf"), m->name);
    test_expect(mha_file_open(path, NULL, &file, &error), MHA_OK, &error);
    MHA_INIT(&info);
    test_expect(mha_file_model(file, &info, &error), MHA_OK, &error);
    assert_string_equal(info.architecture, m->architecture);
    assert_int_equal(info.n_layers, m->layers);
    assert_int_equal(info.model_width, m->width);
    assert_int_equal(info.n_heads, m->heads);
    assert_int_equal(info.n_kv_heads, m->kv_heads);
    assert_int_equal(info.head_size, m->size);
    assert_int_equal(info.value_head_size, m->size);
    assert_int_equal(info.rotary_size, m->size);
    assert_true(info.rope_base == 10000.0);
    assert_true(info.norm_epsilon == 1e-6F);
    assert_int_equal(info.rope, m->rope);
    test_expect(mha_file_count(file, NULL, &n_layers, &error), MHA_OK, &error);
    assert_int_equal(n_layers, m->layers);
    MHA_INIT(&layer);
    test_expect(mha_file_layer(file, n_layers - 1, &layer, &error), MHA_OK, &error);
    assert_string_equal(layer.prefix, m->prefix);
    assert_string_equal(layer.family, m->packed ? "GGUF, packed" : "GGUF");
    assert_int_equal(layer.is_complete, 1);
    assert_null(layer.unsupported);
    mha_file_destroy(file);
  }
}

static void two_layers_need_a_prefix(void **state) {
  mha_config config;
  (void)state;
  MHA_INIT(&config);
  layer_expect_refused(DATA("llama_q8_0.gguf"), NULL, &config, MHA_ERROR_WEIGHTS,
                       "holds the layers \"blk.0.\" (GGUF), \"blk.1.\" (GGUF); rule: ");
}

static void other_types_are_named(void **state) {
  mha_config config;
  (void)state;
  for (int kept = 0; kept < 2; kept++) {
    MHA_INIT(&config);
    config.flags = kept ? MHA_KEEP_TYPE : 0;
    layer_expect_refused(DATA("unsupported_q6_k.gguf"), NULL, &config, MHA_ERROR_UNSUPPORTED,
                         "unsupported_q6_k.gguf: blk.0.attn_q.weight holds the type \"Q6_K\"; "
                         "rule: float32, float64, float16, bfloat16, Q8_0 or Q4_0");
  }
}

/* 64·128 + 2·64·32 + 128·64 numbers: converted they are there as float32, kept not at all. */
static void kept_numbers_take_no_memory(void **state) {
  (void)state;
  for (int kept = 0; kept < 2; kept++) {
    test_allocator allocator;
    mha_config config;
    mha_weights *weights = NULL;
    mha_error error;
    size_t asked = 0;
    MHA_INIT(&config);
    config.flags = kept ? MHA_KEEP_TYPE : 0;
    test_allocator_init(&allocator);
    config.allocator = &allocator.mha;
    test_expect(mha_weights_load(&config, DATA("llama_q4_0.gguf"), NULL, &weights, &error), MHA_OK,
                &error);
    for (int i = 0; i < allocator.n_ranges; i++)
      asked += (size_t)(allocator.ranges[i].end - allocator.ranges[i].begin);
    if (kept)
      assert_in_range(asked, 1, 6000);
    else
      assert_in_range(asked, 4 * 20480, 4 * 20480 + 6000);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
}

static void allocation_failures(void **state) {
  (void)state;
  mha_status status = MHA_ERROR_MEMORY;
  int64_t nth = 0;
  while (status == MHA_ERROR_MEMORY) {
    test_allocator allocator;
    mha_config config;
    mha_weights *weights = NULL;
    mha_error error;
    MHA_INIT(&config);
    config.flags = nth % 2 ? MHA_KEEP_TYPE : 0;
    test_allocator_init(&allocator);
    allocator.fail_at = ++nth;
    config.allocator = &allocator.mha;
    status = mha_weights_load(&config, DATA("llama_q4_0.gguf"), NULL, &weights, &error);
    assert_int_equal(weights == NULL, status != MHA_OK);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
  assert_int_equal(status, MHA_OK);
  assert_true(nth > 4); /* the store, the header, the file, the block, the layer */
}

/* ---- Layers made up -------------------------------------------------------------------------- */

/* "blk.0." of E = 8, H = 4, G = 2 and d = 2, in float32, and n more tensors and pairs to come. */
enum { TINY_TENSORS = 4, TINY_PAIRS = 8, TINY_BYTES = 4 * (64 + 32 + 32 + 64) };

static void put_tiny_tensors(void) {
  gguf_tensor(&f, "blk.0.attn_q.weight", 2, 8, 8, GGUF_F32, 0);
  gguf_tensor(&f, "blk.0.attn_k.weight", 2, 8, 4, GGUF_F32, 256);
  gguf_tensor(&f, "blk.0.attn_v.weight", 2, 8, 4, GGUF_F32, 384);
  gguf_tensor(&f, "blk.0.attn_output.weight", 2, 8, 8, GGUF_F32, 512);
}

static void put_tiny(uint64_t n_tensors) {
  gguf_begin(&f, TINY_TENSORS + n_tensors, TINY_PAIRS);
  gguf_pair_text(&f, "general.architecture", "llama");
  gguf_pair_u32(&f, "llama.attention.head_count", 4);
  gguf_pair_u32(&f, "llama.attention.head_count_kv", 2);
  gguf_pair_u32(&f, "llama.attention.key_length", 2);
  gguf_pair_u32(&f, "llama.attention.value_length", 2);
  gguf_pair_u32(&f, "llama.rope.dimension_count", 2);
  gguf_pair_f32(&f, "llama.rope.freq_base", 5e5F);
  gguf_pair_f32(&f, "llama.attention.layer_norm_rms_epsilon", 0.25F);
  put_tiny_tensors();
}

/* The whole file, and a config that says nothing. */
static void begin_tiny(mha_config *config) {
  put_tiny(0);
  gguf_data(&f, 32, TINY_BYTES);
  MHA_INIT(config);
}

/* Adds a vector of n numbers; they lie one per 32 bytes behind the layer. */
static void put_beside(const char *name, uint64_t n, int index) {
  gguf_tensor(&f, name, 1, n, 0, GGUF_F32, TINY_BYTES + 32 * (uint64_t)index);
}

static mha_status load_image(const mha_config *config, const char *prefix, mha_weights **weights,
                             mha_error *error) {
  mha_file *file = NULL;
  test_expect(mha_file_open_bytes(f.bytes, f.n, NULL, &file, error), MHA_OK, error);
  const mha_status status = mha_weights_load_from(config, file, prefix, weights, error);
  mha_file_destroy(file);
  return status;
}

static void refuse_image(const mha_config *config, mha_status expected, const char *fragment) {
  mha_weights *weights = NULL;
  mha_error error;
  test_note("%s", fragment);
  test_expect(load_image(config, "blk.0.", &weights, &error), expected, &error);
  if (!strstr(error.message, fragment))
    test_failed("\"%s\" lacks \"%s\"", error.message, fragment);
  assert_null(weights);
}

/* What stands beside the layer in its block: either it does not belong to it, or it is refused. */
static void neighbours_are_told_apart(void **state) {
  static const struct {
    const char *name;
    bool is_refused;
  } rows[] = {
      {"ffn_up.weight", false},           {"attn_norm.weight", false},
      {"attn_norm.bias", false},          {"attn_norm_2.weight", false},
      {"attn_output_norm.weight", false}, {"post_attention_norm.weight", false},
      {"attn_rot_embd.weight", false},    {"layer_output_norm.bias", false},
      {"attn_q_a.weight", true},          {"attn_sub_norm.weight", true},
      {"attn_rel_b.weight", true},        {"attn_q.scale", true},
      {"attn_q_norm.bias", true},         {"attn_gate.weight", true},
      {"attn_kv_b.weight", true},
  };
  mha_config config;
  (void)state;
  MHA_INIT(&config);
  for (size_t i = 0; i < COUNT(rows); i++) {
    char name[64];
    mha_weights *weights = NULL;
    mha_error error;
    (void)snprintf(name, sizeof name, "blk.0.%s", rows[i].name);
    put_tiny(1);
    put_beside(name, 8, 0);
    gguf_data(&f, 32, TINY_BYTES + 32);
    if (rows[i].is_refused) {
      refuse_image(&config, MHA_ERROR_UNSUPPORTED, name);
      continue;
    }
    test_note("%s", name);
    test_expect(load_image(&config, NULL, &weights, &error), MHA_OK, &error);
    mha_weights_destroy(weights);
  }
}

static void vectors_have_their_names(void **state) {
  mha_weights *weights = NULL;
  mha_config config;
  mha_error error;
  (void)state;
  put_tiny(3);
  put_beside("blk.0.attn_sinks.weight", 4, 0);
  put_beside("blk.0.attn_q_norm.weight", 2, 1);
  put_beside("blk.0.attn_k_norm.weight", 2, 2);
  gguf_data(&f, 32, TINY_BYTES);
  for (int i = 0; i < 3; i++) {
    for (int k = 0; k < 4; k++)
      gguf_f32(&f, (float)(10 * i + k));
    gguf_data(&f, 1, 16);
  }
  MHA_INIT(&config);
  test_expect(load_image(&config, NULL, &weights, &error), MHA_OK, &error);
  assert_true(weights->sinks[3] == 3.0F);
  assert_true(weights->query_norm[1] == 11.0F);
  assert_true(weights->key_norm[0] == 20.0F);
  assert_true(weights->config.norm_epsilon == 0.25F);
  mha_weights_destroy(weights);
  put_tiny(1);
  put_beside("blk.0.attn_q_norm.weight", 2, 0);
  gguf_data(&f, 32, TINY_BYTES + 32);
  refuse_image(&config, MHA_ERROR_WEIGHTS, "lacks blk.0.attn_k_norm.weight; rule: a layer (GGUF)");
  put_tiny(0);
  gguf_data(&f, 32, TINY_BYTES);
  config.norm = MHA_NORM_PER_HEAD;
  refuse_image(&config, MHA_ERROR_WEIGHTS, "lacks blk.0.attn_q_norm.weight, with config.norm = 1");
}

static void metadata_fills_in_what_is_0(void **state) {
  static const float table[8] = {1, 1, 1, 1, 0, 0, 0, 0};
  static const struct {
    int32_t rope;
    int64_t rotary_size;
    double base;
    bool tables;
    int64_t expected_size;
    double expected_base;
  } rows[] = {
      {MHA_ROPE_NONE, 0, 0.0, false, 0, 0.0},
      {MHA_ROPE_HALVES, 0, 0.0, false, 2, 5e5},
      {MHA_ROPE_INTERLEAVED, 2, 7.0, false, 2, 7.0},
      {MHA_ROPE_HALVES, 0, 0.0, true, 2, 0.0},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_weights *weights = NULL;
    mha_config config;
    mha_error error;
    test_note("row %zu", i);
    begin_tiny(&config);
    config.rope = rows[i].rope;
    config.rotary_size = rows[i].rotary_size;
    config.rope_base = rows[i].base;
    if (rows[i].tables) {
      config.rope_positions = 4;
      config.rope_cos = table;
      config.rope_sin = table + 4;
    }
    test_expect(load_image(&config, NULL, &weights, &error), MHA_OK, &error);
    assert_int_equal(weights->config.rope, rows[i].rope);
    if (rows[i].rope)
      assert_int_equal(weights->config.rotary_size, rows[i].expected_size);
    if (rows[i].expected_base > 0.0)
      assert_true(weights->config.rope_base == rows[i].expected_base);
    assert_true(weights->config.norm_epsilon == 0.0F); /* there is no norm */
    mha_weights_destroy(weights);
  }
}

/* The caller's counts and the shapes decide. */
static void the_caller_may_contradict(void **state) {
  static const struct {
    int64_t heads, kv_heads, size, value_size; /* given */
    int64_t all[4];                            /* then; 0 = refused */
    const char *fragment;
  } rows[] = {
      {4, 0, 0, 0, {4, 2, 2, 2}, NULL},
      {0, 2, 2, 0, {4, 2, 2, 2}, NULL},
      {2, 1, 0, 0, {2, 1, 4, 4}, NULL},
      {8, 4, 1, 0, {8, 4, 1, 1}, NULL},
      {2, 0, 0, 0, {0, 0, 0, 0}, "blk.0.attn_k.weight has shape (4, 8), but (8, 8) is expected"},
      {3, 0, 0, 0, {0, 0, 0, 0}, "blk.0.attn_q.weight has shape (8, 8), for H = 3"},
      {0, 1, 0, 0, {0, 0, 0, 0}, "config.n_heads (H) is 0"},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_weights *weights = NULL;
    mha_config config;
    mha_error error;
    test_note("row %zu", i);
    begin_tiny(&config);
    config.n_heads = rows[i].heads;
    config.n_kv_heads = rows[i].kv_heads;
    config.head_size = rows[i].size;
    config.value_head_size = rows[i].value_size;
    const mha_status status = load_image(&config, NULL, &weights, &error);
    if (rows[i].fragment) {
      assert_true(status != MHA_OK);
      if (!strstr(error.message, rows[i].fragment))
        test_failed("\"%s\" lacks \"%s\"", error.message, rows[i].fragment);
      continue;
    }
    test_expect(status, MHA_OK, &error);
    assert_int_equal(weights->config.n_heads, rows[i].all[0]);
    assert_int_equal(weights->config.n_kv_heads, rows[i].all[1]);
    assert_int_equal(weights->config.head_size, rows[i].all[2]);
    assert_int_equal(weights->config.value_head_size, rows[i].all[3]);
    mha_weights_destroy(weights);
  }
}

/* Frequencies that a base alone does not give are not passed over. */
static void own_frequencies_need_tables(void **state) {
  static const float table[4] = {1, 1, 0, 0};
  mha_weights *weights = NULL;
  mha_config config;
  mha_error error;
  (void)state;
  put_tiny(1);
  put_beside("rope_freqs.weight", 1, 0);
  gguf_data(&f, 32, TINY_BYTES + 32);
  MHA_INIT(&config);
  test_expect(load_image(&config, NULL, &weights, &error), MHA_OK, &error);
  mha_weights_destroy(weights);
  config.rope = MHA_ROPE_INTERLEAVED;
  refuse_image(&config, MHA_ERROR_UNSUPPORTED,
               "the bytes holds rope_freqs.weight, with config.rope");
  config.rope_positions = 2;
  config.rope_cos = table;
  config.rope_sin = table + 2;
  test_expect(load_image(&config, NULL, &weights, &error), MHA_OK, &error);
  mha_weights_destroy(weights);
}

/* The base alone does not say it all where a file scales its positions; the caller may still decide
 * for one. */
static void scaled_positions_need_the_caller(void **state) {
  static const float table[4] = {1, 1, 0, 0};
  static const struct {
    const char *scaling;
    int32_t rope;
    double base;
    bool tables, is_refused;
  } rows[] = {
      {"yarn", MHA_ROPE_HALVES, 0.0, false, true},   {"none", MHA_ROPE_HALVES, 0.0, false, false},
      {"yarn", MHA_ROPE_NONE, 0.0, false, false},    {"linear", MHA_ROPE_HALVES, 1e4, false, false},
      {"linear", MHA_ROPE_HALVES, 0.0, true, false},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    mha_weights *weights = NULL;
    mha_config config;
    mha_error error;
    test_note("row %zu", i);
    gguf_begin(&f, 4, 4);
    gguf_pair_text(&f, "general.architecture", "llama");
    gguf_pair_u32(&f, "llama.attention.head_count", 4);
    gguf_pair_u32(&f, "llama.attention.head_count_kv", 2);
    gguf_pair_text(&f, "llama.rope.scaling.type", rows[i].scaling);
    put_tiny_tensors();
    gguf_data(&f, 32, TINY_BYTES);
    MHA_INIT(&config);
    config.rope = rows[i].rope;
    config.rope_base = rows[i].base;
    config.rope_positions = rows[i].tables ? 2 : 0;
    config.rope_cos = rows[i].tables ? table : NULL;
    config.rope_sin = rows[i].tables ? table + 2 : NULL;
    if (rows[i].is_refused) {
      refuse_image(&config, MHA_ERROR_UNSUPPORTED,
                   "the bytes scales its rotary positions, with config.rope = 1; rule: ");
      continue;
    }
    test_expect(load_image(&config, NULL, &weights, &error), MHA_OK, &error);
    mha_weights_destroy(weights);
  }
}

/* ---- MHA_KEEP_TYPE of other files and names -------------------------------------------------- */

/* The layer's numbers, in the types expected of matrices. */
static void check_kept(const mha_weights *weights, const layer_numbers *n, int32_t element) {
  const mha_projection *const p[] = {&weights->query, &weights->key, &weights->value,
                                     &weights->output};
  for (int k = 0; k < 4; k++) {
    assert_int_equal(p[k]->element, element);
    for (int64_t i = 0; i < p[k]->in; i++)
      for (int64_t o = 0; o < p[k]->out; o++) {
        const int64_t at = i * p[k]->in_stride + o * p[k]->out_stride;
        const size_t bytes = at == 0 ? 0 : mha_element_bytes(element, at);
        float number = 0.0F;
        test_expect(mha_element_convert(element, (const char *)p[k]->matrix + bytes, MHA_F32,
                                        &number, 1, NULL),
                    MHA_OK, NULL);
        assert_true(number == n->matrices[k][i * p[k]->out + o]);
      }
    for (int64_t o = 0; o < p[k]->out; o++)
      assert_true(p[k]->bias[o] == n->biases[k][o]);
  }
}

static void safetensors_keep_their_types(void **state) {
  static const struct {
    const char *type;
    int32_t element;
  } types[] = {{"F32", MHA_F32}, {"F64", MHA_F32}, {"F16", MHA_F16}, {"BF16", MHA_BF16}};
  static layer_numbers n;
  (void)state;
  for (int a = 0; a < LAYER_NAMINGS; a++)
    for (size_t t = 0; t < COUNT(types); t++)
      for (size_t offset = 0; offset < 3; offset++) {
        mha_config config = layer_heads(H, G);
        test_note("naming %d, %s, offset %zu", a, types[t].type, offset);
        layer_make_fitting(&n, a);
        layer_file_write("", &layer_namings[a], types[t].type, &n, true, offset);
        config.flags = MHA_KEEP_TYPE;
        mha_weights *weights = layer_load(&config, NULL);
        check_kept(weights, &n, types[t].element);
        mha_weights_destroy(weights);
      }
}

/* W_Q … as float16 of [2][2]: 1, 2, 3, 4. */
static void put_halves(const char *name, bool big_endian, bool column_major) {
  unsigned char bytes[136];
  char header[129];
  static const uint16_t numbers[] = {0x3C00, 0x4000, 0x4200, 0x4400};
  static const uint16_t turned[] = {0x3C00, 0x4200, 0x4000, 0x4400};
  (void)snprintf(header, sizeof header, "{'descr': '%cf2', 'fortran_order': %s, 'shape': (2, 2), }",
                 big_endian ? '>' : '<', column_major ? "True" : "False");
  memset(bytes, ' ', 128);
  memcpy(bytes, "\x93NUMPY\x01\x00\x76\x00", 10);
  memcpy(bytes + 10, header, strlen(header));
  bytes[127] = '\n';
  for (int i = 0; i < 4; i++) {
    const uint16_t number = column_major ? turned[i] : numbers[i];
    bytes[128 + 2 * i + (big_endian ? 1 : 0)] = (unsigned char)(number & 0xFF);
    bytes[128 + 2 * i + (big_endian ? 0 : 1)] = (unsigned char)(number >> 8);
  }
  test_put_file(name, bytes, sizeof bytes);
}

static void arrays_keep_their_type_where_they_can(void **state) {
  mha_weights *weights = NULL;
  mha_config config = layer_heads(1, 0);
  mha_error error;
  (void)state;
  put_halves("layer/W_Q.npy", false, false);
  put_halves("layer/W_K.npy", true, false);
  put_halves("layer/W_V.npy", false, true);
  put_halves("layer/W_O.npy", true, true);
  config.flags = MHA_KEEP_TYPE;
  test_expect(mha_weights_load(&config, "layer", NULL, &weights, &error), MHA_OK, &error);
  const mha_projection *const p[] = {&weights->query, &weights->key, &weights->value,
                                     &weights->output};
  for (int k = 0; k < 4; k++) {
    float numbers[4];
    assert_int_equal(p[k]->element, k == 0 ? MHA_F16 : MHA_F32);
    test_expect(mha_element_convert(p[k]->element, p[k]->matrix, MHA_F32, numbers, 4, &error),
                MHA_OK, &error);
    for (int i = 0; i < 4; i++)
      assert_true(numbers[i] == (float)(i + 1));
  }
  mha_weights_destroy(weights);
}

/* Under GPT-2's names q, k and v are columns of one matrix: kept where their borders are blocks'
 * borders, otherwise converted; the values are the same. */
static void columns_are_split_between_blocks(void **state) {
  static const struct {
    int64_t heads, kv_heads, size;
    bool kept;
  } rows[] = {{1, 1, 32, true}, {2, 1, 32, true}, {4, 2, 8, false}, {2, 1, 16, false}};
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    const uint64_t q = (uint64_t)(rows[i].heads * rows[i].size);
    const uint64_t all = (uint64_t)((rows[i].heads + 2 * rows[i].kv_heads) * rows[i].size);
    mha_weights *both[2] = {NULL, NULL};
    float numbers[2][96];
    mha_error error;
    test_note("row %zu", i);
    gguf_begin(&f, 2, 0);
    gguf_tensor(&f, "c_attn.weight", 2, all, 4, GGUF_Q8_0, 0);
    gguf_tensor(&f, "c_proj.weight", 2, 32, q, GGUF_Q8_0, 4096);
    gguf_data(&f, 32, 4096 + q * 34);
    for (int keep = 0; keep < 2; keep++) {
      mha_config config = layer_heads(rows[i].heads, rows[i].kv_heads);
      config.flags = keep ? MHA_KEEP_TYPE : 0;
      test_expect(load_image(&config, NULL, &both[keep], &error), MHA_OK, &error);
      assert_int_equal(both[keep]->key.element, keep && rows[i].kept ? MHA_Q8_0 : MHA_F32);
      assert_int_equal(both[keep]->output.element, keep ? MHA_Q8_0 : MHA_F32);
    }
    for (int64_t row = 0; row < 4; row++) {
      for (int keep = 0; keep < 2; keep++) {
        const mha_projection *v = &both[keep]->value;
        const size_t at = row == 0 ? 0 : mha_element_bytes(v->element, row * v->in_stride);
        test_expect(mha_element_convert(v->element, (const char *)v->matrix + at, MHA_F32,
                                        numbers[keep], v->out, &error),
                    MHA_OK, &error);
      }
      assert_memory_equal(numbers[0], numbers[1], (size_t)both[0]->value.out * sizeof(float));
    }
    for (int keep = 0; keep < 2; keep++)
      mha_weights_destroy(both[keep]);
  }
}

static int remove_arrays(void **state) {
  (void)state;
  return test_remove_files("layer");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_file_loads_to_the_bit),
      cmocka_unit_test(files_tell_their_models),
      cmocka_unit_test(two_layers_need_a_prefix),
      cmocka_unit_test(other_types_are_named),
      cmocka_unit_test(kept_numbers_take_no_memory),
      cmocka_unit_test(allocation_failures),
      cmocka_unit_test(neighbours_are_told_apart),
      cmocka_unit_test(vectors_have_their_names),
      cmocka_unit_test(metadata_fills_in_what_is_0),
      cmocka_unit_test(the_caller_may_contradict),
      cmocka_unit_test(own_frequencies_need_tables),
      cmocka_unit_test(scaled_positions_need_the_caller),
      cmocka_unit_test_teardown(safetensors_keep_their_types, layer_remove_file),
      cmocka_unit_test_teardown(arrays_keep_their_type_where_they_can, remove_arrays),
      cmocka_unit_test(columns_are_split_between_blocks),
  };
  return cmocka_run_group_tests(tests, layer_enter_folder, layer_leave_folder);
}
