/* To be preloaded under a test program whose BLAS reads a little beyond its matrices, as BLIS 0.9
 * does (its issue 635): the pages round the tests' arrays may then be read, while a write still
 * stops the program. What the tests say about numbers holds; that nothing beyond is read they
 * cannot say. */
#define _GNU_SOURCE 1 /* MAP_ANONYMOUS, syscall */
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int readable(int protection) {
  return protection == PROT_NONE ? PROT_READ : protection;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  return (void *)syscall(SYS_mmap, address, bytes, readable(protection), flags, file, offset);
}

int mprotect(void *address, size_t bytes, int protection) {
  return (int)syscall(SYS_mprotect, address, bytes, readable(protection));
}
