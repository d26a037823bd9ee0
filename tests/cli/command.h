/* The command `mha`, run as a user runs it in a folder of the test's own: its words, what it
 * printed, how it ended, and the arrays that it wrote. */
#ifndef MHA_TESTS_COMMAND_H
#define MHA_TESTS_COMMAND_H

#include "folder.h"

#include "files/npy.h"

/* ---- A folder to work in --------------------------------------------------------------------- */

/* Setup and teardown of a group: the folder begins with the files of the odd layer (inputs.h). */
int command_enter_folder(void **state);
int command_leave_folder(void **state);

/* ---- Running the command --------------------------------------------------------------------- */

enum { COMMAND_MOST_WORDS = 60, COMMAND_TEXT_BYTES = 65536 };

/* What the last run printed. */
extern char command_out[COMMAND_TEXT_BYTES];
extern char command_err[COMMAND_TEXT_BYTES];

/* What else the child does before it becomes the command, or NULL; the signal by which it is to
 * end, or 0. */
extern void (*command_in_child)(void);
extern int command_signal;

/* Runs the command with the words up to NULL; standard output goes to the file `out`, standard
 * error to command_err. Returns the exit status, or -1 where a signal was expected and came. */
int command_run_to(const char *out, const char *const *words);
/* The same with standard output to command_out. */
int command_run(const char *const *words);

/* A successful run: exit status 0 and a silent stderr. */
void command_run_well(const char *const *words);
/* A refused run: the exit status, one line on stderr with `fragment`, nothing on stdout. */
void command_run_badly(int expected, const char *fragment, const char *const *words);

#define RUN_WELL(...) command_run_well((const char *const[]){__VA_ARGS__, NULL})
#define RUN_BADLY(expected, fragment, ...)                                                         \
  command_run_badly(expected, fragment, (const char *const[]){__VA_ARGS__, NULL})

/* ---- What it wrote --------------------------------------------------------------------------- */

/* A text file, or its first bytes. */
void command_read_text(const char *path, char text[COMMAND_TEXT_BYTES]);

/* Reads what the command wrote and removes it. */
mha_npy_array command_take(const char *path);
void command_check_shape(const mha_npy_array *array, int rank, const int64_t *shape);
/* Takes the file, which has this shape and these bits. */
void command_same_bits(const char *path, int rank, const int64_t *shape, const float *expected);

/* ---- The article's example ------------------------------------------------------------------- */

#define ARTICLE MHA_TEST_DATA_DIR "/article/"

extern const char article[];
extern const char article_x[];
/* float32 against the article's float64: what its reader is promised. */
extern const double article_tolerance;

#define ARTICLE_RUN   "run", "--weights", article, "--heads", "2", "--input", article_x
#define ARTICLE_STEPS ARTICLE_RUN, "--output", "y.npy", "--causal", "--steps"

/* Takes the file, which has the shape and the numbers of a file of the article. */
void command_check_article(const char *path, const char *expected_path, int rank,
                           const int64_t *shape);

#endif
