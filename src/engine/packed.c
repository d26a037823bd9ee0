/* Owns packed matrices: how they lie, and in which order their blocks are multiplied. A block of
 * columns stays in a second-level cache while all rows pass it. */
#include "packed.h"

#include "base/arithmetic.h"

#include <string.h>

/* Rows of W per product: all of them up to LONGEST, otherwise pieces, so that the rows of X and the
 * block of W that meet fit the caches. */
#ifndef MHA_PACKED_LONGEST
#define MHA_PACKED_LONGEST 1024
#endif
#ifndef MHA_PACKED_PIECE
#define MHA_PACKED_PIECE 128
#endif

static int64_t piece_of(int64_t in) {
  return in <= MHA_PACKED_LONGEST ? in : MHA_PACKED_PIECE;
}

bool mha_packed_floats(int64_t in, int64_t out, int64_t *floats) {
  int64_t blocks = 0;
  return mha_add(out, MHA_PACKED_COLUMNS - 1, &blocks) &&
         mha_multiply(blocks / MHA_PACKED_COLUMNS * MHA_PACKED_COLUMNS, in, floats);
}

/* Rows of W that are looked at together, so that a tile of them fits the stack as float32. */
enum { TILE_ROWS = 64 };

/* Packs a tile of W: at most TILE_ROWS rows and a block of columns. */
static void fill_tile(float *packed, const mha_stored *tile) {
  float scratch[TILE_ROWS * MHA_PACKED_COLUMNS];
  const mha_view w = mha_numbers_fetch(tile, scratch);
  for (int64_t r = 0; r < w.rows; r++, packed += MHA_PACKED_COLUMNS) {
    for (int64_t c = 0; c < w.columns; c++)
      packed[c] = w.data[r * w.row_stride + c * w.column_stride];
    memset(packed + w.columns, 0, (size_t)(MHA_PACKED_COLUMNS - w.columns) * sizeof *packed);
  }
}

void mha_packed_fill(float *packed, const mha_stored *w) {
  for (int64_t first = 0; first < w->columns; first += MHA_PACKED_COLUMNS) {
    const int64_t columns = mha_min(w->columns - first, MHA_PACKED_COLUMNS);
    const mha_stored block = mha_stored_columns(*w, first, columns);
    for (int64_t r = 0; r < w->rows; r += TILE_ROWS) {
      const mha_stored tile = mha_stored_row_block(block, r, mha_min(w->rows - r, TILE_ROWS));
      fill_tile(packed + (first * w->rows + r * MHA_PACKED_COLUMNS), &tile);
    }
  }
}

/* The shape for whole or remaining columns and rows; false if none remain. */
static bool find_shape(int64_t in, int64_t out, bool columns_remain, bool rows_remain,
                       mha_kernel_shape *shape) {
  const int64_t columns = columns_remain             ? out % MHA_PACKED_COLUMNS
                          : out < MHA_PACKED_COLUMNS ? 0
                                                     : MHA_PACKED_COLUMNS;
  const int64_t inner = rows_remain ? in % piece_of(in) : piece_of(in);
  const mha_kernel_shape found = {columns, inner, in, MHA_PACKED_COLUMNS, out, true};
  *shape = found;
  return columns > 0 && inner > 0;
}

int mha_packed_shapes(int64_t in, int64_t out, mha_kernel_shape shapes[MHA_PACKED_SHAPES]) {
  int n = 0;
  for (int k = 0; k < MHA_PACKED_SHAPES; k++)
    if (find_shape(in, out, k / 2 == 1, k % 2 == 1, &shapes[n])) {
      if (!mha_kernel_is_possible(&shapes[n]))
        return 0;
      n++;
    }
  return n;
}

bool mha_packed_find(const mha_kernels *kernels, const float *data, int64_t in, int64_t out,
                     mha_packed *packed) {
  const mha_packed found = {.data = data, .in = in, .out = out};
  *packed = found;
  for (int k = 0; k < MHA_PACKED_SHAPES; k++) {
    mha_kernel_shape shape;
    if (!find_shape(in, out, k / 2 == 1, k % 2 == 1, &shape))
      continue;
    const mha_kernel *kernel = mha_kernels_find(kernels, &shape);
    if (!kernel)
      return false;
    packed->kernels[k / 2][k % 2] = kernel;
  }
  return true;
}

void mha_packed_multiply(const mha_packed *w, int64_t rows, const float *x, int64_t first,
                         int64_t columns, float *y) {
  const int64_t piece = piece_of(w->in);
  for (int64_t c = 0; c < columns; c += MHA_PACKED_COLUMNS) {
    const float *block = w->data + (first + c) * w->in;
    const bool columns_remain = columns - c < MHA_PACKED_COLUMNS;
    for (int64_t r = 0; r < w->in; r += piece) {
      const mha_kernel *kernel = w->kernels[columns_remain][w->in - r < piece];
      mha_kernel_run(kernel, rows, x + r, block + r * MHA_PACKED_COLUMNS, y + c);
    }
  }
}
