/* Owns the fixture: numbers from a seed, arguments for the library, the same for the judge. */
#include "fixture.h"

#include "dropout.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Sizes and the note ---------------------------------------------------------------------- */

static void fill(int64_t *size, int64_t otherwise) {
  if (*size == 0)
    *size = otherwise;
}

static void fill_sizes(test_case *c) {
  fill(&c->B, 1);
  fill(&c->H, 1);
  fill(&c->G, c->H);
  fill(&c->d, 1);
  fill(&c->dv, c->d);
  fill(&c->Eq, c->H * c->d);
  fill(&c->Ek, c->Eq);
  fill(&c->Ev, c->Ek);
  fill(&c->Eo, c->Eq);
  if (c->source == TEST_SELF)
    c->Lk = c->Lq;
  if (c->core) {
    c->source = TEST_CROSS;
    c->Eq = c->H * c->d;
    c->Ek = c->G * c->d;
    c->Ev = c->G * c->dv;
    c->Eo = c->H * c->dv;
    c->absent = TEST_ALL;
    c->biases = 0;
    c->accumulate = false;
  } else {
    c->k_type = c->v_type = MHA_F32;
  }
  if (c->rope != MHA_ROPE_NONE) {
    fill(&c->rotary, c->d);
    c->rope_base = c->rope_base > 0 ? c->rope_base : 10000.0;
  }
  if (c->threads == 0)
    c->threads = 1;
}

static void note_case(const test_case *c) {
  test_note("%s seed %" PRIu64 ": B %" PRId64 " Lq %" PRId64 " Lk %" PRId64 " H %" PRId64
            " G %" PRId64 " d %" PRId64 " dv %" PRId64 " Eq %" PRId64 " Ek %" PRId64 " Ev %" PRId64
            " Eo %" PRId64 " threads %d front %d; out_in %d borrow %d weights laid %d absent %x "
            "biases %x types %d %d %d %d, k %d v %d, odd %d; source %d layout %d accumulate %d; "
            "causal %d window %d (%" PRId64 ",%" PRId64 ") alignment %d offset %" PRId64
            " each %d lengths q %d k %d packed %d tail %d "
            "mask %d/%x bias %d/%x hides %d strides %d alibi %d sinks %d scale %d %g softcap %g in "
            "call %d dropout %g seed %" PRIu64 " call %" PRIu64
            " want %x stage %d; norm %d ones %d rope %d/%" PRId64 " base %g tables %d "
            "positions +%" PRId64 " +%" PRId64 " given %d",
            c->core ? "attend" : "forward", c->seed, c->B, c->Lq, c->Lk, c->H, c->G, c->d, c->dv,
            c->Eq, c->Ek, c->Ev, c->Eo, c->threads, c->at_front, c->out_in, c->borrow,
            (int)c->weight_layout, c->absent, c->biases, (int)c->query_type, (int)c->key_type,
            (int)c->value_type, (int)c->output_type, (int)c->k_type, (int)c->v_type,
            c->odd_addresses, (int)c->source, (int)c->layout, c->accumulate, c->causal, c->window,
            c->left, c->right, (int)c->alignment, c->offset, c->offset_each, c->query_lengths,
            c->key_lengths, c->packed, c->packed_tail, c->has_mask, c->mask_extents, c->has_bias,
            c->bias_extents, c->bias_hides, c->mask_strides, c->alibi, c->sinks, c->scale_given,
            (double)c->scale, (double)c->softcap, c->rules_in_call, (double)c->dropout,
            c->dropout_seed, c->dropout_call, c->want, (int)c->stage, (int)c->norm, c->norm_ones,
            (int)c->rope, c->rotary, c->rope_base, c->rope_tables, c->query_position,
            c->key_position, c->positions_given);
}

/* ---- Numbers that are not float32 ------------------------------------------------------------ */

int64_t test_block_of(int32_t type) {
  return type == MHA_Q8_0 || type == MHA_Q4_0 ? 32 : 1;
}

unsigned char *test_stored_at(unsigned char *stored, int32_t type, int64_t index) {
  const int64_t block = test_block_of(type);
  return stored + index / block * (int64_t)mha_element_bytes(type, block);
}

void test_spoil_stored(unsigned char *stored, int32_t type, int64_t index, bool infinite) {
  const uint16_t nan = type == MHA_BF16 ? 0x7fc0 : 0x7e00;
  const uint16_t infinity = type == MHA_BF16 ? 0x7f80 : 0x7c00;
  memcpy(test_stored_at(stored, type, index), infinite ? &infinity : &nan, sizeof nan);
}

/* Room for n numbers, NaN in any type until somebody writes; NULL for float32. */
static unsigned char *stored_room(test_fixture *f, int32_t type, int64_t n) {
  if (type == MHA_F32)
    return NULL;
  const size_t bytes = mha_element_bytes(type, n) + (f->c.odd_addresses ? 1 : 0);
  unsigned char *room = test_pool_bytes(&f->pool, bytes);
  memset(room, 0xff, bytes);
  return f->c.odd_addresses && (uintptr_t)room % 2 == 0 ? room + 1 : room;
}

static void convert(int32_t from, const void *source, int32_t to, void *target, int64_t n) {
  mha_error error;
  test_expect(mha_element_convert(from, source, to, target, n, &error), MHA_OK, &error);
}

/* Stores n numbers that follow one another, and makes the floats what became of them. */
static void store_row(float *data, unsigned char *stored, int32_t type, int64_t index, int64_t n) {
  unsigned char *at = test_stored_at(stored, type, index);
  convert(MHA_F32, data + index, type, at, n);
  convert(type, at, MHA_F32, data + index, n);
}

typedef void test_head(const test_view *view, int64_t index);

static void each_head(const test_view *v, test_head *visit) {
  for (int64_t b = 0; v->stored && b < v->batch; b++)
    for (int64_t i = 0; i < v->length; i++)
      for (int64_t h = 0; h < v->heads; h++)
        visit(v, test_at(v, b, i, h, 0) - v->data);
}

static void store_head(const test_view *v, int64_t index) {
  store_row(v->data, v->stored, v->type, index, v->size);
}

static void widen_head(const test_view *v, int64_t index) {
  convert(v->type, test_stored_at(v->stored, v->type, index), MHA_F32, v->data + index, v->size);
}

void test_store(const test_view *view) {
  each_head(view, store_head);
}

void test_widen(const test_view *view) {
  each_head(view, widen_head);
}

/* ---- Strided tensors ------------------------------------------------------------------------- */

float *test_at(const test_view *view, int64_t b, int64_t i, int64_t h, int64_t c) {
  return view->data + b * view->batch_stride + i * view->row_stride + h * view->head_stride + c;
}

test_view test_make_view(test_fixture *f, test_layout layout, int32_t type, int64_t length,
                         int64_t heads, int64_t size) {
  const int64_t batch = f->c.packed ? 1 : f->c.B, block = test_block_of(type);
  test_view v = {NULL, batch, length, heads, size, 0, heads * size, size, 0, type, NULL};
  v.batch_stride = length * v.row_stride;
  if (layout == TEST_PADDED) {
    v.head_stride = heads > 1 ? size + block : size;
    v.row_stride = heads * v.head_stride + 3 * block;
    v.batch_stride = length * v.row_stride + 5 * block;
  } else if (layout == TEST_LENGTH_FIRST) {
    v.batch_stride = heads * size;
    v.row_stride = batch * v.batch_stride;
  } else if (layout == TEST_HEAD_FIRST) {
    v.row_stride = size;
    v.head_stride = length * size;
  }
  if (batch > 0 && length > 0)
    v.floats = (batch - 1) * v.batch_stride + (length - 1) * v.row_stride +
               (heads - 1) * v.head_stride + size;
  v.data = test_pool_floats(&f->pool, v.floats);
  v.stored = stored_room(f, type, v.floats);
  return v;
}

static test_view make_view_of(test_fixture *f, int32_t type, int64_t length, int64_t heads,
                              int64_t size) {
  return test_make_view(f, f->c.layout, type, length, heads, size);
}

static test_view make_view(test_fixture *f, int64_t length, int64_t heads, int64_t size) {
  return make_view_of(f, MHA_F32, length, heads, size);
}

/* Standard normal numbers in every row for which `reads` says so; poison stays in the others. */
typedef bool test_reads(const test_fixture *f, int64_t b, int64_t i);

static void fill_view(test_fixture *f, const test_view *v, test_reads *reads) {
  for (int64_t b = 0; b < v->batch; b++)
    for (int64_t i = 0; i < v->length; i++)
      for (int64_t h = 0; h < v->heads; h++)
        if (reads(f, b, i))
          test_fill_normal(&f->random, test_at(v, b, i, h, 0), v->size, 1.0);
}

float *test_gather(const test_view *v) {
  const int64_t n = v->batch * v->length * v->heads * v->size;
  float *dense = malloc((size_t)(n > 0 ? n : 1) * sizeof *dense), *at = dense;
  assert_non_null(dense);
  for (int64_t b = 0; b < v->batch; b++)
    for (int64_t i = 0; i < v->length; i++)
      for (int64_t h = 0; h < v->heads; h++, at += v->size)
        memcpy(at, test_at(v, b, i, h, 0), (size_t)v->size * sizeof *at);
  return dense;
}

test_shape test_view_shape(const test_view *v) {
  return (test_shape){{v->batch, v->length, v->heads, v->size}};
}

/* ---- The layer's numbers --------------------------------------------------------------------- */

static test_matrix *matrix_of(test_fixture *f, int which) {
  test_matrix *all[] = {&f->wq, &f->wk, &f->wv, &f->wo};
  return all[which];
}

static int64_t matrix_rows(const test_fixture *f, const test_matrix *m) {
  return f->c.out_in ? m->out : m->in;
}

static int64_t matrix_columns(const test_fixture *f, const test_matrix *m) {
  return f->c.out_in ? m->in : m->out;
}

/* Normal numbers scaled by 1/√fan-in, as the contract's bounds want them. */
static void fill_matrix(test_fixture *f, test_matrix *m) {
  for (int64_t r = 0; r < matrix_rows(f, m); r++) {
    test_fill_normal(&f->random, m->data + r * m->ld, matrix_columns(f, m),
                     1.0 / sqrt((double)m->in));
    if (m->stored)
      store_row(m->data, m->stored, m->type, r * m->ld, matrix_columns(f, m));
  }
}

/* First element to last, gaps included. */
static int64_t matrix_extent(const test_fixture *f, const test_matrix *m) {
  return (matrix_rows(f, m) - 1) * m->ld + matrix_columns(f, m);
}

static void place_apart(test_fixture *f, test_matrix *m) {
  const int64_t gap = 3 * test_block_of(m->type);
  m->ld = matrix_columns(f, m) + (f->c.weight_layout == TEST_GAPS ? gap : 0);
  m->data = test_pool_floats(&f->pool, matrix_extent(f, m));
  m->stored = stored_room(f, m->type, matrix_extent(f, m));
}

/* IN_OUT: three column blocks of [E][H·d + G·d + G·dv]; OUT_IN: three row blocks. All three are of
 * one type. */
static void place_in_block(test_fixture *f) {
  const int64_t in = f->wq.in, out = f->wq.out + f->wk.out + f->wv.out;
  float *block = test_pool_floats(&f->pool, in * out);
  unsigned char *stored = stored_room(f, f->wq.type, in * out);
  int64_t first = 0;
  for (int which = 0; which < 3; which++) {
    test_matrix *m = matrix_of(f, which);
    const int64_t index = f->c.out_in ? first * in : first;
    assert_int_equal(m->type, f->wq.type);
    m->ld = f->c.out_in ? in : out;
    m->data = block + index;
    m->stored = stored ? test_stored_at(stored, m->type, index) : NULL;
    first += m->out;
  }
  place_apart(f, &f->wo);
}

static void build_layer(test_fixture *f) {
  const test_case *c = &f->c;
  f->wq = (test_matrix){NULL, NULL, c->Eq, c->H * c->d, 0, c->query_type, NULL};
  f->wk = (test_matrix){NULL, NULL, c->Ek, c->G * c->d, 0, c->key_type, NULL};
  f->wv = (test_matrix){NULL, NULL, c->Ev, c->G * c->dv, 0, c->value_type, NULL};
  f->wo = (test_matrix){NULL, NULL, c->H * c->dv, c->Eo, 0, c->output_type, NULL};
  if (c->weight_layout == TEST_IN_BLOCK)
    place_in_block(f);
  for (int which = 0; which < 4; which++) {
    test_matrix *m = matrix_of(f, which);
    if (c->absent & (1U << which)) {
      m->data = NULL;
      m->stored = NULL;
    } else {
      if (c->weight_layout != TEST_IN_BLOCK)
        place_apart(f, m);
      fill_matrix(f, m);
    }
    if (c->biases & (1U << which)) {
      m->bias = test_pool_floats(&f->pool, m->out);
      test_fill_normal(&f->random, m->bias, m->out, 0.5);
    }
  }
}

static const void *given(const test_matrix *m) {
  return m->stored ? (const void *)m->stored : m->data;
}

static void layer_arguments(test_fixture *f) {
  const test_case *c = &f->c;
  const bool dense = c->weight_layout == TEST_APART;
  mha_config_init(&f->config, c->Eq, c->H);
  f->config.n_kv_heads = c->G;
  f->config.head_size = c->d;
  f->config.value_head_size = c->dv;
  f->config.key_width = c->Ek;
  f->config.value_width = c->Ev;
  f->config.output_width = c->Eo;
  f->config.allocator = &f->allocator.mha;
  f->config.softcap = c->rules_in_call ? 0.75F : c->softcap;
  if (c->rules_in_call || c->scale_given) {
    f->config.flags = MHA_SCALE;
    f->config.scale = c->rules_in_call ? 3.5F : c->scale;
  }
  MHA_INIT(&f->matrices);
  f->matrices.orientation = c->out_in ? MHA_OUT_IN : MHA_IN_OUT;
  f->matrices.ownership = c->borrow ? MHA_BORROW : MHA_COPY;
  f->matrices.query = given(&f->wq);
  f->matrices.key = given(&f->wk);
  f->matrices.value = given(&f->wv);
  f->matrices.output = given(&f->wo);
  f->matrices.query_element = (int32_t)f->wq.type;
  f->matrices.key_element = (int32_t)f->wk.type;
  f->matrices.value_element = (int32_t)f->wv.type;
  f->matrices.output_element = (int32_t)f->wo.type;
  f->matrices.query_ld = dense ? 0 : f->wq.ld;
  f->matrices.key_ld = dense ? 0 : f->wk.ld;
  f->matrices.value_ld = dense ? 0 : f->wv.ld;
  f->matrices.output_ld = dense ? 0 : f->wo.ld;
  f->matrices.query_bias = f->wq.bias;
  f->matrices.key_bias = f->wk.bias;
  f->matrices.value_bias = f->wv.bias;
  f->matrices.output_bias = f->wo.bias;
}

/* ---- Lengths, offsets, starts ---------------------------------------------------------------- */

/* Counts in 0..L, both ends more often than the rest. */
static int64_t *random_lengths(test_fixture *f, int64_t length) {
  int64_t *lengths = test_pool_bytes(&f->pool, (size_t)f->c.B * sizeof *lengths);
  for (int64_t b = 0; b < f->c.B; b++) {
    const int64_t draw = test_random_range(&f->random, 0, 9);
    lengths[b] = draw == 0 ? 0 : draw == 1 ? length : test_random_range(&f->random, 0, length);
  }
  return lengths;
}

static int compare_int64(const void *a, const void *b) {
  const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

static int64_t *random_starts(test_fixture *f, int64_t rows) {
  int64_t *starts = test_pool_bytes(&f->pool, (size_t)(f->c.B + 1) * sizeof *starts);
  for (int64_t b = 1; b < f->c.B; b++)
    starts[b] = test_random_range(&f->random, 0, rows);
  starts[0] = 0;
  starts[f->c.B] = rows;
  qsort(starts, (size_t)f->c.B + 1, sizeof *starts, compare_int64);
  return starts;
}

static void build_lengths(test_fixture *f) {
  const test_case *c = &f->c;
  if (c->packed) {
    f->query_starts = random_starts(f, c->Lq - (c->packed_tail ? c->Lq / 4 : 0));
    f->key_starts = c->source == TEST_SELF
                        ? f->query_starts
                        : random_starts(f, c->Lk - (c->packed_tail ? c->Lk / 4 : 0));
  } else {
    f->query_lengths = c->query_lengths ? random_lengths(f, c->Lq) : NULL;
    f->key_lengths = c->key_lengths ? random_lengths(f, c->Lk) : NULL;
  }
  f->offsets = test_pool_bytes(&f->pool, (size_t)c->B * sizeof *f->offsets);
  for (int64_t b = 0; b < c->B; b++)
    f->offsets[b] = c->offset + (c->offset_each ? test_random_range(&f->random, -3, 3) : 0);
}

bool test_reads_query(const test_fixture *f, int64_t b, int64_t i) {
  if (f->query_starts)
    return i < f->query_starts[f->c.B];
  return !f->query_lengths || i < f->query_lengths[b];
}

bool test_reads_key(const test_fixture *f, int64_t b, int64_t i) {
  if (f->key_starts)
    return i < f->key_starts[f->c.B];
  return !f->key_lengths || i < f->key_lengths[b];
}

static bool reads_either(const test_fixture *f, int64_t b, int64_t i) {
  return test_reads_query(f, b, i) || test_reads_key(f, b, i);
}

/* ---- Masks ----------------------------------------------------------------------------------- */

/* The header's mask and bias differ only in the type of data, so one is laid out for both. */
static int64_t lay_out_mask(const test_case *c, unsigned extents, mha_mask *mask) {
  mask->batch = extents & TEST_FULL_BATCH ? c->B : 1;
  mask->heads = extents & TEST_FULL_HEADS ? c->H : 1;
  mask->rows = extents & TEST_FULL_ROWS ? c->Lq : 1;
  mask->columns = c->Lk;
  mask->row_stride = c->Lk + (c->mask_strides ? 2 : 0);
  mask->head_stride = mask->rows * mask->row_stride + (c->mask_strides ? 1 : 0);
  mask->batch_stride = mask->heads * mask->head_stride + (c->mask_strides ? 3 : 0);
  return mask->batch * mask->batch_stride;
}

static int64_t mask_index(const mha_mask *m, int64_t b, int64_t h, int64_t i, int64_t j) {
  return (m->batch > 1 ? b : 0) * m->batch_stride + (m->heads > 1 ? h : 0) * m->head_stride +
         (m->rows > 1 ? i : 0) * m->row_stride + j;
}

static void build_mask(test_fixture *f) {
  mha_mask layout = {0};
  f->mask_bytes = lay_out_mask(&f->c, f->c.mask_extents, &layout);
  f->mask = test_pool_bytes(&f->pool, (size_t)f->mask_bytes);
  for (int64_t i = 0; i < f->mask_bytes; i++) {
    const bool attend = test_random_range(&f->random, 0, 9) < 7;
    f->mask[i] = attend ? (uint8_t)test_random_range(&f->random, 1, 255) : 0;
  }
  if (!f->c.mask_strides)
    layout.batch_stride = layout.head_stride = layout.row_stride = 0;
  layout.data = f->mask;
  f->rules.attend = layout;
}

static void build_bias(test_fixture *f) {
  mha_mask layout = {0};
  f->bias_floats = lay_out_mask(&f->c, f->c.bias_extents, &layout);
  f->bias = test_pool_floats(&f->pool, f->bias_floats);
  test_fill_normal(&f->random, f->bias, f->bias_floats, 1.0);
  for (int64_t i = 0; f->c.bias_hides && i < f->bias_floats; i++)
    if (test_random_range(&f->random, 0, 6) == 0)
      f->bias[i] = -INFINITY;
  if (!f->c.mask_strides)
    layout.batch_stride = layout.head_stride = layout.row_stride = 0;
  f->rules.bias = (mha_bias){f->bias,
                             layout.batch,
                             layout.heads,
                             layout.rows,
                             layout.columns,
                             layout.batch_stride,
                             layout.head_stride,
                             layout.row_stride,
                             MHA_F32,
                             0};
}

/* ---- Rules and results ----------------------------------------------------------------------- */

static void build_scores(test_fixture *f) {
  const test_case *c = &f->c;
  if (c->alibi) {
    f->slopes = test_pool_floats(&f->pool, c->H);
    for (int64_t h = 0; h < c->H; h++)
      f->slopes[h] = (float)exp2(-8.0 * (double)(h + 1) / (double)c->H);
  }
  if (c->sinks) {
    f->sinks = test_pool_floats(&f->pool, c->H);
    test_fill_normal(&f->random, f->sinks, c->H, 1.0);
  }
  f->rules.alibi_slopes = f->slopes;
  f->rules.sinks = f->sinks;
  if (c->rules_in_call) {
    f->rules.flags = MHA_SOFTCAP | MHA_SCALE;
    f->rules.softcap = c->softcap;
    f->rules.scale = c->scale_given ? c->scale : (float)(1.0 / sqrt((double)c->d));
  } else if (c->core) {
    f->rules.flags = c->scale_given ? MHA_SCALE : 0;
    f->rules.softcap = c->softcap;
    f->rules.scale = c->scale;
  }
}

static void build_rules(test_fixture *f) {
  const test_case *c = &f->c;
  MHA_INIT(&f->rules);
  MHA_INIT(&f->results);
  build_scores(f);
  f->rules.causal = c->causal;
  f->rules.alignment = (int32_t)c->alignment;
  f->rules.offset = c->offset;
  f->rules.offsets = c->offset_each ? f->offsets : NULL;
  f->rules.dropout = c->dropout;
  f->rules.dropout_seed = c->dropout_seed;
  f->rules.dropout_call = c->dropout_call;
  if (c->window) {
    f->rules.flags |= MHA_WINDOW;
    f->rules.window_left = c->left;
    f->rules.window_right = c->right;
  }
  f->rules.query_lengths = f->query_lengths;
  f->rules.key_lengths = f->key_lengths;
  f->rules.query_starts = f->query_starts;
  f->rules.key_starts = f->key_starts;
  if (c->has_mask)
    build_mask(f);
  if (c->has_bias)
    build_bias(f);
}

static void build_results(test_fixture *f) {
  const test_case *c = &f->c;
  const int64_t batch = c->packed ? 1 : c->B;
  f->weights_n = c->want & TEST_WANT_WEIGHTS ? batch * c->H * c->Lq * c->Lk : 0;
  f->average_n = c->want & TEST_WANT_AVERAGE ? batch * c->Lq * c->Lk : 0;
  f->lse_n = c->want & TEST_WANT_LSE ? batch * c->H * c->Lq : 0;
  f->weights = c->want & TEST_WANT_WEIGHTS ? test_pool_floats(&f->pool, f->weights_n) : NULL;
  f->average = c->want & TEST_WANT_AVERAGE ? test_pool_floats(&f->pool, f->average_n) : NULL;
  f->lse = c->want & TEST_WANT_LSE ? test_pool_floats(&f->pool, f->lse_n) : NULL;
  f->results.weights = f->weights;
  f->results.stage = (int32_t)c->stage;
  f->results.average = f->average;
  f->results.log_sum_exp = f->lse;
}

/* ---- Normalisation and positions ------------------------------------------------------------- */

/* Around 1, as trained weights are. */
static float *norm_weight(test_fixture *f, int64_t heads) {
  const int64_t n = (f->c.norm == MHA_NORM_FULL ? heads : 1) * f->c.d;
  float *weight = test_pool_floats(&f->pool, n);
  for (int64_t j = 0; j < n; j++)
    weight[j] = (float)test_random_uniform(&f->random, 0.5, 1.5);
  return weight;
}

static void build_norm(test_fixture *f) {
  const test_case *c = &f->c;
  if (c->norm == MHA_NORM_NONE)
    return;
  f->config.norm = (int32_t)c->norm;
  f->config.norm_epsilon = c->epsilon > 0 ? c->epsilon : c->d < 8 ? 0.25F : 1e-5F;
  if (c->norm_ones)
    return;
  f->query_norm = norm_weight(f, c->H);
  f->key_norm = norm_weight(f, c->G);
  f->matrices.query_norm = f->query_norm;
  f->matrices.key_norm = f->key_norm;
}

static int64_t *random_positions(test_fixture *f, int64_t length) {
  const int64_t n = (f->c.packed ? 1 : f->c.B) * length;
  int64_t *positions = test_pool_bytes(&f->pool, (size_t)n * sizeof *positions);
  for (int64_t i = 0; i < n; i++)
    positions[i] = test_random_range(&f->random, 0, 99);
  return positions;
}

/* Numbers that no angle explains: tables are used as given. */
static void build_tables(test_fixture *f) {
  const test_case *c = &f->c;
  const int64_t longest = c->positions_given ? 100 : c->Lq > c->Lk ? c->Lq : c->Lk;
  const int64_t furthest =
      c->query_position > c->key_position ? c->query_position : c->key_position;
  f->rope_positions = longest + furthest;
  const int64_t n = f->rope_positions * (c->rotary / 2);
  f->rope_cos = test_pool_floats(&f->pool, n);
  f->rope_sin = test_pool_floats(&f->pool, n);
  for (int64_t i = 0; i < n; i++) {
    f->rope_cos[i] = (float)test_random_uniform(&f->random, -1.0, 1.0);
    f->rope_sin[i] = (float)test_random_uniform(&f->random, -1.0, 1.0);
  }
  f->config.rope_positions = f->rope_positions;
  f->config.rope_cos = f->rope_cos;
  f->config.rope_sin = f->rope_sin;
}

static void build_rope(test_fixture *f) {
  const test_case *c = &f->c;
  if (c->rope == MHA_ROPE_NONE)
    return;
  f->config.rope = (int32_t)c->rope;
  f->config.rotary_size = c->rotary == c->d ? 0 : c->rotary;
  f->config.rope_base = c->rope_base;
  if (c->rope_tables)
    build_tables(f);
  if (c->positions_given) {
    f->query_positions = random_positions(f, c->Lq);
    f->key_positions = c->source == TEST_SELF ? NULL : random_positions(f, c->Lk);
  }
}

/* ---- Arguments ------------------------------------------------------------------------------- */

static void forward_arguments(test_fixture *f) {
  const test_case *c = &f->c;
  const bool strided = c->layout != TEST_DENSE;
  mha_forward_args *a = &f->args;
  MHA_INIT(a);
  a->flags = c->Lk == 0 ? MHA_ALLOW_EMPTY : 0;
  a->accumulate = c->accumulate;
  a->batch = c->B;
  a->query_length = c->Lq;
  a->key_length = c->Lk;
  a->query = f->query.data;
  a->key = c->source == TEST_SELF ? NULL : f->key.data;
  a->value = c->source == TEST_CROSS ? f->value.data : NULL;
  a->output = f->output.data;
  if (strided) {
    a->query_batch_stride = f->query.batch_stride;
    a->query_row_stride = f->query.row_stride;
    a->key_batch_stride = a->key ? f->key.batch_stride : 0;
    a->key_row_stride = a->key ? f->key.row_stride : 0;
    a->value_batch_stride = a->value ? f->value.batch_stride : 0;
    a->value_row_stride = a->value ? f->value.row_stride : 0;
    a->output_batch_stride = f->output.batch_stride;
    a->output_row_stride = f->output.row_stride;
  }
  a->rules = &f->rules;
  a->results = &f->results;
  a->query_position = c->query_position;
  a->key_position = c->source == TEST_SELF ? 0 : c->key_position;
  a->query_positions = f->query_positions;
  a->key_positions = f->key_positions;
}

static mha_tensor tensor_argument(const test_fixture *f, const test_view *v) {
  mha_tensor tensor = {v->stored ? (const void *)v->stored : v->data,
                       v->batch,
                       v->length,
                       v->heads,
                       v->size,
                       0,
                       0,
                       0,
                       0,
                       (int32_t)v->type,
                       0};
  if (f->c.layout != TEST_DENSE) {
    tensor.batch_stride = v->batch_stride;
    tensor.row_stride = v->row_stride;
    tensor.head_stride = v->head_stride;
    tensor.size_stride = 1;
  }
  return tensor;
}

static void attend_arguments(test_fixture *f) {
  f->q = tensor_argument(f, &f->query);
  f->k = tensor_argument(f, &f->key);
  f->v = tensor_argument(f, &f->value);
  MHA_INIT(&f->attend_args);
  f->attend_args.flags = MHA_ALLOW_EMPTY; /* a case says its sizes */
  f->attend_args.n_sequences = f->c.packed ? f->c.B : 0;
  f->attend_args.output = f->output.data;
  if (f->c.layout != TEST_DENSE) {
    f->attend_args.output_batch_stride = f->output.batch_stride;
    f->attend_args.output_row_stride = f->output.row_stride;
    f->attend_args.output_head_stride = f->output.head_stride;
  }
  f->attend_args.rules = &f->rules;
  f->attend_args.results = &f->results;
}

/* ---- Building and running -------------------------------------------------------------------- */

static void build_inputs(test_fixture *f) {
  const test_case *c = &f->c;
  f->query = c->core ? make_view(f, c->Lq, c->H, c->d) : make_view(f, c->Lq, 1, c->Eq);
  fill_view(f, &f->query, c->source == TEST_SELF ? reads_either : test_reads_query);
  f->key = f->query;
  if (c->source != TEST_SELF) {
    f->key =
        c->core ? make_view_of(f, c->k_type, c->Lk, c->G, c->d) : make_view(f, c->Lk, 1, c->Ek);
    fill_view(f, &f->key, test_reads_key);
    test_store(&f->key);
  }
  f->value = f->key;
  if (c->source == TEST_CROSS) {
    f->value =
        c->core ? make_view_of(f, c->v_type, c->Lk, c->G, c->dv) : make_view(f, c->Lk, 1, c->Ev);
    fill_view(f, &f->value, test_reads_key);
    test_store(&f->value);
  }
}

static void build_output(test_fixture *f) {
  const test_case *c = &f->c;
  f->output = c->core ? make_view(f, c->Lq, c->H, c->dv) : make_view(f, c->Lq, 1, c->Eo);
  for (int64_t b = 0; c->accumulate && b < f->output.batch; b++)
    for (int64_t i = 0; i < f->output.length; i++)
      test_fill_normal(&f->random, test_at(&f->output, b, i, 0, 0), f->output.size, 1.0);
  f->before = test_pool_floats(&f->pool, f->output.floats);
  memcpy(f->before, f->output.data, (size_t)f->output.floats * sizeof(float));
}

void test_build(test_fixture *f, const test_case *c) {
  test_keep_memory();
  memset(f, 0, sizeof *f);
  f->c = *c;
  fill_sizes(&f->c);
  note_case(&f->c);
  f->pool.at_front = c->at_front;
  test_random_seed(&f->random, c->seed);
  test_allocator_init(&f->allocator);
  build_layer(f);
  layer_arguments(f);
  build_lengths(f);
  build_inputs(f);
  build_output(f);
  build_rules(f);
  build_results(f);
  build_norm(f);
  build_rope(f);
  forward_arguments(f);
  attend_arguments(f);
  MHA_INIT(&f->options);
  f->options.n_threads = f->c.threads;
  f->options.allocator = &f->allocator.mha;
}

void test_release(test_fixture *f) {
  test_pool_free(&f->pool);
  test_note("%s", "");
}

void test_poison_results(test_fixture *f) {
  memcpy(f->output.data, f->before, (size_t)f->output.floats * sizeof(float));
  test_fill_poison(f->weights, f->weights_n);
  test_fill_poison(f->average, f->average_n);
  test_fill_poison(f->lse, f->lse_n);
}

mha_status test_call(test_fixture *f, mha_context *context, const mha_weights *weights,
                     mha_error *error) {
  return f->c.core ? mha_attend(context, &f->q, &f->k, &f->v, &f->attend_args, error)
                   : mha_forward(context, weights, &f->args, error);
}

void test_run(test_fixture *f) {
  mha_weights *weights = NULL;
  mha_context *context = NULL;
  mha_error error;
  if (!f->c.core)
    test_expect(mha_weights_create(&f->config, &f->matrices, &weights, &error), MHA_OK, &error);
  test_expect(mha_context_create(&f->options, &context, &error), MHA_OK, &error);
  test_poison_results(f);
  test_expect(test_call(f, context, weights, &error), MHA_OK, &error);
  mha_context_destroy(context);
  mha_weights_destroy(weights);
  test_allocator_check(&f->allocator);
  test_check_gaps(f);
}

void test_check_gaps(const test_fixture *f) {
  const test_view *v = &f->output;
  bool *written = calloc((size_t)v->floats + 1, sizeof *written);
  assert_non_null(written);
  for (int64_t b = 0; b < v->batch; b++)
    for (int64_t i = 0; i < v->length; i++)
      for (int64_t h = 0; h < v->heads; h++)
        memset(written + (test_at(v, b, i, h, 0) - v->data), 1, (size_t)v->size);
  for (int64_t at = 0; at < v->floats; at++)
    if (!written[at] && !test_equal_bits(v->data[at], f->before[at]))
      test_failed("element %" PRId64 " of the output's memory is a gap and was written", at);
  free(written);
}

/* ---- The judge ------------------------------------------------------------------------------- */

static double *widen(const float *numbers, int64_t n) {
  double *wide = malloc((size_t)(n > 0 ? n : 1) * sizeof *wide);
  assert_non_null(wide);
  for (int64_t i = 0; i < n; i++)
    wide[i] = (double)numbers[i];
  return wide;
}

static double *widen_view(const test_view *v) {
  float *dense = test_gather(v);
  double *wide = widen(dense, v->batch * v->length * v->heads * v->size);
  free(dense);
  return wide;
}

static oracle_matrix widen_matrix(const test_fixture *f, const test_matrix *m) {
  return (oracle_matrix){m->data ? widen(m->data, matrix_extent(f, m)) : NULL,
                         m->bias ? widen(m->bias, m->out) : NULL, f->c.out_in, m->ld};
}

/* Masks are written out in full for the judge: [B][H][Lq][Lk]. */
static void expand_masks(const test_fixture *f, unsigned char *attend, double *bias) {
  const test_case *c = &f->c;
  mha_mask mask = {0}, additive = {0};
  (void)lay_out_mask(c, c->mask_extents, &mask);
  (void)lay_out_mask(c, c->bias_extents, &additive);
  for (int64_t b = 0, at = 0; b < c->B; b++)
    for (int64_t h = 0; h < c->H; h++)
      for (int64_t i = 0; i < c->Lq; i++)
        for (int64_t j = 0; j < c->Lk; j++, at++) {
          if (attend)
            attend[at] = f->mask[mask_index(&mask, b, h, i, j)];
          if (bias)
            bias[at] = (double)f->bias[mask_index(&additive, b, h, i, j)];
        }
}

/* [B][H][Lq][Lk]; NULL without dropout. As the rules are now. */
static double *list_kept(const test_fixture *f) {
  const test_case *c = &f->c;
  const int64_t cells = c->B * c->H * c->Lq * c->Lk;
  if (f->rules.dropout == 0.0F)
    return NULL;
  double *kept = malloc((size_t)(cells + 1) * sizeof *kept);
  assert_non_null(kept);
  for (int64_t e = 0; e < cells; e++)
    kept[e] = test_dropout((double)f->rules.dropout, f->rules.dropout_seed, f->rules.dropout_call,
                           (uint64_t)e);
  return kept;
}

static void oracle_rules(const test_fixture *f, oracle_problem *p) {
  const test_case *c = &f->c;
  const oracle_alignment alignments[] = {ORACLE_TOP_LEFT, ORACLE_BOTTOM_RIGHT, ORACLE_OFFSET};
  p->scale_given = c->scale_given;
  p->scale = (double)c->scale;
  p->softcap = (double)c->softcap;
  p->causal = c->causal;
  p->windowed = c->window;
  p->window_left = c->left;
  p->window_right = c->right;
  p->alignment = alignments[c->alignment];
  p->offsets = f->offsets;
  p->query_lengths = f->query_lengths;
  p->key_lengths = f->key_lengths;
  p->query_starts = f->query_starts;
  p->key_starts = f->key_starts;
}

/* Rotary position of every row of the query or the keys: given, or counted from the start of its
 * sequence, plus the offset. */
static int64_t *list_positions(const test_fixture *f, int64_t length, const int64_t *starts,
                               const int64_t *given, int64_t offset) {
  const int64_t batch = f->c.packed ? 1 : f->c.B;
  int64_t *positions = malloc((size_t)(batch * length + 1) * sizeof *positions);
  assert_non_null(positions);
  for (int64_t row = 0; row < batch * length; row++) {
    int64_t first = row / (length > 0 ? length : 1) * length;
    for (int64_t b = 0; starts && b < f->c.B; b++)
      if (starts[b] <= row)
        first = starts[b];
    positions[row] = (given ? given[row] : row - first) + offset;
  }
  return positions;
}

static void oracle_positions(const test_fixture *f, oracle_problem *p) {
  const test_case *c = &f->c;
  const bool self = c->source == TEST_SELF;
  const int64_t tables = f->rope_positions * (c->rotary / 2);
  p->norm = (oracle_norm)c->norm;
  p->epsilon = (double)f->config.norm_epsilon;
  p->query_norm =
      f->query_norm ? widen(f->query_norm, c->norm == MHA_NORM_FULL ? c->H * c->d : c->d) : NULL;
  p->key_norm =
      f->key_norm ? widen(f->key_norm, c->norm == MHA_NORM_FULL ? c->G * c->d : c->d) : NULL;
  p->rope = (oracle_rope)c->rope;
  p->rotary = c->rotary;
  p->rope_base = c->rope_base;
  p->cosines = f->rope_cos ? widen(f->rope_cos, tables) : NULL;
  p->sines = f->rope_sin ? widen(f->rope_sin, tables) : NULL;
  p->query_positions =
      list_positions(f, c->Lq, f->query_starts, f->query_positions, c->query_position);
  p->key_positions =
      list_positions(f, c->Lk, f->key_starts, self ? f->query_positions : f->key_positions,
                     self ? c->query_position : c->key_position);
}

void test_problem_free(oracle_problem *p) {
  const void *all[] = {p->wq.numbers,      p->wk.numbers,    p->wv.numbers, p->wo.numbers,
                       p->wq.bias,         p->wk.bias,       p->wv.bias,    p->wo.bias,
                       p->query,           p->key,           p->value,      p->residual,
                       p->attend,          p->bias,          p->slopes,     p->sinks,
                       p->query_norm,      p->key_norm,      p->cosines,    p->sines,
                       p->query_positions, p->key_positions, p->kept};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    free((void *)(uintptr_t)all[i]);
}

void test_problem(const test_fixture *f, oracle_problem *problem) {
  const test_case *c = &f->c;
  const size_t cells = (size_t)(c->B * c->H * c->Lq * c->Lk) + 1;
  unsigned char *attend = f->mask ? malloc(cells) : NULL;
  double *bias = f->bias ? malloc(cells * sizeof *bias) : NULL;
  expand_masks(f, attend, bias);
  oracle_problem p = {c->B,
                      c->Lq,
                      c->Lk,
                      c->H,
                      c->G,
                      c->d,
                      c->dv,
                      c->Eq,
                      c->Ek,
                      c->Ev,
                      c->Eo,
                      .wq = widen_matrix(f, &f->wq),
                      .wk = widen_matrix(f, &f->wk),
                      .wv = widen_matrix(f, &f->wv),
                      .wo = widen_matrix(f, &f->wo),
                      .query = widen_view(&f->query),
                      .key = widen_view(&f->key),
                      .value = widen_view(&f->value),
                      .attend = attend,
                      .bias = bias,
                      .slopes = f->slopes ? widen(f->slopes, c->H) : NULL,
                      .sinks = f->sinks ? widen(f->sinks, c->H) : NULL,
                      .kept = list_kept(f)};
  oracle_rules(f, &p);
  if (c->accumulate) {
    test_view before = f->output;
    before.data = f->before;
    p.residual = widen_view(&before);
  }
  oracle_positions(f, &p);
  *problem = p;
}

void test_ask_oracle(const test_fixture *f, oracle_result *result) {
  oracle_problem p;
  test_problem(f, &p);
  oracle_solve(&p, result);
  test_problem_free(&p);
}

static int oracle_stage(mha_stage stage) {
  return stage == MHA_STAGE_WEIGHTS ? 3 : stage == MHA_STAGE_SCALED ? 0 : (int)stage - 1;
}

void test_judge(const test_fixture *f, const oracle_result *r) {
  const test_case *c = &f->c;
  const int64_t batch = c->packed ? 1 : c->B;
  const oracle_numbers *stage = &r->stage[oracle_stage(c->stage)];
  float *output = test_gather(&f->output);
  test_compare("output", test_view_shape(&f->output), output, r->output.value, r->output.bound);
  free(output);
  if (f->weights)
    test_compare("weights", (test_shape){{batch, c->H, c->Lq, c->Lk}}, f->weights, stage->value,
                 stage->bound);
  if (f->average)
    test_compare("average", (test_shape){{1, batch, c->Lq, c->Lk}}, f->average, r->average.value,
                 r->average.bound);
  if (f->lse)
    test_compare("log_sum_exp", (test_shape){{1, batch, c->H, c->Lq}}, f->lse, r->lse.value,
                 r->lse.bound);
}

void test_judge_now(const test_fixture *f) {
  oracle_result result;
  test_ask_oracle(f, &result);
  test_judge(f, &result);
  oracle_free(&result);
}

bool test_sees(const test_fixture *f, const oracle_result *r, int64_t b, int64_t h, int64_t i,
               int64_t j) {
  const double score = r->stage[2].value[((b * f->c.H + h) * f->c.Lq + i) * f->c.Lk + j];
  return !(isinf(score) && score < 0);
}

void test_check(const test_case *c) {
  test_fixture *f = malloc(sizeof *f);
  assert_non_null(f);
  test_build(f, c);
  test_run(f);
  test_judge_now(f);
  test_release(f);
  free(f);
}

/* ---- Bits ------------------------------------------------------------------------------------ */

static bool every_row(const void *user, int64_t b, int64_t i) {
  (void)user;
  (void)b;
  (void)i;
  return true;
}

void test_same_rows(const test_fixture *f, const float *expected, test_rows *keep,
                    const void *user) {
  const test_view *v = &f->output;
  const int64_t width = v->heads * v->size;
  float *output = test_gather(v);
  for (int64_t b = 0; b < v->batch; b++)
    for (int64_t i = 0; i < v->length; i++)
      for (int64_t c = 0; keep(user, b, i) && c < width; c++) {
        const int64_t at = (b * v->length + i) * width + c;
        if (!test_equal_bits(output[at], expected[at]))
          test_failed("output[%" PRId64 "][%" PRId64 "][%" PRId64
                      "]: got %.9g (%a), expected the bits of %.9g (%a)",
                      b, i, c, (double)output[at], (double)output[at], (double)expected[at],
                      (double)expected[at]);
      }
  free(output);
}

void test_same_output(const test_fixture *f, const float *expected) {
  test_same_rows(f, expected, every_row, NULL);
}

/* ---- The core on hand-written numbers -------------------------------------------------------- */

mha_status test_core_try(test_core *core, mha_error *error) {
  mha_context *context = NULL;
  mha_attend_args args;
  fill(&core->B, 1);
  fill(&core->H, 1);
  fill(&core->G, core->H);
  fill(&core->d, 1);
  fill(&core->dv, 1);
  const mha_tensor q = {core->q, core->B, core->Lq, core->H, core->d, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor k = {core->k, core->B, core->Lk, core->G, core->d, 0, 0, 0, 0, MHA_F32, 0};
  const mha_tensor v = {core->v, core->B, core->Lk, core->G, core->dv, 0, 0, 0, 0, MHA_F32, 0};
  MHA_INIT(&args);
  args.flags = MHA_ALLOW_EMPTY;
  args.output = core->output;
  args.rules = &core->rules;
  core->results.struct_size = sizeof core->results;
  args.results = &core->results;
  test_fill_poison(core->output, core->B * core->Lq * core->H * core->dv);
  test_expect(mha_context_create(NULL, &context, NULL), MHA_OK, NULL);
  const mha_status status = mha_attend(context, &q, &k, &v, &args, error);
  mha_context_destroy(context);
  return status;
}

void test_core_run(test_core *core) {
  mha_error error;
  test_expect(test_core_try(core, &error), MHA_OK, &error);
}

bool test_blas_is_serial(void) {
  char info[1024];
  (void)mha_build_info(info, sizeof info);
  return strstr(info, "blas_threading: serial") != NULL;
}

void test_run_for_bits(test_fixture *f, float **first) {
  test_run(f);
  if (*first)
    test_same_output(f, *first);
  else
    *first = test_gather(&f->output);
  test_release(f);
}
