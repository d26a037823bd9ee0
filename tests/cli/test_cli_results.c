/* The files that the command writes: pictures; two results that would be one file; where results
 * may not go; and what limits and signals leave behind. */
#define _XOPEN_SOURCE 700

#include "command.h"
#include "inputs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Pictures -------------------------------------------------------------------------------- */

static char picture[COMMAND_TEXT_BYTES];

static void take_picture(const char *path) {
  command_read_text(path, picture);
  assert_int_equal(unlink(path), 0);
  assert_memory_equal(picture, "<?xml ", 6);
  assert_string_equal(picture + strlen(picture) - 7, "</svg>\n");
}

static int count_in_picture(const char *piece) {
  int n = 0;
  for (const char *at = strstr(picture, piece); at; at = strstr(at + 1, piece))
    n++;
  return n;
}

/* The article's sentence, a label for each character. */
#define SENTENCE                                                                                   \
  "\xE8\xBF\x9C\xE6\x96\xB9\xE6\x9C\x89\xE9\xA2\x97\xE8\x8B\xB9\xE6\x9E\x9C\xE6\xA0\x91"

static void demo_draws_the_articles_heads(void **state) {
  static char walk[COMMAND_TEXT_BYTES];
  (void)state;
  RUN_WELL("demo");
  memcpy(walk, command_out, sizeof walk);
  RUN_WELL("demo", "--svg", "p.svg");
  assert_string_equal(command_out, walk);
  take_picture("p.svg");
  for (int i = 0; i < 7; i++) {
    char label[8];
    (void)snprintf(label, sizeof label, ">%.3s<", &SENTENCE[3 * i]);
    assert_int_equal(count_in_picture(label), 4); /* a row and a column in both heads */
  }
  assert_int_equal(count_in_picture(">head 0<"), 1);
  assert_int_equal(count_in_picture(">head 1<"), 1);
  assert_int_equal(count_in_picture(">head "), 2);
  RUN_WELL("demo", "--svg=p.svg", "--labels", "a,<b>,c,d,e,f,");
  take_picture("p.svg");
  assert_int_equal(count_in_picture(">&lt;b&gt;<"), 4);
}

/* The numbers that stand in the cells of two maps of 7 x 7. */
static void read_cells(double cells[98]) {
  const char *at = picture;
  for (int i = 0; i < 98; i++) {
    at = i % 49 == 0 ? strstr(at, "font-size=\"11\"") : at;
    at = strstr(at, "\"0.35em\"");
    assert_non_null(at);
    at = strchr(at, '>') + 1;
    cells[i] = strtod(at, NULL);
  }
}

/* Two decimals of each weight, in the order of the article's file. */
static void cells_show_the_articles_weights(void **state) {
  double cells[98];
  double *weights = test_read_npy(ARTICLE "weights.npy", 98);
  (void)state;
  RUN_WELL("demo", "--svg", "p.svg");
  take_picture("p.svg");
  read_cells(cells);
  for (int i = 0; i < 98; i++)
    test_near("cell", cells[i], weights[i], 0.005 + article_tolerance);
  free(weights);
}

/* Nobody asks for the weights themselves, somebody does, or a cache gives them. */
static void run_draws_what_the_demo_draws(void **state) {
  static char expected[COMMAND_TEXT_BYTES];
  double cells[98];
  (void)state;
  RUN_WELL("demo", "--svg", "p.svg");
  take_picture("p.svg");
  memcpy(expected, picture, sizeof expected);
  RUN_WELL(ARTICLE_RUN, "--output", "y.npy", "--svg", "p.svg", "--labels", SENTENCE);
  take_picture("p.svg");
  assert_string_equal(picture, expected);
  command_check_article("y.npy", ARTICLE "output.npy", 2, (const int64_t[]){7, 8});
  RUN_WELL(ARTICLE_RUN, "--output", "y.npy", "--svg", "p.svg", "--labels", SENTENCE,
           "--attn-weights", "p.npy", "--stage", "weights");
  take_picture("p.svg");
  assert_string_equal(picture, expected);
  command_check_article("p.npy", ARTICLE "weights.npy", 3, (const int64_t[]){2, 7, 7});
  RUN_WELL(ARTICLE_STEPS, "--svg", "p.svg");
  take_picture("p.svg");
  assert_int_equal(count_in_picture(">6<"), 4); /* numbers in place of labels */
  read_cells(cells);
  for (int i = 0; i < 98; i++) { /* the first query sees one key, and nobody a later one */
    assert_true(i % 49 > 0 || cells[i] == 1);
    assert_true(i % 49 / 7 >= i % 7 || cells[i] == 0);
  }
  assert_int_equal(unlink("y.npy"), 0);
}

static void entries_and_keys_are_drawn(void **state) {
  (void)state;
  RUN_WELL(ODD_RUN, "--svg", "p.svg");
  take_picture("p.svg");
  for (int entry = 0; entry < B; entry++)
    for (int head = 0; head < H; head++) {
      char title[32];
      (void)snprintf(title, sizeof title, ">entry %d, head %d<", entry, head);
      assert_int_equal(count_in_picture(title), 1);
    }
  assert_int_equal(count_in_picture(">4<"), 2 * B * H); /* LQ = 5, LK = 6 */
  assert_int_equal(count_in_picture(">5<"), B * H);
  assert_int_equal(count_in_picture(">6<"), 0);
  assert_int_equal(unlink("y.npy"), 0);
}

/* ---- Two names of one file ------------------------------------------------------------------- */

/* One file under two names is one file; two links that are no links to each other are two. */
static void results_meet_through_links(void **state) {
  (void)state;
  test_put_file("y.npy", "old", 3);
  assert_int_equal(symlink("y.npy", "link.npy") + symlink("w", "folder"), 0);
  RUN_BADLY(2, "--lse is \"link.npy\", the file that --output names", ARTICLE_RUN, "--output",
            "y.npy", "--lse", "link.npy");
  RUN_BADLY(2, "--lse is \"folder/f.npy\", the file that --output names", ARTICLE_RUN, "--output",
            "w/f.npy", "--lse", "folder/f.npy");
  assert_int_equal(link("y.npy", "hard.npy"), 0);
  RUN_BADLY(2, "--lse is \"hard.npy\", the file that --output names", ARTICLE_RUN, "--output",
            "y.npy", "--lse", "hard.npy");
  assert_int_equal(unlink("y.npy"), 0); /* the link now leads to a file that is not there yet */
  RUN_BADLY(2, "--lse is \"./y.npy\", the file that --output names", ARTICLE_RUN, "--output",
            "link.npy", "--lse", "./y.npy");
  RUN_WELL(ARTICLE_RUN, "--output", "link.npy", "--lse", "hard.npy");
  command_check_article("y.npy", ARTICLE "output.npy", 2, (const int64_t[]){7, 8});
  assert_int_equal(unlink("hard.npy") + unlink("link.npy"), 0);
  RUN_WELL(ARTICLE_RUN, "--output", "y.npy", "--lse", "folder/y.npy");
  assert_int_equal(unlink("y.npy") + unlink("w/y.npy") + unlink("folder"), 0);
}

/* ---- Where results may not go ---------------------------------------------------------------- */

/* With --trace, so that standard output would show that something was computed. */
static void refuse_result(const char *path, const char *fragment) {
  test_note("%s", path);
  RUN_BADLY(1, fragment, ARTICLE_RUN, "--output", "new.npy", "--lse", path, "--trace");
  assert_memory_equal(command_err, "mha: --lse: ", 12);
  assert_false(test_exists("new.npy"));
}

/* Every option that names a result, of both commands. */
static void refuse_result_everywhere(const char *path, const char *fragment) {
  refuse_result(path, fragment);
  RUN_BADLY(1, fragment, ARTICLE_RUN, "--output", path, "--trace");
  RUN_BADLY(1, fragment, ARTICLE_RUN, "--output", "new.npy", "--attn-weights", path, "--trace");
  RUN_BADLY(1, fragment, ARTICLE_RUN, "--output", "new.npy", "--svg", path, "--trace");
  RUN_BADLY(1, fragment, "demo", "--svg", path, "--trace");
  assert_false(test_exists("new.npy"));
}

static void open_files_stay_as_they_are(void **state) {
  static const char *const paths[] = {"/dev/stdout",     "/dev/stderr", "/dev/fd/1",
                                      "/proc/self/fd/1", "to_stdout",   "/dev/../dev/stdout"};
  (void)state;
  assert_int_equal(symlink("/dev/stdout", "to_stdout"), 0);
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
    if (test_exists(paths[i]))
      (i == 0 ? refuse_result_everywhere : refuse_result)(
          paths[i], "stands for an open file of a process; rule: a path of its own");
  assert_int_equal(unlink("to_stdout"), 0);
}

static void what_is_no_file_stays_as_it_is(void **state) {
  struct stat info;
  (void)state;
  assert_int_equal(mkfifo("fifo", 0600) + symlink("/dev/null", "null"), 0);
  test_put_file("protected", "old", 3);
  assert_int_equal(chmod("protected", 0444), 0);
  const int before = test_files_in(".");
  refuse_result("fifo", ": fifo is not a regular file; rule: only such are replaced");
  refuse_result("w", "w is not a regular file");
  refuse_result_everywhere("/dev/null", "/dev/null is not a regular file");
  refuse_result("null", "null is not a regular file");
  refuse_result("protected", "protected cannot be written: ");
  assert_int_equal(test_files_in("."), before);
  assert_int_equal(stat("/dev/null", &info), 0);
  assert_true(S_ISCHR(info.st_mode));
  assert_int_equal(lstat("null", &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  command_read_text("protected", command_out);
  assert_string_equal(command_out, "old");
  assert_int_equal(unlink("fifo") + unlink("null") + unlink("protected"), 0);
}

static void a_full_standard_output_is_an_error(void **state) {
  (void)state;
  if (!test_exists("/dev/full"))
    skip();
  assert_int_equal(command_run_to("/dev/full", (const char *const[]){"demo", NULL}), 1);
  assert_string_equal(command_err, "mha: standard output cannot be written\n");
  assert_int_equal(command_run_to("/dev/full", (const char *const[]){"--version", NULL}), 1);
}

/* ---- Limits and signals ---------------------------------------------------------------------- */

static void limit_files(void) {
  const struct rlimit limit = {1000, 1000};
  if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
    _exit(125);
}

/* The output fits and is complete before the picture meets the limit. */
static void a_limit_on_files_leaves_nothing(void **state) {
  (void)state;
  test_put_file("y.npy", "old", 3);
  const int before = test_files_in(".");
  command_in_child = limit_files;
  RUN_BADLY(1, "p.svg cannot be written: ", ARTICLE_RUN, "--output", "y.npy", "--svg", "p.svg");
  RUN_BADLY(1, "p.svg cannot be written: ", "demo", "--svg", "p.svg");
  assert_int_equal(command_run((const char *const[]){"demo", NULL}), 1);
  assert_string_equal(command_err, "mha: standard output cannot be written\n");
  assert_int_equal(test_files_in("."), before);
  command_read_text("y.npy", command_out);
  assert_string_equal(command_out, "old");
  assert_int_equal(unlink("y.npy"), 0);
}

static int leave_child_alone(void **state) {
  (void)state;
  command_in_child = NULL;
  command_signal = 0;
  return 0;
}

static int sent_signal;
static int sent_at;
static bool signal_is_ignored;

static void send_signal(void) {
  char number[16];
  char at[16];
  (void)snprintf(number, sizeof number, "%d", sent_signal);
  (void)snprintf(at, sizeof at, "%d", sent_at);
  if (setenv("LD_PRELOAD", MHA_SIGNAL_AT_FSYNC_PATH, 1) != 0 ||
      setenv("ASAN_OPTIONS", "verify_asan_link_order=0", 1) != 0 ||
      setenv("MHA_TEST_SIGNAL", number, 1) != 0 || setenv("MHA_TEST_FSYNC", at, 1) != 0)
    _exit(125);
  if (signal_is_ignored)
    (void)signal(sent_signal, SIG_IGN);
}

#define FOUR_RESULTS                                                                               \
  ARTICLE_RUN, "--output", "y.npy", "--attn-weights", "p.npy", "--lse", "f.npy", "--svg", "p.svg"

/* Signals that come while results are written. The first four calls of fsync are for the files,
 * which then get their names one by one, each with a call for the folder. */
static void signals_leave_no_temporary_files(void **state) {
  static const int signals[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU};
  static const char *const run_words[] = {FOUR_RESULTS, NULL};
  static const char *const demo_words[] = {"demo", "--svg", "p.svg", NULL};
  const int before = test_files_in(".");
  (void)state;
  command_in_child = send_signal;
  for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++)
    for (sent_at = 1; sent_at <= (i == 0 ? 6 : 1); sent_at++) {
      const int n_named = sent_at > 4 ? sent_at - 4 : 0;
      test_note("signal %d at %d", signals[i], sent_at);
      sent_signal = command_signal = signals[i];
      (void)command_run(run_words);
      assert_string_equal(command_err, "");
      assert_int_equal(test_files_in("."), before + n_named);
      assert_int_equal(test_exists("y.npy"), n_named > 0);
      assert_int_equal(test_exists("p.npy"), n_named > 1);
      (void)unlink("y.npy");
      (void)unlink("p.npy");
      if (i == 0 && sent_at == 1)
        (void)command_run(demo_words);
      assert_int_equal(test_files_in("."), before);
    }
}

/* They wait until the file is complete: its temporary name is the library's own. */
static void signals_let_convert_finish(void **state) {
  static const int signals[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU};
  static const char *const words[] = {"convert", article,   "out.st", "--type",
                                      "f16",     "--heads", "2",      NULL};
  const int before = test_files_in(".");
  (void)state;
  command_in_child = send_signal;
  for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
    test_note("signal %d", signals[i]);
    sent_at = 1;
    sent_signal = command_signal = signals[i];
    (void)command_run(words);
    assert_string_equal(command_err, "");
    assert_int_equal(test_files_in("."), before + 1);
    assert_int_equal(unlink("out.st"), 0);
  }
}

/* As nohup wants it. */
static void ignored_signals_stay_ignored(void **state) {
  (void)state;
  command_in_child = send_signal;
  sent_signal = SIGHUP;
  sent_at = 2;
  signal_is_ignored = true;
  RUN_WELL(FOUR_RESULTS);
  command_check_article("y.npy", ARTICLE "output.npy", 2, (const int64_t[]){7, 8});
  assert_int_equal(unlink("p.npy") + unlink("f.npy") + unlink("p.svg"), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(demo_draws_the_articles_heads),
      cmocka_unit_test(cells_show_the_articles_weights),
      cmocka_unit_test(run_draws_what_the_demo_draws),
      cmocka_unit_test(entries_and_keys_are_drawn),
      cmocka_unit_test(results_meet_through_links),
      cmocka_unit_test(open_files_stay_as_they_are),
      cmocka_unit_test(what_is_no_file_stays_as_it_is),
      cmocka_unit_test(a_full_standard_output_is_an_error),
      cmocka_unit_test_teardown(a_limit_on_files_leaves_nothing, leave_child_alone),
      cmocka_unit_test_teardown(signals_leave_no_temporary_files, leave_child_alone),
      cmocka_unit_test_teardown(signals_let_convert_finish, leave_child_alone),
      cmocka_unit_test_teardown(ignored_signals_stay_ignored, leave_child_alone),
  };
  return cmocka_run_group_tests(tests, command_enter_folder, command_leave_folder);
}
