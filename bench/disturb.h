/* Another process that wants a CPU, as neighbours in a container do. */
#ifndef MHA_BENCH_DISTURB_H
#define MHA_BENCH_DISTURB_H

#include <stdbool.h>

/* Starts it, asleep; before this process has threads. False after a message on stderr. */
bool bench_disturb_create(void);

/* Between these two it spins, on the last CPU that this process may use. */
void bench_disturb_begin(void);
void bench_disturb_end(void);

/* Ends it, if it was started. */
void bench_disturb_destroy(void);

#endif
