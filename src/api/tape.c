/* Owns mha_tape_create and its like: a tape and the memory that it takes ahead of a call. */
#include "layer/tape.h"
#include "base/error.h"
#include "shape.h"

mha_status mha_tape_create(const mha_allocator *allocator, mha_tape **tape, mha_error *error) {
  mha_tape prepared = {.allocator = mha_memory_allocator(allocator)};
  const mha_status status = mha_require(tape, "tape", error);
  if (status)
    return status;
  *tape = mha_memory_allocate(&prepared.allocator, sizeof **tape);
  if (!*tape)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the tape needs %llu bytes; rule: the allocator must have them",
                    (unsigned long long)sizeof **tape);
  **tape = prepared;
  return mha_succeed(error);
}

void mha_tape_destroy(mha_tape *tape) {
  if (!tape)
    return;
  const mha_allocator allocator = tape->allocator;
  mha_memory_release(&allocator, tape->memory, tape->bytes);
  mha_memory_release(&allocator, tape, sizeof *tape);
}

static mha_status measure(const mha_weights *weights, const mha_shape *shape, size_t *bytes,
                          mha_error *error) {
  mha_shape_asked asked;
  mha_status status = mha_require(weights, "weights", error);
  if (!status)
    status = mha_shape_read(weights, shape, &asked, error);
  if (!status && asked.cached)
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "shape.cached is set; rule: a tape keeps no call with a cache");
  if (status)
    return status;
  const mha_cut_sizes *s = &asked.size.core;
  const mha_kept_size kept = {s->packed ? 1 : s->B, s->B, s->Lq, s->span, s->packed};
  return mha_kept_bytes(weights, &kept, "shape", bytes, error);
}

mha_status mha_tape_bytes(const mha_weights *weights, const mha_shape *shape, size_t *bytes,
                          mha_error *error) {
  size_t needed = 0;
  mha_status status = mha_require(bytes, "bytes", error);
  if (!status)
    status = measure(weights, shape, &needed, error);
  if (status)
    return status;
  *bytes = needed;
  return mha_succeed(error);
}

mha_status mha_tape_reserve(mha_tape *tape, const mha_weights *weights, const mha_shape *shape,
                            mha_error *error) {
  size_t bytes = 0;
  mha_status status = mha_require(tape, "tape", error);
  if (!status)
    status = measure(weights, shape, &bytes, error);
  if (!status)
    status = mha_tape_grow(tape, bytes, error);
  if (status)
    return status;
  tape->layer = 0;
  return mha_succeed(error);
}
