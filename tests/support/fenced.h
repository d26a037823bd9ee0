/* Mappings between two inaccessible pages, for arrays that must end, or begin, exactly at one.
 *
 * A sweep builds thousands of cases out of arrays of the same few sizes, and to map and touch new
 * pages costs far more than what is tested. So a released mapping is kept for the next array of its
 * size, full of poison; one that was written while nobody had it ends the program. Every 31st
 * release unmaps, so that an access after a release is a fault before a sweep is over; 31 is prime,
 * so that it is not the same array of each case that goes. */
#ifndef MHA_TESTS_FENCED_H
#define MHA_TESTS_FENCED_H

#include <stdbool.h>
#include <stddef.h>

/* A mapping, with the fences that its first and its last page are. */
typedef struct test_fenced {
  char *map;
  size_t map_bytes;
} test_fenced;

size_t test_page_bytes(void);

/* At least `bytes` bytes and at least one page, full of poison, between two fences; .map is NULL if
 * there is no memory. Up to 64 pages there is not one page more than it takes, and beyond never
 * more than an eighth. Any thread. */
test_fenced test_fenced_take(size_t bytes);
char *test_fenced_begin(test_fenced fenced); /* behind the first fence */
char *test_fenced_end(test_fenced fenced);   /* the last fence */
/* Everything between the two fences must be accessible. */
void test_fenced_release(test_fenced fenced);
/* For a mapping whose pages are no longer all accessible. */
void test_fenced_unmap(test_fenced fenced);

/* True while [begin, end) holds nothing but poison; `begin` is a multiple of 4. */
bool test_all_poison(const char *begin, const char *end);

#endif
