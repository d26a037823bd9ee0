/* Owns the writing of complete files: a temporary file beside the target, synced, then renamed. */
#define _XOPEN_SOURCE     700
#define _FILE_OFFSET_BITS 64

#include "output.h"

#include "../error.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(MHA_PATH_BYTES >= PATH_MAX, "realpath writes up to PATH_MAX bytes");

#define NO_PERMISSIONS (-1)

/* The file that a write to `path` replaces, and its permissions, NO_PERMISSIONS if there is none.
 * What is no regular file (a device, a directory) is left alone. */
static mha_status resolve_target(const char *path, char *target, int *permissions,
                                 mha_error *error) {
  struct stat info;
  *permissions = NO_PERMISSIONS;
  if (path[0] == '\0' || strlen(path) >= MHA_PATH_BYTES)
    return mha_fail_system(path, "written", path[0] == '\0' ? ENOENT : ENAMETOOLONG, error);
  memcpy(target, path, strlen(path) + 1);
  if (lstat(path, &info) != 0)
    return errno == ENOENT ? MHA_OK : mha_fail_system(path, "examined", errno, error);
  if (S_ISLNK(info.st_mode) && (!realpath(path, target) || stat(path, &info) != 0))
    return mha_fail_system(path, "followed", errno, error);
  *permissions = (int)(info.st_mode & 0777);
  return S_ISREG(info.st_mode) ? MHA_OK
                               : mha_fail(error, MHA_ERROR_IO,
                                          "%s is not a regular file; rule: only such are replaced",
                                          mha_shown_path(path));
}

/* Bytes of the target's folder, the slash included; 0 = the working directory. */
static size_t folder_bytes(const mha_output *output) {
  const char *slash = strrchr(output->target, '/');
  return slash ? (size_t)(slash - output->target) + 1 : 0;
}

/* The failure of a system call; the temporary file goes. */
static mha_status fail_and_discard(mha_output *output, const char *what, int number,
                                   mha_error *error) {
  mha_output_discard(output);
  return mha_fail_system(output->target, what, number, error);
}

/* In the target's folder: renaming works within one file system only. */
static mha_status create_temporary(mha_output *output, int permissions, mha_error *error) {
  const int folder = (int)folder_bytes(output);
  for (int attempt = 0; attempt < 1000; attempt++) {
    (void)snprintf(output->temporary, sizeof output->temporary, "%.*s.mha-%ld-%d.tmp", folder,
                   output->target, (long)getpid(), attempt);
    /* not even for a moment readable by those who may not read the target */
    output->file = open(output->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                        permissions == NO_PERMISSIONS ? 0666 : 0600);
    if (output->file < 0 && errno == EEXIST)
      continue;
    if (output->file < 0)
      break;
    if (permissions == NO_PERMISSIONS || fchmod(output->file, (mode_t)permissions) == 0)
      return MHA_OK;
    return fail_and_discard(output, "written", errno, error);
  }
  output->temporary[0] = '\0';
  return mha_fail_system(output->target, "written", errno, error);
}

mha_status mha_output_open(const char *path, mha_output *output, mha_error *error) {
  int permissions = NO_PERMISSIONS;
  output->temporary[0] = '\0';
  output->file = -1;
  mha_status status = resolve_target(path, output->target, &permissions, error);
  if (!status)
    status = create_temporary(output, permissions, error);
  return status ? status : mha_succeed(error);
}

mha_status mha_output_write(mha_output *output, const void *data, size_t bytes, mha_error *error) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t put = write(output->file, (const unsigned char *)data + done, bytes - done);
    if (put < 0 && errno == EINTR)
      continue;
    if (put <= 0)
      return fail_and_discard(output, "written", put < 0 ? errno : ENOSPC, error);
    done += (size_t)put;
  }
  return mha_succeed(error);
}

mha_status mha_output_write_floats(mha_output *output, const float *data, int64_t n,
                                   mha_error *error) {
  unsigned char piece[16384];
  mha_status status = MHA_OK;
  int64_t next = 0;
  while (!status && next < n) {
    size_t used = 0;
    for (; next < n && used < sizeof piece; next++) {
      uint32_t bits;
      memcpy(&bits, data + next, sizeof bits);
      for (int byte = 0; byte < 4; byte++)
        piece[used++] = (unsigned char)(bits >> 8 * byte & 0xFFU);
    }
    status = mha_output_write(output, piece, used, error);
  }
  return status;
}

mha_status mha_output_sync(mha_output *output, mha_error *error) {
  if (fsync(output->file) != 0)
    return fail_and_discard(output, "synced", errno, error);
  const int closed = close(output->file);
  output->file = -1;
  return closed == 0 ? mha_succeed(error) : fail_and_discard(output, "closed", errno, error);
}

/* A folder may allow to write without allowing to read, and some file systems sync no folders:
 * neither is a failure. */
static mha_status sync_folder(const mha_output *output, mha_error *error) {
  char folder[MHA_PATH_BYTES] = ".";
  const size_t bytes = folder_bytes(output);
  if (bytes > 0) {
    memcpy(folder, output->target, bytes);
    folder[bytes] = '\0';
  }
  const int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0)
    return mha_succeed(error);
  const int failed = fsync(file) != 0 && errno != EINVAL && errno != ENOTSUP ? errno : 0;
  (void)close(file);
  return failed ? mha_fail_system(folder, "synced", failed, error) : mha_succeed(error);
}

mha_status mha_output_commit(mha_output *output, mha_error *error) {
  if (rename(output->temporary, output->target) != 0)
    return fail_and_discard(output, "replaced", errno, error);
  output->temporary[0] = '\0';
  return sync_folder(output, error);
}

void mha_output_discard(mha_output *output) {
  if (output->temporary[0] == '\0')
    return;
  if (output->file >= 0)
    (void)close(output->file);
  output->file = -1;
  (void)unlink(output->temporary);
  output->temporary[0] = '\0';
}
