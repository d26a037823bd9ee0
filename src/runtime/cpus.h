/* How many CPUs there are for this process. */
#ifndef MHA_SRC_RUNTIME_CPUS_H
#define MHA_SRC_RUNTIME_CPUS_H

#include <stdint.h>

/* CPUs that this process may use, by its affinity where the system tells; at least 1. */
int32_t mha_cpu_count(void);

#endif
