/* The program of a document, run by its test. */
#ifndef MHA_TESTS_PROGRAM_H
#define MHA_TESTS_PROGRAM_H

#include "support.h"

/* Runs it with these arguments; what it prints, on either stream. */
int test_run_program(int (*program)(int argc, char **argv), int argc, char **argv, char *printed,
                     size_t bytes);

#endif
