/* Feeds each file of a folder to a fuzz target. A file named good_... must be accepted and one
 * named bad_... refused; others, such as findings, need only be survived. */
#define _XOPEN_SOURCE 700

#include "fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 20 };

/* Feeds one file, in memory of exactly its size. Returns false if the outcome is the wrong one. */
static bool replay(const char *folder, const char *name) {
  static uint8_t bytes[MOST_BYTES];
  char path[4096];
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "rb");
  if (!file) {
    fprintf(stderr, "%s cannot be opened\n", path);
    return false;
  }
  const size_t size = fread(bytes, 1, sizeof bytes, file);
  (void)fclose(file);
  uint8_t *exact = malloc(size + (size == 0));
  FUZZ_CHECK(exact);
  memcpy(exact, bytes, size);
  printf("%s\n", name);
  (void)fflush(stdout); /* names the file should it end the program */
  (void)LLVMFuzzerTestOneInput(exact, size);
  free(exact);
  const bool right = strncmp(name, "good_", 5) == 0  ? fuzz_accepted
                     : strncmp(name, "bad_", 4) == 0 ? !fuzz_accepted
                                                     : true;
  if (!right)
    fprintf(stderr, "%s was %s\n", path, fuzz_accepted ? "accepted" : "refused");
  return right;
}

int main(int argc, char **argv) {
  int n_files = 0;
  int n_wrong = 0;
  DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
  if (!folder) {
    fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
    if (entry->d_name[0] == '.')
      continue;
    n_files++;
    n_wrong += !replay(argv[1], entry->d_name);
  }
  (void)closedir(folder);
  printf("%d files, %d wrong\n", n_files, n_wrong);
  return n_files == 0 || n_wrong > 0;
}
