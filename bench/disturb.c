/* Owns the disturbing process. It is a child that is stopped and continued by signals. */
#define _GNU_SOURCE /* affinity */
#include "disturb.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t child = -1;

static void keep_to_last_cpu(void) {
  cpu_set_t cpus, last;
  CPU_ZERO(&last);
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0)
    return;
  for (size_t k = CPU_SETSIZE; k > 0; k--)
    if (CPU_ISSET(k - 1, &cpus)) {
      CPU_SET(k - 1, &last);
      (void)sched_setaffinity(0, sizeof last, &last);
      return;
    }
}

static void spin(void) {
  volatile unsigned long turns = 0;
  keep_to_last_cpu();
  for (;;)
    turns = turns + 1;
}

bool bench_disturb_create(void) {
  child = fork();
  if (child == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    spin();
  }
  if (child < 0)
    fprintf(stderr, "mha-bench: --disturb: no process: %s\n", strerror(errno));
  else
    bench_disturb_end();
  return child > 0;
}

void bench_disturb_begin(void) {
  (void)kill(child, SIGCONT);
}

void bench_disturb_end(void) {
  (void)kill(child, SIGSTOP);
  (void)waitpid(child, NULL, WUNTRACED);
}

void bench_disturb_destroy(void) {
  if (child <= 0)
    return;
  (void)kill(child, SIGKILL);
  (void)waitpid(child, NULL, 0);
  child = -1;
}
