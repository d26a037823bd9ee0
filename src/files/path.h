/* Paths in messages, and what the system says about them. */
#ifndef MHA_SRC_FILES_PATH_H
#define MHA_SRC_FILES_PATH_H

#include "mha.h"

/* Room for the longest path that is put together or written to, zero included. */
#define MHA_PATH_BYTES 4096

/* The end of `path`, short enough that a message has room for more. */
const char *mha_shown_path(const char *path);

/* Fails with MHA_ERROR_IO: "`path` cannot be `what`: the reason", from an errno. */
mha_status mha_fail_system(const char *path, const char *what, int number, mha_error *error);

#endif
