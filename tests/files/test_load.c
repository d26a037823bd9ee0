/* mha_weights_load of a folder: which files in it become a layer, with which sizes and numbers, and
 * which error names what in the others. */
#define _XOPEN_SOURCE 700

#include "layer_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void check_refused(const mha_config *config, mha_status status, const char *fragment) {
  layer_expect_refused("layer", NULL, config, status, fragment);
}

/* ---- What loads ------------------------------------------------------------------------------ */

static void the_article_loads(void **state) {
  static const char *const files[] = {"W_Q", "W_K", "W_V", "W_O"};
  mha_config config = layer_heads(2, 0);
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
    const float *matrix = projections[k]->matrix;
    for (int i = 0; i < 64; i++)
      assert_true(matrix[i] == (float)numbers[i]);
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

/* Each bias on its own: all 16 subsets. */
static void every_subset_of_biases_loads(void **state) {
  (void)state;
  for (unsigned biases = 0; biases < 16; biases++) {
    const unsigned which = LAYER_MATRICES | biases << 4;
    const mha_config config = layer_heads(H, G);
    mha_weights *weights = NULL;
    mha_error error;
    test_note("biases 0x%x", biases);
    layer_remove_folder(NULL);
    layer_put_parts("", which);
    test_expect(mha_weights_load(&config, "layer", NULL, &weights, &error), MHA_OK, &error);
    layer_remove_folder(NULL); /* the layer does not need its files any more */
    layer_check_parts(weights, which);
    mha_weights_destroy(weights);
  }
}

static void given_sizes_that_agree_load(void **state) {
  mha_config config = layer_heads(H, G);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  layer_put_parts("", LAYER_MATRICES | LAYER_BIASES);
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
  layer_check_parts(weights, LAYER_MATRICES | LAYER_BIASES);
  assert_true(weights->scale == -2.0F && weights->config.softcap == 30.0F);
  mha_weights_destroy(weights);
}

static void prefixes_stand_before_names(void **state) {
  static const char *const prefixes[] = {"enc.0.attn.", "x"};
  const mha_config config = layer_heads(H, G);
  (void)state;
  for (size_t i = 0; i < 2; i++)
    for (int given = 0; given < 2; given++) {
      const char *prefix = given ? prefixes[i] : NULL;
      mha_weights *weights = NULL;
      mha_error error;
      test_note("prefix %s", prefixes[i]);
      layer_put_parts(prefixes[i], LAYER_MATRICES | 0x20);
      layer_expect_refused("layer", "", &config, MHA_ERROR_WEIGHTS,
                           "layer holds no layer under the prefix \"\", but ");
      test_expect(mha_weights_load(&config, "layer/", prefix, &weights, &error), MHA_OK, &error);
      layer_check_parts(weights, LAYER_MATRICES | 0x20);
      mha_weights_destroy(weights);
      for (int part = 0; part < LAYER_PARTS; part++)
        layer_remove_part(prefixes[i], part);
    }
}

/* float64, column-major, version 2.0: [[1, 2, 3, 4], [5, 6, 7, 8]]. */
static void column_major_doubles_load(void **state) {
  static const char header[] = "{'descr': '<f8', 'fortran_order': True, 'shape': (2, 4), }\n";
  static const double columns[8] = {1, 5, 2, 6, 3, 7, 4, 8};
  static const int64_t square[2] = {2, 4};
  static const int64_t out[2] = {4, 2};
  const mha_config config = layer_heads(2, 0);
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
  layer_put_part("", 1, 2, square);
  layer_put_part("", 2, 2, square);
  layer_put_part("", 3, 2, out);
  test_expect(mha_weights_load(&config, "layer", NULL, &weights, &error), MHA_OK, &error);
  const float *matrix = weights->query.matrix;
  for (int i = 0; i < 8; i++)
    assert_true(matrix[i] == (float)(i + 1));
  mha_weights_destroy(weights);
}

static void folders_are_read_into_memory(void **state) {
  mha_config config = layer_heads(H, G);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  layer_put_parts("", LAYER_MATRICES | LAYER_BIASES);
  config.flags = MHA_SCALE;
  config.scale = 2.0F;
  test_expect(layer_load_with(MHA_READ_FILE, &config, "layer", &weights, &error), MHA_OK, &error);
  assert_int_equal(weights->config.flags, MHA_SCALE);
  for (int part = 0; part < LAYER_PARTS; part++) {
    char path[256];
    layer_part_path(path, "", part);
    assert_int_equal(truncate(path, 0), 0);
  }
  layer_check_parts(weights, LAYER_MATRICES | LAYER_BIASES);
  mha_weights_destroy(weights);
}

/* ---- What is refused ------------------------------------------------------------------------- */

static void a_missing_matrix_is_named(void **state) {
  const mha_config config = layer_heads(H, G);
  (void)state;
  check_refused(&config, MHA_ERROR_FORMAT, "layer is a folder without .npy files; rule: weights");
  for (int part = 0; part < 4; part++) {
    char fragment[64];
    (void)snprintf(fragment, sizeof fragment, "layer lacks %s; rule", layer_part_names[part]);
    layer_put_parts("", (LAYER_MATRICES | LAYER_BIASES) & ~(1U << part));
    check_refused(&config, MHA_ERROR_WEIGHTS, fragment);
    layer_remove_folder(NULL);
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
  const mha_config config = layer_heads(H, G);
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("%s", rows[i].fragment);
    layer_put_parts("", LAYER_MATRICES | LAYER_BIASES);
    layer_put_part("", rows[i].part, rows[i].rank, rows[i].shape);
    check_refused(&config, MHA_ERROR_WEIGHTS, rows[i].fragment);
  }
}

/* Everything empty agrees with everything, and must not count as "derive the sizes". */
static void empty_matrices_are_refused(void **state) {
  static const int64_t shapes[4][2] = {{8, 0}, {8, 0}, {8, 0}, {0, 8}};
  const mha_config config = layer_heads(2, 0);
  (void)state;
  for (int part = 0; part < 4; part++)
    layer_put_part("", part, 2, shapes[part]);
  check_refused(&config, MHA_ERROR_WEIGHTS, "layer: W_Q has shape (8, 0)");
}

static void a_remainder_is_refused(void **state) {
  static const int64_t shapes[4][2] = {{7, 10}, {7, 10}, {7, 10}, {10, 7}};
  mha_config config = layer_heads(3, 0);
  (void)state;
  for (int part = 0; part < 4; part++)
    layer_put_part("", part, 2, shapes[part]);
  check_refused(
      &config, MHA_ERROR_HEADS,
      "layer: W_Q has shape (7, 10), for H = 3 and G = 3 heads; rule: d = output width of q / H");
  config = layer_heads(20, 0);
  check_refused(&config, MHA_ERROR_HEADS,
                "layer: W_Q has shape (7, 10), for H = 20 and G = 20 heads");
  /* d is given, and only dv leaves one */
  config = layer_heads(6, 3);
  config.head_size = 2;
  layer_put_part("", 0, 2, (const int64_t[]){7, 12});
  layer_put_part("", 1, 2, (const int64_t[]){7, 6});
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
  layer_put_parts("", LAYER_MATRICES);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = layer_heads(H, G);
    test_note("%s", rows[i].fragment);
    memcpy((char *)&config + rows[i].offset, &rows[i].value, sizeof rows[i].value);
    check_refused(&config, rows[i].status, rows[i].fragment);
  }
}

/* Shapes fit, but the layer itself does not take the config: the numbers go back at once. */
static void what_the_layer_refuses_is_released(void **state) {
  static const int64_t shapes[4][2] = {{4, 6}, {4, 4}, {4, 4}, {6, 4}};
  test_allocator allocator;
  mha_config config = layer_heads(3, 2); /* d = dv = 2, but 3 mod 2 is not 0 */
  (void)state;
  for (int part = 0; part < 4; part++)
    layer_put_part("", part, 2, shapes[part]);
  test_allocator_init(&allocator);
  config.allocator = &allocator.mha;
  check_refused(&config, MHA_ERROR_HEADS, "n_kv_heads");
  assert_true(allocator.calls > 0);
  test_allocator_check(&allocator);
}

static void bad_files_are_refused(void **state) {
  const mha_config config = layer_heads(H, G);
  (void)state;
  layer_put_parts("", LAYER_MATRICES | LAYER_BIASES);
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
  const mha_config config = layer_heads(H, G);
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
  layer_put_parts("", LAYER_MATRICES);
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
  layer_expect_refused("layer", prefix, &config, MHA_ERROR_WEIGHTS,
                       "pp...\", but W_K, W_O, W_Q, W_V");
}

static void bad_arguments_are_refused(void **state) {
  mha_config config = layer_heads(H, G);
  mha_weights *weights = NULL;
  mha_error error;
  (void)state;
  layer_put_parts("", LAYER_MATRICES);
  test_expect(mha_weights_load(NULL, "layer", NULL, &weights, &error), MHA_ERROR_NULL, &error);
  assert_non_null(strstr(error.message, "config"));
  test_expect(mha_weights_load(&config, NULL, NULL, &weights, &error), MHA_ERROR_NULL, &error);
  assert_non_null(strstr(error.message, "path"));
  test_expect(mha_weights_load(&config, "layer", NULL, NULL, &error), MHA_ERROR_NULL, &error);
  assert_non_null(strstr(error.message, "weights"));
  config.struct_size--;
  check_refused(&config, MHA_ERROR_STRUCT_SIZE, "config.struct_size");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(the_article_loads, layer_remove_folder),
      cmocka_unit_test_teardown(every_subset_of_biases_loads, layer_remove_folder),
      cmocka_unit_test_teardown(given_sizes_that_agree_load, layer_remove_folder),
      cmocka_unit_test_teardown(prefixes_stand_before_names, layer_remove_folder),
      cmocka_unit_test_teardown(column_major_doubles_load, layer_remove_folder),
      cmocka_unit_test_teardown(folders_are_read_into_memory, layer_remove_folder),
      cmocka_unit_test_teardown(a_missing_matrix_is_named, layer_remove_folder),
      cmocka_unit_test_teardown(a_wrong_shape_is_named, layer_remove_folder),
      cmocka_unit_test_teardown(empty_matrices_are_refused, layer_remove_folder),
      cmocka_unit_test_teardown(a_remainder_is_refused, layer_remove_folder),
      cmocka_unit_test_teardown(given_sizes_that_disagree_are_refused, layer_remove_folder),
      cmocka_unit_test_teardown(what_the_layer_refuses_is_released, layer_remove_folder),
      cmocka_unit_test_teardown(bad_files_are_refused, layer_remove_folder),
      cmocka_unit_test_teardown(bad_paths_are_refused, layer_remove_folder),
      cmocka_unit_test_teardown(bad_arguments_are_refused, layer_remove_folder),
  };
  return cmocka_run_group_tests(tests, layer_enter_folder, layer_leave_folder);
}
