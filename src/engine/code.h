/* Memory that machine code is written to and then run from. */
#ifndef MHA_SRC_ENGINE_CODE_H
#define MHA_SRC_ENGINE_CODE_H

#include <stdbool.h>
#include <stddef.h>

/* Writable memory of the system's, not of an allocator; NULL = none. Only what is touched counts.
 */
void *mha_code_reserve(size_t bytes);

/* Makes it executable and no longer writable; false where the system does not let it. */
bool mha_code_seal(void *code, size_t bytes);

void mha_code_release(void *code, size_t bytes);

#endif
