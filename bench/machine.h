/* What the bench says about the machine it runs on. */
#ifndef MHA_BENCH_MACHINE_H
#define MHA_BENCH_MACHINE_H

#include <stddef.h>

/* The CPU's model name, or "unknown CPU". */
void bench_machine_cpu(char *text, size_t bytes);

int bench_machine_cpu_count(void);

/* Bytes of memory that can be had without swapping; infinite where that is not known. */
double bench_machine_available_bytes(void);

/* Bytes of the largest cache that the first CPU reaches; 64 MiB where that is not known. */
size_t bench_machine_cache_bytes(void);

/* CPU seconds spent so far by all but this process, on all CPUs, the host's theft included; NAN
 * where that is not known. */
double bench_machine_others_seconds(void);

/* Value of a key in mha_build_info, "unknown" if it has none. */
void bench_machine_build_info(const char *key, char *text, size_t bytes);

#endif
