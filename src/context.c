/* Owns mha_context: who is inside, the scratch, the threads. */
#include "context.h"

#include "arguments.h"
#include "blas.h"
#include "cpus.h"
#include "error.h"
#include "fork.h"
#include "project.h"

/* More threads than this are taken for a mistake. */
#define MAX_THREADS MHA_POOL_MAX_WORKERS

/* ---- life ---- */

/* As many threads as the BLAS was told to use; where it is single-threaded or was told nothing,
 * this process's CPUs. A BLAS that two threads must not enter gets one. */
static int32_t default_threads(void) {
  const mha_blas_threading kind = mha_blas_threading_kind();
  if (kind == MHA_BLAS_THREADS_LOCKED)
    return 1;
  const int32_t n = kind == MHA_BLAS_THREADS_NONE ? 0 : mha_blas_thread_count();
  return n > 0 ? n : mha_cpu_count();
}

static mha_status read_options(mha_context *context, const mha_context_options *given,
                               mha_error *error) {
  mha_context_options options = {.struct_size = sizeof options};
  mha_status status = MHA_OK;
  if (given)
    status = mha_read_struct(&options, sizeof options, MHA_FIRST_CONTEXT_OPTIONS, given, "options",
                             error);
  if (!status)
    status = mha_require_flags(options.flags, MHA_LEAVE_BLAS_ALONE, "options.flags", error);
  if (status)
    return status;
  if (options.n_threads < 0 || options.n_threads > MAX_THREADS)
    return mha_fail(error, MHA_ERROR_VALUE, "options.n_threads is %d; rule: between 0 and %d",
                    (int)options.n_threads, MAX_THREADS);
  context->allocator = mha_memory_allocator(options.allocator);
  context->threads.hold_blas = !(options.flags & MHA_LEAVE_BLAS_ALONE);
  context->threads.n = options.n_threads ? options.n_threads : default_threads();
  if (!context->threads.hold_blas || mha_blas_threading_kind() == MHA_BLAS_THREADS_LOCKED)
    context->threads.n = 1;
  const int64_t most = mha_min(MAX_THREADS, mha_blas_most_callers());
  context->threads.n = (int32_t)mha_min(context->threads.n, most);
  context->threads.parallel_for = options.parallel_for;
  context->threads.user = options.parallel_user;
  return MHA_OK;
}

mha_status mha_context_create(const mha_context_options *options, mha_context **context,
                              mha_error *error) {
  mha_context prepared = {.arena = NULL};
  mha_status status = mha_require(context, "context", error);
  if (status)
    return status;
  *context = NULL;
  status = read_options(&prepared, options, error);
  if (status)
    return status;
  const bool needs_pool = prepared.threads.n > 1;
  mha_context *created = mha_memory_allocate(&prepared.allocator, sizeof *created);
  if (created && needs_pool)
    prepared.threads.pool = mha_pool_create(&prepared.allocator, prepared.threads.n);
  if (!created || (needs_pool && !prepared.threads.pool)) {
    mha_memory_release(&prepared.allocator, created, sizeof *created);
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the context and its %d threads need memory; rule: it must be there",
                    (int)prepared.threads.n);
  }
  mha_fork_watch();
  *created = prepared;
  atomic_init(&created->busy, false);
  *context = created;
  return mha_succeed(error);
}

void mha_context_destroy(mha_context *context) {
  if (!context)
    return;
  const mha_allocator allocator = context->allocator;
  mha_pool_destroy(context->threads.pool);
  mha_memory_release(&allocator, context->arena, context->arena_bytes);
  mha_memory_release(&allocator, context, sizeof *context);
}

/* ---- one caller at a time ---- */

static mha_status claim(mha_context *context, mha_error *error) {
  const mha_status status = mha_require(context, "context", error);
  if (status)
    return status;
  if (atomic_exchange(&context->busy, true))
    return mha_fail(error, MHA_ERROR_BUSY,
                    "context is inside another call; rule: one caller at a time, and none from a "
                    "callback");
  return MHA_OK;
}

static void unclaim(mha_context *context) {
  atomic_store(&context->busy, false);
}

mha_status mha_context_enter(mha_context *context, mha_error *error) {
  const mha_status status = claim(context, error);
  if (!status && context->threads.hold_blas)
    mha_blas_guard_enter();
  return status;
}

void mha_context_leave(mha_context *context) {
  if (context->threads.hold_blas)
    mha_blas_guard_leave();
  unclaim(context);
}

mha_status mha_context_trace(mha_context *context, mha_trace_function *function, void *user,
                             mha_error *error) {
  const mha_status status = claim(context, error);
  if (status)
    return status;
  context->trace = function;
  context->trace_user = user;
  unclaim(context);
  return mha_succeed(error);
}

/* ---- scratch ---- */

/* Offsets of the workspace's arrays; the order is that of the struct. */
typedef struct plan {
  mha_layout layout;
  size_t q, k, v, concat, partial, row_max, row_sum, parts, workers, worker_bytes;
} plan;

static size_t add_rows(mha_layout *layout, const mha_projection *projection, int64_t B, int64_t L) {
  return mha_layout_add(layout, sizeof(float), B, L, projection->out);
}

static plan make_plan(const mha_weights *weights, const mha_call_size *size, int32_t n_threads) {
  plan p = {.layout = {0}};
  const mha_cut_sizes *s = &size->core;
  const int64_t entries = s->packed ? 1 : s->B;
  int64_t tasks = 0;
  int64_t parts = 0;
  if (weights) {
    p.q = add_rows(&p.layout, &weights->query, entries, s->Lq);
    p.k = add_rows(&p.layout, &weights->key, entries, size->key_rows);
    p.v = add_rows(&p.layout, &weights->value, entries, size->key_rows);
    /* the concatenation is as wide as the output projection's input */
    p.concat = mha_layout_add(&p.layout, sizeof(float), entries, s->Lq, weights->output.in);
    const int64_t inputs = mha_partial_floats(&weights->query) + mha_partial_floats(&weights->key) +
                           mha_partial_floats(&weights->value);
    p.partial = mha_layout_add(&p.layout, sizeof(float),
                               mha_max(inputs, mha_partial_floats(&weights->output)), 1, 1);
  }
  p.row_max = mha_layout_add(&p.layout, sizeof(float), entries, s->H, s->Lq);
  p.row_sum = mha_layout_add(&p.layout, sizeof(float), entries, s->H, s->Lq);
  mha_layout worker = {0};
  p.worker_bytes = mha_attention_scratch_bytes(s, &worker);
  p.layout.overflow |= worker.overflow || !mha_attention_task_limit(s, &tasks) ||
                       !mha_attention_parts_floats(s, &parts);
  p.parts = mha_layout_add(&p.layout, sizeof(float), parts, 1, 1);
  p.workers = mha_layout_add(&p.layout, 1, tasks < n_threads ? tasks : n_threads,
                             (int64_t)p.worker_bytes, 1);
  if (p.layout.bytes == 0) /* rows that go to a cache need none; arrays of no bytes lie somewhere */
    (void)mha_layout_add(&p.layout, 1, 1, 1, 1);
  return p;
}

static mha_status overflow(const mha_call_size *s, mha_error *error) {
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s is %lld, %s %lld, %s %lld; rule: their products with the heads and widths "
                  "must not overflow",
                  s->names.batch, (long long)s->core.B, s->names.query_length,
                  (long long)s->core.Lq, s->names.key_length, (long long)s->core.span);
}

/* Makes the arena at least this large. */
static mha_status grow(mha_context *context, size_t bytes, mha_error *error) {
  if (bytes <= context->arena_bytes)
    return MHA_OK;
  char *larger = mha_memory_allocate(&context->allocator, bytes);
  if (!larger)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the scratch needs %zu bytes; rule: they must be there", bytes);
  mha_memory_release(&context->allocator, context->arena, context->arena_bytes);
  context->arena = larger;
  context->arena_bytes = bytes;
  return MHA_OK;
}

mha_status mha_context_workspace(mha_context *context, const mha_weights *weights,
                                 const mha_call_size *size, mha_workspace *w, mha_error *error) {
  const plan p = make_plan(weights, size, context->threads.n);
  if (p.layout.overflow)
    return overflow(size, error);
  const mha_status status = grow(context, p.layout.bytes, error);
  if (status)
    return status;
  w->q = w->k = w->v = w->concat = w->partial = NULL;
  w->parts = (float *)(void *)(context->arena + p.parts);
  if (weights) {
    w->q = (float *)(void *)(context->arena + p.q);
    w->k = (float *)(void *)(context->arena + p.k);
    w->v = (float *)(void *)(context->arena + p.v);
    w->concat = (float *)(void *)(context->arena + p.concat);
    w->partial = (float *)(void *)(context->arena + p.partial);
  }
  w->row_max = (float *)(void *)(context->arena + p.row_max);
  w->row_sum = (float *)(void *)(context->arena + p.row_sum);
  w->workers = context->arena + p.workers;
  w->worker_bytes = p.worker_bytes;
  return MHA_OK;
}

/* ---- asking for scratch ahead of a call ---- */

static mha_status read_shape(const mha_weights *weights, const mha_shape *given,
                             mha_call_size *size, mha_error *error) {
  mha_shape shape;
  mha_status status = mha_read_struct(&shape, sizeof shape, MHA_FIRST_SHAPE, given, "shape", error);
  if (!status)
    status = mha_require_at_least(shape.batch, 0, "shape.batch", error);
  if (!status)
    status = mha_require_at_least(shape.query_length, 0, "shape.query_length", error);
  if (!status)
    status = mha_require_at_least(shape.key_length, 0, "shape.key_length", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.n_heads, 1, "shape.n_heads", error);
  if (!status && !weights)
    status = mha_require_at_least(shape.value_head_size, 1, "shape.value_head_size", error);
  if (status)
    return status;
  const mha_size_names names = {"shape.batch", "shape.query_length", "shape.key_length"};
  mha_cut_sizes *s = &size->core;
  size->names = names;
  s->B = shape.batch;
  s->Lq = shape.query_length;
  s->span = shape.key_length ? shape.key_length : shape.query_length;
  s->H = weights ? weights->config.n_heads : shape.n_heads;
  s->dv = weights ? weights->config.value_head_size : shape.value_head_size;
  s->G = s->H; /* scratch depends on neither */
  s->d = s->dv;
  s->packed = shape.packed != 0;
  s->windowed = true; /* the more parts */
  /* a call may bring more rows of its own than queries */
  size->key_rows = shape.cached ? mha_gathered_rows(s->B, INT64_MAX) : s->span;
  return MHA_OK;
}

/* What calls up to a shape need. A call of fewer queries, cut as one of few, may need more. */
static mha_status plan_shape(const mha_context *context, const mha_weights *weights,
                             const mha_shape *shape, size_t *bytes, mha_error *error) {
  mha_call_size size;
  const mha_status status = read_shape(weights, shape, &size, error);
  if (status)
    return status;
  const plan whole = make_plan(weights, &size, context->threads.n);
  mha_call_size few_size = size;
  few_size.core.Lq = mha_cut_most_few(size.core.Lq, size.core.span);
  const plan few = make_plan(weights, &few_size, context->threads.n);
  if (whole.layout.overflow || few.layout.overflow)
    return overflow(&size, error);
  *bytes = whole.layout.bytes > few.layout.bytes ? whole.layout.bytes : few.layout.bytes;
  return MHA_OK;
}

mha_status mha_workspace_bytes(const mha_context *context, const mha_weights *weights,
                               const mha_shape *shape, size_t *bytes, mha_error *error) {
  size_t needed = 0;
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(bytes, "bytes", error);
  if (!status)
    status = plan_shape(context, weights, shape, &needed, error);
  if (status)
    return status;
  *bytes = needed;
  return mha_succeed(error);
}

mha_status mha_context_reserve(mha_context *context, const mha_weights *weights,
                               const mha_shape *shape, mha_error *error) {
  size_t bytes = 0;
  mha_status status = claim(context, error);
  if (status)
    return status;
  status = plan_shape(context, weights, shape, &bytes, error);
  if (!status)
    status = grow(context, bytes, error);
  if (!status && context->threads.pool && !context->threads.parallel_for)
    mha_pool_start(context->threads.pool, context->threads.n);
  unclaim(context);
  return status ? status : mha_succeed(error);
}
