/* Owns the progress line. */
#define _POSIX_C_SOURCE 200809L
#include "progress.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#define WIPE "\r\033[K"

void bench_progress(const char *format, ...) {
  if (!isatty(STDERR_FILENO))
    return;
  va_list arguments;
  va_start(arguments, format);
  fputs(WIPE, stderr);
  vfprintf(stderr, format, arguments);
  fflush(stderr);
  va_end(arguments);
}

void bench_progress_end(void) {
  if (isatty(STDERR_FILENO))
    fputs(WIPE, stderr);
}
