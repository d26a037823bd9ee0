/* The way back through a fixture's call: what comes from above, and a gradient of everything that
 * the call has, each of them poisoned. */
#ifndef MHA_TESTS_BACKWARD_H
#define MHA_TESTS_BACKWARD_H

#include "fixture.h"

/* Gradients that a way back may be asked for, at most. */
enum { TEST_MAX_GRADIENTS = 16 };

/* One gradient: the member of the arguments that points to it, and its numbers, gaps included. */
typedef struct test_asked_gradient {
  const char *name; /* as in messages, "back.d_query" */
  float **member;
  float *data;
  int64_t floats;
} test_asked_gradient;

typedef struct test_backward {
  mha_backward_args args;          /* of mha_backward */
  mha_attend_backward_args attend; /* of mha_attend_backward */
  float *dy;                       /* [B][Lq][Eo] or [B][Lq][H][dv], dense */
  int64_t dy_floats;
  test_asked_gradient gradients[TEST_MAX_GRADIENTS];
  size_t n;
} test_backward;

/* Asks for every gradient that there is, in memory of the fixture's. */
void test_backward_build(test_backward *back, test_fixture *fixture);
/* Poisons the gradients. */
void test_backward_poison(const test_backward *back);
/* Fails unless every number of every gradient is poison still. */
void test_backward_expect_poison(const test_backward *back);
/* Fails if a gradient, none of whose numbers is a gap, has poison left. */
void test_backward_expect_written(const test_backward *back, const char *name);
/* The call alone, of a layer or, without weights, of step 3. */
mha_status test_backward_call(test_backward *back, test_fixture *fixture, mha_context *context,
                              const mha_weights *weights, mha_error *error);
/* Copies of all gradients, one behind the other; malloc'd. */
float *test_backward_copy(const test_backward *back);
/* Fails unless they have the bits of such a copy. */
void test_backward_expect_bits(const test_backward *back, const float *copy);

#endif
