/* One case on disk: its case.json, its arrays, what came of it, and the memory its translation
 * needs. A case is a folder:
 *
 *   case.json   name, op, attributes {}, dims {}, inputs {}, outputs {}: {file, dtype, shape},
 *               suggested_tolerance {atol, rtol}
 *   *.npy       the arrays
 *
 * float16 becomes float32 while it is read. What a translator does not ask for is noticed: such a
 * case cannot pass. */
#ifndef MHA_TESTS_CONFORMANCE_CASE_H
#define MHA_TESTS_CONFORMANCE_CASE_H

#include "files/npy.h"
#include "mha.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define CONF_PRINTF(format_index, first_argument)                                                  \
  __attribute__((format(printf, format_index, first_argument)))
#else
#define CONF_PRINTF(format_index, first_argument)
#endif

enum { CONF_MAX_ARRAYS = 24, CONF_MAX_BLOCKS = 160, CONF_TEXT_BYTES = 1024 };

typedef enum conf_outcome { CONF_PASS, CONF_FAIL, CONF_CANNOT } conf_outcome;

typedef struct conf_array {
  const char *name; /* the JSON's */
  mha_npy_kind kind;
  mha_npy_array numbers;
  bool done; /* an input that was taken, an output that was compared or left out */
} conf_array;

typedef struct conf_arrays {
  int n;
  conf_array items[CONF_MAX_ARRAYS];
} conf_arrays;

typedef struct conf_case {
  json_t *json;
  conf_arrays inputs, outputs;
  double atol, rtol;
  conf_outcome outcome;
  char reason[CONF_TEXT_BYTES]; /* of CONF_FAIL and CONF_CANNOT */
  char left_out[CONF_TEXT_BYTES];
  double max_error; /* over all outputs and all spellings of the case */
  int n_compared;
  void *blocks[CONF_MAX_BLOCKS];
  int n_blocks;
} conf_case;

/* Functions that return bool return false after the outcome has been settled; the first settles. */

/* Reads folder/case.json and every array it names. Release the case in any event. */
bool conf_case_open(const char *folder, conf_case *c);
void conf_case_release(conf_case *c);

/* Settles: the case is read or computed wrongly. Returns false. */
bool conf_fail(conf_case *c, const char *format, ...) CONF_PRINTF(2, 3);
/* Settles: the library cannot express the case. Returns false. */
bool conf_cannot(conf_case *c, const char *format, ...) CONF_PRINTF(2, 3);
/* Settles a failure unless `status` is MHA_OK. */
bool conf_expect(conf_case *c, mha_status status, const mha_error *error);

/* A string at the top of case.json, "" if absent. */
const char *conf_text(const conf_case *c, const char *name);
/* Whether the JSON has the attribute, and its value. */
bool conf_attribute(const conf_case *c, const char *name, double *value);
/* Cannot unless every attribute is among `known`, which ends with NULL. */
bool conf_know_attributes(conf_case *c, const char *const *known);
/* A number of "dims", at least 0. */
bool conf_dimension(conf_case *c, const char *name, int64_t *value);

/* Takes an input; NULL if the case has none of that name. */
const conf_array *conf_input(conf_case *c, const char *name);
/* Takes an input that must be there, as floats. */
bool conf_floats_input(conf_case *c, const char *name, const conf_array **array);
/* Cannot unless every input has been taken. */
bool conf_all_taken(conf_case *c);

bool conf_has_output(const conf_case *c, const char *name);
/* Compares n numbers with an output: |actual − expected| ≤ atol + rtol·|expected|, infinities
 * equal, NaN where NaN is expected. An output that the case does not have is no error. */
bool conf_compare(conf_case *c, const char *name, const float *actual, int64_t n);
/* Notes an output that is not the library's work. */
void conf_leave_out(conf_case *c, const char *name);
/* Fails unless every output was compared or left out, and one was compared. */
bool conf_all_compared(conf_case *c);

/* Memory until the case is released; NULL has settled a failure. Floats begin as NaN, so that one
 * that is never written cannot agree. */
float *conf_floats(conf_case *c, int64_t n);
double *conf_doubles(conf_case *c, int64_t n); /* 0 */
uint8_t *conf_bytes(conf_case *c, int64_t n);
int64_t *conf_integers(conf_case *c, int64_t n);

#endif
