/* Which names make a layer, under which prefix and of which family; which sets have gaps, are
 * ambiguous, or hold what is not computed. Names alone count here, so the tensors are made by hand.
 */
#include "support.h"

#include "files/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Lists of tensors ------------------------------------------------------------------------ */

enum { MAX_TENSORS = 2000, TEXT_BYTES = 65536 };

typedef struct hand_made {
  mha_raw_tensors tensors;
  mha_raw_tensor items[MAX_TENSORS];
  char text[TEXT_BYTES];
} hand_made;

static int by_name(const void *a, const void *b) {
  return strcmp(((const mha_raw_tensor *)a)->name, ((const mha_raw_tensor *)b)->name);
}

/* Words are names; '@' in a word stands for `prefix`, and '#' and a digit at its end for its rank,
 * which is 2 otherwise. */
static const mha_raw_tensors *make(hand_made *list, const char *words, const char *prefix) {
  memset(list, 0, sizeof *list);
  list->tensors.items = list->items;
  char *to = list->text;
  for (const char *from = words; *from != '\0';) {
    mha_raw_tensor *item = &list->items[list->tensors.n++];
    assert_true(list->tensors.n <= MAX_TENSORS);
    item->name = to;
    item->rank = 2;
    for (; *from != '\0' && *from != ' '; from++) {
      assert_true(to + strlen(prefix) + 2 < list->text + TEXT_BYTES);
      if (*from == '@')
        to += sprintf(to, "%s", prefix);
      else if (*from == '#')
        item->rank = *++from - '0';
      else
        *to++ = *from;
    }
    *to++ = '\0';
    while (*from == ' ')
      from++;
  }
  qsort(list->items, (size_t)list->tensors.n, sizeof list->items[0], by_name);
  return &list->tensors;
}

static void check_message(const mha_error *error, const char *fragment) {
  if (!strstr(error->message, fragment))
    test_failed("\"%s\" lacks \"%s\"", error->message, fragment);
}

/* Expects an error with that fragment. */
static void check_refused(const mha_raw_tensors *tensors, const char *prefix, mha_status status,
                          const char *fragment) {
  mha_layer_names layer;
  mha_error error;
  test_expect(mha_names_find(tensors, "m", prefix, &layer, &error), status, &error);
  assert_int_equal(error.status, status);
  check_message(&error, fragment);
}

/* ---- Families -------------------------------------------------------------------------------- */

#define NORMS " @q_norm.weight @k_norm.weight @sinks"

/* Parts in the order of mha_part; "" = none. */
typedef struct family_row {
  const char *family_name;
  int32_t orientation;
  const char *names[MHA_PART_QUERY_NORM];
} family_row;

#define LINEAR(name, q, k, v, o)                                                                   \
  {                                                                                                \
    name, MHA_OUT_IN, {                                                                            \
      q ".weight", k ".weight", v ".weight", "", o ".weight", q ".bias", k ".bias", v ".bias", "", \
          o ".bias"                                                                                \
    }                                                                                              \
  }

static const family_row family_rows[] = {
    {"PyTorch, packed",
     MHA_OUT_IN,
     {"", "", "", "in_proj_weight", "out_proj.weight", "", "", "", "in_proj_bias",
      "out_proj.bias"}},
    {"PyTorch, separate",
     MHA_OUT_IN,
     {"q_proj_weight", "k_proj_weight", "v_proj_weight", "", "out_proj.weight", "", "", "",
      "in_proj_bias", "out_proj.bias"}},
    {"GPT-2",
     MHA_IN_OUT,
     {"", "", "", "c_attn.weight", "c_proj.weight", "", "", "", "c_attn.bias", "c_proj.bias"}},
    {"the article", MHA_IN_OUT, {"W_Q", "W_K", "W_V", "", "W_O", "b_Q", "b_K", "b_V", "", "b_O"}},
    LINEAR("Hugging Face, q_proj", "q_proj", "k_proj", "v_proj", "out_proj"),
    LINEAR("Hugging Face, q_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    LINEAR("Hugging Face, q_proj", "q_proj", "k_proj", "v_proj", "output.dense"),
    LINEAR("Hugging Face, self.q_proj", "self.q_proj", "self.k_proj", "self.v_proj", "out_proj"),
    LINEAR("Hugging Face, attention.q_proj", "attention.q_proj", "attention.k_proj",
           "attention.v_proj", "o_proj"),
    LINEAR("Hugging Face, query", "query", "key", "value", "out_proj"),
    LINEAR("Hugging Face, query", "query", "key", "value", "o_proj"),
    LINEAR("Hugging Face, query", "query", "key", "value", "output.dense"),
    LINEAR("Hugging Face, self.query", "self.query", "self.key", "self.value", "output.dense"),
    LINEAR("Hugging Face, attention.query", "attention.query", "attention.key", "attention.value",
           "output.dense"),
};

enum { N_ROWS = sizeof family_rows / sizeof family_rows[0] };

/* All names of a row whose bit is set in `which`. */
static void put_words(const family_row *row, unsigned which, const char *more, char words[1024]) {
  words[0] = '\0';
  for (int part = 0; part < MHA_PART_QUERY_NORM; part++)
    if (which & 1U << part && row->names[part][0] != '\0')
      (void)sprintf(words + strlen(words), "@%s ", row->names[part]);
  (void)strcat(words, more);
}

static void check_found(const hand_made *list, const mha_layer_names *layer, const family_row *row,
                        const char *prefix) {
  assert_string_equal(layer->family_name, row->family_name);
  assert_int_equal(layer->orientation, row->orientation);
  assert_int_equal(layer->prefix_bytes, strlen(prefix));
  assert_memory_equal(layer->prefix, prefix, strlen(prefix));
  assert_true(layer->complete);
  for (int part = 0; part < MHA_PART_QUERY_NORM; part++) {
    char name[256];
    (void)snprintf(name, sizeof name, "%s%s", prefix, row->names[part]);
    if (row->names[part][0] == '\0') {
      assert_null(layer->parts[part]);
      continue;
    }
    assert_non_null(layer->parts[part]);
    assert_string_equal(layer->parts[part]->name, name);
    assert_in_range(layer->parts[part] - list->items, 0, list->tensors.n - 1);
  }
}

static const char *const prefixes[] = {
    "", "x.", "model.layers.0.self_attn.", "dec_", "a/b.", "W_Q.", "self.", "q_proj."};

static void every_family_is_found_under_every_prefix(void **state) {
  static hand_made list;
  (void)state;
  for (int r = 0; r < N_ROWS; r++)
    for (size_t p = 0; p < sizeof prefixes / sizeof prefixes[0]; p++)
      for (int given = 0; given < 2; given++) {
        const family_row *row = &family_rows[r];
        const char *prefix = prefixes[p];
        char words[1024];
        mha_layer_names layer;
        mha_error error;
        test_note("%s with %s, prefix \"%s\" %s", row->family_name, row->names[MHA_PART_WO], prefix,
                  given ? "given" : "to find");
        put_words(row, ~0U, &NORMS[1], words);
        make(&list, words, prefix);
        test_expect(mha_names_find(&list.tensors, "m", given ? prefix : NULL, &layer, &error),
                    MHA_OK, &error);
        check_found(&list, &layer, row, prefix);
        assert_non_null(layer.parts[MHA_PART_QUERY_NORM]);
        assert_non_null(layer.parts[MHA_PART_KEY_NORM]);
        assert_non_null(layer.parts[MHA_PART_SINKS]);
        assert_int_equal(mha_names_visit(&list.tensors, NULL, NULL), 1);
      }
}

/* Biases, norms and sinks are there or not, each on its own (the norms together). */
static void every_subset_of_the_rest_is_found(void **state) {
  static hand_made list;
  const unsigned matrices = (1U << (MHA_PART_WO + 1)) - 1;
  (void)state;
  for (int r = 0; r < N_ROWS; r++)
    for (unsigned biases = 0; biases < 32; biases++) {
      const family_row *row = &family_rows[r];
      char words[1024];
      mha_layer_names layer;
      mha_error error;
      test_note("%s, biases 0x%x", row->family_name, biases);
      put_words(row, matrices | biases << MHA_PART_BQ, biases & 1 ? "@sinks" : "", words);
      make(&list, words, "x.");
      test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), MHA_OK, &error);
      for (int part = MHA_PART_BQ; part <= MHA_PART_BO; part++)
        assert_int_equal(layer.parts[part] != NULL,
                         (biases << MHA_PART_BQ & 1U << part) != 0 && row->names[part][0] != '\0');
      assert_int_equal(layer.parts[MHA_PART_SINKS] != NULL, biases & 1);
      assert_null(layer.parts[MHA_PART_QUERY_NORM]);
    }
}

/* ---- Gaps ------------------------------------------------------------------------------------ */

/* Each matrix missing on its own, found by the others. */
static void a_missing_matrix_is_named(void **state) {
  static hand_made list;
  (void)state;
  for (int r = 0; r < N_ROWS; r++)
    for (int part = 0; part <= MHA_PART_WO; part++)
      for (int given = 0; given < 2; given++) {
        const family_row *row = &family_rows[r];
        char words[1024];
        char fragment[128];
        if (row->names[part][0] == '\0')
          continue;
        test_note("%s without %s", row->family_name, row->names[part]);
        put_words(row, ~(1U << part), "", words);
        make(&list, words, "x.");
        (void)snprintf(fragment, sizeof fragment, "m lacks x.%s; rule: a layer (%s)",
                       row->names[part], row->family_name);
        check_refused(&list.tensors, given ? "x." : NULL, MHA_ERROR_WEIGHTS, fragment);
      }
}

typedef struct refusal_row {
  const char *words, *prefix;
  mha_status status;
  const char *fragment;
} refusal_row;

static void check_rows(const refusal_row *rows, size_t n) {
  static hand_made list;
  for (size_t i = 0; i < n; i++) {
    test_note("%s", rows[i].words);
    make(&list, rows[i].words, "");
    check_refused(&list.tensors, rows[i].prefix, rows[i].status, rows[i].fragment);
  }
}

static void gaps_are_listed(void **state) {
  static const refusal_row rows[] = {
      {"W_Q", NULL, MHA_ERROR_WEIGHTS, "m lacks W_K, W_V, W_O; rule"},
      {"W_Q", "", MHA_ERROR_WEIGHTS, "m lacks W_K, W_V, W_O; rule"},
      {"a.in_proj_weight", NULL, MHA_ERROR_WEIGHTS, "m lacks a.out_proj.weight; rule"},
      {"a.in_proj_bias", NULL, MHA_ERROR_WEIGHTS, "m lacks a.in_proj_weight, a.out_proj.weight"},
      {"a.in_proj_bias a.out_proj.weight", "a.", MHA_ERROR_WEIGHTS, "m lacks a.in_proj_weight;"},
      {"a.in_proj_bias a.k_proj_weight a.out_proj.weight", NULL, MHA_ERROR_WEIGHTS,
       "m lacks a.q_proj_weight, a.v_proj_weight;"},
      {"a.out_proj.weight", "a.", MHA_ERROR_WEIGHTS, "m lacks a.in_proj_weight;"},
      {"a.o_proj.weight", "a.", MHA_ERROR_WEIGHTS, "a.q_proj.weight, a.k_proj.weight, a.v_proj"},
      {"h.mlp.c_proj.weight", "h.mlp.", MHA_ERROR_WEIGHTS, "m lacks h.mlp.c_attn.weight;"},
      {"q_proj.weight k_proj.weight v_proj.weight", NULL, MHA_ERROR_WEIGHTS,
       "m lacks {out_proj or o_proj or output.dense}.weight;"},
      {"q_proj.weight k_proj.weight v_proj.weight o_proj.bias", NULL, MHA_ERROR_WEIGHTS,
       "m lacks o_proj.weight;"},
      {"q_proj.bias k_proj.weight v_proj.weight o_proj.weight", NULL, MHA_ERROR_WEIGHTS,
       "m lacks q_proj.weight;"},
      {"l.attention.self.query.weight l.attention.self.key.weight l.attention.self.value.weight",
       NULL, MHA_ERROR_WEIGHTS, "m lacks l.attention.{out_proj"},
      {"W_Q W_K W_V W_O q_norm.weight", NULL, MHA_ERROR_WEIGHTS, "m lacks k_norm.weight;"},
      {"W_Q W_K W_V W_O k_norm.weight", "", MHA_ERROR_WEIGHTS, "m lacks q_norm.weight;"},
  };
  (void)state;
  check_rows(rows, sizeof rows / sizeof rows[0]);
}

static void nothing_is_told_with_what_is_there(void **state) {
  static const refusal_row rows[] = {
      {"", NULL, MHA_ERROR_WEIGHTS, "m holds no layer, but no tensor at all; rule: "},
      {"", "x.", MHA_ERROR_WEIGHTS, "m holds no layer under the prefix \"x.\", but no tensor"},
      {"b.k a.k", NULL, MHA_ERROR_WEIGHTS, "m holds no layer, but a.k, b.k; rule: "},
      {"a.q_proj.weight a.k_proj.weight a.v_proj.weight a.o_proj.weight", "", MHA_ERROR_WEIGHTS,
       "m holds no layer under the prefix \"\", but a.k_proj.weight, a.o_proj.weight, "},
      {"a.W_Q a.W_K a.W_V a.W_O", "a", MHA_ERROR_WEIGHTS, "under the prefix \"a\", but a.W_K"},
      {"a.W_Q a.W_K a.W_V a.W_O", "a.b.", MHA_ERROR_WEIGHTS, "under the prefix \"a.b.\""},
      {"q_norm.weight k_norm.weight sinks", NULL, MHA_ERROR_WEIGHTS,
       "but k_norm.weight, q_norm.weight, sinks; rule: the name of its query matrix ends with "
       "in_proj_weight, q_proj_weight, q_proj.weight, query.weight, c_attn.weight, "
       "attn_q.weight, attn_qkv.weight or W_Q"},
      {"output.dense.weight c_proj.weight", NULL, MHA_ERROR_WEIGHTS, "m holds no layer"},
  };
  (void)state;
  check_rows(rows, sizeof rows / sizeof rows[0]);
}

/* ---- Several --------------------------------------------------------------------------------- */

#define ARTICLE_AT(p) p "W_Q " p "W_K " p "W_V " p "W_O "
#define LLAMA_AT(p)   p "q_proj.weight " p "k_proj.weight " p "v_proj.weight " p "o_proj.weight "

static void several_are_listed(void **state) {
  static const refusal_row rows[] = {
      {ARTICLE_AT("a.") ARTICLE_AT("b."), NULL, MHA_ERROR_WEIGHTS,
       "m holds the layers \"a.\" (the article), \"b.\" (the article); rule: give the prefix"},
      {ARTICLE_AT("") LLAMA_AT("b."), NULL, MHA_ERROR_WEIGHTS,
       "\"\" (the article), \"b.\" (Hugging Face, q_proj); rule"},
      {ARTICLE_AT("a.") "b.q_proj.weight", NULL, MHA_ERROR_WEIGHTS,
       "\"a.\" (the article), \"b.\" (Hugging Face, q_proj, incomplete); rule"},
      {ARTICLE_AT("a.") LLAMA_AT("a."), NULL, MHA_ERROR_WEIGHTS,
       "\"a.\" (the article), \"a.\" (Hugging Face, q_proj); rule"},
      {ARTICLE_AT("a.") LLAMA_AT("a."), "a.", MHA_ERROR_WEIGHTS,
       "\"a.\" (the article), \"a.\" (Hugging Face, q_proj); rule"},
      {"in_proj_weight out_proj.weight q_proj_weight k_proj_weight v_proj_weight", "",
       MHA_ERROR_WEIGHTS, "\"\" (PyTorch, packed), \"\" (PyTorch, separate); rule"},
      {LLAMA_AT("") "out_proj.weight", "", MHA_ERROR_WEIGHTS,
       "m holds out_proj.weight and o_proj.weight; rule: one output matrix"},
      {LLAMA_AT("a.") "a.output.dense.weight", NULL, MHA_ERROR_WEIGHTS,
       "m holds a.o_proj.weight and a.output.dense.weight; rule: one output matrix"},
      /* which of two output projections? */
      {"l.attention.query.weight l.attention.key.weight l.attention.value.weight "
       "l.attention.output.dense.weight l.output.dense.weight",
       NULL, MHA_ERROR_WEIGHTS, "\"l.attention.\" (Hugging Face, query)"},
  };
  (void)state;
  check_rows(rows, sizeof rows / sizeof rows[0]);
}

static void many_are_counted(void **state) {
  static hand_made list;
  static char words[TEXT_BYTES];
  mha_layer_names layer;
  mha_error error;
  (void)state;
  words[0] = '\0';
  char *to = words;
  for (int i = 0; i < 40; i++)
    for (int k = 0; k < 4; k++)
      to += sprintf(to, "model.layers.%02d.self_attn.%c_proj.weight ", i, "qkvo"[k]);
  make(&list, words, "");
  assert_int_equal(mha_names_visit(&list.tensors, NULL, NULL), 40);
  test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), MHA_ERROR_WEIGHTS, &error);
  check_message(&error, "\"model.layers.00.self_attn.\" (Hugging Face, q_proj), ");
  check_message(&error, " and 37 more; rule: ");
  /* each is there on its own */
  test_expect(mha_names_find(&list.tensors, "m", "model.layers.39.self_attn.", &layer, &error),
              MHA_OK, &error);
  assert_string_equal(layer.parts[MHA_PART_WV]->name, "model.layers.39.self_attn.v_proj.weight");
}

/* Names beyond all bounds go nowhere but into a message that fits. */
static void long_names_are_cut(void **state) {
  static hand_made list;
  static char words[3 * 5000];
  static char prefix[6000];
  mha_layer_names layer;
  mha_error error;
  (void)state;
  memset(prefix, 'p', sizeof prefix - 1);
  memset(words, 'w', 5000);
  (void)strcpy(words + 5000, ".W_Q short");
  make(&list, words, "");
  test_expect(mha_names_find(&list.tensors, "m", prefix, &layer, &error), MHA_ERROR_WEIGHTS,
              &error);
  check_message(&error, "ppp...\", but short and 1 more; rule: ");
  test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), MHA_ERROR_WEIGHTS, &error);
  check_message(&error, "www...W_K, www");
  (void)strcpy(words + 5000, ".W_Q @W_K @W_V @W_O @bias_k");
  words[5000] = '\0';
  (void)memmove(prefix, words, 5000);
  (void)strcpy(prefix + 5000, ".");
  make(&list, ARTICLE_AT("@") "@bias_k", prefix);
  test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), MHA_ERROR_UNSUPPORTED,
              &error);
  check_message(&error, "www.bias_k, which is no part");
}

/* ---- What lies beside ------------------------------------------------------------------------ */

/* Behind any prefix, the empty one included. */
static void what_is_not_computed_is_refused(void **state) {
  static const struct {
    const char *layer, *name;
  } rows[] = {
      {"@in_proj_weight @out_proj.weight", "bias_k"},
      {"@in_proj_weight @out_proj.weight", "bias_v"},
      {"@in_proj_weight @out_proj.weight", "in_proj_weight_scale"},
      {"@in_proj_weight @out_proj.weight", "in_proj_weight.lora_A"},
      {"@in_proj_weight @out_proj.weight", "out_proj.lora_A.weight"},
      {"@in_proj_weight @out_proj.weight", "out_proj.parametrizations.weight.original0"},
      {LLAMA_AT("@"), "q_proj.lora_A.weight"},
      {LLAMA_AT("@"), "q_proj.weight_scale"},
      {LLAMA_AT("@"), "v_proj.weight.absmax"},
      {LLAMA_AT("@"), "o_proj.input_scale"},
      {LLAMA_AT("@"), "out_proj.bias"},
      {LLAMA_AT("@"), "q_norm.bias"},
      {LLAMA_AT("@") NORMS, "k_norm.bias"},
      {LLAMA_AT("@"), "q_layernorm.weight"},
      {LLAMA_AT("@"), "k_layernorm.bias"},
      {LLAMA_AT("@"), "relative_attention_bias.weight"},
      {LLAMA_AT("@"), "sinks_scale"},
      {"@c_attn.weight @c_proj.weight", "q_attn.weight"},
      {"@c_attn.weight @c_proj.weight", "c_attn.weight_mask"},
      {"@self.query.weight @self.key.weight @self.value.weight @output.dense.weight",
       "self.distance_embedding.weight"},
      {"@self.query.weight @self.key.weight @self.value.weight @output.dense.weight",
       "distance_embedding.weight"},
      {ARTICLE_AT("@"), "W_Q.scale"},
      {ARTICLE_AT("@"), "bias_k"},
  };
  static hand_made list;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    for (int p = 0; p < 3; p++)
      for (int given = 0; given < 2; given++) {
        static const char *const at[] = {"", "x.", "x"};
        char words[1024];
        char fragment[128];
        mha_layer_names layer;
        mha_error error;
        (void)snprintf(words, sizeof words, "%s @%s", rows[i].layer, rows[i].name);
        (void)snprintf(fragment, sizeof fragment, "m holds %s%s, which is no part of the layer (",
                       at[p], rows[i].name);
        test_note("%s, prefix %s", words, at[p]);
        make(&list, words, at[p]);
        check_refused(&list.tensors, given ? at[p] : NULL, MHA_ERROR_UNSUPPORTED, fragment);
        /* and without it nothing is wrong */
        make(&list, rows[i].layer, at[p]);
        test_expect(mha_names_find(&list.tensors, "m", given ? at[p] : NULL, &layer, &error),
                    MHA_OK, &error);
      }
}

/* What is not known is refused where the prefix is the layer's own. */
static void unknown_tensors_under_the_prefix_are_refused(void **state) {
  static const struct {
    const char *prefix;
    mha_status status;
  } rows[] = {{"x.", MHA_ERROR_UNSUPPORTED}, {"x", MHA_OK}, {"", MHA_OK}};
  static hand_made list;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_layer_names layer;
    mha_error error;
    test_note("prefix \"%s\"", rows[i].prefix);
    make(&list, LLAMA_AT("@") "@gate.weight other.weight", rows[i].prefix);
    test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), rows[i].status, &error);
    const mha_raw_tensor *found = mha_names_unsupported(&list.tensors, &layer);
    assert_int_equal(found != NULL, rows[i].status != MHA_OK);
    if (found)
      assert_string_equal(found->name, "x.gate.weight");
  }
}

static void buffers_are_passed_over(void **state) {
  static const struct {
    const char *words;
    mha_status status;
  } rows[] = {
      {LLAMA_AT("@") "@rotary_emb.inv_freq#1", MHA_OK},
      {LLAMA_AT("@") "@inv_freq#1", MHA_OK},
      {LLAMA_AT("@") "@rope.inv_freq#1", MHA_OK},
      {LLAMA_AT("@") "@rotary_emb.cos#2", MHA_ERROR_UNSUPPORTED},
      {LLAMA_AT("@") "@xinv_freq#1", MHA_ERROR_UNSUPPORTED},
      {"@c_attn.weight @c_attn.bias @c_proj.weight @c_proj.bias @bias#4 @masked_bias#0", MHA_OK},
      {"@c_attn.weight @c_attn.bias @c_proj.weight @c_proj.bias @bias#1", MHA_ERROR_UNSUPPORTED},
      {"@self.query.weight @self.key.weight @self.value.weight @output.dense.weight "
       "@output.LayerNorm.weight#1 @output.LayerNorm.bias#1",
       MHA_OK},
      {"@self.query.weight @self.key.weight @self.value.weight @output.dense.weight "
       "@LayerNorm.weight#1",
       MHA_ERROR_UNSUPPORTED},
  };
  static hand_made list;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_layer_names layer;
    mha_error error;
    test_note("%s", rows[i].words);
    make(&list, rows[i].words, "x.");
    test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), rows[i].status, &error);
    test_expect(mha_names_find(&list.tensors, "m", "x.", &layer, &error), rows[i].status, &error);
  }
}

/* Whole blocks as models have them: the feed-forward part has the output's name. */
static void blocks_of_models_are_read(void **state) {
  static const struct {
    const char *words, *prefix, *family_name;
  } rows[] = {
      {"h.0.attn.bias#4 h.0.attn.c_attn.bias h.0.attn.c_attn.weight h.0.attn.c_proj.bias "
       "h.0.attn.c_proj.weight h.0.ln_1.weight h.0.mlp.c_fc.weight h.0.mlp.c_proj.weight",
       "h.0.attn.", "GPT-2"},
      {"l.0.attention.output.LayerNorm.weight l.0.attention.output.dense.weight "
       "l.0.attention.self.key.weight l.0.attention.self.query.weight "
       "l.0.attention.self.value.weight l.0.intermediate.dense.weight l.0.output.dense.weight",
       "l.0.attention.", "Hugging Face, self.query"},
      {"l.0.attention.attention.key.weight l.0.attention.attention.query.weight "
       "l.0.attention.attention.value.weight l.0.attention.output.dense.weight "
       "l.0.intermediate.dense.weight l.0.output.dense.weight",
       "l.0.attention.", "Hugging Face, attention.query"},
      {"l.0.input_layernorm.weight l.0.mlp.down_proj.weight l.0.self_attn.k_norm.weight "
       "l.0.self_attn.q_norm.weight l.0.self_attn.sinks " LLAMA_AT("l.0.self_attn."),
       "l.0.self_attn.", "Hugging Face, q_proj"},
      {"ln.weight monkey.weight value.bias " ARTICLE_AT(""), "", "the article"},
  };
  static hand_made list;
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    mha_layer_names layer;
    mha_error error;
    test_note("%s", rows[i].words);
    make(&list, rows[i].words, "");
    test_expect(mha_names_find(&list.tensors, "m", NULL, &layer, &error), MHA_OK, &error);
    assert_string_equal(layer.family_name, rows[i].family_name);
    assert_int_equal(layer.prefix_bytes, strlen(rows[i].prefix));
    assert_memory_equal(layer.prefix, rows[i].prefix, strlen(rows[i].prefix));
  }
}

/* ---- Visiting -------------------------------------------------------------------------------- */

static void append_visit(void *user, const mha_layer_names *layer) {
  char *text = user;
  char missing[256];
  (void)sprintf(text + strlen(text), "%.*s|%s|%s\n", layer->prefix_bytes, layer->prefix,
                layer->family_name, mha_names_missing(layer, missing, sizeof missing));
}

static void all_layers_are_visited(void **state) {
  static hand_made list;
  char text[2048] = "";
  (void)state;
  make(&list,
       ARTICLE_AT("c.") LLAMA_AT("b.") "a.in_proj_bias a.q_proj_weight a.out_proj.weight "
                                       "d.k_norm.weight d.in_proj_weight d.out_proj.weight z.sinks",
       "");
  assert_int_equal(mha_names_visit(&list.tensors, append_visit, text), 4);
  assert_string_equal(text, "a.|PyTorch, separate|a.k_proj_weight, a.v_proj_weight\n"
                            "b.|Hugging Face, q_proj|\n"
                            "c.|the article|\n"
                            "d.|PyTorch, packed|d.q_norm.weight\n");
}

static void saved_names_are_read_again(void **state) {
  (void)state;
  assert_string_equal(mha_part_saved_name(MHA_PART_WQ, MHA_OUT_IN), "q_proj.weight");
  assert_string_equal(mha_part_saved_name(MHA_PART_WO, MHA_OUT_IN), "o_proj.weight");
  assert_string_equal(mha_part_saved_name(MHA_PART_BO, MHA_OUT_IN), "o_proj.bias");
  assert_string_equal(mha_part_saved_name(MHA_PART_WV, MHA_IN_OUT), "W_V");
  assert_string_equal(mha_part_saved_name(MHA_PART_BO, MHA_IN_OUT), "b_O");
  assert_string_equal(mha_part_saved_name(MHA_PART_SINKS, MHA_IN_OUT), "sinks");
  assert_null(mha_part_saved_name(MHA_PART_WQKV, MHA_OUT_IN));
  assert_null(mha_part_saved_name(MHA_PART_BQKV, MHA_IN_OUT));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_family_is_found_under_every_prefix),
      cmocka_unit_test(every_subset_of_the_rest_is_found),
      cmocka_unit_test(a_missing_matrix_is_named),
      cmocka_unit_test(gaps_are_listed),
      cmocka_unit_test(nothing_is_told_with_what_is_there),
      cmocka_unit_test(several_are_listed),
      cmocka_unit_test(many_are_counted),
      cmocka_unit_test(long_names_are_cut),
      cmocka_unit_test(what_is_not_computed_is_refused),
      cmocka_unit_test(unknown_tensors_under_the_prefix_are_refused),
      cmocka_unit_test(buffers_are_passed_over),
      cmocka_unit_test(blocks_of_models_are_read),
      cmocka_unit_test(all_layers_are_visited),
      cmocka_unit_test(saved_names_are_read_again),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
