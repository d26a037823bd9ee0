/* Owns mha_forward and mha_self_attention: the reading of a layer call, its defaults, strides, and
 * what overlaps what. Everything is checked before anything is computed. */
#include "forward_call.h"

#include "base/error.h"
#include "cache_args.h"
#include "rules.h"

/* ---- the arrays ---- */

/* Arrays that serve as others have but one name. */
static const char *key_name(const mha_forward_call *c) {
  return c->args.key == c->args.query ? c->names->query : "args.key";
}

static const char *value_name(const mha_forward_call *c) {
  return c->args.value == c->args.key ? key_name(c) : "args.value";
}

/* key NULL = query, value NULL = key. */
static mha_status default_inputs(mha_forward_call *call, mha_error *error) {
  mha_forward_args *a = &call->args;
  const mha_config *c = &call->weights->config;
  if (a->value && !a->key)
    return mha_fail(error, MHA_ERROR_NULL,
                    "args.key is NULL although args.value is given; rule: a value needs a key");
  if (!a->key) {
    if (a->key_length != 0 && a->key_length != a->query_length)
      return mha_fail(error, MHA_ERROR_SIZE,
                      "args.key_length is %lld without a key; rule: 0 or args.query_length, %lld",
                      (long long)a->key_length, (long long)a->query_length);
    if (c->key_width != c->query_width)
      return mha_fail(error, MHA_ERROR_NULL,
                      "%s serves as key and Ek is %lld; rule: that needs Ek = Eq, %lld",
                      call->names->query, (long long)c->key_width, (long long)c->query_width);
    a->key = a->query;
    a->key_length = a->query_length;
    a->key_batch_stride = a->query_batch_stride;
    a->key_row_stride = a->query_row_stride;
  }
  if (!a->value) {
    if (c->value_width != c->key_width)
      return mha_fail(error, MHA_ERROR_NULL,
                      "%s serves as value and Ev is %lld; rule: that needs Ev = Ek, %lld",
                      key_name(call), (long long)c->value_width, (long long)c->key_width);
    a->value = a->key;
    a->value_batch_stride = a->key_batch_stride;
    a->value_row_stride = a->key_row_stride;
  }
  return MHA_OK;
}

static mha_status check_sizes(const mha_forward_call *c, mha_error *error) {
  const mha_forward_args *a = &c->args;
  const mha_size_names *names = &c->names->sizes;
  mha_status status = mha_require_at_least(a->batch, 0, names->batch, error);
  if (!status)
    status = mha_require_at_least(a->query_length, 0, names->query_length, error);
  if (!status)
    status = mha_require_at_least(a->key_length, 0, names->key_length, error);
  return status;
}

/* Sizes that were forgotten: each with the arrays that it is the size of, where they are used. */
static mha_status check_meant(const mha_forward_call *c, mha_error *error) {
  const mha_forward_args *a = &c->args;
  const void *query = c->attends || !a->key ? a->query : NULL;
  const void *output = c->attends ? a->output : NULL;
  const struct {
    int64_t size;
    const char *name;
    const void *given;
    const char *given_name;
  } sizes[] = {{a->batch, "args.batch", query, "args.query"},
               {a->batch, "args.batch", a->key, "args.key"},
               {a->batch, "args.batch", output, "args.output"},
               {a->query_length, "args.query_length", query, "args.query"},
               {a->query_length, "args.query_length", output, "args.output"},
               {a->key_length, "args.key_length", a->key, "args.key"}};
  mha_status status = MHA_OK;
  for (size_t i = 0; !status && i < sizeof sizes / sizeof *sizes; i++)
    status = mha_require_meant(a->flags, sizes[i].size, sizes[i].name, sizes[i].given,
                               sizes[i].given_name, error);
  return status;
}

/* Resolves the strides of one of the caller's arrays and adds it to the call's ranges. */
static mha_status add_array(mha_forward_call *c, const char *name, const float *data,
                            mha_rows_shape shape, mha_rows_shape *resolved, bool is_output,
                            mha_error *error) {
  mha_status status = mha_resolve_strides(&shape, is_output, name, error);
  if (!status && shape.batch > 0 && shape.length > 0)
    status = mha_require(data, name, error);
  if (!status)
    status = mha_ranges_add_rows(&c->ranges, name, data, &shape, is_output, error);
  *resolved = shape;
  return status;
}

/* Packed rows are one entry. Without a sequence, too: all rows then lie behind the last. */
static int64_t count_entries(const mha_forward_args *a, bool packed) {
  return packed ? a->batch > 0 || a->query || a->output : a->batch;
}

static mha_status add_arrays(mha_forward_call *c, bool packed, mha_error *error) {
  const mha_forward_args *a = &c->args;
  const mha_forward_names *names = c->names;
  const int64_t entries = count_entries(a, packed);
  const mha_config *w = &c->weights->config;
  const int64_t Lq = a->query_length;
  const bool reads_keys = Lq > 0 || c->in_cache || c->back;
  const int64_t Lk = entries > 0 && reads_keys && c->append ? a->key_length : 0;
  const mha_rows_shape query = {entries, Lq, w->query_width, a->query_batch_stride,
                                a->query_row_stride};
  const mha_rows_shape key = {entries, Lk, w->key_width, a->key_batch_stride, a->key_row_stride};
  const mha_rows_shape value = {entries, Lk, w->value_width, a->value_batch_stride,
                                a->value_row_stride};
  const mha_rows_shape output = {entries, Lq, w->output_width, a->output_batch_stride,
                                 a->output_row_stride};
  mha_status status = add_array(c, names->query, a->query, query, &c->query, false, error);
  if (!status)
    status = add_array(c, key_name(c), a->key, key, &c->key, false, error);
  if (!status)
    status = add_array(c, value_name(c), a->value, value, &c->value, false, error);
  if (c->back) /* what comes from above has its shape */
    c->output = output;
  else if (!status)
    status = add_array(c, names->output, a->output, output, &c->output, true, error);
  return status;
}

/* The layer's matrices and biases are inputs that no output may overlap. */
static mha_status add_projection(mha_forward_call *c, const char *name, const mha_projection *p,
                                 mha_error *error) {
  const int64_t block = mha_element_block(p->element);
  const int64_t elements =
      p->matrix ? (p->in - 1) * p->in_stride + (p->out - 1) * p->out_stride + 1 : 0;
  mha_status status = mha_ranges_add(&c->ranges, name, p->matrix, elements / block,
                                     mha_element_bytes(p->element, block), false, error);
  if (!status)
    status = mha_ranges_add(&c->ranges, name, p->bias, p->out, sizeof(float), false, error);
  return status;
}

static mha_status add_weights(mha_forward_call *c, mha_error *error) {
  const mha_weights *w = c->weights;
  mha_status status = add_projection(c, "the query weights", &w->query, error);
  if (!status)
    status = add_projection(c, "the key weights", &w->key, error);
  if (!status)
    status = add_projection(c, "the value weights", &w->value, error);
  if (!status)
    status = add_projection(c, "the output weights", &w->output, error);
  return status;
}

/* Arrays of the layer and of the call that are read, by address. */
static mha_status add_vectors(mha_forward_call *c, mha_error *error) {
  const mha_weights *w = c->weights;
  const mha_config *k = &w->config;
  const mha_forward_args *a = &c->args;
  const int64_t heads = k->norm == MHA_NORM_FULL ? k->n_heads : 1;
  const int64_t kv_heads = k->norm == MHA_NORM_FULL ? k->n_kv_heads : 1;
  /* no product overflows: creation has checked the tables, shape_buffers the rows */
  const bool tables = k->rope != MHA_ROPE_NONE && k->rope_cos;
  const int64_t turns = tables ? k->rope_positions * (k->rotary_size / 2) : 0;
  const int64_t queries = c->q.batch * c->q.length;
  const int64_t keys = c->k.batch * c->k.length;
  const struct {
    const char *name;
    const void *data;
    int64_t elements;
    size_t element_bytes;
  } arrays[] = {{"the query norm", w->query_norm, heads * k->head_size, sizeof(float)},
                {"the key norm", w->key_norm, kv_heads * k->head_size, sizeof(float)},
                {"the layer's sinks", w->sinks, k->n_heads, sizeof(float)},
                {"config.rope_cos", k->rope_cos, turns, sizeof(float)},
                {"config.rope_sin", k->rope_sin, turns, sizeof(float)},
                {"args.cache_entries", a->cache_entries, a->batch, sizeof(int64_t)},
                {"args.new_lengths", a->new_lengths, a->batch, sizeof(int64_t)},
                {"args.expected_lengths", a->expected_lengths, a->batch, sizeof(int64_t)},
                {"args.query_positions", a->query_positions, queries, sizeof(int64_t)},
                {"args.key_positions", a->key_positions, keys, sizeof(int64_t)}};
  mha_status status = MHA_OK;
  for (size_t i = 0; !status && i < sizeof arrays / sizeof *arrays; i++)
    status = mha_ranges_add(&c->ranges, arrays[i].name, arrays[i].data, arrays[i].elements,
                            arrays[i].element_bytes, false, error);
  return status;
}

/* Shape of a dense buffer with `width` numbers for each of the caller's rows. Every count of rows,
 * numbers and bytes in it is a product that fits. */
static mha_status shape_buffer(mha_rows_shape *buffer, const mha_rows_shape *rows, int64_t width,
                               const char *name, mha_error *error) {
  int64_t entry = 0;
  int64_t bytes = 0;
  if (!mha_multiply(rows->length, width, &entry) || !mha_multiply(rows->batch, entry, &bytes) ||
      !mha_multiply(bytes, (int64_t)sizeof(float), &bytes))
    return mha_fail(error, MHA_ERROR_OVERFLOW,
                    "%s has %lld entries of %lld rows, which become %lld numbers each; rule: the "
                    "product must not overflow",
                    name, (long long)rows->batch, (long long)rows->length, (long long)width);
  const mha_rows_shape shape = {rows->batch, rows->length, width, entry, width};
  *buffer = shape;
  return MHA_OK;
}

static mha_status shape_buffers(mha_forward_call *c, mha_error *error) {
  const mha_weights *w = c->weights;
  const char *query = c->names->query;
  mha_status status = shape_buffer(&c->q, &c->query, w->query.out, query, error);
  if (!status)
    status = shape_buffer(&c->concat, &c->query, w->output.in, query, error);
  if (!status)
    status = shape_buffer(&c->k, &c->key, w->key.out, key_name(c), error);
  if (!status)
    status = shape_buffer(&c->v, &c->value, w->value.out, value_name(c), error);
  return status;
}

/* New rows of a cache go straight to their places, unless they are rounded on the way, or it is
 * better to project those of all entries side by side first, or of many small pages. */
static void choose_destination(mha_forward_call *c) {
  const int64_t n = c->key.length;
  const mha_cache_options *o = c->in_cache ? &c->args.cache->sizes : NULL;
  c->gather = c->in_cache && c->append && n > 0 &&
              (o->type != MHA_F32 || c->core.visibility.key_starts ||
               n <= mha_gathered_rows(c->key.batch, n) || mha_paged_rows(o->page_tokens, n) > 0);
  c->direct = c->in_cache && !c->gather ? &c->cached : NULL;
}

/* ---- positions ---- */

static mha_status check_key_positions(const mha_forward_call *c, bool key_is_query,
                                      mha_error *error) {
  if ((key_is_query || !c->append) && (c->args.key_positions || c->args.key_position != 0))
    return mha_fail(error, MHA_ERROR_VALUE,
                    "args.%s is given without a key; rule: keys then have the queries' positions",
                    c->args.key_positions ? "key_positions" : "key_position");
  return MHA_OK;
}

/* Q and K as they are prepared after their projection. */
static mha_status read_positions(mha_forward_call *c, bool key_is_query, mha_error *error) {
  const mha_forward_args *a = &c->args;
  const mha_weights *w = c->weights;
  const mha_preparing q = {.weights = w,
                           .visibility = &c->core.visibility,
                           .norm = w->query_norm,
                           .heads = w->config.n_heads,
                           .shape = c->q,
                           .live = mha_forward_live_queries(c),
                           .positions = {c->names->row, a->query_positions, a->query_position}};
  const mha_positions own = {"key", a->key_positions, a->key_position};
  c->prepare_q = q;
  c->prepare_k = q;
  c->prepare_k.norm = w->key_norm;
  c->prepare_k.heads = w->config.n_kv_heads;
  c->prepare_k.shape = c->k;
  c->prepare_k.cached = c->direct;
  c->prepare_k.live = mha_forward_live_keys(c);
  c->prepare_k.keys = true;
  if (!key_is_query)
    c->prepare_k.positions = own;
  mha_status status = check_key_positions(c, key_is_query, error);
  if (!status && c->attends)
    status = mha_prepare_check(&c->prepare_q, error);
  if (!status && c->append)
    status = mha_prepare_check(&c->prepare_k, error);
  return status;
}

/* ---- the call ---- */

/* The way back takes the arguments of the forward call and leaves out what that writes. */
static void forget_outputs(mha_forward_args *a) {
  a->output = NULL;
  a->accumulate = 0;
  a->results = NULL;
  a->tape = NULL;
}

/* The arguments as they are, before anything of them is followed. */
static mha_status read_args(mha_forward_call *c, const mha_forward_args *given, mha_asked *asked,
                            mha_error *error) {
  mha_forward_args *a = &c->args;
  mha_status status = mha_read_struct(a, sizeof *a, MHA_FIRST_FORWARD_ARGS, given, "args", error);
  if (!status && c->back)
    forget_outputs(a);
  if (!status)
    status = mha_require_flags(a->flags, MHA_ALLOW_EMPTY, "args.flags", error);
  if (!status)
    status = mha_require_reserved(a->reserved, "args.reserved", error);
  if (!status)
    status = mha_cache_args_check(a, error);
  if (!status && a->cache && (a->tape || c->back))
    status = mha_fail(error, MHA_ERROR_UNSUPPORTED,
                      "args.cache is given together with %s; rule: nothing passes back through a "
                      "cache",
                      c->back ? "gradients" : "args.tape");
  c->append = a->cache_mode != MHA_CACHE_ATTEND;
  c->attends = a->cache_mode != MHA_CACHE_APPEND;
  if (!status)
    status = mha_rules_read(asked, a->rules, a->results, error);
  if (!status && a->cache_mode == MHA_CACHE_APPEND)
    status = mha_rules_ignore(asked, error);
  if (!status)
    status = check_sizes(c, error);
  if (!status)
    status = check_meant(c, error);
  return status;
}

mha_status mha_forward_read(mha_forward_call *c, const mha_forward_args *given, mha_error *error) {
  mha_asked asked;
  mha_forward_args *a = &c->args;
  const mha_config *w = &c->weights->config;
  const mha_rules_defaults defaults = {c->weights->scale, w->softcap, c->weights->sinks};
  mha_core *core = &c->core;
  mha_status status = read_args(c, given, &asked, error);
  if (status)
    return status;
  const bool key_is_query = c->append && !a->key;
  if (c->append)
    status = default_inputs(c, error);
  if (!c->attends)
    a->query_length = 0;
  core->visibility.B = a->batch;
  core->visibility.H = w->n_heads;
  core->visibility.Lq = a->query_length;
  core->visibility.Lk = a->key_length;
  core->G = w->n_kv_heads;
  core->d = w->head_size;
  core->dv = w->value_head_size;
  const mha_cache_use use = {c->append, c->attends, key_is_query};
  if (!status && a->cache)
    status = mha_rules_read_starts(&asked, use, &core->visibility, error);
  if (!status && a->cache)
    status = mha_cache_args_read(c, error);
  if (!status)
    status = add_arrays(c, mha_rules_are_packed(&asked), error);
  if (!status)
    status = shape_buffers(c, error);
  if (!status)
    status = add_weights(c, error);
  if (!status)
    status = add_vectors(c, error);
  if (!status)
    status = mha_rules_apply(&asked, key_is_query, &defaults, core, &c->ranges, error);
  if (status)
    return status;
  choose_destination(c);
  return read_positions(c, key_is_query, error);
}

const mha_forward_names mha_forward_names_of_args = {
    {"args.batch", "args.query_length", "args.key_length"}, "args.query", "args.output", "query"};

static mha_status forward(mha_context *context, const mha_weights *weights,
                          const mha_forward_args *args, const mha_forward_names *names,
                          mha_error *error) {
  mha_forward_call c = {.names = names, .weights = weights, .context = context};
  mha_status status = mha_require(context, "context", error);
  if (!status)
    status = mha_require(weights, "weights", error);
  if (status)
    return status;
  status = mha_forward_read(&c, args, error);
  if (!status)
    status = mha_ranges_check(&c.ranges, error);
  if (!status)
    status = mha_forward_run(&c, error);
  mha_cache_args_end(&c, status == MHA_OK);
  return status ? status : mha_succeed(error);
}

mha_status mha_forward(mha_context *context, const mha_weights *weights,
                       const mha_forward_args *args, mha_error *error) {
  return forward(context, weights, args, &mha_forward_names_of_args, error);
}

mha_status mha_self_attention(mha_context *context, const mha_weights *weights, const float *x,
                              int64_t batch, int64_t length, float *output, mha_error *error) {
  const mha_forward_names names = {{"batch", "length", "length"}, "x", "output", "row"};
  mha_forward_args args;
  MHA_INIT(&args);
  args.flags = MHA_ALLOW_EMPTY; /* sizes that are parameters are not forgotten */
  args.batch = batch;
  args.query_length = length;
  args.query = x;
  args.output = output;
  return forward(context, weights, &args, &names, error);
}
