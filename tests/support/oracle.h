/* The judge: multi-head attention as plain loops in double precision, written from the formulas of
 * the contract alone. It shares no code, no types and no tricks with the library. */
#ifndef MHA_TESTS_ORACLE_H
#define MHA_TESTS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct oracle_matrix {
  const double *numbers; /* [in][out], or [out][in] if out_in; NULL = identity */
  const double *bias;    /* [out], or NULL */
  bool out_in;
  int64_t ld; /* distance between the rows of `numbers` */
} oracle_matrix;

typedef enum oracle_alignment {
  ORACLE_TOP_LEFT,
  ORACLE_BOTTOM_RIGHT,
  ORACLE_OFFSET
} oracle_alignment;

typedef enum oracle_norm { ORACLE_NORM_NONE, ORACLE_NORM_PER_HEAD, ORACLE_NORM_FULL } oracle_norm;

typedef enum oracle_rope {
  ORACLE_ROPE_NONE,
  ORACLE_ROPE_HALVES,
  ORACLE_ROPE_INTERLEAVED
} oracle_rope;

/* One problem. Arrays are dense, in the order of the letters. Packed input (query_starts given) has
 * [Lq] query rows and [Lk] key rows in all, shared by B sequences. */
typedef struct oracle_problem {
  int64_t B, Lq, Lk, H, G, d, dv, Eq, Ek, Ev, Eo;
  oracle_matrix wq, wk, wv, wo;
  const double *query;    /* [B][Lq][Eq] */
  const double *key;      /* [B][Lk][Ek] */
  const double *value;    /* [B][Lk][Ev] */
  const double *residual; /* [B][Lq][Eo] that the result is added to, or NULL */

  oracle_norm norm;
  double epsilon;
  const double *query_norm; /* [d] or [H·d]; NULL = ones */
  const double *key_norm;   /* [d] or [G·d] */
  oracle_rope rope;
  int64_t rotary; /* elements of a head that turn */
  double rope_base;
  const double *cosines, *sines;  /* [positions][rotary/2], or NULL = by rope_base */
  const int64_t *query_positions; /* [B][Lq], or [Lq] if packed; with rope */
  const int64_t *key_positions;   /* [B][Lk], or [Lk] if packed */

  bool scale_given;
  double scale;
  double softcap; /* 0 = none */
  bool causal, windowed;
  int64_t window_left, window_right; /* -1 = open */
  oracle_alignment alignment;
  const int64_t *offsets;       /* [B] under ORACLE_OFFSET */
  const int64_t *query_lengths; /* [B] or NULL */
  const int64_t *key_lengths;   /* [B] or NULL */
  const int64_t *query_starts;  /* [B+1] or NULL */
  const int64_t *key_starts;    /* [B+1], given with query_starts */
  const unsigned char *attend;  /* [B][H][Lq][Lk] or NULL */
  const double *bias;           /* [B][H][Lq][Lk] or NULL */
  const double *slopes;         /* [H] or NULL */
  const double *sinks;          /* [H] or NULL */
  const double *kept; /* [B][H][Lq][Lk] what each weight is multiplied by after the softmax, or NULL
                       */
} oracle_problem;

/* A value and the greatest distance from it that the contract allows, element by element. */
typedef struct oracle_numbers {
  double *value;
  double *bound;
  int64_t n;
} oracle_numbers;

typedef struct oracle_result {
  oracle_numbers q, k, v;  /* [B][Lq][H·d], [B][Lk][G·d], [B][Lk][G·dv], normalised and turned;
                              rows beyond a length 0 */
  oracle_numbers stage[4]; /* [B][H][Lq][Lk]: scaled, capped, final, weights; n = 0 if packed */
  oracle_numbers average;  /* [B][Lq][Lk]; n = 0 if packed */
  oracle_numbers lse;      /* [B][H][Lq], or [H][Lq] if packed */
  oracle_numbers concat;   /* [B][Lq][H·dv] */
  oracle_numbers output;   /* [B][Lq][Eo] */
} oracle_result;

void oracle_solve(const oracle_problem *problem, oracle_result *result);
void oracle_free(oracle_result *result);

/* y = x·W + b of `rows` rows, with the bound of any float32 order of summation. */
void oracle_project(const oracle_matrix *matrix, const double *x, int64_t rows, int64_t in,
                    int64_t out, oracle_numbers y);

/* x / sqrt(mean(x²) + eps)·weight over n numbers, in place; weight NULL = ones. */
void oracle_normalise(double *x, double *bound, int64_t n, const double *weight, double epsilon);

/* Elements first and second of a head are (a, b) and become (a·cosine − b·sine,
 * b·cosine + a·sine). */
typedef struct oracle_pair {
  int64_t first, second;
  double cosine, sine;
} oracle_pair;

oracle_pair oracle_rotation(const oracle_problem *problem, int64_t position, int64_t pair);

/* Turns one head [d] to a position, in place. */
void oracle_turn(const oracle_problem *problem, int64_t position, double *x, double *bound);

/* One row of scores: query i of sequence b in head h. i, like the keys' numbers, counts from the
 * sequence's start. */
typedef struct oracle_row {
  int64_t b, h, i;
  int64_t query;                          /* its row among all of q and concat, [B·Lq] or [Lq] */
  int64_t first_key, n_keys;              /* rows [first_key, first_key + n_keys) of k and v */
  int64_t off;                            /* of the alignment */
  const double *capped, *final, *weights; /* [n_keys]; final −inf = hidden */
  double lse;                             /* of the final scores, the sink left out */
  const double *kept;                     /* [n_keys] or NULL */
} oracle_row;

typedef void oracle_visitor(void *user, const oracle_row *row);

/* Visits every query within its length, in every head, with the q and k of oracle_solve. */
void oracle_each_row(const oracle_problem *problem, const oracle_result *result,
                     oracle_visitor *visit, void *user);

#endif
