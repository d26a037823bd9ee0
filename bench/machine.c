/* Owns the description of the machine, as far as /proc and the library tell it. */
#define _POSIX_C_SOURCE 200809L
#include "machine.h"

#include "mha.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void copy(char *text, size_t bytes, const char *from, size_t length) {
  const size_t n = length < bytes - 1 ? length : bytes - 1;
  memcpy(text, from, n);
  text[n] = '\0';
}

/* Copies what follows the colon in the first line of `path` that begins with `key`. */
static bool read_line(const char *path, const char *key, char *text, size_t bytes) {
  char line[512];
  bool found = false;
  FILE *file = fopen(path, "r");
  while (file && !found && fgets(line, sizeof line, file)) {
    const char *colon = strchr(line, ':');
    found = colon && strncmp(line, key, strlen(key)) == 0;
    if (found) {
      const char *value = colon + 1 + strspn(colon + 1, " \t");
      copy(text, bytes, value, strcspn(value, "\n"));
    }
  }
  if (file)
    fclose(file);
  return found;
}

void bench_machine_cpu(char *text, size_t bytes) {
  if (!read_line("/proc/cpuinfo", "model name", text, bytes))
    copy(text, bytes, "unknown CPU", strlen("unknown CPU"));
}

int bench_machine_cpu_count(void) {
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int)n : 1;
}

double bench_machine_available_bytes(void) {
  char text[64];
  if (!read_line("/proc/meminfo", "MemAvailable", text, sizeof text))
    return INFINITY;
  return 1024 * strtod(text, NULL);
}

/* "32768K" in bytes; 0 if the file is not there or holds something else. */
static size_t read_size(const char *path) {
  unsigned long long number = 0;
  char unit = '\0';
  FILE *file = fopen(path, "r");
  if (!file)
    return 0;
  const int n = fscanf(file, "%19llu%c", &number, &unit);
  fclose(file);
  if (n < 1)
    return 0;
  return (size_t)number << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

size_t bench_machine_cache_bytes(void) {
  size_t largest = 0;
  for (int index = 0; index < 8; index++) {
    char path[64];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    const size_t bytes = read_size(path);
    largest = bytes > largest ? bytes : largest;
  }
  return largest > 0 ? largest : (size_t)64 << 20;
}

/* All columns of the first line of /proc/stat but idle and waiting for disks, as seconds. */
static double busy_seconds(void) {
  double ticks[8] = {0}; /* user nice system idle iowait irq softirq steal */
  char line[512] = "";
  FILE *file = fopen("/proc/stat", "r");
  const bool read = file && fgets(line, sizeof line, file);
  if (file)
    fclose(file);
  if (!read || strncmp(line, "cpu ", 4) != 0)
    return NAN;
  char *at = line + 4;
  for (int i = 0; i < 8; i++)
    ticks[i] = strtod(at, &at);
  const double busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6] + ticks[7];
  return busy / (double)sysconf(_SC_CLK_TCK);
}

double bench_machine_others_seconds(void) {
  struct timespec own;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
  return busy_seconds() - ((double)own.tv_sec + 1e-9 * (double)own.tv_nsec);
}

void bench_machine_build_info(const char *key, char *text, size_t bytes) {
  char info[2048];
  copy(text, bytes, "unknown", strlen("unknown"));
  (void)mha_build_info(info, sizeof info);
  for (const char *line = info; *line; line += strspn(line, "\n")) {
    const size_t length = strcspn(line, "\n");
    const size_t name = strcspn(line, ":");
    if (name == strlen(key) && strncmp(line, key, name) == 0) {
      const char *value = line + name + 1 + strspn(line + name + 1, " ");
      copy(text, bytes, value, (size_t)(line + length - value));
      return;
    }
    line += length;
  }
}
