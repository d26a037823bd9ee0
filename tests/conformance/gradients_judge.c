/* Owns the judge's side of a case of gradients: what judges the library is held to it as well. */
#include "gradients_case.h"
#include "oracle_gradients.h"

static bool compare_all(grad_case *c, const oracle_gradients *g) {
  const struct {
    const char *name;
    const oracle_numbers *gradient;
  } all[] = {{"d_query", &g->query},     {"d_key", &g->key},     {"d_value", &g->value},
             {"d_wq", &g->wq},           {"d_wk", &g->wk},       {"d_wv", &g->wv},
             {"d_wo", &g->wo},           {"d_bq", &g->bq},       {"d_bk", &g->bk},
             {"d_bv", &g->bv},           {"d_bo", &g->bo},       {"d_q_norm", &g->query_norm},
             {"d_k_norm", &g->key_norm}, {"d_sinks", &g->sinks}, {"d_alibi_slopes", &g->slopes}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    if (!grad_compare_judge(c, all[i].name, all[i].gradient->value, all[i].gradient->n))
      return false;
  }
  return true;
}

static bool compare_bias(grad_case *c, const oracle_gradients *g) {
  const grad_array *bias = grad_input(c, "bias");
  oracle_numbers sum;
  if (!bias)
    return true;
  oracle_reduce_bias(&c->problem, g, bias->shape[0], bias->shape[1], bias->shape[2], &sum);
  const bool same = grad_compare_judge(c, "d_bias", sum.value, sum.n);
  oracle_numbers_free(&sum);
  return same;
}

bool grad_judge(grad_case *c) {
  oracle_result forward;
  oracle_gradients gradients;
  oracle_solve(&c->problem, &forward);
  oracle_differentiate(&c->problem, c->dy->numbers, &gradients);
  oracle_gradients_share(&gradients, !c->value, !c->key);
  const bool same = grad_compare_judge(c, "y", forward.output.value, forward.output.n) &&
                    compare_all(c, &gradients) && compare_bias(c, &gradients);
  oracle_gradients_free(&gradients);
  oracle_free(&forward);
  return same;
}
