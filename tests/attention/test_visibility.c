/* The predicate's key ranges against its definition, key by key. */
#include "support.h"

#include "api/rules.h"
#include "attention/tiles.h"

#include <stdlib.h>

#define ENTRIES 2
#define LQ      6
#define LK      7

static const int64_t query_lengths[ENTRIES] = {6, 4};
static const int64_t key_lengths[ENTRIES] = {3, 7};
static const int64_t offsets[ENTRIES] = {-2, 9};
static const int64_t windows[] = {-1, 0, 1, 3, INT64_MAX};
#define N_WINDOWS 5

/* One combination of rules out of `count`. */
static mha_rules combination(int index) {
  mha_rules a;
  MHA_INIT(&a);
  a.causal = index % 2;
  index /= 2;
  a.alignment = index % 4 == 3 ? MHA_ALIGN_OFFSET : index % 4;
  a.offsets = index % 4 == 3 ? offsets : NULL;
  a.offset = 2;
  index /= 4;
  if (index % 2)
    a.query_lengths = query_lengths;
  index /= 2;
  if (index % 2)
    a.key_lengths = key_lengths;
  index /= 2;
  if (index > 0) {
    a.flags = MHA_WINDOW;
    a.window_left = windows[(index - 1) % N_WINDOWS];
    a.window_right = windows[(index - 1) / N_WINDOWS];
  }
  return a;
}

#define N_COMBINATIONS (2 * 4 * 2 * 2 * (1 + N_WINDOWS * N_WINDOWS))

/* The definition: key j is visible when everything that is given holds. */
static bool sees(const mha_rules *a, int64_t b, int64_t i, int64_t j) {
  const int64_t nq = a->query_lengths ? a->query_lengths[b] : LQ;
  const int64_t nk = a->key_lengths ? a->key_lengths[b] : LK;
  int64_t off = 0;
  if (a->alignment == MHA_ALIGN_BOTTOM_RIGHT)
    off = nk - nq;
  if (a->alignment == MHA_ALIGN_OFFSET)
    off = a->offsets ? a->offsets[b] : a->offset;
  const bool window = (a->flags & MHA_WINDOW) != 0;
  const bool left = !window || a->window_left < 0 || i + off - j <= a->window_left;
  const bool right = !window || a->window_right < 0 || j - i - off <= a->window_right;
  return i < nq && j < nk && (!a->causal || j <= i + off) && left && right;
}

static mha_visibility apply(mha_visibility sizes, const mha_rules *a) {
  const mha_rules_defaults defaults = {1.0F, 0.0F, NULL};
  mha_core core = {.visibility = sizes, .G = 1, .d = 1, .dv = 1};
  mha_address_ranges ranges = {.n = 0};
  mha_asked asked;
  test_expect(mha_rules_read(&asked, a, NULL, NULL), MHA_OK, NULL);
  test_expect(mha_rules_apply(&asked, false, &defaults, &core, &ranges, NULL), MHA_OK, NULL);
  return core.visibility;
}

static mha_visibility make(const mha_rules *a) {
  const mha_visibility sizes = {.B = ENTRIES, .H = 1, .Lq = LQ, .Lk = LK};
  return apply(sizes, a);
}

static void ranges_are_the_predicate(void **state) {
  (void)state;
  for (int c = 0; c < N_COMBINATIONS; c++) {
    const mha_rules a = combination(c);
    const mha_visibility v = make(&a);
    for (int64_t b = 0; b < ENTRIES; b++)
      for (int64_t i = 0; i < LQ; i++) {
        const mha_range keys = mha_visible_keys(&v, b, i);
        test_note("combination %d, b %d, i %d", c, (int)b, (int)i);
        for (int64_t j = 0; j < LK; j++)
          assert_int_equal(j >= keys.begin && j < keys.end, sees(&a, b, i, j));
      }
  }
}

/* Every visible pair is met exactly once, and no tile that nobody sees. */
static void the_walk_meets_every_visible_pair_once(void **state) {
  (void)state;
  for (int c = 0; c < N_COMBINATIONS; c++) {
    const mha_rules a = combination(c);
    const mha_visibility v = make(&a);
    for (int64_t b = 0; b < ENTRIES; b++) {
      int met[LQ][LK] = {{0}};
      const int64_t n = mha_query_count(&v, b);
      const mha_cut_sizes sizes = {
          .B = ENTRIES, .H = 1, .G = 1, .Lq = LQ, .span = LK, .d = 1, .dv = 1};
      const mha_cut cut = mha_cut_call(&sizes);
      mha_tile_walk walk = mha_walk_visible(&v, &cut, b, 0, n);
      while (mha_walk_next(&walk)) {
        bool seen = false;
        assert_true(walk.keys.end - walk.keys.begin <= MHA_KEY_TILE);
        for (int64_t i = walk.rows.begin; i < walk.rows.end; i++)
          for (int64_t j = walk.keys.begin; j < walk.keys.end; j++) {
            met[i][j]++;
            seen = seen || sees(&a, b, i, j);
          }
        assert_true(seen);
      }
      for (int64_t i = 0; i < LQ; i++)
        for (int64_t j = 0; j < LK; j++)
          assert_true(met[i][j] <= 1 && (met[i][j] == 1 || !sees(&a, b, i, j)));
    }
  }
}

/* What the walk over key tiles relies on. */
static void both_ends_do_not_decrease(void **state) {
  (void)state;
  for (int c = 0; c < N_COMBINATIONS; c++) {
    const mha_rules a = combination(c);
    const mha_visibility v = make(&a);
    for (int64_t b = 0; b < ENTRIES; b++)
      for (int64_t i = 1; i < mha_query_count(&v, b); i++) {
        const mha_range before = mha_visible_keys(&v, b, i - 1);
        const mha_range now = mha_visible_keys(&v, b, i);
        assert_true(now.begin >= before.begin && now.end >= before.end);
      }
  }
}

static void extreme_offsets_do_not_overflow(void **state) {
  (void)state;
  const int64_t extremes[] = {INT64_MAX, INT64_MIN, INT64_MAX - 3, INT64_MIN + 3};
  for (int k = 0; k < 4; k++) {
    mha_rules a;
    MHA_INIT(&a);
    a.causal = 1;
    a.flags = MHA_WINDOW;
    a.window_left = INT64_MAX;
    a.window_right = 0;
    a.alignment = MHA_ALIGN_OFFSET;
    a.offset = extremes[k];
    const mha_visibility v = make(&a);
    for (int64_t i = 0; i < LQ; i++) {
      const mha_range keys = mha_visible_keys(&v, 0, i);
      test_note("offset %lld, i %d", (long long)extremes[k], (int)i);
      assert_true(keys.begin >= 0 && keys.begin <= LK && keys.end >= 0 && keys.end <= LK);
      if (extremes[k] < 0) {
        assert_true(mha_range_is_empty(keys));
      } else { /* j >= i + offset - window: the two huge numbers cancel */
        assert_int_equal(keys.begin,
                         i - (INT64_MAX - extremes[k]) > 0 ? i - (INT64_MAX - extremes[k]) : 0);
        assert_int_equal(keys.end, LK);
      }
    }
  }
}

static void broadcast_arrays_are_read_by_their_extents(void **state) {
  (void)state;
  enum { H = 3 };
  /* each number says where it stands */
  float numbers[ENTRIES][H][LQ][LK];
  for (int b = 0; b < ENTRIES; b++)
    for (int h = 0; h < H; h++)
      for (int i = 0; i < LQ; i++)
        for (int j = 0; j < LK; j++)
          numbers[b][h][i][j] = (float)(1000 * b + 100 * h + 10 * i + j);
  for (int extents = 0; extents < 8; extents++) {
    mha_rules a;
    MHA_INIT(&a);
    a.bias.data = &numbers[0][0][0][0];
    a.bias.batch = extents & 1 ? ENTRIES : 1;
    a.bias.heads = extents & 2 ? H : 1;
    a.bias.rows = extents & 4 ? LQ : 1;
    a.bias.columns = LK;
    a.bias.row_stride = LK;
    a.bias.head_stride = LQ * LK;
    a.bias.batch_stride = H * LQ * LK;
    mha_visibility v = {.B = ENTRIES, .H = H, .Lq = LQ, .Lk = LK};
    v = apply(v, &a);
    for (int b = 0; b < ENTRIES; b++)
      for (int h = 0; h < H; h++)
        for (int i = 0; i < LQ; i++) {
          float scores[3] = {0};
          const mha_range keys = {2, 5};
          mha_visibility_apply(&v, b, h, i, keys, scores);
          for (int j = 0; j < 3; j++)
            assert_true(
                scores[j] ==
                numbers[extents & 1 ? b : 0][extents & 2 ? h : 0][extents & 4 ? i : 0][j + 2]);
        }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ranges_are_the_predicate),
      cmocka_unit_test(the_walk_meets_every_visible_pair_once),
      cmocka_unit_test(both_ends_do_not_decrease),
      cmocka_unit_test(extreme_offsets_do_not_overflow),
      cmocka_unit_test(broadcast_arrays_are_read_by_their_extents),
  };
  return cmocka_run_group_tests_name("visibility", tests, NULL, NULL);
}
