/* Owns the finding of a layer by the names of its parts.
 *
 * A reading is one prefix with one family. Every part of a reading is looked up by its name, so
 * nothing is guessed from shapes. */
#include "names.h"

#include "base/error.h"
#include "families.h"
#include "lookup.h"
#include "path.h"
#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Parts by which a layer is found. The output's names are not among them: other modules, such as
 * GPT-2's and BERT's feed-forward ones, have the same. */
static const mha_part anchors[] = {MHA_PART_WQ, MHA_PART_WQKV, MHA_PART_WK, MHA_PART_WV,
                                   MHA_PART_BQ, MHA_PART_BQKV, MHA_PART_BK, MHA_PART_BV};

enum { N_ANCHORS = sizeof anchors / sizeof anchors[0] };

/* ---- Looking names up ------------------------------------------------------------------------ */

static const mha_raw_tensor *find(const mha_raw_tensors *tensors, const mha_layer_names *layer,
                                  const char *rest) {
  return mha_lookup_find(tensors, layer->prefix, layer->prefix_bytes, rest);
}

/* ---- Readings -------------------------------------------------------------------------------- */

const char *mha_names_part(const mha_layer_names *layer, mha_part part) {
  const mha_output_names *output = &layer->family->outputs[layer->output_name];
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
  return part <= MHA_PART_WO && mha_names_part(layer, part) != NULL;
}

/* The output projection has the first of its names under which a matrix lies, or else a bias. */
static void find_output(const mha_raw_tensors *tensors, mha_layer_names *layer) {
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < layer->family->n_outputs; k++) {
      const mha_output_names *output = &layer->family->outputs[k];
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
    const char *name = mha_names_part(&layer, (mha_part)part);
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
  if (!name || !mha_ends_with(tensor->name, name))
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
  for (int f = 0; f < mha_n_name_families; f++)
    for (int k = 0; &mha_name_families[f] != layer->family && k < N_ANCHORS; k++)
      if (read_as(tensors, tensor, anchors[k], &mha_name_families[f], &other) &&
          reads_better(&other, layer))
        return true;
  return false;
}

int64_t mha_names_visit(const mha_raw_tensors *tensors, mha_layer_visitor *visitor, void *user) {
  int64_t n = 0;
  mha_layer_names layer;
  for (int64_t i = 0; i < tensors->n; i++)
    for (int f = 0; f < mha_n_name_families; f++)
      for (int k = 0; k < N_ANCHORS; k++) {
        const mha_raw_tensor *tensor = &tensors->items[i];
        if (!read_as(tensors, tensor, anchors[k], &mha_name_families[f], &layer) ||
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
    add_item(list, "%s%s", prefix, mha_names_part(layer, part));
}

char *mha_names_missing(const mha_layer_names *layer, char *text, size_t bytes) {
  list_text list = begin_list(text, bytes);
  for (int part = 0; part < MHA_N_PARTS; part++)
    if (lacks(layer, (mha_part)part))
      add_missing(&list, layer, (mha_part)part);
  end_list(&list);
  return text;
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
  for (int f = 0; f < mha_n_name_families; f++) {
    const mha_layer_names layer = read_layer(tensors, prefix, prefix_bytes, &mha_name_families[f]);
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
