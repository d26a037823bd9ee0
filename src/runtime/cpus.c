/* Owns what the library knows of CPUs: their count, and on which of them a thread wakes up. */
#define _GNU_SOURCE 1 /* sched_getaffinity, pthread_setaffinity_np */

#include "cpus.h"

#include <sched.h>
#include <string.h>
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

#if defined(__linux__) && defined(CPU_CLR)
_Static_assert(sizeof(cpu_set_t) <= sizeof((mha_cpu_home *)0)->mask, "a home holds all CPUs");

void mha_cpu_send_away(pthread_t thread, mha_cpu_home *home) {
  cpu_set_t cpus;
  const int here = sched_getcpu();
  if (home->is_away || here < 0 || here >= CPU_SETSIZE ||
      pthread_getaffinity_np(thread, sizeof cpus, &cpus) != 0 || CPU_COUNT(&cpus) < 2 ||
      !CPU_ISSET((size_t)here, &cpus))
    return;
  memcpy(home->mask, &cpus, sizeof cpus);
  CPU_CLR((size_t)here, &cpus);
  home->is_away = pthread_setaffinity_np(thread, sizeof cpus, &cpus) == 0;
}

void mha_cpu_come_home(mha_cpu_home *home) {
  cpu_set_t cpus;
  if (!home->is_away)
    return;
  memcpy(&cpus, home->mask, sizeof cpus);
  home->is_away = false;
  (void)pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
}
#else
void mha_cpu_send_away(pthread_t thread, mha_cpu_home *home) {
  (void)thread, (void)home;
}

void mha_cpu_come_home(mha_cpu_home *home) {
  (void)home;
}
#endif
