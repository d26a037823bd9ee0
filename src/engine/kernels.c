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

/* Room for the code of one number of rows: the most that the generator makes, and what it makes on
 * average at most. */
#define MOST_CODE    131072
#define AVERAGE_CODE 4096

typedef struct batch batch;
struct batch {
  batch *next;
  size_t bytes; /* of this block */
  void *code;
  size_t code_bytes;
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

/* Generates the code of one kernel behind what the batch has, by way of `staging`. */
static bool generate_kernel(batch *b, mha_kernel *kernel, char *staging, size_t room) {
  for (int rows = 1; rows <= MHA_KERNEL_ROWS; rows++) {
    const size_t bytes = mha_xsmm_generate(&kernel->shape, rows, staging, MOST_CODE);
    char *place = (char *)b->code + b->code_bytes;
    if (bytes == 0 || bytes > room - b->code_bytes)
      return false;
    memcpy(place, staging, bytes);
    memcpy(&kernel->by_rows[rows - 1], &place, sizeof place); /* data becomes a function */
    b->code_bytes += (bytes + MHA_ALIGNMENT - 1) / MHA_ALIGNMENT * MHA_ALIGNMENT;
    b->code_bytes = b->code_bytes < room ? b->code_bytes : room;
  }
  return true;
}

static bool generate(batch *b, char *staging) {
  const size_t room = (size_t)b->n * MHA_KERNEL_ROWS * AVERAGE_CODE;
  b->code = mha_code_reserve(room);
  if (!b->code)
    return false;
  for (int k = 0; k < b->n; k++)
    if (!generate_kernel(b, &b->kernels[k], staging, room)) {
      mha_code_release(b->code, room);
      return false;
    }
  b->code_bytes = mha_code_seal(b->code, room, b->code_bytes);
  if (b->code_bytes == 0)
    mha_code_release(b->code, room);
  return b->code_bytes > 0;
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
    mha_code_release(b->code, b->code_bytes);
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
