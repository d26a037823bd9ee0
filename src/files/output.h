/* Writing a file so that its path holds the whole new file or what was there before.
 *
 *     open, write ..., sync, then commit or discard
 *
 * After a failure there is nothing to end; discard is allowed then too.
 *
 * What can be written is a path that leads to a regular file which may be written, or to none yet.
 * A symbolic link is followed and stays; what it leads to is replaced, or made. Of a file with
 * several hard links only the one that is named gets the new file. Refused are devices, FIFOs and
 * folders, and names of a process's open files such as /dev/stdout or /dev/fd/3: replacing the file
 * behind such a name would lose what else is written to it. */
#ifndef MHA_SRC_FILES_OUTPUT_H
#define MHA_SRC_FILES_OUTPUT_H

#include "path.h"

#include <signal.h>
#include <stdbool.h>

/* A file under a temporary name beside its target. Only what has_temporary says counts while it is
 * 0. A signal handler may look at it: it is set before the file is made, under a name that nobody
 * else has, and cleared when the file has gone. */
typedef struct mha_output {
  char target[MHA_PATH_BYTES];
  char temporary[MHA_PATH_BYTES + 64];
  volatile sig_atomic_t has_temporary; /* 0 = nothing there */
  int file;                            /* -1 = closed */
  uint64_t written;                    /* bytes */
} mha_output;

/* Whether `path` can be written, as far as that shows without writing: IO. */
mha_status mha_output_check(const char *path, mha_error *error);

/* Whether files can be written into the folder `path`, as far as that shows: it is there, which is
 * told, or can be made: IO. `path` does not end in a slash. */
mha_status mha_output_check_folder(const char *path, bool *exists, mha_error *error);

/* Makes the folder `path`, where there is none, and brings its name to the disk, where the file
 * system can. Whether it was made is told on failure too. */
mha_status mha_output_make_folder(const char *path, bool *made, mha_error *error);

/* Whether writes to both paths would end in the same file, however they are spelled: through links,
 * as two names of one file, or as one name of a file that is not there yet. */
bool mha_output_meet(const char *one, const char *other);

/* Whether the open file `descriptor` is a regular one, and the one that a write to `path` would
 * replace. */
bool mha_output_replaces(const char *path, int descriptor);

/* Begins an empty file that is to replace `path`; the permissions of what is replaced are kept. */
mha_status mha_output_open(const char *path, mha_output *output, mha_error *error);

/* Appends `bytes` bytes. On failure the temporary file is removed. A limit on the size of files is
 * a failure as any other: it raises no SIGXFSZ. */
mha_status mha_output_write(mha_output *output, const void *data, size_t bytes, mha_error *error);

/* Appends n numbers of 2 or of 4 bytes each, little-endian whatever this machine is. They need not
 * be aligned. */
mha_status mha_output_write_numbers(mha_output *output, const void *data, size_t bytes_each,
                                    int64_t n, mha_error *error);

/* Brings the file to the disk and closes it: it is complete. On failure it is removed. */
mha_status mha_output_sync(mha_output *output, mha_error *error);

/* Renames a synced file to its target and brings the new name to the disk, where the file system
 * can. If renaming fails, the temporary file is removed and the target is as it was; if the name
 * cannot be brought to the disk, the target is the new file all the same. */
mha_status mha_output_commit(mha_output *output, mha_error *error);

/* Closes and removes the temporary file, if there is one. */
void mha_output_discard(mha_output *output);

/* Removes the temporary file, if there is one, and nothing else: for a signal handler of a program
 * that ends by the signal. */
void mha_output_remove(const mha_output *output);

#endif
