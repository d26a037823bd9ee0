/* Folders of cases. */
#ifndef MHA_TESTS_CONFORMANCE_FOLDERS_H
#define MHA_TESTS_CONFORMANCE_FOLDERS_H

#include "files/npy.h"

#include <stdbool.h>

/* root/name in `path`; false if it is too long. */
bool conf_join(char path[MHA_PATH_BYTES], const char *root, const char *name);

typedef void conf_visitor(const char *path, const char *name, void *user);

/* Calls visit for every folder in `root`, by name; false if `root` cannot be read. */
bool conf_walk(const char *root, conf_visitor *visit, void *user);

/* The same for every file that is no folder. */
bool conf_walk_files(const char *root, conf_visitor *visit, void *user);

#endif
