/* Owns rotary positions: pair p of a head turns by position·base^(-2p/rotary) ("RoFormer", 2021).
 *
 *   (a, b) -> (a·cos - b·sin, b·cos + a·sin)                                                     */
#include "rope.h"

#include "base/arithmetic.h"
#include "engine/vector.h"

#include <math.h>
#include <string.h>

void mha_rope_frequencies(const mha_config *c, double *frequencies) {
  for (int64_t p = 0; p < c->rotary_size / 2; p++)
    frequencies[p] = pow(c->rope_base, -2.0 * (double)p / (double)c->rotary_size);
}

int64_t mha_rope_last_position(const mha_config *c) {
  return c->rope_cos ? c->rope_positions - 1 : INT64_MAX;
}

/* Pairs at a time, so that all heads share their angles. */
enum { PAIRS = 64 };

typedef struct turn {
  float cosine[PAIRS], sine[PAIRS];
} turn;

/* The turn of pairs [first, first + n): by the tables as they are, or computed in double, since a
 * float cannot hold the angle of a late position. */
static void look_up(const mha_config *c, const double *frequencies, int64_t position, int64_t first,
                    int64_t n, turn *t) {
  if (c->rope_cos) {
    const int64_t row = position * (c->rotary_size / 2) + first;
    memcpy(t->cosine, c->rope_cos + row, (size_t)n * sizeof *t->cosine);
    memcpy(t->sine, c->rope_sin + row, (size_t)n * sizeof *t->sine);
    return;
  }
  for (int64_t p = 0; p < n; p++) {
    const double angle = (double)position * frequencies[first + p];
    t->cosine[p] = (float)cos(angle);
    t->sine[p] = (float)sin(angle);
  }
}

static void turn_row(const mha_config *c, const double *frequencies, int64_t position,
                     int64_t heads, bool back, float *row) {
  const int64_t pairs = c->rope == MHA_ROPE_NONE ? 0 : c->rotary_size / 2;
  const bool halves = c->rope == MHA_ROPE_HALVES;
  turn t;
  for (int64_t first = 0; first < pairs; first += PAIRS) {
    const int64_t n = mha_min(PAIRS, pairs - first);
    look_up(c, frequencies, position, first, n, &t);
    for (int64_t p = 0; back && p < n; p++)
      t.sine[p] = -t.sine[p];
    for (int64_t h = 0; h < heads; h++) {
      float *head = row + h * c->head_size;
      if (halves)
        mha_vector_turn_halves(head + first, head + pairs + first, t.cosine, t.sine, n);
      else
        mha_vector_turn_neighbours(head + 2 * first, t.cosine, t.sine, n);
    }
  }
}

void mha_rope_row(const mha_config *c, const double *frequencies, int64_t position, int64_t heads,
                  float *row) {
  turn_row(c, frequencies, position, heads, false, row);
}

void mha_rope_row_back(const mha_config *c, const double *frequencies, int64_t position,
                       int64_t heads, float *gradient) {
  turn_row(c, frequencies, position, heads, true, gradient);
}
