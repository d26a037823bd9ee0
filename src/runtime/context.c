/* Owns mha_context: who is inside, the scratch, the threads. */
#include "context.h"

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/error.h"
#include "cpus.h"
#include "engine/blas.h"
#include "engine/blas_threads.h"
#include "fork.h"

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

#ifndef MHA_DEFAULT_ENGINE /* a build of the tests has another, where it can be had */
#define MHA_DEFAULT_ENGINE MHA_ENGINE_BLAS
#endif

static mha_status check_engine(int32_t engine, mha_error *error) {
  if (engine != MHA_ENGINE_BLAS && engine != MHA_ENGINE_XSMM)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "options.engine is %d; rule: MHA_ENGINE_BLAS or MHA_ENGINE_XSMM", (int)engine);
  if (engine == MHA_ENGINE_XSMM && mha_kernels_missing())
    return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                    "options.engine is MHA_ENGINE_XSMM, but %s; rule: only where mha_build_info "
                    "names it",
                    mha_kernels_missing());
  return MHA_OK;
}

static mha_status read_options(mha_context *context, const mha_context_options *given,
                               bool *needs_kernels, mha_error *error) {
  mha_context_options options = {.struct_size = sizeof options};
  mha_status status = MHA_OK;
  if (given)
    status = mha_read_struct(&options, sizeof options, MHA_FIRST_CONTEXT_OPTIONS, given, "options",
                             error);
  if (!status)
    status = mha_require_flags(options.flags, MHA_LEAVE_BLAS_ALONE, "options.flags", error);
  if (!status)
    status = mha_require_reserved(options.reserved, "options.reserved", error);
  if (options.engine == 0 && !mha_kernels_missing())
    options.engine = MHA_DEFAULT_ENGINE;
  if (!status)
    status = check_engine(options.engine, error);
  if (status)
    return status;
  if (options.n_threads < 0 || options.n_threads > MAX_THREADS)
    return mha_fail(error, MHA_ERROR_VALUE, "options.n_threads is %d; rule: between 0 and %d",
                    (int)options.n_threads, MAX_THREADS);
  context->allocator = mha_memory_allocator(options.allocator);
  context->engine = &mha_engine_blas;
  *needs_kernels = options.engine == MHA_ENGINE_XSMM;
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
  bool needs_kernels = false;
  mha_status status = mha_require(context, "context", error);
  if (status)
    return status;
  *context = NULL;
  status = read_options(&prepared, options, &needs_kernels, error);
  if (status)
    return status;
  const bool needs_pool = prepared.threads.n > 1;
  mha_context *created = mha_memory_allocate(&prepared.allocator, sizeof *created);
  if (created && needs_pool)
    prepared.threads.pool = mha_pool_create(&prepared.allocator, prepared.threads.n);
  if (created && needs_kernels)
    prepared.kernels = mha_kernels_create(&prepared.allocator);
  if (!created || (needs_pool && !prepared.threads.pool) || (needs_kernels && !prepared.kernels)) {
    mha_pool_destroy(prepared.threads.pool);
    mha_kernels_destroy(prepared.kernels);
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
  mha_kernels_destroy(context->kernels);
  mha_memory_release(&allocator, context->arena, context->arena_bytes);
  mha_memory_release(&allocator, context, sizeof *context);
}

/* ---- one caller at a time ---- */

mha_status mha_context_claim(mha_context *context, mha_error *error) {
  const mha_status status = mha_require(context, "context", error);
  if (status)
    return status;
  if (atomic_exchange(&context->busy, true))
    return mha_fail(error, MHA_ERROR_BUSY,
                    "context is inside another call; rule: one caller at a time, and none from a "
                    "callback");
  return MHA_OK;
}

void mha_context_unclaim(mha_context *context) {
  atomic_store(&context->busy, false);
}

mha_status mha_context_enter(mha_context *context, mha_error *error) {
  const mha_status status = mha_context_claim(context, error);
  if (!status && context->threads.hold_blas)
    context->engine->begin();
  return status;
}

void mha_context_leave(mha_context *context) {
  if (context->threads.hold_blas)
    context->engine->end();
  mha_context_unclaim(context);
}

mha_status mha_context_trace(mha_context *context, mha_trace_function *function, void *user,
                             mha_error *error) {
  const mha_status status = mha_context_claim(context, error);
  if (status)
    return status;
  context->trace = function;
  context->trace_user = user;
  mha_context_unclaim(context);
  return mha_succeed(error);
}

/* ---- scratch ---- */

mha_status mha_context_grow(mha_context *context, size_t bytes, mha_error *error) {
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
