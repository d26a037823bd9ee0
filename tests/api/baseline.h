/* Calls that are right, of which a test spoils one thing, and what must hold then: the status, a
 * message that names it and states a rule, and nothing written. */
#ifndef MHA_TESTS_BASELINE_H
#define MHA_TESTS_BASELINE_H

#include "fixture.h"

typedef enum baseline {
  LAYER,        /* mha_forward, cross attention, no rules */
  SELF,         /* mha_forward with key and value NULL */
  LAYER_RULES,  /* mha_forward with every rule and every result */
  LAYER_PACKED, /* mha_forward with packed input */
  CORE,         /* mha_attend, no rules */
  CORE_RULES,
  CORE_PACKED,
  CREATE /* mha_weights_create alone */
} baseline;

enum { B = 2, LQ = 3, LK = 5, H = 4, G = 2, D = 3, DV = 2, E = 12 };

extern test_fixture fixture; /* one at a time; too large for a stack */

/* Fills the fixture; the caller releases it. */
void baseline_build(baseline which);

/* An array by address. */
typedef struct baseline_region {
  const char *name; /* a word of its name in messages */
  void *data;
  size_t bytes;
} baseline_region;

enum { BASELINE_INPUTS = 32 };

/* Everything that a call reads, with NULL for what this one has not; how many. */
size_t baseline_list_inputs(baseline_region *r);

/* No result of the fixture was written. */
void baseline_expect_untouched(void);
/* The error struct begins as garbage, and its message ends within its bytes. */
void baseline_fill_with_garbage(mha_error *error);
void baseline_expect_error(mha_status got, mha_status expected, const mha_error *error,
                           const char *word);
/* Creates the layer as it is in the fixture, calls, and expects the error with and without an
 * mha_error, before any memory is taken. */
void baseline_expect_call_fails(mha_status expected, const char *word);
/* The same of mha_weights_create. */
void baseline_expect_create_fails(mha_status expected, const char *word);

#endif
