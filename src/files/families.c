/* Owns the table of names under which a layer's matrices and biases lie in files. */
#include "families.h"

#include <stdbool.h>
#include <stddef.h>

static const mha_output_names linear_outputs[] = {
    {"out_proj.weight", "out_proj.bias"},
    {"o_proj.weight", "o_proj.bias"},
    {"output.dense.weight", "output.dense.bias"},
};
static const mha_output_names gpt2_outputs[] = {{"c_proj.weight", "c_proj.bias"}};
static const mha_output_names article_outputs[] = {{"W_O", "b_O"}};
static const mha_output_names gguf_outputs[] = {{"attn_output.weight", "attn_output.bias"}};

#define EVERYWHERE                                                                                 \
  [MHA_PART_QUERY_NORM] = "q_norm.weight", [MHA_PART_KEY_NORM] = "k_norm.weight",                  \
  [MHA_PART_SINKS] = "sinks"

#define GGUF_VECTORS                                                                               \
  [MHA_PART_QUERY_NORM] = "attn_q_norm.weight", [MHA_PART_KEY_NORM] = "attn_k_norm.weight",        \
  [MHA_PART_SINKS] = "attn_sinks.weight"

#define THREE_LINEAR(name, holder, wq, wk, wv, bq, bk, bv)                                         \
  {                                                                                                \
    (name), MHA_OUT_IN, (holder), "",                                                              \
        {[MHA_PART_WQ] = (wq),                                                                     \
         [MHA_PART_WK] = (wk),                                                                     \
         [MHA_PART_WV] = (wv),                                                                     \
         [MHA_PART_BQ] = (bq),                                                                     \
         [MHA_PART_BK] = (bk),                                                                     \
         [MHA_PART_BV] = (bv),                                                                     \
         EVERYWHERE},                                                                              \
        linear_outputs, 3                                                                          \
  }

enum { PYTORCH_PACKED, PYTORCH_SEPARATE, GPT2, ARTICLE, HUGGING_FACE };

const mha_name_family mha_name_families[] = {
    [PYTORCH_PACKED] =
        {"PyTorch, packed",
         MHA_OUT_IN,
         "",
         "",
         {[MHA_PART_WQKV] = "in_proj_weight", [MHA_PART_BQKV] = "in_proj_bias", EVERYWHERE},
         linear_outputs,
         1},
    [PYTORCH_SEPARATE] = {"PyTorch, separate",
                          MHA_OUT_IN,
                          "",
                          "",
                          {[MHA_PART_WQ] = "q_proj_weight",
                           [MHA_PART_WK] = "k_proj_weight",
                           [MHA_PART_WV] = "v_proj_weight",
                           [MHA_PART_BQKV] = "in_proj_bias",
                           EVERYWHERE},
                          linear_outputs,
                          1},
    [GPT2] = {"GPT-2",
              MHA_IN_OUT,
              "",
              "",
              {[MHA_PART_WQKV] = "c_attn.weight", [MHA_PART_BQKV] = "c_attn.bias", EVERYWHERE},
              gpt2_outputs,
              1},
    [ARTICLE] = {"the article",
                 MHA_IN_OUT,
                 "",
                 "",
                 {[MHA_PART_WQ] = "W_Q",
                  [MHA_PART_WK] = "W_K",
                  [MHA_PART_WV] = "W_V",
                  [MHA_PART_BQ] = "b_Q",
                  [MHA_PART_BK] = "b_K",
                  [MHA_PART_BV] = "b_V",
                  EVERYWHERE},
                 article_outputs,
                 1},
    [HUGGING_FACE] = THREE_LINEAR("Hugging Face, q_proj", "", "q_proj.weight", "k_proj.weight",
                                  "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"),
    THREE_LINEAR("Hugging Face, self.q_proj", "self.", "self.q_proj.weight", "self.k_proj.weight",
                 "self.v_proj.weight", "self.q_proj.bias", "self.k_proj.bias", "self.v_proj.bias"),
    THREE_LINEAR("Hugging Face, attention.q_proj", "attention.", "attention.q_proj.weight",
                 "attention.k_proj.weight", "attention.v_proj.weight", "attention.q_proj.bias",
                 "attention.k_proj.bias", "attention.v_proj.bias"),
    THREE_LINEAR("Hugging Face, query", "", "query.weight", "key.weight", "value.weight",
                 "query.bias", "key.bias", "value.bias"),
    THREE_LINEAR("Hugging Face, self.query", "self.", "self.query.weight", "self.key.weight",
                 "self.value.weight", "self.query.bias", "self.key.bias", "self.value.bias"),
    THREE_LINEAR("Hugging Face, attention.query", "attention.", "attention.query.weight",
                 "attention.key.weight", "attention.value.weight", "attention.query.bias",
                 "attention.key.bias", "attention.value.bias"),
    {"GGUF",
     MHA_OUT_IN,
     "",
     "attn_",
     {[MHA_PART_WQ] = "attn_q.weight",
      [MHA_PART_WK] = "attn_k.weight",
      [MHA_PART_WV] = "attn_v.weight",
      [MHA_PART_BQ] = "attn_q.bias",
      [MHA_PART_BK] = "attn_k.bias",
      [MHA_PART_BV] = "attn_v.bias",
      GGUF_VECTORS},
     gguf_outputs,
     1},
    {"GGUF, packed",
     MHA_OUT_IN,
     "",
     "attn_",
     {[MHA_PART_WQKV] = "attn_qkv.weight", [MHA_PART_BQKV] = "attn_qkv.bias", GGUF_VECTORS},
     gguf_outputs,
     1},
};

const int mha_n_name_families = (int)(sizeof mha_name_families / sizeof mha_name_families[0]);

const char *mha_part_saved_name(mha_part part, int32_t orientation) {
  const bool in_out = orientation == MHA_IN_OUT;
  const mha_output_names *output = in_out ? &article_outputs[0] : &linear_outputs[1];
  if (part == MHA_PART_WO)
    return output->matrix;
  if (part == MHA_PART_BO)
    return output->bias;
  return mha_name_families[in_out ? ARTICLE : HUGGING_FACE].parts[part];
}
