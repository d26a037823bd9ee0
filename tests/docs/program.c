/* Owns the running of a program in a test: its streams go to a file for as long. */
#define _XOPEN_SOURCE 700

#include "program.h"

#include <stdio.h>
#include <unistd.h>

int test_run_program(int (*program)(int argc, char **argv), int argc, char **argv, char *printed,
                     size_t bytes) {
  FILE *file = tmpfile();
  const int streams[] = {dup(STDOUT_FILENO), dup(STDERR_FILENO)};
  assert_non_null(file);
  assert_int_equal(fflush(stdout), 0);
  assert_true(dup2(fileno(file), STDOUT_FILENO) >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
  const int result = program(argc, argv);
  (void)fflush(stdout);
  assert_true(dup2(streams[0], STDOUT_FILENO) >= 0 && dup2(streams[1], STDERR_FILENO) >= 0);
  assert_int_equal(close(streams[0]) + close(streams[1]), 0);
  rewind(file);
  printed[fread(printed, 1, bytes - 1, file)] = 0;
  assert_int_equal(fclose(file), 0);
  return result;
}
