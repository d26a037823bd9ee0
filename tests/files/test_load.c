/* mha_weights_load: which folders and files become a layer, with which sizes and numbers, and which
 * error names what in the others. */
#define _XOPEN_SOURCE 700

#include "support.h"

#include "files/npy.h"
#include "layer/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Folders of weights ---------------------------------------------------------------------- */

enum { N_PARTS = 8 };

static const char *const names[N_PARTS] = {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"};

/* A layer whose eight sizes all differ: H = 4, G = 2, d = 3, dv = 5. */
enum { H = 4, G = 2, D = 3, DV = 5, EQ = 7, EK = 11, EV = 13, EO = 17 };

static const struct {
  int rank;
  int64_t shape[2];
} odd_layer[N_PARTS] = {
    {2, {EQ, H *D}}, {2, {EK, G *D}}, {2, {EV, G *DV}}, {2, {H * DV, EO}},
    {1, {H * D, 0}}, {1, {G * D, 0}}, {1, {G * DV, 0}}, {1, {EO, 0}},
};

/* What stands at index i of a part's file. */
static float number_at(int part, int64_t i) {
  return (float)(1000 * (part + 1)) + (float)i;
}

static void part_path(char path[256], const char *prefix, int part) {
  (void)snprintf(path, 256, "layer/%s%s.npy", prefix, names[part]);
}

static void put_shape(const char *prefix, int part, int rank, const int64_t *shape) {
  static float numbers[4096];
  char path[256];
  mha_error error;
  for (int64_t i = 0; i < 4096; i++)
    numbers[i] = number_at(part, i);
  part_path(path, prefix, part);
  test_expect(mha_npy_write(path, rank, shape, numbers, &error), MHA_OK, &error);
}

/* The parts whose bit is set in `which`. */
static void put_layer(const char *prefix, unsigned which) {
  for (int part = 0; part < N_PARTS; part++)
    if (which & 1U << part)
      put_shape(prefix, part, odd_layer[part].rank, odd_layer[part].shape);
}

static void remove_part(const char *prefix, int part) {
  char path[256];
  part_path(path, prefix, part);
  (void)unlink(path);
}

static int remove_layer(void **state) {
  (void)state;
  for (int part = 0; part < N_PARTS; part++)
    remove_part("", part);
  return 0;
}

enum { MATRICES = 0x0F, BIASES = 0xF0 };

static mha_config heads(int64_t n_heads, int64_t n_kv_heads) {
  mha_config config;
  MHA_INIT(&config);
  config.n_heads = n_heads;
  config.n_kv_heads = n_kv_heads;
  return config;
}

/* Expects an error with a message that holds `fragment`, and no layer. */
static void check_refused_at(const char *path, const char *prefix, const mha_config *config,
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

static void check_refused(const mha_config *config, mha_status status, const char *fragment) {
  check_refused_at("layer", NULL, config, status, fragment);
}

/* ---- What loads ------------------------------------------------------------------------------ */

static void the_article_loads(void **state) {
  static const char *const files[] = {"W_Q", "W_K", "W_V", "W_O"};
  mha_config config = heads(2, 0);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  memset(&error, 0xA5, sizeof error);
  test_expect(mha_weights_load(&config, MHA_TEST_DATA_DIR "/article", NULL, &weights, &error),
              MHA_OK, &error);
  assert_int_equal(error.status, MHA_OK);
  assert_string_equal(error.message, "");
  const mha_projection *projections[] = {&weights->query, &weights->key, &weights->value,
                                         &weights->output};
  for (int k = 0; k < 4; k++) {
    char path[1024];
    (void)snprintf(path, sizeof path, MHA_TEST_DATA_DIR "/article/%s.npy", files[k]);
    double *numbers = test_read_npy(path, 64);
    assert_int_equal(projections[k]->in, 8);
    assert_int_equal(projections[k]->out, 8);
    assert_int_equal(projections[k]->out_stride, 1);
    assert_null(projections[k]->bias);
    for (int i = 0; i < 64; i++)
      assert_true(projections[k]->matrix[i] == (float)numbers[i]);
    free(numbers);
  }
  MHA_INIT(&config);
  test_expect(mha_weights_config(weights, &config, &error), MHA_OK, &error);
  assert_int_equal(config.n_heads, 2);
  assert_int_equal(config.n_kv_heads, 2);
  assert_int_equal(config.head_size, 4);
  assert_int_equal(config.value_head_size, 4);
  assert_int_equal(config.query_width, 8);
  assert_int_equal(config.output_width, 8);
  mha_weights_destroy(weights);
}

static void check_projection(const mha_projection *p, int part, bool has_bias) {
  assert_int_equal(p->in, odd_layer[part].shape[0]);
  assert_int_equal(p->out, odd_layer[part].shape[1]);
  for (int64_t i = 0; i < p->in * p->out; i++)
    assert_true(p->matrix[i] == number_at(part, i));
  assert_int_equal(p->bias != NULL, has_bias);
  for (int64_t i = 0; p->bias && i < p->out; i++)
    assert_true(p->bias[i] == number_at(part + 4, i));
}

static void check_odd_layer(const mha_weights *weights, unsigned which) {
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

/* Each bias on its own: all 16 subsets. */
static void every_subset_of_biases_loads(void **state) {
  (void)state;
  for (unsigned biases = 0; biases < 16; biases++) {
    const unsigned which = MATRICES | biases << 4;
    const mha_config config = heads(H, G);
    mha_weights *weights = NULL;
    mha_error error;
    test_note("biases 0x%x", biases);
    remove_layer(NULL);
    put_layer("", which);
    test_expect(mha_weights_load(&config, "layer", NULL, &weights, &error), MHA_OK, &error);
    remove_layer(NULL); /* the layer does not need its files any more */
    check_odd_layer(weights, which);
    mha_weights_destroy(weights);
  }
}

static void given_sizes_that_agree_load(void **state) {
  mha_config config = heads(H, G);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  put_layer("", MATRICES | BIASES);
  config.head_size = D;
  config.value_head_size = DV;
  config.query_width = EQ;
  config.key_width = EK;
  config.value_width = EV;
  config.output_width = EO;
  config.flags = MHA_SCALE;
  config.scale = -2;
  config.softcap = 30;
  test_expect(mha_weights_load(&config, "layer", "", &weights, &error), MHA_OK, &error);
  check_odd_layer(weights, MATRICES | BIASES);
  assert_true(weights->scale == -2.0F && weights->config.softcap == 30.0F);
  mha_weights_destroy(weights);
}

static void prefixes_stand_before_names(void **state) {
  static const char *const prefixes[] = {"enc.0.attn.", "x"};
  const mha_config config = heads(H, G);
  (void)state;
  for (size_t i = 0; i < 2; i++)
    for (int given = 0; given < 2; given++) {
      const char *prefix = given ? prefixes[i] : NULL;
      mha_weights *weights = NULL;
      mha_error error;
      test_note("prefix %s", prefixes[i]);
      put_layer(prefixes[i], MATRICES | 0x20);
      check_refused_at("layer", "", &config, MHA_ERROR_WEIGHTS,
                       "layer holds no layer under the prefix \"\", but ");
      test_expect(mha_weights_load(&config, "layer/", prefix, &weights, &error), MHA_OK, &error);
      check_odd_layer(weights, MATRICES | 0x20);
      mha_weights_destroy(weights);
      for (int part = 0; part < N_PARTS; part++)
        remove_part(prefixes[i], part);
    }
}

/* float64, column-major, version 2.0: [[1, 2, 3, 4], [5, 6, 7, 8]]. */
static void column_major_doubles_load(void **state) {
  static const char header[] = "{'descr': '<f8', 'fortran_order': True, 'shape': (2, 4), }\n";
  static const double columns[8] = {1, 5, 2, 6, 3, 7, 4, 8};
  static const int64_t square[2] = {2, 4};
  static const int64_t out[2] = {4, 2};
  const mha_config config = heads(2, 0);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  FILE *file = fopen("layer/W_Q.npy", "wb");
  assert_non_null(file);
  const unsigned char start[12] = {0x93, 'N', 'U', 'M', 'P', 'Y', 2, 0, sizeof header - 1, 0, 0, 0};
  assert_int_equal(fwrite(start, 1, sizeof start, file), sizeof start);
  assert_int_equal(fwrite(header, 1, sizeof header - 1, file), sizeof header - 1);
  assert_int_equal(fwrite(columns, sizeof *columns, 8, file), 8);
  assert_int_equal(fclose(file), 0);
  put_shape("", 1, 2, square);
  put_shape("", 2, 2, square);
  put_shape("", 3, 2, out);
  test_expect(mha_weights_load(&config, "layer", NULL, &weights, &error), MHA_OK, &error);
  for (int i = 0; i < 8; i++)
    assert_true(weights->query.matrix[i] == (float)(i + 1));
  mha_weights_destroy(weights);
}

/* ---- What is refused ------------------------------------------------------------------------- */

static void a_missing_matrix_is_named(void **state) {
  const mha_config config = heads(H, G);
  (void)state;
  check_refused(&config, MHA_ERROR_FORMAT, "layer is a folder without .npy files; rule: weights");
  for (int part = 0; part < 4; part++) {
    char fragment[64];
    (void)snprintf(fragment, sizeof fragment, "layer lacks %s; rule", names[part]);
    put_layer("", (MATRICES | BIASES) & ~(1U << part));
    check_refused(&config, MHA_ERROR_WEIGHTS, fragment);
    remove_layer(NULL);
  }
}

/* One part in a wrong shape, whichever and however. */
static void a_wrong_shape_is_named(void **state) {
  static const struct {
    int part, rank;
    int64_t shape[3];
    const char *fragment;
  } rows[] = {
      {1,
       2,
       {EK, H * D},
       "layer: W_K has shape (11, 12), but (11, 6) is expected; rule: it is "
       "[Ek][G·d] with H = 4, G = 2, d = 3, dv = 5"},
      {1, 2, {G * D, EK}, "layer: W_K has shape (6, 11), but (6, 6) is expected"},
      {3, 2, {EO, H * DV}, "layer: W_O has shape (17, 20), but (20, 20) is expected"},
      {3, 2, {G * DV, EO}, "layer: W_O has shape (10, 17), but (20, 17) is expected"},
      {4, 1, {G * D}, "layer: b_Q has shape (6,), but (12,) is expected"},
      {5, 1, {H * D}, "layer: b_K has shape (12,), but (6,) is expected; rule: it is [G·d]"},
      {6, 1, {1}, "layer: b_V has shape (1,), but (10,) is expected; rule: it is [G·dv]"},
      {7, 1, {EO + 1}, "layer: b_O has shape (18,), but (17,) is expected; rule: it is [Eo]"},
      {0, 1, {EQ * H * D}, "layer: W_Q has shape (84,); rule: it is [Eq][H·d]"},
      {0, 0, {0}, "layer: W_Q has shape (); rule: it is [Eq][H·d]"},
      {2, 3, {EV, G, DV}, "layer: W_V has shape (13, 2, 5); rule: it is [Ev][G·dv]"},
      {7, 2, {1, EO}, "layer: b_O has shape (1, 17); rule: it is [Eo]"},
      {0, 2, {EQ, 0}, "layer: W_Q has shape (7, 0); rule: it is [Eq][H·d], none of them 0"},
      {0, 2, {0, H * D}, "layer: W_Q has shape (0, 12)"},
      {3, 2, {H * DV, 0}, "layer: W_O has shape (20, 0)"},
      {5, 1, {0}, "layer: b_K has shape (0,); rule: it is [G·d], none of them 0"},
  };
  const mha_config config = heads(H, G);
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("%s", rows[i].fragment);
    put_layer("", MATRICES | BIASES);
    put_shape("", rows[i].part, rows[i].rank, rows[i].shape);
    check_refused(&config, MHA_ERROR_WEIGHTS, rows[i].fragment);
  }
}

/* Everything empty agrees with everything, and must not count as "derive the sizes". */
static void empty_matrices_are_refused(void **state) {
  static const int64_t shapes[4][2] = {{8, 0}, {8, 0}, {8, 0}, {0, 8}};
  const mha_config config = heads(2, 0);
  (void)state;
  for (int part = 0; part < 4; part++)
    put_shape("", part, 2, shapes[part]);
  check_refused(&config, MHA_ERROR_WEIGHTS, "layer: W_Q has shape (8, 0)");
}

static void a_remainder_is_refused(void **state) {
  static const int64_t shapes[4][2] = {{7, 10}, {7, 10}, {7, 10}, {10, 7}};
  mha_config config = heads(3, 0);
  (void)state;
  for (int part = 0; part < 4; part++)
    put_shape("", part, 2, shapes[part]);
  check_refused(
      &config, MHA_ERROR_HEADS,
      "layer: W_Q has shape (7, 10), for H = 3 and G = 3 heads; rule: d = output width of q / H");
  config = heads(20, 0);
  check_refused(&config, MHA_ERROR_HEADS,
                "layer: W_Q has shape (7, 10), for H = 20 and G = 20 heads");
  /* d is given, and only dv leaves one */
  config = heads(6, 3);
  config.head_size = 2;
  put_shape("", 0, 2, (const int64_t[]){7, 12});
  put_shape("", 1, 2, (const int64_t[]){7, 6});
  check_refused(
      &config, MHA_ERROR_HEADS,
      "layer: W_V has shape (7, 10), for H = 6 and G = 3 heads; rule: dv = output width of v");
}

static void given_sizes_that_disagree_are_refused(void **state) {
  static const struct {
    size_t offset;
    int64_t value;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {offsetof(mha_config, query_width), 8, MHA_ERROR_WEIGHTS,
       "layer: W_Q has shape (7, 12), but (8, 12) is expected"},
      {offsetof(mha_config, key_width), 7, MHA_ERROR_WEIGHTS,
       "layer: W_K has shape (11, 6), but (7, 6) is expected"},
      {offsetof(mha_config, value_width), 11, MHA_ERROR_WEIGHTS,
       "layer: W_V has shape (13, 10), but (11, 10) is expected"},
      {offsetof(mha_config, output_width), 7, MHA_ERROR_WEIGHTS,
       "layer: W_O has shape (20, 17), but (20, 7) is expected"},
      {offsetof(mha_config, head_size), 4, MHA_ERROR_WEIGHTS,
       "layer: W_Q has shape (7, 12), but (7, 16) is expected"},
      {offsetof(mha_config, value_head_size), 3, MHA_ERROR_WEIGHTS,
       "layer: W_V has shape (13, 10), but (13, 6) is expected"},
      {offsetof(mha_config, n_kv_heads), 0, MHA_ERROR_HEADS,
       "layer: W_V has shape (13, 10), for H = 4 and G = 4 heads"},
      {offsetof(mha_config, n_kv_heads), 1, MHA_ERROR_WEIGHTS, "layer: W_K has shape (11, 6)"},
      {offsetof(mha_config, n_heads), 2, MHA_ERROR_WEIGHTS,
       "layer: W_K has shape (11, 6), but (11, 12) is expected"},
      {offsetof(mha_config, n_heads), 0, MHA_ERROR_SIZE, "n_heads (H) is 0"},
      {offsetof(mha_config, n_heads), -4, MHA_ERROR_SIZE, "n_heads (H) is -4"},
      {offsetof(mha_config, n_kv_heads), -1, MHA_ERROR_SIZE, "n_kv_heads (G) is -1"},
      {offsetof(mha_config, head_size), -3, MHA_ERROR_SIZE, "head_size (d) is -3"},
      {offsetof(mha_config, value_head_size), -3, MHA_ERROR_SIZE, "value_head_size (dv) is -3"},
      {offsetof(mha_config, query_width), -7, MHA_ERROR_SIZE, "query_width (Eq) is -7"},
      {offsetof(mha_config, output_width), -7, MHA_ERROR_SIZE, "output_width (Eo) is -7"},
      {offsetof(mha_config, head_size), INT64_MAX, MHA_ERROR_OVERFLOW, "d = 9223372036854775807"},
  };
  (void)state;
  put_layer("", MATRICES);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = heads(H, G);
    test_note("%s", rows[i].fragment);
    memcpy((char *)&config + rows[i].offset, &rows[i].value, sizeof rows[i].value);
    check_refused(&config, rows[i].status, rows[i].fragment);
  }
}

/* Shapes fit, but the layer itself does not take the config: the numbers go back at once. */
static void what_the_layer_refuses_is_released(void **state) {
  static const int64_t shapes[4][2] = {{4, 6}, {4, 4}, {4, 4}, {6, 4}};
  test_allocator allocator;
  mha_config config = heads(3, 2); /* d = dv = 2, but 3 mod 2 is not 0 */
  (void)state;
  for (int part = 0; part < 4; part++)
    put_shape("", part, 2, shapes[part]);
  test_allocator_init(&allocator);
  config.allocator = &allocator.mha;
  check_refused(&config, MHA_ERROR_HEADS, "n_kv_heads");
  assert_true(allocator.calls > 0);
  test_allocator_check(&allocator);
}

static void bad_files_are_refused(void **state) {
  const mha_config config = heads(H, G);
  (void)state;
  put_layer("", MATRICES | BIASES);
  FILE *file = fopen("layer/b_V.npy", "wb");
  assert_non_null(file);
  assert_int_equal(fputs("no array", file) < 0, 0);
  assert_int_equal(fclose(file), 0);
  check_refused(&config, MHA_ERROR_FORMAT, "layer/b_V.npy seems to be text");
  file = fopen("layer/b_V.npy", "wb");
  assert_non_null(file);
  static const char text[] = "{'descr': '<i4', 'fortran_order': False, 'shape': (0,)}          \n";
  assert_int_equal(fwrite("\x93NUMPY\x01\0", 1, 8, file), 8);
  assert_int_equal(fputc(sizeof text - 1, file), sizeof text - 1);
  assert_int_equal(fputc(0, file), 0);
  assert_int_equal(fputs(text, file) < 0, 0);
  assert_int_equal(fclose(file), 0);
  check_refused(&config, MHA_ERROR_UNSUPPORTED, "layer: b_V holds the type \"<i4\"");
  assert_int_equal(unlink("layer/b_V.npy"), 0);
  assert_int_equal(mkdir("layer/b_V.npy", 0700), 0);
  check_refused(&config, MHA_ERROR_IO, "layer/b_V.npy is not a regular file");
  assert_int_equal(rmdir("layer/b_V.npy"), 0);
}

static void bad_paths_are_refused(void **state) {
  const mha_config config = heads(H, G);
  static const struct {
    const char *path;
    mha_status status;
    const char *fragment;
  } rows[] = {{"absent", MHA_ERROR_IO, "absent does not exist"},
              {"", MHA_ERROR_IO, "does not exist"},
              {"layer/W_Q.npy", MHA_ERROR_FORMAT, "layer/W_Q.npy"},
              {"layer/W_Q.npy/x", MHA_ERROR_IO, "cannot be examined"},
              {"layer/fifo", MHA_ERROR_IO, "neither a folder nor a regular file"}};
  (void)state;
  put_layer("", MATRICES);
  assert_int_equal(mkfifo("layer/fifo", 0600), 0);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_weights *weights = NULL;
    mha_error error;
    test_note("\"%s\"", rows[i].path);
    test_expect(mha_weights_load(&config, rows[i].path, NULL, &weights, &error), rows[i].status,
                &error);
    if (!strstr(error.message, rows[i].fragment))
      test_failed("\"%s\" lacks \"%s\"", error.message, rows[i].fragment);
    assert_null(weights);
  }
  assert_int_equal(unlink("layer/fifo"), 0);
  char prefix[6000];
  memset(prefix, 'p', sizeof prefix);
  prefix[sizeof prefix - 1] = '\0';
  check_refused_at("layer", prefix, &config, MHA_ERROR_WEIGHTS, "pp...\", but W_K, W_O, W_Q, W_V");
}

static void bad_arguments_are_refused(void **state) {
  mha_config config = heads(H, G);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  put_layer("", MATRICES);
  test_expect(mha_weights_load(NULL, "layer", NULL, &weights, &error), MHA_ERROR_NULL, &error);
  assert_non_null(strstr(error.message, "config"));
  test_expect(mha_weights_load(&config, NULL, NULL, &weights, &error), MHA_ERROR_NULL, &error);
  assert_non_null(strstr(error.message, "path"));
  test_expect(mha_weights_load(&config, "layer", NULL, NULL, &error), MHA_ERROR_NULL, &error);
  assert_non_null(strstr(error.message, "weights"));
  config.struct_size--;
  check_refused(&config, MHA_ERROR_STRUCT_SIZE, "config.struct_size");
}

/* ---- One layer under every name -------------------------------------------------------------- */

/* The numbers of a layer as MHA_IN_OUT: small multiples of 1/8, which every type holds exactly. */
typedef struct numbers {
  int64_t heads, kv_heads, d, dv;
  int64_t in[4], out[4]; /* of the four matrices */
  float matrices[4][20 * 20], biases[4][20];
} numbers;

static void make_numbers(numbers *n, const int64_t inputs[3], int64_t dv) {
  test_random random;
  *n = (numbers){.heads = H, .kv_heads = G, .d = D, .dv = dv};
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

/* Names of the matrices of q, k, v, output and of the three in one; then of the biases. */
typedef struct naming {
  bool out_in;
  const char *matrices[5], *biases[5];
} naming;

static const naming namings[] = {
    {true,
     {NULL, NULL, NULL, "out_proj.weight", "in_proj_weight"},
     {NULL, NULL, NULL, "out_proj.bias", "in_proj_bias"}},
    {false,
     {NULL, NULL, NULL, "c_proj.weight", "c_attn.weight"},
     {NULL, NULL, NULL, "c_proj.bias", "c_attn.bias"}},
    {true,
     {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight", NULL},
     {NULL, NULL, NULL, "out_proj.bias", "in_proj_bias"}},
    {true,
     {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", NULL},
     {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", NULL}},
    {true,
     {"self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight", NULL},
     {"self.query.bias", "self.key.bias", "self.value.bias", "output.dense.bias", NULL}},
    {false, {"W_Q", "W_K", "W_V", "W_O", NULL}, {"b_Q", "b_K", "b_V", "b_O", NULL}},
};

enum { N_NAMINGS = sizeof namings / sizeof namings[0], FIRST_SEPARATE = 2, PACKED = 4 };

/* ---- Safetensors files, byte by byte --------------------------------------------------------- */

typedef struct test_file {
  char header[8192];
  unsigned char data[65536];
  size_t n_data;
} test_file;

static void begin_file(test_file *file) {
  (void)strcpy(file->header, "{\"__metadata__\":{\"made\":\"by hand\"}");
  file->n_data = 0;
}

static void put_bytes(test_file *file, uint64_t bits, int n_bytes) {
  assert_true(file->n_data + 8 <= sizeof file->data);
  for (int i = 0; i < n_bytes; i++)
    file->data[file->n_data++] = (unsigned char)(bits >> (8 * i));
}

/* Zero or a normal number that the type holds exactly. */
static void put_number(test_file *file, const char *type, float number) {
  uint32_t bits;
  uint64_t wide;
  const double number_as_double = number;
  memcpy(&bits, &number, sizeof bits);
  memcpy(&wide, &number_as_double, sizeof wide);
  if (strcmp(type, "F64") == 0)
    put_bytes(file, wide, 8);
  else if (strcmp(type, "BF16") == 0)
    put_bytes(file, bits >> 16, 2);
  else if (strcmp(type, "F16") == 0)
    put_bytes(file,
              (bits >> 16 & 0x8000) |
                  (number == 0.0F ? 0 : ((bits >> 23 & 0xFF) - 112) << 10 | (bits >> 13 & 0x3FF)),
              2);
  else
    put_bytes(file, bits, 4);
}

/* Adds the entry of a tensor whose numbers are those put since `begin`. */
static void put_entry(test_file *file, const char *prefix, const char *name, const char *type,
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

static void put_vector(test_file *file, const char *prefix, const char *name, const char *type,
                       const float *vector, int64_t n) {
  const size_t begin = file->n_data;
  for (int64_t i = 0; i < n; i++)
    put_number(file, type, vector[i]);
  put_entry(file, prefix, name, type, 1, n, 0, begin);
}

/* Spaces bring the length of the header to `offset` modulo 4. */
static void end_file(test_file *file, const char *path, size_t offset) {
  FILE *to = fopen(path, "wb");
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

/* Row r of a matrix as it lies in the file. */
static void put_row(test_file *file, const char *type, const numbers *n, int k, bool out_in,
                    int64_t r) {
  const int64_t length = out_in ? n->in[k] : n->out[k];
  for (int64_t c = 0; c < length; c++)
    put_number(file, type, n->matrices[k][out_in ? c * n->out[k] + r : r * n->out[k] + c]);
}

/* The three in one: rows one after the other, or side by side. */
static void put_packed(test_file *file, const char *prefix, const char *name, const char *type,
                       const numbers *n, bool out_in) {
  const size_t begin = file->n_data;
  const int64_t total = n->out[0] + n->out[1] + n->out[2];
  for (int k = 0; out_in && k < 3; k++)
    for (int64_t r = 0; r < n->out[k]; r++)
      put_row(file, type, n, k, true, r);
  for (int64_t r = 0; !out_in && r < n->in[0]; r++)
    for (int k = 0; k < 3; k++)
      put_row(file, type, n, k, false, r);
  put_entry(file, prefix, name, type, 2, out_in ? total : n->in[0], out_in ? n->in[0] : total,
            begin);
}

static void put_matrix(test_file *file, const char *prefix, const char *name, const char *type,
                       const numbers *n, int k, bool out_in) {
  const size_t begin = file->n_data;
  const int64_t rows = out_in ? n->out[k] : n->in[k];
  for (int64_t r = 0; r < rows; r++)
    put_row(file, type, n, k, out_in, r);
  put_entry(file, prefix, name, type, 2, rows, out_in ? n->in[k] : n->out[k], begin);
}

/* The layer under the names, without the tensors whose name is `except`. */
static void put_numbers(test_file *file, const char *prefix, const naming *as, const char *type,
                        const numbers *n, bool biases, const char *except) {
  for (int k = 0; k < 5; k++) {
    const char *name = as->matrices[k];
    if (name && strcmp(name, except) != 0 && k < PACKED)
      put_matrix(file, prefix, name, type, n, k, as->out_in);
    else if (name && strcmp(name, except) != 0)
      put_packed(file, prefix, name, type, n, as->out_in);
  }
  for (int k = 0; biases && k < PACKED; k++)
    if (as->biases[k])
      put_vector(file, prefix, as->biases[k], type, n->biases[k], n->out[k]);
  if (biases && as->biases[PACKED]) {
    float joined[60];
    int64_t used = 0;
    for (int k = 0; k < 3; used += n->out[k++])
      memcpy(joined + used, n->biases[k], (size_t)n->out[k] * sizeof(float));
    put_vector(file, prefix, as->biases[PACKED], type, joined, used);
  }
}

/* ---- The same layer from memory -------------------------------------------------------------- */

static mha_weights *from_memory(const numbers *n, bool out_in, bool biases) {
  static float turned[4][20 * 20];
  const float *lies[4];
  mha_config config = heads(n->heads, n->kv_heads);
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

static void check_numbers(const mha_projection *p, const numbers *n, int k, bool biases) {
  assert_int_equal(p->in, n->in[k]);
  assert_int_equal(p->out, n->out[k]);
  for (int64_t i = 0; i < p->in; i++)
    for (int64_t o = 0; o < p->out; o++)
      assert_true(p->matrix[i * p->in_stride + o * p->out_stride] ==
                  n->matrices[k][i * p->out + o]);
  assert_int_equal(p->bias != NULL, biases);
  for (int64_t o = 0; biases && o < p->out; o++)
    assert_true(p->bias[o] == n->biases[k][o]);
}

/* Every number is in its place, and the layer computes what the one from memory does. */
static void check_same_layer(const mha_weights *weights, const numbers *n, bool out_in,
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

/* Loads layer.st as the only layer in it, with nothing but the head counts given. */
static mha_weights *load_file(const mha_config *config, const char *prefix) {
  mha_weights *weights = NULL;
  mha_error error;
  test_expect(mha_weights_load(config, "layer.st", prefix, &weights, &error), MHA_OK, &error);
  return weights;
}

/* A packed matrix has one input; one whose d and dv are not given has them equal. */
static void make_fitting(numbers *n, int naming_index) {
  static const int64_t one[3] = {EQ, EQ, EQ};
  static const int64_t three[3] = {EQ, EK, EV};
  const bool packed = naming_index < FIRST_SEPARATE;
  make_numbers(n, packed ? one : three, packed ? D : DV);
}

static int remove_file(void **state) {
  (void)state;
  (void)unlink("layer.st");
  return 0;
}

/* ---- Safetensors files that load ------------------------------------------------------------- */

static void every_naming_type_and_alignment_is_the_same_layer(void **state) {
  static const char *const types[] = {"F32", "F64", "F16", "BF16"};
  static test_file file;
  static numbers n;
  (void)state;
  for (int a = 0; a < N_NAMINGS; a++)
    for (int t = 0; t < 4; t++)
      for (int variant = 0; variant < 8; variant++) {
        const char *prefix = variant & 1 ? "model.layers.0.attn." : "";
        const bool biases = (variant & 2) != 0;
        const size_t offset = variant & 4 ? (size_t)(1 + a % 3) : 0;
        const mha_config config = heads(H, G);
        test_note("naming %d, %s, variant %d", a, types[t], variant);
        make_fitting(&n, a);
        begin_file(&file);
        put_numbers(&file, prefix, &namings[a], types[t], &n, biases, "");
        end_file(&file, "layer.st", offset);
        mha_weights *weights = load_file(&config, variant & 4 ? prefix : NULL);
        check_same_layer(weights, &n, namings[a].out_in, biases);
        assert_int_equal(weights->orientation, namings[a].out_in ? MHA_OUT_IN : MHA_IN_OUT);
        mha_weights_destroy(weights);
      }
}

/* One of d and dv is given, and the other follows from H·d + G·d + G·dv. */
static void packed_sizes_follow_from_each_other(void **state) {
  static const int64_t inputs[3] = {EQ, EQ, EQ};
  static test_file file;
  static numbers n;
  (void)state;
  make_numbers(&n, inputs, DV);
  for (int a = 0; a < FIRST_SEPARATE; a++)
    for (int given = 1; given < 4; given++) {
      mha_config config = heads(H, G);
      test_note("naming %d, given %d", a, given);
      begin_file(&file);
      put_numbers(&file, "", &namings[a], "F32", &n, true, "");
      end_file(&file, "layer.st", 0);
      config.head_size = given & 1 ? D : 0;
      config.value_head_size = given & 2 ? DV : 0;
      mha_weights *weights = load_file(&config, NULL);
      check_same_layer(weights, &n, namings[a].out_in, true);
      mha_weights_destroy(weights);
    }
}

/* Beside a layer without a prefix other modules may lie, of whatever type. */
static void other_tensors_do_not_matter(void **state) {
  static test_file file;
  static numbers n;
  const mha_config config = heads(H, G);
  (void)state;
  make_fitting(&n, 0);
  begin_file(&file);
  const size_t begin = file.n_data;
  put_bytes(&file, 7, 8);
  put_entry(&file, "", "n_tokens", "I64", 0, 0, 0, begin);
  put_numbers(&file, "", &namings[0], "F32", &n, true, "");
  end_file(&file, "layer.st", 0);
  mha_weights *weights = load_file(&config, NULL);
  check_same_layer(weights, &n, true, true);
  mha_weights_destroy(weights);
}

/* Two layers of opposite numbers in one file: each is found by its prefix, neither without. */
static void the_prefix_tells_which_layer(void **state) {
  static test_file file;
  static numbers n[2];
  static const char *const prefixes[] = {"layers.0.", "layers.1."};
  const mha_config config = heads(H, G);
  (void)state;
  make_fitting(&n[0], 3);
  n[1] = n[0];
  for (int k = 0; k < 4; k++)
    for (int64_t i = 0; i < n[1].in[k] * n[1].out[k]; i++)
      n[1].matrices[k][i] = -n[0].matrices[k][i];
  begin_file(&file);
  for (int i = 0; i < 2; i++)
    put_numbers(&file, prefixes[i], &namings[3], "F32", &n[i], true, "");
  end_file(&file, "layer.st", 0);
  for (int i = 0; i < 2; i++) {
    mha_weights *weights = load_file(&config, prefixes[i]);
    check_same_layer(weights, &n[i], true, true);
    mha_weights_destroy(weights);
  }
  check_refused_at("layer.st", NULL, &config, MHA_ERROR_WEIGHTS,
                   "layer.st holds the layers \"layers.0.\" (Hugging Face, q_proj), \"layers.1.\" "
                   "(Hugging Face, q_proj); rule: ");
  check_refused_at("layer.st", "layers.", &config, MHA_ERROR_WEIGHTS,
                   "under the prefix \"layers.\"");
}

/* ---- Safetensors files that do not ----------------------------------------------------------- */

static void check_file_refused(const mha_config *config, mha_status status, const char *fragment) {
  check_refused_at("layer.st", NULL, config, status, fragment);
}

static void a_missing_tensor_is_named(void **state) {
  static test_file file;
  static numbers n;
  const mha_config config = heads(H, G);
  (void)state;
  for (int a = 0; a < N_NAMINGS; a++)
    for (int k = 0; k < 5; k++) {
      char fragment[128];
      if (!namings[a].matrices[k])
        continue;
      test_note("naming %d without %s", a, namings[a].matrices[k]);
      (void)snprintf(fragment, sizeof fragment, "layer.st lacks x.%s; rule",
                     namings[a].matrices[k]);
      make_fitting(&n, a);
      begin_file(&file);
      put_numbers(&file, "x.", &namings[a], "F32", &n, true, namings[a].matrices[k]);
      end_file(&file, "layer.st", 0);
      check_file_refused(&config, MHA_ERROR_WEIGHTS, fragment);
    }
}

static void a_type_that_is_used_and_unknown_is_named(void **state) {
  static const char *const types[] = {"I32", "U8", "F8_E4M3", "BOOL"};
  static const int bytes[] = {4, 1, 1, 1};
  static test_file file;
  static numbers n;
  const mha_config config = heads(H, G);
  (void)state;
  make_fitting(&n, 3);
  for (int t = 0; t < 4; t++) {
    char fragment[128];
    test_note("%s", types[t]);
    begin_file(&file);
    put_numbers(&file, "x.", &namings[3], "F32", &n, false, "k_proj.weight");
    const size_t begin = file.n_data;
    for (int i = 0; i < G * D * EK; i++)
      put_bytes(&file, 1, bytes[t]);
    put_entry(&file, "x.", "k_proj.weight", types[t], 2, G * D, EK, begin);
    end_file(&file, "layer.st", 0);
    (void)snprintf(fragment, sizeof fragment,
                   "layer.st: x.k_proj.weight holds the type \"%s\"; rule: float32", types[t]);
    check_file_refused(&config, MHA_ERROR_UNSUPPORTED, fragment);
  }
}

static void what_is_not_computed_is_named(void **state) {
  static test_file file;
  static numbers n;
  const mha_config config = heads(H, G);
  (void)state;
  make_fitting(&n, 0);
  begin_file(&file);
  put_numbers(&file, "", &namings[0], "F32", &n, true, "");
  put_vector(&file, "", "bias_k", "F32", n.biases[0], G * D);
  end_file(&file, "layer.st", 0);
  check_file_refused(&config, MHA_ERROR_UNSUPPORTED, "layer.st holds bias_k, which is no part");
}

/* A packed matrix that the heads do not share, and given sizes. */
static void shapes_that_do_not_fit_are_told(void **state) {
  static const struct {
    int naming_index;
    size_t offset; /* of a member of mha_config; 0 = none */
    int64_t value;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {0, offsetof(mha_config, n_heads), 3, MHA_ERROR_HEADS,
       "layer.st: in_proj_weight has shape (24, 7), for H = 3 and G = 2 heads; rule: d = dv = "
       "output width / (H + 2·G), without remainder"},
      {1, offsetof(mha_config, n_heads), 3, MHA_ERROR_HEADS,
       "layer.st: c_attn.weight has shape (7, 24), for H = 3 and G = 2 heads"},
      {0, offsetof(mha_config, head_size), 4, MHA_ERROR_HEADS,
       "rule: dv = (output width − H·d − G·d) / G, without remainder"},
      {0, offsetof(mha_config, value_head_size), 12, MHA_ERROR_HEADS,
       "rule: d = (output width − G·dv) / (H + G), without remainder"},
      {0, offsetof(mha_config, head_size), INT64_MAX / 2, MHA_ERROR_HEADS, "in_proj_weight"},
      {0, offsetof(mha_config, n_heads), INT64_MAX, MHA_ERROR_HEADS, "in_proj_weight"},
      {0, offsetof(mha_config, query_width), 8, MHA_ERROR_WEIGHTS,
       "with Eq = 8, Ek = 7, Ev = 7; rule: a packed matrix has one input width"},
      {0, offsetof(mha_config, key_width), 8, MHA_ERROR_WEIGHTS, "with Eq = 7, Ek = 8, Ev = 7"},
      {0, offsetof(mha_config, output_width), 8, MHA_ERROR_WEIGHTS,
       "layer.st: out_proj.weight has shape (17, 12), but (8, 12) is expected; rule: it is "
       "[Eo][H·dv] with"},
      {3, offsetof(mha_config, query_width), 8, MHA_ERROR_WEIGHTS,
       "layer.st: q_proj.weight has shape (12, 7), but (12, 8) is expected; rule: it is "
       "[H·d][Eq] with H = 4, G = 2, d = 3, dv = 5"},
  };
  static test_file file;
  static numbers n;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = heads(H, G);
    test_note("%s", rows[i].fragment);
    make_fitting(&n, rows[i].naming_index);
    begin_file(&file);
    put_numbers(&file, "", &namings[rows[i].naming_index], "F32", &n, true, "");
    end_file(&file, "layer.st", 0);
    memcpy((char *)&config + rows[i].offset, &rows[i].value, sizeof rows[i].value);
    check_file_refused(&config, rows[i].status, rows[i].fragment);
  }
}

/* The article's matrices under PyTorch's names: rows and columns change places, and no shape fits.
 */
static void the_wrong_orientation_does_not_fit(void **state) {
  static test_file file;
  static numbers n;
  naming wrong = namings[3];
  const mha_config config = heads(H, G);
  (void)state;
  wrong.out_in = false;
  make_fitting(&n, 3);
  begin_file(&file);
  put_numbers(&file, "", &wrong, "F32", &n, false, "");
  end_file(&file, "layer.st", 0);
  check_file_refused(&config, MHA_ERROR_HEADS, "layer.st: q_proj.weight has shape (7, 12), for H");
}

/* ---- Norms and sinks ------------------------------------------------------------------------- */

static void put_normed(const numbers *n, int64_t query_length, int64_t key_length,
                       int64_t n_sinks) {
  static test_file file;
  float ramp[64];
  for (int i = 0; i < 64; i++)
    ramp[i] = (float)(i + 1);
  begin_file(&file);
  put_numbers(&file, "x.", &namings[3], "F32", n, false, "");
  if (query_length > 0)
    put_vector(&file, "x.", "q_norm.weight", "F32", ramp, query_length);
  if (key_length > 0)
    put_vector(&file, "x.", "k_norm.weight", "F32", ramp + 1, key_length);
  if (n_sinks > 0)
    put_vector(&file, "x.", "sinks", "BF16", ramp + 2, n_sinks);
  end_file(&file, "layer.st", 0);
}

static void norms_and_sinks_load(void **state) {
  static const struct {
    int64_t query_length, key_length;
    int32_t given, norm;
  } rows[] = {{D, D, MHA_NORM_NONE, MHA_NORM_PER_HEAD},
              {D, D, MHA_NORM_PER_HEAD, MHA_NORM_PER_HEAD},
              {H * D, G * D, MHA_NORM_NONE, MHA_NORM_FULL},
              {H * D, G * D, MHA_NORM_FULL, MHA_NORM_FULL}};
  static numbers n;
  (void)state;
  make_fitting(&n, 3);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = heads(H, G);
    test_note("row %zu", i);
    put_normed(&n, rows[i].query_length, rows[i].key_length, H);
    config.norm = rows[i].given;
    config.norm_epsilon = 1e-6F;
    mha_weights *weights = load_file(&config, NULL);
    assert_int_equal(weights->config.norm, rows[i].norm);
    assert_true(weights->config.norm_epsilon == 1e-6F);
    for (int64_t k = 0; k < rows[i].query_length; k++)
      assert_true(weights->query_norm[k] == (float)(k + 1));
    for (int64_t k = 0; k < rows[i].key_length; k++)
      assert_true(weights->key_norm[k] == (float)(k + 2));
    for (int64_t k = 0; k < H; k++)
      assert_true(weights->sinks[k] == (float)(k + 3));
    mha_weights_destroy(weights);
  }
}

/* Of one head [d] and [H·d] are the same: both norms fit, and per head is taken. */
static void one_head_takes_either_norm(void **state) {
  (void)state;
  for (int32_t given = MHA_NORM_NONE; given <= MHA_NORM_FULL; given++) {
    static test_file file;
    static const float one[4] = {1, 1, 1, 1};
    numbers single = {.heads = 1, .kv_heads = 1, .d = 4, .dv = 4};
    for (int k = 0; k < 4; k++)
      single.in[k] = single.out[k] = 4;
    mha_config config = heads(1, 0);
    begin_file(&file);
    put_numbers(&file, "", &namings[0], "F32", &single, false, "");
    put_vector(&file, "", "q_norm.weight", "F32", one, 4);
    put_vector(&file, "", "k_norm.weight", "F32", one, 4);
    end_file(&file, "layer.st", 0);
    config.norm = given;
    config.norm_epsilon = 1e-6F;
    mha_weights *weights = load_file(&config, NULL);
    assert_int_equal(weights->config.norm, given ? given : MHA_NORM_PER_HEAD);
    mha_weights_destroy(weights);
  }
}

static void norms_that_do_not_fit_are_refused(void **state) {
  static const struct {
    int64_t query_length, key_length, n_sinks;
    int32_t norm;
    float epsilon;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {D, D, 0, MHA_NORM_NONE, 0.0F, MHA_ERROR_VALUE,
       "config.norm_epsilon is 0, with x.q_norm.weight in layer.st; rule: greater than 0"},
      {D, D, 0, MHA_NORM_NONE, -1.0F, MHA_ERROR_VALUE, "config.norm_epsilon is -1"},
      {0, 0, 0, MHA_NORM_PER_HEAD, 1e-6F, MHA_ERROR_WEIGHTS,
       "layer.st lacks x.q_norm.weight, with config.norm = 1; rule"},
      {D, D, 0, MHA_NORM_FULL, 1e-6F, MHA_ERROR_WEIGHTS,
       "layer.st: x.q_norm.weight has shape (3,), but (12,) is expected; rule: it is [d] per head "
       "or [H·d] in full with"},
      {H * D, G * D, 0, MHA_NORM_PER_HEAD, 1e-6F, MHA_ERROR_WEIGHTS,
       "x.q_norm.weight has shape (12,), but (3,) is expected"},
      {H * D, D, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS,
       "x.k_norm.weight has shape (3,), but (6,) is expected"},
      {D, G * D, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS,
       "x.k_norm.weight has shape (6,), but (3,) is expected"},
      {5, 5, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS, "x.q_norm.weight has shape (5,)"},
      {D, 0, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS, "layer.st lacks x.k_norm.weight; rule"},
      {D, D, 0, 7, 1e-6F, MHA_ERROR_VALUE, "config.norm is 7"},
      {0, 0, G, MHA_NORM_NONE, 0.0F, MHA_ERROR_WEIGHTS,
       "layer.st: x.sinks has shape (2,), but (4,) is expected; rule: it is [H] with H = 4"},
  };
  static numbers n;
  (void)state;
  make_fitting(&n, 3);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = heads(H, G);
    test_note("%s", rows[i].fragment);
    put_normed(&n, rows[i].query_length, rows[i].key_length, rows[i].n_sinks);
    config.norm = rows[i].norm;
    config.norm_epsilon = rows[i].epsilon;
    check_file_refused(&config, rows[i].status, rows[i].fragment);
  }
}

/* ---- The file afterwards --------------------------------------------------------------------- */

/* What is read into memory stays when the file is emptied; what is mapped stays when it is replaced
 * or removed. */
/* The layer of a file that is opened with these flags, and given back at once. */
static mha_status load_with(uint32_t flags, const mha_config *config, const char *path,
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

static void layers_outlive_their_files(void **state) {
  static test_file file;
  static numbers n;
  (void)state;
  make_fitting(&n, 0);
  for (int way = 0; way < 3; way++) {
    mha_config config = heads(H, G);
    begin_file(&file);
    put_numbers(&file, "", &namings[0], "F32", &n, true, "");
    end_file(&file, "layer.st", 0);
    mha_weights *weights = NULL;
    mha_error error;
    test_expect(load_with(way == 0 ? MHA_READ_FILE : 0, &config, "layer.st", &weights, &error),
                MHA_OK, &error);
    if (way == 0)
      assert_int_equal(truncate("layer.st", 0), 0);
    if (way == 1) {
      FILE *other = fopen("other.st", "wb");
      assert_non_null(other);
      assert_int_equal(fclose(other), 0);
      assert_int_equal(rename("other.st", "layer.st"), 0);
    }
    assert_int_equal(unlink("layer.st"), 0);
    check_same_layer(weights, &n, true, true);
    mha_weights_destroy(weights);
  }
}

static void folders_are_read_into_memory(void **state) {
  mha_config config = heads(H, G);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  put_layer("", MATRICES | BIASES);
  config.flags = MHA_SCALE;
  config.scale = 2.0F;
  test_expect(load_with(MHA_READ_FILE, &config, "layer", &weights, &error), MHA_OK, &error);
  assert_int_equal(weights->config.flags, MHA_SCALE);
  for (int part = 0; part < N_PARTS; part++) {
    char path[256];
    part_path(path, "", part);
    assert_int_equal(truncate(path, 0), 0);
  }
  check_odd_layer(weights, MATRICES | BIASES);
  mha_weights_destroy(weights);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* The n-th allocation fails for n = 1, 2, … until loading succeeds; returns that n. */
static int64_t fail_each_allocation(const char *path, uint32_t flags) {
  mha_status status = MHA_ERROR_MEMORY;
  int64_t nth = 0;
  while (status == MHA_ERROR_MEMORY) {
    test_allocator allocator;
    mha_config config = heads(H, G);
    mha_weights *weights = NULL;
    mha_error error;
    test_allocator_init(&allocator);
    allocator.fail_at = ++nth;
    config.allocator = &allocator.mha;
    status = load_with(flags, &config, path, &weights, &error);
    assert_int_equal(error.status, status);
    assert_int_equal(weights == NULL, status != MHA_OK);
    assert_int_equal(error.message[0] == '\0', status == MHA_OK);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
  assert_int_equal(status, MHA_OK);
  return nth;
}

static void allocation_failures(void **state) {
  static test_file file;
  static numbers n;
  (void)state;
  put_layer("", MATRICES | BIASES);
  assert_true(fail_each_allocation("layer", 0) > 2);
  assert_true(fail_each_allocation("layer", MHA_READ_FILE) > N_PARTS);
  make_fitting(&n, 1);
  for (int t = 0; t < 2; t++) {
    begin_file(&file);
    put_numbers(&file, "", &namings[1], t ? "F16" : "F32", &n, true, "");
    end_file(&file, "layer.st", 0);
    assert_true(fail_each_allocation("layer.st", 0) > 2);
    assert_true(fail_each_allocation("layer.st", MHA_READ_FILE) > 3);
  }
}

/* A packed [40][40·3] and [40][40] as 25,600 bytes of float32: mapped they take none, converted
 * they are there once, and the file with them no more. */
static void numbers_are_held_once(void **state) {
  static const struct {
    const char *type;
    size_t offset;
    uint32_t flags;
    size_t at_least, at_most;
  } rows[] = {
      {"F32", 0, 0, 0, 4096},
      {"F32", 0, MHA_READ_FILE, 25600, 25600 + 4096},
      {"F32", 1, 0, 25600, 25600 + 4096},
      {"F64", 0, 0, 25600, 25600 + 4096},
      {"BF16", 0, MHA_READ_FILE, 25600, 25600 + 4096},
  };
  static test_file file;
  static float zeros[4800];
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_allocator allocator;
    mha_config config = heads(8, 0);
    test_note("row %zu", i);
    begin_file(&file);
    for (int k = 0; k < 2; k++) {
      const size_t begin = file.n_data;
      for (int j = 0; j < (k ? 1600 : 4800); j++)
        put_number(&file, rows[i].type, zeros[j]);
      put_entry(&file, "", k ? "c_proj.weight" : "c_attn.weight", rows[i].type, 2, 40, k ? 40 : 120,
                begin);
    }
    end_file(&file, "layer.st", rows[i].offset);
    test_allocator_init(&allocator);
    config.allocator = &allocator.mha;
    mha_weights *weights = NULL;
    test_expect(load_with(rows[i].flags, &config, "layer.st", &weights, NULL), MHA_OK, NULL);
    assert_in_range(allocator.live_bytes, rows[i].at_least, rows[i].at_most);
    assert_ptr_equal(mha_weights_retain(weights), weights);
    mha_weights_destroy(weights);
    assert_true(weights->query.matrix[0] == 0.0F);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static char work_folder[] = "test_load.XXXXXX";

static int enter_folder(void **state) {
  (void)state;
  return !mkdtemp(work_folder) || chdir(work_folder) != 0 || mkdir("layer", 0700) != 0;
}

static int leave_folder(void **state) {
  (void)state;
  return remove_file(NULL) != 0 || rmdir("layer") != 0 || chdir("..") != 0 ||
         rmdir(work_folder) != 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(the_article_loads, remove_layer),
      cmocka_unit_test_teardown(every_subset_of_biases_loads, remove_layer),
      cmocka_unit_test_teardown(given_sizes_that_agree_load, remove_layer),
      cmocka_unit_test_teardown(prefixes_stand_before_names, remove_layer),
      cmocka_unit_test_teardown(column_major_doubles_load, remove_layer),
      cmocka_unit_test_teardown(a_missing_matrix_is_named, remove_layer),
      cmocka_unit_test_teardown(a_wrong_shape_is_named, remove_layer),
      cmocka_unit_test_teardown(empty_matrices_are_refused, remove_layer),
      cmocka_unit_test_teardown(a_remainder_is_refused, remove_layer),
      cmocka_unit_test_teardown(given_sizes_that_disagree_are_refused, remove_layer),
      cmocka_unit_test_teardown(what_the_layer_refuses_is_released, remove_layer),
      cmocka_unit_test_teardown(bad_files_are_refused, remove_layer),
      cmocka_unit_test_teardown(bad_paths_are_refused, remove_layer),
      cmocka_unit_test_teardown(bad_arguments_are_refused, remove_layer),
      cmocka_unit_test_teardown(every_naming_type_and_alignment_is_the_same_layer, remove_file),
      cmocka_unit_test_teardown(packed_sizes_follow_from_each_other, remove_file),
      cmocka_unit_test_teardown(other_tensors_do_not_matter, remove_file),
      cmocka_unit_test_teardown(the_prefix_tells_which_layer, remove_file),
      cmocka_unit_test_teardown(a_missing_tensor_is_named, remove_file),
      cmocka_unit_test_teardown(what_is_not_computed_is_named, remove_file),
      cmocka_unit_test_teardown(a_type_that_is_used_and_unknown_is_named, remove_file),
      cmocka_unit_test_teardown(shapes_that_do_not_fit_are_told, remove_file),
      cmocka_unit_test_teardown(the_wrong_orientation_does_not_fit, remove_file),
      cmocka_unit_test_teardown(norms_and_sinks_load, remove_file),
      cmocka_unit_test_teardown(one_head_takes_either_norm, remove_file),
      cmocka_unit_test_teardown(norms_that_do_not_fit_are_refused, remove_file),
      cmocka_unit_test_teardown(layers_outlive_their_files, remove_file),
      cmocka_unit_test_teardown(folders_are_read_into_memory, remove_layer),
      cmocka_unit_test_teardown(allocation_failures, remove_layer),
      cmocka_unit_test_teardown(numbers_are_held_once, remove_file),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
