/* Complete files: what stands at the path before, between and after each step, and what is left
 * behind when a step fails. */
#define _XOPEN_SOURCE 700

#include "folder.h"

#include "files/output.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Files and descriptors ------------------------------------------------------------------- */

static void check_file(const char *path, const char *expected) {
  char text[256];
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  const size_t n = fread(text, 1, sizeof text - 1, file);
  text[n] = '\0';
  assert_int_equal(fclose(file), 0);
  assert_string_equal(text, expected);
}

static int permissions_of(const char *path) {
  struct stat info;
  assert_int_equal(stat(path, &info), 0);
  return (int)(info.st_mode & 07777);
}

/* The lowest number that is free: the same before and after where nothing stays open. */
static int free_descriptor(void) {
  const int number = dup(STDIN_FILENO);
  assert_true(number >= 0);
  assert_int_equal(close(number), 0);
  return number;
}

static void open_well(const char *path, mha_output *output) {
  mha_error error;
  test_expect(mha_output_open(path, output, &error), MHA_OK, &error);
  assert_string_equal(error.message, "");
}

static void write_well(mha_output *output, const char *text) {
  mha_error error;
  test_expect(mha_output_write(output, text, strlen(text), &error), MHA_OK, &error);
}

static void sync_well(mha_output *output) {
  mha_error error;
  test_expect(mha_output_sync(output, &error), MHA_OK, &error);
}

static void commit_well(mha_output *output) {
  mha_error error;
  test_expect(mha_output_commit(output, &error), MHA_OK, &error);
}

/* ---- The four steps -------------------------------------------------------------------------- */

static void the_target_changes_at_the_commit(void **state) {
  const int free_before = free_descriptor();
  mha_output output;
  (void)state;
  test_put_file("some/file", "old", 3);
  open_well("some/file", &output);
  write_well(&output, "one, ");
  write_well(&output, "");
  write_well(&output, "two");
  check_file("some/file", "old");
  sync_well(&output);
  assert_int_equal(free_descriptor(), free_before);
  check_file(output.temporary, "one, two");
  check_file("some/file", "old");
  assert_int_equal(test_files_in("some"), 2);
  commit_well(&output);
  check_file("some/file", "one, two");
  assert_int_equal(test_files_in("some"), 1);
  mha_output_discard(&output); /* there is nothing left to discard */
  check_file("some/file", "one, two");
}

static void nothing_is_there_after_a_discard(void **state) {
  const int free_before = free_descriptor();
  (void)state;
  test_put_file("some/file", "old", 3);
  for (int step = 0; step < 3; step++) {
    mha_output output;
    open_well("some/file", &output);
    if (step > 0)
      write_well(&output, "new");
    if (step > 1)
      sync_well(&output);
    mha_output_discard(&output);
    mha_output_discard(&output);
    check_file("some/file", "old");
    assert_int_equal(test_files_in("some"), 1);
    assert_int_equal(free_descriptor(), free_before);
  }
}

static void paths_without_a_folder(void **state) {
  mha_output output;
  (void)state;
  assert_int_equal(chdir("some"), 0);
  open_well("file", &output);
  write_well(&output, "new");
  sync_well(&output);
  commit_well(&output);
  check_file("file", "new");
  assert_int_equal(test_files_in("."), 1);
  assert_int_equal(chdir(".."), 0);
}

static void permissions_are_kept(void **state) {
  static const mode_t kept[] = {0640, 0600, 0604};
  const mode_t mask = umask(027);
  mha_output output;
  (void)state;
  for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
    test_put_file("some/file", "old", 3);
    assert_int_equal(chmod("some/file", kept[i]), 0);
    open_well("some/file", &output);
    write_well(&output, "new");
    sync_well(&output);
    commit_well(&output);
    assert_int_equal(permissions_of("some/file"), kept[i]);
    assert_int_equal(unlink("some/file"), 0);
  }
  open_well("some/file", &output); /* a new one: as the mask has it */
  sync_well(&output);
  commit_well(&output);
  assert_int_equal(permissions_of("some/file"), 0640);
  (void)umask(mask);
}

static void two_at_once(void **state) {
  mha_output first;
  mha_output second;
  (void)state;
  open_well("some/file", &first);
  open_well("some/file", &second);
  assert_string_not_equal(first.temporary, second.temporary);
  write_well(&first, "first");
  write_well(&second, "second");
  sync_well(&first);
  sync_well(&second);
  commit_well(&second);
  check_file("some/file", "second");
  commit_well(&first);
  check_file("some/file", "first");
  assert_int_equal(test_files_in("some"), 1);
}

/* The link stays, the file that it leads to is replaced, and the temporary file lies beside that.
 */
static void links_are_followed(void **state) {
  struct stat info;
  mha_output output;
  (void)state;
  assert_int_equal(mkdir("other", 0700), 0);
  test_put_file("other/real", "old", 3);
  assert_int_equal(symlink("../other/real", "some/link"), 0);
  open_well("some/link", &output);
  assert_int_equal(test_files_in("other"), 2);
  write_well(&output, "new");
  sync_well(&output);
  commit_well(&output);
  assert_int_equal(lstat("some/link", &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  check_file("other/real", "new");
  assert_int_equal(test_files_in("other"), 1);
  assert_int_equal(unlink("other/real"), 0);
  open_well("some/link", &output); /* what it leads to is not there any more */
  write_well(&output, "made");
  sync_well(&output);
  commit_well(&output);
  check_file("other/real", "made");
  assert_int_equal(lstat("some/link", &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  assert_int_equal(unlink("other/real"), 0);
  assert_int_equal(rmdir("other"), 0);
  assert_int_equal(unlink("some/link"), 0);
}

/* The other names of a file keep what they had. */
static void hard_links_are_parted(void **state) {
  mha_output output;
  (void)state;
  test_put_file("some/file", "old", 3);
  assert_int_equal(link("some/file", "some/other"), 0);
  open_well("some/other", &output);
  write_well(&output, "new");
  sync_well(&output);
  commit_well(&output);
  check_file("some/file", "old");
  check_file("some/other", "new");
  assert_int_equal(unlink("some/other"), 0);
}

/* One file by all its spellings: as it is there, and before it is. */
static void spellings_meet(void **state) {
  static const char *const spellings[] = {"some/file", "some/./file", "some/../some/file",
                                          "link/file", "some/soft",   "deep"};
  static const char *const others[] = {"some/other", "file", "some", "some/loop", "/dev/null", ""};
  (void)state;
  assert_int_equal(symlink("some", "link"), 0);
  assert_int_equal(symlink("file", "some/soft"), 0);
  assert_int_equal(symlink("link/soft", "deep"), 0);
  assert_int_equal(symlink("loop", "some/loop"), 0);
  for (int there = 0; there < 2; there++) {
    if (there)
      test_put_file("some/file", "old", 3);
    for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
      test_note("%s, there %d", spellings[i], there);
      assert_true(mha_output_meet("some/file", spellings[i]));
      assert_true(mha_output_meet(spellings[i], "some/file"));
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
      test_note("%s, there %d", others[i], there);
      assert_false(mha_output_meet("some/file", others[i]));
      assert_false(mha_output_meet(others[i], "some/file"));
    }
  }
  assert_int_equal(link("some/file", "some/hard"), 0);
  assert_true(mha_output_meet("deep", "some/hard"));
  assert_true(mha_output_meet("absent/file", "absent/file"));
  assert_int_equal(unlink("some/hard") + unlink("some/soft") + unlink("some/loop"), 0);
  assert_int_equal(unlink("deep") + unlink("link"), 0);
}

static void open_files_are_known(void **state) {
  (void)state;
  test_put_file("some/file", "old", 3);
  test_put_file("some/other", "old", 3);
  const int file = open("some/file", O_WRONLY);
  assert_true(file >= 0);
  assert_int_equal(symlink("file", "some/soft"), 0);
  assert_true(mha_output_replaces("some/file", file));
  assert_true(mha_output_replaces("some/soft", file));
  assert_false(mha_output_replaces("some/other", file));
  assert_false(mha_output_replaces("some/absent", file));
  assert_int_equal(close(file), 0);
  assert_false(mha_output_replaces("some/file", file));
  const int device = open("/dev/null", O_WRONLY);
  assert_true(device >= 0);
  assert_false(mha_output_replaces("/dev/null", device));
  assert_int_equal(close(device), 0);
  assert_int_equal(unlink("some/other") + unlink("some/soft"), 0);
}

/* ---- Folders --------------------------------------------------------------------------------- */

static void folders_are_made_once(void **state) {
  mha_error error;
  bool exists = true, made = false;
  (void)state;
  test_expect(mha_output_check_folder("some/new", &exists, &error), MHA_OK, &error);
  assert_false(exists || test_exists("some/new"));
  test_expect(mha_output_make_folder("some/new", &made, &error), MHA_OK, &error);
  assert_true(made && test_exists("some/new"));
  test_expect(mha_output_check_folder("some/new", &exists, &error), MHA_OK, &error);
  assert_true(exists);
  test_put_file("some/new/file", "old", 3);
  test_expect(mha_output_make_folder("some/new", &made, &error), MHA_OK, &error);
  assert_false(made);
  check_file("some/new/file", "old");
  assert_int_equal(unlink("some/new/file") + rmdir("some/new"), 0);
}

static void what_is_no_folder_is_refused(void **state) {
  static const struct {
    const char *path, *checked, *made;
  } rows[] = {{"some/file", "some/file is not a folder; rule: ", "some/file is not a folder; rule"},
              {"some/file/x", "some/file/x cannot be examined: ", "some/file/x cannot be made: "},
              {"absent/x", "absent/x cannot be made: ", "absent/x cannot be made: "},
              {"some/link", "some/link is a link to what is not there; rule: ",
               "some/link is a link to what is not there; rule: "},
              {"", " cannot be made: ", " cannot be made: "}};
  (void)state;
  test_put_file("some/file", "old", 3);
  assert_int_equal(symlink("nowhere", "some/link"), 0);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_error error;
    bool exists = false, made = true;
    test_note("\"%s\"", rows[i].path);
    test_expect(mha_output_check_folder(rows[i].path, &exists, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, rows[i].checked));
    test_expect(mha_output_make_folder(rows[i].path, &made, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, rows[i].made));
    assert_false(made);
    assert_int_equal(test_files_in("some"), 2);
  }
  check_file("some/file", "old");
  assert_int_equal(unlink("some/link"), 0);
}

/* ---- Failures -------------------------------------------------------------------------------- */

static void unopenable_paths(void **state) {
  static const struct {
    const char *path, *fragment;
  } rows[] = {{"some", "some is not a regular file"},
              {"some/fifo", "some/fifo is not a regular file"},
              {"/dev/null", "/dev/null is not a regular file"},
              {"absent/file", "absent/file cannot be written: "},
              {"some/absent/", "some/absent/ cannot be "},
              {"some/fifo/file", "some/fifo/file cannot be examined: "},
              {"some/loop", "some/loop cannot be followed: "},
              {"some/to_null", "some/to_null is not a regular file"},
              {"some/to_folder", "some/to_folder is not a regular file"},
              {"some/protected", "some/protected cannot be written: "},
              {"some/to_protected", "some/to_protected cannot be written: "},
              {"", " cannot be written: "}};
  const int free_before = free_descriptor();
  (void)state;
  assert_int_equal(mkfifo("some/fifo", 0600), 0);
  test_put_file("some/protected", "old", 3);
  assert_int_equal(chmod("some/protected", 0444), 0);
  assert_int_equal(symlink("loop", "some/loop") + symlink("/dev/null", "some/to_null"), 0);
  assert_int_equal(symlink(".", "some/to_folder") + symlink("protected", "some/to_protected"), 0);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_output output;
    mha_error error;
    test_note("\"%s\"", rows[i].path);
    test_expect(mha_output_open(rows[i].path, &output, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, rows[i].fragment));
    mha_output_discard(&output);
    test_expect(mha_output_check(rows[i].path, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, rows[i].fragment));
    assert_int_equal(test_files_in("some"), 6);
    assert_int_equal(free_descriptor(), free_before);
  }
  check_file("some/protected", "old");
  assert_int_equal(permissions_of("some/protected"), 0444);
  assert_int_equal(unlink("some/fifo") + unlink("some/protected") + unlink("some/loop"), 0);
  assert_int_equal(unlink("some/to_null") + unlink("some/to_folder"), 0);
  assert_int_equal(unlink("some/to_protected"), 0);
}

/* A name of an open file is refused under every spelling, and the file keeps what it has. */
static void open_files_are_not_replaced(void **state) {
  char paths[4][64];
  (void)state;
  test_put_file("some/file", "old", 3);
  const int file = open("some/file", O_WRONLY | O_APPEND);
  assert_true(file >= 0);
  (void)snprintf(paths[0], sizeof paths[0], "/dev/fd/%d", file);
  (void)snprintf(paths[1], sizeof paths[1], "/proc/self/fd/%d", file);
  (void)snprintf(paths[2], sizeof paths[2], "/proc/%ld/fd/../fd/%d", (long)getpid(), file);
  (void)snprintf(paths[3], sizeof paths[3], "some/link");
  assert_int_equal(symlink(paths[0], paths[3]), 0);
  for (size_t i = 0; i < 4; i++) {
    mha_output output;
    mha_error error;
    test_note("%s", paths[i]);
    test_expect(mha_output_open(paths[i], &output, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, "stands for an open file of a process; rule: "));
    assert_non_null(strstr(error.message, paths[i]));
    test_expect(mha_output_check(paths[i], NULL), MHA_ERROR_IO, &error);
  }
  assert_int_equal(write(file, "er", 2), 2);
  assert_int_equal(close(file), 0);
  check_file("some/file", "older");
  assert_int_equal(unlink("some/link"), 0);
}

static void what_can_be_written_passes_the_check(void **state) {
  static const char *const paths[] = {"some/file", "some/absent", "absent", "some/link"};
  mha_error error;
  (void)state;
  test_put_file("some/file", "old", 3);
  assert_int_equal(symlink("absent", "some/link"), 0);
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
    test_expect(mha_output_check(paths[i], &error), MHA_OK, &error);
  check_file("some/file", "old");
  assert_int_equal(unlink("some/link"), 0);
  assert_int_equal(test_files_in("some"), 1);
}

/* As after every failed step: the old file as it was, nothing beside it, nothing open. */
static void check_failed(mha_status status, const mha_error *error, const char *fragment,
                         mha_output *output, int free_before) {
  test_expect(status, MHA_ERROR_IO, error);
  assert_non_null(strstr(error->message, fragment));
  assert_int_equal(output->has_temporary, 0);
  mha_output_discard(output);
  check_file("some/file", "old");
  assert_int_equal(test_files_in("some"), 1);
  assert_int_equal(free_descriptor(), free_before);
}

static volatile sig_atomic_t n_signals;

static void count_signal(int number) {
  (void)number;
  n_signals++;
}

/* A limit on the size of files, of which the first part does not reach the end: it is an error
 * without a signal, which would end a process that expects none. */
static void failed_writes(void **state) {
  static char bytes[20000];
  const int free_before = free_descriptor();
  const struct sigaction count = {.sa_handler = count_signal};
  struct sigaction handler;
  struct rlimit before;
  mha_output output;
  mha_error error;
  (void)state;
  test_put_file("some/file", "old", 3);
  open_well("some/file", &output);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 10000;
  assert_int_equal(sigaction(SIGXFSZ, &count, &handler), 0);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const mha_status first = mha_output_write(&output, bytes, 5000, &error);
  const mha_status second = mha_output_write(&output, bytes, sizeof bytes, &error);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  assert_int_equal(sigaction(SIGXFSZ, &handler, NULL), 0);
  assert_int_equal(first, MHA_OK);
  assert_int_equal(n_signals, 0);
  check_failed(second, &error, "some/file cannot be written: ", &output, free_before);
}

/* A disk that fails, played by a descriptor that is gone. */
static void failed_syncs(void **state) {
  const int free_before = free_descriptor();
  mha_output output;
  mha_error error;
  (void)state;
  test_put_file("some/file", "old", 3);
  open_well("some/file", &output);
  write_well(&output, "new");
  assert_int_equal(close(output.file), 0);
  const mha_status status = mha_output_sync(&output, &error);
  check_failed(status, &error, "some/file cannot be synced: ", &output, free_before);
}

/* The path became a folder meanwhile. */
static void failed_commits(void **state) {
  const int free_before = free_descriptor();
  mha_output output;
  mha_error error;
  (void)state;
  test_put_file("some/file", "old", 3);
  open_well("some/target", &output);
  write_well(&output, "new");
  sync_well(&output);
  assert_int_equal(mkdir("some/target", 0700), 0);
  const mha_status status = mha_output_commit(&output, &error);
  assert_int_equal(rmdir("some/target"), 0);
  check_failed(status, &error, "some/target cannot be replaced: ", &output, free_before);
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static int enter_folder(void **state) {
  (void)state;
  return test_folder_enter("test_output") != 0 || mkdir("some", 0700) != 0;
}

static int leave_folder(void **state) {
  (void)state;
  return rmdir("some") != 0 || test_folder_leave() != 0;
}

static int remove_file(void **state) {
  (void)state;
  return unlink("some/file") != 0 && errno != ENOENT;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(the_target_changes_at_the_commit, remove_file),
      cmocka_unit_test_teardown(nothing_is_there_after_a_discard, remove_file),
      cmocka_unit_test_teardown(paths_without_a_folder, remove_file),
      cmocka_unit_test_teardown(permissions_are_kept, remove_file),
      cmocka_unit_test_teardown(two_at_once, remove_file),
      cmocka_unit_test_teardown(links_are_followed, remove_file),
      cmocka_unit_test_teardown(hard_links_are_parted, remove_file),
      cmocka_unit_test_teardown(spellings_meet, remove_file),
      cmocka_unit_test_teardown(open_files_are_known, remove_file),
      cmocka_unit_test(folders_are_made_once),
      cmocka_unit_test_teardown(what_is_no_folder_is_refused, remove_file),
      cmocka_unit_test(unopenable_paths),
      cmocka_unit_test_teardown(open_files_are_not_replaced, remove_file),
      cmocka_unit_test_teardown(what_can_be_written_passes_the_check, remove_file),
      cmocka_unit_test_teardown(failed_writes, remove_file),
      cmocka_unit_test_teardown(failed_syncs, remove_file),
      cmocka_unit_test_teardown(failed_commits, remove_file),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
