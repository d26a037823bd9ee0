/* A pool of pages that entries have in common. A page is a number; what is in it is the cache's. */
#ifndef MHA_SRC_CACHE_PAGES_H
#define MHA_SRC_CACHE_PAGES_H

#include "base/memory.h"

/* The page that a slot had before the call at hand gave it another. */
typedef struct mha_page_change {
  int64_t place; /* in the lists */
  int32_t before;
} mha_page_change;

enum { MHA_NO_PAGE = -1 };

typedef struct mha_pages {
  int64_t n;      /* pages; 0 = the cache has none */
  int64_t slots;  /* of each entry */
  int32_t *lists; /* [n_entries][slots] a page, or MHA_NO_PAGE */
  int32_t *users; /* [n] entries that have the page */
  int32_t *stack; /* [n] the free pages, of which the last is taken first */
  int64_t n_free;
  mha_page_change *changes; /* [n] of the call at hand */
  int64_t n_changes;
} mha_pages;

/* Offsets of a pool's arrays in a block of memory, in the order of the struct. */
typedef struct mha_pages_layout {
  size_t lists, users, stack, changes;
} mha_pages_layout;

mha_pages_layout mha_pages_plan(mha_layout *layout, int64_t entries, int64_t slots, int64_t n);

/* A pool of n free pages, whose arrays lie at `base`. */
void mha_pages_start(mha_pages *pages, char *base, const mha_pages_layout *at, int64_t entries,
                     int64_t slots, int64_t n);

/* The page of an entry's slot, or MHA_NO_PAGE. */
int32_t mha_pages_at(const mha_pages *pages, int64_t entry, int64_t slot);

/* Whether the slot has a page that no other entry has. */
bool mha_pages_is_own(const mha_pages *pages, int64_t entry, int64_t slot);

/* Gives the slot a free page, of which there is one, and tells the page that it had. This can be
 * undone: until the changes are kept, the entry counts among those that have that page, so that no
 * other one takes it for its own and writes there. */
int32_t mha_pages_take(mha_pages *pages, int64_t entry, int64_t slot);

/* Ends a call that has taken pages: keeps them, or makes everything as it was, the order included
 * in which free pages are taken. */
void mha_pages_keep(mha_pages *pages);
void mha_pages_undo(mha_pages *pages);

/* Gives the pages of an entry's slots from `slot` on back. */
void mha_pages_release(mha_pages *pages, int64_t entry, int64_t slot);

/* Gives entry `to`, which has no pages, those of entry `from`. */
void mha_pages_share(mha_pages *pages, int64_t from, int64_t to);

/* Pages that the entry alone has. */
int64_t mha_pages_own(const mha_pages *pages, int64_t entry);

#endif
