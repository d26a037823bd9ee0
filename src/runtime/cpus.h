/* The CPUs that this process may use. */
#ifndef MHA_SRC_RUNTIME_CPUS_H
#define MHA_SRC_RUNTIME_CPUS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* How many there are, by the process's affinity where the system tells; at least 1. */
int32_t mha_cpu_count(void);

/* Where a thread may run, while it is kept away from one CPU. Begin with {0}. */
typedef struct mha_cpu_home {
  bool is_away;
  unsigned char mask[128];
} mha_cpu_home;

/* Has a thread that sleeps wake up on another CPU than the calling thread's, if it may run on
 * another: a scheduler that takes the CPU of a virtual machine for busy would put it behind the
 * caller. The thread itself comes home again as soon as it runs. Both do nothing where the system
 * knows no affinity. */
void mha_cpu_send_away(pthread_t thread, mha_cpu_home *home);
void mha_cpu_come_home(mha_cpu_home *home);

#endif
