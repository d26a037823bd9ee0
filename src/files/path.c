/* Owns how a path looks in a message, and messages about failed system calls. */
#define _XOPEN_SOURCE 700 /* the strerror_r that returns an int */

#include "path.h"

#include "base/error.h"

#include <stdio.h>
#include <string.h>

#define SHOWN_BYTES 200

const char *mha_shown_path(const char *path) {
  const size_t length = strlen(path);
  const char *shown = length > SHOWN_BYTES ? path + length - SHOWN_BYTES : path;
  /* not from within a UTF-8 sequence, whose later bytes are 10xxxxxx */
  while (shown != path && ((unsigned char)*shown & 0xC0U) == 0x80U)
    shown++;
  return shown;
}

mha_status mha_fail_system(const char *path, const char *what, int number, mha_error *error) {
  char reason[128];
  if (strerror_r(number, reason, sizeof reason) != 0)
    (void)snprintf(reason, sizeof reason, "error %d", number);
  return mha_fail(error, MHA_ERROR_IO, "%s cannot be %s: %s", mha_shown_path(path), what, reason);
}
