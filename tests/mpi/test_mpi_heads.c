/* Layers whose heads are shared by all processes, against the judge: random ones over the product
 * of all options, with caches, and the way back. */
#include "backward_fixture.h"
#include "processes.h"

#include <stdlib.h>
#include <string.h>

static test_fixture fixture;
static test_back back;

static int64_t processes(void) {
  int n = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  return n;
}

/* ---- layers that divide ---- */

/* Heads for n processes, key heads that divide among them or are shared by several. */
static void choose_heads(test_random *random, test_case *c) {
  const int64_t n = processes();
  c->H = n * test_random_range(random, 1, 3);
  int64_t choices[64];
  int64_t n_choices = 0;
  for (int64_t G = 1; G <= c->H; G++)
    if (c->H % G == 0 && (G % n == 0 || n % G == 0))
      choices[n_choices++] = G;
  c->G = choices[test_random_range(random, 0, n_choices - 1)];
  if (c->absent) { /* all widths are H·d, which is what the identity needs */
    c->Eq = c->Ek = c->Ev = c->Eo = c->dv = 0;
    c->G = c->H;
  }
  c->dropout = 0;
  c->threads = 1;
  if (c->norm == MHA_NORM_FULL && n > 1)
    c->norm = MHA_NORM_PER_HEAD;
}

static test_case draw(test_random *random, uint64_t seed) {
  test_case c = test_back_draw(random, seed, false).forward;
  choose_heads(random, &c);
  return c;
}

/* ---- results of the process's heads ---- */

typedef struct own_results {
  int64_t first, heads;
  float *weights, *lse;
  mha_results results;
} own_results;

static own_results ask(const test_fixture *f, const mha_mpi_place *place) {
  const test_case *c = &f->c;
  own_results own = {.heads = c->H / place->by_heads};
  const int64_t rows = (c->packed ? 1 : c->B) * own.heads * c->Lq;
  own.first = place->head * own.heads;
  own.results = f->results;
  if (f->weights)
    own.results.weights = own.weights = test_allocate((size_t)(rows * c->Lk), sizeof(float));
  if (f->lse)
    own.results.log_sum_exp = own.lse = test_allocate((size_t)rows, sizeof(float));
  return own;
}

/* Heads [first, first + heads) of the judge's [B][H][n]. */
static void judge_heads(const char *what, const test_fixture *f, const own_results *own,
                        const float *got, const oracle_numbers *all, int64_t n) {
  const int64_t B = f->c.packed ? 1 : f->c.B;
  for (int64_t b = 0; b < B && got; b++) {
    const int64_t at = (b * f->c.H + own->first) * n;
    test_compare(what, (test_shape){{1, 1, own->heads, n}}, got + b * own->heads * n,
                 all->value + at, all->bound + at);
  }
}

static void judge(const test_fixture *f, const own_results *own) {
  static const int stages[] = {3, 0, 1, 2}; /* of mha_stage, in the judge */
  oracle_result result;
  test_ask_oracle(f, &result);
  float *output = test_gather(&f->output);
  test_compare("output", test_view_shape(&f->output), output, result.output.value,
               result.output.bound);
  if (f->average)
    test_compare("average", (test_shape){{1, f->c.B, f->c.Lq, f->c.Lk}}, f->average,
                 result.average.value, result.average.bound);
  judge_heads("weights", f, own, own->weights, &result.stage[stages[f->c.stage]],
              f->c.Lq * f->c.Lk);
  judge_heads("log_sum_exp", f, own, own->lse, &result.lse, f->c.Lq);
  test_mpi_same("output", output,
                f->output.batch * f->output.length * f->output.heads * f->output.size);
  free(output);
  oracle_free(&result);
}

/* ---- forward ---- */

static void check(mha_mpi_team *team, const test_case *c) {
  const mha_mpi_place place = test_mpi_place(team);
  mha_context *context = NULL;
  mha_error error;
  test_build(&fixture, c);
  mha_mpi_weights *weights = test_mpi_share(team, &fixture);
  test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
  own_results own = ask(&fixture, &place);
  mha_forward_args args = fixture.args;
  args.results = fixture.args.results ? &own.results : NULL;
  test_poison_results(&fixture);
  test_expect(mha_mpi_forward(team, context, weights, &args, NULL, &error), MHA_OK, &error);
  judge(&fixture, &own);
  float *first = test_gather(&fixture.output);
  test_poison_results(&fixture);
  test_expect(mha_mpi_forward(team, context, weights, &args, NULL, &error), MHA_OK, &error);
  if (!fixture.c.accumulate)
    test_same_output(&fixture, first);
  free(first);
  free(own.weights);
  free(own.lse);
  mha_context_destroy(context);
  mha_mpi_weights_destroy(weights);
  test_release(&fixture);
}

static void random_layers(void **state) {
  test_random random;
  (void)state;
  mha_mpi_team *team = test_mpi_team((int32_t)processes(), NULL);
  test_random_seed(&random, 81);
  for (uint64_t seed = 1; seed <= (test_small() ? 25 : 300); seed++) {
    const test_case c = draw(&random, seed);
    check(team, &c);
  }
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

/* ---- own rows ---- */

static void own_rows(void **state) {
  test_random random;
  mha_error error;
  mha_mpi_spread spread;
  (void)state;
  MHA_INIT(&spread);
  spread.output = MHA_MPI_OWN_ROWS;
  mha_mpi_team *team = test_mpi_team((int32_t)processes(), NULL);
  const mha_mpi_place place = test_mpi_place(team);
  test_random_seed(&random, 82);
  for (uint64_t seed = 1; seed <= (test_small() ? 10 : 60); seed++) {
    test_case c = draw(&random, seed);
    oracle_result result;
    mha_context *context = NULL;
    c.accumulate = false;
    c.want = 0;
    test_build(&fixture, &c);
    mha_mpi_weights *weights = test_mpi_share(team, &fixture);
    test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
    test_ask_oracle(&fixture, &result);
    const int64_t Eo = fixture.c.Eo;
    const int64_t R = (c.packed ? 1 : fixture.c.B) * fixture.c.Lq;
    const int64_t first = place.head * R / place.by_heads;
    const int64_t n = (place.head + 1) * R / place.by_heads - first;
    float *rows = test_allocate((size_t)(n * (Eo + 1)), sizeof *rows);
    mha_forward_args args = fixture.args;
    args.output = rows;
    args.output_batch_stride = 0;
    args.output_row_stride = Eo + 1;
    test_expect(mha_mpi_forward(team, context, weights, &args, &spread, &error), MHA_OK, &error);
    for (int64_t i = 0; i < n; i++) {
      test_compare("an own row", (test_shape){{1, 1, 1, Eo}}, rows + i * (Eo + 1),
                   result.output.value + (first + i) * Eo, result.output.bound + (first + i) * Eo);
      assert_true(rows[i * (Eo + 1) + Eo] == 0.0f);
    }
    free(rows);
    oracle_free(&result);
    mha_context_destroy(context);
    mha_mpi_weights_destroy(weights);
    test_release(&fixture);
  }
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

/* ---- a cache of each process's key heads ---- */

static void prefill_and_steps(void **state) {
  enum { LENGTH = 11, FIRST = 6 };
  (void)state;
  mha_mpi_team *team = test_mpi_team((int32_t)processes(), NULL);
  for (int64_t G = 1; G <= 2 * processes(); G++) {
    const int64_t H = 2 * processes();
    if (H % G != 0 || (G % processes() != 0 && processes() % G != 0))
      continue;
    const test_case c = {.seed = (uint64_t)G,
                         .B = 2,
                         .Lq = LENGTH,
                         .H = H,
                         .G = G,
                         .d = 8,
                         .Eq = 12,
                         .source = TEST_SELF,
                         .causal = true,
                         .rope = MHA_ROPE_HALVES,
                         .biases = TEST_ALL};
    mha_cache_options options;
    mha_cache *cache = NULL;
    mha_context *context = NULL;
    mha_error error;
    test_build(&fixture, &c);
    mha_mpi_weights *weights = test_mpi_share(team, &fixture);
    test_expect(mha_context_create(&fixture.options, &context, &error), MHA_OK, &error);
    MHA_INIT(&options);
    options.n_entries = 2;
    options.page_tokens = 16;
    options.n_pages = 4;
    options.weights = mha_mpi_weights_layer(weights);
    test_expect(mha_cache_create(&options, &cache, &error), MHA_OK, &error);
    test_poison_results(&fixture);
    for (int64_t at = 0; at < LENGTH; at += at == 0 ? FIRST : 1) {
      mha_forward_args args = fixture.args;
      args.cache = cache;
      args.query_length = at == 0 ? FIRST : 1;
      args.key_length = 0;
      args.query_batch_stride = LENGTH * 12;
      args.query_row_stride = 12;
      args.output_batch_stride = LENGTH * fixture.c.Eo;
      args.output_row_stride = fixture.c.Eo;
      args.query += at * 12;
      args.output += at * fixture.c.Eo;
      test_expect(mha_mpi_forward(team, context, weights, &args, NULL, &error), MHA_OK, &error);
    }
    test_judge_now(&fixture);
    mha_cache_destroy(cache);
    mha_context_destroy(context);
    mha_mpi_weights_destroy(weights);
    test_release(&fixture);
  }
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

/* ---- the way back ---- */

/* Of each number that a process has changed the new one, on all of them. */
static void gather_changes(float *numbers, const float *before, int64_t n) {
  int32_t *bits = test_allocate((size_t)n, sizeof *bits);
  int32_t *owner = test_allocate((size_t)n, sizeof *owner);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int64_t i = 0; i < n; i++)
    owner[i] = test_equal_bits(numbers[i], before[i]) ? -1 : rank;
  int32_t *last = test_allocate((size_t)n, sizeof *last);
  MPI_Allreduce(owner, last, (int)n, MPI_INT32_T, MPI_MAX, MPI_COMM_WORLD);
  for (int64_t i = 0; i < n; i++) {
    bits[i] = 0;
    if (last[i] == rank || (last[i] < 0 && rank == 0))
      memcpy(&bits[i], &numbers[i], sizeof *bits);
  }
  MPI_Allreduce(MPI_IN_PLACE, bits, (int)n, MPI_INT32_T, MPI_BOR, MPI_COMM_WORLD);
  memcpy(numbers, bits, (size_t)n * sizeof *numbers);
  free(bits);
  free(owner);
  free(last);
}

typedef struct spread_layer {
  mha_mpi_team *team;
  mha_context *context;
  mha_mpi_weights *weights;
  mha_tape *tape;
} spread_layer;

static mha_status call_back(void *user, mha_error *error) {
  const spread_layer *s = user;
  mha_backward_args b = back.args;
  mha_forward_args args = back.f.args;
  b.tape = s->tape;
  args.output = NULL;
  const mha_status status = mha_mpi_backward(s->team, s->context, s->weights, &args, &b, error);
  for (int i = 0; i < TEST_GRADIENTS; i++)
    if (back.gradients[i].floats > 0)
      gather_changes(back.gradients[i].data, back.gradients[i].before, back.gradients[i].floats);
  return status;
}

static void check_back(mha_mpi_team *team, const test_back_case *c) {
  spread_layer layer = {.team = team};
  mha_error error;
  test_back_build(&back, c);
  layer.weights = test_mpi_share(team, &back.f);
  test_expect(mha_context_create(&back.f.options, &layer.context, &error), MHA_OK, &error);
  back.call = call_back;
  back.call_user = &layer;
  if (c->kept) {
    mha_forward_args args = back.f.args;
    test_expect(mha_tape_create(NULL, &layer.tape, &error), MHA_OK, &error);
    args.tape = layer.tape;
    args.results = NULL;
    test_expect(mha_mpi_forward(team, layer.context, layer.weights, &args, NULL, &error), MHA_OK,
                &error);
  }
  test_back_run(&back);
  test_back_judge(&back);
  mha_tape_destroy(layer.tape);
  mha_context_destroy(layer.context);
  mha_mpi_weights_destroy(layer.weights);
  test_back_release(&back);
}

static void gradients(void **state) {
  test_random random;
  (void)state;
  mha_mpi_team *team = test_mpi_team((int32_t)processes(), NULL);
  test_random_seed(&random, 83);
  for (uint64_t seed = 1; seed <= (test_small() ? 20 : 200); seed++) {
    test_back_case c = test_back_draw(&random, seed, false);
    choose_heads(&random, &c.forward);
    if (processes() > 1)
      c.forward.absent &= TEST_O;
    check_back(team, &c);
  }
  mha_mpi_team_destroy(team);
  test_mpi_passed();
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {TEST_MPI(random_layers), TEST_MPI(own_rows),
                                     TEST_MPI(prefill_and_steps), TEST_MPI(gradients)};
  return test_mpi_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
