/* Entries of a cache as files: there and back in every type and kind of cache, hostile files, a
 * full disk. What becomes of random operations is tests/cache/test_pages.c's. */
#include "folder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Caches with numbers ----------------------------------------------------------------------
 */

enum { G = 2, D = 32, DV = 64, N = 3 };

typedef struct cache_kind {
  int64_t capacity, page_tokens, n_pages, window, rollback;
} cache_kind;

static const cache_kind kinds[] = {
    {.capacity = 60},
    {.capacity = 47},
    {.page_tokens = 16, .n_pages = 20},
    {.page_tokens = 32, .n_pages = 9, .capacity = 50},
    {.capacity = 60, .window = 30, .rollback = 4},
    {.capacity = 50, .window = 20, .rollback = 9},
    {.page_tokens = 16, .n_pages = 20, .capacity = 52, .window = 25},
};

static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16, MHA_Q8_0};

static mha_cache_options options_of(const cache_kind *kind, int32_t type) {
  mha_cache_options o;
  MHA_INIT(&o);
  o.n_entries = N;
  o.capacity = kind->capacity;
  o.n_kv_heads = G;
  o.head_size = D;
  o.value_head_size = DV;
  o.window = kind->window;
  o.rollback = kind->rollback;
  o.page_tokens = kind->page_tokens;
  o.n_pages = kind->n_pages;
  o.type = type;
  return o;
}

static mha_cache *make_cache(const cache_kind *kind, int32_t type) {
  const mha_cache_options o = options_of(kind, type);
  mha_cache *cache = NULL;
  mha_error error;
  test_expect(mha_cache_create(&o, &cache, &error), MHA_OK, &error);
  return cache;
}

/* One token after the other, random numbers. */
static void fill(mha_cache *cache, int64_t entry, int64_t n, uint64_t seed) {
  float k[G * D], v[G * DV];
  const mha_tensor keys = {k, 1, 1, G, D, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor values = {v, 1, 1, G, DV, 0, 0, 0, 0, MHA_F32, 0};
  test_random random;
  mha_error error;
  test_random_seed(&random, seed);
  for (int64_t t = 0; t < n; t++) {
    test_fill_normal(&random, k, G * D, 1.0);
    test_fill_normal(&random, v, G * DV, 1.0);
    test_expect(mha_cache_append(cache, &keys, &values, &entry, NULL, &error), MHA_OK, &error);
  }
}

static const unsigned char *row_at(const mha_cache *cache, int64_t entry, int64_t token, bool value,
                                   size_t *bytes) {
  mha_tensor k, v;
  int64_t row = -1;
  mha_error error;
  test_expect(mha_cache_view(cache, &k, &v, &error), MHA_OK, &error);
  test_expect(mha_cache_row(cache, entry, token, &row, &error), MHA_OK, &error);
  const mha_tensor *t = value ? &v : &k;
  *bytes = mha_element_bytes(t->element, t->row_stride);
  return (const unsigned char *)t->data + (size_t)row * *bytes;
}

static int64_t length_of(const mha_cache *cache, int64_t entry) {
  int64_t length = -1;
  mha_error error;
  test_expect(mha_cache_length(cache, entry, &length, &error), MHA_OK, &error);
  return length;
}

static int64_t first_of(const mha_cache *cache, int64_t entry) {
  int64_t first = length_of(cache, entry), row = 0;
  while (first > 0 && !mha_cache_row(cache, entry, first - 1, &row, NULL))
    first--;
  return first;
}

/* Entry f of `to` has the bytes of entry e of `from`. */
static void same_rows(const mha_cache *to, int64_t f, const mha_cache *from, int64_t e) {
  assert_int_equal(length_of(to, f), length_of(from, e));
  for (int64_t t = first_of(to, f); t < length_of(to, f); t++)
    for (int value = 0; value < 2; value++) {
      size_t bytes = 0;
      const unsigned char *expected = row_at(from, e, t, value, &bytes);
      assert_memory_equal(row_at(to, f, t, value, &bytes), expected, bytes);
    }
}

/* ---- There and back ---------------------------------------------------------------------------
 */

/* Whether an entry of n tokens of a kind of cache may become one of another kind. */
static bool goes(const cache_kind *from, const cache_kind *to, int64_t n) {
  const int64_t first = from->window && n > from->capacity ? n - from->capacity : 0;
  if (to->window == 0)
    return first == 0 && (to->capacity == 0 || n <= to->capacity);
  return first <= (n > to->window ? n - to->window + 1 : 0);
}

/* A file of n tokens in entry 1 of a cache goes into entry 2 of another one, or not. */
static void load_into(const cache_kind *kind, int32_t type, const mha_cache *from, bool may) {
  mha_cache *to = make_cache(kind, type);
  mha_error error;
  fill(to, 2, 17, 6);
  fill(to, 0, 3, 7);
  test_expect(mha_cache_load("entry", to, 2, &error), may ? MHA_OK : MHA_ERROR_LENGTH, &error);
  if (may)
    same_rows(to, 2, from, 1);
  else
    assert_int_equal(length_of(to, 2), 17);
  assert_int_equal(length_of(to, 0), 3);
  mha_cache_destroy(to);
}

/* Each file is written once: the disk is what takes the time. */
static void from_every_kind_to_every_kind(void **state) {
  (void)state;
  for (size_t t = 0; t < COUNT(types); t++)
    for (size_t i = 0; i < COUNT(kinds); i++)
      for (int64_t n = 0; n <= 140; n += n < 40 ? 19 : 46) {
        mha_error error;
        if (!kinds[i].window && kinds[i].capacity && n > kinds[i].capacity)
          continue;
        mha_cache *from = make_cache(&kinds[i], types[t]);
        fill(from, 1, n, 5);
        test_expect(mha_cache_save(from, 1, "entry", &error), MHA_OK, &error);
        assert_int_equal(test_files_in("."), 1);
        for (size_t j = 0; j < COUNT(kinds); j++) {
          test_note("type %d, kind %zu to %zu, %lld tokens", types[t], i, j, (long long)n);
          load_into(&kinds[j], types[t], from, goes(&kinds[i], &kinds[j], n));
        }
        mha_cache_destroy(from);
      }
  assert_int_equal(test_remove_files("."), 0);
}

/* A float32 file becomes what appending the same rows makes. */
static void float32_is_rounded(void **state) {
  (void)state;
  for (size_t t = 1; t < COUNT(types); t++) {
    mha_cache *from = make_cache(&kinds[0], MHA_F32);
    mha_cache *to = make_cache(&kinds[2], types[t]);
    mha_error error;
    fill(from, 0, 30, 9);
    fill(to, 0, 30, 9);
    test_expect(mha_cache_save(from, 0, "entry", &error), MHA_OK, &error);
    test_expect(mha_cache_load("entry", to, 1, &error), MHA_OK, &error);
    same_rows(to, 1, to, 0);
    test_expect(mha_cache_save(to, 1, "entry", &error), MHA_OK, &error);
    test_expect(mha_cache_load("entry", from, 1, &error), MHA_ERROR_UNSUPPORTED, &error);
    assert_int_equal(length_of(from, 1), 0);
    mha_cache_destroy(from);
    mha_cache_destroy(to);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* ---- Files by hand ----------------------------------------------------------------------------
 */

/* A header and zeros behind it. */
static void put_header(const char *header, size_t n_bytes) {
  const size_t n = strlen(header);
  unsigned char *file = test_allocate(8 + n + n_bytes, 1);
  for (size_t i = 0; i < 8; i++)
    file[i] = (unsigned char)((uint64_t)n >> 8 * i & 0xFF);
  memcpy(file + 8, header, n);
  test_put_file("entry", file, 8 + n + n_bytes);
  free(file);
}

#define META(version, type, length, g, d, dv)                                                      \
  "\"__metadata__\":{\"libmha.cache\":\"" version "\",\"type\":\"" type "\",\"length\":\"" length  \
  "\",\"n_kv_heads\":\"" g "\",\"head_size\":\"" d "\",\"value_head_size\":\"" dv "\"}"
#define TENSOR(name, type, shape, begin, end)                                                      \
  ",\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]" \
  "}"
#define GOOD_META META("1", "F32", "3", "2", "32", "64")
#define GOOD_K    TENSOR("k", "F32", "[3,2,32]", "0", "768")
#define GOOD_V    TENSOR("v", "F32", "[3,2,64]", "768", "2304")

typedef struct bad_file {
  const char *header;
  size_t n_bytes;
  mha_status status;
  const char *fragment;
} bad_file;

static const bad_file bad_files[] = {
    {"{" GOOD_META GOOD_K GOOD_V "}", 2304, MHA_OK, ""},
    {"{" META("2", "F32", "3", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "libmha.cache \"2\"; rule: this version reads \"1\""},
    {"{" META("1", "F64", "3", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "type \"F64\"; rule: F32, F16, BF16 or Q8_0"},
    {"{" META("1", "F16", "3", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "tensor \"k\" is F32 (3, 2, 32); rule: by the metadata F16 (tokens, 2, 32)"},
    {"{" META("1", "F32", "-3", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "length \"-3\"; rule: a count of 0 or more"},
    {"{" META("1", "F32", "", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "length \"\""},
    {"{" META("1", "F32", "3 ", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "length \"3 \""},
    {"{" META("1", "F32", "0x3", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "length \"0x3\""},
    {"{" META("1", "F32", "9223372036854775808", "2", "32", "64") GOOD_K GOOD_V "}", 2304,
     MHA_ERROR_FORMAT, "length \"9223372036854775808\""},
    {"{" META("1", "F32", "2", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "has 3 keys, 3 values and length 2; rule: as many keys as values, at most the length"},
    {"{" META("1", "F32", "9223372036854775807", "2", "32", "64") GOOD_K GOOD_V "}", 2304,
     MHA_ERROR_LENGTH, "has 9223372036854775807 tokens"},
    {"{" META("1", "F32", "4", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_LENGTH,
     "has 4 tokens of which those before 1 are gone; rule: only a ring has dropped any"},
    {"{" META("1", "F32", "3", "0", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "n_kv_heads \"0\"; rule: a count of 1 or more"},
    {"{" META("1", "F32", "3", "4", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "(tokens, 4, 32)"},
    {"{" META("1", "F32", "3", "2", "31", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "(tokens, 2, 31)"},
    {"{" META("1", "Q8_0", "3", "2", "32", "64") GOOD_K GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "rule: by the metadata U8 (tokens, 2, 34)"},
    {"{" META("1", "F32", "3", "1", "64", "128") TENSOR("k", "F32", "[3,1,64]", "0", "768")
         TENSOR("v", "F32", "[3,1,128]", "768", "2304") "}",
     2304, MHA_ERROR_SIZE, "has G = 1, d = 64, dv = 128; rule: as the cache, 2, 32, 64"},
    {"{" GOOD_META GOOD_K "}", 768, MHA_ERROR_FORMAT, "has 1 tensors; rule: k and v, and no other"},
    {"{" GOOD_META GOOD_K TENSOR("w", "F32", "[3,2,64]", "768", "2304") "}", 2304, MHA_ERROR_FORMAT,
     "has 2 tensors; rule: k and v"},
    {"{" GOOD_META GOOD_K GOOD_V TENSOR("w", "F32", "[1]", "2304", "2308") "}", 2308,
     MHA_ERROR_FORMAT, "has 3 tensors"},
    {"{" GOOD_META GOOD_K TENSOR("v", "F32", "[1,2,64]", "768", "1280") "}", 1280, MHA_ERROR_FORMAT,
     "has 3 keys, 1 values"},
    {"{" GOOD_META TENSOR("k", "F32", "[6,32]", "0", "768") GOOD_V "}", 2304, MHA_ERROR_FORMAT,
     "tensor \"k\" is F32 (6, 32)"},
    {"{" GOOD_META GOOD_K GOOD_V "}", 2300, MHA_ERROR_FORMAT, "4 too few"},
    {"{" GOOD_META GOOD_K GOOD_V "}", 2305, MHA_ERROR_FORMAT, "1 bytes follow the last tensor"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, MHA_ERROR_FORMAT,
     "has no libmha.cache in its metadata; rule: a file of mha_cache_save has"},
    {"{" META("1", "F32", "0", "2", "32", "64") TENSOR("k", "F32", "[0,2,32]", "0", "0")
         TENSOR("v", "F32", "[0,2,64]", "0", "0") "}",
     0, MHA_OK, ""},
};

static void hostile_files(void **state) {
  (void)state;
  for (size_t i = 0; i < COUNT(bad_files); i++) {
    mha_cache *cache = make_cache(&kinds[2], MHA_F32);
    mha_cache *before = make_cache(&kinds[2], MHA_F32);
    mha_error error;
    test_note("file %zu", i);
    memset(&error, 0xA5, sizeof error);
    fill(cache, 1, 21, 3);
    fill(before, 1, 21, 3);
    put_header(bad_files[i].header, bad_files[i].n_bytes);
    test_expect(mha_cache_load("entry", cache, 1, &error), bad_files[i].status, &error);
    if (!strstr(error.message, bad_files[i].fragment))
      test_failed("\"%s\" lacks \"%s\"", error.message, bad_files[i].fragment);
    if (bad_files[i].status)
      same_rows(cache, 1, before, 1);
    mha_cache_destroy(cache);
    mha_cache_destroy(before);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* Each text of the metadata is asked for by its key. */
static void metadata_that_is_missing(void **state) {
  static const char *const keys[] = {"libmha.cache", "type",      "length",
                                     "n_kv_heads",   "head_size", "value_head_size"};
  (void)state;
  for (size_t i = 0; i < COUNT(keys); i++) {
    mha_cache *cache = make_cache(&kinds[2], MHA_F32);
    char header[] = "{" GOOD_META GOOD_K GOOD_V "}";
    char quoted[32], fragment[64];
    mha_error error;
    (void)snprintf(quoted, sizeof quoted, "\"%s\":", keys[i]);
    (void)snprintf(fragment, sizeof fragment, "has no %s in its metadata", keys[i]);
    char *at = strstr(header, quoted);
    assert_non_null(at);
    at[strlen(quoted) - 3] = '~'; /* the last letter of the key */
    put_header(header, 2304);
    test_expect(mha_cache_load("entry", cache, 1, &error), MHA_ERROR_FORMAT, &error);
    if (!strstr(error.message, fragment))
      test_failed("\"%s\" lacks \"%s\"", error.message, fragment);
    assert_int_equal(length_of(cache, 1), 0);
    mha_cache_destroy(cache);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* ---- Files that are cut or changed ------------------------------------------------------------
 */

static unsigned char *read_entry(size_t *n) {
  FILE *file = fopen("entry", "rb");
  unsigned char *bytes = test_allocate(1 << 20, 1);
  assert_non_null(file);
  *n = fread(bytes, 1, 1 << 20, file);
  assert_int_equal(fclose(file), 0);
  return bytes;
}

/* The file once more, its numbers `more` bytes further on. */
static void move_numbers(const unsigned char *bytes, size_t n, size_t more) {
  unsigned char *moved = test_allocate(n + more, 1);
  size_t header = 0;
  for (size_t i = 0; i < 8; i++)
    header |= (size_t)bytes[i] << 8 * i;
  memcpy(moved, bytes, 8 + header);
  memset(moved + 8 + header, ' ', more);
  memcpy(moved + 8 + header + more, bytes + 8 + header, n - 8 - header);
  for (size_t i = 0; i < 8; i++)
    moved[i] = (unsigned char)((uint64_t)(header + more) >> 8 * i & 0xFF);
  test_put_file("entry", moved, n + more);
  free(moved);
}

/* Loads a file of the rows that entry 0 has, from every place. */
static void load_from_anywhere(mha_cache *cache, const unsigned char *bytes, size_t n) {
  mha_error error;
  for (size_t more = 0; more < 8; more++) {
    test_note("%zu bytes further on", more);
    move_numbers(bytes, n, more);
    test_expect(mha_cache_load("entry", cache, 1, &error), MHA_OK, &error);
    same_rows(cache, 1, cache, 0);
    test_expect(mha_cache_reset(cache, 1, &error), MHA_OK, &error);
  }
}

/* Other writers do not fill up their headers. Each type comes as it is, and rounded from float32.
 */
static void numbers_that_begin_anywhere(void **state) {
  (void)state;
  for (size_t t = 0; t < COUNT(types); t++)
    for (int rounded = 0; rounded < 2; rounded++) {
      mha_cache *from = make_cache(&kinds[2], rounded ? MHA_F32 : types[t]);
      mha_cache *to = make_cache(&kinds[2], types[t]);
      mha_error error;
      size_t n = 0;
      fill(from, 0, 21, 8);
      fill(to, 0, 21, 8);
      test_expect(mha_cache_save(from, 0, "entry", &error), MHA_OK, &error);
      unsigned char *bytes = read_entry(&n);
      load_from_anywhere(to, bytes, n);
      free(bytes);
      mha_cache_destroy(from);
      mha_cache_destroy(to);
    }
  assert_int_equal(test_remove_files("."), 0);
}

/* Blocks that came ready, whose scale, 1, is not the one that rounding would choose. */
static void blocks_are_taken_as_they_are(void **state) {
  enum { BLOCK_BYTES = 34, V_BLOCKS = G * DV / 32 };
  const uint16_t scale = 0x3C00;
  const int64_t from = 0;
  uint16_t blocks[V_BLOCKS * BLOCK_BYTES / 2];
  unsigned char *bytes = (unsigned char *)blocks;
  mha_error error;
  (void)state;
  for (size_t i = 0; i < sizeof blocks; i++)
    bytes[i] = (unsigned char)(i % 5);
  for (size_t block = 0; block < V_BLOCKS; block++)
    memcpy(bytes + block * BLOCK_BYTES, &scale, sizeof scale);
  const mha_tensor k = {blocks, 1, 1, G, D, 0, 0, 0, 0, MHA_Q8_0, 0};
  const mha_tensor v = {blocks, 1, 1, G, DV, 0, 0, 0, 0, MHA_Q8_0, 0};
  mha_cache *cache = make_cache(&kinds[2], MHA_Q8_0);
  test_expect(mha_cache_append(cache, &k, &v, &from, NULL, &error), MHA_OK, &error);
  test_expect(mha_cache_save(cache, from, "entry", &error), MHA_OK, &error);
  test_expect(mha_cache_load("entry", cache, 1, &error), MHA_OK, &error);
  same_rows(cache, 1, cache, from);
  mha_cache_destroy(cache);
  assert_int_equal(test_remove_files("."), 0);
}

/* A new file each time: some file systems write out at once one that is cut short and filled anew,
 * which makes thousands of them slow. */
static void put_anew(const unsigned char *bytes, size_t n) {
  (void)remove("entry");
  test_put_file("entry", bytes, n);
}

/* Whatever comes of it, the entry holds what it held, or what the file says. */
static void try_bytes(mha_cache *cache, const mha_cache *before, const unsigned char *bytes,
                      size_t n) {
  mha_error error;
  put_anew(bytes, n);
  if (mha_cache_load("entry", cache, 1, &error)) {
    same_rows(cache, 1, before, 1);
    return;
  }
  test_expect(mha_cache_reset(cache, 1, &error), MHA_OK, &error);
  fill(cache, 1, 21, 3);
}

static void cut_and_changed_files(void **state) {
  (void)state;
  for (size_t t = 0; t < COUNT(types); t += 3) {
    mha_cache *cache = make_cache(&kinds[2], types[t]);
    mha_cache *before = make_cache(&kinds[2], types[t]);
    mha_error error;
    test_random random;
    size_t n = 0;
    test_random_seed(&random, 17);
    fill(cache, 1, 21, 3);
    fill(before, 1, 21, 3);
    fill(before, 0, 2, 4);
    test_expect(mha_cache_save(before, 0, "entry", &error), MHA_OK, &error);
    unsigned char *bytes = read_entry(&n);
    unsigned char *copy = test_allocate(n, 1);
    for (size_t cut = 0; cut < n; cut += cut < 500 ? 1 : 37) {
      put_anew(bytes, cut);
      if (!mha_cache_load("entry", cache, 1, &error))
        test_failed("%zu of %zu bytes were loaded", cut, n);
      same_rows(cache, 1, before, 1);
    }
    for (int i = 0; i < (test_small() ? 300 : 5000); i++) {
      memcpy(copy, bytes, n);
      for (int64_t k = test_random_range(&random, 1, 4); k > 0; k--)
        copy[test_random_range(&random, 0, 400)] = (unsigned char)test_random_bits(&random);
      try_bytes(cache, before, copy, n);
    }
    free(bytes);
    free(copy);
    mha_cache_destroy(cache);
    mha_cache_destroy(before);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* ---- What goes wrong outside ------------------------------------------------------------------
 */

/* The old file stays, no other is left, the cache is as it was. */
static void a_full_disk(void **state) {
  static const rlim_t limits[] = {0, 100, 3000, 7000};
  struct rlimit before;
  mha_error error;
  size_t n_old = 0, n = 0;
  (void)state;
  mha_cache *cache = make_cache(&kinds[2], MHA_F32);
  fill(cache, 0, 2, 1);
  fill(cache, 1, 40, 2);
  test_expect(mha_cache_save(cache, 0, "entry", &error), MHA_OK, &error);
  unsigned char *old = read_entry(&n_old);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  for (size_t i = 0; i < COUNT(limits); i++) {
    struct rlimit limit = before;
    limit.rlim_cur = limits[i];
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const mha_status status = mha_cache_save(cache, 1, "entry", &error);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    test_expect(status, MHA_ERROR_IO, &error);
    assert_int_equal(test_files_in("."), 1);
    unsigned char *now = read_entry(&n);
    assert_int_equal(n, n_old);
    assert_memory_equal(now, old, n);
    free(now);
    assert_int_equal(length_of(cache, 1), 40);
    fill(cache, 2, 1, 1); /* nobody is left inside */
    test_expect(mha_cache_reset(cache, 2, &error), MHA_OK, &error);
  }
  free(old);
  mha_cache_destroy(cache);
  assert_int_equal(test_remove_files("."), 0);
}

static void arguments_that_are_wrong(void **state) {
  mha_error error;
  (void)state;
  mha_cache *cache = make_cache(&kinds[0], MHA_F32);
  test_expect(mha_cache_save(NULL, 0, "entry", &error), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_save(cache, 0, NULL, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_save(cache, N, "entry", &error), MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_save(cache, -1, "entry", &error), MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_save(cache, 0, "absent/entry", &error), MHA_ERROR_IO, &error);
  test_expect(mha_cache_load(NULL, cache, 0, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_load("entry", NULL, 0, &error), MHA_ERROR_NULL, &error);
  test_expect(mha_cache_load("entry", cache, N, &error), MHA_ERROR_LENGTH, &error);
  test_expect(mha_cache_load("entry", cache, 0, &error), MHA_ERROR_IO, &error);
  test_expect(mha_cache_load(".", cache, 0, &error), MHA_ERROR_IO, &error);
  assert_int_equal(test_files_in("."), 0);
  mha_cache_destroy(cache);
}

/* ---- Sequences as long as any -----------------------------------------------------------------
 */

/* A file of 20 tokens that end a sequence of `length`. */
static void put_end_of(int64_t length) {
  char header[512];
  (void)snprintf(header, sizeof header,
                 "{" META("1", "F32", "%lld", "2", "32", "64")
                     TENSOR("k", "F32", "[20,2,32]", "0", "5120")
                         TENSOR("v", "F32", "[20,2,64]", "5120", "15360") "}",
                 (long long)length);
  put_header(header, 15360);
}

static mha_status append_rows(mha_cache *cache, int64_t n, mha_error *error) {
  static float rows[8 * G * DV];
  const int64_t entry = 1;
  const mha_tensor k = {rows, 1, n, G, D, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor v = {rows, 1, n, G, DV, 0, 0, 0, 0, MHA_F32, 0};
  return mha_cache_append(cache, &k, &v, &entry, NULL, error);
}

/* Longer ones than 2^62 are refused, from a file and as they grow; shorter ones go on. */
static void lengths_near_the_end(void **state) {
  static const cache_kind rings[] = {
      {.page_tokens = 16, .n_pages = 9, .capacity = 40, .window = 1, .rollback = 3},
      {.page_tokens = 16, .n_pages = 9, .capacity = 40, .window = 2},
      {.capacity = 40, .window = 1, .rollback = 3},
      {.capacity = 40, .window = 2}};
  const int64_t most = INT64_C(1) << 62;
  const int64_t longer[] = {most + 1, most + 20, INT64_MAX - 7, INT64_MAX};
  mha_error error;
  (void)state;
  for (size_t i = 0; i < COUNT(rings); i++) {
    mha_cache *cache = make_cache(&rings[i], MHA_F32);
    fill(cache, 1, 5, 1);
    for (size_t l = 0; l < COUNT(longer); l++) {
      put_end_of(longer[l]);
      test_expect(mha_cache_load("entry", cache, 1, &error), MHA_ERROR_LENGTH, &error);
      if (!strstr(error.message, "rule: at most 4611686018427387904"))
        test_failed("%s", error.message);
      assert_int_equal(length_of(cache, 1), 5);
      test_expect(append_rows(cache, 7, &error), MHA_OK, &error);
      test_expect(mha_cache_reset(cache, 1, &error), MHA_OK, &error);
      fill(cache, 1, 5, 1);
    }
    put_end_of(most - 10);
    test_expect(mha_cache_load("entry", cache, 1, &error), MHA_OK, &error);
    test_expect(append_rows(cache, 7, &error), MHA_OK, &error);
    test_expect(append_rows(cache, 4, &error), MHA_ERROR_LENGTH, &error);
    if (!strstr(error.message, "rule: at most 4611686018427387904"))
      test_failed("%s", error.message);
    test_expect(append_rows(cache, 3, &error), MHA_OK, &error);
    assert_int_equal(length_of(cache, 1), most);
    test_expect(mha_cache_save(cache, 1, "entry", &error), MHA_OK, &error);
    test_expect(mha_cache_load("entry", cache, 0, &error), MHA_OK, &error);
    same_rows(cache, 0, cache, 1);
    mha_cache_destroy(cache);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* ---- Memory -----------------------------------------------------------------------------------
 */

static void allocations_that_fail(void **state) {
  mha_status status = MHA_ERROR_MEMORY;
  mha_error error;
  (void)state;
  for (int64_t n = 1; status; n++) {
    test_allocator allocator;
    mha_cache *cache = NULL;
    mha_cache_options o = options_of(&kinds[2], MHA_F32);
    test_allocator_init(&allocator);
    o.allocator = &allocator.mha;
    test_expect(mha_cache_create(&o, &cache, &error), MHA_OK, &error);
    fill(cache, 0, 30, 1);
    test_expect(mha_cache_save(cache, 0, "entry", &error), MHA_OK, &error);
    allocator.fail_at = allocator.calls + n;
    status = mha_cache_load("entry", cache, 1, &error);
    test_expect(status, status ? MHA_ERROR_MEMORY : MHA_OK, &error);
    assert_int_equal(length_of(cache, 1), status ? 0 : 30);
    assert_true(n < 10);
    assert_true(status || n > 1);
    mha_cache_destroy(cache);
    test_allocator_check(&allocator);
  }
  assert_int_equal(test_remove_files("."), 0);
}

/* ---- A folder to work in ----------------------------------------------------------------------
 */

static int enter_folder(void **state) {
  (void)state;
  return test_folder_enter("test_cache_file");
}

static int leave_folder(void **state) {
  (void)state;
  return test_folder_leave();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(from_every_kind_to_every_kind),
      cmocka_unit_test(float32_is_rounded),
      cmocka_unit_test(hostile_files),
      cmocka_unit_test(metadata_that_is_missing),
      cmocka_unit_test(numbers_that_begin_anywhere),
      cmocka_unit_test(blocks_are_taken_as_they_are),
      cmocka_unit_test(cut_and_changed_files),
      cmocka_unit_test(lengths_near_the_end),
      cmocka_unit_test(a_full_disk),
      cmocka_unit_test(arguments_that_are_wrong),
      cmocka_unit_test(allocations_that_fail),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
