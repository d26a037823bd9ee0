/* Owns trials of the functions that need no object: names, versions, structs that begin. */
#include "session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void try_status_name(fuzz_reader *r) {
  const int value =
      fuzz_read_one_in(r, 2) ? (int)(uint32_t)fuzz_read_any(r) : (int)fuzz_read(r, -1, 17);
  const char *name = mha_status_name((mha_status)value);
  const bool known = value >= MHA_OK && value <= MHA_ERROR_COMMUNICATION;
  FUZZ_CHECK(name && known == (strncmp(name, "MHA_", 4) == 0));
}

static void try_build_info(fuzz_reader *r) {
  const size_t needed = mha_build_info(NULL, 0);
  const size_t bytes = fuzz_read_one_in(r, 2) ? needed + 1 : (size_t)fuzz_read(r, 0, 200);
  char *text = malloc(bytes + (bytes == 0));
  FUZZ_CHECK(text && needed > 0);
  FUZZ_CHECK(mha_build_info(text, bytes) == needed);
  if (bytes > 0)
    FUZZ_CHECK(strlen(text) == (bytes > needed ? needed : bytes - 1));
  FUZZ_CHECK(strcmp(mha_version(), MHA_VERSION_STRING) == 0);
  free(text);
}

/* A struct of any size; one that cannot hold a size stays as it is. */
static void try_struct_init(fuzz_reader *r) {
  const size_t bytes = (size_t)fuzz_read(r, 0, 64);
  size_t size = 0;
  unsigned char *memory = malloc(bytes + (bytes == 0));
  FUZZ_CHECK(memory);
  memset(memory, 0x55, bytes);
  mha_struct_init(memory, bytes);
  if (bytes >= sizeof size)
    memcpy(&size, memory, sizeof size);
  FUZZ_CHECK(size == (bytes >= sizeof size ? bytes : 0));
  for (size_t k = 0; k < bytes; k++)
    FUZZ_CHECK(bytes < sizeof size ? memory[k] == 0x55 : k < sizeof size || memory[k] == 0);
  mha_struct_init(NULL, bytes);
  free(memory);
}

/* Memory too small for a config stays as it is. */
static void try_config_init(fuzz_reader *r) {
  const bool small = fuzz_read_one_in(r, 4);
  const size_t bytes = small ? (size_t)fuzz_read(r, 0, (int64_t)sizeof(mha_config) - 1)
                             : sizeof(mha_config) + (size_t)fuzz_read(r, 0, 16);
  const int64_t width = fuzz_read_any(r);
  const int64_t n_heads = fuzz_read_any(r);
  mha_config *config = calloc(1, bytes + (bytes == 0));
  mha_config known = {.struct_size = 0};
  FUZZ_CHECK(config);
  mha_config_init_sized(config, bytes, width, n_heads);
  mha_config_init_sized(NULL, bytes, width, n_heads);
  memcpy(&known, config, bytes < sizeof known ? bytes : sizeof known);
  FUZZ_CHECK(known.struct_size == (small ? 0 : bytes));
  FUZZ_CHECK(known.query_width == (small ? 0 : width) && known.n_heads == (small ? 0 : n_heads));
  FUZZ_CHECK(known.n_kv_heads == 0 && !known.allocator);
  free(config);
}

/* Numbers [n] of any pattern from a type to another and, if that one is wider, back. */
static void try_elements(fuzz_reader *r) {
  enum { MOST = 96, BYTES = MOST * sizeof(float) };
  unsigned char source[BYTES];
  unsigned char target[BYTES];
  unsigned char back[BYTES];
  const int32_t from = (int32_t)fuzz_read(r, -1, MHA_Q4_0 + 1);
  const int32_t to = (int32_t)fuzz_read(r, MHA_F32, MHA_Q4_0);
  const int64_t n = fuzz_read_one_in(r, 4) ? fuzz_read(r, -2, MOST) : 32 * fuzz_read(r, 0, 3);
  const size_t from_bytes = mha_element_bytes(from, n);
  const size_t to_bytes = mha_element_bytes(to, n);
  mha_error error;
  for (size_t k = 0; k < sizeof source; k++)
    source[k] = (unsigned char)fuzz_read(r, 0, 255);
  memset(target, 0x55, sizeof target);
  const mha_status status = mha_element_convert(from, source, to, target, n, &error);
  fuzz_judge_error(status, &error);
  FUZZ_CHECK((status == MHA_OK) ==
             (n == 0 ? from >= 0 && from <= MHA_Q4_0 : from_bytes > 0 && to_bytes > 0));
  for (size_t k = status ? 0 : to_bytes; k < sizeof target; k++)
    FUZZ_CHECK(target[k] == 0x55);
  if (status || to != MHA_F32 || from == MHA_Q8_0 || from == MHA_Q4_0)
    return;
  FUZZ_CHECK(mha_element_convert(to, target, from, back, n, &error) == MHA_OK);
  for (size_t k = 0; k < (size_t)n; k++) { /* a NaN may become another one */
    const size_t size = from_bytes / (size_t)n;
    float x = 0.0f;
    memcpy(&x, target + k * sizeof x, sizeof x);
    FUZZ_CHECK(isnan(x) || memcmp(back + k * size, source + k * size, size) == 0);
  }
}

void fuzz_try_small_functions(fuzz_session *session) {
  try_status_name(session->reader);
  try_build_info(session->reader);
  try_struct_init(session->reader);
  try_config_init(session->reader);
  try_elements(session->reader);
  mha_weights_destroy(NULL);
  mha_cache_destroy(NULL);
  mha_context_destroy(NULL);
  FUZZ_CHECK(!mha_weights_retain(NULL));
}
