/* What inspect tells of a model: all that is known, and nothing of what is not. */
#include "support.h"

#include "cli/model.h"

#include <stdio.h>
#include <string.h>

static char text[4096];

static FILE *begin(void) {
  FILE *file = tmpfile();
  assert_non_null(file);
  return file;
}

static void end(FILE *file, const char *expected) {
  rewind(file);
  const size_t n = fread(text, 1, sizeof text - 1, file);
  text[n] = '\0';
  assert_int_equal(fclose(file), 0);
  assert_string_equal(text, expected);
}

static void check_model(const mha_model_info *model, const char *expected) {
  FILE *file = begin();
  mha_model_print(model, file);
  end(file, expected);
}

static void all_that_is_known_is_told(void **state) {
  mha_model_info m;
  (void)state;
  MHA_INIT(&m);
  m.architecture = "llama";
  m.n_layers = 22;
  m.model_width = 2048;
  m.n_heads = 32;
  m.n_kv_heads = 4;
  m.head_size = 64;
  m.value_head_size = 48;
  m.rotary_size = 16;
  m.rope_base = 500000;
  m.norm_epsilon = 1e-5F;
  m.rope = MHA_ROPE_INTERLEAVED;
  check_model(&m,
              "\nmodel \"llama\"\n"
              "  layers           22\n"
              "  width            2048\n"
              "  heads            32\n"
              "  key/value heads  4\n"
              "  head size        64\n"
              "  value head size  48\n"
              "  rotary size      16\n"
              "  rotary base      500000\n"
              "  norm epsilon     1e-05\n"
              "  rotary pairs     interleaved, by the architecture's name; nothing turns without "
              "--rope interleaved\n");
}

static void what_is_not_known_is_not_told(void **state) {
  mha_model_info m;
  (void)state;
  MHA_INIT(&m);
  check_model(&m, "");
  m.n_heads = 2; /* without an architecture it is nobody's */
  check_model(&m, "");
  m.n_heads = 0;
  m.architecture = "\x1b[2Jx";
  check_model(&m, "\nmodel \"\\x1B[2Jx\"\n"
                  "  rotary pairs     none, or not known of this architecture\n");
  m.architecture = "qwen2";
  m.rope = MHA_ROPE_HALVES;
  check_model(&m, "\nmodel \"qwen2\"\n"
                  "  rotary pairs     halves, by the architecture's name; nothing turns without "
                  "--rope halves\n");
  m.rope_base = 1234567.875;
  m.norm_epsilon = 1.0000001F;
  check_model(&m, "\nmodel \"qwen2\"\n"
                  "  rotary base      1234567.9\n"
                  "  norm epsilon     1.0000001\n"
                  "  rotary pairs     halves, by the architecture's name; nothing turns without "
                  "--rope halves\n");
  m.rope_base = 0;
  m.norm_epsilon = 0;
  m.rope = 7;
  m.n_heads = 3;
  check_model(&m, "\nmodel \"qwen2\"\n"
                  "  heads            3\n"
                  "  rotary pairs     none, or not known of this architecture\n");
}

static void caches_take_what_their_numbers_take(void **state) {
  static const int64_t most = INT64_MAX;
  static const struct {
    int64_t key, value, n_kv_heads;
    const char *expected;
  } rows[] = {
      {256, 192, 4, "  cache: each token takes 1792 bytes as f32, 896 as f16 or bf16\n"},
      {256, 128, 4,
       "  cache: each token takes 1536 bytes as f32, 768 as f16 or bf16, 408 as q8_0\n"},
      {128, 256, 4,
       "  cache: each token takes 1536 bytes as f32, 768 as f16 or bf16, 408 as q8_0\n"},
      {96, 256, 4, "  cache: each token takes 1408 bytes as f32, 704 as f16 or bf16\n"},
      {64, 64, 3, "  cache: each token takes 512 bytes as f32, 256 as f16 or bf16\n"},
      {64, 64, 0, "  cache: each token takes 512 bytes as f32, 256 as f16 or bf16\n"},
      {32, 32, 1, "  cache: each token takes 256 bytes as f32, 128 as f16 or bf16, 68 as q8_0\n"},
      {0, 64, 1, ""},
      {64, 0, 1, ""},
      {most, 64, 1, ""},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("row %zu", i);
    FILE *file = begin();
    mha_model_print_cache(rows[i].key, rows[i].value, rows[i].n_kv_heads, file);
    end(file, rows[i].expected);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(all_that_is_known_is_told),
      cmocka_unit_test(what_is_not_known_is_not_told),
      cmocka_unit_test(caches_take_what_their_numbers_take),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
