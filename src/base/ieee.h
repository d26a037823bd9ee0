/* The demand for IEEE arithmetic: with -ffast-math or a part of it nothing compiles. exp rounds by
 * adding and subtracting a large number, and hidden NaN are found by comparing; such options fold
 * both away without a word. CMake's targets take them back, so this is for builds by hand. */
#ifndef MHA_SRC_BASE_IEEE_H
#define MHA_SRC_BASE_IEEE_H

#if defined __FAST_MATH__ || defined __ASSOCIATIVE_MATH__ || defined __RECIPROCAL_MATH__ ||        \
    defined __NO_SIGNED_ZEROS__ || (defined __FINITE_MATH_ONLY__ && __FINITE_MATH_ONLY__ > 0)
#error "libmha is compiled with -ffast-math, -Ofast or a part of them; rule: leave them out."
#endif

_Static_assert(sizeof 1.0 == sizeof(double),
               "libmha is compiled with -fsingle-precision-constant; rule: leave it out.");

/* clang 14 has macros for -ffast-math and -ffinite-math-only alone; the rest is switched off. */
#ifdef __clang__
#pragma float_control(precise, on)
#endif

#endif
