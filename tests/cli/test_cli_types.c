/* Types of numbers in the command: matrices that stay as a file has them, caches that round, layers
 * that become files of another type. */
#define _XOPEN_SOURCE 700

#include "command.h"
#include "inputs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Files ----------------------------------------------------------------------------------- */

static mha_weights *load(const char *path, const char *prefix) {
  mha_config config;
  mha_weights *weights = NULL;
  mha_error error;
  MHA_INIT(&config);
  config.n_heads = H;
  config.n_kv_heads = G;
  config.norm_epsilon = 1e-5F;
  test_expect(mha_weights_load(&config, path, prefix, &weights, &error), MHA_OK, &error);
  return weights;
}

/* The odd layer in another type, as the library writes it. */
static void put_converted(const char *path, const char *prefix, int32_t element) {
  mha_weights *weights = load("w", "a.");
  mha_weights *converted = NULL;
  mha_error error;
  test_expect(mha_weights_convert(weights, element, NULL, &converted, &error), MHA_OK, &error);
  test_expect(mha_weights_save(converted, path, prefix, &error), MHA_OK, &error);
  mha_weights_destroy(weights);
  mha_weights_destroy(converted);
}

typedef struct contents {
  unsigned char bytes[16384];
  size_t n;
} contents;

static void read_contents(const char *path, contents *c) {
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  memset(c, 0, sizeof *c);
  c->n = fread(c->bytes, 1, sizeof c->bytes, file);
  assert_int_equal(fclose(file), 0);
  assert_in_range(c->n, 10, sizeof c->bytes - 1);
}

static void check_same_file(const char *got, const char *expected) {
  static contents a;
  static contents b;
  read_contents(got, &a);
  read_contents(expected, &b);
  assert_int_equal(a.n, b.n);
  assert_memory_equal(a.bytes, b.bytes, a.n);
}

/* ---- run --keep-type ------------------------------------------------------------------------- */

/* The values are the same, and the sums are float32 in either way: what differs is their order,
 * over at most 20 numbers in each of the products that follow one another. */
static void kept_types_give_the_same_numbers(void **state) {
  static const int32_t types[] = {MHA_F32, MHA_F16, MHA_BF16};
  static const int64_t shape[] = {B, LQ, EO};
  (void)state;
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    test_note("type %s", mha_element_name(types[i]));
    put_converted("layer.st", "a.", types[i]);
    RUN_WELL(ODD_INPUTS, "--weights", "layer.st");
    mha_npy_array expected = command_take("y.npy");
    RUN_WELL(ODD_INPUTS, "--weights", "layer.st", "--keep-type");
    mha_npy_array got = command_take("y.npy");
    command_check_shape(&got, 3, shape);
    float largest = 0;
    for (int64_t k = 0; k < B * LQ * EO; k++)
      largest = fmaxf(largest, fabsf(((const float *)expected.data)[k]));
    assert_true(largest > 0.01F);
    for (int64_t k = 0; k < B * LQ * EO; k++)
      test_near("output", (double)((const float *)got.data)[k],
                (double)((const float *)expected.data)[k], 1e-5 * (double)largest);
    mha_npy_array_release(&expected);
    mha_npy_array_release(&got);
  }
  assert_int_equal(unlink("layer.st"), 0);
}

/* ---- run --steps --cache-type ---------------------------------------------------------------- */

enum { LONG_L = 9, LONG_E = 64, LONG_D = 32, LONG_G = 1, LONG_H = 2 };

static void fill(test_random *random, float *numbers, int64_t n, double low, double high) {
  for (int64_t i = 0; i < n; i++)
    numbers[i] = (float)test_random_uniform(random, low, high);
}

/* A layer with heads of whole blocks, whose scores are small and whose values, output matrix and
 * input are positive. */
static void put_positive_layer(void) {
  static float q[LONG_E * LONG_H * LONG_D];
  static float k[LONG_E * LONG_G * LONG_D];
  static float v[LONG_E * LONG_G * LONG_D];
  static float o[LONG_H * LONG_D * LONG_E];
  static float x[LONG_L * LONG_E];
  static const int64_t shape[] = {LONG_L, LONG_E};
  const inputs_tensor tensors[] = {{"W_Q", "F32", "64,64", sizeof q, q},
                                   {"W_K", "F32", "64,32", sizeof k, k},
                                   {"W_V", "F32", "64,32", sizeof v, v},
                                   {"W_O", "F32", "64,64", sizeof o, o}};
  test_random random;
  test_random_seed(&random, 17);
  test_fill_normal(&random, q, LONG_E * LONG_H * LONG_D, 0.02);
  test_fill_normal(&random, k, LONG_E * LONG_G * LONG_D, 0.02);
  fill(&random, v, LONG_E * LONG_G * LONG_D, 0.5 / LONG_E, 1.0 / LONG_E);
  fill(&random, o, LONG_H * LONG_D * LONG_E, 0.5 / LONG_E, 1.0 / LONG_E);
  fill(&random, x, LONG_L * LONG_E, 0.5, 1);
  inputs_put_safetensors("long.safetensors", tensors, N_TENSORS(tensors));
  assert_int_equal(mha_npy_write("long_x.npy", 2, shape, x, NULL), MHA_OK);
}

#define LONG_STEPS                                                                                 \
  "run", "--weights", "long.safetensors", "--heads", "2", "--kv-heads", "1", "--input",            \
      "long_x.npy", "--output", "y.npy", "--causal", "--steps"

/* Values are positive and so is Wo, so that no error grows in the output: a value that is off by
 * the factor 1 + u moves the output by u at most. Scores have T = scale·Σ|q·k| below 1/4, and a
 * weight moves by the factor exp(2uT) at most: together less than 2u. u is 2⁻¹² for f16 and 2⁻⁹
 * for bf16. In q8_0 a number is off by half a scale, 1/254 of the largest in its block, which is
 * at most twice the number here, and a key by that share of the largest: 2u = 2⁻⁶ covers both. */
static void caches_round_to_their_type(void **state) {
  static const struct {
    const char *name;
    double bound;
  } rows[] = {{"f32", 0},       {"F32", 0},       {"f16", 0x1p-11}, {"F16", 0x1p-11},
              {"bf16", 0x1p-8}, {"Bf16", 0x1p-8}, {"q8_0", 0x1p-6}, {"Q8_0", 0x1p-6}};
  static const int64_t shape[] = {LONG_L, LONG_E};
  (void)state;
  put_positive_layer();
  RUN_WELL(LONG_STEPS);
  mha_npy_array expected = command_take("y.npy");
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("type %s", rows[i].name);
    RUN_WELL(LONG_STEPS, "--cache-type", rows[i].name);
    mha_npy_array got = command_take("y.npy");
    command_check_shape(&got, 2, shape);
    const bool same = memcmp(got.data, expected.data, got.data_bytes) == 0;
    assert_int_equal(same, rows[i].bound == 0); /* the option does something */
    for (int64_t k = 0; k < LONG_L * LONG_E; k++) {
      const double y = (double)((const float *)expected.data)[k];
      assert_true(y > 0);
      test_near("output", (double)((const float *)got.data)[k], y, rows[i].bound * y);
    }
    mha_npy_array_release(&got);
  }
  mha_npy_array_release(&expected);
  assert_int_equal(unlink("long.safetensors") + unlink("long_x.npy"), 0);
}

/* Pages change nothing of a short sequence: a step has the same products. */
static void caches_in_pages_are_the_same(void **state) {
  static const int64_t shape[] = {LONG_L, LONG_E};
  static const char *const names[] = {"f32", "bf16", "q8_0"};
  (void)state;
  put_positive_layer();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    RUN_WELL(LONG_STEPS, "--cache-type", names[i], "--cache-pages", "0");
    mha_npy_array expected = command_take("y.npy");
    RUN_WELL(LONG_STEPS, "--cache-type", names[i], "--cache-pages", "16");
    mha_npy_array got = command_take("y.npy");
    command_check_shape(&got, 2, shape);
    for (int64_t k = 0; k < LONG_L * LONG_E; k++)
      test_near("output", (double)((const float *)got.data)[k],
                (double)((const float *)expected.data)[k], 1e-6);
    mha_npy_array_release(&got);
    mha_npy_array_release(&expected);
  }
  assert_int_equal(unlink("long.safetensors") + unlink("long_x.npy"), 0);
}

/* ---- convert --------------------------------------------------------------------------------- */

#define CONVERT_ODD "convert", "w", "out.st", "--prefix", "a.", "--heads", "4", "--kv-heads", "2"

/* What the library makes of the layer, byte for byte, and nothing said about it. */
static void convert_writes_what_the_library_writes(void **state) {
  static const struct {
    const char *name;
    int32_t element;
  } rows[] = {{"f32", MHA_F32}, {"f16", MHA_F16}, {"F16", MHA_F16}, {"bf16", MHA_BF16}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_note("type %s", rows[i].name);
    put_converted("expected.st", "a.", rows[i].element);
    test_put_file("out.st", "old", i % 2 ? 3 : 0);
    RUN_WELL(CONVERT_ODD, "--type", rows[i].name);
    assert_string_equal(command_out, "");
    check_same_file("out.st", "expected.st");
    /* once more into its own type, which is exact, and without the prefix */
    put_converted("expected.st", NULL, rows[i].element);
    RUN_WELL("convert", "--type", rows[i].name, "--kv-heads", "2", "out.st", "--heads=4",
             "again.st");
    check_same_file("again.st", "expected.st");
  }
  assert_int_equal(unlink("out.st") + unlink("again.st") + unlink("expected.st"), 0);
}

static void run_takes_what_convert_writes(void **state) {
  (void)state;
  RUN_WELL(CONVERT_ODD, "--type", "f32");
  RUN_WELL(ODD_RUN);
  mha_npy_array expected = command_take("y.npy");
  RUN_WELL(ODD_INPUTS, "--weights", "out.st", "--prefix", "a.");
  command_same_bits("y.npy", 3, (const int64_t[]){B, LQ, EO}, expected.data);
  mha_npy_array_release(&expected);
  assert_int_equal(unlink("out.st"), 0);
}

/* Loading a normalisation needs its epsilon, converting none: no number depends on it. */
static void convert_needs_no_epsilon(void **state) {
  static float numbers[64];
  static const inputs_tensor tensors[] = {{"q_proj.weight", "F32", "4,4", 64, numbers},
                                          {"k_proj.weight", "F32", "4,4", 64, numbers},
                                          {"v_proj.weight", "F32", "4,4", 64, numbers},
                                          {"o_proj.weight", "F32", "4,4", 64, numbers},
                                          {"q_norm.weight", "F32", "2", 8, numbers + 20},
                                          {"k_norm.weight", "F32", "2", 8, numbers + 30},
                                          {"sinks", "F32", "2", 8, numbers + 40}};
  test_random random;
  (void)state;
  test_random_seed(&random, 23);
  test_fill_normal(&random, numbers, 64, 1);
  inputs_put_safetensors("norm.st", tensors, N_TENSORS(tensors));
  RUN_WELL("convert", "norm.st", "out.st", "--type", "bf16", "--heads", "2");
  RUN_WELL("inspect", "out.st");
  assert_non_null(strstr(command_out, "  norm of Q  F32   (2,)"));
  assert_non_null(strstr(command_out, "  sinks      F32   (2,)"));
  assert_non_null(strstr(command_out, "  Wo         BF16  (4, 4)"));
  assert_int_equal(unlink("norm.st") + unlink("out.st"), 0);
}

/* ---- GGUF files ------------------------------------------------------------------------------ */

#define GGUF(name) (MHA_TEST_DATA_DIR "/gguf/" name)

/* A file, converted or kept, beside the folder of the values that its own writer reads in it. Few
 * rows and many take different ways through kept matrices. */
static void gguf_files_give_what_their_values_give(void **state) {
  static const struct {
    const char *file, *folder, *prefix, *kv_heads;
  } files[] = {{GGUF("gpt2_packed_f16.gguf"), GGUF("gpt2_packed_f16"), "blk.0.", "4"},
               {GGUF("llama_q4_0.gguf"), GGUF("llama_q4_0"), "blk.0.", "1"},
               {GGUF("llama_q8_0.gguf"), GGUF("llama_q8_0"), "blk.1.", "2"},
               {GGUF("qwen2_bias_q8_0.gguf"), GGUF("qwen2_bias_q8_0"), "blk.0.", "2"},
               {GGUF("qwen3_norms_bf16.gguf"), GGUF("qwen3_norms_bf16"), "blk.0.", "2"}};
  enum { E = 64, FEW = 5, MANY = 12 };
  static float x[MANY * E];
  test_random random;
  (void)state;
  test_random_seed(&random, 23);
  for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
    for (int64_t L = FEW; L <= MANY; L += MANY - FEW) {
      const int64_t shape[] = {L, E};
      test_note("%s, %d rows", files[i].file, (int)L);
      PUT(&random, "gguf_x.npy", x, 2, L, E);
      RUN_WELL("run", "--weights", files[i].folder, "--prefix", files[i].prefix, "--heads", "4",
               "--kv-heads", files[i].kv_heads, "--norm-epsilon", "1e-6", "--causal", "--input",
               "gguf_x.npy", "--output", "y.npy");
      mha_npy_array expected = command_take("y.npy");
      const float *values = expected.data;
      float largest = 0;
      for (int64_t k = 0; k < L * E; k++)
        largest = fmaxf(largest, fabsf(values[k]));
      assert_true(largest > 0.01F);
      for (int kept = 0; kept < 2; kept++) {
        RUN_WELL("run", "--weights", files[i].file, "--prefix", files[i].prefix, "--causal",
                 "--input", "gguf_x.npy", "--output", "y.npy", kept ? "--keep-type" : NULL);
        mha_npy_array got = command_take("y.npy");
        command_check_shape(&got, 2, shape);
        for (int64_t k = 0; k < L * E; k++)
          test_near("output", (double)((const float *)got.data)[k], (double)values[k],
                    1e-5 * (double)largest);
        mha_npy_array_release(&got);
      }
      mha_npy_array_release(&expected);
    }
}

static void a_gguf_type_that_is_not_computed(void **state) {
  (void)state;
  RUN_BADLY(1, "blk.0.attn_q.weight holds the type \"Q6_K\"", "run", "--weights",
            GGUF("unsupported_q6_k.gguf"), "--input", "gguf_x.npy", "--output", "y.npy");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(kept_types_give_the_same_numbers),
      cmocka_unit_test(caches_round_to_their_type),
      cmocka_unit_test(caches_in_pages_are_the_same),
      cmocka_unit_test(convert_writes_what_the_library_writes),
      cmocka_unit_test(run_takes_what_convert_writes),
      cmocka_unit_test(convert_needs_no_epsilon),
      cmocka_unit_test(gguf_files_give_what_their_values_give),
      cmocka_unit_test(a_gguf_type_that_is_not_computed),
  };
  return cmocka_run_group_tests(tests, command_enter_folder, command_leave_folder);
}
