/* mha-bench-serving: sequences that arrive and leave, served by one layer over a cache, in several
 * ways that take turns. This file owns the command line, the rounds and the report. */
#include "machine.h"
#include "server.h"
#include "statistics.h"
#include "status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 100 };

typedef struct serving_options {
  traffic_options traffic;
  int64_t width, heads, threads, rounds;
  const char *json;
  bool help;
} serving_options;

static const struct {
  const char *name, *said;
} ways[SERVER_WAYS] = {{"packed", "one call for all, packed, pages"},
                       {"one by one", "one call for each, pages"},
                       {"padded", "one call for all, padded, no pages"}};

/* ---- the command line ---- */

static const char help[] =
    "Usage: mha-bench-serving [options]\n"
    "Serves sequences that arrive and leave with one layer over a cache, in three ways that take\n"
    "turns: packed (one call for all sequences, pages), one by one (a call for each, pages) and\n"
    "padded (one call, padded to the longest, no pages). Lengths are drawn log-uniformly.\n"
    "  --sequences N      at a time, at most (32)\n"
    "  --requests N       sequences in all (96)\n"
    "  --prompt A:B       tokens of a prompt (16:256)\n"
    "  --generate A:B     tokens that are generated (32:256)\n"
    "  --chunk N          rows of a prompt in one step, at most (64)\n"
    "  --prefix N         tokens that prompts have in common before their own (128)\n"
    "  --prefix-share X   share of the sequences that have it (0.5)\n"
    "  --page-tokens T    tokens of a page (64)\n"
    "  --pages N          pages of the pool (0 = for two thirds of the longest case)\n"
    "  --width E          of the layer (768)\n"
    "  --heads H          (12)\n"
    "  --threads N        (2)\n"
    "  --rounds N         (5)\n"
    "  --seed N           (1)\n"
    "  --json FILE        one JSON line for each way\n"
    "  --quick            a small run that tests the program and says nothing about speed\n"
    "  --help\n";

static serving_options defaults(void) {
  const serving_options o = {.traffic = {.seed = 1,
                                         .requests = 96,
                                         .sequences = 32,
                                         .prompt = {16, 256},
                                         .generated = {32, 256},
                                         .chunk = 64,
                                         .prefix = 128,
                                         .prefix_share = 0.5,
                                         .page_tokens = 64},
                             .width = 768,
                             .heads = 12,
                             .threads = 2,
                             .rounds = 5};
  return o;
}

static void make_quick(serving_options *o) {
  o->traffic.requests = 8;
  o->traffic.sequences = 3;
  o->traffic.prompt = (traffic_range){4, 40};
  o->traffic.generated = (traffic_range){2, 12};
  o->traffic.prefix = 20;
  o->traffic.page_tokens = 16;
  o->width = 32;
  o->heads = 4;
  o->rounds = 2;
}

static bool take_integer(const char *text, int64_t low, int64_t high, int64_t *number) {
  char *end = NULL;
  const long long value = strtoll(text, &end, 10);
  *number = value;
  return *text && !*end && value >= low && value <= high;
}

static bool take_range(const char *text, traffic_range *range) {
  char *end = NULL;
  range->low = strtoll(text, &end, 10);
  return *end == ':' && take_integer(end + 1, 1, 1 << 20, &range->high) && range->low >= 1 &&
         range->low <= range->high;
}

static bool take_share(const char *text, double *share) {
  char *end = NULL;
  *share = strtod(text, &end);
  return *text && !*end && *share >= 0.0 && *share <= 1.0;
}

/* Options that are whole numbers. */
static bool take_number(serving_options *o, const char *name, const char *text, bool *good) {
  traffic_options *t = &o->traffic;
  int64_t seed = 0;
  const struct {
    const char *name;
    int64_t *number, low, high;
  } all[] = {{"--sequences", &t->sequences, 1, TRAFFIC_MOST_SEQUENCES},
             {"--requests", &t->requests, 1, 1 << 20},
             {"--chunk", &t->chunk, 1, 1 << 16},
             {"--prefix", &t->prefix, 0, 1 << 20},
             {"--page-tokens", &t->page_tokens, 16, 1 << 20},
             {"--pages", &t->n_pages, 0, 1 << 24},
             {"--width", &o->width, 1, 1 << 16},
             {"--heads", &o->heads, 1, 1 << 10},
             {"--threads", &o->threads, 0, 1024},
             {"--rounds", &o->rounds, 1, MOST_ROUNDS},
             {"--seed", &seed, 0, INT64_MAX}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (strcmp(name, all[i].name) == 0) {
      *good = take_integer(text, all[i].low, all[i].high, all[i].number);
      if (all[i].number == &seed)
        t->seed = (uint64_t)seed;
      return true;
    }
  return false;
}

static bool take(serving_options *o, const char *name, const char *text) {
  bool good = true;
  if (!text)
    return false;
  if (take_number(o, name, text, &good))
    return good;
  if (strcmp(name, "--prompt") == 0)
    return take_range(text, &o->traffic.prompt);
  if (strcmp(name, "--generate") == 0)
    return take_range(text, &o->traffic.generated);
  if (strcmp(name, "--prefix-share") == 0)
    return take_share(text, &o->traffic.prefix_share);
  o->json = text;
  return strcmp(name, "--json") == 0;
}

/* Room for two thirds of what all sequences take if each is as long as one may be. */
static int64_t choose_pages(const traffic_options *t) {
  const int64_t pages = (traffic_longest(t) + t->page_tokens - 1) / t->page_tokens;
  const int64_t wanted = t->sequences * pages * 2 / 3;
  return (wanted > pages ? wanted : pages) + pages;
}

/* Otherwise a sequence might wait for ever. */
static bool require_pages(const traffic_options *t) {
  const int64_t least = traffic_least_pages(t);
  if (t->n_pages < least)
    fprintf(stderr,
            "mha-bench-serving: --pages is %lld; rule: at least %lld, for the prefix and one "
            "sequence of the longest\n",
            (long long)t->n_pages, (long long)least);
  return t->n_pages >= least;
}

static bool parse(int argc, char **argv, serving_options *o) {
  *o = defaults();
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--quick") == 0) {
      make_quick(o);
    } else if (strcmp(argv[i], "--help") == 0) {
      o->help = true;
    } else if (!take(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL)) {
      fprintf(stderr, "mha-bench-serving: %s%s%s; --help lists the options\n", argv[i],
              i + 1 < argc ? " " : "", i + 1 < argc ? argv[i + 1] : "");
      return false;
    } else {
      i++;
    }
  }
  if (o->traffic.n_pages == 0)
    o->traffic.n_pages = choose_pages(&o->traffic);
  return o->help || require_pages(&o->traffic);
}

/* ---- the rounds ---- */

typedef struct measured {
  double seconds[SERVER_WAYS][MOST_ROUNDS];
  server_result results[SERVER_WAYS]; /* of the last round */
} measured;

/* Every way gives the same numbers, within rounding. */
static bool agree(const serving_options *o, const measured *m, int way) {
  const int64_t n = o->traffic.requests * o->width;
  double largest = 0.0;
  double worst = 0.0;
  for (int64_t i = 0; i < n; i++) {
    const double expected = (double)m->results[0].last[i];
    const double off = fabs((double)m->results[way].last[i] - expected);
    largest = fmax(largest, fabs(expected));
    worst = off > worst || isnan(off) ? off : worst;
  }
  if (worst <= 1e-4 * largest && largest > 0.0)
    return true;
  fprintf(stderr, "mha-bench-serving: %s differs from %s by %g of %g\n", ways[way].name,
          ways[0].name, worst, largest);
  return false;
}

static bool measure(const serving_options *o, const server_layer *layer, measured *m) {
  bool good = true;
  for (int64_t round = 0; good && round < o->rounds; round++)
    for (int turn = 0; good && turn < SERVER_WAYS; turn++) {
      const int way = (int)((round + turn) % SERVER_WAYS); /* each round begins with another one */
      free(m->results[way].last);
      good = server_run(layer, &o->traffic, (server_way)way, &m->results[way]);
      m->seconds[way][round] = m->results[way].seconds;
    }
  for (int way = 1; good && way < SERVER_WAYS; way++)
    good = agree(o, m, way);
  return good;
}

/* ---- the report ---- */

static bench_summary tokens_per_second(const serving_options *o, const measured *m, int way) {
  double speeds[MOST_ROUNDS];
  for (int64_t round = 0; round < o->rounds; round++)
    speeds[round] = (double)m->results[way].rows / m->seconds[way][round];
  return bench_summarize(speeds, (int)o->rounds);
}

/* How many times as fast as one by one, round by round. */
static bench_summary ratio(const serving_options *o, const measured *m, int way) {
  double ratios[MOST_ROUNDS];
  for (int64_t round = 0; round < o->rounds; round++)
    ratios[round] = m->seconds[SERVER_ONE_BY_ONE][round] / m->seconds[way][round];
  return bench_summarize(ratios, (int)o->rounds);
}

static void report_head(const serving_options *o) {
  const traffic_options *t = &o->traffic;
  char cpu[128], blas[256], core[64];
  bench_machine_cpu(cpu, sizeof cpu);
  bench_machine_build_info("blas", blas, sizeof blas);
  bench_machine_build_info("blas_core", core, sizeof core);
  printf("%s, %d CPUs. BLAS: %s, core %s.\n", cpu, bench_machine_cpu_count(), blas, core);
  printf(
      "Width %lld, %lld heads, float32, %lld threads. %lld sequences, %lld at a time; prompts of "
      "%lld to %lld tokens in\nchunks of %lld, %lld to %lld generated, log-uniform, seed %llu; "
      "%.0f %% have a common prefix of %lld.\n",
      (long long)o->width, (long long)o->heads, (long long)o->threads, (long long)t->requests,
      (long long)t->sequences, (long long)t->prompt.low, (long long)t->prompt.high,
      (long long)t->chunk, (long long)t->generated.low, (long long)t->generated.high,
      (unsigned long long)t->seed, 100.0 * t->prefix_share, (long long)t->prefix);
}

static void report(const serving_options *o, const server_layer *layer, const measured *m) {
  const traffic_options *t = &o->traffic;
  const server_result *packed = &m->results[SERVER_PACKED];
  printf("\n%-12s %10s %7s %12s %8s %6s\n", "way", "tokens/s", "spread", "generated/s", "x single",
         "iqr");
  for (int way = 0; way < SERVER_WAYS; way++) {
    const bench_summary speed = tokens_per_second(o, m, way);
    const bench_summary times = ratio(o, m, way);
    printf("%-12s %10.0f %6.1f%% %12.0f %8.2f %6.2f\n", ways[way].name, speed.median,
           bench_spread(&speed), speed.median * (double)packed->tokens / (double)packed->rows,
           times.median, times.quartile3 - times.quartile1);
  }
  printf("\n%lld steps, %lld rows, %lld of them generated; %lld waits for pages.\n",
         (long long)packed->steps, (long long)packed->rows, (long long)packed->tokens,
         (long long)packed->waits);
  printf(
      "Pages of %lld tokens: %lld there, %.1f in use in the mean, %lld at most: %.1f MiB; without "
      "pages %.1f MiB.\n",
      (long long)t->page_tokens, (long long)t->n_pages, packed->pages_mean,
      (long long)packed->pages_highest,
      server_bytes(layer, packed->pages_highest * t->page_tokens) / 0x1p20,
      server_bytes(layer, (t->sequences + 1) * traffic_longest(t)) / 0x1p20);
}

static bool report_json(const serving_options *o, const server_layer *layer, const measured *m) {
  FILE *file = fopen(o->json, "w");
  if (!file) {
    perror(o->json);
    return false;
  }
  const traffic_options *t = &o->traffic;
  char core[64];
  bench_machine_build_info("blas_core", core, sizeof core);
  for (int way = 0; way < SERVER_WAYS; way++) {
    const server_result *r = &m->results[way];
    const bench_summary speed = tokens_per_second(o, m, way);
    const bench_summary times = ratio(o, m, way);
    fprintf(file,
            "{\"way\":\"%s\",\"threads\":%lld,\"width\":%lld,\"sequences\":%lld,\"rows\":%lld,"
            "\"generated\":%lld,\"tokens_per_second\":%.6g,\"spread_percent\":%.3g,"
            "\"times_one_by_one\":%.4g,\"iqr\":%.3g,\"pages_highest\":%lld,\"pages_mean\":%.4g,"
            "\"waits\":%lld,"
            "\"page_tokens\":%lld,\"n_pages\":%lld,\"bytes_highest\":%.0f,\"bytes_unpaged\":%.0f,"
            "\"blas_core\":\"%s\"}\n",
            ways[way].name, (long long)o->threads, (long long)o->width,
            (long long)o->traffic.sequences, (long long)r->rows, (long long)r->tokens, speed.median,
            bench_spread(&speed), times.median, times.quartile3 - times.quartile1,
            (long long)r->pages_highest, r->pages_mean, (long long)r->waits,
            (long long)t->page_tokens, (long long)t->n_pages,
            server_bytes(layer, r->pages_highest * t->page_tokens),
            server_bytes(layer, (t->sequences + 1) * traffic_longest(t)), core);
  }
  const bool failed = ferror(file) != 0;
  return fclose(file) == 0 && !failed;
}

int main(int argc, char **argv) {
  static measured m;
  serving_options o;
  server_layer layer;
  if (!parse(argc, argv, &o))
    return 2;
  if (o.help) {
    fputs(help, stdout);
    return 0;
  }
  report_head(&o);
  bool good = server_layer_create(&layer, o.width, o.heads, (int)o.threads, o.traffic.seed) &&
              measure(&o, &layer, &m);
  if (good)
    report(&o, &layer, &m);
  good = good && (!o.json || report_json(&o, &layer, &m));
  for (int way = 0; way < SERVER_WAYS; way++)
    free(m.results[way].last);
  server_layer_destroy(&layer);
  return good ? 0 : 1;
}
