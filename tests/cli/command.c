/* Owns the child that becomes the command, with the texts that it printed, and the folder where
 * that happens. */
#define _XOPEN_SOURCE 700

#include "command.h"
#include "inputs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- A folder to work in --------------------------------------------------------------------- */

int command_enter_folder(void **state) {
  (void)state;
  if (test_folder_enter("test_cli") != 0)
    return -1;
  inputs_put_odd_layer();
  /* so that the number of files stays the same from the first run on */
  return fclose(fopen("stdout.txt", "wb")) || fclose(fopen("stderr.txt", "wb"));
}

int command_leave_folder(void **state) {
  (void)state;
  return test_remove_files("w") != 0 || test_remove_files(".") != 0 || test_folder_leave() != 0;
}

/* ---- Running the command --------------------------------------------------------------------- */

char command_out[COMMAND_TEXT_BYTES];
char command_err[COMMAND_TEXT_BYTES];

void (*command_in_child)(void);
int command_signal;

static void redirect(const char *path, int to) {
  const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || dup2(file, to) != to)
    _exit(126);
}

int command_run_to(const char *out, const char *const *words) {
  char *argv[COMMAND_MOST_WORDS + 2];
  int n = 0;
  int result = 0;
  argv[n++] = (char *)(uintptr_t)MHA_CLI_PATH;
  for (; words[n - 1]; n++) {
    assert_true(n < COMMAND_MOST_WORDS);
    argv[n] = (char *)(uintptr_t)words[n - 1];
  }
  argv[n] = NULL;
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    redirect(out, STDOUT_FILENO);
    redirect("stderr.txt", STDERR_FILENO);
    (void)alarm(120); /* a command that hangs ends by a signal */
    if (command_in_child)
      command_in_child();
    execv(MHA_CLI_PATH, argv);
    _exit(127);
  }
  while (waitpid(child, &result, 0) < 0)
    assert_int_equal(errno, EINTR);
  command_read_text("stderr.txt", command_err);
  if ((WIFSIGNALED(result) ? WTERMSIG(result) : 0) != command_signal)
    test_failed("the command ended by signal %d, not %d",
                WIFSIGNALED(result) ? WTERMSIG(result) : 0, command_signal);
  return command_signal ? -1 : WEXITSTATUS(result);
}

int command_run(const char *const *words) {
  const int result = command_run_to("stdout.txt", words);
  command_read_text("stdout.txt", command_out);
  return result;
}

void command_run_well(const char *const *words) {
  const int result = command_run(words);
  if (result != 0 || command_err[0] != '\0')
    test_failed("exit status %d, stderr \"%s\"", result, command_err);
}

void command_run_badly(int expected, const char *fragment, const char *const *words) {
  const int result = command_run(words);
  const size_t n = strlen(command_err);
  if (result != expected || !strstr(command_err, fragment))
    test_failed("exit status %d instead of %d, or stderr \"%s\" lacks \"%s\"", result, expected,
                command_err, fragment);
  assert_true(n > 1 && strchr(command_err, '\n') == command_err + n - 1);
  assert_memory_equal(command_err, "mha: ", 5);
  assert_string_equal(command_out, "");
}

/* ---- What it wrote --------------------------------------------------------------------------- */

void command_read_text(const char *path, char text[COMMAND_TEXT_BYTES]) {
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  const size_t n = fread(text, 1, COMMAND_TEXT_BYTES - 1, file);
  text[n] = '\0';
  assert_int_equal(fclose(file), 0);
}

mha_npy_array command_take(const char *path) {
  mha_npy_array array;
  mha_error error;
  test_expect(mha_npy_read(path, MHA_NPY_FLOATS, NULL, &array, &error), MHA_OK, &error);
  assert_int_equal(unlink(path), 0);
  return array;
}

void command_check_shape(const mha_npy_array *array, int rank, const int64_t *shape) {
  assert_int_equal(array->rank, rank);
  for (int axis = 0; axis < rank; axis++)
    assert_int_equal(array->shape[axis], shape[axis]);
}

void command_same_bits(const char *path, int rank, const int64_t *shape, const float *expected) {
  mha_npy_array got = command_take(path);
  command_check_shape(&got, rank, shape);
  test_same_bits(path, (test_shape){{1, 1, 1, got.n_elements}}, got.data, expected);
  mha_npy_array_release(&got);
}

/* ---- The article's example ------------------------------------------------------------------- */

const char article[] = ARTICLE;
const char article_x[] = ARTICLE "X.npy";
const double article_tolerance = 1e-5;

void command_check_article(const char *path, const char *expected_path, int rank,
                           const int64_t *shape) {
  mha_npy_array got = command_take(path);
  double *expected = test_read_npy(expected_path, got.n_elements);
  command_check_shape(&got, rank, shape);
  for (int64_t i = 0; i < got.n_elements; i++)
    test_near(expected_path, (double)((const float *)got.data)[i], expected[i], article_tolerance);
  free(expected);
  mha_npy_array_release(&got);
}
