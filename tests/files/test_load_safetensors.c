/* mha_weights_load of a safetensors file: the layer under every name, of every type, with norms and
 * sinks; which error names what in the others; how much of file and memory is held. */
#define _XOPEN_SOURCE 700

#include "layer_file.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- What loads ------------------------------------------------------------------------------ */

static void every_naming_type_and_alignment_is_the_same_layer(void **state) {
  static const char *const types[] = {"F32", "F64", "F16", "BF16"};
  static layer_numbers n;
  (void)state;
  for (int a = 0; a < LAYER_NAMINGS; a++)
    for (int t = 0; t < 4; t++)
      for (int variant = 0; variant < 8; variant++) {
        const char *prefix = variant & 1 ? "model.layers.0.attn." : "";
        const bool biases = (variant & 2) != 0;
        const size_t offset = variant & 4 ? (size_t)(1 + a % 3) : 0;
        const mha_config config = layer_heads(H, G);
        test_note("naming %d, %s, variant %d", a, types[t], variant);
        layer_make_fitting(&n, a);
        layer_file_write(prefix, &layer_namings[a], types[t], &n, biases, offset);
        mha_weights *weights = layer_load(&config, variant & 4 ? prefix : NULL);
        layer_check_same(weights, &n, layer_namings[a].out_in, biases);
        assert_int_equal(weights->orientation, layer_namings[a].out_in ? MHA_OUT_IN : MHA_IN_OUT);
        mha_weights_destroy(weights);
      }
}

/* One of d and dv is given, and the other follows from H·d + G·d + G·dv. */
static void packed_sizes_follow_from_each_other(void **state) {
  static const int64_t inputs[3] = {EQ, EQ, EQ};
  static layer_numbers n;
  (void)state;
  layer_make_numbers(&n, inputs, DV);
  for (int a = 0; a < LAYER_FIRST_SEPARATE; a++)
    for (int given = 1; given < 4; given++) {
      mha_config config = layer_heads(H, G);
      test_note("naming %d, given %d", a, given);
      layer_file_write("", &layer_namings[a], "F32", &n, true, 0);
      config.head_size = given & 1 ? D : 0;
      config.value_head_size = given & 2 ? DV : 0;
      mha_weights *weights = layer_load(&config, NULL);
      layer_check_same(weights, &n, layer_namings[a].out_in, true);
      mha_weights_destroy(weights);
    }
}

/* Beside a layer without a prefix other modules may lie, of whatever type. */
static void other_tensors_do_not_matter(void **state) {
  static layer_file file;
  static layer_numbers n;
  const mha_config config = layer_heads(H, G);
  (void)state;
  layer_make_fitting(&n, LAYER_TORCH);
  layer_file_begin(&file);
  const size_t begin = file.n_data;
  layer_file_put_bytes(&file, 7, 8);
  layer_file_put_entry(&file, "", "n_tokens", "I64", 0, 0, 0, begin);
  layer_file_put_numbers(&file, "", &layer_namings[LAYER_TORCH], "F32", &n, true, "");
  layer_file_end(&file, 0);
  mha_weights *weights = layer_load(&config, NULL);
  layer_check_same(weights, &n, true, true);
  mha_weights_destroy(weights);
}

/* Two layers of opposite numbers in one file: each is found by its prefix, neither without. */
static void the_prefix_tells_which_layer(void **state) {
  static layer_file file;
  static layer_numbers n[2];
  static const char *const prefixes[] = {"layers.0.", "layers.1."};
  const mha_config config = layer_heads(H, G);
  (void)state;
  layer_make_fitting(&n[0], LAYER_HUGGING_FACE);
  n[1] = n[0];
  for (int k = 0; k < 4; k++)
    for (int64_t i = 0; i < n[1].in[k] * n[1].out[k]; i++)
      n[1].matrices[k][i] = -n[0].matrices[k][i];
  layer_file_begin(&file);
  for (int i = 0; i < 2; i++)
    layer_file_put_numbers(&file, prefixes[i], &layer_namings[LAYER_HUGGING_FACE], "F32", &n[i],
                           true, "");
  layer_file_end(&file, 0);
  for (int i = 0; i < 2; i++) {
    mha_weights *weights = layer_load(&config, prefixes[i]);
    layer_check_same(weights, &n[i], true, true);
    mha_weights_destroy(weights);
  }
  layer_expect_refused(
      "layer.st", NULL, &config, MHA_ERROR_WEIGHTS,
      "layer.st holds the layers \"layers.0.\" (Hugging Face, q_proj), \"layers.1.\" "
      "(Hugging Face, q_proj); rule: ");
  layer_expect_refused("layer.st", "layers.", &config, MHA_ERROR_WEIGHTS,
                       "under the prefix \"layers.\"");
}

/* ---- What is refused ------------------------------------------------------------------------- */

static void check_file_refused(const mha_config *config, mha_status status, const char *fragment) {
  layer_expect_refused("layer.st", NULL, config, status, fragment);
}

static void a_missing_tensor_is_named(void **state) {
  static layer_file file;
  static layer_numbers n;
  const mha_config config = layer_heads(H, G);
  (void)state;
  for (int a = 0; a < LAYER_NAMINGS; a++)
    for (int k = 0; k < 5; k++) {
      char fragment[128];
      if (!layer_namings[a].matrices[k])
        continue;
      test_note("naming %d without %s", a, layer_namings[a].matrices[k]);
      (void)snprintf(fragment, sizeof fragment, "layer.st lacks x.%s; rule",
                     layer_namings[a].matrices[k]);
      layer_make_fitting(&n, a);
      layer_file_begin(&file);
      layer_file_put_numbers(&file, "x.", &layer_namings[a], "F32", &n, true,
                             layer_namings[a].matrices[k]);
      layer_file_end(&file, 0);
      check_file_refused(&config, MHA_ERROR_WEIGHTS, fragment);
    }
}

static void a_type_that_is_used_and_unknown_is_named(void **state) {
  static const char *const types[] = {"I32", "U8", "F8_E4M3", "BOOL"};
  static const int bytes[] = {4, 1, 1, 1};
  static layer_file file;
  static layer_numbers n;
  const mha_config config = layer_heads(H, G);
  (void)state;
  layer_make_fitting(&n, LAYER_HUGGING_FACE);
  for (int t = 0; t < 4; t++) {
    char fragment[128];
    test_note("%s", types[t]);
    layer_file_begin(&file);
    layer_file_put_numbers(&file, "x.", &layer_namings[LAYER_HUGGING_FACE], "F32", &n, false,
                           "k_proj.weight");
    const size_t begin = file.n_data;
    for (int i = 0; i < G * D * EK; i++)
      layer_file_put_bytes(&file, 1, bytes[t]);
    layer_file_put_entry(&file, "x.", "k_proj.weight", types[t], 2, G * D, EK, begin);
    layer_file_end(&file, 0);
    (void)snprintf(fragment, sizeof fragment,
                   "layer.st: x.k_proj.weight holds the type \"%s\"; rule: float32", types[t]);
    check_file_refused(&config, MHA_ERROR_UNSUPPORTED, fragment);
  }
}

static void what_is_not_computed_is_named(void **state) {
  static layer_file file;
  static layer_numbers n;
  const mha_config config = layer_heads(H, G);
  (void)state;
  layer_make_fitting(&n, LAYER_TORCH);
  layer_file_begin(&file);
  layer_file_put_numbers(&file, "", &layer_namings[LAYER_TORCH], "F32", &n, true, "");
  layer_file_put_vector(&file, "", "bias_k", "F32", n.biases[0], G * D);
  layer_file_end(&file, 0);
  check_file_refused(&config, MHA_ERROR_UNSUPPORTED, "layer.st holds bias_k, which is no part");
}

/* A packed matrix that the heads do not share, and given sizes. */
static void shapes_that_do_not_fit_are_told(void **state) {
  static const struct {
    int naming;
    size_t offset; /* of a member of mha_config; 0 = none */
    int64_t value;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {LAYER_TORCH, offsetof(mha_config, n_heads), 3, MHA_ERROR_HEADS,
       "layer.st: in_proj_weight has shape (24, 7), for H = 3 and G = 2 heads; rule: d = dv = "
       "output width / (H + 2·G), without remainder"},
      {LAYER_GPT2, offsetof(mha_config, n_heads), 3, MHA_ERROR_HEADS,
       "layer.st: c_attn.weight has shape (7, 24), for H = 3 and G = 2 heads"},
      {LAYER_TORCH, offsetof(mha_config, head_size), 4, MHA_ERROR_HEADS,
       "rule: dv = (output width − H·d − G·d) / G, without remainder"},
      {LAYER_TORCH, offsetof(mha_config, value_head_size), 12, MHA_ERROR_HEADS,
       "rule: d = (output width − G·dv) / (H + G), without remainder"},
      {LAYER_TORCH, offsetof(mha_config, head_size), INT64_MAX / 2, MHA_ERROR_HEADS,
       "in_proj_weight"},
      {LAYER_TORCH, offsetof(mha_config, n_heads), INT64_MAX, MHA_ERROR_HEADS, "in_proj_weight"},
      {LAYER_TORCH, offsetof(mha_config, query_width), 8, MHA_ERROR_WEIGHTS,
       "with Eq = 8, Ek = 7, Ev = 7; rule: a packed matrix has one input width"},
      {LAYER_TORCH, offsetof(mha_config, key_width), 8, MHA_ERROR_WEIGHTS,
       "with Eq = 7, Ek = 8, Ev = 7"},
      {LAYER_TORCH, offsetof(mha_config, output_width), 8, MHA_ERROR_WEIGHTS,
       "layer.st: out_proj.weight has shape (17, 12), but (8, 12) is expected; rule: it is "
       "[Eo][H·dv] with"},
      {LAYER_HUGGING_FACE, offsetof(mha_config, query_width), 8, MHA_ERROR_WEIGHTS,
       "layer.st: q_proj.weight has shape (12, 7), but (12, 8) is expected; rule: it is "
       "[H·d][Eq] with H = 4, G = 2, d = 3, dv = 5"},
  };
  static layer_numbers n;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = layer_heads(H, G);
    test_note("%s", rows[i].fragment);
    layer_make_fitting(&n, rows[i].naming);
    layer_file_write("", &layer_namings[rows[i].naming], "F32", &n, true, 0);
    memcpy((char *)&config + rows[i].offset, &rows[i].value, sizeof rows[i].value);
    check_file_refused(&config, rows[i].status, rows[i].fragment);
  }
}

/* The article's matrices under PyTorch's names: rows and columns change places, and no shape fits.
 */
static void the_wrong_orientation_does_not_fit(void **state) {
  static layer_numbers n;
  layer_naming wrong = layer_namings[LAYER_HUGGING_FACE];
  const mha_config config = layer_heads(H, G);
  (void)state;
  wrong.out_in = false;
  layer_make_fitting(&n, LAYER_HUGGING_FACE);
  layer_file_write("", &wrong, "F32", &n, false, 0);
  check_file_refused(&config, MHA_ERROR_HEADS, "layer.st: q_proj.weight has shape (7, 12), for H");
}

/* ---- Norms and sinks ------------------------------------------------------------------------- */

static void put_normed(const layer_numbers *n, int64_t query_length, int64_t key_length,
                       int64_t n_sinks) {
  static layer_file file;
  float ramp[64];
  for (int i = 0; i < 64; i++)
    ramp[i] = (float)(i + 1);
  layer_file_begin(&file);
  layer_file_put_numbers(&file, "x.", &layer_namings[LAYER_HUGGING_FACE], "F32", n, false, "");
  if (query_length > 0)
    layer_file_put_vector(&file, "x.", "q_norm.weight", "F32", ramp, query_length);
  if (key_length > 0)
    layer_file_put_vector(&file, "x.", "k_norm.weight", "F32", ramp + 1, key_length);
  if (n_sinks > 0)
    layer_file_put_vector(&file, "x.", "sinks", "BF16", ramp + 2, n_sinks);
  layer_file_end(&file, 0);
}

static void norms_and_sinks_load(void **state) {
  static const struct {
    int64_t query_length, key_length;
    int32_t given, norm;
  } rows[] = {{D, D, MHA_NORM_NONE, MHA_NORM_PER_HEAD},
              {D, D, MHA_NORM_PER_HEAD, MHA_NORM_PER_HEAD},
              {H * D, G * D, MHA_NORM_NONE, MHA_NORM_FULL},
              {H * D, G * D, MHA_NORM_FULL, MHA_NORM_FULL}};
  static layer_numbers n;
  (void)state;
  layer_make_fitting(&n, LAYER_HUGGING_FACE);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = layer_heads(H, G);
    test_note("row %zu", i);
    put_normed(&n, rows[i].query_length, rows[i].key_length, H);
    config.norm = rows[i].given;
    config.norm_epsilon = 1e-6F;
    mha_weights *weights = layer_load(&config, NULL);
    assert_int_equal(weights->config.norm, rows[i].norm);
    assert_true(weights->config.norm_epsilon == 1e-6F);
    for (int64_t k = 0; k < rows[i].query_length; k++)
      assert_true(weights->query_norm[k] == (float)(k + 1));
    for (int64_t k = 0; k < rows[i].key_length; k++)
      assert_true(weights->key_norm[k] == (float)(k + 2));
    for (int64_t k = 0; k < H; k++)
      assert_true(weights->sinks[k] == (float)(k + 3));
    mha_weights_destroy(weights);
  }
}

/* Of one head [d] and [H·d] are the same: both norms fit, and per head is taken. */
static void one_head_takes_either_norm(void **state) {
  (void)state;
  for (int32_t given = MHA_NORM_NONE; given <= MHA_NORM_FULL; given++) {
    static layer_file file;
    static const float one[4] = {1, 1, 1, 1};
    layer_numbers single = {.heads = 1, .kv_heads = 1, .d = 4, .dv = 4};
    for (int k = 0; k < 4; k++)
      single.in[k] = single.out[k] = 4;
    mha_config config = layer_heads(1, 0);
    layer_file_begin(&file);
    layer_file_put_numbers(&file, "", &layer_namings[LAYER_TORCH], "F32", &single, false, "");
    layer_file_put_vector(&file, "", "q_norm.weight", "F32", one, 4);
    layer_file_put_vector(&file, "", "k_norm.weight", "F32", one, 4);
    layer_file_end(&file, 0);
    config.norm = given;
    config.norm_epsilon = 1e-6F;
    mha_weights *weights = layer_load(&config, NULL);
    assert_int_equal(weights->config.norm, given ? given : MHA_NORM_PER_HEAD);
    mha_weights_destroy(weights);
  }
}

static void norms_that_do_not_fit_are_refused(void **state) {
  static const struct {
    int64_t query_length, key_length, n_sinks;
    int32_t norm;
    float epsilon;
    mha_status status;
    const char *fragment;
  } rows[] = {
      {D, D, 0, MHA_NORM_NONE, 0.0F, MHA_ERROR_VALUE,
       "config.norm_epsilon is 0, with x.q_norm.weight in layer.st; rule: greater than 0"},
      {D, D, 0, MHA_NORM_NONE, -1.0F, MHA_ERROR_VALUE, "config.norm_epsilon is -1"},
      {0, 0, 0, MHA_NORM_PER_HEAD, 1e-6F, MHA_ERROR_WEIGHTS,
       "layer.st lacks x.q_norm.weight, with config.norm = 1; rule"},
      {D, D, 0, MHA_NORM_FULL, 1e-6F, MHA_ERROR_WEIGHTS,
       "layer.st: x.q_norm.weight has shape (3,), but (12,) is expected; rule: it is [d] per head "
       "or [H·d] in full with"},
      {H * D, G * D, 0, MHA_NORM_PER_HEAD, 1e-6F, MHA_ERROR_WEIGHTS,
       "x.q_norm.weight has shape (12,), but (3,) is expected"},
      {H * D, D, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS,
       "x.k_norm.weight has shape (3,), but (6,) is expected"},
      {D, G * D, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS,
       "x.k_norm.weight has shape (6,), but (3,) is expected"},
      {5, 5, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS, "x.q_norm.weight has shape (5,)"},
      {D, 0, 0, MHA_NORM_NONE, 1e-6F, MHA_ERROR_WEIGHTS, "layer.st lacks x.k_norm.weight; rule"},
      {D, D, 0, 7, 1e-6F, MHA_ERROR_VALUE, "config.norm is 7"},
      {0, 0, G, MHA_NORM_NONE, 0.0F, MHA_ERROR_WEIGHTS,
       "layer.st: x.sinks has shape (2,), but (4,) is expected; rule: it is [H] with H = 4"},
  };
  static layer_numbers n;
  (void)state;
  layer_make_fitting(&n, LAYER_HUGGING_FACE);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_config config = layer_heads(H, G);
    test_note("%s", rows[i].fragment);
    put_normed(&n, rows[i].query_length, rows[i].key_length, rows[i].n_sinks);
    config.norm = rows[i].norm;
    config.norm_epsilon = rows[i].epsilon;
    check_file_refused(&config, rows[i].status, rows[i].fragment);
  }
}

/* ---- The file afterwards --------------------------------------------------------------------- */

/* What is read into memory stays when the file is emptied; what is mapped stays when it is replaced
 * or removed. */
static void layers_outlive_their_files(void **state) {
  static layer_numbers n;
  (void)state;
  layer_make_fitting(&n, LAYER_TORCH);
  for (int way = 0; way < 3; way++) {
    mha_config config = layer_heads(H, G);
    layer_file_write("", &layer_namings[LAYER_TORCH], "F32", &n, true, 0);
    mha_weights *weights = NULL;
    mha_error error;
    test_expect(
        layer_load_with(way == 0 ? MHA_READ_FILE : 0, &config, "layer.st", &weights, &error),
        MHA_OK, &error);
    if (way == 0)
      assert_int_equal(truncate("layer.st", 0), 0);
    if (way == 1) {
      FILE *other = fopen("other.st", "wb");
      assert_non_null(other);
      assert_int_equal(fclose(other), 0);
      assert_int_equal(rename("other.st", "layer.st"), 0);
    }
    assert_int_equal(unlink("layer.st"), 0);
    layer_check_same(weights, &n, true, true);
    mha_weights_destroy(weights);
  }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* The n-th allocation fails for n = 1, 2, … until loading succeeds; returns that n. */
static int64_t fail_each_allocation(const char *path, uint32_t flags) {
  mha_status status = MHA_ERROR_MEMORY;
  int64_t nth = 0;
  while (status == MHA_ERROR_MEMORY) {
    test_allocator allocator;
    mha_config config = layer_heads(H, G);
    mha_weights *weights = NULL;
    mha_error error;
    test_allocator_init(&allocator);
    allocator.fail_at = ++nth;
    config.allocator = &allocator.mha;
    status = layer_load_with(flags, &config, path, &weights, &error);
    assert_int_equal(error.status, status);
    assert_int_equal(weights == NULL, status != MHA_OK);
    assert_int_equal(error.message[0] == '\0', status == MHA_OK);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
  assert_int_equal(status, MHA_OK);
  return nth;
}

static void allocation_failures(void **state) {
  static layer_numbers n;
  (void)state;
  layer_put_parts("", LAYER_MATRICES | LAYER_BIASES);
  assert_true(fail_each_allocation("layer", 0) > 2);
  assert_true(fail_each_allocation("layer", MHA_READ_FILE) > LAYER_PARTS);
  layer_make_fitting(&n, LAYER_GPT2);
  for (int t = 0; t < 2; t++) {
    layer_file_write("", &layer_namings[LAYER_GPT2], t ? "F16" : "F32", &n, true, 0);
    assert_true(fail_each_allocation("layer.st", 0) > 2);
    assert_true(fail_each_allocation("layer.st", MHA_READ_FILE) > 3);
  }
}

/* A packed [40][40·3] and [40][40] as 25,600 bytes of float32: mapped they take none, converted
 * they are there once, and the file with them no more. */
static void numbers_are_held_once(void **state) {
  static const struct {
    const char *type;
    size_t offset;
    uint32_t flags;
    size_t at_least, at_most;
  } rows[] = {
      {"F32", 0, 0, 0, 4096},
      {"F32", 0, MHA_READ_FILE, 25600, 25600 + 4096},
      {"F32", 1, 0, 25600, 25600 + 4096},
      {"F64", 0, 0, 25600, 25600 + 4096},
      {"BF16", 0, MHA_READ_FILE, 25600, 25600 + 4096},
  };
  static layer_file file;
  static float zeros[4800];
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    test_allocator allocator;
    mha_config config = layer_heads(8, 0);
    test_note("row %zu", i);
    layer_file_begin(&file);
    for (int k = 0; k < 2; k++) {
      const size_t begin = file.n_data;
      for (int j = 0; j < (k ? 1600 : 4800); j++)
        layer_file_put_number(&file, rows[i].type, zeros[j]);
      layer_file_put_entry(&file, "", k ? "c_proj.weight" : "c_attn.weight", rows[i].type, 2, 40,
                           k ? 40 : 120, begin);
    }
    layer_file_end(&file, rows[i].offset);
    test_allocator_init(&allocator);
    config.allocator = &allocator.mha;
    mha_weights *weights = NULL;
    test_expect(layer_load_with(rows[i].flags, &config, "layer.st", &weights, NULL), MHA_OK, NULL);
    assert_in_range(allocator.live_bytes, rows[i].at_least, rows[i].at_most);
    assert_ptr_equal(mha_weights_retain(weights), weights);
    mha_weights_destroy(weights);
    assert_true(*(const float *)weights->query.matrix == 0.0F);
    mha_weights_destroy(weights);
    test_allocator_check(&allocator);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(every_naming_type_and_alignment_is_the_same_layer,
                                layer_remove_file),
      cmocka_unit_test_teardown(packed_sizes_follow_from_each_other, layer_remove_file),
      cmocka_unit_test_teardown(other_tensors_do_not_matter, layer_remove_file),
      cmocka_unit_test_teardown(the_prefix_tells_which_layer, layer_remove_file),
      cmocka_unit_test_teardown(a_missing_tensor_is_named, layer_remove_file),
      cmocka_unit_test_teardown(a_type_that_is_used_and_unknown_is_named, layer_remove_file),
      cmocka_unit_test_teardown(what_is_not_computed_is_named, layer_remove_file),
      cmocka_unit_test_teardown(shapes_that_do_not_fit_are_told, layer_remove_file),
      cmocka_unit_test_teardown(the_wrong_orientation_does_not_fit, layer_remove_file),
      cmocka_unit_test_teardown(norms_and_sinks_load, layer_remove_file),
      cmocka_unit_test_teardown(one_head_takes_either_norm, layer_remove_file),
      cmocka_unit_test_teardown(norms_that_do_not_fit_are_refused, layer_remove_file),
      cmocka_unit_test_teardown(layers_outlive_their_files, layer_remove_file),
      cmocka_unit_test_teardown(allocation_failures, layer_remove_folder),
      cmocka_unit_test_teardown(numbers_are_held_once, layer_remove_file),
  };
  return cmocka_run_group_tests(tests, layer_enter_folder, layer_leave_folder);
}
