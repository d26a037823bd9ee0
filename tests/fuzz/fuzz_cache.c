/* Fuzz target: files that are to become an entry of a cache. Whatever they hold, the cache is as it
 * was or holds what the file says, and goes on working. */
#define _XOPEN_SOURCE 700
#include "fuzz.h"
#include "header.h"

#include "mha.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool fuzz_accepted;

enum { G = 1, D = 32, BEFORE = 20 };

typedef struct cache_kind {
  int64_t capacity, page_tokens, n_pages, window, rollback;
  int32_t type;
} cache_kind;

static const cache_kind kinds[] = {{.page_tokens = 16, .n_pages = 5, .type = MHA_F32},
                                   {.capacity = 40, .window = 12, .type = MHA_Q8_0},
                                   {.capacity = 40, .type = MHA_F32},
                                   {.capacity = 40,
                                    .page_tokens = 16,
                                    .n_pages = 6,
                                    .window = 1,
                                    .rollback = 3,
                                    .type = MHA_BF16}};

enum { N_CACHES = sizeof kinds / sizeof *kinds };

/* ---- a file of its own, removed as soon as it is not needed ---- */

static void put_file(const char *path, const uint8_t *data, size_t size) {
  FILE *file = fopen(path, "wb");
  FUZZ_CHECK(file);
  FUZZ_CHECK(fwrite(data, 1, size, file) == size);
  FUZZ_CHECK(fclose(file) == 0);
}

/* ---- caches ---- */

static mha_cache *make_cache(const cache_kind *kind) {
  mha_cache_options o;
  mha_cache *cache = NULL;
  MHA_INIT(&o);
  o.n_entries = 2;
  o.n_kv_heads = G;
  o.head_size = D;
  o.capacity = kind->capacity;
  o.page_tokens = kind->page_tokens;
  o.n_pages = kind->n_pages;
  o.window = kind->window;
  o.rollback = kind->rollback;
  o.type = kind->type;
  FUZZ_CHECK(mha_cache_create(&o, &cache, NULL) == MHA_OK);
  return cache;
}

static void append(mha_cache *cache, int64_t n) {
  static float rows[BEFORE * G * D];
  const int64_t entry = 1;
  const mha_tensor t = {rows, 1, n, G, D, 0, 0, 0, 0, MHA_F32, 0};
  for (int i = 0; i < BEFORE * G * D; i++)
    rows[i] = (float)(i % 7);
  FUZZ_CHECK(mha_cache_append(cache, &t, &t, &entry, NULL, NULL) == MHA_OK);
}

static int64_t length_of(const mha_cache *cache) {
  int64_t length = -1;
  FUZZ_CHECK(mha_cache_length(cache, 1, &length, NULL) == MHA_OK);
  return length;
}

/* The entry can be read from its last token back to the first that it holds. */
static void use_entry(const mha_cache *cache) {
  mha_tensor k;
  mha_tensor v;
  int64_t row = -1;
  volatile unsigned sum = 0;
  FUZZ_CHECK(mha_cache_view(cache, &k, &v, NULL) == MHA_OK);
  const size_t bytes = mha_element_bytes(k.element, k.row_stride);
  for (int64_t t = length_of(cache) - 1; t >= 0; t--) {
    if (mha_cache_row(cache, 1, t, &row, NULL))
      break;
    FUZZ_CHECK(row >= 0 && row < k.batch * k.length);
    sum = sum + *((const unsigned char *)k.data + (size_t)row * bytes);
  }
}

/* Returns whether the file was accepted. */
static bool use(const char *path, const cache_kind *kind) {
  mha_cache *cache = make_cache(kind);
  mha_error error;
  append(cache, kind->window ? 5 : BEFORE);
  const int64_t before = length_of(cache);
  memset(&error, 0x55, sizeof error);
  const mha_status status = mha_cache_load(path, cache, 1, &error);
  FUZZ_CHECK(error.status == status);
  FUZZ_CHECK(memchr(error.message, '\0', sizeof error.message));
  FUZZ_CHECK((error.message[0] == '\0') == (status == MHA_OK));
  FUZZ_CHECK(status == MHA_OK || status == MHA_ERROR_FORMAT || status == MHA_ERROR_UNSUPPORTED ||
             status == MHA_ERROR_LENGTH || status == MHA_ERROR_SIZE);
  FUZZ_CHECK(status == MHA_OK || length_of(cache) == before);
  use_entry(cache);
  /* a ring takes tokens until the sequence has as many as any may have */
  FUZZ_CHECK(length_of(cache) <= INT64_C(1) << 62);
  if (kind->window && length_of(cache) + 20 < INT64_C(1) << 62)
    for (int64_t n = 7; n < 21; n += 13)
      append(cache, n);
  use_entry(cache);
  FUZZ_CHECK(mha_cache_reset(cache, 1, NULL) == MHA_OK);
  append(cache, 1);
  mha_cache_destroy(cache);
  return status == MHA_OK;
}

static bool use_bytes(const char *path, const uint8_t *data, size_t size) {
  bool accepted = false;
  put_file(path, data, size);
  for (int kind = 0; kind < N_CACHES; kind++)
    accepted = use(path, &kinds[kind]) || accepted;
  return accepted;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char path[64];
  (void)snprintf(path, sizeof path, "fuzz_cache.%ld", (long)getpid());
  fuzz_accepted = use_bytes(path, data, size);
  uint8_t *copy = fuzz_end_header(data, size);
  if (copy)
    (void)use_bytes(path, copy, size);
  free(copy);
  FUZZ_CHECK(unlink(path) == 0);
  return 0;
}
