/* Owns what the library says about itself. */
#include "engine/blas.h"
#include "engine/blas_threads.h"
#include "engine/kernels.h"
#include "engine/softmax.h"
#include "mha.h"

#include <stdio.h>

const char *mha_version(void) {
  return MHA_VERSION_STRING;
}

int32_t mha_version_number(void) {
  return MHA_VERSION_NUMBER;
}

static const char *threading_name(mha_blas_threading kind) {
  switch (kind) {
  case MHA_BLAS_THREADS_NONE:
    return "none";
  case MHA_BLAS_THREADS_LOCKED:
    return "serial, every product under one lock";
  case MHA_BLAS_THREADS_OWN:
    return "its own pool, held at one thread during a call";
  case MHA_BLAS_THREADS_OPENMP:
    return "OpenMP";
  }
  return "unknown";
}

/* A BLAS that was told nothing uses one. */
static int blas_threads(void) {
  const int32_t n = mha_blas_thread_count();
  return n > 0 ? (int)n : 1;
}

size_t mha_build_info(char *text, size_t bytes) {
  const int length =
      snprintf(text, bytes,
               "version: %s\nblas: %s\nblas_threading: %s\nblas_threads: %d\n"
               "blas_core: %s\ninstruction_set: %s\nengines: %s\nxsmm: %s\n",
               MHA_VERSION_STRING, mha_blas_vendor(), threading_name(mha_blas_threading_kind()),
               blas_threads(), mha_blas_core(), mha_row_instruction_set(),
               mha_kernels_missing() ? "blas" : "blas, xsmm",
               mha_kernels_missing() ? mha_kernels_missing() : mha_kernels_target());
  return length > 0 ? (size_t)length : 0;
}
