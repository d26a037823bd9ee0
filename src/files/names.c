/* Owns the names under which a layer's matrices and biases lie in files, and what else may lie
 * beside them.
 *
 * A reading is one prefix with one family. Every part of a reading is looked up by its name, so
 * nothing is guessed from shapes. */
#include "names.h"

#include "base/error.h"
#include "path.h"
#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- Families -------------------------------------------------------------------------------- */

typedef struct output_names {
  const char *matrix, *bias;
} output_names;

struct mha_name_family {
  const char *name;
  int32_t orientation;
  const char *holder;             /* the module that holds q, k and v, dot included, or "" */
  const char *parts[MHA_N_PARTS]; /* NULL = not in this family; those of the output are below */
  const output_names *outputs;    /* one of them */
  int n_outputs;
};

static const output_names linear_outputs[] = {
    {"out_proj.weight", "out_proj.bias"},
    {"o_proj.weight", "o_proj.bias"},
    {"output.dense.weight", "output.dense.bias"},
};
static const output_names gpt2_outputs[] = {{"c_proj.weight", "c_proj.bias"}};
static const output_names article_outputs[] = {{"W_O", "b_O"}};

#define EVERYWHERE                                                                                 \
  [MHA_PART_QUERY_NORM] = "q_norm.weight", [MHA_PART_KEY_NORM] = "k_norm.weight",                  \
  [MHA_PART_SINKS] = "sinks"

#define THREE_LINEAR(name, holder, wq, wk, wv, bq, bk, bv)                                         \
  {                                                                                                \
    (name), MHA_OUT_IN, (holder),                                                                  \
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

static const mha_name_family families[] = {
    [PYTORCH_PACKED] =
        {"PyTorch, packed",
         MHA_OUT_IN,
         "",
         {[MHA_PART_WQKV] = "in_proj_weight", [MHA_PART_BQKV] = "in_proj_bias", EVERYWHERE},
         linear_outputs,
         1},
    [PYTORCH_SEPARATE] = {"PyTorch, separate",
                          MHA_OUT_IN,
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
              {[MHA_PART_WQKV] = "c_attn.weight", [MHA_PART_BQKV] = "c_attn.bias", EVERYWHERE},
              gpt2_outputs,
              1},
    [ARTICLE] = {"the article",
                 MHA_IN_OUT,
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
};

enum { N_FAMILIES = sizeof families / sizeof families[0] };

/* For messages: the query matrix of each family, behind whatever prefix and holder. */
#define QUERY_NAMES                                                                                \
  "in_proj_weight, q_proj_weight, q_proj.weight, query.weight, c_attn.weight or W_Q"

const char *mha_part_saved_name(mha_part part, int32_t orientation) {
  const bool in_out = orientation == MHA_IN_OUT;
  const output_names *output = in_out ? &article_outputs[0] : &linear_outputs[1];
  if (part == MHA_PART_WO)
    return output->matrix;
  if (part == MHA_PART_BO)
    return output->bias;
  return families[in_out ? ARTICLE : HUGGING_FACE].parts[part];
}

/* Parts by which a layer is found. The output's names are not among them: other modules, such as
 * GPT-2's and BERT's feed-forward ones, have the same. */
static const mha_part anchors[] = {MHA_PART_WQ, MHA_PART_WQKV, MHA_PART_WK, MHA_PART_WV,
                                   MHA_PART_BQ, MHA_PART_BQKV, MHA_PART_BK, MHA_PART_BV};

enum { N_ANCHORS = sizeof anchors / sizeof anchors[0] };

/* ---- Looking names up ------------------------------------------------------------------------ */

/* Compares as strcmp does `name` with the prefix and `rest` behind each other. */
static int compare_name(const char *name, const char *prefix, int prefix_bytes, const char *rest) {
  const int order = strncmp(name, prefix, (size_t)prefix_bytes);
  return order ? order : strcmp(name + prefix_bytes, rest);
}

/* The first tensor whose name is not below prefix + rest; n if there is none. */
static int64_t lower_bound(const mha_raw_tensors *tensors, const char *prefix, int prefix_bytes,
                           const char *rest) {
  int64_t low = 0;
  int64_t high = tensors->n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (compare_name(tensors->items[middle].name, prefix, prefix_bytes, rest) < 0)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static const mha_raw_tensor *find(const mha_raw_tensors *tensors, const mha_layer_names *layer,
                                  const char *rest) {
  const int64_t at = lower_bound(tensors, layer->prefix, layer->prefix_bytes, rest);
  return at < tensors->n && compare_name(tensors->items[at].name, layer->prefix,
                                         layer->prefix_bytes, rest) == 0
             ? &tensors->items[at]
             : NULL;
}

static bool starts_with(const char *name, const char *start) {
  return strncmp(name, start, strlen(start)) == 0;
}

static bool ends_with(const char *name, const char *end) {
  const size_t name_bytes = strlen(name);
  const size_t end_bytes = strlen(end);
  return name_bytes >= end_bytes && strcmp(name + name_bytes - end_bytes, end) == 0;
}

/* ---- Readings -------------------------------------------------------------------------------- */

/* What the part is called behind the prefix, or NULL where the family has no such part. */
static const char *part_name(const mha_layer_names *layer, mha_part part) {
  const output_names *output = &layer->family->outputs[layer->output_name];
  if (part == MHA_PART_WO)
    return output->matrix;
  return part == MHA_PART_BO ? output->bias : layer->family->parts[part];
}

static bool lacks(const mha_layer_names *layer, mha_part part) {
  if (layer->parts[part])
    return false;
  if (part == MHA_PART_QUERY_NORM)
    return layer->parts[MHA_PART_KEY_NORM] != NULL;
  if (part == MHA_PART_KEY_NORM)
    return layer->parts[MHA_PART_QUERY_NORM] != NULL;
  return part <= MHA_PART_WO && part_name(layer, part) != NULL;
}

/* The output projection has the first of its names under which a matrix lies, or else a bias. */
static void find_output(const mha_raw_tensors *tensors, mha_layer_names *layer) {
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < layer->family->n_outputs; k++) {
      const output_names *output = &layer->family->outputs[k];
      if (!find(tensors, layer, pass == 0 ? output->matrix : output->bias))
        continue;
      layer->output_name = k;
      return;
    }
}

static mha_layer_names read_layer(const mha_raw_tensors *tensors, const char *prefix,
                                  int prefix_bytes, const mha_name_family *family) {
  mha_layer_names layer = {.family = family,
                           .family_name = family->name,
                           .orientation = family->orientation,
                           .prefix = prefix,
                           .prefix_bytes = prefix_bytes,
                           .complete = true};
  find_output(tensors, &layer);
  for (int part = 0; part < MHA_N_PARTS; part++) {
    const char *name = part_name(&layer, (mha_part)part);
    layer.parts[part] = name ? find(tensors, &layer, name) : NULL;
  }
  for (int part = 0; part < MHA_N_PARTS; part++)
    layer.complete = layer.complete && !lacks(&layer, (mha_part)part);
  return layer;
}

static const mha_raw_tensor *query_matrix(const mha_layer_names *layer) {
  return layer->parts[layer->family->parts[MHA_PART_WQ] ? MHA_PART_WQ : MHA_PART_WQKV];
}

/* Matrices and biases that are there; norms and sinks are the same in every family. */
static int count_parts(const mha_layer_names *layer) {
  int n = 0;
  for (int part = 0; part <= MHA_PART_BO; part++)
    n += layer->parts[part] != NULL;
  return n;
}

/* Whether `a` reads the same tensors better than `b` does, which is another reading: it is the
 * whole layer, or more of it, or else the more specific one. Two whole ones are both good. */
static bool reads_better(const mha_layer_names *a, const mha_layer_names *b) {
  if (a->complete || b->complete)
    return a->complete && !b->complete;
  const int more = count_parts(a) - count_parts(b);
  if (more != 0)
    return more > 0;
  return a->prefix_bytes != b->prefix_bytes ? a->prefix_bytes < b->prefix_bytes
                                            : a->family < b->family;
}

/* The reading of `tensor` as that part of that family; false if it is not named so. */
static bool read_as(const mha_raw_tensors *tensors, const mha_raw_tensor *tensor, mha_part part,
                    const mha_name_family *family, mha_layer_names *layer) {
  const char *name = family->parts[part];
  if (!name || !ends_with(tensor->name, name))
    return false;
  const size_t prefix_bytes = strlen(tensor->name) - strlen(name);
  if (prefix_bytes > INT32_MAX)
    return false;
  *layer = read_layer(tensors, tensor->name, (int)prefix_bytes, family);
  return true;
}

/* Each layer is shown once: where its first anchor lies. */
static const mha_raw_tensor *first_anchor(const mha_layer_names *layer) {
  const mha_raw_tensor *tensor = NULL;
  for (int k = 0; !tensor && k < N_ANCHORS; k++)
    tensor = layer->parts[anchors[k]];
  return tensor;
}

/* Whether some other reading of the layer's first anchor makes more of it. */
static bool is_misread(const mha_raw_tensors *tensors, const mha_layer_names *layer) {
  const mha_raw_tensor *tensor = first_anchor(layer);
  mha_layer_names other;
  for (int f = 0; f < N_FAMILIES; f++)
    for (int k = 0; &families[f] != layer->family && k < N_ANCHORS; k++)
      if (read_as(tensors, tensor, anchors[k], &families[f], &other) && reads_better(&other, layer))
        return true;
  return false;
}

int64_t mha_names_visit(const mha_raw_tensors *tensors, mha_layer_visitor *visitor, void *user) {
  int64_t n = 0;
  mha_layer_names layer;
  for (int64_t i = 0; i < tensors->n; i++)
    for (int f = 0; f < N_FAMILIES; f++)
      for (int k = 0; k < N_ANCHORS; k++) {
        const mha_raw_tensor *tensor = &tensors->items[i];
        if (!read_as(tensors, tensor, anchors[k], &families[f], &layer) ||
            first_anchor(&layer) != tensor || is_misread(tensors, &layer))
          continue;
        n++;
        if (visitor)
          visitor(user, &layer);
      }
  return n;
}

/* ---- Texts ----------------------------------------------------------------------------------- */

/* A list that stops before it becomes too long: "a, b and 3 more". */
typedef struct list_text {
  char *text;
  size_t bytes, used;
  int64_t left_out;
} list_text;

#define MORE_BYTES 32 /* for " and N more" */

static list_text begin_list(char *text, size_t bytes) {
  text[0] = '\0';
  return (list_text){text, bytes, 0, 0};
}

static void add_item(list_text *list, const char *format, ...) MHA_PRINTF(2, 3);

static void add_item(list_text *list, const char *format, ...) {
  const char *comma = list->used > 0 ? ", " : "";
  const size_t room = list->bytes - list->used;
  va_list arguments;
  char item[MHA_ERROR_MESSAGE_BYTES];
  va_start(arguments, format);
  (void)vsnprintf(item, sizeof item, format, arguments);
  va_end(arguments);
  if (list->left_out > 0 || strlen(comma) + strlen(item) + MORE_BYTES >= room) {
    list->left_out++;
    return;
  }
  list->used += (size_t)snprintf(list->text + list->used, room, "%s%s", comma, item);
}

static void end_list(list_text *list) {
  if (list->left_out > 0)
    (void)snprintf(list->text + list->used, list->bytes - list->used, "%s%lld more",
                   list->used > 0 ? " and " : "", (long long)list->left_out);
}

static void add_missing(list_text *list, const mha_layer_names *layer, mha_part part) {
  char prefix[MHA_SHOWN_BYTES];
  (void)mha_shown_text(layer->prefix, (size_t)layer->prefix_bytes, prefix);
  if (part == MHA_PART_WO && layer->family->n_outputs > 1 && !layer->parts[MHA_PART_BO])
    add_item(list, "%s{out_proj or o_proj or output.dense}.weight", prefix);
  else
    add_item(list, "%s%s", prefix, part_name(layer, part));
}

char *mha_names_missing(const mha_layer_names *layer, char *text, size_t bytes) {
  list_text list = begin_list(text, bytes);
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (lacks(layer, (mha_part)part))
      add_missing(&list, layer, (mha_part)part);
  end_list(&list);
  return text;
}

/* ---- What may not lie beside them ------------------------------------------------------------ */

/* Known from models, and not computed here; behind a prefix that ends with a dot whatever is
 * unknown is refused anyway. An entry that ends with a dot stands for all that begins so. */
static const char *const refused[] = {
    "bias_k",
    "bias_v",
    "q_layernorm.",
    "k_layernorm.",
    "q_ln.",
    "k_ln.",
    "query_layernorm.",
    "key_layernorm.",
    "q_attn.",
    "v_norm.",
    "query_norm.",
    "key_norm.",
    "inner_attn_ln.",
    "distance_embedding.",
    "relative_attention_bias.",
    "relative_position_bias_table",
};

static bool is_refused(const char *rest) {
  for (size_t k = 0; k < sizeof refused / sizeof refused[0]; k++)
    if (refused[k][strlen(refused[k]) - 1] == '.' ? starts_with(rest, refused[k])
                                                  : strcmp(rest, refused[k]) == 0)
      return true;
  return false;
}

/* Behind the prefix too, but without a say in what the layer computes: frequencies, which
 * config.rope tells; the causal mask of GPT-2, GPT-Neo and GPT-J, which the call tells; and the
 * normalisation that BERT puts behind the residual. */
static bool is_harmless(const char *rest, const mha_raw_tensor *tensor) {
  return strcmp(rest, "inv_freq") == 0 || ends_with(rest, ".inv_freq") ||
         strcmp(rest, "masked_bias") == 0 || (strcmp(rest, "bias") == 0 && tensor->rank == 4) ||
         starts_with(rest, "output.LayerNorm.");
}

/* Whether `rest` continues a known name: "q_proj.lora_A.weight" the module of "q_proj.weight",
 * "in_proj_weight_scale" the name without a module "in_proj_weight". */
static bool continues(const char *rest, const char *name) {
  const char *dot = name ? strrchr(name, '.') : NULL;
  if (dot)
    return strncmp(rest, name, (size_t)(dot - name) + 1) == 0;
  return name && starts_with(rest, name) &&
         (rest[strlen(name)] == '.' || rest[strlen(name)] == '_');
}

static bool is_of_family(const char *rest, const mha_name_family *family) {
  if (family->holder[0] != '\0' && starts_with(rest, family->holder))
    return true;
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (continues(rest, family->parts[part]))
      return true;
  for (int k = 0; k < family->n_outputs; k++)
    if (continues(rest, family->outputs[k].matrix) || continues(rest, family->outputs[k].bias))
      return true;
  return false;
}

static bool is_part(const mha_layer_names *layer, const mha_raw_tensor *tensor) {
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (layer->parts[part] == tensor)
      return true;
  return false;
}

const mha_raw_tensor *mha_names_unsupported(const mha_raw_tensors *tensors,
                                            const mha_layer_names *layer) {
  const bool own =
      layer->prefix_bytes > 0 && layer->prefix[layer->prefix_bytes - 1] == '.'; /* all of it */
  for (int64_t i = lower_bound(tensors, layer->prefix, layer->prefix_bytes, "");
       i < tensors->n &&
       strncmp(tensors->items[i].name, layer->prefix, (size_t)layer->prefix_bytes) == 0;
       i++) {
    const mha_raw_tensor *tensor = &tensors->items[i];
    const char *rest = tensor->name + layer->prefix_bytes;
    if (is_part(layer, tensor) || is_harmless(rest, tensor))
      continue;
    if (own || is_refused(rest) || is_of_family(rest, layer->family))
      return tensor;
  }
  return NULL;
}

/* ---- The one layer --------------------------------------------------------------------------- */

/* What is found on the way through all readings. */
typedef struct candidates {
  int64_t n_with_query; /* that have a query matrix */
  bool any;
  mha_layer_names best;
  list_text list;
} candidates;

static void add_candidate(void *user, const mha_layer_names *layer) {
  candidates *c = user;
  const bool has_query = query_matrix(layer) != NULL;
  if (!c->any || (has_query && c->n_with_query == 0) ||
      (has_query == (c->n_with_query > 0) && count_parts(layer) > count_parts(&c->best)))
    c->best = *layer;
  c->any = true;
  if (!has_query)
    return;
  char prefix[MHA_SHOWN_BYTES];
  c->n_with_query++;
  add_item(&c->list, "\"%s\" (%s%s)",
           mha_shown_text(layer->prefix, (size_t)layer->prefix_bytes, prefix), layer->family_name,
           layer->complete ? "" : ", incomplete");
}

static void visit_families(const mha_raw_tensors *tensors, const char *prefix, int prefix_bytes,
                           candidates *c) {
  for (int f = 0; f < N_FAMILIES; f++) {
    const mha_layer_names layer = read_layer(tensors, prefix, prefix_bytes, &families[f]);
    if (count_parts(&layer) > 0)
      add_candidate(c, &layer);
  }
}

static mha_status fail_without_layer(const mha_raw_tensors *tensors, const char *path,
                                     const char *prefix, mha_error *error) {
  char text[160];
  list_text list = begin_list(text, sizeof text);
  char shown[MHA_SHOWN_BYTES] = "";
  if (prefix)
    (void)mha_shown_text(prefix, strlen(prefix), shown);
  for (int64_t i = 0; i < tensors->n; i++)
    add_item(&list, "%s", tensors->items[i].name);
  end_list(&list);
  return mha_fail(error, MHA_ERROR_WEIGHTS,
                  "%s holds no layer%s%s%s, but %s; rule: the name of its query matrix ends "
                  "with " QUERY_NAMES,
                  mha_shown_path(path), prefix ? " under the prefix \"" : "", shown,
                  prefix ? "\"" : "", tensors->n > 0 ? text : "no tensor at all");
}

/* A layer that was found is also to be used: is all there, and nothing too much? */
static mha_status check_layer(const mha_raw_tensors *tensors, const char *path,
                              const mha_layer_names *layer, mha_error *error) {
  char text[200];
  if (!layer->complete)
    return mha_fail(error, MHA_ERROR_WEIGHTS,
                    "%s lacks %s; rule: a layer (%s) has all four matrices, and both q_norm and "
                    "k_norm or none",
                    mha_shown_path(path), mha_names_missing(layer, text, sizeof text),
                    layer->family_name);
  for (int k = layer->output_name + 1; k < layer->family->n_outputs; k++) {
    const mha_raw_tensor *second = find(tensors, layer, layer->family->outputs[k].matrix);
    if (second)
      return mha_fail(error, MHA_ERROR_WEIGHTS, "%s holds %s and %s; rule: one output matrix",
                      mha_shown_path(path), mha_shown_path(layer->parts[MHA_PART_WO]->name),
                      mha_shown_path(second->name));
  }
  const mha_raw_tensor *tensor = mha_names_unsupported(tensors, layer);
  if (!tensor)
    return mha_succeed(error);
  return mha_fail(error, MHA_ERROR_UNSUPPORTED,
                  "%s holds %s, which is no part of the layer (%s); rule: what could change the "
                  "result is not ignored",
                  mha_shown_path(path), mha_shown_path(tensor->name), layer->family_name);
}

mha_status mha_names_find(const mha_raw_tensors *tensors, const char *path, const char *prefix,
                          mha_layer_names *layer, mha_error *error) {
  char text[240];
  candidates c = {.list = begin_list(text, sizeof text)};
  if (!prefix)
    (void)mha_names_visit(tensors, add_candidate, &c);
  else if (strlen(prefix) <= INT32_MAX)
    visit_families(tensors, prefix, (int)strlen(prefix), &c);
  if (!c.any)
    return fail_without_layer(tensors, path, prefix, error);
  end_list(&c.list);
  if (c.n_with_query > 1)
    return mha_fail(error, MHA_ERROR_WEIGHTS,
                    "%s holds the layers %s; rule: give the prefix of one, under which no other "
                    "lies",
                    mha_shown_path(path), text);
  *layer = c.best;
  return check_layer(tensors, path, layer, error);
}
