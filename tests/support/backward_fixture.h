/* A fixture's way back: what comes from above, a gradient for everything the call has, each in
 * memory of its own that lies as the thing itself, run through the library and through the judge.
 */
#ifndef MHA_TESTS_BACKWARD_FIXTURE_H
#define MHA_TESTS_BACKWARD_FIXTURE_H

#include "fixture.h"
#include "oracle_gradients.h"

typedef enum test_gradient_name {
  TEST_D_QUERY, /* of mha_attend_backward d_q, likewise key and value */
  TEST_D_KEY,
  TEST_D_VALUE,
  TEST_D_WQ,
  TEST_D_WK,
  TEST_D_WV,
  TEST_D_WO,
  TEST_D_BQ,
  TEST_D_BK,
  TEST_D_BV,
  TEST_D_BO,
  TEST_D_QUERY_NORM,
  TEST_D_KEY_NORM,
  TEST_D_BIAS,
  TEST_D_SLOPES,
  TEST_D_SINKS,
  TEST_GRADIENTS
} test_gradient_name;

/* What to try. Of `forward` accumulate is whether the output was added to something. */
typedef struct test_back_case {
  test_case forward;
  test_layout dy_layout;
  bool accumulate; /* onto random numbers */
  bool kept;       /* with a tape; mha_attend_backward: with log_sum_exp and the output */
} test_back_case;

typedef struct test_gradient {
  const char *name;
  float *data;             /* NULL = the call has no such thing */
  float *before;           /* [floats] what is there before the call */
  int64_t floats;          /* first element to last, gaps included */
  int64_t rows, columns;   /* its elements; those of a row follow one another */
  int64_t *row_at;         /* [rows] where each row begins */
  bool *is_read;           /* [rows] false: beyond a length, or in no packed sequence */
  bool judge_has_the_gaps; /* the judge's numbers lie as data does; otherwise dense */
  test_shape shape;        /* of the rows, for messages; the last is `columns` */
} test_gradient;

typedef struct test_back {
  test_back_case c;
  test_fixture f;
  test_view dy;
  test_gradient gradients[TEST_GRADIENTS];
  unsigned wanted; /* bits of test_gradient_name; all that there are, after test_back_build */
  mha_weights *weights;
  mha_context *context;
  mha_tape *tape;
  mha_backward_args args;
  mha_attend_backward_args attend_args;
  /* who makes the call of test_back_run instead of the library, with args as they are; or NULL */
  mha_status (*call)(void *user, mha_error *error);
  void *call_user;
} test_back;

/* Builds the fixture, the layer and the context, and makes the forward call where the way back
 * needs what it gave. dy is poison where it must not be read. */
void test_back_build(test_back *back, const test_back_case *c);
/* Another context, with so many threads. */
void test_back_use_threads(test_back *back, int32_t threads);
/* The forward call, for the tape or the statistics; after a change to what it reads. */
void test_back_forward(test_back *back);
void test_back_release(test_back *back);

/* Puts back what was there before, calls, and expects MHA_OK and untouched gaps. */
void test_back_run(test_back *back);
/* The call alone. */
mha_status test_back_call(test_back *back, mha_error *error);
/* Makes `before` of every gradient 0, which is also what `accumulate` then adds to. */
void test_back_clear(test_back *back);

/* The judge's gradients of the fixture as it is now, sources that are one array added up. */
void test_back_ask(test_back *back, oracle_gradients *gradients);
/* Compares every wanted gradient with the judge's; what no forward call read must be 0, or what was
 * there before. */
void test_back_judge(test_back *back);
/* Build, run, judge, release. */
void test_back_check(const test_back_case *c);

/* A copy of all gradients' memory, one behind the other; to be freed. */
float *test_back_copy(const test_back *back);
/* Whether element (row, column) of a gradient must have the bits that it had; NULL = all must. */
typedef bool test_back_keeps(const void *user, test_gradient_name which, int64_t row,
                             int64_t column);
/* Every wanted gradient has the bits of such a copy. */
void test_back_same(const test_back *back, const float *copy, test_back_keeps *keeps,
                    const void *user);
float test_back_at(const test_back *back, test_gradient_name which, int64_t row, int64_t column);

/* A random layer or, with `core`, a random call of the core, over the product of options. */
test_back_case test_back_draw(test_random *random, uint64_t seed, bool core);

/* Draws who sees whom: windows reach that far, and offsets about as far. */
void test_draw_visibility(test_random *random, test_case *c, int64_t reach);

#endif
