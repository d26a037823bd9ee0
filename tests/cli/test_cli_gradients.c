/* The way back in the command: what it writes is compared, bit by bit, with what the library gives
 * in this process, and with central differences that the command computes itself; then what it
 * refuses, and what it leaves behind. */
#define _XOPEN_SOURCE 700

#include "command.h"
#include "inputs.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- The same call in this process ----------------------------------------------------------- */

enum { Q, K, V, WQ, WK, WV, WO, BQ, BK, BV, BO, Q_NORM, K_NORM, BIAS, SLOPES, SINKS, GRADIENTS };

static const char *const files[GRADIENTS] = {
    "g/d_query.npy",    "g/d_key.npy",  "g/d_value.npy",        "g/d_wq.npy",
    "g/d_wk.npy",       "g/d_wv.npy",   "g/d_wo.npy",           "g/d_bq.npy",
    "g/d_bk.npy",       "g/d_bv.npy",   "g/d_bo.npy",           "g/d_query_norm.npy",
    "g/d_key_norm.npy", "g/d_bias.npy", "g/d_alibi_slopes.npy", "g/d_sinks.npy"};

/* What the library gives; rank is 0 where there is no such thing. */
typedef struct gradient {
  float numbers[B * H * LQ * LK];
  int rank;
  int64_t shape[4];
} gradient;

static gradient expected[GRADIENTS];
static float expected_output[B * LQ * EO];
static float dy[B * LQ * EO];

static float *want(int which, const void *thing, int rank, const int64_t *shape) {
  gradient *g = &expected[which];
  g->rank = thing ? rank : 0;
  for (int axis = 0; axis < g->rank; axis++)
    g->shape[axis] = shape[axis];
  return thing ? g->numbers : NULL;
}

#define WANT(which, thing, ...)                                                                    \
  want(which, thing, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),                    \
       (const int64_t[]){__VA_ARGS__})

/* Rows that lie `ld` apart, moved together. */
static void close_up(int which, int64_t ld) {
  gradient *g = &expected[which];
  for (int64_t row = 0; row < g->shape[0]; row++)
    memmove(g->numbers + row * g->shape[1], g->numbers + row * ld,
            (size_t)g->shape[1] * sizeof(float));
}

static void want_layer(const mha_config *c, const mha_matrices *w, mha_backward_args *back) {
  const int64_t q = c->n_heads * c->head_size, k = c->n_kv_heads * c->head_size;
  const int64_t v = c->n_kv_heads * c->value_head_size, o = c->n_heads * c->value_head_size;
  const bool in_out = w->orientation == MHA_IN_OUT;
#define MATRIX(which, thing, in, out)                                                              \
  WANT(which, thing, in_out ? (in) : (out), in_out ? (out) : (in))
  back->d_wq = MATRIX(WQ, w->query, c->query_width, q);
  back->d_wk = MATRIX(WK, w->key, c->key_width, k);
  back->d_wv = MATRIX(WV, w->value, c->value_width, v);
  back->d_wo = MATRIX(WO, w->output, o, c->output_width);
  back->d_bq = WANT(BQ, w->query_bias, q);
  back->d_bk = WANT(BK, w->key_bias, k);
  back->d_bv = WANT(BV, w->value_bias, v);
  back->d_bo = WANT(BO, w->output_bias, c->output_width);
  back->d_query_norm = WANT(Q_NORM, w->query_norm, c->head_size);
  back->d_key_norm = WANT(K_NORM, w->key_norm, c->head_size);
}

/* Forward and backward, everything there is asked for; the shapes of the call's own things but for
 * those per head are in `expected` already. */
static void call_library(const char *path, const char *prefix, mha_config config,
                         mha_forward_args *args, mha_backward_args *back) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_tape *tape = NULL;
  mha_matrices matrices;
  mha_error error;
  MHA_INIT(&matrices);
  test_expect(mha_weights_load(&config, path, prefix, &weights, &error), MHA_OK, &error);
  test_expect(mha_weights_config(weights, &config, &error), MHA_OK, &error);
  test_expect(mha_weights_matrices(weights, &matrices, &error), MHA_OK, &error);
  test_expect(mha_context_create(NULL, &context, &error), MHA_OK, &error);
  test_expect(mha_tape_create(NULL, &tape, &error), MHA_OK, &error);
  want_layer(&config, &matrices, back);
  back->d_alibi_slopes = WANT(SLOPES, args->rules->alibi_slopes, config.n_heads);
  back->d_sinks =
      WANT(SINKS, args->rules->sinks ? args->rules->sinks : matrices.sinks, config.n_heads);
  args->output = expected_output;
  args->tape = tape;
  back->tape = tape;
  back->dy = dy;
  test_expect(mha_forward(context, weights, args, &error), MHA_OK, &error);
  test_expect(mha_backward(context, weights, args, back, &error), MHA_OK, &error);
  close_up(WQ, matrices.query_ld);
  close_up(WK, matrices.key_ld);
  close_up(WV, matrices.value_ld);
  close_up(WO, matrices.output_ld);
  mha_tape_destroy(tape);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
}

static mha_config heads(int64_t n, int64_t n_kv) {
  mha_config config;
  MHA_INIT(&config);
  config.n_heads = n;
  config.n_kv_heads = n_kv;
  return config;
}

/* Takes all files of the folder, which holds what is expected and nothing else. */
static void check_folder(void) {
  for (int i = 0; i < GRADIENTS; i++) {
    test_note("%s", files[i]);
    assert_int_equal(test_exists(files[i]), expected[i].rank > 0);
    if (expected[i].rank > 0)
      command_same_bits(files[i], expected[i].rank, expected[i].shape, expected[i].numbers);
  }
  assert_int_equal(test_files_in("g"), 0);
  assert_int_equal(rmdir("g"), 0);
}

static float largest(int which) {
  float most = 0;
  for (int64_t i = 0; i < (int64_t)(sizeof expected->numbers / sizeof(float)); i++)
    most = fmaxf(most, fabsf(expected[which].numbers[i]));
  return most;
}

#define BACKWARD    "--backward", "dy.npy", "--gradients", "g"
#define ARTICLE_ALL ARTICLE_RUN, "--output", "y.npy", BACKWARD

static int enter(void **state) {
  test_random random;
  if (command_enter_folder(state) != 0)
    return -1;
  test_random_seed(&random, 5);
  PUT(&random, "dy.npy", dy, 3, B, LQ, EO);
  return 0;
}

static void clear_expected(void) {
  memset(expected, 0, sizeof expected);
}

/* ---- Every gradient -------------------------------------------------------------------------- */

typedef struct call {
  mha_rules rules;
  mha_forward_args args;
  mha_backward_args back;
} call;

static void begin_odd_call(call *c) {
  clear_expected();
  MHA_INIT(&c->rules);
  MHA_INIT(&c->args);
  MHA_INIT(&c->back);
  c->args.batch = B;
  c->args.query_length = LQ;
  c->args.key_length = LK;
  c->args.query = odd_query;
  c->args.key = odd_key;
  c->args.value = odd_value;
  c->args.rules = &c->rules;
  c->back.d_query = WANT(Q, odd_query, B, LQ, EQ);
  c->back.d_key = WANT(K, odd_key, B, LK, EK);
  c->back.d_value = WANT(V, odd_value, B, LK, EV);
}

static void add_rules(call *c) {
  c->rules.bias = (mha_bias){.data = odd_bias, .batch = 1, .heads = H, .rows = LQ, .columns = LK};
  c->back.d_bias = WANT(BIAS, odd_bias, H, LQ, LK);
  c->rules.alibi_slopes = odd_slopes;
  c->rules.sinks = odd_sinks;
}

#define ODD_RULES "--bias", "bias.npy", "--alibi", "slopes.npy", "--sinks", "sinks.npy"

static void gradients_are_those_of_the_library(void **state) {
  call c;
  (void)state;
  begin_odd_call(&c);
  add_rules(&c);
  call_library("w", "a.", heads(H, G), &c.args, &c.back);
  for (int i = 0; i < GRADIENTS; i++)
    assert_true((expected[i].rank > 0) == (largest(i) > 0));
  RUN_WELL(ODD_RUN, ODD_RULES, BACKWARD);
  assert_string_equal(command_out, "");
  command_same_bits("y.npy", 3, (const int64_t[]){B, LQ, EO}, expected_output);
  check_folder();
  RUN_WELL(ODD_RUN, ODD_RULES, "--backward=dy.npy", "--gradients=g//", "--threads=2");
  assert_int_equal(unlink("y.npy"), 0);
  check_folder();
}

/* Nothing of rules that were not given, and what is there already is replaced. */
static void what_there_is_not_has_no_gradient(void **state) {
  call c;
  (void)state;
  begin_odd_call(&c);
  call_library("w", "a.", heads(H, G), &c.args, &c.back);
  assert_int_equal(mkdir("g", 0700), 0);
  test_put_file("g/d_query.npy", "old", 3);
  RUN_WELL(ODD_RUN, BACKWARD);
  assert_int_equal(unlink("y.npy"), 0);
  check_folder();
}

/* [out][in], biases of Q and V, norms, and sinks of its own. */
static void a_layer_with_norms_and_sinks(void **state) {
  static float numbers[9][H * D * EQ];
  static const inputs_tensor tensors[] = {
      {"q_proj.weight", "F32", "20,8", 640, numbers[0]},
      {"k_proj.weight", "F32", "10,6", 240, numbers[1]},
      {"v_proj.weight", "F32", "4,5", 80, numbers[2]},
      {"o_proj.weight", "F32", "7,8", 224, numbers[3]},
      {"q_proj.bias", "F32", "20", 80, numbers[4]},
      {"v_proj.bias", "F32", "4", 16, numbers[5]},
      {"q_norm.weight", "F32", "5", 20, numbers[6]},
      {"k_norm.weight", "F32", "5", 20, numbers[7]},
      {"sinks", "F32", "4", 16, numbers[8]},
  };
  mha_config config = heads(H, G);
  test_random random;
  call c;
  (void)state;
  test_random_seed(&random, 6);
  test_fill_normal(&random, &numbers[0][0], sizeof numbers / sizeof(float), 0.5);
  inputs_put_safetensors("layer.st", tensors, N_TENSORS(tensors));
  begin_odd_call(&c);
  config.norm_epsilon = 1e-3F;
  call_library("layer.st", "", config, &c.args, &c.back);
  assert_true(expected[WQ].shape[1] == EQ && expected[BQ].rank == 1 && expected[BK].rank == 0);
  assert_true(expected[Q_NORM].rank == 1 && expected[K_NORM].rank == 1);
  assert_true(expected[SINKS].rank == 1);
  RUN_WELL(ODD_INPUTS, "--weights", "layer.st", "--norm-epsilon", "1e-3", BACKWARD);
  assert_int_equal(unlink("y.npy") + unlink("layer.st"), 0);
  check_folder();
}

/* Three matrices in one, whose rows are not dense; an input without a batch that is also key and
 * value; a bias of one row. */
static void a_packed_matrix_has_three_gradients(void **state) {
  static float numbers[3][24 * 8];
  static float x[7 * 8], bias[7];
  static const inputs_tensor tensors[] = {{"c_attn.weight", "F32", "8,24", 768, numbers[0]},
                                          {"c_proj.weight", "F32", "8,8", 256, numbers[1]},
                                          {"c_attn.bias", "F32", "24", 96, numbers[2]}};
  test_random random;
  call c;
  (void)state;
  test_random_seed(&random, 7);
  test_fill_normal(&random, &numbers[0][0], sizeof numbers / sizeof(float), 0.5);
  inputs_put_safetensors("layer.st", tensors, N_TENSORS(tensors));
  PUT(&random, "x.npy", x, 2, 7, 8);
  PUT(&random, "row.npy", bias, 1, 7);
  assert_int_equal(mha_npy_write("dy2.npy", 2, (const int64_t[]){7, 8}, dy, NULL), MHA_OK);
  begin_odd_call(&c);
  clear_expected();
  c.args.batch = 1;
  c.args.query_length = 7;
  c.args.key_length = 0;
  c.args.query = x;
  c.args.key = c.args.value = NULL;
  c.rules.bias = (mha_bias){.data = bias, .batch = 1, .heads = 1, .rows = 1, .columns = 7};
  c.back.d_query = WANT(Q, x, 7, 8);
  c.back.d_bias = WANT(BIAS, bias, 7);
  c.back.d_key = c.back.d_value = NULL;
  call_library("layer.st", "", heads(2, 2), &c.args, &c.back);
  assert_true(largest(WQ) > 0 && largest(WK) > 0 && largest(WV) > 0 && largest(BV) > 0);
  RUN_WELL("run", "--weights", "layer.st", "--heads", "2", "--input", "x.npy", "--output", "y.npy",
           "--bias", "row.npy", "--backward", "dy2.npy", "--gradients", "g");
  command_same_bits("y.npy", 2, (const int64_t[]){7, 8}, expected_output);
  check_folder();
  assert_int_equal(unlink("layer.st") + unlink("x.npy") + unlink("row.npy") + unlink("dy2.npy"), 0);
}

/* No row gives matrices no gradient, which is 0. */
static void empty_inputs_have_gradients_of_0(void **state) {
  static const int64_t no_rows[2] = {0, 8}, whole[2] = {8, 8};
  static const float zeros[64];
  (void)state;
  assert_int_equal(mha_npy_write("empty.npy", 2, no_rows, NULL, NULL), MHA_OK);
  RUN_WELL("run", "--weights", article, "--heads", "2", "--input", "empty.npy", "--output", "y.npy",
           "--backward", "empty.npy", "--gradients", "g");
  command_same_bits("g/d_query.npy", 2, no_rows, zeros);
  for (int i = WQ; i <= WO; i++)
    command_same_bits(files[i], 2, whole, zeros);
  assert_int_equal(unlink("y.npy") + unlink("empty.npy") + rmdir("g"), 0);
}

/* ---- Dropout --------------------------------------------------------------------------------- */

#define ODD_DROPOUT ODD_RUN, "--dropout", "0.375"

/* The output with dropout in this process, seed and call as given. */
static void call_with_dropout(uint64_t seed, uint64_t number) {
  call c;
  begin_odd_call(&c);
  c.rules.dropout = 0.375F;
  c.rules.dropout_seed = seed;
  c.rules.dropout_call = number;
  call_library("w", "a.", heads(H, G), &c.args, &c.back);
}

static void dropout_reaches_the_library(void **state) {
  static const int64_t shape[3] = {B, LQ, EO};
  static float plain[B * LQ * EO], others[3][B * LQ * EO];
  (void)state;
  RUN_WELL(ODD_RUN, "--dropout", "0");
  mha_npy_array y = command_take("y.npy");
  memcpy(plain, y.data, sizeof plain);
  mha_npy_array_release(&y);
  RUN_WELL(ODD_RUN);
  command_same_bits("y.npy", 3, shape, plain);
  call_with_dropout(0, 0);
  memcpy(others[0], expected_output, sizeof plain);
  RUN_WELL(ODD_DROPOUT);
  command_same_bits("y.npy", 3, shape, expected_output);
  call_with_dropout(UINT64_C(18446744073709551615), 0);
  memcpy(others[1], expected_output, sizeof plain);
  RUN_WELL(ODD_DROPOUT, "--seed", "18446744073709551615");
  command_same_bits("y.npy", 3, shape, expected_output);
  call_with_dropout(0, UINT64_C(1) << 33);
  memcpy(others[2], expected_output, sizeof plain);
  RUN_WELL(ODD_DROPOUT, "--call", "8589934592");
  command_same_bits("y.npy", 3, shape, expected_output);
  for (int i = 0; i < 3; i++) {
    assert_memory_not_equal(others[i], plain, sizeof plain);
    assert_memory_not_equal(others[i], others[(i + 1) % 3], sizeof plain);
  }
}

static void gradients_with_dropout(void **state) {
  (void)state;
  call_with_dropout(7, 3);
  RUN_WELL(ODD_DROPOUT, "--seed", "7", "--call=3", BACKWARD);
  assert_int_equal(unlink("y.npy"), 0);
  check_folder();
}

/* ---- Central differences --------------------------------------------------------------------- */

#define DIFFERENCE_RUN ODD_DROPOUT, ODD_RULES, "--seed", "11", "--causal", "--align", "2"

/* The sum of dy times the output, as the command computes it. */
static double loss(void) {
  double sum = 0;
  RUN_WELL(DIFFERENCE_RUN);
  mha_npy_array y = command_take("y.npy");
  for (int64_t i = 0; i < y.n_elements; i++)
    sum += (double)dy[i] * (double)((const float *)y.data)[i];
  mha_npy_array_release(&y);
  return sum;
}

/* Moves single numbers of an input's file to either side and takes what the loss makes of it for
 * the gradient. With a step of 2^-7 a third derivative of 24 makes it wrong by 2.5e-4 (distances up
 * to 8 count three times in that of a slope), and rounding the outputs by some 2e-4. */
static void check_differences(const char *path, const char *gradient_path) {
  const double step = 0.0078125;
  mha_npy_array numbers, got = command_take(gradient_path);
  mha_error error;
  test_expect(mha_npy_read(path, MHA_NPY_FLOATS, NULL, &numbers, &error), MHA_OK, &error);
  command_check_shape(&got, numbers.rank, numbers.shape);
  float *x = numbers.data;
  for (int64_t i = 0; i < numbers.n_elements; i += 1 + numbers.n_elements / 4) {
    const float middle = x[i];
    double at[2];
    for (int side = 0; side < 2; side++) {
      x[i] = middle + (float)(side == 0 ? -step : step);
      test_expect(mha_npy_write(path, numbers.rank, numbers.shape, x, &error), MHA_OK, &error);
      at[side] = loss();
    }
    x[i] = middle;
    test_near(gradient_path, (double)((const float *)got.data)[i], (at[1] - at[0]) / (2 * step),
              1e-3);
  }
  test_expect(mha_npy_write(path, numbers.rank, numbers.shape, x, &error), MHA_OK, &error);
  mha_npy_array_release(&numbers);
  mha_npy_array_release(&got);
}

static void gradients_are_what_the_loss_does(void **state) {
  static const struct {
    const char *path;
    int which;
  } things[] = {{"q.npy", Q},        {"k.npy", K},           {"v.npy", V},
                {"w/a.W_Q.npy", WQ}, {"w/a.W_K.npy", WK},    {"w/a.W_V.npy", WV},
                {"w/a.W_O.npy", WO}, {"w/a.b_K.npy", BK},    {"w/a.b_O.npy", BO},
                {"bias.npy", BIAS},  {"slopes.npy", SLOPES}, {"sinks.npy", SINKS}};
  (void)state;
  RUN_WELL(DIFFERENCE_RUN, BACKWARD);
  assert_int_equal(unlink("y.npy"), 0);
  for (size_t i = 0; i < sizeof things / sizeof things[0]; i++)
    check_differences(things[i].path, files[things[i].which]);
  assert_int_equal(rmdir("g"), 0);
}

/* ---- The trace ------------------------------------------------------------------------------- */

static void traces_show_the_way_back(void **state) {
  static const char *const lines[] = {
      "  output             (2, 5, 7) ",    "  d_concat           (2, 5, 8) ",
      "  d_heads            (2, 4, 5, 2) ", "  d_Q                (2, 5, 20) ",
      "  d_K                (2, 6, 10) ",   "  d_V                (2, 6, 4) "};
  static const char *const inputs[] = {"\n  d_query            (2, 5, 8) ",
                                       "\n  d_key              (2, 6, 6) ",
                                       "\n  d_value            (2, 6, 5) "};
  (void)state;
  RUN_WELL(ODD_RUN, BACKWARD, "--trace");
  const char *at = command_out;
  for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
    const char *found = strstr(at, lines[i]);
    if (!found)
      test_failed("no line \"%s\" in its place in\n%s", lines[i], command_out);
    at = found ? found : at;
  }
  for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
    if (!strstr(at, inputs[i]))
      test_failed("no line \"%s\" behind the others in\n%s", inputs[i] + 1, command_out);
  assert_int_equal(unlink("y.npy") + test_remove_files("g") + rmdir("g"), 0);
}

/* ---- What is refused ------------------------------------------------------------------------- */

static void shapes_of_dy(void **state) {
  static const struct {
    int rank;
    int64_t shape[4];
    const char *shown;
  } rows[] = {{3, {B, LQ, EO + 1}, "(2, 5, 8)"},
              {3, {B, LQ - 1, EO}, "(2, 4, 7)"},
              {3, {B - 1, LQ, EO}, "(1, 5, 7)"},
              {2, {LQ, EO}, "(5, 7)"},
              {1, {EO}, "(7,)"},
              {4, {1, B, LQ, EO}, "(1, 2, 5, 7)"},
              {0, {0}, "()"}};
  static const float numbers[B * LQ * (EO + 1)];
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    char fragment[128];
    (void)snprintf(fragment, sizeof fragment,
                   "other.npy has shape %s; rule: the shape of the output, ", rows[i].shown);
    assert_int_equal(mha_npy_write("other.npy", rows[i].rank, rows[i].shape, numbers, NULL),
                     MHA_OK);
    RUN_BADLY(1, fragment, ODD_RUN, "--backward", "other.npy", "--gradients", "g", "--trace");
    assert_false(test_exists("g") || test_exists("y.npy"));
  }
  assert_int_equal(unlink("other.npy"), 0);
}

static void refuse_folder(const char *folder, const char *fragment) {
  const int before = test_files_in(".");
  test_note("%s", folder);
  RUN_BADLY(1, fragment, ODD_RUN, "--backward", "dy.npy", "--gradients", folder, "--trace");
  assert_memory_equal(command_err, "mha: --gradients: ", 18);
  assert_int_equal(test_files_in("."), before);
}

/* Before anything is computed, as the trace would show. */
static void folders_that_cannot_be(void **state) {
  char endless[5000];
  (void)state;
  assert_int_equal(symlink("nowhere", "link"), 0);
  assert_int_equal(mkdir("g", 0700) + mkdir("g/d_wo.npy", 0700), 0);
  refuse_folder("dy.npy", "dy.npy is not a folder; rule: a folder, or one that can be made");
  refuse_folder("dy.npy/", "dy.npy is not a folder");
  refuse_folder("/dev/null", "/dev/null is not a folder");
  refuse_folder("link", "link is a link to what is not there; rule: a folder");
  refuse_folder("absent/g", "absent/g cannot be made: ");
  refuse_folder("dy.npy/g", "dy.npy/g cannot be examined: ");
  refuse_folder("g", "g/d_wo.npy is not a regular file; rule: only such are replaced");
  memset(endless, 'x', sizeof endless - 1);
  endless[sizeof endless - 1] = '\0';
  RUN_BADLY(1, " cannot be written: ", ODD_RUN, "--backward", "dy.npy", "--gradients", endless);
  assert_int_equal(rmdir("g/d_wo.npy") + rmdir("g") + unlink("link"), 0);
}

/* One file of the folder is another result, or what the weights come from. */
static void files_that_meet(void **state) {
  (void)state;
  assert_int_equal(mkdir("g", 0700), 0);
  RUN_BADLY(2, "--gradients is \"g/d_bq.npy\", the file that --lse names; rule: each result has",
            ODD_RUN, BACKWARD, "--lse", "./g/d_bq.npy");
  assert_int_equal(symlink("d_wq.npy", "g/d_wk.npy"), 0);
  RUN_BADLY(2, "--gradients is \"g/d_wk.npy\", the file that --gradients names", ODD_RUN, BACKWARD);
  assert_int_equal(unlink("g/d_wk.npy"), 0);
  assert_int_equal(symlink("../stdout.txt", "g/d_wk.npy"), 0);
  RUN_BADLY(2, "--gradients is \"g/d_wk.npy\", to which standard output goes", ODD_RUN, BACKWARD);
  assert_int_equal(unlink("g/d_wk.npy"), 0);
  assert_int_equal(symlink("../layer.st", "g/d_wk.npy"), 0);
  test_put_file("layer.st", "old", 3);
  RUN_BADLY(2, "--gradients is \"g/d_wk.npy\", which --weights names too", ODD_INPUTS, "--weights",
            "layer.st", BACKWARD);
  assert_int_equal(unlink("g/d_wk.npy") + unlink("layer.st") + rmdir("g"), 0);
  RUN_BADLY(1, "--output: g/y.npy cannot be written: ", ARTICLE_RUN, "--output", "g/y.npy",
            BACKWARD);
}

/* ---- What is left behind --------------------------------------------------------------------- */

static void limit_files(void) {
  const struct rlimit limit = {500, 500};
  if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
    _exit(125);
}

static int leave_child_alone(void **state) {
  (void)state;
  command_in_child = NULL;
  command_signal = 0;
  return 0;
}

/* The gradient of Wq alone, the fifth file, is too long. */
static void a_limit_on_files_leaves_nothing(void **state) {
  const int before = test_files_in(".");
  (void)state;
  command_in_child = limit_files;
  RUN_BADLY(1, "g/d_wq.npy cannot be written: ", ODD_RUN, BACKWARD);
  assert_int_equal(test_files_in("."), before);
  assert_int_equal(mkdir("g", 0700), 0);
  RUN_BADLY(1, "g/d_wq.npy cannot be written: ", ODD_RUN, BACKWARD);
  assert_int_equal(test_files_in("g"), 0);
  assert_int_equal(test_files_in("."), before + 1); /* it was there before */
  assert_int_equal(rmdir("g"), 0);
}

static int sent_at;

static void send_signal(void) {
  char at[16];
  char number[16];
  (void)snprintf(at, sizeof at, "%d", sent_at);
  (void)snprintf(number, sizeof number, "%d", SIGTERM);
  if (setenv("LD_PRELOAD", MHA_SIGNAL_AT_FSYNC_PATH, 1) != 0 ||
      setenv("ASAN_OPTIONS", "verify_asan_link_order=0", 1) != 0 ||
      setenv("MHA_TEST_SIGNAL", number, 1) != 0 || setenv("MHA_TEST_FSYNC", at, 1) != 0)
    _exit(125);
}

/* The first call of fsync is for the name of the folder, ten are for files: the output, three
 * inputs, four matrices, two biases. Then each gets its name, with a call for its folder. */
static void signals_leave_no_folder(void **state) {
  static const char *const words[] = {ODD_RUN, BACKWARD, NULL};
  const int before = test_files_in(".");
  (void)state;
  command_in_child = send_signal;
  command_signal = SIGTERM;
  for (sent_at = 1; sent_at <= 13; sent_at++) {
    const int n_named = sent_at > 11 ? sent_at - 11 : 0;
    test_note("at %d", sent_at);
    (void)command_run(words);
    assert_string_equal(command_err, "");
    assert_int_equal(test_exists("y.npy"), n_named > 0);
    assert_int_equal(test_exists("g"), n_named > 1);
    assert_int_equal(test_files_in("."), before + n_named);
    if (n_named > 1)
      assert_int_equal(test_files_in("g") - 1 + unlink("g/d_query.npy") + rmdir("g"), 0);
    (void)unlink("y.npy");
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gradients_are_those_of_the_library),
      cmocka_unit_test(what_there_is_not_has_no_gradient),
      cmocka_unit_test(a_layer_with_norms_and_sinks),
      cmocka_unit_test(a_packed_matrix_has_three_gradients),
      cmocka_unit_test(empty_inputs_have_gradients_of_0),
      cmocka_unit_test(dropout_reaches_the_library),
      cmocka_unit_test(gradients_with_dropout),
      cmocka_unit_test(gradients_are_what_the_loss_does),
      cmocka_unit_test(traces_show_the_way_back),
      cmocka_unit_test(shapes_of_dy),
      cmocka_unit_test(folders_that_cannot_be),
      cmocka_unit_test(files_that_meet),
      cmocka_unit_test_teardown(a_limit_on_files_leaves_nothing, leave_child_alone),
      cmocka_unit_test_teardown(signals_leave_no_folder, leave_child_alone),
  };
  return cmocka_run_group_tests(tests, enter, command_leave_folder);
}
