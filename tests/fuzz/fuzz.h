/* What a fuzz target offers: to libFuzzer, or to replay.c, which needs no special compiler. */
#ifndef MHA_TESTS_FUZZ_H
#define MHA_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Feeds one file's bytes to a reader and uses whatever it accepts. Aborts where the reader breaks a
 * promise; returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Whether the reader took the last input. */
extern bool fuzz_accepted;

/* Ends the program unless a promise is kept. */
#define FUZZ_CHECK(condition)                                                                      \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition);                      \
      abort();                                                                                     \
    }                                                                                              \
  } while (0)

#endif
