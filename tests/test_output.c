/* Complete files: what stands at the path before, between and after each step, and what is left
 * behind when a step fails. */
#define _XOPEN_SOURCE 700

#include "support.h"

#include "files/output.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Files and descriptors ------------------------------------------------------------------- */

static int files_in(const char *path) {
  int n = 0;
  DIR *folder = opendir(path);
  assert_non_null(folder);
  for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder))
    n += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
  assert_int_equal(closedir(folder), 0);
  return n;
}

static void put_file(const char *path, const char *text) {
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
  assert_int_equal(fclose(file), 0);
}

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
  put_file("some/file", "old");
  open_well("some/file", &output);
  write_well(&output, "one, ");
  write_well(&output, "");
  write_well(&output, "two");
  check_file("some/file", "old");
  sync_well(&output);
  assert_int_equal(free_descriptor(), free_before);
  check_file(output.temporary, "one, two");
  check_file("some/file", "old");
  assert_int_equal(files_in("some"), 2);
  commit_well(&output);
  check_file("some/file", "one, two");
  assert_int_equal(files_in("some"), 1);
  mha_output_discard(&output); /* there is nothing left to discard */
  check_file("some/file", "one, two");
}

static void nothing_is_there_after_a_discard(void **state) {
  const int free_before = free_descriptor();
  (void)state;
  put_file("some/file", "old");
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
    assert_int_equal(files_in("some"), 1);
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
  assert_int_equal(files_in("."), 1);
  assert_int_equal(chdir(".."), 0);
}

static void permissions_are_kept(void **state) {
  static const mode_t kept[] = {0640, 0444, 0};
  const mode_t mask = umask(027);
  mha_output output;
  (void)state;
  for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
    put_file("some/file", "old");
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
  assert_int_equal(files_in("some"), 1);
}

/* The link stays, the file that it leads to is replaced, and the temporary file lies beside that.
 */
static void links_are_followed(void **state) {
  struct stat info;
  mha_output output;
  (void)state;
  assert_int_equal(mkdir("other", 0700), 0);
  put_file("other/real", "old");
  assert_int_equal(symlink("../other/real", "some/link"), 0);
  open_well("some/link", &output);
  assert_int_equal(files_in("other"), 2);
  write_well(&output, "new");
  sync_well(&output);
  commit_well(&output);
  assert_int_equal(lstat("some/link", &info), 0);
  assert_true(S_ISLNK(info.st_mode));
  check_file("other/real", "new");
  assert_int_equal(files_in("other"), 1);
  assert_int_equal(unlink("other/real"), 0);
  assert_int_equal(rmdir("other"), 0);
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
              {"", " cannot be written: "}};
  const int free_before = free_descriptor();
  (void)state;
  assert_int_equal(mkfifo("some/fifo", 0600), 0);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_output output;
    mha_error error;
    test_note("\"%s\"", rows[i].path);
    test_expect(mha_output_open(rows[i].path, &output, &error), MHA_ERROR_IO, &error);
    assert_non_null(strstr(error.message, rows[i].fragment));
    mha_output_discard(&output);
    assert_int_equal(files_in("some"), 1);
    assert_int_equal(free_descriptor(), free_before);
  }
  assert_int_equal(unlink("some/fifo"), 0);
}

/* As after every failed step: the old file as it was, nothing beside it, nothing open. */
static void check_failed(mha_status status, const mha_error *error, const char *fragment,
                         mha_output *output, int free_before) {
  test_expect(status, MHA_ERROR_IO, error);
  assert_non_null(strstr(error->message, fragment));
  assert_string_equal(output->temporary, "");
  mha_output_discard(output);
  check_file("some/file", "old");
  assert_int_equal(files_in("some"), 1);
  assert_int_equal(free_descriptor(), free_before);
}

/* A disk that fills up, played by a limit on the size of files; the first part fits. */
static void failed_writes(void **state) {
  static char bytes[20000];
  const int free_before = free_descriptor();
  const struct sigaction ignore = {.sa_handler = SIG_IGN};
  struct sigaction handler;
  struct rlimit before;
  mha_output output;
  mha_error error;
  (void)state;
  put_file("some/file", "old");
  open_well("some/file", &output);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 10000;
  assert_int_equal(sigaction(SIGXFSZ, &ignore, &handler), 0);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const mha_status first = mha_output_write(&output, bytes, 5000, &error);
  const mha_status second = mha_output_write(&output, bytes, sizeof bytes, &error);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  assert_int_equal(sigaction(SIGXFSZ, &handler, NULL), 0);
  assert_int_equal(first, MHA_OK);
  check_failed(second, &error, "some/file cannot be written: ", &output, free_before);
}

/* A disk that fails, played by a descriptor that is gone. */
static void failed_syncs(void **state) {
  const int free_before = free_descriptor();
  mha_output output;
  mha_error error;
  (void)state;
  put_file("some/file", "old");
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
  put_file("some/file", "old");
  open_well("some/target", &output);
  write_well(&output, "new");
  sync_well(&output);
  assert_int_equal(mkdir("some/target", 0700), 0);
  const mha_status status = mha_output_commit(&output, &error);
  assert_int_equal(rmdir("some/target"), 0);
  check_failed(status, &error, "some/target cannot be replaced: ", &output, free_before);
}

/* ---- A folder to work in --------------------------------------------------------------------- */

static char work_folder[] = "test_output.XXXXXX";

static int enter_folder(void **state) {
  (void)state;
  return !mkdtemp(work_folder) || chdir(work_folder) != 0 || mkdir("some", 0700) != 0;
}

static int leave_folder(void **state) {
  (void)state;
  return rmdir("some") != 0 || chdir("..") != 0 || rmdir(work_folder) != 0;
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
      cmocka_unit_test(unopenable_paths),
      cmocka_unit_test_teardown(failed_writes, remove_file),
      cmocka_unit_test_teardown(failed_syncs, remove_file),
      cmocka_unit_test_teardown(failed_commits, remove_file),
  };
  return cmocka_run_group_tests(tests, enter_folder, leave_folder);
}
