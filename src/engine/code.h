/* Memory that machine code is written to and then run from. */
#ifndef MHA_SRC_ENGINE_CODE_H
#define MHA_SRC_ENGINE_CODE_H

#include <stddef.h>

/* Writable memory of the system's, not of an allocator; NULL = none. Only what is touched counts.
 */
void *mha_code_reserve(size_t bytes);

/* Makes the first `used` bytes executable and no longer writable, and gives the others back.
 * Returns how many are kept; 0 = the system does not let it, and all is as it was. */
size_t mha_code_seal(void *code, size_t bytes, size_t used);

void mha_code_release(void *code, size_t bytes);

#endif
