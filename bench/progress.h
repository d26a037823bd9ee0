/* One line on a terminal that says what is being done. */
#ifndef MHA_BENCH_PROGRESS_H
#define MHA_BENCH_PROGRESS_H

#if defined(__GNUC__)
#define BENCH_PRINTF __attribute__((format(printf, 1, 2)))
#else
#define BENCH_PRINTF
#endif

/* Replaces the line on stderr; nothing at all if that is no terminal. */
void bench_progress(const char *format, ...) BENCH_PRINTF;

/* Wipes the line, before anything else is printed. */
void bench_progress_end(void);

#endif
