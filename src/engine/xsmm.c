/* Owns libxsmm: the only file that includes its headers. Of libxsmm only the generator is used,
 * which has no threads, no memory and no state of its own, and prints nothing; without_xsmm.c
 * stands here where it was not built in.
 *
 * libxsmm counts by columns: its C [m][n] is our C with rows and columns exchanged, so its A is
 * our B. */
#include "xsmm.h"

#include <libxsmm_cpuid.h>
#include <libxsmm_generator.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* libxsmm's names of targets, as its own variable has them; `least` of what the CPU has they need.
 */
typedef struct target_name {
  const char *name;
  int id;
} target_name;

/* The lowest target whose kernels are worth having: below it there is no FMA. */
#define LOWEST_TARGET LIBXSMM_X86_AVX2

/* What the CPU has, or what LIBXSMM_TARGET asks for where that is less. */
static int choose_target(void) {
  static const target_name names[] = {
      {"0", LIBXSMM_X86_GENERIC},       {"none", LIBXSMM_X86_GENERIC},
      {"sse", LIBXSMM_X86_SSE4},        {"wsm", LIBXSMM_X86_SSE4},
      {"snb", LIBXSMM_X86_AVX},         {"hsw", LIBXSMM_X86_AVX2},
      {"skx", LIBXSMM_X86_AVX512_CORE}, {"clx", LIBXSMM_X86_AVX512_CLX},
      {"cpx", LIBXSMM_X86_AVX512_CPX}};
  const char *wanted = getenv("LIBXSMM_TARGET");
  int target = libxsmm_cpuid_x86(NULL);
  for (size_t k = 0; wanted && k < sizeof names / sizeof *names; k++)
    if (strcmp(names[k].name, wanted) == 0 && names[k].id < target)
      target = names[k].id;
  return target;
}

static int target_id(void) {
  static atomic_int known; /* 0 = not yet */
  int target = atomic_load_explicit(&known, memory_order_relaxed);
  if (target == 0) {
    target = choose_target();
    atomic_store_explicit(&known, target, memory_order_relaxed);
  }
  return target;
}

const char *mha_xsmm_missing(void) {
  return target_id() < LOWEST_TARGET ? "the CPU, or LIBXSMM_TARGET, has no AVX2" : NULL;
}

const char *mha_xsmm_target(void) {
  return libxsmm_cpuid_name(target_id());
}

size_t mha_xsmm_generate(const mha_kernel_shape *s, int rows, void *code, size_t room) {
  libxsmm_descriptor_blob blob;
  libxsmm_generated_code generated = {.generated_code = code,
                                      .buffer_size = (unsigned int)room,
                                      .code_type = 2, /* machine code */
                                      .arch = (unsigned int)target_id()};
  const libxsmm_gemm_descriptor *descriptor = libxsmm_sgemm_descriptor_init(
      &blob, (libxsmm_blasint)s->columns, rows, (libxsmm_blasint)s->inner,
      (libxsmm_blasint)s->b_stride, (libxsmm_blasint)s->a_stride, (libxsmm_blasint)s->c_stride,
      1.0f, s->add ? 1.0f : 0.0f, LIBXSMM_GEMM_FLAG_NONE, LIBXSMM_GEMM_PREFETCH_NONE);
  if (!descriptor)
    return 0;
  libxsmm_generator_gemm_kernel(&generated, descriptor);
  return generated.last_error ? 0 : generated.code_size;
}
