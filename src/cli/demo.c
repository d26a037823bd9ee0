/* Owns `mha demo`: the article's example, its numbers built in. Every shape and stride that it
 * prints comes from the views that the library's trace shows, and from views of those. */
#include "article.h"
#include "commands.h"
#include "labels.h"
#include "results.h"
#include "signals.h"
#include "svg.h"
#include "view.h"

#include "base/error.h"
#include "files/npy.h"
#include "files/text.h"

#include <inttypes.h>
#include <string.h>

enum { STEP_Q, STEP_K, STEP_V, STEP_WEIGHTS, STEP_HEADS, STEP_CONCAT, STEP_OUTPUT, N_STEPS };

static const char *const step_names[N_STEPS] = {"Q",     "K",      "V",     "weights",
                                                "heads", "concat", "output"};

/* What the trace has shown, without the batch dimension. */
typedef struct demo {
  mha_weights *weights;
  mha_context *context;
  mha_config config; /* of the layer, every size derived */
  bool print_trace;
  bool seen[N_STEPS];
  mha_view steps[N_STEPS];
  float attention[MHA_ARTICLE_HEADS * MHA_ARTICLE_LENGTH * MHA_ARTICLE_LENGTH]; /* [H][L][L] */
  float output[MHA_ARTICLE_LENGTH * MHA_ARTICLE_WIDTH];                         /* [L][Eo] */
} demo;

static void collect(void *user, const mha_trace_step *step) {
  demo *d = user;
  if (d->print_trace)
    mha_view_trace(stdout, step);
  for (int i = 0; i < N_STEPS; i++)
    if (strcmp(step->name, step_names[i]) == 0) {
      d->steps[i] = mha_view_without_batch(mha_view_of_step(step));
      d->seen[i] = true;
    }
}

static mha_status create(demo *d, mha_error *error) {
  mha_config config;
  mha_matrices matrices;
  mha_config_init(&config, MHA_ARTICLE_WIDTH, MHA_ARTICLE_HEADS);
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.ownership = MHA_BORROW;
  matrices.query = mha_article_wq;
  matrices.key = mha_article_wk;
  matrices.value = mha_article_wv;
  matrices.output = mha_article_wo;
  mha_status status = mha_weights_create(&config, &matrices, &d->weights, error);
  MHA_INIT(&d->config);
  if (!status)
    status = mha_weights_config(d->weights, &d->config, error);
  if (!status)
    status = mha_context_create(NULL, &d->context, error);
  return status ? status : mha_context_trace(d->context, collect, d, error);
}

static mha_status compute(demo *d, mha_error *error) {
  mha_results results;
  mha_forward_args args;
  MHA_INIT(&results);
  results.weights = d->attention;
  MHA_INIT(&args);
  args.batch = 1;
  args.query_length = MHA_ARTICLE_LENGTH;
  args.query = mha_article_x;
  args.output = d->output;
  args.results = &results;
  if (d->print_trace)
    puts("trace");
  mha_status status = mha_forward(d->context, d->weights, &args, error);
  for (int i = 0; !status && i < N_STEPS; i++)
    if (!d->seen[i])
      status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                        "the library's trace has no step \"%s\"; rule: the demo shows seven steps",
                        step_names[i]);
  if (d->print_trace)
    puts("");
  return status;
}

/* ---- The walk -------------------------------------------------------------------------------- */

static void print_named(const char *name, const char *what, const mha_view *view) {
  char label[64];
  (void)snprintf(label, sizeof label, "%s%s", name, what);
  mha_view_print(label, view, stdout);
}

/* [L][E] as [L][heads][size] and, with its first two dimensions exchanged, [heads][L][size]. */
static void print_split(const char *name, mha_view view, int64_t heads) {
  if (!mha_view_split(&view, 1, heads)) {
    printf("  %s: %" PRId64 " columns do not split into %" PRId64 " heads\n", name, view.shape[1],
           heads);
    return;
  }
  print_named(name, " after reshape", &view);
  view = mha_view_swap(view, 0, 1);
  print_named(name, " after transpose", &view);
}

static void print_heads(const demo *d) {
  const mha_view *heads = &d->steps[STEP_HEADS];
  mha_view_print("weights", &d->steps[STEP_WEIGHTS], stdout);
  for (int64_t h = 0; h < heads->shape[0]; h++) {
    char label[32];
    const mha_view head = mha_view_entry(*heads, h);
    (void)snprintf(label, sizeof label, "head %" PRId64 ":", h);
    mha_view_print(label, &head, stdout);
  }
}

/* The heads lie side by side already, so that concatenating is a look at them in another shape. */
static void print_concatenation(const demo *d) {
  mha_view view = d->steps[STEP_HEADS];
  mha_view_print("stacked", &view, stdout);
  view = mha_view_swap(view, 0, 1);
  mha_view_print("transposed back", &view, stdout);
  const bool merged = mha_view_merge(&view, 1);
  mha_view_print("reshaped", merged ? &view : &d->steps[STEP_CONCAT], stdout);
  printf("  same memory as the heads, nothing copied: %s\n",
         merged && mha_view_same_place(&view, &d->steps[STEP_CONCAT]) ? "true" : "false");
}

static void print_output(const demo *d, const mha_view *input) {
  const mha_view *output = &d->steps[STEP_OUTPUT];
  char shape[128];
  mha_view_print("output", output, stdout);
  printf("  same shape as the input: %s\n", mha_view_same_shape(output, input) ? "true" : "false");
  printf("\noutput %s\n", mha_shape_text(output->rank, output->shape, shape, sizeof shape));
  for (int64_t i = 0; i < output->shape[0]; i++) {
    for (int64_t j = 0; j < output->shape[1]; j++)
      printf(" %11.7f", (double)d->output[i * output->strides[0] + j * output->strides[1]]);
    puts("");
  }
}

static void print_walk(const demo *d) {
  static const int projections[] = {STEP_Q, STEP_K, STEP_V};
  const mha_view input = {.data = mha_article_x,
                          .rank = 2,
                          .shape = {MHA_ARTICLE_LENGTH, MHA_ARTICLE_WIDTH},
                          .strides = {MHA_ARTICLE_WIDTH, 1}};
  const int64_t heads[] = {d->config.n_heads, d->config.n_kv_heads, d->config.n_kv_heads};
  printf("the article's example: %d tokens of width %d, %" PRId64 " heads of size %" PRId64 "\n\n",
         MHA_ARTICLE_LENGTH, MHA_ARTICLE_WIDTH, d->config.n_heads, d->config.head_size);
  puts("input");
  mha_view_print("X", &input, stdout);
  puts("1 linear map");
  for (int i = 0; i < 3; i++)
    mha_view_print(step_names[projections[i]], &d->steps[projections[i]], stdout);
  puts("2 split into heads (views: nothing is copied)");
  for (int i = 0; i < 3; i++)
    print_split(step_names[projections[i]], d->steps[projections[i]], heads[i]);
  puts("3 attention per head");
  print_heads(d);
  puts("4 concatenate");
  print_concatenation(d);
  puts("5 output projection");
  print_output(d, &input);
}

/* ---- The picture ----------------------------------------------------------------------------- */

/* The article's sentence, "a tree of apples stands afar": a token for each character. */
#define ARTICLE_SENTENCE                                                                           \
  "\xE8\xBF\x9C\xE6\x96\xB9\xE6\x9C\x89\xE9\xA2\x97"                                               \
  "\xE8\x8B\xB9\xE6\x9E\x9C\xE6\xA0\x91"

static mha_status cut_labels(const mha_options *options, mha_labels *labels, mha_error *error) {
  const mha_option_value *given = &options->values[MHA_OPTION_LABELS];
  return mha_labels_cut(given->given ? given->text : ARTICLE_SENTENCE, MHA_ARTICLE_LENGTH, labels,
                        error);
}

/* Writes the picture, if there is a path for it. */
static mha_status write_picture(const demo *d, const char *path, const mha_labels *labels,
                                mha_error *error) {
  const mha_heat_maps maps = {1,
                              MHA_ARTICLE_HEADS,
                              MHA_ARTICLE_LENGTH,
                              MHA_ARTICLE_LENGTH,
                              d->attention,
                              labels->items,
                              labels->items};
  mha_output output = {.has_temporary = 0};
  if (!path)
    return MHA_OK;
  mha_signals_watch(&output, 1);
  mha_status status = mha_svg_stage(path, &maps, &output, error);
  if (!status)
    status = mha_output_commit(&output, error);
  mha_signals_watch(NULL, 0);
  return status;
}

int mha_demo(const mha_options *options, mha_error *error) {
  demo d = {.print_trace = options->values[MHA_OPTION_TRACE].given};
  const mha_result picture = mha_result_of(options, MHA_OPTION_SVG);
  mha_labels labels = {0};
  mha_status status = cut_labels(options, &labels, error);
  if (!status)
    status = mha_results_check(options, &picture, 1, error);
  if (status) {
    mha_labels_release(&labels);
    return status == MHA_ERROR_MEMORY || status == MHA_ERROR_IO ? MHA_EXIT_DATA : MHA_EXIT_USAGE;
  }
  status = create(&d, error);
  if (!status)
    status = compute(&d, error);
  if (!status)
    status = write_picture(&d, options->values[MHA_OPTION_SVG].text, &labels, error);
  if (!status)
    print_walk(&d);
  mha_context_destroy(d.context);
  mha_weights_destroy(d.weights);
  mha_labels_release(&labels);
  return status ? MHA_EXIT_DATA : MHA_EXIT_OK;
}
