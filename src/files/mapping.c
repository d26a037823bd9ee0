/* Owns how the bytes of a file come into reach. */
#define _XOPEN_SOURCE     700
#define _FILE_OFFSET_BITS 64

#include "mapping.h"

#include "base/error.h"
#include "base/memory.h"
#include "path.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* O_NONBLOCK: opening a FIFO must not wait for a writer; on regular files it means nothing. */
mha_status mha_open_regular(const char *path, int *file, int64_t *file_bytes, mha_error *error) {
  struct stat info;
  const int opened = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (opened < 0)
    return mha_fail_system(path, "opened", errno, error);
  const int failed = fstat(opened, &info) != 0 ? errno : 0;
  if (!failed && S_ISREG(info.st_mode)) {
    *file = opened;
    *file_bytes = (int64_t)info.st_size;
    return mha_succeed(error);
  }
  (void)close(opened);
  if (failed)
    return mha_fail_system(path, "examined", failed, error);
  return mha_fail(error, MHA_ERROR_IO, "%s is not a regular file; rule: only such are read",
                  mha_shown_path(path));
}

mha_status mha_read_at(const char *path, int file, int64_t offset, void *target, size_t n,
                       mha_error *error) {
  for (size_t done = 0; done < n;) {
    const ssize_t got =
        pread(file, (unsigned char *)target + done, n - done, (off_t)offset + (off_t)done);
    if (got < 0 && errno == EINTR)
      continue;
    if (got < 0)
      return mha_fail_system(path, "read", errno, error);
    if (got == 0)
      return mha_fail(error, MHA_ERROR_IO,
                      "%s ends at byte %" PRId64 " while it is read; rule: it stays as it is",
                      mha_shown_path(path), offset + (int64_t)done);
    done += (size_t)got;
  }
  return mha_succeed(error);
}

static mha_status map_file(const char *path, int file, mha_mapping *mapping, mha_error *error) {
  void *memory = mmap(NULL, mapping->n_bytes, PROT_READ, MAP_PRIVATE, file, 0);
  if (memory == MAP_FAILED)
    return mha_fail_system(path, "mapped", errno, error);
  mapping->memory = memory;
  mapping->is_mapped = true;
  return mha_succeed(error);
}

static mha_status read_file(const char *path, int file, mha_mapping *mapping, mha_error *error) {
  mapping->memory = mha_memory_allocate(&mapping->allocator, mapping->n_bytes);
  if (!mapping->memory)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for the %zu bytes of %s", mapping->n_bytes,
                    mha_shown_path(path));
  return mha_read_at(path, file, 0, mapping->memory, mapping->n_bytes, error);
}

mha_status mha_mapping_open(const char *path, bool read_into_memory, const mha_allocator *allocator,
                            mha_mapping *mapping, mha_error *error) {
  static const unsigned char nothing[1];
  int file = -1;
  int64_t file_bytes = 0;
  memset(mapping, 0, sizeof *mapping);
  mha_status status = mha_open_regular(path, &file, &file_bytes, error);
  if (status)
    return status;
  mapping->allocator = mha_memory_allocator(allocator);
  mapping->n_bytes = (size_t)file_bytes;
  if (file_bytes > PTRDIFF_MAX)
    status = mha_fail(error, MHA_ERROR_IO,
                      "%s holds %" PRId64 " bytes; rule: a file fits the address space",
                      mha_shown_path(path), file_bytes);
  else if (file_bytes > 0)
    status = (read_into_memory ? read_file : map_file)(path, file, mapping, error);
  (void)close(file);
  mapping->bytes = mapping->memory ? mapping->memory : nothing;
  if (status)
    mha_mapping_close(mapping);
  return status;
}

void mha_mapping_close(mha_mapping *mapping) {
  if (mapping->memory && mapping->is_mapped)
    (void)munmap(mapping->memory, mapping->n_bytes);
  else if (mapping->memory)
    mha_memory_release(&mapping->allocator, mapping->memory, mapping->n_bytes);
  memset(mapping, 0, sizeof *mapping);
}
