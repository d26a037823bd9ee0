/* Files that are opened once: what they hold, layers from them, bytes in memory, who gives what
 * back and when. */
#define _POSIX_C_SOURCE 200809L /* unlink */
#include "folder.h"

#include "files/safetensors.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { E = 8, H = 2, LAYERS = 3, PARTS = 4 };

/* ---- A file of three layers ------------------------------------------------------------------ */

static const char *const parts[PARTS] = {"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                         "o_proj.weight"};

/* Layers "l0." to "l2.", of which the last lacks its output matrix and the second has a tensor that
 * is not computed; and a tensor of another kind of thing. */
static struct {
  float matrices[LAYERS][PARTS][E * E];
  char names[LAYERS * PARTS + 2][32];
  unsigned char *bytes;
  size_t n_bytes;
} made;

static void make_file(void) {
  mha_tensor_to_write tensors[LAYERS * PARTS + 2];
  test_random random;
  mha_error error;
  int n = 0;
  test_random_seed(&random, 5);
  for (int layer = 0; layer < LAYERS; layer++)
    for (int part = 0; part < (layer == 2 ? PARTS - 1 : PARTS); part++) {
      float *data = made.matrices[layer][part];
      test_fill_normal(&random, data, E * E, 0.3);
      (void)snprintf(made.names[n], sizeof made.names[n], "l%d.%s", layer, parts[part]);
      tensors[n] = (mha_tensor_to_write){made.names[n], 2, {E, E}, data, E, MHA_F32, NULL};
      n++;
    }
  (void)snprintf(made.names[n], sizeof made.names[n], "l1.bias_k");
  tensors[n] =
      (mha_tensor_to_write){made.names[n], 1, {E, 0}, made.matrices[1][0], 0, MHA_F32, NULL};
  n++;
  (void)snprintf(made.names[n], sizeof made.names[n], "embedding");
  tensors[n] =
      (mha_tensor_to_write){made.names[n], 2, {2, 3}, made.matrices[0][0], 3, MHA_F32, NULL};
  n++;
  const mha_file_to_write file = {.tensors = tensors, .n = n};
  test_expect(mha_safetensors_write("three.st", &file, &error), MHA_OK, &error);
}

static void read_file(void) {
  FILE *file = fopen("three.st", "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  made.n_bytes = (size_t)ftell(file);
  rewind(file);
  made.bytes = aligned_alloc(64, (made.n_bytes + 63) / 64 * 64);
  assert_non_null(made.bytes);
  assert_int_equal(fread(made.bytes, 1, made.n_bytes, file), made.n_bytes);
  (void)fclose(file);
}

static int enter_folder(void **state) {
  (void)state;
  if (test_folder_enter("file") != 0)
    return -1;
  make_file();
  read_file();
  return 0;
}

static int leave_folder(void **state) {
  (void)state;
  free(made.bytes);
  return unlink("three.st") != 0 || test_folder_leave() != 0;
}

static mha_config heads(void) {
  mha_config config;
  MHA_INIT(&config);
  config.n_heads = H;
  return config;
}

/* ---- Who gives back -------------------------------------------------------------------------- */

static void count_release(void *user) {
  ++*(int *)user;
}

static mha_file *open_bytes(int *released) {
  mha_file_options options;
  mha_file *file = NULL;
  mha_error error;
  MHA_INIT(&options);
  options.release = count_release;
  options.release_user = released;
  test_expect(mha_file_open_bytes(made.bytes, made.n_bytes, &options, &file, &error), MHA_OK,
              &error);
  return file;
}

/* y = x·Wq of a layer is what its first matrix says: attention over one token is its value. */
static void check_layer(const mha_weights *weights, int layer) {
  mha_context *context = NULL;
  mha_error error;
  float x[E], value[E] = {0}, output[E];
  double expected[E] = {0}, bound[E];
  for (int i = 0; i < E; i++)
    x[i] = (float)(i + 1);
  for (int o = 0; o < E; o++)
    for (int i = 0; i < E; i++)
      value[o] += made.matrices[layer][2][o * E + i] * x[i];
  for (int o = 0; o < E; o++) {
    for (int i = 0; i < E; i++)
      expected[o] += (double)made.matrices[layer][3][o * E + i] * (double)value[i];
    bound[o] = 1e-4;
  }
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  test_expect(mha_self_attention(context, weights, x, 1, 1, output, &error), MHA_OK, &error);
  test_compare("output", (test_shape){{1, 1, 1, E}}, output, expected, bound);
  mha_context_destroy(context);
}

/* ---- What a file holds ----------------------------------------------------------------------- */

static void check_contents(const mha_file *file) {
  int64_t n_tensors = -1, n_layers = -1;
  mha_error error;
  test_expect(mha_file_count(file, &n_tensors, &n_layers, &error), MHA_OK, &error);
  assert_int_equal(n_tensors, LAYERS * PARTS - 1 + 2);
  assert_int_equal(n_layers, LAYERS);
  for (int64_t k = 0; k < n_layers; k++) {
    mha_layer_info layer;
    char prefix[8];
    MHA_INIT(&layer);
    test_expect(mha_file_layer(file, k, &layer, &error), MHA_OK, &error);
    (void)snprintf(prefix, sizeof prefix, "l%d.", (int)k);
    assert_string_equal(layer.prefix, prefix);
    assert_string_equal(layer.family, "Hugging Face, q_proj");
    assert_int_equal(layer.orientation, MHA_OUT_IN);
    assert_int_equal(layer.is_complete != 0, k < 2);
    assert_int_equal(strstr(layer.missing, "out_proj") != NULL, k == 2);
    assert_int_equal(layer.missing[0] != '\0', k == 2);
    assert_int_equal(layer.unsupported != NULL, k == 1);
    for (int part = 0; part < MHA_N_PARTS; part++) {
      const bool there =
          part <= MHA_PART_WV || (part == MHA_PART_WO && k < 2); /* no bias, no norm, no sinks */
      mha_tensor_info tensor;
      MHA_INIT(&tensor);
      assert_int_equal(layer.parts[part] >= 0, there);
      if (!there)
        continue;
      const int number = part == MHA_PART_WO ? 3 : part;
      test_expect(mha_file_tensor(file, layer.parts[part], &tensor, &error), MHA_OK, &error);
      assert_int_equal(strncmp(tensor.name, prefix, 3), 0);
      assert_string_equal(tensor.name + 3, parts[number]);
      assert_string_equal(tensor.type, "F32");
      assert_true(tensor.is_loaded);
      assert_int_equal(tensor.rank, 2);
      assert_true(tensor.shape[0] == E && tensor.shape[1] == E && tensor.shape[2] == 0);
      assert_int_equal(tensor.bytes, sizeof made.matrices[0][0]);
      assert_memory_equal(tensor.data, made.matrices[k][number], tensor.bytes);
    }
  }
}

static void contents_are_told(void **state) {
  mha_file_options options;
  (void)state;
  MHA_INIT(&options);
  for (int way = 0; way < 3; way++) {
    int released = 0;
    mha_file *file = NULL;
    mha_error error;
    options.flags = way == 1 ? MHA_READ_FILE : 0;
    if (way == 2)
      file = open_bytes(&released);
    else
      test_expect(mha_file_open("three.st", way ? &options : NULL, &file, &error), MHA_OK, &error);
    check_contents(file);
    mha_file_destroy(file);
    assert_int_equal(released, way == 2);
  }
  mha_file_destroy(NULL);
}

/* Writes a .npy file [2][3] of this type. */
static void put_array(const char *path, const char *descr, const char *column_major, size_t bytes) {
  unsigned char file[10 + 118 + 48] = "\x93NUMPY\x01";
  char text[119];
  const int n =
      snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': %s, 'shape': (2, 3), }", descr,
               column_major);
  memset(file + 10, ' ', 118);
  memcpy(file + 10, text, (size_t)n);
  file[8] = 118;
  file[10 + 117] = '\n';
  assert_true(bytes <= 48);
  test_put_file(path, file, 128 + bytes);
}

/* How the numbers lie is told, and that some are not known. */
static void arrays_of_a_folder(void **state) {
  static const char *const names[] = {"columns", "complex", "rows"};
  static const int32_t ranks[] = {2, -1, 2};
  mha_file *file = NULL;
  mha_error error;
  int64_t n = 0;
  (void)state;
  assert_int_equal(mkdir("arrays", 0777), 0);
  put_array("arrays/rows.npy", "<f4", "False", 24);
  put_array("arrays/columns.npy", ">f8", "True", 48);
  put_array("arrays/complex.npy", "<c8", "False", 48);
  test_expect(mha_file_open("arrays", NULL, &file, &error), MHA_OK, &error);
  test_expect(mha_file_count(file, &n, NULL, &error), MHA_OK, &error);
  assert_int_equal(n, 3);
  for (int64_t k = 0; k < n; k++) {
    mha_tensor_info tensor;
    MHA_INIT(&tensor);
    test_expect(mha_file_tensor(file, k, &tensor, &error), MHA_OK, &error);
    assert_string_equal(tensor.name, names[k]);
    assert_int_equal(tensor.rank, ranks[k]);
    assert_int_equal(tensor.is_loaded != 0, k != 1);
    assert_int_equal(tensor.is_column_major != 0, k == 0);
    assert_int_equal(tensor.data != NULL, k != 1);
    assert_string_equal(tensor.type, k == 0 ? ">f8" : k == 1 ? "<c8" : "<f4");
  }
  mha_file_destroy(file);
  assert_int_equal(test_remove_files("arrays"), 0);
  assert_int_equal(rmdir("arrays"), 0);
}

static void counts_that_nobody_wants(void **state) {
  int released = 0;
  mha_file *file = open_bytes(&released);
  int64_t n = 0;
  (void)state;
  test_expect(mha_file_count(file, NULL, NULL, NULL), MHA_OK, NULL);
  test_expect(mha_file_count(file, &n, NULL, NULL), MHA_OK, NULL);
  assert_int_equal(n, 13);
  mha_file_destroy(file);
}

/* ---- Layers ---------------------------------------------------------------------------------- */

static void many_layers_of_one_file(void **state) {
  const mha_config config = heads();
  int released = 0;
  mha_weights *first = NULL, *again = NULL;
  mha_error error;
  (void)state;
  mha_file *file = open_bytes(&released);
  test_expect(mha_weights_load_from(&config, file, "l0.", &first, &error), MHA_OK, &error);
  test_expect(mha_weights_load_from(&config, file, "l0.", &again, &error), MHA_OK, &error);
  check_layer(first, 0);
  mha_file_destroy(file);
  assert_int_equal(released, 0); /* the layers use the bytes */
  mha_weights_destroy(first);
  assert_int_equal(released, 0);
  check_layer(again, 0);
  mha_weights_destroy(again);
  assert_int_equal(released, 1);
}

/* Bytes that lie askew are converted, and not needed any more. */
static void what_is_converted_is_not_kept(void **state) {
  const mha_config config = heads();
  unsigned char *askew = malloc(made.n_bytes + 1);
  mha_file_options options;
  mha_weights *weights = NULL;
  mha_file *file = NULL;
  mha_error error;
  int released = 0;
  (void)state;
  assert_non_null(askew);
  memcpy(askew + 1, made.bytes, made.n_bytes);
  MHA_INIT(&options);
  options.release = count_release;
  options.release_user = &released;
  test_expect(mha_file_open_bytes(askew + 1, made.n_bytes, &options, &file, &error), MHA_OK,
              &error);
  test_expect(mha_weights_load_from(&config, file, "l0.", &weights, &error), MHA_OK, &error);
  mha_file_destroy(file);
  assert_int_equal(released, 1);
  memset(askew, 0, made.n_bytes + 1);
  free(askew);
  check_layer(weights, 0);
  mha_weights_destroy(weights);
}

static void layers_that_do_not_load(void **state) {
  mha_config config = heads();
  mha_weights *weights = NULL;
  mha_error error;
  int released = 0, anything = 0;
  mha_file *file = open_bytes(&released);
  const struct {
    const char *prefix, *word;
    mha_status status;
  } rows[] = {{"l1.", "bias_k", MHA_ERROR_UNSUPPORTED},
              {"l2.", "o_proj", MHA_ERROR_WEIGHTS},
              {"l3.", "l3.", MHA_ERROR_WEIGHTS},
              {NULL, "the bytes", MHA_ERROR_WEIGHTS}};
  (void)state;
  for (size_t k = 0; k < COUNT(rows); k++) {
    weights = (mha_weights *)(void *)&anything;
    test_note("row %zu", k);
    test_expect(mha_weights_load_from(&config, file, rows[k].prefix, &weights, &error),
                rows[k].status, &error);
    assert_null(weights);
    if (!strstr(error.message, rows[k].word))
      test_failed("the message is \"%s\"", error.message);
  }
  config.n_heads = 3;
  test_expect(mha_weights_load_from(&config, file, "l0.", &weights, &error), MHA_ERROR_HEADS,
              &error);
  test_expect(mha_weights_load_from(NULL, file, "l0.", &weights, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_weights_load_from(&config, NULL, "l0.", &weights, &error), MHA_ERROR_NULL,
              &error);
  test_expect(mha_weights_load_from(&config, file, "l0.", NULL, &error), MHA_ERROR_NULL, &error);
  mha_file_destroy(file);
  assert_int_equal(released, 1); /* no layer was left behind that uses it */
}

/* ---- Threads --------------------------------------------------------------------------------- */

static void *load_often(void *argument) {
  mha_file *file = argument;
  const mha_config config = heads();
  mha_status status = MHA_OK;
  for (int k = 0; !status && k < 200; k++) {
    mha_weights *weights = NULL;
    int64_t n = 0;
    status = mha_weights_load_from(&config, file, "l0.", &weights, NULL);
    if (!status)
      status = mha_file_count(file, &n, NULL, NULL);
    mha_weights_destroy(weights);
  }
  return status ? file : NULL;
}

static void many_threads_load(void **state) {
  enum { THREADS = 4 };
  pthread_t threads[THREADS];
  int released = 0;
  mha_file *file = open_bytes(&released);
  (void)state;
  for (int k = 0; k < THREADS; k++)
    assert_int_equal(pthread_create(&threads[k], NULL, load_often, file), 0);
  for (int k = 0; k < THREADS; k++) {
    void *failed = file;
    assert_int_equal(pthread_join(threads[k], &failed), 0);
    assert_null(failed);
  }
  assert_int_equal(released, 0);
  mha_file_destroy(file);
  assert_int_equal(released, 1);
}

/* ---- Bad input ------------------------------------------------------------------------------- */

static void files_that_do_not_open(void **state) {
  mha_file_options options;
  mha_file *file = NULL;
  mha_error error;
  int anything = 0, released = 0;
  (void)state;
  test_expect(mha_file_open(NULL, NULL, &file, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_file_open("three.st", NULL, NULL, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_file_open_bytes(NULL, 9, NULL, &file, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_file_open_bytes(made.bytes, 9, NULL, NULL, &error), MHA_ERROR_NULL, &error);
  file = (mha_file *)(void *)&anything;
  test_expect(mha_file_open("no/such/file", NULL, &file, &error), MHA_ERROR_IO, &error);
  assert_null(file);
  MHA_INIT(&options);
  options.release = count_release;
  options.release_user = &released;
  for (size_t n = 0; n < made.n_bytes; n += n < 80 ? 1 : 97) {
    file = (mha_file *)(void *)&anything;
    test_note("%zu bytes", n);
    test_expect(mha_file_open_bytes(made.bytes, n, &options, &file, &error), MHA_ERROR_FORMAT,
                &error);
    assert_null(file);
    assert_non_null(strstr(error.message, "the bytes"));
  }
  assert_int_equal(released, 0); /* what was refused stays the caller's */
}

static void options_that_are_wrong(void **state) {
  mha_file *file = NULL;
  mha_error error;
  (void)state;
  for (int which = 0; which < 5; which++) {
    const bool bytes = which == 4;
    mha_file_options options;
    MHA_INIT(&options);
    if (which == 0)
      options.struct_size = 3;
    if (which == 1)
      options.flags = 1;
    if (which == 2)
      options.reserved = 1;
    if (which == 3)
      options.release = count_release; /* nobody's bytes */
    if (which == 4)
      options.flags = MHA_READ_FILE; /* they are read already */
    const mha_status status =
        bytes ? mha_file_open_bytes(made.bytes, made.n_bytes, &options, &file, &error)
              : mha_file_open("three.st", &options, &file, &error);
    test_note("options %d", which);
    test_expect(status, which == 0 ? MHA_ERROR_STRUCT_SIZE : MHA_ERROR_VALUE, &error);
    assert_null(file);
  }
}

static void questions_that_are_wrong(void **state) {
  const int64_t indices[] = {-1, INT64_MIN, 13, INT64_MAX};
  int released = 0;
  mha_file *file = open_bytes(&released);
  mha_error error;
  (void)state;
  test_expect(mha_file_count(NULL, NULL, NULL, &error), MHA_ERROR_NULL, &error);
  for (size_t k = 0; k < COUNT(indices); k++) {
    mha_tensor_info tensor;
    mha_layer_info layer;
    MHA_INIT(&tensor);
    MHA_INIT(&layer);
    test_expect(mha_file_tensor(file, indices[k], &tensor, &error), MHA_ERROR_LENGTH, &error);
    test_expect(mha_file_layer(file, indices[k], &layer, &error), MHA_ERROR_LENGTH, &error);
    assert_null(tensor.name);
    assert_null(layer.prefix);
  }
  test_expect(mha_file_tensor(file, 0, NULL, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_file_layer(file, 0, NULL, &error), MHA_ERROR_NULL, &error);
  mha_tensor_info unset = {.struct_size = 0};
  test_expect(mha_file_tensor(file, 0, &unset, &error), MHA_ERROR_STRUCT_SIZE, &error);
  mha_layer_info unset_layer = {.struct_size = 0};
  test_expect(mha_file_layer(file, 0, &unset_layer, &error), MHA_ERROR_STRUCT_SIZE, &error);
  mha_file_destroy(file);
}

/* The n-th allocation fails for n = 1, 2, … until a layer is there. */
static void allocations_that_fail(void **state) {
  (void)state;
  for (int way = 0; way < 3; way++) {
    mha_status status = MHA_ERROR_MEMORY;
    int64_t nth = 0;
    while (status == MHA_ERROR_MEMORY) {
      test_allocator allocator;
      mha_file_options options;
      mha_config config = heads();
      mha_weights *weights = NULL;
      mha_file *file = NULL;
      mha_error error;
      int released = 0;
      test_allocator_init(&allocator);
      allocator.fail_at = ++nth;
      MHA_INIT(&options);
      options.allocator = config.allocator = &allocator.mha;
      options.flags = way == 1 ? MHA_READ_FILE : 0;
      options.release = way == 2 ? count_release : NULL;
      options.release_user = &released;
      status = way == 2 ? mha_file_open_bytes(made.bytes, made.n_bytes, &options, &file, &error)
                        : mha_file_open("three.st", &options, &file, &error);
      const bool opened = status == MHA_OK;
      if (opened)
        status = mha_weights_load_from(&config, file, "l0.", &weights, &error);
      mha_file_destroy(file);
      if (status)
        test_expect(status, MHA_ERROR_MEMORY, &error);
      else
        check_layer(weights, 0);
      mha_weights_destroy(weights);
      assert_int_equal(released, way == 2 && opened);
      test_allocator_check(&allocator);
    }
    assert_int_equal(status, MHA_OK);
    assert_true(nth > 3);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(contents_are_told),
      cmocka_unit_test(arrays_of_a_folder),
      cmocka_unit_test(counts_that_nobody_wants),
      cmocka_unit_test(many_layers_of_one_file),
      cmocka_unit_test(what_is_converted_is_not_kept),
      cmocka_unit_test(layers_that_do_not_load),
      cmocka_unit_test(many_threads_load),
      cmocka_unit_test(files_that_do_not_open),
      cmocka_unit_test(options_that_are_wrong),
      cmocka_unit_test(questions_that_are_wrong),
      cmocka_unit_test(allocations_that_fail),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
