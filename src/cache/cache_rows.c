/* Owns the arithmetic of a cache's rows: which entry, which tokens, which rows. Knows neither the
 * numbers nor their owner. */
#include "cache_rows.h"

#include "base/memory.h"

int64_t mha_cache_rows_entry(const mha_cache_rows *cached, int64_t b) {
  return cached->entries ? cached->entries[b] : b;
}

/* ---- tokens ---- */

int64_t mha_cache_rows_new(const mha_cache_rows *cached, int64_t b) {
  if (!cached->append)
    return 0;
  if (cached->starts)
    return cached->starts[b + 1] - cached->starts[b];
  return cached->new_lengths ? cached->new_lengths[b] : cached->new_rows;
}

int64_t mha_cache_rows_before(const mha_cache_rows *cached, int64_t b) {
  return cached->lengths[mha_cache_rows_entry(cached, b)];
}

int64_t mha_cache_rows_after(const mha_cache_rows *cached, int64_t b) {
  return mha_cache_rows_before(cached, b) + mha_cache_rows_new(cached, b);
}

int64_t mha_cache_rows_first(const mha_cache_rows *cached, int64_t b) {
  const int64_t entry = mha_cache_rows_entry(cached, b);
  const int64_t highest = mha_max(cached->highest[entry], mha_cache_rows_after(cached, b));
  return mha_max(cached->dropped[entry], cached->ring ? highest - cached->capacity : 0);
}

bool mha_cache_rows_find(const mha_cache_rows *cached, int64_t B, int64_t row, int64_t *b,
                         int64_t *i) {
  if (!cached->starts) {
    *b = row / cached->new_rows;
    *i = row % cached->new_rows;
    return *i < mha_cache_rows_new(cached, *b);
  }
  int64_t low = 0; /* the last that does not begin behind the row */
  int64_t high = B;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (cached->starts[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  *b = low;
  *i = row - cached->starts[low];
  return B > 0 && row < cached->starts[B];
}

/* ---- rows ---- */

/* Row of token t within its entry. */
static int64_t entry_row(const mha_cache_rows *cached, int64_t t) {
  return cached->ring ? t % cached->capacity : t;
}

int64_t mha_cache_rows_at(const mha_cache_rows *cached, int64_t b, int64_t t) {
  const int64_t entry = mha_cache_rows_entry(cached, b);
  const int64_t row = entry_row(cached, t);
  if (!cached->pages)
    return entry * cached->page_rows + row;
  const int64_t page = cached->pages[entry * cached->slots + (row >> cached->page_shift)];
  return (page << cached->page_shift) + (row & (cached->page_rows - 1));
}

int64_t mha_cache_rows_place(const mha_cache_rows *cached, int64_t b, int64_t i) {
  return mha_cache_rows_at(cached, b, mha_cache_rows_before(cached, b) + i);
}

int64_t mha_cache_rows_slot(const mha_cache_rows *cached, int64_t t) {
  return entry_row(cached, t) / cached->page_rows;
}

int64_t mha_cache_rows_run(const mha_cache_rows *cached, int64_t t) {
  const int64_t row = entry_row(cached, t);
  const int64_t left = cached->capacity - row;
  return cached->pages ? mha_min(left, cached->page_rows - (row & (cached->page_rows - 1))) : left;
}
