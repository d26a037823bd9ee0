/* What one call sees of a key/value cache: entries, lengths before and after, rows in pages or in a
 * ring. */
#ifndef MHA_SRC_CACHE_CACHE_ROWS_H
#define MHA_SRC_CACHE_CACHE_ROWS_H

#include "mha.h"

#include <stdbool.h>

typedef struct mha_cache_rows {
  const int64_t *lengths;     /* [n_entries] before the call */
  const int64_t *highest;     /* [n_entries] the longest that each ever was, since its last reset */
  const int64_t *dropped;     /* [n_entries] tokens below are gone, whatever there is room for */
  const int64_t *entries;     /* [B] entry of each batch entry, or NULL = b */
  const int64_t *new_lengths; /* [B] rows of the call that are tokens, or NULL = all */
  const int64_t *starts;      /* [B+1] packed: rows [starts[b], starts[b+1]) are b's; or NULL */
  int64_t new_rows;  /* rows of each entry that the call brings, or queries if it only attends */
  bool append;       /* lengths grow by the new rows */
  int64_t capacity;  /* tokens of an entry */
  bool ring;         /* token t is in row t mod capacity, otherwise in row t */
  int64_t window;    /* of a ring: tokens before a query that it keeps, the query's own included */
  int64_t page_rows; /* rows that follow one another in memory: of a page, or of an entry */
  const int32_t *pages; /* [n_entries][slots] the page of each slot of page_rows rows; NULL = an
                           entry's rows are page number `entry` */
  int64_t slots;
  int page_shift; /* of a page: page_rows is 2 to the power of it, which spares divisions */
} mha_cache_rows;

/* The cache's entry that batch entry b uses. */
int64_t mha_cache_rows_entry(const mha_cache_rows *cached, int64_t b);

/* Tokens that the call appends for batch entry b; that the entry has before and after. */
int64_t mha_cache_rows_new(const mha_cache_rows *cached, int64_t b);
int64_t mha_cache_rows_before(const mha_cache_rows *cached, int64_t b);
int64_t mha_cache_rows_after(const mha_cache_rows *cached, int64_t b);

/* The first token that is still there after the call. */
int64_t mha_cache_rows_first(const mha_cache_rows *cached, int64_t b);

/* The batch entry that row `row` of all B entries' rows belongs to, and its number there; false if
 * it is no token. */
bool mha_cache_rows_find(const mha_cache_rows *cached, int64_t B, int64_t row, int64_t *b,
                         int64_t *i);

/* Row of token t of batch entry b, counted over the whole memory; and of row i of the call. */
int64_t mha_cache_rows_at(const mha_cache_rows *cached, int64_t b, int64_t t);
int64_t mha_cache_rows_place(const mha_cache_rows *cached, int64_t b, int64_t i);

/* The slot that holds token t, and how many tokens from t on lie in rows that follow. */
int64_t mha_cache_rows_slot(const mha_cache_rows *cached, int64_t t);
int64_t mha_cache_rows_run(const mha_cache_rows *cached, int64_t t);

#endif
