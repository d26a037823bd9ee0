/* A layer with its inputs and rules as one value, run through the library and through the judge. */
#ifndef MHA_TESTS_FIXTURE_H
#define MHA_TESTS_FIXTURE_H

#include "oracle.h"
#include "support.h"

/* Bits for the four matrices and biases. */
enum { TEST_Q = 1, TEST_K = 2, TEST_V = 4, TEST_O = 8, TEST_ALL = 15 };

/* How a tensor lies in memory. */
typedef enum test_layout {
  TEST_DENSE,        /* [B][L][heads][size], strides left 0 */
  TEST_PADDED,       /* the same with poisoned gaps between rows and entries */
  TEST_LENGTH_FIRST, /* [L][B][heads][size] */
  TEST_HEAD_FIRST    /* [B][heads][L][size]; for mha_attend */
} test_layout;

/* How the four matrices lie in memory. */
typedef enum test_weight_layout {
  TEST_APART,   /* each one dense, leading dimensions left 0 */
  TEST_GAPS,    /* each one with poisoned gaps between its rows */
  TEST_IN_BLOCK /* Wq, Wk and Wv in one block; needs Eq = Ek = Ev */
} test_weight_layout;

/* Extents of a mask or bias that are full instead of 1. */
enum { TEST_FULL_BATCH = 1, TEST_FULL_HEADS = 2, TEST_FULL_ROWS = 4, TEST_FULL = 7 };

typedef enum test_source {
  TEST_CROSS,    /* key and value given */
  TEST_KEY_ONLY, /* value NULL: value = key */
  TEST_SELF      /* both NULL: Lk = Lq */
} test_source;

enum { TEST_WANT_WEIGHTS = 1, TEST_WANT_AVERAGE = 2, TEST_WANT_LSE = 4, TEST_WANT_ALL = 7 };

/* What to try. Sizes left 0: B, H, d 1; G H; dv d; Lk Lq; Eq H·d; Ek, Ev, Eo Eq. */
typedef struct test_case {
  uint64_t seed;
  int64_t B, Lq, Lk, H, G, d, dv, Eq, Ek, Ev, Eo;
  bool core;     /* mha_attend; Eq, Ek, Ev, Eo, matrices and biases do not apply */
  int threads;   /* 0 = 1 */
  bool at_front; /* memory begins behind a guard page instead of ending before one */

  bool out_in, borrow;
  test_weight_layout weight_layout;
  unsigned absent; /* matrices that are the identity */
  unsigned biases; /* biases that are given */
  /* How the library gets its matrices and, in mha_attend, k and v. The judge gets what they widen
   * to. Stored rows are whole blocks then. */
  int32_t query_type, key_type, value_type, output_type, k_type, v_type;
  bool odd_addresses; /* of what is not float32 */

  test_source source;
  test_layout layout; /* of inputs and output */
  bool accumulate;

  bool causal, window;
  int64_t left, right; /* of the window */
  mha_alignment alignment;
  int64_t offset;
  bool offset_each; /* one offset per entry, around `offset` */
  bool query_lengths, key_lengths;
  bool packed;      /* B sequences share Lq query rows and Lk key rows */
  bool packed_tail; /* and a quarter of the rows belongs to none of them */
  bool has_mask, has_bias;
  bool bias_hides; /* some −inf in the bias */
  unsigned mask_extents, bias_extents;
  bool mask_strides; /* strides with gaps, given, for both */
  bool alibi, sinks;
  bool scale_given;
  bool rules_in_call; /* scale and softcap come with the call and override others in the layer */
  float scale, softcap;
  float dropout;
  uint64_t dropout_seed, dropout_call;

  mha_norm norm; /* with random weights, unless norm_ones */
  bool norm_ones;
  /* 0 = 0.25 for heads below 8: a short head is sometimes nearly 0 by cancellation, and 1/rms then
   * magnifies the projection's rounding beyond the contract's bounds; otherwise 1e-5 */
  float epsilon;
  mha_rope rope;
  int64_t rotary;   /* 0 = d */
  double rope_base; /* 0 = 10000 */
  bool rope_tables; /* of random numbers, no longer than needed */
  int64_t query_position, key_position;
  bool positions_given; /* random ones, for every row */

  unsigned want;
  mha_stage stage;
} test_case;

/* A strided tensor of floats, [B][L][heads][size]. */
typedef struct test_view {
  float *data;
  int64_t batch, length, heads, size;
  int64_t batch_stride, row_stride, head_stride;
  int64_t floats; /* first element to last, gaps included */
  int32_t type;
  unsigned char *stored; /* the same numbers in that type, or NULL = float32 */
} test_view;

float *test_at(const test_view *view, int64_t b, int64_t i, int64_t h, int64_t c);

typedef struct test_matrix {
  float *data; /* NULL = absent */
  float *bias;
  int64_t in, out, ld;
  int32_t type;
  unsigned char *stored; /* the same numbers in that type, or NULL = float32 */
} test_matrix;

/* Numbers of a block: 32 or 1. */
int64_t test_block_of(int32_t type);
/* Where number `index`, the first of a block, is stored. */
unsigned char *test_stored_at(unsigned char *stored, int32_t type, int64_t index);
/* Makes number `index`, or the block that it is in, NaN (`infinite`: ±inf, in a block with a q of 0
 * NaN). */
void test_spoil_stored(unsigned char *stored, int32_t type, int64_t index, bool infinite);

/* Everything that a call takes and gives. A test may change any number or argument between
 * test_build and test_run; the judge looks at what is there then. */
typedef struct test_fixture {
  test_case c; /* sizes filled in */
  test_pool pool;
  test_random random;
  test_matrix wq, wk, wv, wo;
  test_view query, key, value, output;
  float *before; /* what the output block holds before the call */
  int64_t *offsets, *query_lengths, *key_lengths, *query_starts, *key_starts;
  uint8_t *mask;
  float *bias, *slopes, *sinks;
  int64_t mask_bytes, bias_floats;
  float *query_norm, *key_norm, *rope_cos, *rope_sin;
  int64_t rope_positions;                   /* rows of the tables */
  int64_t *query_positions, *key_positions; /* as given, or NULL */
  float *weights, *average, *lse;           /* results, dense */
  int64_t weights_n, average_n, lse_n;

  mha_config config;
  mha_matrices matrices;
  mha_rules rules;
  mha_results results;
  mha_forward_args args;
  mha_tensor q, k, v; /* for mha_attend */
  mha_attend_args attend_args;
  mha_context_options options;
  test_allocator allocator;
} test_fixture;

/* Fills numbers, lengths and arguments from the seed. */
void test_build(test_fixture *fixture, const test_case *c);
/* The floats of a view in its type, and back, so that the floats are what the library reads; after
 * a change to the one or the other. Nothing where the type is float32. */
void test_store(const test_view *view);
void test_widen(const test_view *view);
void test_release(test_fixture *fixture);

/* Puts poison in every result (what `accumulate` adds to stays). */
void test_poison_results(test_fixture *fixture);
/* The call alone, with weights and context made elsewhere (weights NULL for mha_attend). */
mha_status test_call(test_fixture *fixture, mha_context *context, const mha_weights *weights,
                     mha_error *error);
/* A poisoned tensor of the fixture's batch, in its pool. */
test_view test_make_view(test_fixture *fixture, test_layout layout, int32_t type, int64_t length,
                         int64_t heads, int64_t size);
/* Whether row i of entry b is within the entry's length, or in a packed sequence. */
bool test_reads_query(const test_fixture *fixture, int64_t b, int64_t i);
bool test_reads_key(const test_fixture *fixture, int64_t b, int64_t i);
/* Creates weights and context, poisons, calls, destroys; expects MHA_OK, no leak and untouched
 * gaps. */
void test_run(test_fixture *fixture);
/* Fails unless results that were not asked for and the output's gaps are as before the call. */
void test_check_gaps(const test_fixture *fixture);

/* The fixture as it is now, as a problem for the judge. */
void test_problem(const test_fixture *fixture, oracle_problem *problem);
void test_problem_free(oracle_problem *problem);
/* The judge's view of the fixture as it is now; free with oracle_free. */
void test_ask_oracle(const test_fixture *fixture, oracle_result *result);
/* Compares every result with the judge's. */
void test_judge(const test_fixture *fixture, const oracle_result *result);
/* The same, with a judge who is asked about the fixture as it is now. */
void test_judge_now(const test_fixture *fixture);
/* Build, run, judge, release. */
void test_check(const test_case *c);

/* Dense copies of what is in the output; malloc'd. */
float *test_gather(const test_view *view);
/* The shape of the output for messages. */
test_shape test_view_shape(const test_view *view);

/* Runs with another number of threads, layout of memory or set of results must give these bits:
 * the output of `fixture` equals `expected`, a dense copy made by test_gather. */
void test_same_output(const test_fixture *fixture, const float *expected);

/* Every row i of the output for which `keep(user, b, i)` holds still has the bits of `expected`. */
typedef bool test_rows(const void *user, int64_t b, int64_t i);
void test_same_rows(const test_fixture *fixture, const float *expected, test_rows *keep,
                    const void *user);

/* The core on a few hand-written numbers, dense [B][L][heads][size]. Sizes left 0 are 1, G is H. */
typedef struct test_core {
  int64_t B, Lq, Lk, H, G, d, dv;
  const float *q, *k, *v;
  float *output;
  mha_rules rules;     /* MHA_INIT it */
  mha_results results; /* begins as {0} */
} test_core;

/* Poisons the output and calls mha_attend in a fresh context. */
mha_status test_core_try(test_core *core, mha_error *error);
/* The same; expects MHA_OK. */
void test_core_run(test_core *core);

/* Whether key j is visible to query i of entry b in head h, by the judge's final scores. */
bool test_sees(const test_fixture *fixture, const oracle_result *result, int64_t b, int64_t h,
               int64_t i, int64_t j);

/* OpenBLAS's serial flavour, which two threads must not enter: the library then uses one. */
bool test_blas_is_serial(void);

/* Runs and releases the fixture. The first output is kept in *first, which begins as NULL and is to
 * be freed; each later one must have its bits. */
void test_run_for_bits(test_fixture *f, float **first);

#endif
