/* Memory that machine code is written to and then run from. */
#ifndef MHA_SRC_ENGINE_CODE_H
#define MHA_SRC_ENGINE_CODE_H

#include <stdbool.h>
#include <stddef.h>

/* Writable memory of the system's, not of an allocator; NULL = none. Only what is touched counts.
 */
void *mha_code_reserve(size_t bytes);

/* Bytes of the pages that `used` bytes touch. */
size_t mha_code_kept(size_t used);

/* Makes the first `kept` bytes, whole pages, executable and no longer writable, and gives the
 * others back; false, and all is as it was, where the system does not let it. */
bool mha_code_seal(void *code, size_t bytes, size_t kept);

void mha_code_release(void *code, size_t bytes);

#endif
