/* The .npy reader and writer: what loads, what is refused and where, and that no half file stays.
 */
#define _XOPEN_SOURCE 700

#include "folder.h"

#include "files/npy.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define F4 "{'descr': '<f4', 'fortran_order': False, 'shape': "

/* ---- Files in memory ------------------------------------------------------------------------- */

typedef struct image {
  unsigned char *bytes;
  size_t n;
} image;

/* Magic, version, length of `text`, `text`, then the numbers; ends at a guard page. */
static image make(test_pool *pool, int major, const char *text, size_t text_bytes,
                  const void *numbers, size_t n_numbers) {
  const size_t start = major == 1 ? 10 : 12;
  image file = {NULL, start + text_bytes + n_numbers};
  file.bytes = test_pool_bytes(pool, file.n);
  memcpy(file.bytes, "\x93NUMPY", 6);
  file.bytes[6] = (unsigned char)major;
  file.bytes[7] = 0;
  for (size_t i = 8; i < start; i++)
    file.bytes[i] = (unsigned char)(text_bytes >> 8 * (i - 8) & 0xFF);
  memcpy(file.bytes + start, text, text_bytes);
  if (n_numbers > 0)
    memcpy(file.bytes + start + text_bytes, numbers, n_numbers);
  return file;
}

static image make_text(test_pool *pool, int major, const char *text, const void *numbers,
                       size_t n_numbers) {
  return make(pool, major, text, strlen(text), numbers, n_numbers);
}

static mha_status parse(image file, mha_npy_header *header, mha_error *error) {
  memset(error, 0xA5, sizeof *error);
  return mha_npy_parse("some/file.npy", file.bytes, file.n, (int64_t)file.n, header, error);
}

/* One sentence of printable text that names the file. */
static void check_message(const mha_error *error, mha_status status, const char *fragment) {
  assert_int_equal(error->status, status);
  assert_non_null(memchr(error->message, '\0', sizeof error->message));
  if (!strstr(error->message, fragment) || !strstr(error->message, "some/file.npy"))
    test_failed("\"%s\" lacks \"%s\" or the path", error->message, fragment);
  assert_null(strpbrk(error->message, "\n\r\t\x7f\x1b"));
}

static void read_image(image file, mha_npy_kind kind, mha_npy_array *array) {
  mha_error error;
  test_put_file("in.npy", file.bytes, file.n);
  test_expect(mha_npy_read("in.npy", kind, NULL, array, &error), MHA_OK, &error);
  assert_int_equal(error.status, MHA_OK);
  assert_string_equal(error.message, "");
}

/* ---- What loads ------------------------------------------------------------------------------ */

static void versions_load(void **state) {
  static const float numbers[6] = {1, -2, 3.5F, 4, 5, 6e-30F};
  (void)state;
  for (int major = 1; major <= 3; major++) {
    test_pool pool = {0};
    mha_npy_array array;
    read_image(make_text(&pool, major, F4 "(2, 3), }  \n", numbers, sizeof numbers), MHA_NPY_FLOATS,
               &array);
    assert_int_equal(array.rank, 2);
    assert_int_equal(array.shape[0], 2);
    assert_int_equal(array.shape[1], 3);
    assert_int_equal(array.n_elements, 6);
    assert_memory_equal(array.data, numbers, sizeof numbers);
    mha_npy_array_release(&array);
    test_pool_free(&pool);
  }
}

/* Every spelling is the same 2x3 array of float32, 1 … 6. */
static void spellings_load(void **state) {
  static const char *const texts[] = {
      "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
      "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}\n",
      "{'fortran_order':False,'shape':(2,3),'descr':'<f4'}",
      "{\"descr\": \"<f4\", \"fortran_order\": False, \"shape\": (2, 3,)}   \n",
      " \t{ 'descr' : '<f4' , 'fortran_order' : False ,\n 'shape' : ( 2 , 3 , ) , } \n",
  };
  static const float numbers[6] = {1, 2, 3, 4, 5, 6};
  (void)state;
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    test_pool pool = {0};
    mha_npy_array array;
    test_note("%s", texts[i]);
    read_image(make_text(&pool, 1, texts[i], numbers, sizeof numbers), MHA_NPY_FLOATS, &array);
    assert_int_equal(array.rank, 2);
    assert_memory_equal(array.data, numbers, sizeof numbers);
    mha_npy_array_release(&array);
    test_pool_free(&pool);
  }
}

static void swap_items(unsigned char *bytes, size_t n, size_t item) {
  for (size_t i = 0; i < n; i += item)
    for (size_t j = 0; j < item / 2; j++) {
      const unsigned char other = bytes[i + item - 1 - j];
      bytes[i + item - 1 - j] = bytes[i + j];
      bytes[i + j] = other;
    }
}

/* Reads `numbers` of the type once as they are and once as big-endian; both give `expected`. */
static void check_type(const char *type, const void *numbers, size_t item, size_t n,
                       mha_npy_kind kind, const void *expected, size_t expected_bytes) {
  for (int big = 0; big < 2; big++) {
    test_pool pool = {0};
    mha_npy_array array;
    char text[128];
    const char order = item == 1 ? '|' : big ? '>' : '<';
    (void)snprintf(text, sizeof text,
                   "{'descr': '%c%s', 'fortran_order': False, 'shape': (%zu,), }\n", order, type,
                   n);
    test_note("%s", text);
    image file = make_text(&pool, 1, text, numbers, n * item);
    if (order == '>')
      swap_items(file.bytes + file.n - n * item, n * item, item);
    read_image(file, kind, &array);
    assert_int_equal(array.n_elements, n);
    assert_memory_equal(array.data, expected, expected_bytes);
    mha_npy_array_release(&array);
    test_pool_free(&pool);
  }
}

static void types_load(void **state) {
  static const uint16_t halves[] = {0x0000, 0x8000, 0x3C00, 0xC000, 0x7BFF, 0x0001,
                                    0x83FF, 0x0400, 0x7C00, 0xFC00, 0x3555};
  static const float of_halves[] = {0.0F,     -0.0F,     1.0F,          -2.0F,
                                    65504.0F, 0x1p-24F,  -0x1.FF8p-15F, 0x1p-14F,
                                    INFINITY, -INFINITY, 0x1.554p-2F};
  static const double doubles[] = {0.1, -3e38, 1e39, -1e300, 1e-46, 0x1.000001p0, INFINITY};
  static const float of_doubles[] = {0.1F, -3e38F, INFINITY, -INFINITY, 0, 1, INFINITY};
  static const float floats[] = {0.1F, -0.0F, 0x1p-149F, -INFINITY, 3.4e38F};
  static const int32_t ints[] = {0, -1, INT32_MIN, INT32_MAX};
  static const int64_t of_ints[] = {0, -1, INT32_MIN, INT32_MAX};
  static const int64_t longs[] = {0, -1, INT64_MIN, INT64_MAX};
  static const uint8_t bytes[] = {0, 1, 2, 255};
  static const int64_t of_bytes[] = {0, 1, 2, 255};
  (void)state;
  check_type("f2", halves, 2, 11, MHA_NPY_FLOATS, of_halves, sizeof of_halves);
  check_type("f4", floats, 4, 5, MHA_NPY_FLOATS, floats, sizeof floats);
  check_type("f8", doubles, 8, 7, MHA_NPY_FLOATS, of_doubles, sizeof of_doubles);
  check_type("i4", ints, 4, 4, MHA_NPY_INTEGERS, of_ints, sizeof of_ints);
  check_type("i8", longs, 8, 4, MHA_NPY_INTEGERS, longs, sizeof longs);
  check_type("u1", bytes, 1, 4, MHA_NPY_INTEGERS, of_bytes, sizeof of_bytes);
  check_type("u1", bytes, 1, 4, MHA_NPY_BYTES, bytes, sizeof bytes);
  check_type("b1", bytes, 1, 2, MHA_NPY_BYTES, bytes, 2);
}

/* NaN of every width stays NaN. */
static void nan_loads(void **state) {
  static const uint16_t half = 0x7E01;
  static const uint32_t single = UINT32_C(0x7FC00001);
  static const uint64_t wide = UINT64_C(0x7FF8000000000001);
  const void *const numbers[] = {&half, &single, &wide};
  (void)state;
  for (size_t i = 0; i < 3; i++) {
    test_pool pool = {0};
    mha_npy_array array;
    char text[128];
    (void)snprintf(text, sizeof text, "{'descr': '<f%d', 'fortran_order': False, 'shape': (), }",
                   2 << i);
    read_image(make_text(&pool, 1, text, numbers[i], (size_t)2 << i), MHA_NPY_FLOATS, &array);
    assert_true(isnan(*(const float *)array.data));
    mha_npy_array_release(&array);
    test_pool_free(&pool);
  }
}

/* A column-major file is the same array with its first dimension running fastest. */
static void column_major_is_transposed(void **state) {
  static const float columns[6] = {1, 4, 2, 5, 3, 6};
  static const float rows[6] = {1, 2, 3, 4, 5, 6};
  test_pool pool = {0};
  mha_npy_array array;
  double wide[24];
  (void)state;
  read_image(make_text(&pool, 1, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }",
                       columns, sizeof columns),
             MHA_NPY_FLOATS, &array);
  assert_memory_equal(array.data, rows, sizeof rows);
  mha_npy_array_release(&array);

  for (int i = 0; i < 24; i++)
    wide[i] = i;
  read_image(make_text(&pool, 1, "{'descr': '<f8', 'fortran_order': True, 'shape': (2, 3, 4), }",
                       wide, sizeof wide),
             MHA_NPY_FLOATS, &array);
  for (int a = 0; a < 2; a++)
    for (int b = 0; b < 3; b++)
      for (int c = 0; c < 4; c++)
        assert_true(((const float *)array.data)[(a * 3 + b) * 4 + c] == (float)(a + 2 * b + 6 * c));
  mha_npy_array_release(&array);
  test_pool_free(&pool);
}

static void empty_and_scalar_shapes(void **state) {
  static const struct {
    const char *shape;
    int rank;
    int64_t n, first;
  } rows[] = {{"()", 0, 1, 0},
              {"(1,)", 1, 1, 1},
              {"(0,)", 1, 0, 0},
              {"(3, 0)", 2, 0, 3},
              {"(0, 3)", 2, 0, 0},
              {"(1, 1, 1, 1, 1, 1, 1, 1)", 8, 1, 1},
              {"(0, 9223372036854775807)", 2, 0, 0}};
  static const float number = 7;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    for (int column_major = 0; column_major < 2; column_major++) {
      test_pool pool = {0};
      mha_npy_array array;
      char text[128];
      (void)snprintf(text, sizeof text, "{'descr': '<f4', 'fortran_order': %s, 'shape': %s, }",
                     column_major ? "True" : "False", rows[i].shape);
      test_note("%s", text);
      read_image(make_text(&pool, 2, text, &number, rows[i].n ? sizeof number : 0), MHA_NPY_FLOATS,
                 &array);
      assert_int_equal(array.rank, rows[i].rank);
      assert_int_equal(array.n_elements, rows[i].n);
      assert_int_equal(array.shape[0], rows[i].first);
      assert_non_null(array.data);
      if (rows[i].n)
        assert_true(*(const float *)array.data == number);
      mha_npy_array_release(&array);
      test_pool_free(&pool);
    }
}

/* More numbers than the reader takes in one piece. */
static void long_arrays_load(void **state) {
  enum { ROWS = 130, COLUMNS = 301 };
  static double wide[ROWS * COLUMNS];
  static float narrow[ROWS * COLUMNS];
  test_pool pool = {0};
  mha_npy_array array;
  (void)state;
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    wide[i] = i + 0.5;
    narrow[i] = (float)i - 0.5F;
  }
  read_image(make_text(&pool, 1, "{'descr': '<f8', 'fortran_order': True, 'shape': (130, 301), }",
                       wide, sizeof wide),
             MHA_NPY_FLOATS, &array);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++)
      assert_true(((const float *)array.data)[r * COLUMNS + c] == (float)(c * ROWS + r) + 0.5F);
  mha_npy_array_release(&array);
  read_image(make_text(&pool, 1, F4 "(130, 301), }", narrow, sizeof narrow), MHA_NPY_FLOATS,
             &array);
  assert_memory_equal(array.data, narrow, sizeof narrow);
  mha_npy_array_release(&array);
  test_pool_free(&pool);
}

/* The longest header that is read, and one byte more. */
static void header_length_is_capped(void **state) {
  static char text[MHA_NPY_HEADER_LIMIT + 1];
  static const float number = 1;
  test_pool pool = {0};
  mha_npy_header header;
  mha_npy_array array;
  mha_error error;
  (void)state;
  memset(text, ' ', sizeof text);
  memcpy(text, F4 "(1,)}", strlen(F4 "(1,)}"));
  read_image(make(&pool, 1, text, 65535, &number, 4), MHA_NPY_FLOATS, &array);
  assert_true(*(const float *)array.data == number);
  mha_npy_array_release(&array);
  read_image(make(&pool, 2, text, MHA_NPY_HEADER_LIMIT, &number, 4), MHA_NPY_FLOATS, &array);
  assert_true(*(const float *)array.data == number);
  mha_npy_array_release(&array);
  assert_int_equal(
      parse(make(&pool, 3, text, MHA_NPY_HEADER_LIMIT + 1, &number, 4), &header, &error),
      MHA_ERROR_FORMAT);
  check_message(&error, MHA_ERROR_FORMAT, "a header length of 65537 at byte 8");
  test_pool_free(&pool);
}

/* ---- What is refused ------------------------------------------------------------------------- */

#define BAD   MHA_ERROR_FORMAT
#define OTHER MHA_ERROR_UNSUPPORTED

/* Dict literals behind a 10-byte version 1.0 preamble, with this many zero bytes of numbers. */
static const struct {
  const char *text;
  size_t numbers;
  mha_status status;
  const char *fragment;
} malformed[] = {
    /* numbers: too few, too many */
    {F4 "(1,)}", 3, BAD, "3 bytes of numbers at byte 65, but shape (1,) of f4 needs 4"},
    {F4 "(1,)}", 5, BAD, "5 bytes of numbers at byte 65, but shape (1,) of f4 needs 4"},
    {F4 "()}", 0, BAD, "0 bytes of numbers at byte 63, but shape () of f4 needs 4"},
    {F4 "(0,)}", 1, BAD, "1 bytes of numbers at byte 65, but shape (0,) of f4 needs 0"},
    {F4 "(3, 0)}", 4, BAD, "but shape (3, 0) of f4 needs 0"},
    {F4 "(1000000, 1000000)}", 4, BAD, "shape (1000000, 1000000) of f4 needs 4000000000000"},
    /* shape */
    {F4 "(4294967296, 4294967296)}", 0, BAD, "a shape whose product overflows at byte 61"},
    {F4 "(0, 4294967296, 4294967296)}", 0, BAD, "a shape whose product overflows at byte 61"},
    {F4 "(4611686018427387904,)}", 0, BAD, "numbers whose size overflows at byte"},
    {F4 "(9223372036854775808,)}", 0, BAD, "a dimension that overflows at byte 61"},
    {F4 "(99999999999999999999999,)}", 0, BAD, "a dimension that overflows at byte 61"},
    {F4 "(-1,)}", 4, BAD, "a negative dimension at byte 61"},
    {F4 "(2, -3)}", 24, BAD, "a negative dimension at byte 64"},
    {F4 "(1)}", 4, BAD, "a number in brackets at byte 61"},
    {F4 "1}", 4, BAD, "an unexpected character at byte 60"},
    {F4 "[1, 1]}", 4, BAD, "an unexpected character at byte 60"},
    {F4 "(,)}", 4, BAD, "no dimension at byte 61"},
    {F4 "(1,,1)}", 4, BAD, "no dimension at byte 63"},
    {F4 "(1 1)}", 4, BAD, "an unexpected character at byte 63"},
    {F4 "(1.0,)}", 4, BAD, "an unexpected character at byte 62"},
    {F4 "(1L,)}", 4, BAD, "an unexpected character at byte 62"},
    {F4 "(01,)}", 4, BAD, "a leading zero at byte 61"},
    {F4 "(0x1,)}", 4, BAD, "an unexpected character at byte 62"},
    {F4 "(True,)}", 4, BAD, "no dimension at byte 61"},
    {F4 "(1,", 4, BAD, "the header's early end at byte 63"},
    {F4 "(", 4, BAD, "the header's early end at byte 61"},
    {F4 "(1,)", 4, BAD, "the header's early end at byte 64"},
    {F4 "(1,1,1,1,1,1,1,1,1)}", 4, OTHER, "more than 8 dimensions at byte 77"},
    /* fortran_order */
    {"{'descr': '<f4', 'fortran_order': false, 'shape': (1,)}", 4, BAD,
     "no Python truth value at byte 44"},
    {"{'descr': '<f4', 'fortran_order': TRUE, 'shape': (1,)}", 4, BAD,
     "no Python truth value at byte 44"},
    {"{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", 4, BAD,
     "no Python truth value at byte 44"},
    {"{'descr': '<f4', 'fortran_order': 'True', 'shape': (1,)}", 4, BAD,
     "no Python truth value at byte 44"},
    {"{'descr': '<f4', 'fortran_order': Truex, 'shape': (1,)}", 4, BAD,
     "an unexpected character at byte 48"},
    {"{'descr': '<f4', 'fortran_order': Fals", 4, BAD, "no Python truth value at byte 44"},
    /* descr */
    {"{'descr': '', 'fortran_order': False, 'shape': (1,)}", 4, BAD, "the type \"\" at byte 21"},
    {"{'descr': '<', 'fortran_order': False, 'shape': (1,)}", 4, BAD, "the type \"<\" at byte 21"},
    {"{'descr': '<ixy', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "the type \"<ixy\" at byte 21"},
    {"{'descr': '<f4x', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "the type \"<f4x\" at byte 21"},
    {"{'descr': 'f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "a type without a byte order at byte 21"},
    {"{'descr': '|f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "a type without a byte order at byte 21"},
    {"{'descr': '=f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "a type without a byte order at byte 21"},
    {"{'descr': 'xf4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "a type without a byte order at byte 21"},
    {"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", 4, OTHER,
     "holds pickled objects, descr at byte 21"},
    {"{'descr': 'O', 'fortran_order': False, 'shape': (1,)}", 4, OTHER, "holds pickled objects"},
    {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4, OTHER,
     "holds a structured type, descr at byte 20"},
    {"{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,)}", 8, OTHER,
     "holds a structured type, descr at byte 20"},
    {"{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", 8, OTHER, "the type \"<c8\""},
    {"{'descr': '<i2', 'fortran_order': False, 'shape': (1,)}", 2, OTHER, "the type \"<i2\""},
    {"{'descr': '<f16', 'fortran_order': False, 'shape': (1,)}", 16, OTHER, "the type \"<f16\""},
    {"{'descr': '<U7', 'fortran_order': False, 'shape': (1,)}", 28, OTHER, "the type \"<U7\""},
    {"{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (1,)}", 8, OTHER, "\"<M8[ns]\""},
    {"{'descr': '<f4\\x00', 'fortran_order': False, 'shape': (1,)}", 4, BAD, "at byte 24"},
    {"{'descr': '<f\xc3\xa9', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "not printable ASCII at byte 23"},
    {"{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "the type \"<f4, \" at byte 21"},
    {"{'descr': '<f4\", 'fortran_order': False, 'shape': (1,)}", 4, BAD, "at byte 21"},
    {"{'descr': '<f4", 4, BAD, "the header's early end at byte 24"},
    {"{'descr': None, 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "an unexpected character at byte 20"},
    {"{'descr': '<f4aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', "
     "'fortran_order': False, 'shape': (1,)}",
     4, BAD, "the type \"<f4aaaaaaaaaaaaaaaaaaaaaaaaaaaaa\""},
    /* keys and the dict itself */
    {"{'descr': '<f4', 'fortran_order': False}", 4, BAD, "no key shape before byte 49"},
    {"{'descr': '<f4', 'shape': (1,)}", 4, BAD, "no key fortran_order before byte 40"},
    {"{'fortran_order': False, 'shape': (1,)}", 4, BAD, "no key descr before byte 48"},
    {"{}", 4, BAD, "no key descr before byte 11"},
    {"{'descr': '<f4', 'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "a key that was there before at byte 28"},
    {F4 "(1,), 'extra': 1}", 4, BAD, "an unknown key at byte 67"},
    {"{'Descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "an unknown key at byte 12"},
    {"{descr: '<f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "an unexpected character at byte 11"},
    {"{'descr' '<f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "an unexpected character at byte 19"},
    {"{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "an unexpected character at byte 26"},
    {"{, 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 4, BAD,
     "an unexpected character at byte 11"},
    {F4 "(1,),,}", 4, BAD, "an unexpected character at byte 65"},
    {F4 "(1,)} {", 4, BAD, "text after the dict at byte 66"},
    {F4 "(1,)}x", 4, BAD, "text after the dict at byte 65"},
    {"('descr', '<f4')", 4, BAD, "an unexpected character at byte 10"},
    {"", 4, BAD, "the header's early end at byte 10"},
    {"   \n", 4, BAD, "the header's early end at byte 14"},
    {"{", 4, BAD, "the header's early end at byte 11"},
    {"{{{{{{{{{{{{{{{{", 4, BAD, "an unexpected character at byte 11"},
};

static void malformed_headers(void **state) {
  static const unsigned char zeros[64];
  (void)state;
  for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
    test_pool pool = {0};
    mha_npy_header header;
    mha_npy_header before;
    mha_error error;
    memset(&header, 0x5A, sizeof header);
    before = header;
    test_note("%s", malformed[i].text);
    const image file = make_text(&pool, 1, malformed[i].text, zeros, malformed[i].numbers);
    test_expect(parse(file, &header, &error), malformed[i].status, &error);
    check_message(&error, malformed[i].status, malformed[i].fragment);
    if (malformed[i].status == MHA_ERROR_UNSUPPORTED) /* tells the type */
      memcpy(header.descr, before.descr, sizeof header.descr);
    assert_memory_equal(&header, &before, sizeof header);
    test_pool_free(&pool);
  }
}

/* A zero within the header ends nothing and fits nothing. */
static void zero_bytes_in_the_header(void **state) {
  static const char good[] = F4 "(1,)}  \n";
  const size_t n = sizeof good - 1;
  (void)state;
  for (size_t i = 0; i < n; i++) {
    test_pool pool = {0};
    mha_npy_header header;
    mha_error error;
    char text[sizeof good];
    memcpy(text, good, sizeof good);
    text[i] = '\0';
    test_note("zero at %zu", i);
    test_expect(parse(make(&pool, 1, text, n, "\0\0\0", 4), &header, &error), MHA_ERROR_FORMAT,
                &error);
    check_message(&error, MHA_ERROR_FORMAT, " byte ");
    test_pool_free(&pool);
  }
}

static void malformed_beginnings(void **state) {
  static const struct {
    size_t n;
    const char *bytes;
    const char *fragment;
  } rows[] = {
      {0, "", "the file's early end at byte 0"},
      {5, "\x93NUMP", "the file's early end at byte 5"},
      {10, "\0\0\0\0\0\0\0\0\0\0", "a wrong byte at byte 0"},
      {10, "\x93NUMPZ\x01\0\0\0", "a wrong byte at byte 5"},
      {10, "PK\x03\x04\0\0\0\0\0\0", "seems to be a zip archive; rule: an array is a .npy file"},
      {9, "\2\0\0\0\0\0\0\0{", "seems to be a safetensors file; rule: an array is a .npy file"},
      {5, "1 2 3", "seems to be text; rule: an array is a .npy file"},
      {6, "\x93NUMPY", "the file's early end at byte 6"},
      {7, "\x93NUMPY\x01", "the file's early end at byte 7"},
      {8, "\x93NUMPY\x01\0", "the file's early end at byte 8"},
      {9, "\x93NUMPY\x01\0\x02", "the file's early end at byte 9"},
      {11, "\x93NUMPY\x02\0\x02\0\0", "the file's early end at byte 11"},
      {12, "\x93NUMPY\x04\0\x02\0{}", "version 4.0 at byte 6"},
      {12, "\x93NUMPY\x00\0\x02\0{}", "version 0.0 at byte 6"},
      {12, "\x93NUMPY\x01\x01\x02\0{}", "version 1.1 at byte 6"},
      {12, "\x93NUMPY\x01\0\x03\0{}", "a header length of 3 at byte 8, but 2 bytes follow"},
      {10, "\x93NUMPY\x01\0\xFF\xFF", "a header length of 65535 at byte 8, but 0 bytes follow"},
      {12, "\x93NUMPY\x02\0\xF0\xFF\xFF\xFF", "a header length of 4294967280 at byte 8"},
      {12, "\x93NUMPY\x03\0\xFF\xFF\xFF\xFF", "a header length of 4294967295 at byte 8"},
      {12, "\x93NUMPY\x02\0\x00\x00\x01\x00", "a header length of 65536 at byte 8, but 0"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_pool pool = {0};
    mha_npy_header header;
    mha_error error;
    const image file = {test_pool_bytes(&pool, rows[i].n), rows[i].n};
    memcpy(file.bytes, rows[i].bytes, rows[i].n);
    test_note("row %zu: %s", i, rows[i].fragment);
    test_expect(parse(file, &header, &error), MHA_ERROR_FORMAT, &error);
    check_message(&error, MHA_ERROR_FORMAT, rows[i].fragment);
    test_pool_free(&pool);
  }
}

/* A file cut after any byte is refused with a position, in memory and on disk. */
static void truncation_at_every_byte(void **state) {
  static const float numbers[6] = {1, 2, 3, 4, 5, 6};
  (void)state;
  for (int major = 1; major <= 3; major++) {
    test_pool pool = {0};
    const image whole =
        make_text(&pool, major, F4 "(2, 3), }          \n", numbers, sizeof numbers);
    for (size_t n = 0; n < whole.n; n++) {
      test_pool cut_pool = {0};
      mha_npy_header header;
      mha_npy_array array;
      mha_error error;
      const image cut = {test_pool_bytes(&cut_pool, n), n};
      memcpy(cut.bytes, whole.bytes, n);
      test_note("version %d cut to %zu of %zu bytes", major, n, whole.n);
      test_expect(parse(cut, &header, &error), MHA_ERROR_FORMAT, &error);
      check_message(&error, MHA_ERROR_FORMAT, "at byte ");
      test_put_file("some/file.npy", cut.bytes, n);
      test_expect(mha_npy_read("some/file.npy", MHA_NPY_FLOATS, NULL, &array, &error),
                  MHA_ERROR_FORMAT, &error);
      check_message(&error, MHA_ERROR_FORMAT, "at byte ");
      assert_null(array.data);
      test_pool_free(&cut_pool);
    }
    test_pool_free(&pool);
  }
}

/* Any byte of the header replaced by any other: a clean answer, and if it is accepted, one that
 * fits the file. */
static void every_byte_replaced(void **state) {
  static const float numbers[6] = {1, 2, 3, 4, 5, 6};
  test_pool pool = {0};
  const image file = make_text(&pool, 1, F4 "(2, 3), }  \n", numbers, sizeof numbers);
  (void)state;
  for (size_t at = 0; at < file.n - sizeof numbers; at++) {
    const unsigned char kept = file.bytes[at];
    for (unsigned value = 0; value < 256; value += test_small() ? 5 : 1) {
      mha_npy_header header;
      mha_error error;
      file.bytes[at] = (unsigned char)value;
      const mha_status status = parse(file, &header, &error);
      assert_int_equal(error.status, status);
      if (!status)
        assert_int_equal(
            header.data_offset + header.n_elements * (int64_t)mha_npy_item_bytes(&header), file.n);
      else
        check_message(&error, status == OTHER ? OTHER : BAD, "");
    }
    file.bytes[at] = kept;
  }
  test_pool_free(&pool);
}

static void kinds_are_checked(void **state) {
  static const struct {
    const char *descr;
    size_t item;
    bool floats, bytes, integers;
  } rows[] = {{"<f2", 2, true, false, false}, {"<f4", 4, true, false, false},
              {">f8", 8, true, false, false}, {"<i4", 4, false, false, true},
              {"<i8", 8, false, false, true}, {"|u1", 1, false, true, true},
              {"|b1", 1, false, true, true}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_pool pool = {0};
    char text[128];
    (void)snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (1,)}",
                   rows[i].descr);
    const image file = make_text(&pool, 1, text, "\0\0\0\0\0\0\0", rows[i].item);
    test_put_file("some/file.npy", file.bytes, file.n);
    const bool allowed[] = {rows[i].floats, rows[i].bytes, rows[i].integers};
    for (int kind = MHA_NPY_FLOATS; kind <= MHA_NPY_INTEGERS; kind++) {
      mha_npy_array array;
      mha_error error;
      test_note("%s as kind %d", rows[i].descr, kind);
      test_expect(mha_npy_read("some/file.npy", (mha_npy_kind)kind, NULL, &array, &error),
                  allowed[kind] ? MHA_OK : OTHER, &error);
      if (!allowed[kind])
        check_message(&error, OTHER, rows[i].descr + 1);
      mha_npy_array_release(&array);
    }
    test_pool_free(&pool);
  }
}

static void only_regular_files_are_read(void **state) {
  mha_npy_array array;
  mha_error error;
  (void)state;
  (void)alarm(20); /* a reader that waits for the FIFO's other end is killed */
  assert_int_equal(mkfifo("some/fifo", 0600), 0);
  test_expect(mha_npy_read("some/fifo", MHA_NPY_FLOATS, NULL, &array, &error), MHA_ERROR_IO,
              &error);
  assert_non_null(strstr(error.message, "some/fifo is not a regular file"));
  test_expect(mha_npy_read("some", MHA_NPY_FLOATS, NULL, &array, &error), MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "some is not a regular file"));
  test_expect(mha_npy_read("/dev/zero", MHA_NPY_FLOATS, NULL, &array, &error), MHA_ERROR_IO,
              &error);
  test_expect(mha_npy_read("some/absent.npy", MHA_NPY_FLOATS, NULL, &array, &error), MHA_ERROR_IO,
              &error);
  assert_non_null(strstr(error.message, "some/absent.npy cannot be opened: "));
  assert_null(array.data);
  test_expect(mha_npy_read("some/absent.npy", MHA_NPY_FLOATS, NULL, &array, NULL), MHA_ERROR_IO,
              NULL);
  (void)alarm(0);
  assert_int_equal(unlink("some/fifo"), 0);
}

/* A hole is as good as a disk full of numbers: the sizes go beyond 32 bits before memory runs out.
 */
static void sizes_beyond_32_bits(void **state) {
  test_pool pool = {0};
  test_allocator allocator;
  mha_npy_array array;
  mha_error error;
  (void)state;
  const image file = make_text(&pool, 1, F4 "(5000000000,), }", NULL, 0);
  test_put_file("some/file.npy", file.bytes, file.n);
  if (truncate("some/file.npy", (off_t)file.n + (off_t)5000000000 * 4) != 0) {
    test_pool_free(&pool);
    skip(); /* a file system without holes of this size */
  }
  test_allocator_init(&allocator);
  allocator.fail_at = 2; /* the first is the reader's buffer */
  test_expect(mha_npy_read("some/file.npy", MHA_NPY_FLOATS, &allocator.mha, &array, &error),
              MHA_ERROR_MEMORY, &error);
  assert_non_null(strstr(error.message, "20000000000 bytes"));
  test_allocator_check(&allocator);
  assert_int_equal(truncate("some/file.npy", 0), 0);
  test_pool_free(&pool);
}

static void allocation_failures(void **state) {
  static const double numbers[6] = {1, 2, 3, 4, 5, 6};
  test_pool pool = {0};
  const image file = make_text(&pool, 1, "{'descr': '<f8', 'fortran_order': True, 'shape': (2, 3)}",
                               numbers, sizeof numbers);
  mha_status status = MHA_ERROR_MEMORY;
  int64_t nth = 0;
  (void)state;
  test_put_file("some/file.npy", file.bytes, file.n);
  while (status == MHA_ERROR_MEMORY) {
    test_allocator allocator;
    mha_npy_array array;
    mha_error error;
    test_allocator_init(&allocator);
    allocator.fail_at = ++nth;
    status = mha_npy_read("some/file.npy", MHA_NPY_FLOATS, &allocator.mha, &array, &error);
    assert_int_equal(error.status, status);
    if (status)
      check_message(&error, MHA_ERROR_MEMORY, "no memory");
    else
      mha_npy_array_release(&array);
    assert_null(array.data);
    test_allocator_check(&allocator);
  }
  assert_int_equal(status, MHA_OK);
  assert_true(nth > 2);
  test_pool_free(&pool);
}

static void long_paths_leave_room_in_messages(void **state) {
  char path[4000];
  mha_npy_header header;
  mha_error error;
  (void)state;
  memset(path, 'a', sizeof path);
  memcpy(path + sizeof path - 10, "/last.npy", 10);
  assert_int_equal(mha_npy_parse(path, "\x93NUMPX", 6, 6, &header, &error), MHA_ERROR_FORMAT);
  assert_non_null(strstr(error.message, "aaa/last.npy: a wrong byte at byte 5; rule: "));
  /* the cut never falls within a character: 3 bytes each, and the cut would leave 2 of one */
  for (size_t i = 0; i < sizeof path - 1; i++)
    path[i] = "\xE2\x82\xAC"[i % 3];
  assert_int_equal((unsigned char)mha_shown_path(path)[0], 0xE2);
}

/* ---- The writer ------------------------------------------------------------------------------ */

static void check_written(const char *path, int rank, const int64_t *shape, const float *numbers,
                          int64_t n) {
  mha_npy_array array;
  mha_error error;
  test_expect(mha_npy_read(path, MHA_NPY_FLOATS, NULL, &array, &error), MHA_OK, &error);
  assert_int_equal(array.rank, rank);
  for (int axis = 0; axis < rank; axis++)
    assert_int_equal(array.shape[axis], shape[axis]);
  assert_int_equal(array.n_elements, n);
  assert_memory_equal(array.data, numbers, (size_t)n * sizeof(float));
  mha_npy_array_release(&array);
}

static void round_trips(void **state) {
  static const int64_t shapes[][5] = {
      /* rank, then the shape */
      {0}, {1, 1}, {1, 0}, {2, 3, 0}, {2, 7, 8}, {3, 2, 7, 7}, {4, 3, 5, 11, 13}, {4, 1, 1, 1, 1}};
  static float numbers[3 * 5 * 11 * 13];
  test_random random;
  (void)state;
  test_random_seed(&random, 1);
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    const uint32_t bits = (uint32_t)test_random_bits(&random); /* any pattern, NaN included */
    memcpy(&numbers[i], &bits, sizeof bits);
  }
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    const int rank = (int)shapes[i][0];
    int64_t n = 1;
    for (int axis = 0; axis < rank; axis++)
      n *= shapes[i][axis + 1];
    mha_error error;
    test_expect(mha_npy_write("some/out.npy", rank, shapes[i] + 1, numbers, &error), MHA_OK,
                &error);
    check_written("some/out.npy", rank, shapes[i] + 1, numbers, n);
    assert_int_equal(test_files_in("some"), 1);
  }
  /* the largest header */
  const int64_t wide[MHA_NPY_MAX_RANK] = {0, INT64_MAX, 1, 1, 1, 1, 1, 1};
  mha_error error;
  test_expect(mha_npy_write("some/out.npy", MHA_NPY_MAX_RANK, wide, numbers, &error), MHA_OK,
              &error);
  check_written("some/out.npy", MHA_NPY_MAX_RANK, wide, numbers, 0);
  assert_int_equal(unlink("some/out.npy"), 0);
}

/* The bytes that NumPy itself writes. */
static void written_bytes(void **state) {
  static const char header[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  static const int64_t shape[1] = {2};
  static const float numbers[2] = {1, -2};
  unsigned char expected[136];
  unsigned char got[137];
  (void)state;
  memset(expected, ' ', 128);
  memcpy(expected, "\x93NUMPY\x01\x00\x76\x00", 10);
  memcpy(expected + 10, header, strlen(header));
  expected[127] = '\n';
  memcpy(expected + 128, "\0\0\x80\x3f\0\0\0\xc0", 8);
  assert_int_equal(mha_npy_write("some/out.npy", 1, shape, numbers, NULL), MHA_OK);
  FILE *file = fopen("some/out.npy", "rb");
  assert_non_null(file);
  assert_int_equal(fread(got, 1, sizeof got, file), sizeof expected);
  assert_int_equal(fclose(file), 0);
  assert_memory_equal(got, expected, sizeof expected);
  assert_int_equal(unlink("some/out.npy"), 0);
}

static void staged_files_touch_nothing(void **state) {
  static const int64_t shape[1] = {2};
  static const float first[2] = {1, 2};
  static const float second[2] = {3, 4};
  mha_output output;
  mha_error error;
  (void)state;
  assert_int_equal(mha_npy_write("some/out.npy", 1, shape, first, &error), MHA_OK);
  assert_int_equal(chmod("some/out.npy", 0640), 0);
  assert_int_equal(mha_npy_stage("some/out.npy", 1, shape, second, &output, &error), MHA_OK);
  check_written("some/out.npy", 1, shape, first, 2);
  assert_int_equal(test_files_in("some"), 2);
  mha_output_discard(&output);
  mha_output_discard(&output);
  assert_int_equal(test_files_in("some"), 1);
  assert_int_equal(mha_npy_stage("some/out.npy", 1, shape, second, &output, &error), MHA_OK);
  assert_int_equal(mha_output_commit(&output, &error), MHA_OK);
  check_written("some/out.npy", 1, shape, second, 2);
  struct stat info;
  assert_int_equal(stat("some/out.npy", &info), 0);
  assert_int_equal(info.st_mode & 0777, 0640);
  assert_int_equal(test_files_in("some"), 1);
  assert_int_equal(unlink("some/out.npy"), 0);
}

static void symbolic_links_are_followed(void **state) {
  static const int64_t shape[1] = {2};
  static const float numbers[2] = {1, 2};
  struct stat info;
  mha_error error;
  (void)state;
  assert_int_equal(mkdir("other", 0700), 0);
  test_put_file("other/real.npy", "old", 3);
  assert_int_equal(symlink("../other/real.npy", "some/link.npy"), 0);
  test_expect(mha_npy_write("some/link.npy", 1, shape, numbers, &error), MHA_OK, &error);
  assert_int_equal(lstat("some/link.npy", &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  check_written("other/real.npy", 1, shape, numbers, 2);
  assert_int_equal(unlink("other/real.npy"), 0);
  test_expect(mha_npy_write("some/link.npy", 1, shape, numbers, &error), MHA_OK, &error);
  check_written("other/real.npy", 1, shape, numbers, 2);
  assert_int_equal(unlink("other/real.npy"), 0);
  assert_int_equal(rmdir("other"), 0);
  assert_int_equal(unlink("some/link.npy"), 0);
}

static void only_regular_files_are_replaced(void **state) {
  static const int64_t shape[1] = {2};
  static const float numbers[2] = {1, 2};
  static const char *const targets[] = {"some/fifo",      "some",         "some/", "/dev/null",
                                        "absent/out.npy", "some/absent/", ""};
  (void)state;
  assert_int_equal(mkfifo("some/fifo", 0600), 0);
  for (size_t i = 0; i < sizeof targets / sizeof targets[0]; i++) {
    mha_error error;
    test_note("\"%s\"", targets[i]);
    test_expect(mha_npy_write(targets[i], 1, shape, numbers, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, targets[i]));
    assert_int_equal(test_files_in("some"), 1);
  }
  struct stat info;
  assert_int_equal(stat("/dev/null", &info), 0);
  assert_true(S_ISCHR(info.st_mode));
  assert_int_equal(unlink("some/fifo"), 0);
  char *path = malloc(6000);
  assert_non_null(path);
  memset(path, 'a', 5999);
  path[5999] = '\0';
  assert_int_equal(mha_npy_write(path, 1, shape, numbers, NULL), MHA_ERROR_IO);
  free(path);
}

static void bad_shapes_are_not_written(void **state) {
  static const int64_t negative[2] = {2, -1};
  static const int64_t huge[2] = {INT64_MAX, 2};
  static const int64_t many[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  static const float numbers[2] = {1, 2};
  (void)state;
  assert_int_equal(mha_npy_write("some/out.npy", 2, negative, numbers, NULL), MHA_ERROR_OVERFLOW);
  assert_int_equal(mha_npy_write("some/out.npy", 2, huge, numbers, NULL), MHA_ERROR_OVERFLOW);
  assert_int_equal(mha_npy_write("some/out.npy", 9, many, numbers, NULL), MHA_ERROR_OVERFLOW);
  assert_int_equal(test_files_in("some"), 0);
}

/* A limit on the size of files is an error, and no signal ends the process. */
static void a_failed_write_leaves_the_old_file(void **state) {
  static const int64_t small[1] = {2};
  static const int64_t large[1] = {20000};
  static float numbers[20000];
  struct rlimit before;
  struct rlimit limit;
  mha_error error;
  (void)state;
  assert_int_equal(mha_npy_write("some/out.npy", 1, small, numbers, &error), MHA_OK);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  limit = before;
  limit.rlim_cur = 10000;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const mha_status status = mha_npy_write("some/out.npy", 1, large, numbers, &error);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  test_expect(status, MHA_ERROR_IO, &error);
  assert_non_null(strstr(error.message, "some/out.npy cannot be written: "));
  check_written("some/out.npy", 1, small, numbers, 2);
  assert_int_equal(test_files_in("some"), 1);
  assert_int_equal(unlink("some/out.npy"), 0);
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static int enter_folder(void **state) {
  (void)state;
  return test_folder_enter("test_npy") != 0 || mkdir("some", 0700) != 0;
}

static int leave_folder(void **state) {
  (void)state;
  (void)unlink("in.npy");
  return rmdir("some") != 0 || test_folder_leave() != 0;
}

static int empty_folder(void **state) {
  (void)state;
  (void)unlink("some/file.npy");
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(versions_load),
      cmocka_unit_test(spellings_load),
      cmocka_unit_test(types_load),
      cmocka_unit_test(nan_loads),
      cmocka_unit_test(column_major_is_transposed),
      cmocka_unit_test(empty_and_scalar_shapes),
      cmocka_unit_test(long_arrays_load),
      cmocka_unit_test(header_length_is_capped),
      cmocka_unit_test(malformed_headers),
      cmocka_unit_test(zero_bytes_in_the_header),
      cmocka_unit_test(malformed_beginnings),
      cmocka_unit_test_teardown(truncation_at_every_byte, empty_folder),
      cmocka_unit_test(every_byte_replaced),
      cmocka_unit_test_teardown(kinds_are_checked, empty_folder),
      cmocka_unit_test(only_regular_files_are_read),
      cmocka_unit_test_teardown(sizes_beyond_32_bits, empty_folder),
      cmocka_unit_test_teardown(allocation_failures, empty_folder),
      cmocka_unit_test(long_paths_leave_room_in_messages),
      cmocka_unit_test(round_trips),
      cmocka_unit_test(written_bytes),
      cmocka_unit_test(staged_files_touch_nothing),
      cmocka_unit_test(symbolic_links_are_followed),
      cmocka_unit_test(only_regular_files_are_replaced),
      cmocka_unit_test(bad_shapes_are_not_written),
      cmocka_unit_test(a_failed_write_leaves_the_old_file),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
