/* The gate that every task passes: shut while a thread forks, and never more inside than the BLAS
 * can take. */
#ifndef MHA_SRC_RUNTIME_GATE_H
#define MHA_SRC_RUNTIME_GATE_H

#include "mha.h"

#include <stdbool.h>

/* Lets the calling thread in, as soon as nobody forks: MHA_OK, and it must leave. Otherwise
 * MHA_ERROR_BUSY: others are inside, or about to be, and the BLAS can take no more; or
 * MHA_ERROR_MEMORY: nobody ever was, and the BLAS would find no memory to work in. */
mha_status mha_gate_enter(void);
void mha_gate_leave(void);

/* Whether the calling thread is inside: it is then a signal handler that asks. */
bool mha_gate_is_inside(void);

/* A thread that is about to fork, and not inside, shuts the gate, waits until nobody is inside, and
 * opens it again. In the child there is no other thread, whether the gate was shut or not. */
void mha_gate_shut(void);
void mha_gate_open(void);
void mha_gate_open_in_child(void);

/* Sleeps for a moment, so that a thread of lower priority gets on. */
void mha_gate_nap(void);

#endif
