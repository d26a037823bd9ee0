/* Scratch memory and threads of one caller at a time. */
#ifndef MHA_SRC_RUNTIME_CONTEXT_H
#define MHA_SRC_RUNTIME_CONTEXT_H

#include "base/memory.h"
#include "engine/engine.h"
#include "engine/kernels.h"
#include "parallel.h"

#include <stdatomic.h>

struct mha_context {
  atomic_bool busy;
  mha_allocator allocator;
  const mha_engine *engine;
  mha_kernels *kernels; /* of MHA_ENGINE_XSMM, otherwise NULL */
  mha_threads threads;
  char *arena;
  size_t arena_bytes;
  mha_trace_function *trace;
  void *trace_user;
};

/* Enters a context: MHA_ERROR_BUSY if somebody is inside, otherwise the engine begins and the
 * caller must leave. */
mha_status mha_context_enter(mha_context *context, mha_error *error);
void mha_context_leave(mha_context *context);

/* The same without the engine: for whoever changes the context and computes nothing. */
mha_status mha_context_claim(mha_context *context, mha_error *error);
void mha_context_unclaim(mha_context *context);

/* Makes the arena at least this large; what was in it is gone. Between enter and leave, or claim
 * and unclaim. */
mha_status mha_context_grow(mha_context *context, size_t bytes, mha_error *error);

#endif
