/* Loading and unloading. The program is not linked with the library: it loads it like a plugin,
 * computes on several threads and lets go of it, with objects that are still there or without. */
#define _GNU_SOURCE 1 /* usleep */
#include "mha.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { LENGTH = 256, WIDTH = 256, HEADS = 4 };

static float w[WIDTH * WIDTH], x[LENGTH * WIDTH], first[LENGTH * WIDTH], y[LENGTH * WIDTH];

typedef struct library {
  void *handle;
  void (*struct_init)(void *, size_t);
  void (*config_init)(mha_config *, size_t, int64_t, int64_t);
  mha_status (*weights_create)(const mha_config *, const mha_matrices *, mha_weights **,
                               mha_error *);
  void (*weights_destroy)(mha_weights *);
  mha_status (*context_create)(const mha_context_options *, mha_context **, mha_error *);
  void (*context_destroy)(mha_context *);
  mha_status (*self_attention)(mha_context *, const mha_weights *, const float *, int64_t, int64_t,
                               float *, mha_error *);
} library;

static void find(library *l, const char *name, void *function, size_t bytes) {
  void *symbol = dlsym(l->handle, name);
  assert_non_null(symbol);
  memcpy(function, &symbol, bytes);
}

static void load(library *l) {
  l->handle = dlopen(MHA_SHARED_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (!l->handle)
    fail_msg("%s", dlerror());
  find(l, "mha_struct_init", &l->struct_init, sizeof l->struct_init);
  find(l, "mha_config_init_sized", &l->config_init, sizeof l->config_init);
  find(l, "mha_weights_create", &l->weights_create, sizeof l->weights_create);
  find(l, "mha_weights_destroy", &l->weights_destroy, sizeof l->weights_destroy);
  find(l, "mha_context_create", &l->context_create, sizeof l->context_create);
  find(l, "mha_context_destroy", &l->context_destroy, sizeof l->context_destroy);
  find(l, "mha_self_attention", &l->self_attention, sizeof l->self_attention);
}

static mha_weights *make_layer(library *l) {
  mha_config config;
  mha_matrices matrices;
  mha_weights *weights = NULL;
  l->config_init(&config, sizeof config, WIDTH, HEADS);
  l->struct_init(&matrices, sizeof matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = matrices.key = matrices.value = matrices.output = w;
  assert_int_equal(l->weights_create(&config, &matrices, &weights, NULL), MHA_OK);
  return weights;
}

static mha_context *make_context(library *l, int32_t threads) {
  mha_context_options options;
  mha_context *context = NULL;
  l->struct_init(&options, sizeof options);
  options.n_threads = threads;
  assert_int_equal(l->context_create(&options, &context, NULL), MHA_OK);
  return context;
}

static int set_up(void **state) {
  (void)state;
  for (int i = 0; i < WIDTH * WIDTH; i++)
    w[i] = (float)(i * 37 % 101 - 50) / 800.0f;
  for (int i = 0; i < LENGTH * WIDTH; i++)
    x[i] = (float)(i * 53 % 97 - 48) / 48.0f;
  return 0;
}

/* What nobody destroys stays in reach, so that it counts as no leak. */
static void *left[8];

/* Loaded, used and unloaded again and again, all objects destroyed or none. */
static void use(bool destroy, int rounds) {
  for (int round = 0; round < rounds; round++) {
    library l;
    load(&l);
    mha_weights *weights = make_layer(&l);
    mha_context *context = make_context(&l, 3);
    float *output = round == 0 ? first : y;
    assert_int_equal(l.self_attention(context, weights, x, 1, LENGTH, output, NULL), MHA_OK);
    if (round > 0)
      assert_memory_equal(y, first, sizeof y);
    if (destroy) {
      l.context_destroy(context);
      l.weights_destroy(weights);
    } else {
      left[2 * round] = context;
      left[2 * round + 1] = weights;
    }
    assert_int_equal(dlclose(l.handle), 0);
  }
  (void)usleep(20000); /* threads that are still there come to run */
}

static void everything_is_destroyed_first(void **state) {
  (void)state;
  use(true, 20);
}

/* Threads of a context that is still there sleep in code of the library. */
static void a_context_is_left_behind(void **state) {
  (void)state;
  use(false, 3);
}

/* A thread that called the library ends after it was let go of. */
typedef struct visitor {
  library *l;
  mha_weights *weights;
  pthread_barrier_t called, closed;
  mha_status status;
} visitor;

static void *visit(void *user) {
  visitor *v = user;
  static float output[LENGTH * WIDTH];
  mha_context *context = make_context(v->l, 2);
  v->status = v->l->self_attention(context, v->weights, x, 1, LENGTH, output, NULL);
  v->l->context_destroy(context);
  (void)pthread_barrier_wait(&v->called);
  (void)pthread_barrier_wait(&v->closed);
  return NULL;
}

static void a_thread_ends_afterwards(void **state) {
  (void)state;
  for (int round = 0; round < 20; round++) {
    library l;
    load(&l);
    visitor v = {.l = &l, .weights = make_layer(&l)};
    pthread_t thread;
    assert_int_equal(pthread_barrier_init(&v.called, NULL, 2), 0);
    assert_int_equal(pthread_barrier_init(&v.closed, NULL, 2), 0);
    assert_int_equal(pthread_create(&thread, NULL, visit, &v), 0);
    (void)pthread_barrier_wait(&v.called);
    l.weights_destroy(v.weights);
    assert_int_equal(v.status, MHA_OK);
    assert_int_equal(dlclose(l.handle), 0);
    (void)pthread_barrier_wait(&v.closed);
    assert_int_equal(pthread_join(thread, NULL), 0);
    (void)pthread_barrier_destroy(&v.called);
    (void)pthread_barrier_destroy(&v.closed);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(everything_is_destroyed_first),
      cmocka_unit_test(a_thread_ends_afterwards),
      cmocka_unit_test(a_context_is_left_behind),
  };
  return cmocka_run_group_tests(tests, set_up, NULL);
}
