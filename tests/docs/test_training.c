/* The program of docs/training.md as it stands there: it learns what it says, its gradients are
 * those of central differences, and its pictures are whole. */
#define _XOPEN_SOURCE 700

#include "folder.h"
#include "program.h"

#include <unistd.h>

int training_main(int argc, char **argv);
#define main training_main
#include "training.c" /* NOLINT(bugprone-suspicious-include) */
#undef main

static char program[] = "training", option[] = "--svg", picture_path[] = "p.svg";

static int enter(void **state) {
  (void)state;
  return test_folder_enter("test_training");
}

static int leave(void **state) {
  (void)state;
  (void)unlink("p.svg");
  return test_folder_leave();
}

/* ---- Learning -------------------------------------------------------------------------------- */

static trainer t;

static void open_with_seed(uint64_t seed) {
  mha_error error;
  test_note("seed %u", (unsigned)seed);
  test_expect(open_trainer(&t, seed, &error), MHA_OK, &error);
}

static int hits_of_batch(void) {
  int hits = 0;
  for (int r = 0; r < B * L; r++)
    hits += t.answers[r / L][r % L] == t.letters[r / L][L - 1 - r % L];
  return hits;
}

/* A context of another kind in the place of the program's; false if there is none of it. */
static bool change_context(int32_t engine, int32_t n_threads) {
  mha_context_options options;
  mha_error error;
  MHA_INIT(&options);
  options.engine = engine;
  options.n_threads = n_threads;
  mha_context_destroy(t.context);
  const mha_status status = mha_context_create(&options, &t.context, &error);
  test_expect(status, engine == MHA_ENGINE_BLAS ? MHA_OK : status, &error);
  return status == MHA_OK;
}

/* From the loss of somebody who knows nothing, ln 26 = 3.26, to some 0.002; a hundredth leaves room
 * for other rounding. */
static void learn_to_reverse(void) {
  mha_error error;
  float first = 0, loss = 0;
  test_expect(step(&t, &first, &error), MHA_OK, &error);
  test_near("first loss", (double)first, log(V), 1.0);
  assert_true(hits_of_batch() < B * L / 4);
  for (int n = 1; n <= STEPS; n++)
    test_expect(step(&t, &loss, &error), MHA_OK, &error);
  test_near("last loss", (double)loss, 0, 0.01);
  for (int n = 0; n < 10; n++) {
    draw_letters(&t);
    test_expect(look(&t, &loss, &error), MHA_OK, &error);
    assert_int_equal(hits_of_batch(), B * L);
  }
}

static void every_beginning_learns_to_reverse(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= (test_small() ? 1 : 5); seed++) {
    open_with_seed(seed);
    learn_to_reverse();
    close_trainer(&t);
  }
}

static void the_other_engine_learns_too(void **state) {
  (void)state;
  open_with_seed(1);
  const bool there_is_one = change_context(MHA_ENGINE_XSMM, 1);
  if (there_is_one)
    learn_to_reverse();
  close_trainer(&t);
  if (!there_is_one)
    skip();
}

/* Both heads together take most of the mirrored letter, for every place of every sequence. */
static void attention_becomes_the_other_diagonal(void **state) {
  (void)state;
  mha_error error;
  float loss = 0;
  open_with_seed(1);
  for (int n = 0; n <= STEPS; n++)
    test_expect(step(&t, &loss, &error), MHA_OK, &error);
  for (int b = 0; b < B; b++)
    for (int i = 0; i < L; i++) {
      float sum = 0;
      for (int h = 0; h < H; h++)
        sum += t.weights[b][h][i][L - 1 - i];
      assert_true(sum > 0.5F * H);
    }
  close_trainer(&t);
}

static void thread_counts_change_no_bit_of_a_training(void **state) {
  (void)state;
  static float once[PARAMETERS];
  mha_error error;
  float loss = 0;
  for (int turn = 0; turn < 3; turn++) {
    open_with_seed(2);
    assert_true(change_context(MHA_ENGINE_BLAS, turn + 1));
    for (int n = 0; n < 20; n++)
      test_expect(step(&t, &loss, &error), MHA_OK, &error);
    if (turn == 0)
      memcpy(once, t.p, sizeof once);
    test_same_bits("parameters", (test_shape){{PARAMETERS, 1, 1, 1}}, t.p, once);
    close_trainer(&t);
  }
}

/* ---- Gradients ------------------------------------------------------------------------------- */

static double loss_with(int i, float number) {
  mha_error error;
  const float before = t.p[i];
  float loss = 0;
  t.p[i] = number;
  test_expect(look(&t, &loss, &error), MHA_OK, &error);
  t.p[i] = before;
  return (double)loss;
}

/* Of each kind of parameter some, among them positions that letters share and letters that come
 * more than once. The loss is about 3, rounded to 2e-7 of that in a sum of 144; a gradient is up to
 * 0.2, a third of which would show. */
static void gradients_are_what_the_loss_does(void **state) {
  (void)state;
  static float d[PARAMETERS];
  static const int begins[] = {TABLE, POSITION, WQ, WK, WV, WO, HEAD, PARAMETERS};
  const float move = 1.0F / 64;
  mha_error error;
  float loss = 0;
  open_with_seed(3);
  for (int n = 0; n < 10; n++) /* so that no gradient is small by chance */
    test_expect(step(&t, &loss, &error), MHA_OK, &error);
  draw_letters(&t);
  test_expect(look(&t, &loss, &error), MHA_OK, &error);
  memcpy(d, t.d, sizeof d);
  for (int kind = 0; kind < 7; kind++) {
    double largest = 0;
    for (int i = begins[kind]; i < begins[kind + 1];
         i += 1 + (begins[kind + 1] - begins[kind]) / 29) {
      test_note("kind %d, parameter %d", kind, i - begins[kind]);
      const double expected =
          (loss_with(i, t.p[i] + move) - loss_with(i, t.p[i] - move)) / (2 * (double)move);
      test_near("gradient", (double)d[i], expected, 2e-4);
      largest = fmax(largest, fabs(expected));
    }
    assert_true(largest > 2e-3);
  }
  close_trainer(&t);
}

/* ---- The program ----------------------------------------------------------------------------- */

static void the_program_tells_what_it_learns(void **state) {
  (void)state;
  static const char end[] = "144 of 144 letters right; attention -> noitnetta\n";
  char *argv[] = {program, NULL};
  char printed[1024];
  assert_int_equal(test_run_program(training_main, 1, argv, printed, sizeof printed), 0);
  assert_non_null(strstr(printed, " of 144 letters right; attention -> "));
  assert_non_null(strstr(printed, "\nstep   0  loss "));
  assert_true(strlen(printed) > sizeof end);
  assert_string_equal(printed + strlen(printed) - (sizeof end - 1), end);
}

static int count(const char *text, const char *piece) {
  int n = 0;
  for (const char *at = strstr(text, piece); at; at = strstr(at + 1, piece))
    n++;
  return n;
}

static void the_picture_has_all_squares(void **state) {
  (void)state;
  static char text[65536];
  char *argv[] = {program, option, picture_path, NULL};
  char printed[1024];
  assert_int_equal(test_run_program(training_main, 3, argv, printed, sizeof printed), 0);
  FILE *file = fopen("p.svg", "rb");
  assert_non_null(file);
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  assert_int_equal(fclose(file), 0);
  assert_memory_equal(text, "<svg xmlns='http://www.w3.org/2000/svg' width='440' height='440'", 64);
  assert_string_equal(text + strlen(text) - 7, "</svg>\n");
  assert_int_equal(count(text, "<rect "), 1 + 2 * H * L * L);
  assert_int_equal(count(text, "</text>\n"), 2 * H * 2 * L);
  for (const char *at = strstr(text, "rgb("); at; at = strstr(at + 1, "rgb(")) {
    int red = -1, green = -1;
    assert_int_equal(sscanf(at, "rgb(%d,%d,255)", &red, &green), 2);
    assert_true(red >= 0 && red <= 255 && green == red);
  }
}

static void bad_words_are_refused(void **state) {
  (void)state;
  char absent[] = "absent/p.svg";
  char *cases[][4] = {
      {program, option, NULL}, {program, picture_path, NULL}, {program, option, absent, NULL}};
  char printed[1024];
  for (int i = 0; i < 3; i++) {
    assert_int_equal(
        test_run_program(training_main, i == 2 ? 3 : 2, cases[i], printed, sizeof printed), 1);
    assert_memory_equal(printed, "usage: training", 15);
  }
  assert_int_equal(test_files_in("."), test_exists("p.svg"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_beginning_learns_to_reverse),
      cmocka_unit_test(the_other_engine_learns_too),
      cmocka_unit_test(attention_becomes_the_other_diagonal),
      cmocka_unit_test(thread_counts_change_no_bit_of_a_training),
      cmocka_unit_test(gradients_are_what_the_loss_does),
      cmocka_unit_test(the_program_tells_what_it_learns),
      cmocka_unit_test(the_picture_has_all_squares),
      cmocka_unit_test(bad_words_are_refused),
  };
  return cmocka_run_group_tests(tests, enter, leave);
}
