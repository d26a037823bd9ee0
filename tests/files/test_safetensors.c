/* The safetensors reader on bytes in memory: what loads, what is refused and in which words, and
 * that nothing outside the bytes is touched. Writing files is test_tensors.c's. */
#include "support.h"

#include "files/safetensors.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

#define FILE_NAME "some/file.safetensors"

/* One tensor, and an object of one tensor named w. */
#define T(dtype, shape, offsets)                                                                   \
  "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define W(dtype, shape, offsets) "{\"w\":" T(dtype, shape, offsets) "}"

/* ---- Files in memory ------------------------------------------------------------------------- */

typedef struct image {
  unsigned char *bytes;
  size_t n;
} image;

static void put_length(unsigned char *bytes, uint64_t length) {
  for (int i = 0; i < 8; i++)
    bytes[i] = (unsigned char)(length >> 8 * i & 0xFF);
}

/* The length `promised`, the header, and n_data bytes 0, 1, 2 …; fenced. */
static image make_raw(test_pool *pool, uint64_t promised, const char *header, size_t header_bytes,
                      size_t n_data) {
  image file = {NULL, 8 + header_bytes + n_data};
  file.bytes = test_pool_bytes(pool, file.n);
  put_length(file.bytes, promised);
  memcpy(file.bytes + 8, header, header_bytes);
  for (size_t i = 0; i < n_data; i++)
    file.bytes[8 + header_bytes + i] = (unsigned char)i;
  return file;
}

static image make(test_pool *pool, const char *header, size_t n_data) {
  return make_raw(pool, strlen(header), header, strlen(header), n_data);
}

/* Parses with a counting allocator: after a failure nothing is left, and never is much asked for.
 */
static mha_status parse(image file, mha_error *error) {
  test_allocator allocator;
  mha_safetensors parsed;
  const mha_safetensors nothing = {0};
  size_t bytes = 0;
  test_allocator_init(&allocator);
  memset(&parsed, 0xA5, sizeof parsed);
  memset(error, 0xA5, sizeof *error);
  const mha_status status =
      mha_safetensors_parse(FILE_NAME, file.bytes, file.n, &allocator.mha, &parsed, error);
  for (int i = 0; i < allocator.n_ranges; i++)
    bytes += (size_t)(allocator.ranges[i].end - allocator.ranges[i].begin);
  if (bytes > 1000 + 100 * file.n)
    test_failed("%zu bytes were allocated for a file of %zu", bytes, file.n);
  if (status) {
    assert_int_equal(allocator.live, 0);
    assert_memory_equal(&parsed, &nothing, sizeof nothing);
  }
  for (int64_t i = 0; i < parsed.n; i++) {
    const mha_raw_tensor *tensor = &parsed.items[i];
    assert_true(tensor->data >= file.bytes + 8);
    assert_true(tensor->bytes <= (size_t)(file.bytes + file.n - tensor->data));
    assert_true(i == 0 || strcmp(parsed.items[i - 1].name, tensor->name) < 0);
  }
  mha_safetensors_release(&parsed);
  mha_safetensors_release(&parsed);
  test_allocator_check(&allocator);
  return status;
}

/* One sentence of printable text that names the file and the thing. */
static void check_refused(image file, mha_status expected, const char *fragment) {
  mha_error error;
  test_expect(parse(file, &error), expected, &error);
  assert_non_null(memchr(error.message, '\0', sizeof error.message));
  if (!strstr(error.message, fragment) || strncmp(error.message, FILE_NAME ": ", 23) != 0 ||
      !strstr(error.message, "; rule: "))
    test_failed("\"%s\" lacks \"%s\", the file or the rule", error.message, fragment);
  for (const char *c = error.message; *c; c++)
    assert_false((unsigned char)*c < 0x20 || *c == 0x7F);
  assert_int_equal(
      mha_safetensors_parse(FILE_NAME, file.bytes, file.n, NULL, &(mha_safetensors){0}, NULL),
      expected);
}

/* ---- What is refused ------------------------------------------------------------------------- */

typedef struct row {
  const char *header;
  size_t n_data;
  const char *fragment;
} row;

static void check_rows(const row *rows, size_t n) {
  for (size_t i = 0; i < n; i++)
    for (int at_front = 0; at_front < 2; at_front++) {
      test_pool pool = {.at_front = at_front};
      test_note("%s with %zu bytes", rows[i].header, rows[i].n_data);
      check_refused(make(&pool, rows[i].header, rows[i].n_data), MHA_ERROR_FORMAT,
                    rows[i].fragment);
      test_pool_free(&pool);
    }
}

static void bad_lengths(void **state) {
  static const struct {
    uint64_t promised;
    const char *rest;
    const char *fragment;
  } rows[] = {
      {UINT64_MAX, "", "a header length of 18446744073709551615; rule: at most 100000000"},
      {UINT64_MAX, "{}", "a header length of 18446744073709551615"},
      {UINT64_MAX - 7, "{}", "a header length of 18446744073709551608"},
      {UINT64_C(1) << 63, "{}", "a header length of 9223372036854775808"},
      {UINT64_C(1) << 32 | 2, "{}", "a header length of 4294967298"},
      {100000001, "{}", "a header length of 100000001"},
      {100000000, "{}", "a header length of 100000000, but 2 bytes follow"},
      {3, "{}", "a header length of 3, but 2 bytes follow"},
      {1, "", "a header length of 1, but 0 bytes follow"},
      {0, "", "a header length of 0"},
      {0, "{}", "a header length of 0"},
      {1, "{}", "at byte 9, behind {"},
      {1, "{", "at byte 9, behind {"},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_pool pool = {0};
    test_note("a length of %" PRIu64 " before \"%s\"", rows[i].promised, rows[i].rest);
    check_refused(make_raw(&pool, rows[i].promised, rows[i].rest, strlen(rows[i].rest), 0),
                  MHA_ERROR_FORMAT, rows[i].fragment);
    test_pool_free(&pool);
  }
  for (size_t n = 0; n < 8; n++) {
    test_pool pool = {0};
    char fragment[64];
    (void)snprintf(fragment, sizeof fragment, "the file holds %zu bytes", n);
    check_refused((image){test_pool_bytes(&pool, n), n}, MHA_ERROR_FORMAT, fragment);
    test_pool_free(&pool);
  }
}

static void bad_json(void **state) {
  static const row rows[] = {
      {"[]", 0, "byte 8 is 0x5B; rule: the header begins with '{'"},
      {" {}", 0, "byte 8 is 0x20"},
      {"\xEF\xBB\xBF{}", 0, "byte 8 is 0xEF"},
      {"null", 0, "byte 8 is 0x6E"},
      {"{}x", 0, "end of file expected"},
      {"{}{}", 0, "end of file expected"},
      {"{},", 0, "end of file expected"},
      {"{", 0, "string or '}' expected at byte 9, behind {"},
      {"{\"w", 0, "premature end of input at byte 11, behind {\"w"},
      {"{\"w\"}", 0, "':' expected at byte 13"},
      {"{\"w\":}", 0, "unexpected token at byte 14"},
      {"{'w':1}", 0, "string or '}' expected"},
      {"{\"w\":NaN}", 0, "invalid token"},
      {"{\"w\":{}/**/}", 0, "'}' expected"},
      {"{\"w\":" T("F32", "[1]", "[0,4]") ",}", 4, "string or '}' expected at byte 63"},
      {W("F32", "[1,]", "[0,4]"), 4, "unexpected token"},
      {W("F32", "[01]", "[0,4]"), 4, "invalid token"},
      {"{\"\xFF\":1}", 0, "unable to decode byte 0xff"},
      {"{\"\xC0\x80\":1}", 0, "unable to decode byte 0xc0"},
      {"{\"\xED\xA0\x80\":1}", 0, "unable to decode byte 0xed"},
      {"{\"\xF4\x90\x80\x80\":1}", 0, "unable to decode byte 0xf4"},
      {"{\"\xE2\x82\":1}", 0, "unable to decode byte 0xe2"},
      {"{\"\\ud800\":1}", 0, "invalid Unicode '\\uD800'"},
      {"{\"a\nb\":1}", 0, "unexpected newline at byte 11"},
      {"{\"a\\u0000b\":1}", 0, "NUL byte in object key not supported"},
      {"{\"__metadata__\":{\"a\":\"\\u0000\"}}", 0, "\\u0000 is not allowed"},
      {"{\"w\":" T("F32", "[1]", "[0,4]") ",\"w\":" T("F32", "[1]", "[4,8]") "}", 8,
       "duplicate object key at byte 65, behind "},
      {"{\"A\":" T("F32", "[1]", "[0,4]") ",\"\\u0041\":" T("F32", "[1]", "[4,8]") "}", 8,
       "duplicate object key"},
      {"{\"model.layers.0.self_attn.q_proj.weight\":1,\"model.layers.0.self_attn.q_proj.weight\":"
       "1}",
       0, "l.layers.0.self_attn.q_proj.weight\"; rule"},
      {"{\"w\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
       "duplicate object key"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate object key"},
      {W("F32", "[9223372036854775808]", "[0,4]"), 4, "too big integer"},
      {W("F32", "[-9223372036854775809]", "[0,4]"), 4, "too big negative integer"},
      {W("F32", "[1]", "[0,18446744073709551616]"), 4, "too big integer"},
      {W("F32", "[1e400]", "[0,4]"), 4, "real number overflow"},
  };
  (void)state;
  check_rows(rows, COUNT(rows));
}

static void bad_entries(void **state) {
  static const row rows[] = {
      {"{\"__metadata__\":null}", 0, "__metadata__ is no object"},
      {"{\"__metadata__\":[]}", 0, "__metadata__ is no object"},
      {"{\"__metadata__\":\"pt\"}", 0, "__metadata__ is no object"},
      {"{\"__metadata__\":{\"format\":1}}", 0, "the value of \"format\" in __metadata__ is no"},
      {"{\"__metadata__\":{\"a\":\"b\",\"c\":{\"d\":\"e\"}}}", 0,
       "the value of \"c\" in __metadata"},
      {"{\"__metadata__\":{\"a\":null}}", 0, "the value of \"a\" in __metadata__"},
      {"{\"__metadata__\":" T("F32", "[1]", "[0,4]") "}", 4, "the value of \"shape\" in __meta"},
      {"{\"w\":null}", 0, "tensor \"w\" is no object"},
      {"{\"w\":[]}", 0, "tensor \"w\" is no object"},
      {"{\"w\":{}}", 0, "tensor \"w\" has no string dtype"},
      {"{\"w\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "has no string dtype"},
      {"{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor \"w\" has no string dtype"},
      {"{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor \"w\" has no array shape"},
      {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor \"w\" has no array data_offsets"},
      {W("F32", "1", "[0,4]"), 4, "tensor \"w\" has no array shape"},
      {W("F32", "{}", "[0,4]"), 4, "tensor \"w\" has no array shape"},
      {W("F32", "[1]", "4"), 4, "tensor \"w\" has no array data_offsets"},
      {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":0}}", 4,
       "tensor \"w\" has 4 members"},
      {"{\"a\\tb\":" T("F32", "[1]", "[0,4]") "}", 4, "\"a?b\" holds a control character"},
      {"{\"a\\u007fb\":" T("F32", "[1]", "[0,4]") "}", 4, "\"a?b\" holds a control character"},
      {"{\"a\\u009bb\":" T("F32", "[1]", "[0,4]") "}", 4, "\"a?b\" holds a control character"},
      {W("F32", "[-1]", "[0,4]"), 4, "tensor \"w\" has a shape whose element 0 is -1"},
      {W("F32", "[1,1.0]", "[0,4]"), 4, "tensor \"w\" has a shape whose element 1 is no integer"},
      {W("F32", "[\"1\"]", "[0,4]"), 4, "has a shape whose element 0 is no integer"},
      {W("F32", "[true]", "[0,4]"), 4, "has a shape whose element 0 is no integer"},
      {W("F32", "[[1]]", "[0,4]"), 4, "a bracket 4 deep at byte 37"},
      {W("F32", "[\"1\"]", "[0,4]"), 4, "has a shape whose element 0 is no integer"},
      {W("F32", "[4294967296,4294967296]", "[0,4]"), 4, "w\" has a shape whose product overflows"},
      {W("F32", "[0,4294967296,4294967296]", "[0,0]"), 0, "has a shape whose product overflows"},
      {W("F8_XYZ", "[4294967296,4294967296]", "[0,4]"), 4, "has a shape whose product overflows"},
      {W("F32", "[2305843009213693953]", "[0,4]"), 4, "w\" has a size in bits that overflows"},
      {W("F32", "[1]", "[]"), 4, "tensor \"w\" has data_offsets of 0 elements"},
      {W("F32", "[1]", "[0]"), 4, "tensor \"w\" has data_offsets of 1 elements"},
      {W("F32", "[1]", "[0,4,4]"), 4, "tensor \"w\" has data_offsets of 3 elements"},
      {W("F32", "[1]", "[0,\"4\"]"), 4, "of 2 elements that are not both integers"},
      {W("F32", "[1]", "[0.0,4]"), 4, "of 2 elements that are not both integers"},
      {W("F32", "[1]", "[null,4]"), 4, "of 2 elements that are not both integers"},
      {W("F32", "[1]", "[-4,0]"), 4, "tensor \"w\" has data_offsets [-4, 0]; rule: 0 <= begin"},
      {W("F32", "[1]", "[4,0]"), 4, "tensor \"w\" has data_offsets [4, 0]"},
      {W("F32", "[1]", "[0,-4]"), 4, "tensor \"w\" has data_offsets [0, -4]"},
      {W("F32", "[1]", "[0,4]"), 3, "but 3 bytes follow the header, 1 too few"},
      {W("F32", "[1]", "[1,5]"), 4, "but 4 bytes follow the header, 1 too few"},
      {W("F8_XYZ", "[4]", "[1152921504606846976,1152921504606846980]"), 4,
       "tensor \"w\" has data_offsets [1152921504606846976, 1152921504606846980], but 4 bytes"},
      {W("F8_XYZ", "[4]", "[4,0]"), 4, "tensor \"w\" has data_offsets [4, 0]"},
      {W("F32", "[1000,1000]", "[0,4]"), 4,
       "tensor \"w\" has 4 bytes, but shape (1000, 1000) of F32 needs 4000000"},
      {W("F32", "[]", "[0,0]"), 0, "tensor \"w\" has 0 bytes, but shape () of F32 needs 4"},
      {W("F32", "[0]", "[0,4]"), 4, "tensor \"w\" has 4 bytes, but shape (0,) of F32 needs 0"},
      {W("BF16", "[2]", "[0,8]"), 8, "tensor \"w\" has 8 bytes, but shape (2,) of BF16 needs 4"},
      {W("F4", "[3]", "[0,1]"), 1, "but shape (3,) of F4 needs 1 and a part of one"},
  };
  (void)state;
  check_rows(rows, COUNT(rows));
}

static void bad_coverage(void **state) {
  static const row rows[] = {
      {"{}", 1, "1 bytes follow the last tensor"},
      {"{\"__metadata__\":{}}", 7, "7 bytes follow the last tensor"},
      {W("F32", "[1]", "[0,4]"), 9, "5 bytes follow the last tensor"},
      {W("F8_XYZ", "[1]", "[0,4]"), 5, "1 bytes follow the last tensor"},
      {W("F32", "[1]", "[4,8]"), 8, "tensor \"w\" begins at 4, behind a hole of 4 bytes"},
      {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[5,9]") "}", 9,
       "tensor \"b\" begins at 5, behind a hole of 1 bytes"},
      {"{\"b\":" T("F32", "[1]", "[6,10]") ",\"a\":" T("U8", "[4]", "[0,4]") "}", 10,
       "tensor \"b\" begins at 6, behind a hole of 2 bytes"},
      {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[3,7]") "}", 7,
       "tensor \"b\" begins at 3, 1 bytes before the end of \"a\""},
      {"{\"b\":" T("F32", "[1]", "[0,4]") ",\"a\":" T("F32", "[1]", "[0,4]") "}", 4,
       "begins at 0, 4 bytes before the end of"},
      {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("X", "[1]", "[2,4]") "}", 8,
       "tensor \"b\" begins at 2, 6 bytes before the end of \"a\""},
      {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[0]", "[4,4]") "}", 8,
       "tensor \"b\" begins at 4, 4 bytes before the end of \"a\""},
      {W("F32", "[0]", "[4,4]"), 4, "tensor \"w\" begins at 4, behind a hole of 4 bytes"},
  };
  (void)state;
  check_rows(rows, COUNT(rows));
}

/* What does not fit a table of texts. */
static void other_malformed_headers(void **state) {
  test_pool pool = {0};
  char nested[10064];
  (void)state;
  check_refused(make_raw(&pool, 3, "{}", 3, 0), MHA_ERROR_FORMAT, "end of file expected");
  check_refused(make_raw(&pool, 4, "{\0}", 4, 0), MHA_ERROR_FORMAT, "string or '}' expected");
  check_refused(make_raw(&pool, 10, "{\"a\0\":\"b\"}", 10, 0), MHA_ERROR_FORMAT,
                "control character");
  (void)strcpy(nested, "{\"w\":");
  memset(nested + 5, '[', 10000);
  nested[10005] = '\0';
  check_refused(make(&pool, nested, 0), MHA_ERROR_FORMAT, "a bracket 4 deep at byte 15");
  memset(nested + 5, '{', 10000);
  check_refused(make(&pool, nested, 0), MHA_ERROR_FORMAT, "a bracket 4 deep at byte 15");
  (void)strcpy(nested, "{\"[[[[\\\"[\":[[],");
  for (int i = 0; i < 100; i++)
    (void)strcat(nested, "1,");
  check_refused(make(&pool, nested, 0), MHA_ERROR_FORMAT, "more than 64 parts between brackets");
  check_refused(make(&pool, W("I64", "[1,1,1,1,1,1,1,1,1]", "[0,8]"), 8), MHA_ERROR_UNSUPPORTED,
                "tensor \"w\" has 9 dimensions; rule: at most 8");
  test_pool_free(&pool);
}

/* Names and paths of any length leave room for the rule, and are cut between characters. */
static void long_names_in_messages(void **state) {
  char header[2048];
  char path[3000];
  mha_error error;
  mha_safetensors parsed;
  (void)state;
  memset(path, 'p', sizeof path);
  path[sizeof path - 1] = '\0';
  for (int shift = 0; shift < 3; shift++) {
    test_pool pool = {0};
    size_t used = (size_t)snprintf(header, sizeof header, "{\"%.*s", shift, "xx");
    for (int i = 0; i < 400; i++)
      used += (size_t)snprintf(header + used, sizeof header - used, "\xE2\x82\xAC");
    (void)snprintf(header + used, sizeof header - used, "\":%s}", T("F32", "[1]", "[5,9]"));
    image file = make(&pool, header, 9);
    test_expect(mha_safetensors_parse(path, file.bytes, file.n, NULL, &parsed, &error),
                MHA_ERROR_FORMAT, &error);
    assert_non_null(strstr(error.message, "\xE2\x82\xAC...\" begins at 5, behind a hole of 5"));
    assert_non_null(
        strstr(error.message, "; rule: tensors cover the bytes behind the header, eac"));
    test_pool_free(&pool);
  }
}

/* ---- Every cut and every changed byte -------------------------------------------------------- */

static const char valid_header[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"b\":" T("F32", "[2,3]", "[0,24]") ",\"a.\\u00e9\":" T(
        "F16", "[3]", "[24,30]") ",\"zero\":" T("F32", "[0,7]",
                                                "[30,30]") ",\"x\":" T("F8_XYZ", "[5]",
                                                                       "[30,33]") "}"
                                                                                  "  "
                                                                                  " ";

/* A file that is cut anywhere, or has bytes added, is refused, and the cut is not crossed. */
static void truncation_at_every_byte(void **state) {
  const size_t n_header = strlen(valid_header);
  test_pool whole_pool = {0};
  const image whole = make(&whole_pool, valid_header, 33);
  mha_error error;
  (void)state;
  test_expect(parse(whole, &error), MHA_OK, &error);
  for (size_t n = 0; n < whole.n; n++) {
    test_pool pool = {0};
    image cut = {test_pool_bytes(&pool, n), n};
    memcpy(cut.bytes, whole.bytes, n);
    test_note("a file of %zu bytes cut to %zu", whole.n, n);
    check_refused(cut, MHA_ERROR_FORMAT,
                  n < 8              ? "the file holds"
                  : n < 8 + n_header ? "bytes follow; rule: the header lies within the file"
                                     : "too few");
    if (n >= 8 && n < 8 + n_header) { /* with a length that fits */
      put_length(cut.bytes, n - 8);
      assert_int_equal(parse(cut, &error) == MHA_OK, false);
      assert_int_equal(error.status, MHA_ERROR_FORMAT);
    }
    test_pool_free(&pool);
  }
  for (size_t more = 1; more < 3; more++) {
    test_pool pool = {0};
    check_refused(make(&pool, valid_header, 33 + more), MHA_ERROR_FORMAT,
                  more == 1 ? "1 bytes follow the last tensor" : "2 bytes follow the last tensor");
    test_pool_free(&pool);
  }
  test_pool_free(&whole_pool);
}

/* Whatever a byte becomes, the outcome is a status, and what loads lies within the bytes. */
static void every_byte_replaced(void **state) {
  static const unsigned char values[] = {0,   1,   ' ',  '"', ',', '-', '.',  '0',  '9',  ':',
                                         'e', '[', '\\', ']', '{', '}', 0x7F, 0x80, 0xC2, 0xFF};
  test_pool pool = {0};
  const image file = make(&pool, valid_header, 33);
  int accepted = 0;
  int refused = 0;
  (void)state;
  for (size_t i = 0; i < 8 + strlen(valid_header); i++)
    for (size_t k = 0; k < COUNT(values); k++) {
      const unsigned char before = file.bytes[i];
      mha_error error;
      file.bytes[i] = values[k];
      test_note("byte %zu = 0x%02X", i, values[k]);
      const mha_status status = parse(file, &error);
      assert_true(status == MHA_OK || status == MHA_ERROR_FORMAT);
      accepted += status == MHA_OK;
      refused += status != MHA_OK;
      file.bytes[i] = before;
    }
  assert_true(accepted > 100 && refused > 1000);
  test_pool_free(&pool);
}

/* ---- What loads ------------------------------------------------------------------------------ */

static void load(test_pool *pool, const char *header, size_t n_data, mha_safetensors *parsed) {
  mha_error error;
  const image file = make(pool, header, n_data);
  test_note("%s", header);
  memset(&error, 0xA5, sizeof error);
  test_expect(mha_safetensors_parse(FILE_NAME, file.bytes, file.n, NULL, parsed, &error), MHA_OK,
              &error);
}

static void check_names(const char *header, size_t n_data, int n, const char *const *names) {
  test_pool pool = {0};
  mha_safetensors parsed;
  load(&pool, header, n_data, &parsed);
  assert_int_equal(parsed.n, n);
  for (int i = 0; i < n; i++)
    assert_string_equal(parsed.items[i].name, names[i]);
  mha_safetensors_release(&parsed);
  assert_int_equal(parsed.n, 0);
  test_pool_free(&pool);
}

static void odd_files_load(void **state) {
  static const char *const w[] = {"w"};
  static const char *const empty[] = {""};
  static const char *const quoted[] = {"a\"b"};
  static const char *const letters[] = {"A/\\\xC3\xA9\xF0\x9F\x98\x80"};
  static const char *const three[] = {"a", "ab", "b"};
  static const char *const shy[] = {"__metadata"};
  (void)state;
  check_names("{}", 0, 0, NULL);
  check_names("{}      ", 0, 0, NULL);
  check_names("{\"__metadata__\":{}}", 0, 0, NULL);
  check_names("{\"__metadata__\":{\"format\":\"pt\",\"\":\"\\n\\u001b\"}}", 0, 0, NULL);
  check_names(W("F32", "[1]", "[0,4]") "   \n\t ", 4, 1, w);
  check_names("{ \"w\" :\n" T("F32", " [ 1 ] ", "[ 0 , 4 ]") " }", 4, 1, w);
  check_names("{\"w\":{\"data_offsets\":[0,4],\"shape\":[],\"dtype\":\"F32\"}}", 4, 1, w);
  check_names("{\"\":" T("F32", "[1]", "[0,4]") "}", 4, 1, empty);
  check_names("{\"a\\\"b\":" T("F32", "[1]", "[0,4]") "}", 4, 1, quoted);
  check_names("{\"\\u0041\\/\\\\\\u00e9\\ud83d\\ude00\":" T("F32", "[1]", "[0,4]") "}", 4, 1,
              letters);
  check_names("{\"__metadata\":" T("F32", "[1]", "[0,4]") "}", 4, 1, shy);
  /* neither in the order of names nor of places */
  check_names("{\"b\":" T("U8", "[1]", "[1,2]") ",\"a\":" T("U8", "[1]", "[2,3]") ",\"ab\":" T(
                  "U8", "[1]", "[0,1]") "}",
              3, 3, three);
  /* without numbers, at the beginning, between two and at the end */
  check_names("{\"b\":" T("F32", "[0]", "[0,0]") ",\"a\":" T("F32", "[1]", "[0,4]") ",\"ab\":" T(
                  "F32", "[3,0]", "[4,4]") "}",
              4, 3, three);
}

static void tensors_are_described(void **state) {
  test_pool pool = {0};
  mha_safetensors parsed;
  (void)state;
  load(&pool, valid_header, 33, &parsed);
  assert_int_equal(parsed.n, 4);
  const mha_raw_tensor *t = parsed.items;
  assert_string_equal(t[0].name, "a.\xC3\xA9");
  assert_string_equal(t[1].name, "b");
  assert_string_equal(t[2].name, "x");
  assert_string_equal(t[3].name, "zero");
  assert_string_equal(t[0].type, "F16");
  assert_string_equal(t[2].type, "F8_XYZ");
  assert_int_equal(t[0].element, MHA_RAW_F16);
  assert_int_equal(t[1].element, MHA_RAW_F32);
  assert_int_equal(t[2].element, MHA_RAW_OTHER);
  assert_int_equal(t[1].rank, 2);
  assert_int_equal(t[1].shape[0], 2);
  assert_int_equal(t[1].shape[1], 3);
  assert_int_equal(t[1].n_elements, 6);
  assert_int_equal(t[1].bytes, 24);
  assert_int_equal(t[1].data[0], 0);
  assert_int_equal(t[0].data[0], 24);
  assert_int_equal(t[2].data[0], 30);
  assert_int_equal(t[2].bytes, 3);
  assert_int_equal(t[2].n_elements, 5);
  assert_int_equal(t[3].n_elements, 0);
  assert_int_equal(t[3].shape[1], 7);
  for (int i = 0; i < 4; i++)
    assert_false(t[i].big_endian || t[i].column_major);
  mha_safetensors_release(&parsed);
  test_pool_free(&pool);
}

/* Eight elements of each type fill as many bytes as the type has bits. */
static void types_have_their_sizes(void **state) {
  static const struct {
    const char *text;
    size_t bits;
    mha_raw_type element;
  } rows[] = {
      {"BOOL", 8, MHA_RAW_OTHER},    {"U8", 8, MHA_RAW_OTHER},      {"I8", 8, MHA_RAW_OTHER},
      {"F8_E5M2", 8, MHA_RAW_OTHER}, {"F8_E4M3", 8, MHA_RAW_OTHER}, {"F8_E8M0", 8, MHA_RAW_OTHER},
      {"I16", 16, MHA_RAW_OTHER},    {"U16", 16, MHA_RAW_OTHER},    {"F16", 16, MHA_RAW_F16},
      {"BF16", 16, MHA_RAW_BF16},    {"I32", 32, MHA_RAW_OTHER},    {"U32", 32, MHA_RAW_OTHER},
      {"F32", 32, MHA_RAW_F32},      {"F64", 64, MHA_RAW_F64},      {"I64", 64, MHA_RAW_OTHER},
      {"U64", 64, MHA_RAW_OTHER},    {"C64", 64, MHA_RAW_OTHER},    {"F4", 4, MHA_RAW_OTHER},
      {"F6_E2M3", 6, MHA_RAW_OTHER}, {"F6_E3M2", 6, MHA_RAW_OTHER},
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    test_pool pool = {0};
    char header[128];
    mha_safetensors parsed;
    (void)snprintf(header, sizeof header, W("%s", "[2,4]", "[0,%zu]"), rows[i].text, rows[i].bits);
    load(&pool, header, rows[i].bits, &parsed);
    assert_int_equal(parsed.items[0].element, rows[i].element);
    assert_string_equal(parsed.items[0].type, rows[i].text);
    mha_safetensors_release(&parsed);
    (void)snprintf(header, sizeof header, W("%s", "[2,4]", "[0,%zu]"), rows[i].text,
                   rows[i].bits + 1);
    check_refused(make(&pool, header, rows[i].bits + 1), MHA_ERROR_FORMAT, rows[i].text);
    test_pool_free(&pool);
  }
}

/* What a file calls its types is shown as text, whatever it is. */
static void unknown_types(void **state) {
  test_pool pool = {0};
  mha_safetensors parsed;
  char type[200];
  char header[400];
  (void)state;
  load(&pool, W("\\u001b[2J\\n", "[7]", "[0,3]"), 3, &parsed);
  assert_string_equal(parsed.items[0].type, "?[2J?");
  mha_safetensors_release(&parsed);
  memset(type, 'x', sizeof type);
  type[sizeof type - 1] = '\0';
  (void)snprintf(header, sizeof header, W("%s", "[7]", "[0,3]"), type);
  load(&pool, header, 3, &parsed);
  assert_int_equal(strlen(parsed.items[0].type), 67);
  assert_memory_equal(parsed.items[0].type + 60, "xxxx...", 8);
  mha_safetensors_release(&parsed);
  test_pool_free(&pool);
}

/* Numbers are where they are: any bits, at any address. */
static void payloads_are_not_looked_at(void **state) {
  static const unsigned char numbers[8] = {0x01, 0x00, 0x80, 0x7F, 0x00, 0x00, 0x80, 0xFF};
  (void)state;
  for (size_t spaces = 0; spaces < 4; spaces++) {
    test_pool pool = {0};
    char header[128];
    float converted[2];
    uint32_t bits[2];
    mha_error error;
    mha_safetensors parsed;
    (void)snprintf(header, sizeof header, "%s%.*s", W("F32", "[2]", "[0,8]"), (int)spaces, "   ");
    const image file = make(&pool, header, 8);
    memcpy(file.bytes + file.n - 8, numbers, 8);
    test_expect(mha_safetensors_parse(FILE_NAME, file.bytes, file.n, NULL, &parsed, &error), MHA_OK,
                &error);
    assert_ptr_equal(parsed.items[0].data, file.bytes + file.n - 8);
    mha_tensor_convert(&parsed.items[0], converted);
    memcpy(bits, converted, sizeof bits);
    assert_int_equal(bits[0], 0x7F800001); /* a NaN keeps its bits */
    assert_int_equal(bits[1], 0xFF800000);
    mha_safetensors_release(&parsed);
    test_pool_free(&pool);
  }
}

static void many_tensors(void **state) {
  enum { N = 5000 };
  static char header[N * 80];
  test_pool pool = {0};
  mha_safetensors parsed;
  size_t used = 0;
  (void)state;
  for (int i = 0; i < N; i++)
    used += (size_t)snprintf(header + used, sizeof header - used,
                             "%s\"t%d\":" T("U8", "[1]", "[%d,%d]"), i ? "," : "{", i, N - 1 - i,
                             N - i);
  (void)snprintf(header + used, sizeof header - used, "}");
  load(&pool, header, N, &parsed);
  test_note("many tensors");
  assert_int_equal(parsed.n, N);
  for (int i = 0; i < N; i++) {
    const int place = N - 1 - atoi(parsed.items[i].name + 1);
    assert_int_equal(*parsed.items[i].data, place & 0xFF);
    assert_true(i == 0 || strcmp(parsed.items[i - 1].name, parsed.items[i].name) < 0);
  }
  mha_safetensors_release(&parsed);
  test_pool_free(&pool);
}

/* ---- Memory that runs out -------------------------------------------------------------------- */

/* In jansson's place: fails at the n-th call as malloc does. */
static int64_t calls, fail_at, live;

static void *failing_malloc(size_t bytes) {
  if (++calls == fail_at) {
    errno = ENOMEM;
    return NULL;
  }
  live++;
  return malloc(bytes);
}

static void counting_free(void *memory) {
  live -= memory != NULL;
  free(memory);
}

static void allocation_failures(void **state) {
  test_pool pool = {0};
  const image file = make(&pool, valid_header, 33);
  mha_status status = MHA_ERROR_MEMORY;
  (void)state;
  json_set_alloc_funcs(failing_malloc, counting_free);
  for (fail_at = 1; status; fail_at++) {
    mha_error error;
    calls = 0;
    status = parse(file, &error);
    assert_int_equal(live, 0);
    test_note("jansson's allocation %" PRId64, fail_at);
    if (status)
      test_expect(status, MHA_ERROR_MEMORY, &error);
  }
  json_set_alloc_funcs(malloc, free);
  assert_true(fail_at > 40);
  for (int64_t n = 1; n <= 2; n++) {
    test_allocator allocator;
    mha_safetensors parsed;
    mha_error error;
    test_allocator_init(&allocator);
    allocator.fail_at = n;
    status = mha_safetensors_parse(FILE_NAME, file.bytes, file.n, &allocator.mha, &parsed, &error);
    test_expect(status, n == 1 ? MHA_ERROR_MEMORY : MHA_OK, &error);
    assert_int_equal(parsed.n, n == 1 ? 0 : 4);
    mha_safetensors_release(&parsed);
    test_allocator_check(&allocator);
  }
  test_pool_free(&pool);
}

/* A header that cannot be built leaves no file. */
static void allocation_failures_of_the_writer(void **state) {
  static const float numbers[4] = {1, 2, 3, 4};
  const mha_tensor_to_write tensors[2] = {{"a\"", 2, {1, 2}, numbers, 3, MHA_F32, NULL},
                                          {"b", 1, {4}, numbers, 0, MHA_F32, NULL}};
  const mha_file_to_write both = {.tensors = tensors, .n = 2};
  static const char path[] = "test_safetensors.written";
  mha_status status = MHA_ERROR_MEMORY;
  (void)state;
  (void)remove(path);
  json_set_alloc_funcs(failing_malloc, counting_free);
  for (fail_at = 1; status; fail_at++) {
    mha_error error;
    calls = 0;
    status = mha_safetensors_write(path, &both, &error);
    assert_int_equal(live, 0);
    test_note("jansson's allocation %" PRId64, fail_at);
    FILE *file = fopen(path, "rb");
    assert_int_equal(file == NULL, status != MHA_OK);
    if (status)
      test_expect(status, MHA_ERROR_MEMORY, &error);
    else
      assert_int_equal(fclose(file), 0);
  }
  json_set_alloc_funcs(malloc, free);
  assert_true(fail_at > 20);
  assert_int_equal(remove(path), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bad_lengths),
      cmocka_unit_test(bad_json),
      cmocka_unit_test(bad_entries),
      cmocka_unit_test(bad_coverage),
      cmocka_unit_test(other_malformed_headers),
      cmocka_unit_test(long_names_in_messages),
      cmocka_unit_test(truncation_at_every_byte),
      cmocka_unit_test(every_byte_replaced),
      cmocka_unit_test(odd_files_load),
      cmocka_unit_test(tensors_are_described),
      cmocka_unit_test(types_have_their_sizes),
      cmocka_unit_test(unknown_types),
      cmocka_unit_test(payloads_are_not_looked_at),
      cmocka_unit_test(many_tensors),
      cmocka_unit_test(allocation_failures),
      cmocka_unit_test(allocation_failures_of_the_writer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
