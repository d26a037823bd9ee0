// A binding for C++ in small: every handle has one owner, errors are exceptions, a layer keeps the
// arrays that it borrows. Halves of the keys are merged, and a file is opened once for two layers.
#include <mha.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

void check(mha_status status, const mha_error &error) {
  if (status != MHA_OK)
    throw std::runtime_error(std::string(mha_status_name(status)) + ": " + error.message);
}

struct Destroy {
  void operator()(mha_weights *weights) const {
    mha_weights_destroy(weights);
  }
  void operator()(mha_context *context) const {
    mha_context_destroy(context);
  }
  void operator()(mha_cache *cache) const {
    mha_cache_destroy(cache);
  }
  void operator()(mha_file *file) const {
    mha_file_destroy(file);
  }
};

using Weights = std::unique_ptr<mha_weights, Destroy>;
using Context = std::unique_ptr<mha_context, Destroy>;
using Cache = std::unique_ptr<mha_cache, Destroy>;
using File = std::unique_ptr<mha_file, Destroy>;

template <typename Struct> Struct prepared() {
  Struct s;
  MHA_INIT(&s);
  return s;
}

constexpr int64_t E = 12, H = 3, L = 9;

// The arrays of a layer, which live as long as somebody looks at them.
struct Arrays {
  std::vector<float> matrices[4];
  static int alive;
  explicit Arrays(unsigned seed) {
    alive++;
    for (auto &matrix : matrices) {
      matrix.resize(E * E);
      for (auto &number : matrix) {
        seed = seed * 1664525U + 1013904223U;
        number = static_cast<float>(seed >> 8) / 16777216.0F - 0.5F;
      }
    }
  }
  Arrays(const Arrays &) = delete;
  Arrays &operator=(const Arrays &) = delete;
  ~Arrays() {
    alive--;
  }
};
int Arrays::alive = 0;

extern "C" void drop_arrays(void *user) {
  delete static_cast<std::shared_ptr<Arrays> *>(user);
}

Weights borrow(const std::shared_ptr<Arrays> &arrays) {
  mha_error error;
  mha_config config;
  mha_weights *weights = nullptr;
  auto keep = std::make_unique<std::shared_ptr<Arrays>>(arrays);
  auto matrices = prepared<mha_matrices>();
  mha_config_init(&config, E, H);
  matrices.orientation = MHA_OUT_IN;
  matrices.ownership = MHA_BORROW;
  matrices.query = arrays->matrices[0].data();
  matrices.key = arrays->matrices[1].data();
  matrices.value = arrays->matrices[2].data();
  matrices.output = arrays->matrices[3].data();
  matrices.release = drop_arrays;
  matrices.release_user = keep.get();
  check(mha_weights_create(&config, &matrices, &weights, &error), error);
  (void)keep.release(); // the layer's from here on
  return Weights(weights);
}

Context context() {
  mha_error error;
  mha_context *made = nullptr;
  check(mha_context_create(nullptr, &made, &error), error);
  return Context(made);
}

Cache cache_for(const Weights &weights) {
  mha_error error;
  mha_cache *made = nullptr;
  auto options = prepared<mha_cache_options>();
  options.weights = weights.get();
  options.n_entries = 1;
  options.capacity = L;
  check(mha_cache_create(&options, &made, &error), error);
  return Cache(made);
}

std::vector<float> attend_to_itself(const Context &context, const Weights &weights,
                                    const std::vector<float> &x) {
  mha_error error;
  std::vector<float> output(x.size());
  check(mha_self_attention(context.get(), weights.get(), x.data(), 1, L, output.data(), &error),
        error);
  return output;
}

bool agree(const std::vector<float> &a, const std::vector<float> &b) {
  bool same = a.size() == b.size();
  for (std::size_t k = 0; same && k < a.size(); k++)
    same = std::fabs(a[k] - b[k]) <= 1e-5F;
  return same;
}

void expect(bool holds, const char *what) {
  if (!holds)
    throw std::logic_error(what);
}

std::vector<float> numbers(std::size_t n) {
  std::vector<float> x(n);
  for (std::size_t k = 0; k < n; k++)
    x[k] = std::sin(static_cast<float>(k));
  return x;
}

void borrowed_arrays_live_as_long_as_the_layer() {
  const auto scratch = context();
  const auto x = numbers(L * E);
  auto arrays = std::make_shared<Arrays>(1U);
  Weights weights = borrow(arrays);
  const auto before = attend_to_itself(scratch, weights, x);
  arrays.reset();
  expect(Arrays::alive == 1, "the layer keeps the arrays");
  expect(attend_to_itself(scratch, weights, x) == before, "the same numbers, the same bits");
  Weights moved = std::move(weights);
  const auto cache = cache_for(moved);
  moved.reset();
  expect(Arrays::alive == 0, "the last reference gives them back");
}

void a_file_serves_two_layers() {
  mha_error error;
  const char *path = "raii.safetensors";
  const auto scratch = context();
  const auto x = numbers(L * E);
  const Weights original = borrow(std::make_shared<Arrays>(2U));
  const auto expected = attend_to_itself(scratch, original, x);
  check(mha_weights_save(original.get(), path, "layer.", &error), error);
  mha_file *opened = nullptr;
  check(mha_file_open(path, nullptr, &opened, &error), error);
  File file(opened);
  auto info = prepared<mha_layer_info>();
  check(mha_file_layer(file.get(), 0, &info, &error), error);
  expect(std::string(info.prefix) == "layer." && info.is_complete, "the layer is found");
  auto config = prepared<mha_config>();
  config.n_heads = H;
  Weights layers[2];
  for (auto &layer : layers) {
    mha_weights *loaded = nullptr;
    check(mha_weights_load_from(&config, file.get(), info.prefix, &loaded, &error), error);
    layer.reset(loaded);
  }
  file.reset();
  for (const auto &layer : layers)
    expect(attend_to_itself(scratch, layer, x) == expected, "a loaded layer computes the same");
  try {
    mha_weights *none = nullptr;
    check(mha_weights_load(&config, path, "other.", &none, &error), error);
    expect(false, "a layer that is not there is an exception");
  } catch (const std::runtime_error &caught) {
    expect(std::string(caught.what()).find("other.") != std::string::npos, "which names it");
  }
  std::remove(path);
}

// Step 3 over the first and the second part of the keys, merged.
void halves_make_the_whole() {
  constexpr int64_t d = 4, half = 4;
  mha_error error;
  const auto scratch = context();
  const auto q = numbers(L * H * d), k = numbers(L * H * d), v = numbers(L * H * d);
  const auto tensor = [](const float *data, int64_t length) {
    mha_tensor t{};
    t.data = data;
    t.batch = 1;
    t.length = length;
    t.heads = H;
    t.size = d;
    return t;
  };
  const auto attend = [&](int64_t first, int64_t n, std::vector<float> &output,
                          std::vector<float> &lse) {
    auto args = prepared<mha_attend_args>();
    auto results = prepared<mha_results>();
    output.resize(q.size());
    lse.resize(L * H);
    args.output = output.data();
    args.results = &results;
    results.log_sum_exp = lse.data();
    const mha_tensor tq = tensor(q.data(), L), tk = tensor(k.data() + first * H * d, n),
                     tv = tensor(v.data() + first * H * d, n);
    check(mha_attend(scratch.get(), &tq, &tk, &tv, &args, &error), error);
  };
  std::vector<float> whole, whole_lse, parts[2], lses[2], merged(q.size()), lse(L * H);
  attend(0, L, whole, whole_lse);
  attend(0, half, parts[0], lses[0]);
  attend(half, L - half, parts[1], lses[1]);
  const mha_tensor outputs[] = {tensor(parts[0].data(), L), tensor(parts[1].data(), L)};
  const float *const sums[] = {lses[0].data(), lses[1].data()};
  auto args = prepared<mha_merge_args>();
  args.n_parts = 2;
  args.outputs = outputs;
  args.log_sum_exps = sums;
  args.output = merged.data();
  args.log_sum_exp = lse.data();
  check(mha_merge(&args, &error), error);
  expect(agree(merged, whole) && agree(lse, whole_lse), "two halves are the whole");
}

} // namespace

int main() {
  try {
    borrowed_arrays_live_as_long_as_the_layer();
    a_file_serves_two_layers();
    halves_make_the_whole();
    expect(Arrays::alive == 0, "nothing is left behind");
  } catch (const std::exception &caught) {
    std::fprintf(stderr, "%s\n", caught.what());
    return 1;
  }
  return 0;
}
