/* Owns the walk over folders. */
#define _POSIX_C_SOURCE 200809L
#include "folders.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static bool is_folder(const char *path) {
  struct stat status;
  return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

bool conf_join(char path[MHA_PATH_BYTES], const char *root, const char *name) {
  const int length = snprintf(path, MHA_PATH_BYTES, "%s/%s", root, name);
  return length > 0 && length < MHA_PATH_BYTES;
}

static bool walk(const char *root, bool folders, conf_visitor *visit, void *user) {
  struct dirent **entries;
  const int n = scandir(root, &entries, NULL, alphasort);
  if (n < 0)
    return false;
  for (int i = 0; i < n; i++) {
    char path[MHA_PATH_BYTES];
    if (entries[i]->d_name[0] != '.' && conf_join(path, root, entries[i]->d_name) &&
        is_folder(path) == folders)
      visit(path, entries[i]->d_name, user);
    free(entries[i]);
  }
  free(entries);
  return true;
}

bool conf_walk(const char *root, conf_visitor *visit, void *user) {
  return walk(root, true, visit, user);
}

bool conf_walk_files(const char *root, conf_visitor *visit, void *user) {
  return walk(root, false, visit, user);
}
