/* mha_weights_load: which folders become a layer, with which sizes and numbers, and which error
 * names what in the others. */
#define _XOPEN_SOURCE 700

#include "support.h"

#include "files/names.h"
#include "files/npy.h"
#include "weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Folders of weights ---------------------------------------------------------------------- */

static const char *const names[MHA_N_PARTS] = {"W_Q", "W_K", "W_V", "W_O",
                                               "b_Q", "b_K", "b_V", "b_O"};

/* A layer whose eight sizes all differ: H = 4, G = 2, d = 3, dv = 5. */
enum { H = 4, G = 2, D = 3, DV = 5, EQ = 7, EK = 11, EV = 13, EO = 17 };

static const struct {
  int rank;
  int64_t shape[2];
} odd_layer[MHA_N_PARTS] = {
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
  for (int part = 0; part < MHA_N_PARTS; part++)
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
  for (int part = 0; part < MHA_N_PARTS; part++)
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
static void check_refused(const mha_config *config, mha_status status, const char *fragment) {
  mha_weights *weights = (mha_weights *)(void *)&status;
  mha_error error;
  memset(&error, 0xA5, sizeof error);
  test_expect(mha_weights_load(config, "layer", NULL, &weights, &error), status, &error);
  assert_null(weights);
  assert_int_equal(error.status, status);
  if (!strstr(error.message, fragment))
    test_failed("\"%s\" lacks \"%s\"", error.message, fragment);
  assert_int_equal(mha_weights_load(config, "layer", NULL, &weights, NULL), status);
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
  static const char *const prefixes[] = {"enc.0.attn.", "x", "inner/"};
  const mha_config config = heads(H, G);
  (void)state;
  assert_int_equal(mkdir("layer/inner", 0700), 0);
  for (size_t i = 0; i < 3; i++) {
    mha_weights *weights = NULL;
    mha_error error;
    test_note("prefix %s", prefixes[i]);
    put_layer(prefixes[i], MATRICES | 0x20);
    check_refused(&config, MHA_ERROR_WEIGHTS, "layer/W_Q.npy does not exist");
    test_expect(mha_weights_load(&config, "layer/", prefixes[i], &weights, &error), MHA_OK, &error);
    check_odd_layer(weights, MATRICES | 0x20);
    mha_weights_destroy(weights);
    for (int part = 0; part < MHA_N_PARTS; part++)
      remove_part(prefixes[i], part);
  }
  assert_int_equal(rmdir("layer/inner"), 0);
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
  check_refused(&config, MHA_ERROR_WEIGHTS, "layer/W_Q.npy does not exist");
  for (int part = 0; part < 4; part++) {
    char fragment[64];
    (void)snprintf(fragment, sizeof fragment, "layer/%s.npy does not exist", names[part]);
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
       "layer/W_K.npy has shape (11, 12), but (11, 6) is expected; rule: W_K is "
       "[Ek][G·d] with H = 4, G = 2, d = 3, dv = 5"},
      {1, 2, {G * D, EK}, "layer/W_K.npy has shape (6, 11), but (6, 6) is expected"},
      {3, 2, {EO, H * DV}, "layer/W_O.npy has shape (17, 20), but (20, 20) is expected"},
      {3, 2, {G * DV, EO}, "layer/W_O.npy has shape (10, 17), but (20, 17) is expected"},
      {4, 1, {G * D}, "layer/b_Q.npy has shape (6,), but (12,) is expected"},
      {5, 1, {H * D}, "layer/b_K.npy has shape (12,), but (6,) is expected; rule: b_K is [G·d]"},
      {6, 1, {1}, "layer/b_V.npy has shape (1,), but (10,) is expected; rule: b_V is [G·dv]"},
      {7, 1, {EO + 1}, "layer/b_O.npy has shape (18,), but (17,) is expected; rule: b_O is [Eo]"},
      {0, 1, {EQ * H * D}, "layer/W_Q.npy has shape (84,); rule: W_Q is [Eq][H·d]"},
      {0, 0, {0}, "layer/W_Q.npy has shape (); rule: W_Q is [Eq][H·d]"},
      {2, 3, {EV, G, DV}, "layer/W_V.npy has shape (13, 2, 5); rule: W_V is [Ev][G·dv]"},
      {7, 2, {1, EO}, "layer/b_O.npy has shape (1, 17); rule: b_O is [Eo]"},
      {0, 2, {EQ, 0}, "layer/W_Q.npy has shape (7, 0); rule: W_Q is [Eq][H·d], none of them 0"},
      {0, 2, {0, H * D}, "layer/W_Q.npy has shape (0, 12)"},
      {3, 2, {H * DV, 0}, "layer/W_O.npy has shape (20, 0)"},
      {5, 1, {0}, "layer/b_K.npy has shape (0,); rule: b_K is [G·d], none of them 0"},
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
  check_refused(&config, MHA_ERROR_WEIGHTS, "layer/W_Q.npy has shape (8, 0)");
}

static void a_remainder_is_refused(void **state) {
  static const int64_t shapes[4][2] = {{7, 10}, {7, 10}, {7, 10}, {10, 7}};
  mha_config config = heads(3, 0);
  (void)state;
  for (int part = 0; part < 4; part++)
    put_shape("", part, 2, shapes[part]);
  check_refused(&config, MHA_ERROR_HEADS,
                "layer/W_Q.npy has shape (7, 10), for 3 heads; rule: d = columns of W_Q / H");
  config = heads(20, 0);
  check_refused(&config, MHA_ERROR_HEADS, "layer/W_Q.npy has shape (7, 10), for 20 heads");
  /* d is given, and only dv leaves one */
  config = heads(6, 3);
  config.head_size = 2;
  put_shape("", 0, 2, (const int64_t[]){7, 12});
  put_shape("", 1, 2, (const int64_t[]){7, 6});
  check_refused(&config, MHA_ERROR_HEADS,
                "layer/W_V.npy has shape (7, 10), for 3 heads; rule: dv = columns of W_V / G");
}

static void given_sizes_that_disagree_are_refused(void **state) {
  static const struct {
    size_t offset;
    int64_t value;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {offsetof(mha_config, query_width), 8, MHA_ERROR_WEIGHTS,
       "layer/W_Q.npy has shape (7, 12), but (8, 12) is expected"},
      {offsetof(mha_config, key_width), 7, MHA_ERROR_WEIGHTS,
       "layer/W_K.npy has shape (11, 6), but (7, 6) is expected"},
      {offsetof(mha_config, value_width), 11, MHA_ERROR_WEIGHTS,
       "layer/W_V.npy has shape (13, 10), but (11, 10) is expected"},
      {offsetof(mha_config, output_width), 7, MHA_ERROR_WEIGHTS,
       "layer/W_O.npy has shape (20, 17), but (20, 7) is expected"},
      {offsetof(mha_config, head_size), 4, MHA_ERROR_WEIGHTS,
       "layer/W_Q.npy has shape (7, 12), but (7, 16) is expected"},
      {offsetof(mha_config, value_head_size), 3, MHA_ERROR_WEIGHTS,
       "layer/W_V.npy has shape (13, 10), but (13, 6) is expected"},
      {offsetof(mha_config, n_kv_heads), 0, MHA_ERROR_HEADS,
       "layer/W_V.npy has shape (13, 10), for 4 heads"},
      {offsetof(mha_config, n_kv_heads), 1, MHA_ERROR_WEIGHTS, "layer/W_K.npy has shape (11, 6)"},
      {offsetof(mha_config, n_heads), 2, MHA_ERROR_WEIGHTS,
       "layer/W_K.npy has shape (11, 6), but (11, 12) is expected"},
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
  check_refused(&config, MHA_ERROR_FORMAT, "layer/b_V.npy: a wrong byte at byte 0");
  file = fopen("layer/b_V.npy", "wb");
  assert_non_null(file);
  static const char text[] = "{'descr': '<i4', 'fortran_order': False, 'shape': (0,)}          \n";
  assert_int_equal(fwrite("\x93NUMPY\x01\0", 1, 8, file), 8);
  assert_int_equal(fputc(sizeof text - 1, file), sizeof text - 1);
  assert_int_equal(fputc(0, file), 0);
  assert_int_equal(fputs(text, file) < 0, 0);
  assert_int_equal(fclose(file), 0);
  check_refused(&config, MHA_ERROR_UNSUPPORTED, "layer/b_V.npy holds the type \"i4\"");
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
              {"layer/W_Q.npy", MHA_ERROR_UNSUPPORTED, "layer/W_Q.npy is a file"},
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
  mha_weights *weights = NULL;
  mha_error error;
  memset(prefix, 'p', sizeof prefix);
  prefix[sizeof prefix - 1] = '\0';
  test_expect(mha_weights_load(&config, "layer", prefix, &weights, &error), MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "the path of W_Q.npy is too long"));
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

/* ---- Memory ---------------------------------------------------------------------------------- */

static void allocation_failures(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  int64_t nth = 0;
  (void)state;
  put_layer("", MATRICES | BIASES);
  while (status == MHA_ERROR_MEMORY) {
    test_allocator allocator;
    mha_config config = heads(H, G);
    mha_weights *weights = NULL;
    mha_error error;
    test_allocator_init(&allocator);
    allocator.fail_at = ++nth;
    config.allocator = &allocator.mha;
    status = mha_weights_load(&config, "layer", NULL, &weights, &error);
    assert_int_equal(error.status, status);
    assert_int_equal(weights == NULL, status != MHA_OK);
    if (weights)
      check_odd_layer(weights, MATRICES | BIASES);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
  assert_int_equal(status, MHA_OK);
  assert_true(nth > MHA_N_PARTS);
}

/* Four matrices of 64 x 64 float32 are 64 KiB; twice the numbers would be 128. */
static void numbers_are_held_once(void **state) {
  static const int64_t square[2] = {64, 64};
  test_allocator allocator;
  mha_config config = heads(8, 0);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  for (int part = 0; part < 4; part++)
    put_shape("", part, 2, square);
  test_allocator_init(&allocator);
  config.allocator = &allocator.mha;
  test_expect(mha_weights_load(&config, "layer", NULL, &weights, &error), MHA_OK, &error);
  assert_in_range(allocator.live_bytes, 65536, 65536 + 8192);
  assert_ptr_equal(mha_weights_retain(weights), weights);
  mha_weights_destroy(weights);
  assert_true(weights->query.matrix[0] == number_at(0, 0));
  mha_weights_destroy(weights);
  test_allocator_check(&allocator);
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static char work_folder[] = "test_load.XXXXXX";

static int enter_folder(void **state) {
  (void)state;
  return !mkdtemp(work_folder) || chdir(work_folder) != 0 || mkdir("layer", 0700) != 0;
}

static int leave_folder(void **state) {
  (void)state;
  return rmdir("layer") != 0 || chdir("..") != 0 || rmdir(work_folder) != 0;
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
      cmocka_unit_test_teardown(allocation_failures, remove_layer),
      cmocka_unit_test_teardown(numbers_are_held_once, remove_layer),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
