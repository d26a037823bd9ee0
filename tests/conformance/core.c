/* Owns what the translators share. */
#include "core.h"
#include "files/text.h"

#include <math.h>
#include <string.h>

bool conf_read_sizes(conf_case *c, const char *query_heads, const char *kv_heads,
                     conf_sizes *sizes) {
  int64_t total;
  if (!conf_dimension(c, "batch", &sizes->B) || !conf_dimension(c, "q_len", &sizes->Lq) ||
      !conf_dimension(c, "kv_len", &sizes->fresh) || !conf_dimension(c, "past_len", &sizes->past) ||
      !conf_dimension(c, "total_len", &total) || !conf_dimension(c, query_heads, &sizes->H) ||
      !conf_dimension(c, kv_heads, &sizes->G) || !conf_dimension(c, "head_size", &sizes->d) ||
      !conf_dimension(c, "v_head_size", &sizes->dv))
    return false;
  sizes->Lk = sizes->past + sizes->fresh;
  return sizes->Lk == total || conf_fail(c, "total_len is not past_len + kv_len");
}

/* ---- Views ------------------------------------------------------------------------------------
 */

mha_tensor conf_tensor(const float *data, conf_layout layout, int64_t batch, int64_t length,
                       int64_t heads, int64_t size) {
  const bool heads_first = layout == CONF_HEADS_FIRST;
  const mha_tensor tensor = {.data = data,
                             .batch = batch,
                             .length = length,
                             .heads = heads,
                             .size = size,
                             .batch_stride = length * heads * size,
                             .row_stride = heads_first ? size : heads * size,
                             .head_stride = heads_first ? length * size : size,
                             .size_stride = 1};
  return tensor;
}

static bool has_shape(const mha_npy_array *numbers, int rank, const int64_t *shape) {
  for (int i = 0; i < rank && numbers->rank == rank; i++) {
    if (numbers->shape[i] != shape[i])
      return false;
  }
  return numbers->rank == rank;
}

static bool expect_shape(conf_case *c, const conf_array *array, int rank, const int64_t *shape) {
  char actual[128], expected[128];
  if (has_shape(&array->numbers, rank, shape))
    return true;
  mha_shape_text(array->numbers.rank, array->numbers.shape, actual, sizeof actual);
  mha_shape_text(rank, shape, expected, sizeof expected);
  return conf_fail(c, "%s has the shape %s, but dims and layout say %s", array->name, actual,
                   expected);
}

bool conf_view(conf_case *c, const conf_array *array, conf_layout layout, int64_t batch,
               int64_t length, int64_t heads, int64_t size, mha_tensor *view) {
  const int64_t by_heads[] = {batch, heads, length, size};
  const int64_t by_tokens[] = {batch, length, heads * size};
  const bool heads_first = layout == CONF_HEADS_FIRST;
  *view = conf_tensor(array->numbers.data, layout, batch, length, heads, size);
  return expect_shape(c, array, heads_first ? 4 : 3, heads_first ? by_heads : by_tokens);
}

bool conf_check_integers(conf_case *c, const conf_array *array, int64_t rows, int64_t columns) {
  const int64_t shape[] = {rows, columns};
  if (array->kind != MHA_NPY_INTEGERS)
    return conf_cannot(c, "%s does not hold integers", array->name);
  return expect_shape(c, array, columns ? 2 : 1, shape);
}

/* Copies rows to [B][heads][length][size], beginning with row `first`. */
static void copy_rows(const mha_tensor *from, float *to, int64_t length, int64_t first) {
  const size_t row_bytes = (size_t)from->size * sizeof(float);
  for (int64_t b = 0; b < from->batch; b++) {
    for (int64_t h = 0; h < from->heads; h++) {
      float *target = to + ((b * from->heads + h) * length + first) * from->size;
      const float *source =
          (const float *)from->data + b * from->batch_stride + h * from->head_stride;
      for (int64_t i = 0; i < from->length; i++)
        memcpy(target + i * from->size, source + i * from->row_stride, row_bytes);
    }
  }
}

bool conf_concatenate(conf_case *c, const conf_array *past, int64_t past_length,
                      const mha_tensor *fresh, mha_tensor *all) {
  const int64_t length = past_length + fresh->length;
  float *numbers = conf_floats(c, fresh->batch * fresh->heads * length * fresh->size);
  if (!numbers)
    return false;
  if (past) {
    mha_tensor view;
    if (!conf_view(c, past, CONF_HEADS_FIRST, fresh->batch, past_length, fresh->heads, fresh->size,
                   &view))
      return false;
    copy_rows(&view, numbers, length, 0);
  }
  copy_rows(fresh, numbers, length, past_length);
  *all = conf_tensor(numbers, CONF_HEADS_FIRST, fresh->batch, length, fresh->heads, fresh->size);
  return true;
}

/* ---- Masks ------------------------------------------------------------------------------------
 */

/* The extents of a mask, 1s before those it has; columns are Lk or fewer. */
static bool find_extents(conf_case *c, const conf_array *mask, const conf_sizes *sizes,
                         int64_t extents[4]) {
  const int64_t full[] = {sizes->B, sizes->H, sizes->Lq, sizes->Lk};
  const int missing = 4 - mask->numbers.rank;
  bool fits = missing >= 0 && missing < 4;
  for (int i = 0; i < 4 && fits; i++) {
    extents[i] = i < missing ? 1 : mask->numbers.shape[i - missing];
    fits = i == 3 ? extents[i] <= full[i] : extents[i] == 1 || extents[i] == full[i];
  }
  if (!fits)
    conf_cannot(c, "%s does not broadcast to [B][H][Lq][Lk]", mask->name);
  return fits;
}

/* Rows of `from` columns become rows of `to` columns, their tail filled. */
static const float *widen_floats(conf_case *c, const float *numbers, int64_t rows, int64_t from,
                                 int64_t to) {
  float *wide = conf_floats(c, rows * to);
  for (int64_t i = 0; wide && i < rows * to; i++)
    wide[i] = i % to < from ? numbers[i / to * from + i % to] : -INFINITY;
  return wide;
}

static const uint8_t *widen_bytes(conf_case *c, const uint8_t *bytes, int64_t rows, int64_t from,
                                  int64_t to) {
  uint8_t *wide = conf_bytes(c, rows * to);
  for (int64_t i = 0; wide && i < rows * to; i++)
    wide[i] = i % to < from ? bytes[i / to * from + i % to] : 0;
  return wide;
}

bool conf_apply_mask(conf_case *c, const conf_array *mask, const conf_sizes *sizes,
                     mha_rules *rules) {
  int64_t e[4] = {1, 1, 1, 1};
  if (mask->kind == MHA_NPY_INTEGERS)
    return conf_cannot(c, "%s holds integers", mask->name);
  if (!find_extents(c, mask, sizes, e))
    return false;
  const int64_t rows = e[0] * e[1] * e[2];
  const int64_t columns = sizes->Lk;
  if (mask->kind == MHA_NPY_BYTES) {
    const uint8_t *bytes = widen_bytes(c, mask->numbers.data, rows, e[3], columns);
    rules->attend = (mha_mask){bytes, e[0], e[1], e[2], columns, 0, 0, 0, 0, 0};
    return bytes != NULL;
  }
  const float *numbers = widen_floats(c, mask->numbers.data, rows, e[3], columns);
  rules->bias = (mha_bias){numbers, e[0], e[1], e[2], columns, 0, 0, 0, 0, 0};
  return numbers != NULL;
}

/* ---- The call ---------------------------------------------------------------------------------
 */

bool conf_attend(conf_case *c, mha_context *context, const mha_tensor *q, const mha_tensor *k,
                 const mha_tensor *v, const mha_rules *rules, const mha_results *results,
                 conf_layout layout, const char *output_name) {
  const int64_t n = q->batch * q->length * q->heads * v->size;
  float *output = conf_floats(c, n);
  if (!output)
    return false;
  const mha_tensor view = conf_tensor(output, layout, q->batch, q->length, q->heads, v->size);
  mha_error error;
  mha_attend_args args;
  MHA_INIT(&args);
  args.output = output;
  args.output_batch_stride = view.batch_stride;
  args.output_row_stride = view.row_stride;
  args.output_head_stride = view.head_stride;
  args.rules = rules;
  args.results = results;
  return conf_expect(c, mha_attend(context, q, k, v, &args, &error), &error) &&
         conf_compare(c, output_name, output, n);
}
