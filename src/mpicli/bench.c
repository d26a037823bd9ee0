/* Owns `mha-mpi bench`: layers of random numbers, spread by heads and by positions, beside one
 * process that has as many threads as all have together. The ways take turns, round by round, and
 * what is compared are the ratios within a round. */
#define _XOPEN_SOURCE 700
#include "commands.h"

#include "base/arithmetic.h"
#include "base/error.h"
#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_ROUNDS = 99, MOST_EVENTS = 512 };

typedef struct shape {
  const char *name;
  int64_t B, L, E, H;
  bool causal;
} shape;

static const shape shapes[] = {{"bert8", 8, 128, 768, 12, false},
                               {"gpt1k", 1, 1024, 768, 12, true},
                               {"long4k", 1, 4096, 512, 8, false},
                               {"quick", 2, 24, 32, 8, true}};

typedef enum way { ALONE, BY_HEADS, BY_POSITIONS, N_WAYS } way;
static const char *const names_of_ways[] = {"one process", "by heads", "by positions"};

typedef struct bench {
  const shape *s;
  int32_t threads; /* of each process */
  int rounds;
  bool events;
  mha_mpi_team *teams[N_WAYS]; /* none for ALONE */
  mha_weights *whole;
  mha_mpi_weights *shares[N_WAYS];
  mha_context *all, *own; /* with all threads, which process 0 alone has, and with this process's */
  float *numbers;         /* matrices [4][E][E], x [B][L][E], then the output */
  int64_t n_numbers;
  mha_mpi_event list[MOST_EVENTS];
  int n_events;
} bench;

/* ---- arguments ---- */

static bool number_of(const char *word, const char *name, int *value) {
  char *end = NULL;
  const size_t n = strlen(name);
  if (strncmp(word, name, n) != 0 || word[n] != '=')
    return false;
  const long given = strtol(word + n + 1, &end, 10);
  *value = *end || given < 1 || given > MOST_ROUNDS ? 0 : (int)given;
  return true;
}

static const shape *shape_of(const char *name) {
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (strcmp(shapes[i].name, name) == 0)
      return &shapes[i];
  return NULL;
}

/* ---- a layer ---- */

/* The same on all processes: splitmix64, about as large as projections keep them. */
static void fill(float *numbers, int64_t n, float size, uint64_t state) {
  for (int64_t i = 0; i < n; i++) {
    uint64_t z = state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    numbers[i] = ((float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f) * size;
  }
}

static mha_forward_args args_of(const bench *b, mha_rules *rules, way how, mha_mpi_range *rows) {
  const shape *s = b->s;
  mha_forward_args a;
  float *x = b->numbers + 4 * s->E * s->E;
  MHA_INIT(rules);
  rules->causal = s->causal;
  MHA_INIT(&a);
  a.batch = s->B;
  a.query_length = s->L;
  a.query = x;
  a.output = x + s->B * s->L * s->E;
  a.query_batch_stride = s->L * s->E;
  a.query_row_stride = s->E;
  a.rules = rules;
  if (how == BY_POSITIONS)
    a.query_length = rows[0].length + rows[1].length;
  return a;
}

static mha_status create_context(int32_t threads, mha_context **context, mha_error *error) {
  mha_context_options options;
  MHA_INIT(&options);
  options.n_threads = threads;
  return mha_context_create(&options, context, error);
}

static mha_status create_teams(bench *b, int n, mha_error *error) {
  mha_mpi_options options;
  mha_status status = MHA_OK;
  MHA_INIT(&options);
  for (int w = BY_HEADS; !status && w < N_WAYS; w++) {
    options.by_heads = w == BY_HEADS ? n : 1;
    status = mha_mpi_team_create(MPI_COMM_WORLD, &options, &b->teams[w], error);
  }
  return status;
}

static mha_status create_layers(bench *b, mha_error *error) {
  const shape *s = b->s;
  const int64_t square = s->E * s->E;
  mha_config config;
  mha_matrices m;
  mha_config_init(&config, s->E, s->H);
  MHA_INIT(&m);
  m.orientation = MHA_IN_OUT;
  m.ownership = MHA_BORROW;
  m.query = b->numbers;
  m.key = b->numbers + square;
  m.value = b->numbers + 2 * square;
  m.output = b->numbers + 3 * square;
  mha_status status = mha_weights_create(&config, &m, &b->whole, error);
  for (int w = BY_HEADS; !status && w < N_WAYS; w++)
    status = mha_mpi_weights_create(b->teams[w], &config, &m, &b->shares[w], error);
  return status;
}

static mha_status create(bench *b, mha_error *error) {
  const shape *s = b->s;
  int n = 0;
  const mha_allocator memory = mha_memory_allocator(NULL);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  b->n_numbers = 4 * s->E * s->E + 2 * s->B * s->L * s->E;
  b->numbers = mha_memory_allocate(&memory, (size_t)b->n_numbers * sizeof *b->numbers);
  if (!b->numbers)
    return mha_fail(error, MHA_ERROR_MEMORY, "no memory for %s", s->name);
  fill(b->numbers, 4 * s->E * s->E, 0.04f, 1);
  fill(b->numbers + 4 * s->E * s->E, 2 * s->B * s->L * s->E, 1.0f, 2);
  mha_status status = create_teams(b, n, error);
  if (!status)
    status = create_layers(b, error);
  if (!status)
    status = create_context(b->threads, &b->own, error);
  return status ? status : create_context(n * b->threads, &b->all, error);
}

static void destroy(bench *b) {
  const mha_allocator memory = mha_memory_allocator(NULL);
  mha_context_destroy(b->own);
  mha_context_destroy(b->all);
  mha_weights_destroy(b->whole);
  for (int w = BY_HEADS; w < N_WAYS; w++) {
    mha_mpi_weights_destroy(b->shares[w]);
    mha_mpi_team_destroy(b->teams[w]);
  }
  mha_memory_release(&memory, b->numbers, (size_t)b->n_numbers * sizeof *b->numbers);
}

/* ---- measuring ---- */

/* Processes that wait sleep: they leave the CPUs to the one that works. */
static void meet(void) {
  const struct timespec moment = {0, 200000};
  MPI_Request request;
  int done = 0;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  while (!done) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (!done)
      (void)nanosleep(&moment, NULL);
  }
}

static mha_status call(const bench *b, way how, mha_error *error) {
  mha_rules rules;
  mha_mpi_spread spread;
  mha_mpi_range rows[2] = {{0, 0}, {0, 0}};
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MHA_INIT(&spread);
  spread.order = b->s->causal ? MHA_MPI_BALANCED : MHA_MPI_BLOCKS;
  if (how == BY_POSITIONS) {
    const mha_status status = mha_mpi_rows(b->teams[how], b->s->L, spread.order, rows, error);
    if (status)
      return status;
  }
  const mha_forward_args args = args_of(b, &rules, how, rows);
  if (how != ALONE)
    return mha_mpi_forward(b->teams[how], b->own, b->shares[how], &args, &spread, error);
  return rank == 0 ? mha_forward(b->all, b->whole, &args, error) : MHA_OK;
}

/* Seconds of a call, of so many in a row. */
static mha_status measure(const bench *b, way how, int calls, double *seconds, mha_error *error) {
  mha_status status = MHA_OK;
  meet();
  MPI_Barrier(how == ALONE ? MPI_COMM_SELF : MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  for (int i = 0; !status && i < calls; i++)
    status = call(b, how, error);
  const double own = (MPI_Wtime() - begin) / calls;
  meet();
  MPI_Allreduce(&own, seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return status;
}

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a;
  const double y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Median, and the distance of the quartiles. */
static double median_of(double *values, int n, double *distance) {
  qsort(values, (size_t)n, sizeof *values, compare);
  *distance = values[3 * n / 4] - values[n / 4];
  return values[n / 2];
}

/* ---- events ---- */

static void note(void *user, const mha_mpi_event *event) {
  bench *b = user;
  if (b->n_events < MOST_EVENTS)
    b->list[b->n_events++] = *event;
}

static void print_events(const bench *b, int rank, double begin) {
  static const char *const works[] = {"compute", "sum", "travel", "wait", "agree"};
  for (int i = 0; i < b->n_events; i++) {
    const mha_mpi_event *e = &b->list[i];
    printf("  process %d  step %d  %-8s %9.3f to %9.3f ms  %9.3f ms  %lld bytes\n", rank,
           (int)e->step, works[e->work], 1e3 * (e->begin - begin), 1e3 * (e->end - begin),
           1e3 * (e->end - e->begin), (long long)e->bytes);
  }
  (void)fflush(stdout);
}

/* One call, each process's events in turn. */
static mha_status show_events(bench *b, way how, mha_error *error) {
  int rank = 0;
  int n = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  b->n_events = 0;
  mha_status status = mha_mpi_team_trace(b->teams[how], note, b, error);
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  if (!status)
    status = call(b, how, error);
  if (!status)
    status = mha_mpi_team_trace(b->teams[how], NULL, NULL, error);
  for (int r = 0; r < n; r++) {
    if (r == rank)
      print_events(b, rank, begin);
    meet();
  }
  return status;
}

/* ---- what carries the messages ---- */

enum { MOST_BYTES = 1 << 22, LINK_ROUNDS = 50 };

/* Seconds of a sum over all, and of a message to and fro, halved; the median of many. */
static double time_link(int what, float *numbers, int n, double *distance) {
  double seconds[LINK_ROUNDS];
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int i = 0; i < LINK_ROUNDS; i++) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    if (what == 0)
      MPI_Allreduce(MPI_IN_PLACE, numbers, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int from = 0; what == 1 && from < 2; from++)
      if (rank == from)
        MPI_Send(numbers, n, MPI_FLOAT, 1 - from, 0, MPI_COMM_WORLD);
      else if (rank == 1 - from)
        MPI_Recv(numbers, n, MPI_FLOAT, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    seconds[i] = (MPI_Wtime() - begin) / (what == 1 ? 2 : 1);
  }
  return median_of(seconds, LINK_ROUNDS, distance);
}

static int measure_link(void) {
  static float numbers[MOST_BYTES / 4];
  static const char *const names[] = {"sum over all", "message"};
  int rank = 0;
  int processes = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  for (int what = 0; what < (processes > 1 ? 2 : 0); what++)
    for (int bytes = 4; bytes <= MOST_BYTES; bytes *= 32) {
      double distance = 0;
      const double seconds = time_link(what, numbers, bytes / 4, &distance);
      if (rank == 0)
        printf("%-12s %8d bytes %10.1f us (iqr %.1f)\n", names[what], bytes, 1e6 * seconds,
               1e6 * distance);
    }
  (void)fflush(stdout);
  return 0;
}

/* ---- the command ---- */

static mha_status run_shape(bench *b, mha_error *error) {
  static double seconds[N_WAYS][MOST_ROUNDS];
  double ratios[MOST_ROUNDS];
  int rank = 0;
  int calls = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  mha_status status = create(b, error);
  for (int w = 0; !status && w < N_WAYS; w++) /* everything is allocated and in its place */
    status = measure(b, (way)w, 2, &seconds[w][0], error);
  if (!status && seconds[ALONE][0] < 0.2)
    calls = (int)(0.2 / seconds[ALONE][0]) + 1;
  for (int r = 0; !status && r < b->rounds; r++)
    for (int w = 0; !status && w < N_WAYS; w++)
      status = measure(b, (way)((w + r) % N_WAYS), calls, &seconds[(w + r) % N_WAYS][r], error);
  for (int w = 0; !status && rank == 0 && w < N_WAYS; w++) {
    double distance = 0;
    double ignored = 0;
    for (int r = 0; r < b->rounds; r++)
      ratios[r] = seconds[ALONE][r] / seconds[w][r];
    const double ratio = median_of(ratios, b->rounds, &distance);
    for (int r = 0; r < b->rounds; r++)
      ratios[r] = seconds[w][r];
    printf("%-8s %-12s %9.3f ms  %6.3f of one process (iqr %.3f)\n", b->s->name, names_of_ways[w],
           1e3 * median_of(ratios, b->rounds, &ignored), ratio, distance);
    (void)fflush(stdout);
  }
  for (int w = BY_HEADS; !status && b->events && w < N_WAYS; w++)
    status = show_events(b, (way)w, error);
  destroy(b);
  return status;
}

int mha_mpi_bench(int n_words, char **words) {
  bench b = {.threads = 1, .rounds = 7};
  const shape *only = NULL;
  mha_error error;
  int threads = 1;
  if (n_words == 1 && strcmp(words[0], "--link") == 0)
    return measure_link();
  for (int i = 0; i < n_words; i++) {
    const bool known = number_of(words[i], "--threads", &threads) ||
                       number_of(words[i], "--rounds", &b.rounds) ||
                       strcmp(words[i], "--events") == 0 ||
                       (strncmp(words[i], "--shape=", 8) == 0 && (only = shape_of(words[i] + 8)));
    b.events = b.events || strcmp(words[i], "--events") == 0;
    if (!known || threads == 0 || b.rounds == 0) {
      fprintf(stderr,
              "mha-mpi: bench: \"%s\"; rule: --shape=bert8|gpt1k|long4k|quick, --threads=N, "
              "--rounds=1..99, --events; or --link alone\n",
              words[i]);
      return 2;
    }
  }
  b.threads = threads;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    if (only ? only != &shapes[i] : strcmp(shapes[i].name, "quick") == 0)
      continue;
    b.s = &shapes[i];
    if (run_shape(&b, &error)) {
      fprintf(stderr, "mha-mpi: %s\n", error.message);
      return 1;
    }
    memset(b.teams, 0, sizeof b.teams);
    memset(b.shares, 0, sizeof b.shares);
    b.whole = NULL;
    b.own = b.all = NULL;
  }
  return 0;
}
