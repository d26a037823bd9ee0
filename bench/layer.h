/* What both engines of libmha are made of. */
#ifndef MHA_BENCH_LAYER_H
#define MHA_BENCH_LAYER_H

#include "mha.h"
#include "problem.h"

/* Whether the status is MHA_OK; otherwise a message goes to stderr. */
bool bench_layer_report(mha_status status, const mha_error *error);

/* A layer that borrows the matrices of a set, or has copies of its own: of another type, or with
 * MHA_PACK_WEIGHTS in flags. False after a message on stderr. mha_weights_destroy it in either
 * case. */
bool bench_layer_create(const bench_problem *problem, const bench_weights *set,
                        const bench_type *type, uint32_t flags, mha_weights **layer);

/* The past tokens of a cache among keys or values of a set, [B][past+Lq][G·d]. */
mha_tensor bench_layer_past(const bench_shape *shape, const float *rows);

/* The call of mha_forward, without a cache; args refers to rules. */
void bench_layer_describe(const bench_problem *problem, mha_rules *rules, mha_forward_args *args);

#endif
