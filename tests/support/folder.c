/* Owns the folder in which a program works: its name, the way there and back, what is in it. */
#define _XOPEN_SOURCE 700 /* mkdtemp */
#include "folder.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char work_folder[64];

int test_folder_enter(const char *program) {
  (void)snprintf(work_folder, sizeof work_folder, "%s.XXXXXX", program);
  return !mkdtemp(work_folder) || chdir(work_folder) != 0;
}

int test_folder_leave(void) {
  return chdir("..") != 0 || rmdir(work_folder) != 0;
}

void test_put_file(const char *path, const void *bytes, size_t n) {
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, n, file), n);
  assert_int_equal(fclose(file), 0);
}

static bool is_itself_or_above(const char *name) {
  return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

int test_files_in(const char *folder) {
  int n = 0;
  DIR *open_folder = opendir(folder);
  assert_non_null(open_folder);
  for (const struct dirent *entry = readdir(open_folder); entry; entry = readdir(open_folder))
    n += !is_itself_or_above(entry->d_name);
  assert_int_equal(closedir(open_folder), 0);
  return n;
}

int test_remove_files(const char *folder) {
  DIR *open_folder = opendir(folder);
  if (!open_folder)
    return 1;
  for (const struct dirent *entry = readdir(open_folder); entry; entry = readdir(open_folder)) {
    char path[1024];
    (void)snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    if (!is_itself_or_above(entry->d_name))
      (void)remove(path);
  }
  return closedir(open_folder);
}

bool test_exists(const char *path) {
  struct stat info;
  return lstat(path, &info) == 0;
}
