/* Owns executable memory. It is never writable at the same time. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "code.h"

#include <sys/mman.h>
#include <unistd.h>

void *mha_code_reserve(size_t bytes) {
  void *code =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return code == MAP_FAILED ? NULL : code;
}

size_t mha_code_kept(size_t used) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (used + page - 1) / page * page;
}

bool mha_code_seal(void *code, size_t bytes, size_t kept) {
  if (mprotect(code, kept, PROT_READ | PROT_EXEC) != 0)
    return false;
  if (kept < bytes)
    (void)munmap((char *)code + kept, bytes - kept);
  return true;
}

void mha_code_release(void *code, size_t bytes) {
  (void)munmap(code, bytes);
}
