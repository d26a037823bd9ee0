/* Owns the count of CPUs. */
#define _GNU_SOURCE 1 /* sched_getaffinity */

#include "cpus.h"

#include <sched.h>
#include <unistd.h>

int32_t mha_cpu_count(void) {
#if defined(CPU_COUNT)
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof mine, &mine) == 0)
    return (int32_t)CPU_COUNT(&mine);
#endif
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int32_t)n : 1;
}
