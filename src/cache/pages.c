/* Owns the pool of pages: who has which, which are free, and the way back from what a call has
 * taken. */
#include "pages.h"

mha_pages_layout mha_pages_plan(mha_layout *layout, int64_t entries, int64_t slots, int64_t n) {
  mha_pages_layout at;
  at.lists = mha_layout_add(layout, sizeof(int32_t), entries, slots, 1);
  at.users = mha_layout_add(layout, sizeof(int32_t), n, 1, 1);
  at.stack = mha_layout_add(layout, sizeof(int32_t), n, 1, 1);
  at.changes = mha_layout_add(layout, sizeof(mha_page_change), n, 1, 1);
  return at;
}

void mha_pages_start(mha_pages *pages, char *base, const mha_pages_layout *at, int64_t entries,
                     int64_t slots, int64_t n) {
  const mha_pages started = {.n = n,
                             .slots = slots,
                             .lists = (void *)(base + at->lists),
                             .users = (void *)(base + at->users),
                             .stack = (void *)(base + at->stack),
                             .n_free = n,
                             .changes = (void *)(base + at->changes)};
  *pages = started;
  for (int64_t k = 0; k < entries * slots; k++)
    pages->lists[k] = MHA_NO_PAGE;
  for (int64_t page = 0; page < n; page++) {
    pages->users[page] = 0;
    pages->stack[n - 1 - page] = (int32_t)page;
  }
}

static int64_t place_of(const mha_pages *pages, int64_t entry, int64_t slot) {
  return entry * pages->slots + slot;
}

int32_t mha_pages_at(const mha_pages *pages, int64_t entry, int64_t slot) {
  return pages->lists[place_of(pages, entry, slot)];
}

bool mha_pages_is_own(const mha_pages *pages, int64_t entry, int64_t slot) {
  const int32_t page = mha_pages_at(pages, entry, slot);
  return page != MHA_NO_PAGE && pages->users[page] == 1;
}

/* ---- taking ---- */

int32_t mha_pages_take(mha_pages *pages, int64_t entry, int64_t slot) {
  const int64_t place = place_of(pages, entry, slot);
  const int32_t before = pages->lists[place];
  const int32_t taken = pages->stack[--pages->n_free];
  pages->changes[pages->n_changes++] = (mha_page_change){place, before};
  pages->lists[place] = taken;
  pages->users[taken] = 1;
  return before;
}

static void give_back(mha_pages *pages, int32_t page) {
  if (--pages->users[page] == 0)
    pages->stack[pages->n_free++] = page;
}

/* All entries that shared a page may have left it in one call. */
void mha_pages_keep(mha_pages *pages) {
  for (int64_t k = 0; k < pages->n_changes; k++)
    if (pages->changes[k].before != MHA_NO_PAGE)
      give_back(pages, pages->changes[k].before);
  pages->n_changes = 0;
}

void mha_pages_undo(mha_pages *pages) {
  while (pages->n_changes > 0) {
    const mha_page_change *change = &pages->changes[--pages->n_changes];
    give_back(pages, pages->lists[change->place]);
    pages->lists[change->place] = change->before;
  }
}

/* ---- giving back and sharing ---- */

void mha_pages_release(mha_pages *pages, int64_t entry, int64_t slot) {
  for (int64_t k = slot; k < pages->slots; k++) {
    int32_t *page = &pages->lists[place_of(pages, entry, k)];
    if (*page != MHA_NO_PAGE)
      give_back(pages, *page);
    *page = MHA_NO_PAGE;
  }
}

void mha_pages_share(mha_pages *pages, int64_t from, int64_t to) {
  for (int64_t k = 0; k < pages->slots; k++) {
    const int32_t page = mha_pages_at(pages, from, k);
    pages->lists[place_of(pages, to, k)] = page;
    if (page != MHA_NO_PAGE)
      pages->users[page]++;
  }
}

int64_t mha_pages_own(const mha_pages *pages, int64_t entry) {
  int64_t own = 0;
  for (int64_t k = 0; k < pages->slots; k++)
    own += mha_pages_is_own(pages, entry, k);
  return own;
}
