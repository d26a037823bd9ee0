/* Owns a context's kernels: which shapes there are, and where their code lies. Each call that finds
 * some missing adds a batch, and nothing of a batch ever moves. */
#include "kernels.h"

#include "base/arithmetic.h"
#include "base/memory.h"
#include "code.h"
#include "xsmm.h"

#include <string.h>

/* Larger sizes and strides are left to the BLAS: a kernel's addresses are 32 bits wide. */
#define LARGEST ((int64_t)1 << 20)

/* The most code that the generator makes for one number of rows; mostly it is a hundredth. */
#define MOST_CODE 131072

/* Code lies in chunks, each with what follows at its begin. Pages that are not touched cost
 * nothing.
 */
#define CHUNK_BYTES ((size_t)2 * MOST_CODE)
typedef struct chunk chunk;
struct chunk {
  chunk *next;
  size_t used;
};

typedef struct batch batch;
struct batch {
  batch *next;
  size_t bytes; /* of this block */
  chunk *chunks;
  int n;
  mha_kernel kernels[];
};

struct mha_kernels {
  mha_allocator allocator;
  batch *batches;
};

/* ---- running ---- */

void mha_kernel_run(const mha_kernel *k, int64_t rows, const float *a, const float *b, float *c) {
  const mha_kernel_shape *s = &k->shape;
  while (rows > 0) {
    const int64_t n = mha_min(rows, MHA_KERNEL_ROWS);
    k->by_rows[n - 1](b, a, c);
    a += n * s->a_stride;
    c += n * s->c_stride;
    rows -= n;
  }
}

/* ---- shapes ---- */

static bool is_between(int64_t least, int64_t value) {
  return value >= least && value <= LARGEST;
}

bool mha_kernel_is_possible(const mha_kernel_shape *s) {
  return is_between(1, s->columns) && is_between(1, s->inner) &&
         is_between(s->inner, s->a_stride) && is_between(s->columns, s->b_stride) &&
         is_between(s->columns, s->c_stride);
}

static bool is_same(const mha_kernel_shape *a, const mha_kernel_shape *b) {
  /* what differs most often comes first */
  return a->inner == b->inner && a->b_stride == b->b_stride && a->columns == b->columns &&
         a->a_stride == b->a_stride && a->c_stride == b->c_stride && a->add == b->add;
}

static const mha_kernel *find_in(const batch *kernels, const mha_kernel_shape *shape) {
  for (int k = 0; k < kernels->n; k++)
    if (is_same(&kernels->kernels[k].shape, shape))
      return &kernels->kernels[k];
  return NULL;
}

const mha_kernel *mha_kernels_find(const mha_kernels *kernels, const mha_kernel_shape *shape) {
  const mha_kernel *found = NULL;
  for (const batch *b = kernels->batches; b && !found; b = b->next)
    found = find_in(b, shape);
  return found;
}

const char *mha_kernels_missing(void) {
  return mha_xsmm_missing();
}

const char *mha_kernels_target(void) {
  return mha_xsmm_target();
}

/* ---- generating ---- */

/* Notes the shapes that are in neither `kernels` nor the new batch. */
static void collect_missing(const mha_kernels *kernels, const mha_kernel_shape *shapes, int n,
                            batch *missing) {
  for (int k = 0; k < n; k++)
    if (!mha_kernels_find(kernels, &shapes[k]) && !find_in(missing, &shapes[k]))
      missing->kernels[missing->n++].shape = shapes[k];
}

static void release_chunks(chunk *first) {
  while (first) {
    chunk *next = first->next;
    mha_code_release(first, CHUNK_BYTES);
    first = next;
  }
}

static size_t rounded_up(size_t bytes) {
  return (bytes + MHA_ALIGNMENT - 1) / MHA_ALIGNMENT * MHA_ALIGNMENT;
}

/* Nothing is added to the batch's latest chunk any more. */
static bool seal(const batch *b) {
  return !b->chunks || mha_code_seal(b->chunks, CHUNK_BYTES);
}

/* A place for `bytes` bytes of code; NULL = there is none. */
static char *find_place(batch *b, size_t bytes) {
  chunk *latest = b->chunks;
  if (!latest || bytes > CHUNK_BYTES - latest->used) {
    chunk *added = seal(b) ? mha_code_reserve(CHUNK_BYTES) : NULL;
    if (!added)
      return NULL;
    const chunk empty = {latest, rounded_up(sizeof *added)};
    *added = empty;
    b->chunks = latest = added;
  }
  char *place = (char *)latest + latest->used;
  latest->used += rounded_up(bytes);
  return place;
}

/* Generates the code of one kernel, by way of `staging`. */
static bool generate_kernel(batch *b, mha_kernel *kernel, char *staging) {
  for (int rows = 1; rows <= MHA_KERNEL_ROWS; rows++) {
    const size_t bytes = mha_xsmm_generate(&kernel->shape, rows, staging, MOST_CODE);
    char *place = bytes > 0 ? find_place(b, bytes) : NULL;
    if (!place)
      return false;
    memcpy(place, staging, bytes);
    memcpy(&kernel->by_rows[rows - 1], &place, sizeof place); /* data becomes a function */
  }
  return true;
}

static bool generate(batch *b, char *staging) {
  bool good = true;
  for (int k = 0; good && k < b->n; k++)
    good = generate_kernel(b, &b->kernels[k], staging);
  good = good && seal(b);
  if (!good)
    release_chunks(b->chunks);
  return good;
}

static bool add_batch(mha_kernels *kernels, const mha_kernel_shape *shapes, int n) {
  const size_t bytes = sizeof(batch) + (size_t)n * sizeof(mha_kernel);
  batch *added = mha_memory_allocate(&kernels->allocator, bytes);
  char *staging = added ? mha_memory_allocate(&kernels->allocator, MOST_CODE) : NULL;
  bool good = staging != NULL;
  if (good) {
    memset(added, 0, bytes);
    added->bytes = bytes;
    collect_missing(kernels, shapes, n, added);
    good = generate(added, staging);
  }
  mha_memory_release(&kernels->allocator, staging, MOST_CODE);
  if (good) {
    added->next = kernels->batches;
    kernels->batches = added;
  } else
    mha_memory_release(&kernels->allocator, added, bytes);
  return good;
}

mha_status mha_kernels_prepare(mha_kernels *kernels, const mha_kernel_shape *shapes, int n) {
  for (int k = 0; k < n; k++)
    if (!mha_kernels_find(kernels, &shapes[k]))
      return add_batch(kernels, shapes + k, n - k) ? MHA_OK : MHA_ERROR_MEMORY;
  return MHA_OK;
}

/* ---- life ---- */

mha_kernels *mha_kernels_create(const mha_allocator *allocator) {
  mha_kernels *created = mha_memory_allocate(allocator, sizeof *created);
  if (created) {
    created->allocator = *allocator;
    created->batches = NULL;
  }
  return created;
}

const void *mha_kernels_mark(const mha_kernels *kernels) {
  return kernels->batches;
}

void mha_kernels_undo(mha_kernels *kernels, const void *mark) {
  while (kernels->batches != mark) {
    batch *b = kernels->batches;
    kernels->batches = b->next;
    release_chunks(b->chunks);
    mha_memory_release(&kernels->allocator, b, b->bytes);
  }
}

void mha_kernels_destroy(mha_kernels *kernels) {
  if (!kernels)
    return;
  const mha_allocator allocator = kernels->allocator;
  mha_kernels_undo(kernels, NULL);
  mha_memory_release(&allocator, kernels, sizeof *kernels);
}
