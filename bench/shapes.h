/* The shapes to measure: one self attention layer each. */
#ifndef MHA_BENCH_SHAPES_H
#define MHA_BENCH_SHAPES_H

#include <stdbool.h>
#include <stdint.h>

#define BENCH_MAX_SHAPES 64

/* What is special about a layer's scores. */
typedef enum bench_kind {
  BENCH_PLAIN,
  BENCH_MASK, /* one mask [L][L] for all heads and entries hides an eighth of the keys */
  BENCH_GAPS  /* scores so far apart that exp is often subnormal */
} bench_kind;

typedef struct bench_shape {
  char name[24];    /* letters, digits, '_', '-', '.' */
  int64_t batch;    /* B */
  int64_t length;   /* Lq */
  int64_t past;     /* tokens already in a cache: Lk = past + Lq; above 0 only with Lq = 1,
                       but for --pages */
  int64_t width;    /* Eq = Ek = Ev = Eo */
  int64_t heads;    /* H, d = dv = width / H */
  int64_t kv_heads; /* G; fewer than H only where past is above 0, but for --pages */
  bool causal;
  bench_kind kind; /* other than plain only without past */
} bench_shape;

typedef struct bench_shape_list {
  int n;
  bench_shape shapes[BENCH_MAX_SHAPES];
} bench_shape_list;

/* Appends "name,batch,seq,past,d_model,heads,causal" and perhaps ",kv_heads", otherwise G = H, and
 * behind that ",mask" or ",gaps"; commas, tabs and blanks separate. False after a message on stderr
 * that begins with `origin`. */
bool bench_shapes_add(bench_shape_list *list, const char *text, const char *origin);

/* Appends the lines of a file; empty lines and lines that begin with # are skipped. */
bool bench_shapes_read(bench_shape_list *list, const char *path);

/* Appends the tiny shapes of --quick: each path of the bench, in milliseconds. */
void bench_shapes_add_quick(bench_shape_list *list);

/* Appends the shapes of --pages: prompts into an empty cache, and rows that come to a full one. */
void bench_shapes_add_pages(bench_shape_list *list, bool quick);

/* Keeps the shapes whose names stand in the comma-separated `names`. False after a message if one
 * of the names is no shape. */
bool bench_shapes_select(bench_shape_list *list, const char *names);

/* Columns that projection `which` (0 to 3: query, key, value, output) has: E, G·d, G·d, E. */
int64_t bench_projected_width(const bench_shape *shape, int which);

/* (query, key) pairs that one head of one batch entry must look at. */
double bench_visible_pairs(const bench_shape *shape);

/* Floating-point operations of the four projections, Q·Kᵀ and P·V: two for each multiply-add, only
 * visible pairs counted, softmax and biases not counted. */
double bench_flops(const bench_shape *shape);

#endif
