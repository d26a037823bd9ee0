/* A server of one layer: one of several ways to serve the traffic. */
#ifndef MHA_BENCH_SERVER_H
#define MHA_BENCH_SERVER_H

#include "mha.h"
#include "traffic.h"

typedef enum server_way {
  SERVER_PACKED,     /* one call for all sequences, packed, over a cache in pages */
  SERVER_ONE_BY_ONE, /* one call for each, over a cache in pages */
  SERVER_PADDED,     /* one call for all, padded to the longest, over a cache without pages */
  SERVER_WAYS
} server_way;

/* A layer with random matrices, and rows that serve as everybody's tokens. */
typedef struct server_layer {
  int64_t width, heads;
  mha_weights *weights;
  mha_context *context;
  float *matrices; /* [4][width][width] */
  float *tokens;   /* [SERVER_TOKENS][width] */
} server_layer;

enum { SERVER_TOKENS = 1024 };

/* False after a message on stderr. Destroy it in either case. */
bool server_layer_create(server_layer *layer, int64_t width, int64_t heads, int threads,
                         uint64_t seed);
void server_layer_destroy(server_layer *layer);

/* What one way through all traffic took and gave. */
typedef struct server_result {
  double seconds; /* in calls of the library */
  int64_t steps, rows, tokens, waits;
  int64_t pages_highest;
  double pages_mean;
  float *last; /* [requests][width]: the output of each sequence's last row; free() it */
} server_result;

/* False after a message on stderr. */
bool server_run(const server_layer *layer, const traffic_options *options, server_way way,
                server_result *result);

/* Bytes of keys and values of so many tokens. */
double server_bytes(const server_layer *layer, int64_t tokens);

#endif
