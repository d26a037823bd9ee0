/* The row kernels of stored_rows.h, written once over `lanes`, 16 floats that an instruction set
 * holds in its own way. Whoever includes this has defined LANES_CODE, the attribute of each
 * function (or nothing), LANES_NAME, the functions lanes_... that are used here, and how much its
 * registers hold: LANES_CHAINS sums of one long row, tiles of LANES_W stored rows and LANES_X rows
 * of X, and LANES_SUMMED rows that are added to LANES_X.
 *
 * All types are read in steps of 32 numbers, two lanes; those of types with blocks are multiplied
 * with the block's scale, which is exact.
 *
 * A single row is limited by memory, so what comes next is fetched ahead, and a long stored row is
 * multiplied alone, in sums that do not wait for each other. Several rows are limited by what is
 * read of X, so stored rows go side by side. */
#include "base/element.h"
#include "halves.h"
#include "stored_rows.h"

#define INLINE static inline __attribute__((always_inline)) LANES_CODE

#define LANES INT64_C(16)
#define STEP  INT64_C(32)
_Static_assert(STEP == MHA_BLOCK, "a step is a block");
enum { FETCHED_AHEAD_BYTES = 6144 };

typedef struct step {
  lanes low, high;
} step;

INLINE int64_t step_bytes(int32_t element) {
  return element == MHA_Q8_0 ? 34 : element == MHA_Q4_0 ? 18 : 2 * STEP;
}

INLINE int has_blocks(int32_t element) {
  return element == MHA_Q8_0 || element == MHA_Q4_0;
}

INLINE void read_step(int32_t element, const unsigned char *at, step *s) {
  if (element == MHA_F16) {
    s->low = lanes_from_half(at);
    s->high = lanes_from_half(at + 2 * LANES);
  } else if (element == MHA_BF16) {
    s->low = lanes_from_bfloat16(at);
    s->high = lanes_from_bfloat16(at + 2 * LANES);
  } else if (element == MHA_Q8_0) {
    s->low = lanes_from_bytes(at + MHA_BLOCK_SCALE_BYTES);
    s->high = lanes_from_bytes(at + MHA_BLOCK_SCALE_BYTES + LANES);
  } else {
    lanes_from_nibbles(at + MHA_BLOCK_SCALE_BYTES, &s->low, &s->high);
  }
  if (has_blocks(element)) {
    const lanes scale = lanes_scale(at);
    s->low = lanes_multiply(scale, s->low);
    s->high = lanes_multiply(scale, s->high);
  }
}

/* One number of a type without blocks. */
INLINE float read_one(int32_t element, const unsigned char *at) {
  const uint16_t bits = mha_half_at(at);
  return element == MHA_F16 ? mha_float_of_half(bits) : mha_float_of_bfloat16(bits);
}

/* ---- widening ---- */

INLINE void widen_as(int32_t element, float *y, const unsigned char *x, int64_t n) {
  int64_t j = 0;
  for (; j + STEP <= n; j += STEP, x += step_bytes(element)) {
    step s;
    read_step(element, x, &s);
    lanes_store(y + j, s.low);
    lanes_store(y + j + LANES, s.high);
  }
  for (; !has_blocks(element) && j < n; j++, x += 2)
    y[j] = read_one(element, x);
}

LANES_CODE static void widen(float *y, const unsigned char *x, int32_t element, int64_t n) {
  if (element == MHA_F16)
    widen_as(MHA_F16, y, x, n);
  else if (element == MHA_BF16)
    widen_as(MHA_BF16, y, x, n);
  else if (element == MHA_Q8_0)
    widen_as(MHA_Q8_0, y, x, n);
  else
    widen_as(MHA_Q4_0, y, x, n);
}

/* ---- a stored row is a column of W ---- */

/* sum += x·w for one step. */
INLINE lanes add_step(lanes sum, const float *x, const step *s) {
  return lanes_multiply_add(lanes_load(x + LANES), s->high,
                            lanes_multiply_add(lanes_load(x), s->low, sum));
}

/* The columns behind the last whole step: sum + Σ x·w. */
INLINE float add_rest(int32_t element, float sum, const float *x, const unsigned char *w,
                      int64_t n) {
  for (int64_t c = 0; !has_blocks(element) && c < n; c++)
    sum += x[c] * read_one(element, w + 2 * c);
  return sum;
}

/* Stored row j, a long one, times the one row of X. */
INLINE void dot_long(int32_t element, const mha_rows_product *p, int64_t j) {
  const unsigned char *w = p->w + j * p->w_row_bytes;
  const int64_t chained = p->columns / (STEP * LANES_CHAINS) * (STEP * LANES_CHAINS);
  const int64_t whole = p->columns / STEP * STEP;
  lanes sums[LANES_CHAINS];
  step s;
  for (int k = 0; k < LANES_CHAINS; k++)
    sums[k] = lanes_zero();
  for (int64_t c = 0; c < chained; c += STEP * LANES_CHAINS)
    for (int k = 0; k < LANES_CHAINS; k++, w += step_bytes(element)) {
      __builtin_prefetch(w + FETCHED_AHEAD_BYTES, 0, 2);
      read_step(element, w, &s);
      sums[k] = add_step(sums[k], p->x + c + k * STEP, &s);
    }
  for (int64_t c = chained; c < whole; c += STEP, w += step_bytes(element)) {
    read_step(element, w, &s);
    sums[0] = add_step(sums[0], p->x + c, &s);
  }
  for (int k = 1; k < LANES_CHAINS; k++)
    sums[0] = lanes_add(sums[0], sums[k]);
  p->y[j] += p->alpha * add_rest(element, lanes_sum(sums[0]), p->x + whole, w, p->columns - whole);
}

/* Stored rows [j, j + nw) times rows [r, r + nx) of X. */
INLINE void dots_tile(int32_t element, int nw, int nx, const mha_rows_product *p, int64_t j,
                      int64_t r) {
  const unsigned char *w = p->w + j * p->w_row_bytes;
  const float *x = p->x + r * p->x_stride;
  const int64_t whole = p->columns / STEP * STEP;
  lanes sums[LANES_X][LANES_W];
  for (int a = 0; a < nx; a++)
    for (int b = 0; b < nw; b++)
      sums[a][b] = lanes_zero();
  for (int64_t c = 0; c < whole; c += STEP)
    for (int b = 0; b < nw; b++) {
      step s;
      const unsigned char *at = w + b * p->w_row_bytes + c / STEP * step_bytes(element);
      __builtin_prefetch(at + nw * p->w_row_bytes, 0, 2); /* of the next rows */
      read_step(element, at, &s);
      for (int a = 0; a < nx; a++)
        sums[a][b] = add_step(sums[a][b], x + a * p->x_stride + c, &s);
    }
  for (int a = 0; a < nx; a++)
    for (int b = 0; b < nw; b++)
      p->y[(r + a) * p->y_stride + j + b] +=
          p->alpha * add_rest(element, lanes_sum(sums[a][b]), x + a * p->x_stride + whole,
                              w + b * p->w_row_bytes + 2 * whole, p->columns - whole);
}

INLINE void dots_rows(int32_t element, int nw, const mha_rows_product *p, int64_t j) {
  int64_t r = 0;
  for (; r + LANES_X <= p->x_rows; r += LANES_X)
    dots_tile(element, nw, LANES_X, p, j, r);
  for (; LANES_X > 2 && r + 2 <= p->x_rows; r += 2)
    dots_tile(element, nw, LANES_X > 2 ? 2 : 1, p, j, r); /* never 2 in an array of 1 */
  for (; r < p->x_rows; r++)
    dots_tile(element, nw, 1, p, j, r);
}

INLINE void dots_as(int32_t element, const mha_rows_product *p) {
  int64_t j = 0;
  for (; p->x_rows == 1 && p->columns >= MHA_LONG_ROW && j < p->rows; j++)
    dot_long(element, p, j);
  for (; j + LANES_W <= p->rows; j += LANES_W)
    dots_rows(element, LANES_W, p, j);
  for (; j < p->rows; j++)
    dots_rows(element, 1, p, j);
}

LANES_CODE static void dots(const mha_rows_product *p) {
  if (p->element == MHA_F16)
    dots_as(MHA_F16, p);
  else if (p->element == MHA_BF16)
    dots_as(MHA_BF16, p);
  else if (p->element == MHA_Q8_0)
    dots_as(MHA_Q8_0, p);
  else
    dots_as(MHA_Q4_0, p);
}

/* ---- a stored row is a row of W ---- */

/* Adds stored rows [j, j + nw) to one step of rows [r, r + nx) of Y, from column c on. */
INLINE void sums_step(int32_t element, int nw, int nx, const mha_rows_product *p, int64_t j,
                      int64_t r, int64_t c) {
  const unsigned char *w = p->w + j * p->w_row_bytes + c / STEP * step_bytes(element);
  lanes low[LANES_X];
  lanes high[LANES_X];
  for (int a = 0; a < nx; a++) {
    low[a] = lanes_load(p->y + (r + a) * p->y_stride + c);
    high[a] = lanes_load(p->y + (r + a) * p->y_stride + c + LANES);
  }
  for (int b = 0; b < nw; b++) {
    step s;
    __builtin_prefetch(w + (b + LANES_SUMMED) * p->w_row_bytes); /* of the next rows */
    read_step(element, w + b * p->w_row_bytes, &s);
    for (int a = 0; a < nx; a++) {
      const lanes factor = lanes_broadcast(p->alpha * p->x[(r + a) * p->x_stride + j + b]);
      low[a] = lanes_multiply_add(factor, s.low, low[a]);
      high[a] = lanes_multiply_add(factor, s.high, high[a]);
    }
  }
  for (int a = 0; a < nx; a++) {
    lanes_store(p->y + (r + a) * p->y_stride + c, low[a]);
    lanes_store(p->y + (r + a) * p->y_stride + c + LANES, high[a]);
  }
}

/* The columns behind the last whole step. */
INLINE void sums_rest(int32_t element, int nw, const mha_rows_product *p, int64_t j, int64_t r,
                      int64_t c) {
  for (; !has_blocks(element) && c < p->columns; c++)
    for (int b = 0; b < nw; b++)
      p->y[r * p->y_stride + c] += p->alpha * p->x[r * p->x_stride + j + b] *
                                   read_one(element, p->w + (j + b) * p->w_row_bytes + 2 * c);
}

INLINE void sums_rows(int32_t element, int nw, const mha_rows_product *p, int64_t j) {
  int64_t c = 0;
  for (; c + STEP <= p->columns; c += STEP) {
    int64_t r = 0;
    for (; r + LANES_X <= p->x_rows; r += LANES_X)
      sums_step(element, nw, LANES_X, p, j, r, c);
    for (; r < p->x_rows; r++)
      sums_step(element, nw, 1, p, j, r, c);
  }
  for (int64_t r = 0; r < p->x_rows; r++)
    sums_rest(element, nw, p, j, r, c);
}

INLINE void sums_as(int32_t element, const mha_rows_product *p) {
  int64_t j = 0;
  for (; j + LANES_SUMMED <= p->rows; j += LANES_SUMMED)
    sums_rows(element, LANES_SUMMED, p, j);
  for (; j < p->rows; j++)
    sums_rows(element, 1, p, j);
}

LANES_CODE static void sums(const mha_rows_product *p) {
  if (p->element == MHA_F16)
    sums_as(MHA_F16, p);
  else if (p->element == MHA_BF16)
    sums_as(MHA_BF16, p);
  else if (p->element == MHA_Q8_0)
    sums_as(MHA_Q8_0, p);
  else
    sums_as(MHA_Q4_0, p);
}

static const mha_row_kernels kernels = {LANES_NAME, widen, dots, sums};
