/* Owns executable memory. It is never writable at the same time. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "code.h"

#include <sys/mman.h>

void *mha_code_reserve(size_t bytes) {
  void *code =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return code == MAP_FAILED ? NULL : code;
}

bool mha_code_seal(void *code, size_t bytes) {
  return mprotect(code, bytes, PROT_READ | PROT_EXEC) == 0;
}

void mha_code_release(void *code, size_t bytes) {
  (void)munmap(code, bytes);
}
