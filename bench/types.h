/* How numbers are stored in a row of the table. */
#ifndef MHA_BENCH_TYPES_H
#define MHA_BENCH_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BENCH_MAX_TYPES 8

/* Those of the matrices and of the cache, as mha_element. */
typedef struct bench_type {
  char name[12]; /* "f32", "q8_0", "f32/bf16" */
  int32_t matrices, cache;
  double tolerance; /* largest allowed difference from the float32 output, of the largest output */
} bench_type;

typedef struct bench_type_list {
  int n;
  bench_type types[BENCH_MAX_TYPES];
} bench_type_list;

/* Appends "MATRICES" or "MATRICES/CACHE", each f32, f16, bf16, q8_0 or, of matrices, q4_0. Alone it
 * stands for both, q4_0 for q4_0/q8_0. False if it is none of these, there twice, or one too many.
 */
bool bench_types_add(bench_type_list *list, const char *text);

/* Whether every number of the type is float32. */
bool bench_type_is_float(const bench_type *type);

#endif
