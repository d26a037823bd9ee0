/* Owns the writing of complete files: where a path leads, a temporary file beside that place,
 * synced, then renamed. */
#define _XOPEN_SOURCE     700
#define _FILE_OFFSET_BITS 64

#include "output.h"

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

_Static_assert(MHA_PATH_BYTES >= PATH_MAX, "realpath writes up to PATH_MAX bytes");

#define NO_PERMISSIONS (-1)

/* ---- Where a path leads ---------------------------------------------------------------------- */

/* As many symbolic links, one behind the other, as Linux follows. */
enum { MOST_LINKS = 40 };

/* A place that a path leads to: a file, or where one can be made. */
typedef struct place {
  char path[MHA_PATH_BYTES];
  bool exists;
  struct stat info; /* if it exists */
} place;

/* Bytes of the path's folder, the slash included; 0 = the working directory. */
static size_t folder_bytes(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? (size_t)(slash - path) + 1 : 0;
}

static void take_folder(const char *path, char folder[MHA_PATH_BYTES]) {
  const size_t bytes = folder_bytes(path);
  memcpy(folder, bytes > 0 ? path : ".", bytes > 0 ? bytes : 1);
  folder[bytes > 0 ? bytes : 1] = '\0';
}

/* Whether `path` is a name that the system gives to a process's open file: in /proc, where
 * /dev/stdout and /dev/fd lead on Linux, or in /dev/fd elsewhere. */
static bool names_open_file(const char *path) {
  static const char proc[] = "/proc/";
  char folder[MHA_PATH_BYTES];
  char real[MHA_PATH_BYTES];
  take_folder(path, folder);
  return realpath(folder, real) &&
         (strncmp(real, proc, sizeof proc - 1) == 0 || strcmp(real, "/dev/fd") == 0);
}

/* Puts in the place of a symbolic link what it says. */
static mha_status follow_link(char path[MHA_PATH_BYTES], mha_error *error) {
  char text[MHA_PATH_BYTES];
  const ssize_t n = readlink(path, text, sizeof text);
  if (n < 0)
    return mha_fail_system(path, "followed", errno, error);
  const size_t kept = text[0] == '/' ? 0 : folder_bytes(path);
  if (kept + (size_t)n >= MHA_PATH_BYTES)
    return mha_fail_system(path, "followed", ENAMETOOLONG, error);
  memcpy(path + kept, text, (size_t)n);
  path[kept + (size_t)n] = '\0';
  return MHA_OK;
}

/* Link by link: only so a name of an open file shows, whose own link leads to the file itself. */
static mha_status find_place(const char *path, place *found, mha_error *error) {
  found->exists = false;
  if (path[0] == '\0' || strlen(path) >= MHA_PATH_BYTES)
    return mha_fail_system(path, "written", path[0] == '\0' ? ENOENT : ENAMETOOLONG, error);
  memcpy(found->path, path, strlen(path) + 1);
  for (int links = 0; links <= MOST_LINKS; links++) {
    if (names_open_file(found->path))
      return mha_fail(error, MHA_ERROR_IO,
                      "%s stands for an open file of a process; rule: a path of its own, since a "
                      "file is replaced as a whole",
                      mha_shown_path(path));
    if (lstat(found->path, &found->info) != 0)
      return errno == ENOENT ? MHA_OK : mha_fail_system(path, "examined", errno, error);
    found->exists = !S_ISLNK(found->info.st_mode);
    if (found->exists)
      return MHA_OK;
    const mha_status status = follow_link(found->path, error);
    if (status)
      return status;
  }
  return mha_fail_system(path, "followed", ELOOP, error);
}

/* What is no regular file (a device, a directory) is left alone, and so is a file that is protected
 * against writing, though its folder would let it be replaced. */
static mha_status check_place(const char *path, const place *found, mha_error *error) {
  const struct stat *info = &found->info;
  if (!found->exists)
    return MHA_OK;
  if (!S_ISREG(info->st_mode))
    return mha_fail(error, MHA_ERROR_IO, "%s is not a regular file; rule: only such are replaced",
                    mha_shown_path(path));
  if ((info->st_mode & (S_IWUSR | S_IWGRP | S_IWOTH)) == 0) /* root may write it all the same */
    return mha_fail_system(path, "written", EACCES, error);
  return access(found->path, W_OK) == 0 ? MHA_OK : mha_fail_system(path, "written", errno, error);
}

mha_status mha_output_check(const char *path, mha_error *error) {
  place found;
  char folder[MHA_PATH_BYTES];
  mha_status status = find_place(path, &found, error);
  if (!status)
    status = check_place(path, &found, error);
  if (status)
    return status;
  take_folder(found.path, folder);
  return access(folder, W_OK | X_OK) == 0 ? mha_succeed(error)
                                          : mha_fail_system(path, "written", errno, error);
}

/* What no name stands for may still be a link that leads nowhere, where no folder can be made. */
static mha_status check_new_folder(const char *path, mha_error *error) {
  struct stat info;
  char folder[MHA_PATH_BYTES];
  if (lstat(path, &info) == 0)
    return mha_fail(error, MHA_ERROR_IO,
                    "%s is a link to what is not there; rule: a folder, or one that can be made",
                    mha_shown_path(path));
  take_folder(path, folder);
  return access(folder, W_OK | X_OK) == 0 ? mha_succeed(error)
                                          : mha_fail_system(path, "made", errno, error);
}

mha_status mha_output_check_folder(const char *path, bool *exists, mha_error *error) {
  struct stat info;
  *exists = false;
  if (path[0] == '\0' || strlen(path) >= MHA_PATH_BYTES)
    return mha_fail_system(path, "made", path[0] == '\0' ? ENOENT : ENAMETOOLONG, error);
  if (stat(path, &info) != 0)
    return errno == ENOENT ? check_new_folder(path, error)
                           : mha_fail_system(path, "examined", errno, error);
  *exists = true;
  if (!S_ISDIR(info.st_mode))
    return mha_fail(error, MHA_ERROR_IO,
                    "%s is not a folder; rule: a folder, or one that can be made",
                    mha_shown_path(path));
  return access(path, W_OK | X_OK) == 0 ? mha_succeed(error)
                                        : mha_fail_system(path, "written", errno, error);
}

static bool is_same_file(const struct stat *one, const struct stat *other) {
  return one->st_dev == other->st_dev && one->st_ino == other->st_ino;
}

/* Places where there is nothing yet: one name in one folder. */
static bool is_same_name(const place *one, const place *other) {
  char folders[2][MHA_PATH_BYTES];
  struct stat info[2];
  take_folder(one->path, folders[0]);
  take_folder(other->path, folders[1]);
  return strcmp(one->path + folder_bytes(one->path), other->path + folder_bytes(other->path)) ==
             0 &&
         stat(folders[0], &info[0]) == 0 && stat(folders[1], &info[1]) == 0 &&
         is_same_file(&info[0], &info[1]);
}

bool mha_output_meet(const char *one, const char *other) {
  place places[2];
  if (strcmp(one, other) == 0)
    return true;
  if (find_place(one, &places[0], NULL) || find_place(other, &places[1], NULL))
    return false;
  if (places[0].exists && places[1].exists)
    return is_same_file(&places[0].info, &places[1].info);
  return !places[0].exists && !places[1].exists && is_same_name(&places[0], &places[1]);
}

bool mha_output_replaces(const char *path, int descriptor) {
  place found;
  struct stat info;
  return !find_place(path, &found, NULL) && found.exists && fstat(descriptor, &info) == 0 &&
         S_ISREG(info.st_mode) && is_same_file(&found.info, &info);
}

/* ---- The temporary file ---------------------------------------------------------------------- */

/* The failure of a system call; the temporary file goes. */
static mha_status fail_and_discard(mha_output *output, const char *what, int number,
                                   mha_error *error) {
  mha_output_discard(output);
  return mha_fail_system(output->target, what, number, error);
}

/* In the target's folder: renaming works within one file system only. The time makes the name one
 * that no other process has, even if its number is the same: a signal handler trusts in that. */
static void name_temporary(mha_output *output, int attempt) {
  struct timespec now = {0};
  (void)timespec_get(&now, TIME_UTC);
  (void)snprintf(output->temporary, sizeof output->temporary, "%.*s.mha-%ld-%09ld-%d.tmp",
                 (int)folder_bytes(output->target), output->target, (long)getpid(), now.tv_nsec,
                 attempt);
}

static mha_status create_temporary(mha_output *output, int permissions, mha_error *error) {
  int number = EEXIST;
  for (int attempt = 0; attempt < 1000 && number == EEXIST; attempt++) {
    name_temporary(output, attempt);
    atomic_signal_fence(memory_order_seq_cst);
    output->has_temporary = 1;
    /* not even for a moment readable by those who may not read the target */
    output->file = open(output->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                        permissions == NO_PERMISSIONS ? 0666 : 0600);
    if (output->file >= 0)
      return permissions == NO_PERMISSIONS || fchmod(output->file, (mode_t)permissions) == 0
                 ? MHA_OK
                 : fail_and_discard(output, "written", errno, error);
    number = errno;
    output->has_temporary = 0;
    atomic_signal_fence(memory_order_seq_cst);
  }
  return mha_fail_system(output->target, "written", number, error);
}

mha_status mha_output_open(const char *path, mha_output *output, mha_error *error) {
  place found;
  output->has_temporary = 0;
  output->file = -1;
  output->written = 0;
  output->target[0] = '\0';
  mha_status status = find_place(path, &found, error);
  if (!status)
    status = check_place(path, &found, error);
  if (status)
    return status;
  memcpy(output->target, found.path, strlen(found.path) + 1);
  status = create_temporary(
      output, found.exists ? (int)(found.info.st_mode & 0777) : NO_PERMISSIONS, error);
  return status ? status : mha_succeed(error);
}

/* ---- Its bytes ------------------------------------------------------------------------------- */

/* Whether a limit on the size of files lets so many more bytes be written: if not, writing them
 * would raise SIGXFSZ, by which a process ends that did not expect it. */
static bool is_within_limit(const mha_output *output, size_t bytes) {
  struct rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
         (output->written <= limit.rlim_cur && bytes <= limit.rlim_cur - output->written);
}

mha_status mha_output_write(mha_output *output, const void *data, size_t bytes, mha_error *error) {
  if (!is_within_limit(output, bytes))
    return fail_and_discard(output, "written", EFBIG, error);
  for (size_t done = 0; done < bytes;) {
    const ssize_t put = write(output->file, (const unsigned char *)data + done, bytes - done);
    if (put < 0 && errno == EINTR)
      continue;
    if (put <= 0)
      return fail_and_discard(output, "written", put < 0 ? errno : ENOSPC, error);
    done += (size_t)put;
  }
  output->written += bytes;
  return mha_succeed(error);
}

static uint32_t bits_of(const unsigned char *number, size_t bytes) {
  uint16_t half = 0;
  uint32_t whole = 0;
  if (bytes == sizeof whole)
    memcpy(&whole, number, sizeof whole);
  else
    memcpy(&half, number, sizeof half);
  return whole | half;
}

mha_status mha_output_write_numbers(mha_output *output, const void *data, size_t bytes_each,
                                    int64_t n, mha_error *error) {
  const unsigned char *numbers = data;
  unsigned char piece[16384];
  mha_status status = MHA_OK;
  int64_t next = 0;
  while (!status && next < n) {
    size_t used = 0;
    for (; next < n && used < sizeof piece; next++) {
      const uint32_t bits = bits_of(numbers + (size_t)next * bytes_each, bytes_each);
      for (size_t byte = 0; byte < bytes_each; byte++)
        piece[used++] = (unsigned char)(bits >> 8 * byte & 0xFFU);
    }
    status = mha_output_write(output, piece, used, error);
  }
  return status;
}

/* ---- Its end --------------------------------------------------------------------------------- */

mha_status mha_output_sync(mha_output *output, mha_error *error) {
  if (fsync(output->file) != 0)
    return fail_and_discard(output, "synced", errno, error);
  const int closed = close(output->file);
  output->file = -1;
  return closed == 0 ? mha_succeed(error) : fail_and_discard(output, "closed", errno, error);
}

/* A folder may allow to write without allowing to read, and some file systems sync no folders:
 * neither is a failure. */
static mha_status sync_folder_of(const char *path, mha_error *error) {
  char folder[MHA_PATH_BYTES];
  take_folder(path, folder);
  const int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0)
    return mha_succeed(error);
  const int failed = fsync(file) != 0 && errno != EINVAL && errno != ENOTSUP ? errno : 0;
  (void)close(file);
  return failed ? mha_fail_system(folder, "synced", failed, error) : mha_succeed(error);
}

mha_status mha_output_make_folder(const char *path, bool *made, mha_error *error) {
  bool exists = false;
  *made = mkdir(path, 0777) == 0;
  if (*made)
    return sync_folder_of(path, error);
  return errno == EEXIST ? mha_output_check_folder(path, &exists, error)
                         : mha_fail_system(path, "made", errno, error);
}

mha_status mha_output_commit(mha_output *output, mha_error *error) {
  if (rename(output->temporary, output->target) != 0)
    return fail_and_discard(output, "replaced", errno, error);
  output->has_temporary = 0;
  return sync_folder_of(output->target, error);
}

void mha_output_discard(mha_output *output) {
  if (!output->has_temporary)
    return;
  if (output->file >= 0)
    (void)close(output->file);
  output->file = -1;
  mha_output_remove(output);
  output->has_temporary = 0;
}

void mha_output_remove(const mha_output *output) {
  const int number = errno; /* a handler leaves it as it was */
  if (output->has_temporary)
    (void)unlink(output->temporary);
  errno = number;
}
