/* Owns the traffic. A sequence begins when the pages that its whole life may need are free, so that
 * no call runs out of them. */
#include "traffic.h"

#include <math.h>
#include <string.h>

/* splitmix64 of a number that is each draw's own: draws do not depend on each other. */
static double draw(const traffic_options *o, int64_t request, uint64_t what) {
  uint64_t x = o->seed * 0x9E3779B97F4A7C15U + (uint64_t)request * 4 + what;
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

static int64_t draw_length(const traffic_options *o, traffic_range range, int64_t request,
                           uint64_t what) {
  const double low = log((double)range.low);
  const double high = log((double)range.high + 1.0);
  const int64_t length = (int64_t)exp(low + (high - low) * draw(o, request, what));
  return length < range.low ? range.low : length > range.high ? range.high : length;
}

int64_t traffic_longest(const traffic_options *o) {
  return o->prefix + o->prompt.high + o->generated.high;
}

/* Pages beside those of the prefix, whose last one it gets a copy of if it is partly filled. */
static int64_t pages_of(const traffic_options *o, int64_t length, bool has_prefix) {
  const int64_t shared = has_prefix ? o->prefix / o->page_tokens : 0;
  return (length + o->page_tokens - 1) / o->page_tokens - shared;
}

int64_t traffic_least_pages(const traffic_options *o) {
  return pages_of(o, o->prefix, false) + pages_of(o, traffic_longest(o), true);
}

void traffic_begin(traffic *t, const traffic_options *options) {
  memset(t, 0, sizeof *t);
  t->options = options;
  t->pages_free = options->n_pages - pages_of(options, options->prefix, false);
  for (int64_t s = 0; s < options->sequences; s++)
    t->sequences[s].request = -1;
}

/* The next request takes an empty place, if it may. */
static void arrive(traffic *t, traffic_sequence *s) {
  const traffic_options *o = t->options;
  const int64_t request = t->next_request;
  traffic_sequence next = {.request = request, .begins = true};
  next.has_prefix = o->prefix > 0 && draw(o, request, 0) < o->prefix_share;
  next.length = next.has_prefix ? o->prefix : 0;
  next.prompt_left = draw_length(o, o->prompt, request, 1);
  next.generated_left = draw_length(o, o->generated, request, 2);
  next.pages = pages_of(o, next.length + next.prompt_left + next.generated_left, next.has_prefix);
  if (next.pages > t->pages_free) {
    t->waits++;
    return;
  }
  t->pages_free -= next.pages;
  t->next_request++;
  *s = next;
}

/* What became of the last step. */
static void advance(traffic *t, traffic_sequence *s) {
  s->begins = false;
  s->length += s->rows;
  if (s->prompt_left > 0)
    s->prompt_left -= s->rows;
  else
    s->generated_left -= s->rows;
  if (s->ends) {
    t->pages_free += s->pages;
    t->finished++;
    s->request = -1;
  }
}

/* Rows of the prompt, whose last one gives the first token; then one row for each further one. */
static void plan(traffic *t, traffic_sequence *s) {
  const int64_t chunk = t->options->chunk;
  s->rows = s->prompt_left == 0 ? 1 : s->prompt_left < chunk ? s->prompt_left : chunk;
  s->ends = s->prompt_left == 0 ? s->generated_left == 1 : false;
  t->rows += s->rows;
  t->tokens += s->prompt_left == 0;
}

bool traffic_step(traffic *t) {
  bool waiting = false;
  t->rows = t->tokens = 0;
  for (int64_t i = 0; i < t->options->sequences; i++) {
    traffic_sequence *s = &t->sequences[i];
    if (s->request >= 0)
      advance(t, s);
    if (s->request < 0 && t->next_request < t->options->requests && !waiting) {
      arrive(t, s);
      waiting = s->request < 0;
    }
    if (s->request >= 0)
      plan(t, s);
  }
  return t->rows > 0;
}
