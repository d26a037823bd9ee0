/* The GGUF reader on bytes in memory: what loads, what is refused and in which words, and that
 * nothing outside the bytes is touched. Layers from such files are test_load_gguf.c's. */
#include "gguf_image.h"

#include "files/gguf.h"
#include "files/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

#define FILE_NAME "some/file.gguf"

static gguf_image f; /* the file of the running test */

/* ---- Parsing --------------------------------------------------------------------------------- */

/* Parses exactly the first n bytes of the image with a counting allocator: after a failure nothing
 * is left, and never is much asked for. */
static mha_status parse_bytes(const unsigned char *bytes, size_t n, mha_error *error) {
  test_allocator allocator;
  mha_gguf parsed;
  const mha_gguf nothing = {0};
  size_t asked = 0;
  test_allocator_init(&allocator);
  memset(&parsed, 0xA5, sizeof parsed);
  memset(error, 0xA5, sizeof *error);
  const mha_status status = mha_gguf_parse(FILE_NAME, bytes, n, &allocator.mha, &parsed, error);
  assert_int_equal(error->status, status);
  for (int i = 0; i < allocator.n_ranges; i++)
    asked += (size_t)(allocator.ranges[i].end - allocator.ranges[i].begin);
  if (asked > 1000 + 10 * n)
    test_failed("%zu bytes were allocated for a file of %zu", asked, n);
  if (status) {
    assert_int_equal(allocator.live, 0);
    assert_memory_equal(&parsed, &nothing, sizeof nothing);
  }
  for (int64_t i = 0; i < parsed.n; i++) {
    const mha_raw_tensor *tensor = &parsed.items[i];
    assert_true(tensor->data >= bytes);
    assert_true(tensor->bytes <= (size_t)(bytes + n - tensor->data));
    assert_true(i == 0 || strcmp(parsed.items[i - 1].name, tensor->name) < 0);
  }
  mha_gguf_release(&parsed);
  mha_gguf_release(&parsed);
  test_allocator_check(&allocator);
  return status;
}

/* The image, between guard pages. */
static mha_status parse(bool at_front, size_t n, mha_error *error) {
  test_pool pool = {.at_front = at_front};
  unsigned char *bytes = test_pool_bytes(&pool, n);
  memcpy(bytes, f.bytes, n);
  const mha_status status = parse_bytes(bytes, n, error);
  test_pool_free(&pool);
  return status;
}

/* One sentence of printable text that names the file and the thing. */
static void refused(mha_status expected, const char *fragment) {
  mha_error error;
  test_note("%s", fragment);
  for (int at_front = 0; at_front < 2; at_front++) {
    test_expect(parse(at_front, f.n, &error), expected, &error);
    assert_non_null(memchr(error.message, '\0', sizeof error.message));
    if (!strstr(error.message, fragment) || strncmp(error.message, FILE_NAME, 14) != 0 ||
        !strstr(error.message, "; rule: ") || !strstr(error.message, " at byte "))
      test_failed("\"%s\" lacks \"%s\", the file, the place or the rule", error.message, fragment);
    for (const char *c = error.message; *c; c++)
      assert_false((unsigned char)*c < 0x20 || *c == 0x7F);
  }
}

static void malformed(const char *fragment) {
  refused(MHA_ERROR_FORMAT, fragment);
}

/* The image parses; release the result. */
static mha_gguf sound(void) {
  mha_gguf parsed;
  mha_error error;
  test_expect(parse(false, f.n, &error), MHA_OK, &error);
  test_expect(mha_gguf_parse(FILE_NAME, f.bytes, f.n, NULL, &parsed, &error), MHA_OK, &error);
  assert_int_equal(error.message[0], '\0');
  return parsed;
}

/* ---- The head -------------------------------------------------------------------------------- */

static void bad_beginnings(void **state) {
  (void)state;
  for (f.n = 0; f.n < 24; f.n++) {
    const size_t n = f.n;
    char fragment[64];
    gguf_begin(&f, 0, 0);
    f.n = n;
    (void)snprintf(fragment, sizeof fragment, "but %zu follow at byte ", n < 8 ? n % 4 : n % 8);
    malformed(fragment);
  }
  gguf_begin(&f, 0, 0);
  f.bytes[3] = 'X';
  malformed("does not at byte 0; rule: a GGUF file begins with \"GGUF\"");
  gguf_begin_version(&f, 0, 0, 0);
  refused(MHA_ERROR_UNSUPPORTED, "file.gguf is of version 0 at byte 4; rule: 2 or 3");
  gguf_begin_version(&f, 1, 0, 0);
  refused(MHA_ERROR_UNSUPPORTED, "is of version 1 at byte 4");
  gguf_begin_version(&f, 4, 0, 0);
  refused(MHA_ERROR_UNSUPPORTED, "is of version 4 at byte 4");
  gguf_begin_version(&f, 0x03000000, 0, 0);
  refused(MHA_ERROR_UNSUPPORTED,
          "is big-endian by its version, 0x03000000 at byte 4; rule: a little-endian file");
}

static void hostile_counts(void **state) {
  (void)state;
  gguf_begin(&f, UINT64_MAX, 0);
  malformed("has a tensor count of 18446744073709551615 at byte 8; rule: no file of weights has");
  gguf_begin(&f, 262145, 0);
  malformed("has a tensor count of 262145 at byte 8");
  gguf_begin(&f, 262144, 0);
  malformed("has a tensor count of 262144, but 8 bytes follow at byte 8; rule: the file holds");
  gguf_begin(&f, 0, UINT64_C(1) << 63);
  malformed("has a metadata count of 9223372036854775808 at byte 16");
  gguf_begin(&f, 0, 65537);
  malformed("has a metadata count of 65537 at byte 16");
  gguf_begin(&f, 0, 2);
  gguf_pair_u32(&f, "", 1);
  malformed("has a metadata count of 2, but 16 bytes follow at byte 16");
  gguf_begin(&f, 2, 0);
  gguf_tensor(&f, "", 0, 0, 0, GGUF_F32, 0);
  malformed("has a tensor count of 2, but 32 bytes follow at byte 8");
}

/* ---- Metadata -------------------------------------------------------------------------------- */

/* A file of one pair whose value has still to be put. */
static void one_pair(const char *key, uint32_t type) {
  gguf_begin(&f, 0, 1);
  gguf_key(&f, key, type);
}

static void bad_values(void **state) {
  (void)state;
  gguf_begin(&f, 0, 1);
  gguf_u64(&f, UINT64_MAX);
  gguf_u64(&f, 0);
  malformed("has a key of 18446744073709551615 bytes, but 8 follow at byte 32");
  one_pair("a.key", 13);
  gguf_u64(&f, 0);
  malformed("file.gguf: \"a.key\" has a value of type 13 at byte 37; rule: 0 to 12");
  one_pair("a", UINT32_MAX);
  gguf_u64(&f, 0);
  malformed("\"a\" has a value of type 4294967295 at byte 33");
  one_pair("a", GGUF_UINT64);
  gguf_u32(&f, 0);
  malformed("\"a\" has a value of 8 bytes, but 4 follow at byte 37");
  one_pair("a", GGUF_STRING);
  gguf_u64(&f, UINT64_MAX - 40);
  malformed("\"a\" has a string of 18446744073709551575 bytes, but 0 follow at byte 45");
  gguf_begin(&f, 0, 1);
  gguf_text(&f, "a\033[31m\xff");
  gguf_u32(&f, 99);
  gguf_u8(&f, 0);
  malformed("\"a?[31m?\" has a value of type 99");
}

static void bad_arrays(void **state) {
  static const uint32_t types[] = {GGUF_UINT8, GGUF_UINT64, GGUF_STRING, GGUF_ARRAY};
  (void)state;
  for (size_t t = 0; t < COUNT(types); t++)
    for (int k = 0; k < 3; k++) {
      const uint64_t counts[] = {UINT64_MAX, UINT64_C(1) << 61, 9};
      char fragment[128];
      one_pair("a", GGUF_ARRAY);
      gguf_u32(&f, types[t]);
      gguf_u64(&f, counts[k]);
      gguf_u64(&f, 0);
      (void)snprintf(fragment, sizeof fragment,
                     "\"a\" has an array of %llu elements, but 8 bytes follow at byte 41",
                     (unsigned long long)counts[k]);
      malformed(fragment);
    }
  one_pair("a", GGUF_ARRAY);
  gguf_u32(&f, 13);
  gguf_u64(&f, 0);
  malformed("\"a\" has a value of type 13 at byte 37");
  one_pair("a", GGUF_ARRAY);
  gguf_u32(&f, GGUF_STRING);
  gguf_u64(&f, 2);
  gguf_u64(&f, 0);
  gguf_u64(&f, 1);
  malformed("\"a\" has a string of 1 bytes, but 0 follow");
  one_pair("a", GGUF_ARRAY);
  for (int depth = 0; depth < 5; depth++) {
    gguf_u32(&f, depth < 4 ? GGUF_ARRAY : GGUF_UINT8);
    gguf_u64(&f, depth < 4 ? 1 : 0);
  }
  malformed("\"a\" has an array 5 deep at byte 85; rule: arrays nest four deep");
}

static void bad_alignments(void **state) {
  static const struct {
    uint32_t value;
    const char *fragment;
  } rows[] = {
      {0, "\"general.alignment\" is 0 at byte 53; rule: a power of two, at most 16777216"},
      {3, "is 3 at byte 53"},
      {1 << 25, "is 33554432 at byte 53"},
      {UINT32_MAX, "is 4294967295 at byte 53"},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    gguf_begin(&f, 0, 1);
    gguf_pair_u32(&f, "general.alignment", rows[i].value);
    malformed(rows[i].fragment);
  }
  one_pair("general.alignment", GGUF_UINT64);
  gguf_u64(&f, 32);
  malformed("\"general.alignment\" has a value of type 10 at byte 53; rule: the alignment is a");
  gguf_begin(&f, 0, 2);
  gguf_pair_u32(&f, "general.alignment", 32);
  gguf_pair_u32(&f, "general.alignment", 32);
  malformed("\"general.alignment\" stands there once more at byte 86; rule: a key stands once");
}

static void bad_models(void **state) {
  static const char *const names[] = {"a\nb", "\xff", "a\x7f"};
  (void)state;
  for (size_t i = 0; i < COUNT(names); i++) {
    gguf_begin(&f, 0, 1);
    gguf_pair_text(&f, "general.architecture", names[i]);
    malformed(i == 1 ? "\"general.architecture\" is not UTF-8 at byte 64"
                     : "\"general.architecture\" holds a control character");
  }
  one_pair("general.architecture", GGUF_STRING);
  gguf_u64(&f, 2);
  gguf_u8(&f, 'a');
  gguf_u8(&f, 0);
  malformed("\"general.architecture\" holds a zero byte");
  gguf_begin(&f, 0, 1);
  gguf_pair_u32(&f, "general.architecture", 1);
  malformed("\"general.architecture\" has a value of type 4 at byte 56; rule: the architecture is");
  gguf_begin(&f, 0, 2);
  gguf_pair_text(&f, "general.architecture", "x");
  gguf_pair_text(&f, "general.architecture", "x");
  malformed("\"general.architecture\" stands there once more");
}

/* The architecture x, and a key of it whose value has still to be put. */
static void one_of_model(const char *key, uint32_t type) {
  gguf_begin(&f, 0, 2);
  gguf_pair_text(&f, "general.architecture", "x");
  gguf_key(&f, key, type);
}

static void bad_sizes_of_models(void **state) {
  (void)state;
  one_of_model("x.block_count", GGUF_STRING);
  gguf_text(&f, "7");
  malformed("\"x.block_count\" has a value of type 8 at byte 90; rule: a size is a whole number");
  one_of_model("x.block_count", GGUF_FLOAT32);
  gguf_f32(&f, 7.0F);
  malformed("\"x.block_count\" has a value of type 6");
  one_of_model("x.embedding_length", GGUF_INT32);
  gguf_u32(&f, UINT32_MAX);
  malformed("\"x.embedding_length\" has the size 0xffffffff at byte 95; rule: a size is 0 or more");
  one_of_model("x.embedding_length", GGUF_INT8);
  gguf_u8(&f, 0x80);
  malformed("has the size 0x80");
  one_of_model("x.attention.head_count", GGUF_UINT64);
  gguf_u64(&f, UINT64_C(1) << 63);
  malformed("\"x.attention.head_count\" has the size 0x8000000000000000");
  one_of_model("x.rope.scaling.type", GGUF_BOOL);
  gguf_u8(&f, 1);
  malformed("\"x.rope.scaling.type\" has a value of type 7");
  one_of_model("x.attention.head_count", GGUF_ARRAY);
  gguf_u32(&f, GGUF_STRING);
  gguf_u64(&f, 1);
  gguf_text(&f, "");
  malformed("\"x.attention.head_count\" has a value of type 8");
  one_of_model("x.attention.head_count", GGUF_ARRAY);
  gguf_u32(&f, GGUF_ARRAY);
  gguf_u64(&f, 1);
  gguf_u32(&f, GGUF_UINT8);
  gguf_u64(&f, 0);
  malformed("\"x.attention.head_count\" has a value of type 9");
  gguf_begin(&f, 0, 3);
  gguf_pair_text(&f, "general.architecture", "x");
  gguf_pair_u32(&f, "x.block_count", 1);
  gguf_pair_u32(&f, "x.block_count", 1);
  malformed("\"x.block_count\" stands there once more");
}

static void bad_reals_of_models(void **state) {
  static const float numbers[] = {NAN, INFINITY, -1.0F};
  (void)state;
  for (size_t i = 0; i < COUNT(numbers); i++)
    for (int wide = 0; wide < 2; wide++) {
      one_of_model("x.rope.freq_base", wide ? GGUF_FLOAT64 : GGUF_FLOAT32);
      if (wide)
        gguf_f64(&f, (double)numbers[i]);
      else
        gguf_f32(&f, numbers[i]);
      malformed("\"x.rope.freq_base\" is ");
      malformed(" at byte 93; rule: a finite number, 0 or more");
    }
  one_of_model("x.rope.freq_base", GGUF_UINT32);
  gguf_u32(&f, 10000);
  malformed("\"x.rope.freq_base\" has a value of type 4");
  one_of_model("x.attention.layer_norm_rms_epsilon", GGUF_FLOAT64);
  gguf_f64(&f, 1e300);
  malformed("\"x.attention.layer_norm_rms_epsilon\" is 1e+300");
}

/* Every type of value, alone and in arrays, and arrays of arrays: what stands behind them is found.
 */
static void all_values_are_walked_through(void **state) {
  static const unsigned bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  (void)state;
  gguf_begin(&f, 1, 2 * COUNT(bytes) + 1);
  for (uint32_t t = 0; t < COUNT(bytes); t++)
    for (unsigned n = 0; n < 2; n++) {
      gguf_key(&f, n ? "an.array" : "", n ? GGUF_ARRAY : t);
      if (n) {
        gguf_u32(&f, t);
        gguf_u64(&f, 3);
      }
      for (unsigned k = 0; k < 1 + 2 * n; k++)
        if (t == GGUF_STRING)
          gguf_text(&f, "text");
        else if (t == GGUF_ARRAY) {
          gguf_u32(&f, GGUF_UINT16);
          gguf_u64(&f, k);
          for (unsigned i = 0; i < 2 * k; i++)
            gguf_u8(&f, 0xFF);
        } else
          for (unsigned i = 0; i < bytes[t]; i++)
            gguf_u8(&f, 0xFF);
    }
  gguf_key(&f, "deep", GGUF_ARRAY);
  for (int depth = 0; depth < 4; depth++) {
    gguf_u32(&f, depth < 3 ? GGUF_ARRAY : GGUF_UINT8);
    gguf_u64(&f, 1);
  }
  gguf_u8(&f, 1);
  gguf_tensor(&f, "w", 1, 2, 0, GGUF_F32, 0);
  gguf_data(&f, 32, 8);
  mha_gguf parsed = sound();
  assert_int_equal(parsed.n, 1);
  assert_string_equal(parsed.items[0].name, "w");
  assert_memory_equal(parsed.items[0].data, "\1\2\3\4\5\6\7\10", 8);
  assert_null(parsed.model.architecture);
  mha_gguf_release(&parsed);
}

/* ---- Tensors --------------------------------------------------------------------------------- */

/* A file of one tensor with so many bytes of numbers. */
static void one_tensor(const char *name, uint32_t rank, uint64_t n0, uint64_t n1, uint32_t type,
                       uint64_t offset, size_t n_data) {
  gguf_begin(&f, 1, 0);
  gguf_tensor(&f, name, rank, n0, n1, type, offset);
  gguf_data(&f, 32, n_data);
}

static void bad_names(void **state) {
  (void)state;
  one_tensor("a\tb", 1, 1, 0, GGUF_F32, 0, 4);
  malformed("\"a?b\" holds a control character at byte 32; rule: names are text without control");
  one_tensor("\xc3", 1, 1, 0, GGUF_F32, 0, 4);
  malformed("\"?\" is not UTF-8 at byte 32");
  gguf_begin(&f, 1, 0);
  gguf_u64(&f, 3);
  gguf_u8(&f, 'a');
  gguf_u8(&f, 0);
  gguf_u8(&f, 'b');
  gguf_u32(&f, 0);
  gguf_u32(&f, GGUF_F32);
  gguf_u64(&f, 0);
  gguf_data(&f, 32, 4);
  malformed("holds a zero byte at byte 32");
  gguf_begin(&f, 1, 0);
  gguf_u64(&f, UINT64_MAX);
  for (int i = 0; i < 8; i++)
    gguf_u64(&f, 0);
  malformed("has a tensor's name of 18446744073709551615 bytes, but 64 follow at byte 32");
  gguf_begin(&f, 3, 0);
  gguf_tensor(&f, "b", 1, 8, 0, GGUF_F32, 0);
  gguf_tensor(&f, "a", 1, 8, 0, GGUF_F32, 32);
  gguf_tensor(&f, "b", 1, 8, 0, GGUF_F32, 64);
  gguf_data(&f, 32, 96);
  malformed("\"b\" is the name of two tensors, one with numbers at byte ");
}

static void bad_shapes(void **state) {
  (void)state;
  gguf_begin(&f, 1, 0);
  gguf_text(&f, "w");
  gguf_u32(&f, 9);
  for (int k = 0; k < 9; k++)
    gguf_u64(&f, 1);
  gguf_u32(&f, GGUF_F32);
  gguf_u64(&f, 0);
  gguf_data(&f, 32, 4);
  refused(MHA_ERROR_UNSUPPORTED, "\"w\" has 9 dimensions at byte 33; rule: at most 8 are loaded");
  one_tensor("w", 1, 1, 0, GGUF_F32, 0, 4);
  f.bytes[36] = 0xFF;
  malformed("\"w\" has dimensions of 34225520648 bytes, but ");
  one_tensor("w", 1, UINT64_C(1) << 63, 0, GGUF_F32, 0, 4);
  malformed("\"w\" has a dimension of 9223372036854775808 at byte 37; rule: a dimension fits 63");
  one_tensor("w", 2, 1, UINT64_MAX, GGUF_F32, 0, 4);
  malformed("\"w\" has a dimension of 18446744073709551615 at byte 45");
  one_tensor("w", 2, UINT64_C(1) << 32, UINT64_C(1) << 31, GGUF_F32, 0, 4);
  malformed("\"w\" has a shape whose product overflows at byte 45; rule: it fits 63 bits");
  one_tensor("w", 2, 0, INT64_MAX, GGUF_F32, 0, 0);
  mha_gguf parsed = sound();
  mha_gguf_release(&parsed);
  gguf_begin(&f, 1, 0); /* a dimension of 0 does not hide the overflow of the others */
  gguf_text(&f, "w");
  gguf_u32(&f, 3);
  for (int k = 0; k < 3; k++)
    gguf_u64(&f, k ? UINT64_C(1) << 40 : 0);
  gguf_u32(&f, GGUF_F32);
  gguf_u64(&f, 0);
  malformed("\"w\" has a shape whose product overflows");
  one_tensor("w", 1, UINT64_C(1) << 61, 0, GGUF_F64, 0, 4);
  malformed("\"w\" has a size in bytes that overflows at byte 37");
  one_tensor("w", 1, UINT64_C(1) << 62, 0, GGUF_Q8_0, 0, 64);
  malformed("\"w\" has 4899916394579099648 bytes of Q8_0 at offset 0, but the file has 64");
  one_tensor("w", 2, 33, 32, GGUF_Q8_0, 0, 4096);
  malformed("\"w\" has rows of 33 numbers in blocks of 32 at byte 37; rule: rows are whole blocks");
  one_tensor("w", 0, 0, 0, GGUF_Q4_0, 0, 4096);
  malformed("\"w\" has rows of 1 numbers in blocks of 32");
  one_tensor("w", 2, 128, 2, 14, 0, 4096);
  malformed("\"w\" has rows of 128 numbers in blocks of 256");
}

static void bad_places(void **state) {
  (void)state;
  one_tensor("w", 1, 1, 0, GGUF_F32, 4, 64);
  malformed("\"w\" has the offset 4 at an alignment of 32 at byte 49; rule: a multiple of the");
  one_tensor("w", 1, 1, 0, GGUF_F32, UINT64_MAX - 31, 64);
  malformed("\"w\" has the offset 18446744073709551584, but the file has 64 bytes of numbers");
  one_tensor("w", 1, 1, 0, GGUF_F32, 64, 64);
  malformed(
      "\"w\" has 4 bytes of F32 at offset 64, but the file has 0 at byte 49; rule: tensors lie");
  one_tensor("w", 1, 9, 0, GGUF_F32, 32, 64);
  malformed("\"w\" has 36 bytes of F32 at offset 32, but the file has 32");
  one_tensor("w", 1, 1, 0, 77, 64, 64);
  malformed("\"w\" has no room for its numbers at byte 128; rule: tensors do not overlap");
  gguf_begin(&f, 2, 0);
  gguf_tensor(&f, "v", 1, 9, 0, GGUF_F32, 0);
  gguf_tensor(&f, "w", 1, 1, 0, GGUF_F32, 32);
  gguf_data(&f, 32, 64);
  malformed("\"w\" begins before the end of \"v\" at byte 128; rule: tensors do not overlap");
  gguf_begin(&f, 2, 0);
  gguf_tensor(&f, "v", 1, 1, 0, GGUF_F32, 32);
  gguf_tensor(&f, "w", 1, 1, 0, 77, 32);
  gguf_data(&f, 32, 64);
  malformed("\"w\" has no room for its numbers");
  gguf_begin(&f, 3, 0); /* not only of neighbours */
  gguf_tensor(&f, "u", 1, 24, 0, GGUF_F32, 0);
  gguf_tensor(&f, "v", 1, 0, 0, GGUF_F32, 32);
  gguf_tensor(&f, "w", 1, 1, 0, GGUF_F32, 64);
  gguf_data(&f, 32, 96);
  malformed("\"w\" begins before the end of \"u\"");
}

/* ---- Cut and changed ------------------------------------------------------------------------- */

/* A small file with a bit of everything. */
static void put_small(void) {
  gguf_begin(&f, 3, 6);
  gguf_pair_u32(&f, "llama.attention.head_count", 2); /* in front of the name that it begins with */
  gguf_pair_text(&f, "general.architecture", "llama");
  gguf_pair_f32(&f, "llama.rope.freq_base", 1e4F);
  gguf_key(&f, "tokens", GGUF_ARRAY);
  gguf_u32(&f, GGUF_STRING);
  gguf_u64(&f, 2);
  gguf_text(&f, "<s>");
  gguf_text(&f, "");
  gguf_pair_u32(&f, "general.alignment", 64);
  gguf_key(&f, "llama.attention.head_count_kv", GGUF_ARRAY);
  gguf_u32(&f, GGUF_INT32);
  gguf_u64(&f, 2);
  gguf_u32(&f, 1);
  gguf_u32(&f, 1);
  gguf_tensor(&f, "blk.0.attn_q.weight", 2, 32, 2, GGUF_Q8_0, 0);
  gguf_tensor(&f, "unknown", 1, 3, 0, 77, 128);
  gguf_tensor(&f, "blk.0.attn_k.weight", 2, 32, 1, GGUF_Q4_0, 192);
  gguf_data(&f, 64, 192 + 18);
}

static void every_cut_is_refused(void **state) {
  (void)state;
  put_small();
  for (size_t n = 0; n < f.n; n++) {
    mha_error error;
    test_note("%zu of %zu bytes", n, f.n);
    test_expect(parse(n % 2, n, &error), MHA_ERROR_FORMAT, &error);
    assert_non_null(strstr(error.message, "; rule: "));
  }
  mha_gguf parsed = sound();
  mha_gguf_release(&parsed);
}

static void every_change_is_survived(void **state) {
  static const unsigned char changes[] = {0x01, 0x80, 0xFF};
  (void)state;
  put_small();
  for (size_t at = 0; at < f.n; at++)
    for (size_t k = 0; k < COUNT(changes); k++) {
      mha_error error;
      test_note("byte %zu changed by %d", at, changes[k]);
      f.bytes[at] ^= changes[k];
      const mha_status status = parse(at % 2, f.n, &error);
      f.bytes[at] ^= changes[k];
      assert_true(status == MHA_OK || status == MHA_ERROR_FORMAT ||
                  status == MHA_ERROR_UNSUPPORTED);
      assert_int_equal(error.message[0] == '\0', status == MHA_OK);
    }
}

/* ---- What loads ------------------------------------------------------------------------------ */

static const mha_raw_tensor *find(const mha_gguf *parsed, const char *name) {
  for (int64_t i = 0; i < parsed->n; i++)
    if (strcmp(parsed->items[i].name, name) == 0)
      return &parsed->items[i];
  test_failed("no tensor %s", name);
  return NULL;
}

static void small_files_are_told(void **state) {
  (void)state;
  for (uint32_t version = 2; version < 4; version++) {
    put_small();
    f.bytes[4] = (unsigned char)version;
    mha_gguf parsed = sound();
    const mha_raw_tensor *q = find(&parsed, "blk.0.attn_q.weight");
    const mha_raw_tensor *k = find(&parsed, "blk.0.attn_k.weight");
    const mha_raw_tensor *u = find(&parsed, "unknown");
    assert_int_equal(q->rank, 2);
    assert_int_equal(q->shape[0], 2);
    assert_int_equal(q->shape[1], 32);
    assert_int_equal(q->n_elements, 64);
    assert_int_equal(q->element, MHA_RAW_Q8_0);
    assert_string_equal(q->type, "Q8_0");
    assert_int_equal(q->bytes, 68);
    assert_int_equal(q->data[0], 1);
    assert_int_equal(k->bytes, 18);
    assert_int_equal(k->data[0], 193);
    assert_int_equal(u->element, MHA_RAW_OTHER);
    assert_string_equal(u->type, "type 77");
    assert_int_equal(u->bytes, 64);
    assert_string_equal(parsed.model.architecture, "llama");
    assert_int_equal(parsed.model.n_heads, 2);
    assert_int_equal(parsed.model.n_kv_heads, 1);
    assert_true(parsed.model.rope_base == 1e4);
    assert_int_equal(parsed.model.rope, MHA_ROPE_INTERLEAVED);
    mha_gguf_release(&parsed);
  }
}

static void every_type_has_its_size(void **state) {
  static const struct {
    uint32_t type;
    const char *text;
    size_t bytes; /* of 256 numbers */
    mha_raw_type element;
  } rows[] = {
      {0, "F32", 1024, MHA_RAW_F32},      {1, "F16", 512, MHA_RAW_F16},
      {2, "Q4_0", 144, MHA_RAW_Q4_0},     {3, "Q4_1", 160, MHA_RAW_OTHER},
      {6, "Q5_0", 176, MHA_RAW_OTHER},    {7, "Q5_1", 192, MHA_RAW_OTHER},
      {8, "Q8_0", 272, MHA_RAW_Q8_0},     {10, "Q2_K", 84, MHA_RAW_OTHER},
      {12, "Q4_K", 144, MHA_RAW_OTHER},   {14, "Q6_K", 210, MHA_RAW_OTHER},
      {23, "IQ4_XS", 136, MHA_RAW_OTHER}, {24, "I8", 256, MHA_RAW_OTHER},
      {27, "I64", 2048, MHA_RAW_OTHER},   {28, "F64", 2048, MHA_RAW_F64},
      {30, "BF16", 512, MHA_RAW_BF16},    {39, "MXFP4", 136, MHA_RAW_OTHER},
      {4, "type 4", 4096, MHA_RAW_OTHER}, {UINT32_MAX, "type 4294967295", 4096, MHA_RAW_OTHER},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_note("%s", rows[i].text);
    one_tensor("w", 1, 256, 0, rows[i].type, 0, 4096);
    mha_gguf parsed = sound();
    assert_string_equal(parsed.items[0].type, rows[i].text);
    assert_int_equal(parsed.items[0].bytes, rows[i].bytes);
    assert_int_equal(parsed.items[0].element, rows[i].element);
    mha_gguf_release(&parsed);
  }
}

static void empty_files_and_tensors(void **state) {
  (void)state;
  gguf_begin(&f, 0, 0);
  mha_gguf parsed = sound();
  assert_int_equal(parsed.n, 0);
  mha_gguf_release(&parsed);
  gguf_begin(&f, 3, 0); /* without the padding, which nothing needs */
  gguf_tensor(&f, "b", 2, 32, 0, GGUF_Q8_0, 0);
  gguf_tensor(&f, "a", 2, 0, 5, GGUF_F32, 0);
  gguf_tensor(&f, "c", 1, 0, 0, 77, 0);
  parsed = sound();
  assert_int_equal(parsed.n, 3);
  assert_int_equal(parsed.items[0].n_elements, 0);
  assert_int_equal(parsed.items[0].shape[0], 5);
  mha_gguf_release(&parsed);
  one_tensor("number", 0, 0, 0, GGUF_F32, 0, 4);
  parsed = sound();
  assert_int_equal(parsed.items[0].rank, 0);
  assert_int_equal(parsed.items[0].n_elements, 1);
  mha_gguf_release(&parsed);
}

/* ---- The model ------------------------------------------------------------------------------- */

static void models_are_told(void **state) {
  mha_error error;
  mha_file *file = NULL;
  mha_model_info info;
  (void)state;
  gguf_begin(&f, 0, 12);
  gguf_pair_u32(&f, "qwen3.rope.dimension_count", 24);
  gguf_pair_u32(&f, "llama.block_count", 99); /* another architecture's */
  gguf_key(&f, "qwen3.block_count", GGUF_UINT8);
  gguf_u8(&f, 200);
  gguf_key(&f, "qwen3.embedding_length", GGUF_INT64);
  gguf_u64(&f, 256);
  gguf_pair_f32(&f, "qwen3.attention.layer_norm_epsilon", 0.5F);
  gguf_pair_text(&f, "general.architecture", "qwen3");
  gguf_key(&f, "qwen3.attention.head_count", GGUF_ARRAY);
  gguf_u32(&f, GGUF_INT32);
  gguf_u64(&f, 3);
  for (int i = 0; i < 3; i++)
    gguf_u32(&f, 8);
  gguf_key(&f, "qwen3.attention.head_count_kv", GGUF_ARRAY);
  gguf_u32(&f, GGUF_INT32);
  gguf_u64(&f, 3);
  for (uint32_t i = 0; i < 3; i++)
    gguf_u32(&f, i < 1 ? 2 : 4);
  gguf_pair_u32(&f, "qwen3.attention.key_length", 32);
  gguf_pair_u32(&f, "qwen3.attention.value_length", 16);
  gguf_key(&f, "qwen3.rope.freq_base", GGUF_FLOAT64);
  gguf_f64(&f, 0.1);
  gguf_pair_f32(&f, "qwen3.attention.layer_norm_rms_epsilon", 1e-6F);
  test_expect(mha_file_open_bytes(f.bytes, f.n, NULL, &file, &error), MHA_OK, &error);
  MHA_INIT(&info);
  test_expect(mha_file_model(file, &info, &error), MHA_OK, &error);
  assert_string_equal(info.architecture, "qwen3");
  assert_int_equal(info.n_layers, 200);
  assert_int_equal(info.model_width, 256);
  assert_int_equal(info.n_heads, 8);
  assert_int_equal(info.n_kv_heads, 0); /* not the same in all layers */
  assert_int_equal(info.head_size, 32);
  assert_int_equal(info.value_head_size, 16);
  assert_int_equal(info.rotary_size, 24);
  assert_true(info.rope_base == 0.1);
  assert_true(info.norm_epsilon == 1e-6F);
  assert_int_equal(info.rope, MHA_ROPE_HALVES);
  assert_int_equal(info.struct_size, sizeof info);
  mha_file_destroy(file);
}

/* The RMS norm's epsilon counts where both are there, whichever comes first. */
static void the_epsilon_of_the_rms_norm_counts(void **state) {
  static const char *const keys[] = {"x.attention.layer_norm_rms_epsilon",
                                     "x.attention.layer_norm_epsilon"};
  (void)state;
  for (int k = 0; k < 4; k++) {
    gguf_begin(&f, 0, k < 2 ? 3 : 2);
    gguf_pair_text(&f, "general.architecture", "x");
    gguf_pair_f32(&f, keys[k % 2], 1.0F + (float)(k % 2));
    if (k < 2)
      gguf_pair_f32(&f, keys[1 - k], 2.0F - (float)k);
    mha_gguf parsed = sound();
    assert_true(parsed.model.norm_epsilon == (k == 3 ? 2.0F : 1.0F));
    assert_int_equal(parsed.model.rope, MHA_ROPE_NONE);
    mha_gguf_release(&parsed);
  }
}

static void architectures_tell_the_pairs(void **state) {
  static const struct {
    const char *name;
    int32_t rope;
  } rows[] = {
      {"llama", MHA_ROPE_INTERLEAVED},
      {"command-r", MHA_ROPE_INTERLEAVED},
      {"granite", MHA_ROPE_INTERLEAVED},
      {"qwen2", MHA_ROPE_HALVES},
      {"qwen3", MHA_ROPE_HALVES},
      {"gemma3", MHA_ROPE_HALVES},
      {"gpt-oss", MHA_ROPE_HALVES},
      {"gptneox", MHA_ROPE_HALVES},
      {"gpt2", MHA_ROPE_NONE},
      {"bert", MHA_ROPE_NONE},
      {"", MHA_ROPE_NONE},
      {"Llama", MHA_ROPE_NONE},
      {"llama9", MHA_ROPE_NONE},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_note("%s", rows[i].name);
    assert_int_equal(mha_model_rope(rows[i].name), rows[i].rope);
  }
}

static void no_memory_is_told(void **state) {
  test_allocator allocator;
  mha_gguf parsed;
  mha_error error;
  (void)state;
  put_small();
  test_allocator_init(&allocator);
  allocator.fail_at = 1;
  test_expect(mha_gguf_parse(FILE_NAME, f.bytes, f.n, &allocator.mha, &parsed, &error),
              MHA_ERROR_MEMORY, &error);
  assert_string_equal(error.message, "no memory for the header of " FILE_NAME);
  test_allocator_check(&allocator);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bad_beginnings),
      cmocka_unit_test(hostile_counts),
      cmocka_unit_test(bad_values),
      cmocka_unit_test(bad_arrays),
      cmocka_unit_test(bad_alignments),
      cmocka_unit_test(bad_models),
      cmocka_unit_test(bad_sizes_of_models),
      cmocka_unit_test(bad_reals_of_models),
      cmocka_unit_test(all_values_are_walked_through),
      cmocka_unit_test(bad_names),
      cmocka_unit_test(bad_shapes),
      cmocka_unit_test(bad_places),
      cmocka_unit_test(every_cut_is_refused),
      cmocka_unit_test(every_change_is_survived),
      cmocka_unit_test(small_files_are_told),
      cmocka_unit_test(every_type_has_its_size),
      cmocka_unit_test(empty_files_and_tensors),
      cmocka_unit_test(models_are_told),
      cmocka_unit_test(the_epsilon_of_the_rms_norm_counts),
      cmocka_unit_test(architectures_tell_the_pairs),
      cmocka_unit_test(no_memory_is_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
