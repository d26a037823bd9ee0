// A user of the installed library in C++17; the layer and its result are those of consumer.c.
#include <mha.h>

#include <array>
#include <cmath>
#include <iostream>
#include <memory>
#include <string_view>

namespace {

struct Destroy {
  void operator()(mha_weights *weights) const {
    mha_weights_destroy(weights);
  }
  void operator()(mha_context *context) const {
    mha_context_destroy(context);
  }
};

mha_status compute(std::array<float, 4> &output, mha_error &error) {
  const std::array<float, 4> query{1.0986122887F, 0, 0, 0};
  const std::array<float, 4> key{1, 0, 0, 1};
  const std::array<float, 4> value{8, 0, 0, 2};
  const std::array<float, 4> out{1, 2, 10, 20};
  const std::array<float, 4> x{0, 1, 1, 0};

  mha_config config;
  mha_config_init(&config, 2, 2);
  mha_matrices matrices;
  MHA_INIT(&matrices);
  matrices.orientation = MHA_IN_OUT;
  matrices.query = query.data();
  matrices.key = key.data();
  matrices.value = value.data();
  matrices.output = out.data();

  mha_weights *weights = nullptr;
  if (const mha_status status = mha_weights_create(&config, &matrices, &weights, &error))
    return status;
  const std::unique_ptr<mha_weights, Destroy> owned_weights(weights);
  mha_context *context = nullptr;
  if (const mha_status status = mha_context_create(nullptr, &context, &error))
    return status;
  const std::unique_ptr<mha_context, Destroy> owned_context(context);
  return mha_self_attention(context, weights, x.data(), 1, 2, output.data(), &error);
}

// The readers of files are there with all that they need.
bool refuses_no_file(mha_error &error) {
  mha_config config;
  mha_config_init(&config, 2, 2);
  mha_weights *weights = nullptr;
  return mha_weights_load(&config, "no such file", nullptr, &weights, &error) == MHA_ERROR_IO;
}

} // namespace

int main() {
  if (std::string_view(mha_version()) != MHA_VERSION_STRING) {
    std::cerr << "header " << MHA_VERSION_STRING << ", library " << mha_version() << '\n';
    return 1;
  }
  const std::array<float, 4> expected{14, 28, 16, 32};
  std::array<float, 4> output{};
  mha_error error;
  if (const mha_status status = compute(output, error)) {
    std::cerr << mha_status_name(status) << ": " << error.message << '\n';
    return 1;
  }
  if (!refuses_no_file(error)) {
    std::cerr << mha_status_name(error.status) << ": " << error.message << '\n';
    return 1;
  }
  bool right = true;
  for (std::size_t i = 0; i < output.size(); ++i) {
    std::cout << output[i] << '\n';
    right = right && std::fabs(output[i] - expected[i]) < 1e-4F;
  }
  return right ? 0 : 1;
}
