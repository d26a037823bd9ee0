/* Owns the arithmetic of rows that are spread by positions. */
#include "blocks.h"

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/error.h"
#include "team.h"

/* i·length/n without leaving int64_t. */
static int64_t part(int64_t i, int64_t length, int64_t n) {
  return length / n * i + length % n * i / n;
}

/* Block i of 2p. */
static mha_mpi_range balanced(int64_t i, int32_t p, int64_t all) {
  const int64_t n = INT64_C(2) * p;
  const int64_t begin = part(i, all, n);
  const mha_mpi_range range = {begin, part(i + 1, all, n) - begin};
  return range;
}

mha_mpi_blocks mha_mpi_blocks_of(int32_t order, int32_t p, int32_t r, const int64_t *lengths) {
  mha_mpi_blocks b = {.rows = lengths[INT64_C(2) * r]};
  int64_t before = 0;
  for (int32_t u = 0; u < p; u++) {
    before += u < r ? lengths[INT64_C(2) * u] : 0;
    b.all += lengths[INT64_C(2) * u];
  }
  if (order == MHA_MPI_BLOCKS) {
    b.at[0] = (mha_mpi_block){before, b.rows, 0};
    b.at[1] = (mha_mpi_block){before + b.rows, 0, b.rows};
    return b;
  }
  const mha_mpi_range early = balanced(r, p, b.all);
  const mha_mpi_range late = balanced(INT64_C(2) * p - 1 - r, p, b.all);
  b.at[0] = (mha_mpi_block){early.begin, early.length, 0};
  b.at[1] = (mha_mpi_block){late.begin, late.length, early.length};
  return b;
}

mha_status mha_mpi_blocks_check(int32_t order, int32_t p, const int64_t *lengths, const char *name,
                                mha_error *error) {
  for (int32_t r = 0; r < p; r++) {
    const mha_mpi_blocks b = mha_mpi_blocks_of(order, p, r, lengths);
    const int64_t wanted = b.at[0].length + b.at[1].length;
    if (b.rows != wanted)
      return mha_fail(error, MHA_ERROR_LENGTH,
                      "%s is %lld in the process at position %d; rule: %lld of %lld under "
                      "MHA_MPI_BALANCED",
                      name, (long long)b.rows, (int)r, (long long)wanted, (long long)b.all);
  }
  return MHA_OK;
}

int64_t mha_mpi_blocks_within(const mha_mpi_blocks *blocks, int64_t length) {
  int64_t n = 0;
  for (int i = 0; i < MHA_MPI_BLOCKS_OF_ONE; i++)
    n += mha_max(0, mha_min(length - blocks->at[i].begin, blocks->at[i].length));
  return n;
}

mha_status mha_mpi_rows(const mha_mpi_team *team, int64_t length, int32_t order,
                        mha_mpi_range ranges[2], mha_error *error) {
  mha_status status = mha_require(team, "team", error);
  if (!status)
    status = mha_require(ranges, "ranges", error);
  if (!status)
    status = mha_require_at_least(length, 0, "length", error);
  if (!status && order != MHA_MPI_BLOCKS && order != MHA_MPI_BALANCED)
    status =
        mha_fail(error, MHA_ERROR_VALUE, "order is %d; rule: a value of mha_mpi_order", (int)order);
  if (status)
    return status;
  const int32_t p = team->place.by_positions;
  const int32_t r = team->place.position;
  if (order == MHA_MPI_BALANCED) {
    ranges[0] = balanced(r, p, length);
    ranges[1] = balanced(INT64_C(2) * p - 1 - r, p, length);
    return mha_succeed(error);
  }
  const int64_t begin = part(r, length, p);
  const int64_t end = part(r + INT64_C(1), length, p);
  ranges[0] = (mha_mpi_range){begin, end - begin};
  ranges[1] = (mha_mpi_range){end, 0};
  return mha_succeed(error);
}
