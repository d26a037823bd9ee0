/* Owns the ways to serve the traffic, all through the public header. */
#include "server.h"

#include "problem.h"
#include "progress.h"
#include "statistics.h"
#include "status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the layer ---- */

static void fill(float *numbers, size_t n, float size, uint64_t *state) {
  for (size_t i = 0; i < n; i++) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    numbers[i] = size * ((float)(*state >> 40) * 0x1p-23F - 1.0F);
  }
}

bool server_layer_create(server_layer *layer, int64_t width, int64_t heads, int threads,
                         uint64_t seed) {
  const size_t square = (size_t)(width * width);
  mha_config config;
  mha_matrices matrices;
  mha_context_options options;
  mha_error error;
  memset(layer, 0, sizeof *layer);
  layer->width = width;
  layer->heads = heads;
  layer->matrices = bench_floats(4 * square);
  layer->tokens = bench_floats((size_t)(SERVER_TOKENS * width));
  if (!layer->matrices || !layer->tokens)
    return false;
  fill(layer->matrices, 4 * square, sqrtf(3.0F / (float)width), &seed);
  fill(layer->tokens, (size_t)(SERVER_TOKENS * width), 1.0F, &seed);
  MHA_INIT(&config);
  config.query_width = width;
  config.n_heads = heads;
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.ownership = MHA_BORROW;
  matrices.query = layer->matrices;
  matrices.key = layer->matrices + square;
  matrices.value = layer->matrices + 2 * square;
  matrices.output = layer->matrices + 3 * square;
  MHA_INIT(&options);
  options.n_threads = threads;
  return bench_is_good(mha_weights_create(&config, &matrices, &layer->weights, &error), &error) &&
         bench_is_good(mha_context_create(&options, &layer->context, &error), &error);
}

void server_layer_destroy(server_layer *layer) {
  mha_context_destroy(layer->context);
  mha_weights_destroy(layer->weights);
  free(layer->matrices);
  free(layer->tokens);
}

double server_bytes(const server_layer *layer, int64_t tokens) {
  return 2.0 * (double)sizeof(float) * (double)(layer->width * tokens);
}

/* ---- a server ---- */

typedef struct server {
  const server_layer *layer;
  const traffic_options *options;
  server_way way;
  mha_cache *cache; /* an entry for each place, and one for the prefix */
  float *input, *output;
  int64_t *starts, *entries, *lengths;
  mha_rules rules;
} server;

static bool make_cache(server *s, mha_error *error) {
  const traffic_options *o = s->options;
  mha_cache_options options;
  MHA_INIT(&options);
  options.weights = s->layer->weights;
  options.n_entries = o->sequences + 1;
  options.capacity = traffic_longest(o);
  if (s->way != SERVER_PADDED) {
    options.page_tokens = o->page_tokens;
    options.n_pages = o->n_pages;
  }
  return bench_is_good(mha_cache_create(&options, &s->cache, error), error);
}

static const float *token_at(const server_layer *layer, int64_t request, int64_t position) {
  return layer->tokens + (request * 131 + position) % SERVER_TOKENS * layer->width;
}

/* n rows of a sequence that has `length` tokens; the prefix is request -1's. */
static void put_rows(const server *s, float *to, int64_t request, int64_t length, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    memcpy(to + i * s->layer->width, token_at(s->layer, request, length + i),
           (size_t)s->layer->width * sizeof *to);
}

static bool call(server *s, const mha_forward_args *args) {
  mha_error error;
  return bench_is_good(mha_forward(s->layer->context, s->layer->weights, args, &error), &error);
}

static mha_forward_args describe(server *s) {
  mha_forward_args args;
  MHA_INIT(&args);
  MHA_INIT(&s->rules);
  s->rules.causal = 1;
  args.query = s->input;
  args.output = s->output;
  args.rules = &s->rules;
  args.cache = s->cache;
  args.cache_entries = s->entries;
  return args;
}

/* The prefix goes into the last entry. */
static bool put_prefix(server *s) {
  const traffic_options *o = s->options;
  mha_forward_args args = describe(s);
  for (int64_t done = 0; done < o->prefix; done += args.query_length) {
    const int64_t left = o->prefix - done;
    args.batch = 1;
    args.query_length = left < o->chunk ? left : o->chunk;
    s->entries[0] = o->sequences;
    put_rows(s, s->input, -1 + SERVER_TOKENS, done, args.query_length);
    if (!call(s, &args))
      return false;
  }
  return true;
}

static bool server_create(server *s, const server_layer *layer, const traffic_options *o,
                          server_way way) {
  const int64_t rows = (o->sequences * o->chunk + 1) * layer->width;
  mha_error error;
  memset(s, 0, sizeof *s);
  s->layer = layer;
  s->options = o;
  s->way = way;
  s->input = bench_floats((size_t)rows);
  s->output = bench_floats((size_t)rows);
  s->starts = bench_zeroed((TRAFFIC_MOST_SEQUENCES + 1) * sizeof *s->starts);
  s->entries = bench_zeroed((TRAFFIC_MOST_SEQUENCES + 1) * sizeof *s->entries);
  s->lengths = bench_zeroed((TRAFFIC_MOST_SEQUENCES + 1) * sizeof *s->lengths);
  return s->input && s->output && s->starts && s->entries && s->lengths && make_cache(s, &error) &&
         put_prefix(s);
}

static void server_destroy(server *s) {
  mha_cache_destroy(s->cache);
  free(s->input);
  free(s->output);
  free(s->starts);
  free(s->entries);
  free(s->lengths);
}

/* ---- a step ---- */

static bool begin_sequences(server *s, const traffic *t) {
  mha_error error;
  for (int64_t i = 0; i < s->options->sequences; i++) {
    const traffic_sequence *q = &t->sequences[i];
    if (q->request < 0 || !q->begins)
      continue;
    const mha_status status = q->has_prefix
                                  ? mha_cache_copy_entry(s->cache, s->options->sequences, i, &error)
                                  : mha_cache_reset(s->cache, i, &error);
    if (!bench_is_good(status, &error))
      return false;
  }
  return true;
}

static bool end_sequences(server *s, const traffic *t) {
  mha_error error;
  for (int64_t i = 0; i < s->options->sequences; i++)
    if (t->sequences[i].request >= 0 && t->sequences[i].ends &&
        !bench_is_good(mha_cache_reset(s->cache, i, &error), &error))
      return false;
  return true;
}

/* Lays the rows out, `pitch` rows for each sequence, 0 = packed; returns the sequences. */
static int64_t lay_out(server *s, const traffic *t, int64_t pitch) {
  int64_t n = 0;
  for (int64_t i = 0; i < s->options->sequences; i++) {
    const traffic_sequence *q = &t->sequences[i];
    if (q->request < 0)
      continue;
    s->entries[n] = i;
    s->lengths[n] = q->rows;
    const int64_t first = pitch ? n * pitch : s->starts[n];
    put_rows(s, s->input + first * s->layer->width, q->request, q->length, q->rows);
    s->starts[n + 1] = s->starts[n] + q->rows;
    n++;
  }
  return n;
}

static int64_t longest_of(const traffic *t) {
  int64_t longest = 0;
  for (int64_t i = 0; i < t->options->sequences; i++)
    if (t->sequences[i].request >= 0 && t->sequences[i].rows > longest)
      longest = t->sequences[i].rows;
  return longest;
}

static bool serve_packed(server *s, int64_t n) {
  mha_forward_args args = describe(s);
  s->rules.query_starts = s->starts;
  args.batch = n;
  args.query_length = s->starts[n];
  return call(s, &args);
}

static bool serve_one_by_one(server *s, int64_t n) {
  mha_forward_args args = describe(s);
  args.batch = 1;
  for (int64_t b = 0; b < n; b++) {
    args.cache_entries = s->entries + b;
    args.query_length = s->lengths[b];
    args.query = s->input + s->starts[b] * s->layer->width;
    args.output = s->output + s->starts[b] * s->layer->width;
    if (!call(s, &args))
      return false;
  }
  return true;
}

static bool serve_padded(server *s, int64_t n, int64_t longest) {
  mha_forward_args args = describe(s);
  args.batch = n;
  args.query_length = longest;
  args.new_lengths = s->lengths;
  return call(s, &args);
}

/* The output of each sequence that ends. */
static void keep_last(const server *s, const traffic *t, int64_t pitch, server_result *r) {
  int64_t n = 0;
  for (int64_t i = 0; i < s->options->sequences; i++) {
    const traffic_sequence *q = &t->sequences[i];
    if (q->request < 0)
      continue;
    const int64_t row = (pitch ? n * pitch : s->starts[n]) + q->rows - 1;
    if (q->ends)
      memcpy(r->last + q->request * s->layer->width, s->output + row * s->layer->width,
             (size_t)s->layer->width * sizeof *r->last);
    n++;
  }
}

static void count_pages(const server *s, server_result *r) {
  int64_t n_free = 0;
  if (mha_cache_page_count(s->cache, 0, NULL, NULL, NULL, &n_free, NULL))
    return;
  const int64_t used = s->options->n_pages - n_free;
  r->pages_mean += (double)used;
  r->pages_highest = used > r->pages_highest ? used : r->pages_highest;
}

static bool serve_step(server *s, const traffic *t, server_result *r) {
  const int64_t longest = longest_of(t);
  const int64_t pitch = s->way == SERVER_PADDED ? longest : 0;
  const int64_t n = lay_out(s, t, pitch);
  const double begin = bench_now();
  const bool good =
      begin_sequences(s, t) && (s->way == SERVER_PACKED   ? serve_packed(s, n)
                                : s->way == SERVER_PADDED ? serve_padded(s, n, longest)
                                                          : serve_one_by_one(s, n));
  r->seconds += bench_now() - begin;
  r->steps++;
  r->rows += t->rows;
  r->tokens += t->tokens;
  if (good)
    keep_last(s, t, pitch, r);
  if (s->way != SERVER_PADDED)
    count_pages(s, r);
  return good && end_sequences(s, t);
}

bool server_run(const server_layer *layer, const traffic_options *options, server_way way,
                server_result *r) {
  server s;
  traffic t;
  memset(r, 0, sizeof *r);
  r->last = bench_zeroed((size_t)(options->requests * layer->width) * sizeof *r->last);
  bool good = r->last && server_create(&s, layer, options, way);
  if (!r->last)
    return false;
  traffic_begin(&t, options);
  while (good && traffic_step(&t)) {
    good = serve_step(&s, &t, r);
    bench_progress("%lld of %lld sequences", (long long)t.finished, (long long)options->requests);
  }
  bench_progress_end();
  r->waits = t.waits;
  if (r->steps > 0)
    r->pages_mean /= (double)r->steps;
  server_destroy(&s);
  return good;
}
