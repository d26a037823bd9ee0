/* What the library does about fork(). */
#ifndef MHA_SRC_RUNTIME_FORK_H
#define MHA_SRC_RUNTIME_FORK_H

#include <stdint.h>

/* Watches forks from now on. Before the first context. */
void mha_fork_watch(void);

/* How many forks lie between the process that first watched and this one. Threads that were started
 * under another number do not exist here. */
uint32_t mha_fork_generation(void);

#endif
