/* Owns the command line. */
#include "options.h"

#include "blas_threads.h"
#include "machine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool refuse(const char *option, const char *value, const char *rule) {
  fprintf(stderr, "mha-bench: %s is '%s'; rule: %s\n", option, value, rule);
  return false;
}

static bool parse_integer(const char *text, long smallest, long largest, int *number) {
  char *end = NULL;
  const long value = strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < smallest || value > largest)
    return false;
  *number = (int)value;
  return true;
}

static bool take_rounds(bench_options *options, const char *value) {
  return parse_integer(value, 1, BENCH_MAX_ROUNDS, &options->rounds) ||
         refuse("--rounds", value, "a whole number from 1 to 1000");
}

static bool take_seconds(bench_options *options, const char *value) {
  char *end = NULL;
  options->seconds = strtod(value, &end);
  return (end != value && *end == '\0' && isfinite(options->seconds) && options->seconds >= 0) ||
         refuse("--seconds", value, "a number of at least 0");
}

static bool has_threads(const bench_options *options, int n) {
  for (int i = 0; i < options->n_threads; i++)
    if (options->threads[i] == n)
      return true;
  return false;
}

static bool take_threads(bench_options *options, const char *value) {
  char copy[128];
  options->n_threads = 0;
  if (strlen(value) >= sizeof copy)
    return refuse("--threads", value, "at most eight counts");
  memcpy(copy, value, strlen(value) + 1);
  for (char *word = strtok(copy, ","); word; word = strtok(NULL, ",")) {
    int n = bench_all_threads();
    if (strcmp(word, "all") != 0 && !parse_integer(word, 1, 1024, &n))
      return refuse("--threads", value, "counts from 1 to 1024, or all, with commas between");
    if (has_threads(options, n))
      continue; /* 1,all on a machine with one CPU */
    if (options->n_threads == BENCH_MAX_THREADS)
      return refuse("--threads", value, "at most eight counts");
    options->threads[options->n_threads++] = n;
  }
  return options->n_threads > 0 || refuse("--threads", value, "at least one count");
}

static bool take_shape(bench_options *options, const char *value) {
  return bench_shapes_add(&options->list, value, "--shape");
}

static bool take_shapes(bench_options *options, const char *value) {
  return bench_shapes_read(&options->list, value);
}

static bool take_engines(bench_options *options, const char *value) {
  static const char *const known[] = {"naive", "composed", "libmha", "xsmm"};
  char copy[128];
  if (strlen(value) >= sizeof copy)
    return refuse("--engines", value, "naive, composed, libmha and xsmm, with commas between");
  memcpy(copy, value, strlen(value) + 1);
  for (char *word = strtok(copy, ","); word; word = strtok(NULL, ",")) {
    bool found = false;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
      found = found || strcmp(word, known[i]) == 0;
    if (!found)
      return refuse("--engines", value, "naive, composed, libmha and xsmm, with commas between");
  }
  options->engines = value;
  return true;
}

static bool take_orientation(bench_options *options, const char *value) {
  options->out_in = strcmp(value, "out-in") == 0;
  return options->out_in || strcmp(value, "in-out") == 0 ||
         refuse("--orientation", value, "in-out or out-in");
}

static bool take_types(bench_options *options, const char *value) {
  char copy[128];
  if (strlen(value) >= sizeof copy)
    return refuse("--types", value, "at most seven types");
  memcpy(copy, value, strlen(value) + 1);
  for (char *word = strtok(copy, ","); word; word = strtok(NULL, ","))
    if (strcmp(word, "f32") != 0 && !bench_types_add(&options->types, word))
      return refuse("--types", value,
                    "at most seven of f32, f16, bf16, q8_0, q4_0, or two of them as "
                    "MATRICES/CACHE, each once");
  return true;
}

static bool take_json(bench_options *options, const char *value) {
  options->json = value;
  return true;
}

static const char *only;

static bool take_only(bench_options *options, const char *value) {
  (void)options;
  only = value; /* obeyed when all shapes are known */
  return true;
}

static const struct {
  const char *name;
  bool (*take)(bench_options *options, const char *value);
} valued[] = {
    {"--rounds", take_rounds}, {"--seconds", take_seconds}, {"--threads", take_threads},
    {"--shape", take_shape},   {"--shapes", take_shapes},   {"--engines", take_engines},
    {"--json", take_json},     {"--only", take_only},       {"--orientation", take_orientation},
    {"--types", take_types},
};

/* The value stands after '=' or is the next word. */
static bool take_valued(bench_options *options, char **argv, int *index, bool *known) {
  const char *word = argv[*index];
  const size_t length = strcspn(word, "=");
  *known = false;
  for (size_t i = 0; i < sizeof valued / sizeof valued[0]; i++) {
    if (strlen(valued[i].name) != length || strncmp(valued[i].name, word, length) != 0)
      continue;
    *known = true;
    const char *value = word[length] == '=' ? word + length + 1 : argv[*index + 1];
    if (!value)
      return refuse(valued[i].name, "", "a value must follow");
    *index += word[length] == '=' ? 0 : 1;
    return valued[i].take(options, value);
  }
  return true;
}

/* Several times the last cache, and never less than what was enough for most machines. */
static size_t rotation_bytes(void) {
  const size_t least = (size_t)256 << 20;
  const size_t wanted = 4 * bench_machine_cache_bytes();
  return wanted > least ? wanted : least;
}

static void set_defaults(bench_options *options) {
  memset(options, 0, sizeof *options);
  (void)bench_types_add(&options->types, "f32");
  options->rounds = 25;
  options->seconds = 12;
  options->turn_seconds = 0.05;
  options->pause_seconds = 0.06;
  options->yardstick = 1024;
  options->naive_flops = 1e9;
  options->rotation_bytes = rotation_bytes();
}

/* Everything as in a full run, but too small to say anything about speed. */
static void set_quick(bench_options *options) {
  options->rounds = 3;
  options->seconds = 0;
  options->turn_seconds = 0.0005;
  options->pause_seconds = 0;
  options->yardstick = 128;
  options->naive_flops = 1e6;
  options->rotation_bytes = (size_t)1 << 20;
}

/* No gradient passes through a cache, and where a query has a single key its weight is 1 whatever
 * the score is: the gradients of queries and keys are 0, and nothing but rounding could be
 * compared.
 */
static void keep_trainable(bench_shape_list *list) {
  int n = 0;
  for (int i = 0; i < list->n; i++)
    if (list->shapes[i].past == 0 && list->shapes[i].length > 1)
      list->shapes[n++] = list->shapes[i];
  list->n = n;
}

/* What goes with --backward, whose table compares two engines in one type. */
static bool complete_backward(bench_options *options) {
  if (options->engines &&
      (bench_options_wants(options, "naive") || bench_options_wants(options, "xsmm")))
    return refuse("--engines", options->engines, "composed and libmha where --backward stands");
  if (options->types.n > 1)
    return refuse("--types", options->types.types[1].name, "f32 alone where --backward stands");
  if (options->disturb)
    return refuse("--disturb", "given", "not where --backward stands");
  keep_trainable(&options->list);
  return options->list.n > 0 || refuse("--backward", "given", "at least one shape of several rows");
}

/* What goes with --pages, which measures libmha alone. */
static bool complete_pages(const bench_options *options) {
  if (options->engines)
    return refuse("--engines", options->engines, "not where --pages stands");
  if (options->backward)
    return refuse("--backward", "given", "not where --pages stands");
  return !options->disturb || refuse("--disturb", "given", "not where --pages stands");
}

/* A check of the whole list: what options leave open, and --only last. */
static bool complete(bench_options *options, bool quick) {
  bool good = true;
  if (options->pages && options->list.n == 0)
    bench_shapes_add_pages(&options->list, quick);
  else if (quick && options->list.n == 0)
    bench_shapes_add_quick(&options->list);
  else if (options->list.n == 0)
    good = bench_shapes_read(&options->list, MHA_BENCH_SHAPES);
  if (good && options->n_threads == 0)
    good = take_threads(options, "1,all");
  return good && (!only || bench_shapes_select(&options->list, only)) &&
         (!options->pages || complete_pages(options)) &&
         (!options->backward || complete_backward(options));
}

static bool take_flag(bench_options *options, const char *word) {
  const bool disturb = strcmp(word, "--disturb") == 0;
  const bool one_set = strcmp(word, "--one-set") == 0;
  const bool backward = strcmp(word, "--backward") == 0;
  const bool pages = strcmp(word, "--pages") == 0;
  options->disturb = options->disturb || disturb;
  options->backward = options->backward || backward;
  options->pages = options->pages || pages;
  if (one_set)
    options->rotation_bytes = 0;
  return disturb || one_set || backward || pages;
}

bool bench_options_parse(int argc, char **argv, bench_options *options) {
  bool quick = false;
  set_defaults(options);
  for (int i = 1; i < argc; i++) /* first, so that other options can refine it */
    quick = quick || strcmp(argv[i], "--quick") == 0;
  if (quick)
    set_quick(options);
  for (int i = 1; i < argc; i++) {
    bool known = strcmp(argv[i], "--quick") == 0;
    options->help = options->help || strcmp(argv[i], "--help") == 0;
    if (known || options->help || take_flag(options, argv[i]))
      continue;
    if (!take_valued(options, argv, &i, &known))
      return false;
    if (!known)
      return refuse("an argument", argv[i], "one of those that --help lists");
  }
  return options->help || complete(options, quick);
}

void bench_options_help(void) {
  puts(
      "mha-bench: libmha beside naive loops and plain BLAS calls, in turns, in one run\n"
      "\n"
      "  --shapes FILE       shapes to measure, one a line: name batch seq past d_model heads\n"
      "                      causal [kv_heads [mask|gaps]]; default " MHA_BENCH_SHAPES "\n"
      "  --shape N,B,L,P,E,H,C[,G[,K]]  one shape more (alone: only it), fields as above\n"
      "  --only NAMES        of these shapes only NAMES, with commas between\n"
      "  --engines LIST      of naive, composed, libmha, xsmm; default all\n"
      "  --threads LIST      thread counts, all being the BLAS's; default 1,all\n"
      "  --rounds N          at most N rounds per shape; default 25\n"
      "  --seconds S         no new round after S seconds per shape, but at least three rounds\n"
      "                      (fewer only by --rounds); default 12\n"
      "  --orientation O     how the matrices lie: in-out (default) or out-in\n"
      "  --types LIST        also rows of libmha with numbers stored as f16, bf16, q8_0, q4_0, or\n"
      "                      as MATRICES/CACHE, such as f32/bf16\n"
      "  --one-set           use one set of weights again and again, also for single rows\n"
      "  --disturb           measure libmha and xsmm also while another process spins on one CPU\n"
      "  --backward          the way back: gradients of everything by composed and libmha, beside\n"
      "                      their forward passes; another table, of the shapes of several rows\n"
      "  --pages             caches with and without pages: prompts into an empty cache, rows that "
      "come\n"
      "                      to a full one; another table, and shapes of its own\n"
      "  --json FILE         also write JSON lines\n"
      "  --quick             tiny shapes, a second in all: a test of the bench, no measurement\n"
      "\n"
      "Exit status: 0, 1 if engines disagree or something fails, 2 for a bad command line.");
}

bool bench_options_wants(const bench_options *options, const char *engine) {
  if (!options->engines)
    return true;
  const size_t length = strlen(engine);
  const char *at = options->engines;
  while ((at = strstr(at, engine)) != NULL) {
    const bool begins = at == options->engines || at[-1] == ',';
    if (begins && (at[length] == ',' || at[length] == '\0'))
      return true;
    at += length;
  }
  return false;
}
