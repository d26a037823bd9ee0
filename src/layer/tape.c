/* Owns the tape: memory of the caller's for what a layer call keeps, and whose call it was. */
#include "tape.h"

#include "base/error.h"

static size_t add_rows(mha_layout *layout, int64_t entries, int64_t length, int64_t width) {
  return mha_layout_add(layout, sizeof(float), entries, length, width);
}

mha_kept_offsets mha_kept_plan(const mha_weights *w, const mha_kept_size *s, mha_layout *layout) {
  const int64_t raw = w->config.norm == MHA_NORM_NONE ? 0 : s->entries;
  const int64_t H = w->config.n_heads;
  mha_kept_offsets at;
  at.q = add_rows(layout, s->entries, s->Lq, w->query.out);
  at.k = add_rows(layout, s->entries, s->Lk, w->key.out);
  at.v = add_rows(layout, s->entries, s->Lk, w->value.out);
  at.raw_q = add_rows(layout, raw, s->Lq, w->query.out);
  at.raw_k = add_rows(layout, raw, s->Lk, w->key.out);
  at.concat = add_rows(layout, s->entries, s->Lq, w->output.in);
  at.row_max = add_rows(layout, s->entries, s->Lq, H);
  at.row_sum = add_rows(layout, s->entries, s->Lq, H);
  return at;
}

static float *floats_at(char *memory, size_t offset) {
  return (float *)(void *)(memory + offset);
}

mha_kept mha_kept_at(char *memory, const mha_kept_offsets *at, const mha_weights *w) {
  const bool raw = w->config.norm != MHA_NORM_NONE;
  const mha_kept kept = {.q = floats_at(memory, at->q),
                         .k = floats_at(memory, at->k),
                         .v = floats_at(memory, at->v),
                         .raw_q = raw ? floats_at(memory, at->raw_q) : NULL,
                         .raw_k = raw ? floats_at(memory, at->raw_k) : NULL,
                         .concat = floats_at(memory, at->concat),
                         .row_max = floats_at(memory, at->row_max),
                         .row_sum = floats_at(memory, at->row_sum)};
  return kept;
}

mha_status mha_tape_grow(mha_tape *tape, size_t bytes, mha_error *error) {
  if (bytes <= tape->bytes)
    return MHA_OK;
  char *memory = mha_memory_allocate(&tape->allocator, bytes);
  if (!memory)
    return mha_fail(error, MHA_ERROR_MEMORY,
                    "the tape needs %llu bytes; rule: the allocator must have them",
                    (unsigned long long)bytes);
  mha_memory_release(&tape->allocator, tape->memory, tape->bytes);
  tape->memory = memory;
  tape->bytes = bytes;
  tape->layer = 0;
  return MHA_OK;
}

mha_status mha_kept_bytes(const mha_weights *weights, const mha_kept_size *size, const char *name,
                          size_t *bytes, mha_error *error) {
  mha_layout layout = {0};
  (void)mha_kept_plan(weights, size, &layout);
  *bytes = layout.bytes;
  if (!layout.overflow)
    return MHA_OK;
  return mha_fail(error, MHA_ERROR_OVERFLOW,
                  "%s has %lld entries of %lld queries and %lld keys; rule: what the tape keeps of "
                  "them must not overflow",
                  name, (long long)size->entries, (long long)size->Lq, (long long)size->Lk);
}

mha_status mha_tape_open(mha_tape *tape, const mha_weights *weights, const mha_kept_size *size,
                         mha_error *error) {
  mha_layout layout = {0};
  size_t bytes = 0;
  mha_status status = mha_kept_bytes(weights, size, "args", &bytes, error);
  if (status)
    return status;
  tape->layer = 0; /* whatever becomes of the call */
  status = mha_tape_grow(tape, bytes, error);
  if (status)
    return status;
  const mha_kept_offsets at = mha_kept_plan(weights, size, &layout);
  tape->size = *size;
  /* a call without rows has no memory, but arrays of no bytes lie somewhere */
  tape->kept = mha_kept_at(tape->memory ? tape->memory : (char *)tape, &at, weights);
  return MHA_OK;
}

void mha_tape_close(mha_tape *tape, const mha_weights *weights) {
  tape->layer = weights->serial;
}

static const char *unit_of(const mha_kept_size *size) {
  return size->packed ? "packed sequences" : "entries";
}

mha_status mha_tape_check(const mha_tape *tape, const mha_weights *weights,
                          const mha_kept_size *size, mha_error *error) {
  const mha_kept_size *s = &tape->size;
  if (tape->layer == 0)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "back.tape is empty; rule: mha_forward has filled it in this very call");
  if (tape->layer != weights->serial || s->packed != size->packed || s->entries != size->entries ||
      s->B != size->B || s->Lq != size->Lq || s->Lk != size->Lk)
    return mha_fail(error, MHA_ERROR_VALUE,
                    "back.tape has a call of %s layer with %lld %s, %lld queries, %lld keys; "
                    "rule: that of the call, %lld %s, %lld, %lld",
                    tape->layer == weights->serial ? "this" : "another", (long long)s->B,
                    unit_of(s), (long long)s->Lq, (long long)s->Lk, (long long)size->B,
                    unit_of(size), (long long)size->Lq, (long long)size->Lk);
  return MHA_OK;
}
