/* Layers and cores whose rows are spread by positions, with their heads shared or not, against the
 * judge: random ones over the product of options, ragged blocks and the balanced order. */
#include "backward_fixture.h"
#include "processes.h"

#include <stdlib.h>
#include <string.h>

static test_fixture fixture;

/* ---- who has which rows ---- */

enum { MOST_PROCESSES = 16 };

typedef struct rows {
  mha_mpi_range ranges[2];
  int64_t n;
} rows;

/* This process's of `length` rows: in order, blocks of random lengths, the same on all. */
static rows choose_rows(test_random *random, const mha_mpi_team *team, int64_t length,
                        int32_t order) {
  const mha_mpi_place place = test_mpi_place(team);
  rows r = {.n = 0};
  if (order == MHA_MPI_BALANCED) {
    test_expect(mha_mpi_rows(team, length, order, r.ranges, NULL), MHA_OK, NULL);
  } else {
    int64_t cuts[MOST_PROCESSES + 1] = {0};
    for (int32_t p = 1; p < place.by_positions; p++)
      cuts[p] = test_random_range(random, 0, length);
    cuts[place.by_positions] = length;
    for (int32_t i = 1; i < place.by_positions; i++) /* in order */
      for (int32_t k = i; k > 1 && cuts[k] < cuts[k - 1]; k--) {
        const int64_t swapped = cuts[k];
        cuts[k] = cuts[k - 1];
        cuts[k - 1] = swapped;
      }
    r.ranges[0].begin = cuts[place.position];
    r.ranges[0].length = cuts[place.position + 1] - cuts[place.position];
  }
  r.n = r.ranges[0].length + r.ranges[1].length;
  return r;
}

static int64_t row_of(const rows *r, int64_t i) {
  return i < r->ranges[0].length ? r->ranges[0].begin + i
                                 : r->ranges[1].begin + i - r->ranges[0].length;
}

/* ---- their numbers ---- */

/* Rows of a view as a dense array [B][n][heads·size]. */
static float *take_rows(const test_view *view, const rows *r) {
  const int64_t width = view->heads * view->size;
  float *taken = test_allocate((size_t)(view->batch * r->n * width), sizeof *taken);
  float *to = taken;
  for (int64_t b = 0; b < view->batch && view->data; b++)
    for (int64_t i = 0; i < r->n; i++)
      for (int64_t h = 0; h < view->heads; h++, to += view->size)
        memcpy(to, test_at(view, b, row_of(r, i), h, 0), (size_t)view->size * sizeof *to);
  return taken;
}

static int64_t *take_positions(const int64_t *all, int64_t B, int64_t L, const rows *r) {
  int64_t *taken = test_allocate((size_t)(B * r->n), sizeof *taken);
  for (int64_t b = 0; b < B && all; b++)
    for (int64_t i = 0; i < r->n; i++)
      taken[b * r->n + i] = all[b * L + row_of(r, i)];
  return taken;
}

/* A process's rows of a mask or bias, dense [batch][heads][n][Lk], `bytes` for each number. */
static void *take_cells(const void *data, int64_t batch, int64_t heads, int64_t Lq, int64_t Lk,
                        const int64_t strides[3], const rows *r, size_t bytes) {
  (void)Lq;
  char *taken = test_allocate((size_t)(batch * heads * r->n * Lk), bytes);
  char *to = taken;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < r->n; i++, to += (size_t)Lk * bytes)
        memcpy(to,
               (const char *)data +
                   (size_t)(b * strides[0] + h * strides[1] + row_of(r, i) * strides[2]) * bytes,
               (size_t)Lk * bytes);
  return taken;
}

/* ---- one process's call ---- */

typedef struct own_call {
  rows queries, keys;
  mha_rules rules;
  mha_results results;
  float *query, *key, *value, *output, *lse;
  int64_t *query_positions, *key_positions;
  void *mask, *bias;
} own_call;

static void find_strides(int64_t rows_n, int64_t columns, int64_t heads, int64_t batch_stride,
                         int64_t head_stride, int64_t row_stride, int64_t strides[3]) {
  strides[2] = row_stride ? row_stride : columns;
  strides[1] = head_stride ? head_stride : rows_n * strides[2];
  strides[0] = batch_stride ? batch_stride : heads * strides[1];
}

/* Where a mask or bias has all rows, the process is given its own. */
static void own_masks(own_call *own) {
  const test_case *c = &fixture.c;
  int64_t strides[3];
  mha_mask *m = &own->rules.attend;
  mha_bias *b = &own->rules.bias;
  if (m->data && m->rows > 1) {
    find_strides(m->rows, m->columns, m->heads, m->batch_stride, m->head_stride, m->row_stride,
                 strides);
    own->mask = take_cells(m->data, m->batch, m->heads, c->Lq, c->Lk, strides, &own->queries, 1);
    m->data = own->mask;
    m->rows = own->queries.n;
    m->batch_stride = m->head_stride = m->row_stride = 0;
  }
  if (b->data && b->rows > 1) {
    find_strides(b->rows, b->columns, b->heads, b->batch_stride, b->head_stride, b->row_stride,
                 strides);
    own->bias = take_cells(b->data, b->batch, b->heads, c->Lq, c->Lk, strides, &own->queries,
                           sizeof(float));
    b->data = own->bias;
    b->rows = own->queries.n;
    b->batch_stride = b->head_stride = b->row_stride = 0;
  }
}

static own_call make_call(test_random *random, const mha_mpi_team *team, int32_t order,
                          int64_t heads) {
  const test_case *c = &fixture.c;
  own_call own = {.rules = fixture.rules};
  own.queries = choose_rows(random, team, c->Lq, order);
  own.keys =
      c->source == TEST_SELF && !c->core ? own.queries : choose_rows(random, team, c->Lk, order);
  own.query = take_rows(&fixture.query, &own.queries);
  own.key = take_rows(&fixture.key, &own.keys);
  own.value = take_rows(&fixture.value, &own.keys);
  own.query_positions = take_positions(fixture.query_positions, c->B, c->Lq, &own.queries);
  own.key_positions = take_positions(fixture.key_positions, c->B, c->Lk, &own.keys);
  own_masks(&own);
  const int64_t n = c->B * own.queries.n;
  own.output = test_allocate((size_t)(n * c->Eo), sizeof(float));
  own.lse = test_allocate((size_t)(n * heads), sizeof(float));
  MHA_INIT(&own.results);
  own.results.log_sum_exp = own.lse;
  return own;
}

static void free_call(own_call *own) {
  void *const all[] = {own->query,           own->key,           own->value, own->output, own->lse,
                       own->query_positions, own->key_positions, own->mask,  own->bias};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    free(all[i]);
}

/* A row beyond a length is read by nobody, and its log-sum-exp is -inf. */
static void judge_rows(const own_call *own, const mha_mpi_place *place, const float *output,
                       int64_t width, const oracle_numbers *expected, const oracle_numbers *lse) {
  const test_case *c = &fixture.c;
  const int64_t heads = c->H / place->by_heads;
  for (int64_t b = 0; b < c->B; b++)
    for (int64_t i = 0; i < own->queries.n; i++) {
      const int64_t row = b * c->Lq + row_of(&own->queries, i);
      test_compare("a row of the output", (test_shape){{1, 1, 1, width}},
                   output + (b * own->queries.n + i) * width, expected->value + row * width,
                   expected->bound + row * width);
      for (int64_t h = 0; h < heads; h++) {
        const int64_t at = (b * c->H + place->head * heads + h) * c->Lq + row_of(&own->queries, i);
        test_compare("log_sum_exp", (test_shape){{1, 1, 1, 1}},
                     own->lse + (b * heads + h) * own->queries.n + i, lse->value + at,
                     lse->bound + at);
      }
    }
}

/* ---- layers ---- */

static test_case draw(test_random *random, uint64_t seed, int64_t by_heads, bool core) {
  test_case c = test_back_draw(random, seed, core).forward;
  c.packed = false;
  c.dropout = 0;
  c.threads = 1;
  c.want = 0;
  c.accumulate = false;
  if (by_heads > 1)
    c.absent = 0;
  if (by_heads > 1 && c.norm == MHA_NORM_FULL)
    c.norm = MHA_NORM_PER_HEAD;
  if (by_heads > 1) {
    c.H = by_heads * test_random_range(random, 1, 2);
    c.G = test_random_range(random, 0, 1) ? c.H : 1;
  }
  if (core) /* by positions alone */
    c.k_type = c.v_type = c.k_type;
  return c;
}

static int n_events;

static void count_event(void *user, const mha_mpi_event *event) {
  (void)user;
  assert_true(event->end >= event->begin && event->bytes >= 0 && event->work <= MHA_MPI_AGREE);
  n_events++;
}

/* The same call, told what it does, has the same bits. */
static void again(mha_mpi_team *team, mha_context *context, const mha_mpi_weights *weights,
                  const mha_forward_args *args, const mha_mpi_spread *spread, int64_t n) {
  float *first = test_allocate((size_t)n, sizeof *first);
  mha_error error;
  if (n > 0)
    memcpy(first, args->output, (size_t)n * sizeof *first);
  n_events = 0;
  test_expect(mha_mpi_team_trace(team, count_event, NULL, &error), MHA_OK, &error);
  test_expect(mha_mpi_forward(team, context, weights, args, spread, &error), MHA_OK, &error);
  test_expect(mha_mpi_team_trace(team, NULL, NULL, &error), MHA_OK, &error);
  assert_true(n_events >= 3);
  test_same_bits("once more", (test_shape){{1, 1, 1, n}}, args->output, first);
  free(first);
}

static void check_layer(mha_mpi_team *team, test_random *random, const test_case *drawn,
                        int32_t order) {
  const mha_mpi_place place = test_mpi_place(team);
  mha_context *context = NULL;
  mha_mpi_spread spread;
  oracle_result result;
  mha_error error;
  test_build(&fixture, drawn);
  const test_case *c = &fixture.c;
  mha_mpi_weights *weights = test_mpi_share(team, &fixture);
  own_call own = make_call(random, team, order, c->H / place.by_heads);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  mha_forward_args args = fixture.args;
  args.flags |= MHA_ALLOW_EMPTY;
  args.query = own.query;
  args.key = args.key ? own.key : NULL;
  args.value = args.value ? own.value : NULL;
  args.output = own.output;
  args.query_length = own.queries.n;
  args.key_length = args.key ? own.keys.n : 0;
  args.query_batch_stride = args.query_row_stride = args.key_batch_stride = args.key_row_stride = 0;
  args.value_batch_stride = args.value_row_stride = 0;
  args.output_batch_stride = args.output_row_stride = 0;
  args.query_positions = args.query_positions ? own.query_positions : NULL;
  args.key_positions = args.key_positions ? own.key_positions : NULL;
  args.rules = &own.rules;
  args.results = &own.results;
  MHA_INIT(&spread);
  spread.order = order;
  test_expect(mha_mpi_forward(team, context, weights, &args, &spread, &error), MHA_OK, &error);
  test_ask_oracle(&fixture, &result);
  judge_rows(&own, &place, own.output, c->Eo, &result.output, &result.lse);
  oracle_free(&result);
  again(team, context, weights, &args, &spread, c->B * own.queries.n * c->Eo);
  free_call(&own);
  mha_context_destroy(context);
  mha_mpi_weights_destroy(weights);
  test_release(&fixture);
}

static void random_layers(void **state) {
  test_random random;
  int n = 0;
  (void)state;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  test_random_seed(&random, 91);
  for (int32_t by_heads = 1; by_heads <= n; by_heads++) {
    mha_mpi_team *team = test_mpi_team(by_heads, NULL);
    if (!team)
      continue;
    for (uint64_t seed = 1; seed <= (test_small() ? 20 : 200); seed++) {
      const test_case c = draw(&random, seed, by_heads, false);
      check_layer(team, &random, &c, seed % 3 == 0 ? MHA_MPI_BLOCKS : MHA_MPI_BALANCED);
    }
    mha_mpi_team_destroy(team);
  }
  test_mpi_passed();
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {TEST_MPI(random_layers)};
  return test_mpi_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
