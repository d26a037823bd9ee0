/* How a row kernel exists once per x86-64 level, of which the loader picks one. */
#ifndef MHA_SRC_ENGINE_CLONES_H
#define MHA_SRC_ENGINE_CLONES_H

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(MHA_BASELINE)
#define MHA_HAS_CLONES 1
#define MHA_CLONES     __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MHA_HAS_CLONES 0
#define MHA_CLONES
#endif

/* Products and sums may be fused, also across statements: it changes no more than a rounding. */
#ifdef __clang__
#pragma clang fp contract(fast)
#endif

#endif
