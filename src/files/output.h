/* Writing a file so that its path holds the whole new file or what was there before.
 *
 *     open, write ..., sync, then commit or discard
 *
 * After a failure there is nothing to end; discard is allowed then too. */
#ifndef MHA_SRC_FILES_OUTPUT_H
#define MHA_SRC_FILES_OUTPUT_H

#include "path.h"

/* A file under a temporary name beside its target. */
typedef struct mha_output {
  char target[MHA_PATH_BYTES];
  char temporary[MHA_PATH_BYTES + 64]; /* empty = nothing there */
  int file;                            /* counts where temporary does; -1 = closed */
} mha_output;

/* Begins an empty file that is to replace `path`. A symbolic link is followed, so that it survives;
 * the permissions of what is replaced are kept; what is no regular file is refused. */
mha_status mha_output_open(const char *path, mha_output *output, mha_error *error);

/* Appends `bytes` bytes. On failure the temporary file is removed. */
mha_status mha_output_write(mha_output *output, const void *data, size_t bytes, mha_error *error);

/* Appends n numbers, little-endian whatever this machine is. */
mha_status mha_output_write_floats(mha_output *output, const float *data, int64_t n,
                                   mha_error *error);

/* Brings the file to the disk and closes it: it is complete. On failure it is removed. */
mha_status mha_output_sync(mha_output *output, mha_error *error);

/* Renames a synced file to its target and brings the new name to the disk, where the file system
 * can. If renaming fails, the temporary file is removed and the target is as it was; if the name
 * cannot be brought to the disk, the target is the new file all the same. */
mha_status mha_output_commit(mha_output *output, mha_error *error);

/* Closes and removes the temporary file, if there is one. */
void mha_output_discard(mha_output *output);

#endif
