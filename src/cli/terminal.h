/* Text of strangers on a terminal. */
#ifndef MHA_SRC_CLI_TERMINAL_H
#define MHA_SRC_CLI_TERMINAL_H

#include <stddef.h>
#include <stdio.h>

/* Bytes of the character at the beginning of text[0 .. n) if it may be shown, or 0. */
size_t mha_terminal_harmless(const char *text, size_t n);

/* Prints `n` bytes that came from a file or a command line. What could act on a terminal instead of
 * being shown is printed as "\x1B", byte by byte: control characters, those that turn the direction
 * of writing, and what is not UTF-8. Returns the number of bytes printed. */
int mha_terminal_print(const char *text, size_t n, FILE *stream);

#endif
