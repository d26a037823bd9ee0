/* One case of gradients on disk: sizes and options in the names of the contract, what goes in, dy,
 * and what has to come out. A case is a folder:
 *
 *   case.json   name, options {}, inputs {} and expected {}: each name: [dtype, shape]
 *   <name>.npy  the array of that name
 *
 * An option, array or file that nobody asks for makes the case fail. */
#ifndef MHA_TESTS_CONFORMANCE_GRADIENTS_CASE_H
#define MHA_TESTS_CONFORMANCE_GRADIENTS_CASE_H

#include "case.h"
#include "oracle.h"

enum { GRAD_MAX_RANK = 4 };

typedef struct grad_array {
  const char *name; /* the JSON's */
  int rank;
  int64_t shape[GRAD_MAX_RANK];
  int64_t n;
  double *numbers;
  float *floats;  /* the same as they are in the file, if they are float32; otherwise NULL */
  uint8_t *bytes; /* likewise uint8 */
  bool done;      /* an input that was taken, an expected array that was compared */
} grad_array;

typedef struct grad_arrays {
  int n;
  grad_array items[CONF_MAX_ARRAYS];
} grad_arrays;

typedef struct grad_case {
  conf_case base; /* outcome and memory */
  grad_arrays inputs, expected;
  const grad_array *query, *key, *value, *dy; /* key and value may be absent */
  bool core;                                  /* no matrices: step 3 alone */
  bool out_in;
  int64_t query_position;
  oracle_problem problem;            /* all that the options and the shapes say, and the numbers */
  double worst_library, worst_judge; /* error as a share of what is allowed */
} grad_case;

/* Reads folder/case.json and all that belongs to it. Release the case in any event. False after a
 * failure has been settled. */
bool grad_case_open(const char *folder, grad_case *c);
void grad_case_release(grad_case *c);

/* Takes an input or an expected array; NULL if the case has none of that name. */
const grad_array *grad_input(grad_case *c, const char *name);
const grad_array *grad_expected(grad_case *c, const char *name);

/* Compares n numbers of the library's with an expected array: |actual − expected| ≤
 * 1e-5·(largest |expected|) + 1e-6. An array that is not expected is no error. */
bool grad_compare(grad_case *c, const char *name, const float *actual, int64_t n);
/* The same of the judge's, within 1e-9·(largest |expected|) + 1e-12: both sides are in double. */
bool grad_compare_judge(grad_case *c, const char *name, const double *actual, int64_t n);

/* Fails unless every input was taken and every expected array compared; those then have to be
 * compared anew, by the next who is put to the case. */
bool grad_all_done(grad_case *c);

/* Puts the case to the judge, and to the library: without a tape and with one. */
bool grad_judge(grad_case *c);
bool grad_run(grad_case *c, mha_context *context);

#endif
