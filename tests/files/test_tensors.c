/* Weights files: mapped or read, safetensors or a folder of .npy files, the way of the numbers to
 * float32, and safetensors files that are written. */
#define _XOPEN_SOURCE 700

#include "folder.h"

#include "files/mapping.h"
#include "files/safetensors.h"
#include "files/text.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* ---- Files ----------------------------------------------------------------------------------- */

/* A file of at most 1 MiB, whole; malloc'd. */
static unsigned char *get_file(const char *path, size_t *n) {
  FILE *file = fopen(path, "rb");
  unsigned char *bytes = malloc(1U << 20);
  assert_non_null(file);
  assert_non_null(bytes);
  *n = fread(bytes, 1, 1U << 20, file);
  assert_int_equal(fclose(file), 0);
  return bytes;
}

static void put_safetensors(const char *path, const char *header, const void *data, size_t n_data) {
  const size_t length = strlen(header);
  unsigned char *bytes = calloc(1, 8 + length + n_data);
  assert_non_null(bytes);
  for (int i = 0; i < 8; i++)
    bytes[i] = (unsigned char)((uint64_t)length >> 8 * i & 0xFF);
  memcpy(bytes + 8, header, length);
  if (n_data > 0)
    memcpy(bytes + 8 + length, data, n_data);
  test_put_file(path, bytes, 8 + length + n_data);
  free(bytes);
}

/* Version 1.0, numbers at a multiple of 64. */
static void put_npy(const char *path, const char *descr, bool column_major, const char *shape,
                    const void *data, size_t n_data) {
  unsigned char bytes[4096] = "\x93NUMPY\x01";
  char text[119];
  assert_true(n_data <= sizeof bytes - 128);
  const int used = snprintf(text, sizeof text, "{'descr': %s, 'fortran_order': %s, 'shape': %s, }",
                            descr, column_major ? "True" : "False", shape);
  bytes[8] = 118;
  memset(bytes + 10, ' ', 118);
  memcpy(bytes + 10, text, (size_t)used);
  if (n_data > 0)
    memcpy(bytes + 128, data, n_data);
  test_put_file(path, bytes, 128 + n_data);
}

static void open_well(const char *path, bool read, mha_raw_tensors *tensors) {
  mha_error error;
  memset(&error, 0xA5, sizeof error);
  test_expect(mha_tensors_open(path, read, NULL, tensors, &error), MHA_OK, &error);
}

/* Refused in both ways with one sentence that holds `fragment`; nothing is left. */
static void check_refused(const char *path, mha_status expected, const char *fragment) {
  for (int read = 0; read < 2; read++) {
    const mha_raw_tensors nothing = {0};
    mha_raw_tensors tensors;
    test_allocator allocator;
    mha_error error;
    test_allocator_init(&allocator);
    memset(&tensors, 0xA5, sizeof tensors);
    memset(&error, 0xA5, sizeof error);
    test_note("%s, read %d", path, read);
    test_expect(mha_tensors_open(path, read, &allocator.mha, &tensors, &error), expected, &error);
    if (!strstr(error.message, fragment))
      test_failed("\"%s\" lacks \"%s\"", error.message, fragment);
    assert_null(strpbrk(error.message, "\n\x1b"));
    assert_memory_equal(&tensors, &nothing, sizeof nothing);
    test_allocator_check(&allocator);
    assert_int_equal(mha_tensors_open(path, read, NULL, &tensors, NULL), expected);
  }
}

/* The tensor of that name, or NULL. */
static const mha_raw_tensor *look_up(const mha_raw_tensors *tensors, const char *name) {
  for (int64_t i = 0; i < tensors->n; i++)
    if (strcmp(tensors->items[i].name, name) == 0)
      return &tensors->items[i];
  return NULL;
}

static const mha_raw_tensor *find(const mha_raw_tensors *tensors, const char *name) {
  const mha_raw_tensor *tensor = look_up(tensors, name);
  if (!tensor)
    test_failed("there is no %s", name);
  return tensor;
}

#define TWO_HEADER                                                                                 \
  "{\"u\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"                            \
  "\"w\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[24,28]}}"

static const float six[6] = {1, -2, 3.5F, 4, 5, 6e-30F};

/* One file and one folder of two tensors each. */
static void put_two(void) {
  unsigned char data[28] = {0};
  memcpy(data, six, sizeof six);
  data[25] = 0x3F; /* 0.5 and 2.0 in bfloat16 */
  data[27] = 0x40;
  put_safetensors("two.safetensors", TWO_HEADER, data, sizeof data);
  put_npy("files/w.npy", "'<f8'", false, "(1,)", &(double){0.1}, 8);
  put_npy("files/u.npy", "'<f4'", false, "(2, 3)", six, sizeof six);
}

/* ---- Mapped or read -------------------------------------------------------------------------- */

static bool is_allocated(const test_allocator *allocator, const void *pointer) {
  const char *at = pointer;
  for (int i = 0; i < allocator->n_ranges; i++)
    if (at >= allocator->ranges[i].begin && at < allocator->ranges[i].end)
      return true;
  return false;
}

static void same_tensors(const mha_raw_tensors *a, const mha_raw_tensors *b) {
  assert_int_equal(a->n, b->n);
  assert_int_equal(a->is_folder, b->is_folder);
  for (int64_t i = 0; i < a->n; i++) {
    const mha_raw_tensor *s = &a->items[i];
    const mha_raw_tensor *t = &b->items[i];
    assert_string_equal(s->name, t->name);
    assert_string_equal(s->type, t->type);
    assert_int_equal(s->rank, t->rank);
    assert_memory_equal(s->shape, t->shape, sizeof s->shape);
    assert_int_equal(s->bytes, t->bytes);
    assert_ptr_not_equal(s->data, t->data);
    assert_memory_equal(s->data, t->data, s->bytes);
  }
}

static void mapping_and_reading_agree(void **state) {
  static const char *const paths[] = {"two.safetensors", "files"};
  (void)state;
  put_two();
  for (size_t i = 0; i < COUNT(paths); i++) {
    mha_raw_tensors both[2];
    test_allocator allocators[2];
    mha_error error;
    for (int read = 0; read < 2; read++) {
      test_allocator_init(&allocators[read]);
      test_note("%s, read %d", paths[i], read);
      test_expect(mha_tensors_open(paths[i], read, &allocators[read].mha, &both[read], &error),
                  MHA_OK, &error);
      assert_int_equal(both[read].n, 2);
      assert_int_equal(both[read].is_folder, i == 1);
      for (int k = 0; k < 2; k++)
        assert_int_equal(is_allocated(&allocators[read], both[read].items[k].data), read);
      assert_memory_equal(find(&both[read], "u")->data, six, sizeof six);
      assert_null(look_up(&both[read], "v"));
      assert_null(look_up(&both[read], ""));
    }
    same_tensors(&both[0], &both[1]);
    for (int read = 0; read < 2; read++) {
      mha_tensors_close(&both[read]);
      assert_null(both[read].store);
      mha_tensors_close(&both[read]);
      test_allocator_check(&allocators[read]);
    }
  }
}

/* How many maps of the process name a file that ends so; -1 where the system does not tell. */
static int count_maps(const char *ending) {
  char line[5000];
  int n = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  if (!maps)
    return -1;
  while (fgets(line, sizeof line, maps))
    n += strstr(line, ending) != NULL;
  assert_int_equal(fclose(maps), 0);
  return n;
}

static void nothing_stays_mapped(void **state) {
  static const char *const paths[] = {"two.safetensors", "files"};
  static const char *const endings[] = {"/two.safetensors\n", ".npy\n"};
  (void)state;
  if (count_maps("") < 0)
    skip();
  put_two();
  for (int i = 0; i < 2; i++) {
    mha_raw_tensors tensors;
    open_well(paths[i], false, &tensors);
    assert_int_equal(count_maps(endings[i]), i + 1);
    mha_tensors_close(&tensors);
    assert_int_equal(count_maps(endings[i]), 0);
  }
}

static void one_file_at_a_time(void **state) {
  mha_mapping mapping;
  mha_error error;
  (void)state;
  test_put_file("files/empty", "", 0);
  test_put_file("files/some", "12345", 5);
  for (int read = 0; read < 2; read++) {
    test_allocator allocator;
    test_allocator_init(&allocator);
    test_expect(mha_mapping_open("files/empty", read, &allocator.mha, &mapping, &error), MHA_OK,
                &error);
    assert_non_null(mapping.bytes);
    assert_int_equal(mapping.n_bytes, 0);
    assert_int_equal(allocator.calls, 0);
    mha_mapping_close(&mapping);
    test_expect(mha_mapping_open("files/some", read, &allocator.mha, &mapping, &error), MHA_OK,
                &error);
    assert_int_equal(mapping.n_bytes, 5);
    assert_memory_equal(mapping.bytes, "12345", 5);
    assert_int_equal(allocator.live, read);
    mha_mapping_close(&mapping);
    assert_null(mapping.bytes);
    mha_mapping_close(&mapping);
    test_allocator_check(&allocator);
  }
  const int file = open("files/some", O_RDONLY);
  char bytes[6];
  assert_true(file >= 0);
  test_expect(mha_read_at("files/some", file, 1, bytes, 4, &error), MHA_OK, &error);
  assert_memory_equal(bytes, "2345", 4);
  test_expect(mha_read_at("files/some", file, 0, bytes, 6, &error), MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "files/some ends at byte 5 while it is read; rule: "));
  assert_int_equal(close(file), 0);
}

/* ---- Paths ----------------------------------------------------------------------------------- */

static void bad_paths_are_refused(void **state) {
  (void)state;
  test_put_file("files/empty", "", 0);
  test_put_file("files/short", "\2\0\0\0\0\0\0", 7);
  assert_int_equal(mkfifo("files/fifo", 0600), 0);
  check_refused("absent", MHA_ERROR_IO,
                "absent does not exist; rule: weights are a safetensors or GGUF");
  check_refused("", MHA_ERROR_IO, "does not exist; rule: ");
  check_refused("files/empty/x", MHA_ERROR_IO, "files/empty/x cannot be examined: ");
  check_refused("files/fifo", MHA_ERROR_IO, "files/fifo is neither a folder nor a regular file");
  check_refused("/dev/null", MHA_ERROR_IO, "/dev/null is neither a folder nor a regular file");
  check_refused("files/empty", MHA_ERROR_FORMAT,
                "files/empty is empty; rule: weights are a safetensors or GGUF file, or a folder");
  check_refused("files/short", MHA_ERROR_FORMAT, "files/short: the file holds 7 bytes");
  mha_mapping mapping;
  mha_error error;
  test_expect(mha_mapping_open("files/fifo", false, NULL, &mapping, &error), MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "files/fifo is not a regular file; rule: "));
  test_expect(mha_mapping_open("files", false, NULL, &mapping, &error), MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "files is not a regular file"));
  assert_null(mapping.bytes);
}

/* Expects a refusal under a user who owns nothing here, if there are two users to choose from. */
static void check_unreadable(const char *path, const char *fragment) {
  const uid_t self = geteuid();
  if (self == 0)
    assert_int_equal(seteuid(65534), 0);
  check_refused(path, MHA_ERROR_IO, fragment);
  assert_int_equal(seteuid(self), 0);
}

static void unreadable_files_are_refused(void **state) {
  (void)state;
  put_two();
  assert_int_equal(chmod(".", 0711), 0);
  assert_int_equal(chmod("files", 0755), 0);
  assert_int_equal(chmod("files/w.npy", 0), 0);
  check_unreadable("files", "files/w.npy cannot be opened: ");
  check_unreadable("files/w.npy", "files/w.npy cannot be opened: ");
  assert_int_equal(chmod("files", 0), 0);
  check_unreadable("files", "files cannot be opened: ");
  check_unreadable("files/w.npy", "files/w.npy cannot be examined: ");
  assert_int_equal(chmod("files", 0700), 0);
  assert_int_equal(chmod(".", 0700), 0);
}

/* ---- Folders --------------------------------------------------------------------------------- */

static void folders_are_listed(void **state) {
  static const char *const names[] = {"B", "a", "a.b", "\xC3\xA9"};
  mha_raw_tensors tensors;
  (void)state;
  test_put_file("files/model.safetensors", "text", 4);
  check_refused(
      "files", MHA_ERROR_FORMAT,
      "files is a folder without .npy files; rule: weights are a safetensors or GGUF file");
  put_npy("files/a.npy", "'<f4'", false, "(2, 3)", six, sizeof six);
  put_npy("files/\xC3\xA9.npy", "'<i4'", false, "(6,)", six, sizeof six);
  put_npy("files/a.b.npy", "'|b1'", false, "(2,)", "\1", 2);
  assert_int_equal(symlink("a.npy", "files/B.npy"), 0);
  test_put_file("files/readme.txt", "text", 4);
  test_put_file("files/x.NPY", "text", 4);
  test_put_file("files/xnpy", "text", 4);
  test_put_file("files/.npy", "text", 4);
  test_put_file("files/.hidden.npy", "text", 4);
  test_put_file("files/a.npy.old", "text", 4);
  assert_int_equal(mkdir("files/folder", 0700), 0);
  open_well("files", false, &tensors);
  assert_true(tensors.is_folder);
  assert_int_equal(tensors.n, COUNT(names));
  for (size_t i = 0; i < COUNT(names); i++) {
    assert_string_equal(tensors.items[i].name, names[i]);
    assert_ptr_equal(look_up(&tensors, names[i]), &tensors.items[i]);
  }
  assert_string_equal(tensors.items[3].type, "<i4");
  assert_int_equal(tensors.items[3].element, MHA_RAW_OTHER);
  assert_string_equal(tensors.items[2].type, "|b1");
  assert_memory_equal(tensors.items[0].data, six, sizeof six);
  mha_tensors_close(&tensors);
}

/* Arrays that cannot be loaded may lie there; what is no array may not. */
static void other_arrays_in_a_folder(void **state) {
  static const char *const descrs[] = {"'|O'", "[('x', '<f4')]", "'<c16'", "'<U3'"};
  static const char *const types[] = {"|O", "structured", "<c16", "<U3"};
  (void)state;
  put_two();
  for (size_t i = 0; i < COUNT(descrs); i++) {
    mha_raw_tensors tensors;
    put_npy("files/x.npy", descrs[i], false, "(1,)", "12345678", 8);
    open_well("files", i % 2, &tensors);
    assert_int_equal(tensors.n, 3);
    const mha_raw_tensor *x = find(&tensors, "x");
    assert_int_equal(x->element, MHA_RAW_OTHER);
    assert_string_equal(x->type, types[i]);
    assert_int_equal(x->rank + x->n_elements + (int64_t)x->bytes, 0);
    assert_null(x->data);
    assert_int_equal(mha_tensor_element(x), -1);
    mha_tensors_close(&tensors);
  }
  test_put_file("files/x.npy", "no array", 8);
  check_refused("files", MHA_ERROR_FORMAT,
                "files/x.npy seems to be text; rule: an array is a .npy file");
  test_put_file("files/x.npy", "", 0);
  check_refused("files", MHA_ERROR_FORMAT, "files/x.npy: the file's early end at byte 0");
  put_npy("files/x.npy", "'<f4'", false, "(2,)", six, 4);
  check_refused("files", MHA_ERROR_FORMAT, "files/x.npy: 4 bytes of numbers");
  assert_int_equal(remove("files/x.npy"), 0);
  assert_int_equal(mkdir("files/x.npy", 0700), 0);
  check_refused("files", MHA_ERROR_IO, "files/x.npy is not a regular file");
  assert_int_equal(remove("files/x.npy"), 0);
  assert_int_equal(mkfifo("files/x.npy", 0600), 0);
  check_refused("files", MHA_ERROR_IO, "files/x.npy is not a regular file");
  assert_int_equal(remove("files/x.npy"), 0);
  assert_int_equal(symlink("nowhere", "files/x.npy"), 0);
  check_refused("files", MHA_ERROR_IO, "files/x.npy cannot be opened: ");
  assert_int_equal(remove("files/x.npy"), 0);
  put_npy("files/a\x1b.npy", "'<f4'", false, "()", six, 4);
  check_refused("files", MHA_ERROR_FORMAT, "file \"a?.npy\" holds a control character");
  assert_int_equal(remove("files/a\x1b.npy"), 0);
  put_npy("files/a\xFF.npy", "'<f4'", false, "()", six, 4);
  check_refused("files", MHA_ERROR_FORMAT, "file \"a?.npy\" is not UTF-8");
}

/* The folder can be reached, the files in it cannot. */
static void long_paths_are_refused(void **state) {
  char path[4088 + sizeof "files"];
  (void)state;
  put_two();
  for (size_t i = 0; i < 2044; i++)
    memcpy(path + 2 * i, "./", 2);
  memcpy(path + 4088, "files", sizeof "files");
  check_refused(path, MHA_ERROR_IO, "the path of u.npy is too long; rule: below 4096 bytes");
}

static void large_folders_need_few_descriptors(void **state) {
  struct rlimit before;
  mha_raw_tensors tensors;
  mha_error error;
  (void)state;
  for (int i = 0; i < 300; i++) {
    char path[64];
    const float number = (float)i;
    (void)snprintf(path, sizeof path, "files/t%03d.npy", (i * 7) % 300);
    put_npy(path, "'<f4'", false, "(1,)", &number, 4);
  }
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 20;
  for (int read = 0; read < 2; read++) {
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const mha_status status = mha_tensors_open("files", read, NULL, &tensors, &error);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    test_expect(status, MHA_OK, &error);
    assert_int_equal(tensors.n, 300);
    for (int i = 0; i < 300; i++) {
      float number;
      memcpy(&number, tensors.items[(i * 7) % 300].data, sizeof number);
      assert_true(number == (float)i);
    }
    mha_tensors_close(&tensors);
  }
}

/* ---- Numbers --------------------------------------------------------------------------------- */

/* Converts the tensor of that name and type; fenced. */
static float *convert(test_pool *pool, const char *path, const char *name, const char *type) {
  mha_raw_tensors tensors;
  open_well(path, false, &tensors);
  const mha_raw_tensor *tensor = find(&tensors, name);
  assert_string_equal(tensor->type, type);
  float *numbers = test_pool_floats(pool, tensor->n_elements);
  mha_tensor_convert(tensor, numbers);
  mha_tensors_close(&tensors);
  return numbers;
}

/* The value of a number of `exponent_bits` and `mantissa_bits`, by its definition. */
static double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double fraction = (double)(bits & ((1U << mantissa_bits) - 1)) / (1U << mantissa_bits);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double value = exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias);
  if (exponent == (1 << exponent_bits) - 1)
    value = fraction > 0 ? (double)NAN : (double)INFINITY;
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

/* Each of the 65536 numbers is exact; -0 and NaN are what they were. */
static void check_all_16_bits(const float *numbers, int exponent_bits, int mantissa_bits) {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const double expected = decode(bits, exponent_bits, mantissa_bits);
    const float got = numbers[bits];
    test_note("0x%04X of %d exponent bits", bits, exponent_bits);
    if (isnan(expected))
      assert_true(isnan(got));
    else
      assert_true((double)got == expected && !signbit(got) == !signbit(expected));
  }
}

static void all_16_bit_numbers(void **state) {
  static unsigned char data[2 * 65536];
  (void)state;
  for (size_t i = 0; i < 65536; i++) {
    data[2 * i] = (unsigned char)(i & 0xFF);
    data[2 * i + 1] = (unsigned char)(i >> 8);
  }
  for (int type = 0; type < 2; type++) {
    test_pool pool = {0};
    char header[128];
    const char *name = type ? "BF16" : "F16";
    (void)snprintf(header, sizeof header,
                   "{\"w\":{\"dtype\":\"%s\",\"shape\":[256,256],\"data_offsets\":[0,131072]}}",
                   name);
    put_safetensors("files/w", header, data, sizeof data);
    check_all_16_bits(convert(&pool, "files/w", "w", name), type ? 8 : 5, type ? 7 : 10);
    test_pool_free(&pool);
  }
}

static const double doubles[] = {
    1,           -2.5,        0x1p-149,           0x1.8p-150,     0x1p-151,
    1 + 0x1p-24, 1 + 0x3p-24, 1 + 0x1.000002p-24, 0x1.fffffep127, 0x1.ffffffp127,
    1e300,       -1e300};
static const float rounded[] = {1,        -2.5F,        0x1p-149F,    0x1p-149F,       0,
                                1,        1 + 0x1p-22F, 1 + 0x1p-23F, 0x1.fffffep127F, INFINITY,
                                INFINITY, -INFINITY};

static void float64_rounds_to_nearest(void **state) {
  enum { N = COUNT(doubles) };
  double data[N + 2];
  test_pool pool = {0};
  (void)state;
  assert_int_equal(N, COUNT(rounded));
  memcpy(data, doubles, sizeof doubles);
  data[N] = (double)NAN;
  data[N + 1] = (double)-INFINITY;
  put_safetensors("files/w", "{\"w\":{\"dtype\":\"F64\",\"shape\":[7,2],\"data_offsets\":[0,112]}}",
                  data, sizeof data);
  const float *numbers = convert(&pool, "files/w", "w", "F64");
  test_same_bits("F64", (test_shape){{N, 1, 1, 1}}, numbers, rounded);
  assert_true(isnan(numbers[N]));
  assert_true(isinf(numbers[N + 1]) && numbers[N + 1] < 0);
  test_pool_free(&pool);
}

/* Arrays of shape (2, 3) that are 1 … 6 row by row, in every type, order and layout. */
static void folders_in_every_layout(void **state) {
  static const struct {
    const char *type;
    size_t bytes;
    unsigned char bits[6][8]; /* big-endian */
  } rows[] = {
      {"f2", 2, {{0x3C}, {0x40}, {0x42}, {0x44}, {0x45}, {0x46}}},
      {"f4", 4, {{0x3F, 0x80}, {0x40}, {0x40, 0x40}, {0x40, 0x80}, {0x40, 0xA0}, {0x40, 0xC0}}},
      {"f8", 8, {{0x3F, 0xF0}, {0x40}, {0x40, 0x08}, {0x40, 0x10}, {0x40, 0x14}, {0x40, 0x18}}},
  };
  static const float expected[6] = {1, 2, 3, 4, 5, 6};
  static const int transposed[6] = {0, 3, 1, 4, 2, 5};
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    for (int variant = 0; variant < 4; variant++) {
      const bool big = variant & 1;
      const bool column_major = variant & 2;
      test_pool pool = {0};
      unsigned char data[48];
      char descr[16];
      char type[8];
      for (size_t k = 0; k < 6; k++)
        for (size_t byte = 0; byte < rows[i].bytes; byte++)
          data[k * rows[i].bytes + byte] = rows[i].bits[column_major ? transposed[k] : (int)k]
                                                       [big ? byte : rows[i].bytes - 1 - byte];
      (void)snprintf(type, sizeof type, "%c%s", big ? '>' : '<', rows[i].type);
      (void)snprintf(descr, sizeof descr, "'%s'", type);
      test_note("%s, column-major %d", type, column_major);
      put_npy("files/w.npy", descr, column_major, "(2, 3)", data, 6 * rows[i].bytes);
      test_same_bits(type, (test_shape){{2, 3, 1, 1}}, convert(&pool, "files", "w", type),
                     expected);
      test_pool_free(&pool);
    }
}

static void usable_where_they_lie(void **state) {
  mha_raw_tensors tensors;
  (void)state;
  put_npy("files/row.npy", "'<f4'", false, "(2, 3)", six, sizeof six);
  put_npy("files/column.npy", "'<f4'", true, "(2, 3)", six, sizeof six);
  put_npy("files/list.npy", "'<f4'", true, "(6,)", six, sizeof six);
  put_npy("files/big.npy", "'>f4'", false, "(2, 3)", six, sizeof six);
  put_npy("files/half.npy", "'<f2'", false, "(2, 3)", six, 12);
  put_npy("files/integer.npy", "'<i4'", false, "(2, 3)", six, sizeof six);
  open_well("files", false, &tensors);
  const bool big_endian_machine = *(const unsigned char *)&(const uint16_t){1} == 0;
  assert_int_equal(mha_tensor_element(find(&tensors, "row")), big_endian_machine ? -1 : MHA_F32);
  assert_int_equal(mha_tensor_element(find(&tensors, "list")), big_endian_machine ? -1 : MHA_F32);
  assert_int_equal(mha_tensor_element(find(&tensors, "big")), big_endian_machine ? MHA_F32 : -1);
  assert_int_equal(mha_tensor_element(find(&tensors, "column")), -1);
  assert_int_equal(mha_tensor_element(find(&tensors, "half")), big_endian_machine ? -1 : MHA_F16);
  assert_int_equal(mha_tensor_element(find(&tensors, "integer")), -1);
  mha_tensors_close(&tensors);
  for (int spaces = 0; spaces < 4; spaces++) {
    char header[128];
    float numbers[6];
    const int used = snprintf(header, sizeof header, "%s%.*s",
                              "{\"w\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}",
                              spaces, "   ");
    put_safetensors("files/w", header, six, sizeof six);
    open_well("files/w", false, &tensors);
    test_note("data at byte %d", 8 + used);
    if (!big_endian_machine)
      assert_int_equal(mha_tensor_element(&tensors.items[0]), used % 4 == 0 ? MHA_F32 : -1);
    mha_tensor_convert(&tensors.items[0], numbers);
    test_same_bits("w", (test_shape){{6, 1, 1, 1}}, numbers, six);
    mha_tensors_close(&tensors);
  }
}

static void shapes_as_text(void **state) {
  static const int64_t shape[] = {7, 0, INT64_MAX};
  char text[64];
  (void)state;
  assert_string_equal(mha_shape_text(0, shape, text, sizeof text), "()");
  assert_string_equal(mha_shape_text(1, shape, text, sizeof text), "(7,)");
  assert_string_equal(mha_shape_text(3, shape, text, sizeof text), "(7, 0, 9223372036854775807)");
  assert_string_equal(mha_shape_text(3, shape, text, 6), "(7, 0");
}

/* ---- Memory that runs out -------------------------------------------------------------------- */

static void allocation_failures(void **state) {
  static const char *const paths[] = {"two.safetensors", "files"};
  (void)state;
  put_two();
  for (size_t i = 0; i < 2 * COUNT(paths); i++) {
    mha_status status = MHA_ERROR_MEMORY;
    int64_t n = 1;
    for (; status; n++) {
      const mha_raw_tensors nothing = {0};
      mha_raw_tensors tensors;
      test_allocator allocator;
      mha_error error;
      test_allocator_init(&allocator);
      allocator.fail_at = n;
      test_note("%s, allocation %" PRId64, paths[i / 2], n);
      status = mha_tensors_open(paths[i / 2], i % 2, &allocator.mha, &tensors, &error);
      test_expect(status, status ? MHA_ERROR_MEMORY : MHA_OK, &error);
      if (status)
        assert_memory_equal(&tensors, &nothing, sizeof nothing);
      else
        assert_int_equal(allocator.calls, n - 1);
      mha_tensors_close(&tensors);
      test_allocator_check(&allocator);
    }
    /* the list and the parsed header; one for a folder; one more for each file that is read */
    static const int64_t expected[] = {2, 3, 1, 3};
    assert_int_equal(n - 2, expected[i]);
  }
}

/* ---- Writing --------------------------------------------------------------------------------- */

static mha_status write_tensors(const char *path, const mha_tensor_to_write *tensors, int n,
                                mha_error *error) {
  const mha_file_to_write file = {.tensors = tensors, .n = n};
  return mha_safetensors_write(path, &file, error);
}

#define STRANGE "a\"\\/\xC3\xA9\xF0\x9F\x98\x80 \xE2\x80\xA8"

static void written_files_are_read(void **state) {
  static const float numbers[] = {1, 2, 3, -1, 4, 5, 6, -1, 7.5F};
  static const float dense[] = {1, 2, 3, 4, 5, 6};
  const mha_tensor_to_write tensors[] = {
      {"z", 2, {2, 3}, numbers, 4, MHA_F32, NULL},
      {STRANGE, 1, {3}, numbers + 4, 0, MHA_F32, NULL},
      {"", 0, {0}, numbers + 8, 0, MHA_F32, NULL},
      {"none", 2, {0, 3}, NULL, 3, MHA_F32, NULL},
      {"thin", 2, {3, 1}, numbers, 4, MHA_F32, NULL},
  };
  mha_raw_tensors read;
  mha_error error;
  size_t n = 0;
  (void)state;
  memset(&error, 0xA5, sizeof error);
  test_expect(write_tensors("files/w", tensors, COUNT(tensors), &error), MHA_OK, &error);
  assert_int_equal(test_files_in("files"), 1);
  unsigned char *bytes = get_file("files/w", &n);
  assert_int_equal(bytes[0] % 8, 0);
  assert_memory_equal(bytes + 1, "\1\0\0\0\0\0\0{", 8);
  assert_int_equal(n, 8 + 256 + bytes[0] + 4 * (6 + 3 + 1 + 0 + 3));
  static const unsigned char one_two[] = {0, 0, 0x80, 0x3F, 0, 0, 0, 0x40};
  assert_memory_equal(bytes + 8 + 256 + bytes[0], one_two, sizeof one_two);
  free(bytes);
  open_well("files/w", false, &read);
  assert_int_equal(read.n, COUNT(tensors));
  assert_memory_equal(find(&read, "z")->data, dense, sizeof dense);
  assert_int_equal(find(&read, "z")->shape[1], 3);
  assert_memory_equal(find(&read, STRANGE)->data, numbers + 4, 12);
  assert_memory_equal(find(&read, "")->data, numbers + 8, 4);
  assert_int_equal(find(&read, "")->rank, 0);
  assert_int_equal(find(&read, "none")->n_elements, 0);
  assert_memory_equal(find(&read, "thin")->data + 4, numbers + 4, 4);
  assert_memory_equal(find(&read, "thin")->data + 8, numbers + 8, 4);
  mha_tensors_close(&read);
}

/* Longer than the writer's buffer, with rows that do not divide it. */
static void long_tensors_are_written(void **state) {
  enum { ROWS = 57, WIDTH = 999, STRIDE = 1003 };
  const size_t row_bytes = WIDTH * sizeof(float);
  static float numbers[ROWS * STRIDE];
  const mha_tensor_to_write tensor = {"w", 2, {ROWS, WIDTH}, numbers, STRIDE, MHA_F32, NULL};
  mha_raw_tensors read;
  mha_error error;
  (void)state;
  for (int i = 0; i < ROWS * STRIDE; i++)
    numbers[i] = (float)i;
  test_expect(write_tensors("files/w", &tensor, 1, &error), MHA_OK, &error);
  open_well("files/w", true, &read);
  for (size_t row = 0; row < ROWS; row++)
    assert_memory_equal(read.items[0].data + row * row_bytes, numbers + row * STRIDE, row_bytes);
  mha_tensors_close(&read);
  test_expect(write_tensors("files/w", NULL, 0, &error), MHA_OK, &error);
  open_well("files/w", true, &read);
  assert_int_equal(read.n, 0);
  mha_tensors_close(&read);
}

static void bad_tensors_are_not_written(void **state) {
  static const float number = 1;
  static const struct {
    const char *name;
    int64_t rows;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {"a\xFF", 1, MHA_ERROR_VALUE, "the tensor name \"a?\" for files/w is not UTF-8; rule: "},
      {"\xC0\x80", 1, MHA_ERROR_VALUE, "\"??\" for files/w is not UTF-8"},
      {"\xED\xA0\x80", 1, MHA_ERROR_VALUE, "for files/w is not UTF-8"},
      {"\xE2\x82", 1, MHA_ERROR_VALUE, "\"??\" for files/w is not UTF-8"},
      {"a\nb", 1, MHA_ERROR_VALUE, "\"a?b\" for files/w holds a control character"},
      {"\xC2\x85", 1, MHA_ERROR_VALUE, "for files/w holds a control character"},
      {"__metadata__", 1, MHA_ERROR_VALUE, "\"__metadata__\" for files/w is reserved"},
      {"first", 1, MHA_ERROR_VALUE, "the tensor name \"first\" for files/w stands twice"},
      {"w", INT64_MAX / 4, MHA_ERROR_OVERFLOW, "the end of tensor \"w\" in files/w overflows"},
      {"w", -1, MHA_ERROR_OVERFLOW, "the end of tensor \"w\" in files/w overflows"},
  };
  (void)state;
  test_put_file("files/w", "old", 3);
  for (size_t i = 0; i < COUNT(rows); i++) {
    const mha_tensor_to_write tensors[2] = {
        {"first", 1, {1}, &number, 0, MHA_F32, NULL},
        {rows[i].name, 1, {rows[i].rows}, &number, 0, MHA_F32, NULL}};
    mha_error error;
    test_expect(write_tensors("files/w", tensors, 2, &error), rows[i].status, &error);
    if (!strstr(error.message, rows[i].fragment))
      test_failed("\"%s\" lacks \"%s\"", error.message, rows[i].fragment);
    size_t n = 0;
    unsigned char *bytes = get_file("files/w", &n);
    assert_int_equal(n, 3);
    assert_memory_equal(bytes, "old", 3);
    free(bytes);
    assert_int_equal(test_files_in("files"), 1);
  }
}

/* A limit on the size of files is an error, and no signal ends the process. */
static void a_failed_write_leaves_the_old_file(void **state) {
  static const float numbers[20000] = {1, 2};
  const mha_tensor_to_write small = {"w", 1, {2}, numbers, 0, MHA_F32, NULL};
  const mha_tensor_to_write large = {"w", 1, {20000}, numbers, 0, MHA_F32, NULL};
  struct rlimit before;
  mha_raw_tensors read;
  mha_error error;
  (void)state;
  test_expect(write_tensors("files/w", &small, 1, &error), MHA_OK, &error);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  static const rlim_t limits[] = {0, 50, 30000};
  for (size_t i = 0; i < COUNT(limits); i++) {
    struct rlimit limit = before;
    limit.rlim_cur = limits[i];
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const mha_status status = write_tensors("files/w", &large, 1, &error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    test_expect(status, MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, "files/w cannot be written: "));
    assert_int_equal(test_files_in("files"), 1);
    open_well("files/w", false, &read);
    assert_int_equal(read.items[0].n_elements, 2);
    assert_memory_equal(read.items[0].data, numbers, 8);
    mha_tensors_close(&read);
  }
  test_expect(write_tensors("absent/w", &small, 1, &error), MHA_ERROR_IO, &error);
  test_expect(write_tensors("files", &small, 1, &error), MHA_ERROR_IO, &error);
}

/* A file may be written anew from its own map. */
static void a_mapped_file_may_be_replaced(void **state) {
  mha_raw_tensors old;
  mha_raw_tensors read;
  mha_error error;
  (void)state;
  put_safetensors("files/w", "{\"w\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}}   ",
                  six, sizeof six);
  open_well("files/w", false, &old);
  const float *numbers = (const float *)(const void *)old.items[0].data;
  const mha_tensor_to_write tensor = {"v", 1, {5}, numbers + 1, 0, MHA_F32, NULL};
  test_expect(write_tensors("files/w", &tensor, 1, &error), MHA_OK, &error);
  assert_memory_equal(old.items[0].data, six, sizeof six);
  open_well("files/w", false, &read);
  assert_memory_equal(find(&read, "v")->data, six + 1, 20);
  mha_tensors_close(&read);
  mha_tensors_close(&old);
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static int enter_folder(void **state) {
  (void)state;
  return test_folder_enter("test_tensors") != 0 || mkdir("files", 0700) != 0;
}

static int clear(void **state) {
  (void)state;
  return test_remove_files("files");
}

static int leave_folder(void **state) {
  (void)state;
  (void)unlink("two.safetensors");
  return rmdir("files") != 0 || test_folder_leave() != 0;
}

#define TEST(name) cmocka_unit_test_teardown(name, clear)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(mapping_and_reading_agree),
      TEST(nothing_stays_mapped),
      TEST(one_file_at_a_time),
      TEST(bad_paths_are_refused),
      TEST(unreadable_files_are_refused),
      TEST(folders_are_listed),
      TEST(other_arrays_in_a_folder),
      TEST(long_paths_are_refused),
      TEST(large_folders_need_few_descriptors),
      TEST(all_16_bit_numbers),
      TEST(float64_rounds_to_nearest),
      TEST(folders_in_every_layout),
      TEST(usable_where_they_lie),
      TEST(shapes_as_text),
      TEST(allocation_failures),
      TEST(written_files_are_read),
      TEST(long_tensors_are_written),
      TEST(bad_tensors_are_not_written),
      TEST(a_failed_write_leaves_the_old_file),
      TEST(a_mapped_file_may_be_replaced),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
