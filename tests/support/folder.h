/* A folder of a program's own to work in, and files in it. */
#ifndef MHA_TESTS_FOLDER_H
#define MHA_TESTS_FOLDER_H

#include "support.h"

/* Makes a new folder below the one where the program runs, and goes there. 0, or something else if
 * that cannot be, as cmocka wants it of a group's setup. */
int test_folder_enter(const char *program);
/* Goes back and removes the folder. Something else than 0 unless it is empty. */
int test_folder_leave(void);

/* Writes a file with these bytes, in place of one that is there. */
void test_put_file(const char *path, const void *bytes, size_t n);
/* How many files and folders are in a folder. */
int test_files_in(const char *folder);
/* Removes the files in a folder, and empty folders. Something else than 0 if it is not there. */
int test_remove_files(const char *folder);
/* A link that leads nowhere is there too. */
bool test_exists(const char *path);

#endif
