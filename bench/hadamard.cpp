// Problems of hadamard.
#include "winnow/hadamard.h"

#include <bit>

#include "base/numbers.h"
#include "base/row_offset.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"

namespace winnow::bench {
namespace {

// The rounding to the output's dtype: half a unit in the last place of a number near 1, half the
// distance of subnormals. f32 from f32 is the product with the scale, which is counted there.
struct Rounding {
  double unit, least;
};
Rounding rounding_of(DType output, DType input) {
  switch (output) {
    case DType::kBF16: return {0x1p-8, 0x1p-134};
    case DType::kF16: return {0x1p-11, 0x1p-25};
    case DType::kF32: return {input == DType::kF64 ? 0x1p-24 : 0, 0x1p-150};
    default: return {0, 0};
  }
}

class HadamardCase : public OperationCase<hadamard, hadamard_workspace_bytes> {
 public:
  explicit HadamardCase(const Problem& p)
      : input_(p.dtype(), {p.number("rows"), p.number("heads"), p.number("dim")}),
        output_(p.dtype("output"), {p.number("rows"), p.number("heads"), p.number("dim")}) {
    args_ = {input_, output_};
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    fill_gauss(input_, random);
  }

  std::vector<Tensor> outputs() const override { return {output_}; }

  std::vector<Comparison> compare() override {
    Worst output("output");
    const Tensor &x = args_.input, &y = args_.output;
    const std::int64_t dim = last_extent(x);
    const double root = std::sqrt(static_cast<double>(dim));
    // Each of the dim terms passes log2(dim) additions and one product with a rounded scale; then
    // the rounding to the output's dtype.
    const double relative = gamma_of(x.dtype, std::log2(static_cast<double>(dim)) + 2);
    const Rounding rounding = rounding_of(y.dtype, x.dtype);
    for (std::int64_t row = 0; row < row_count(x); ++row) {
      double magnitude = 0;
      for (std::int64_t i = 0; i < dim; ++i)
        magnitude += std::abs(load_double(x.data, x.dtype, row * dim + i));
      for (std::int64_t j = 0; j < dim; ++j) {
        double truth = 0;
        for (std::int64_t i = 0; i < dim; ++i) {
          const double term = load_double(x.data, x.dtype, row * dim + i);
          truth += std::popcount(static_cast<std::uint64_t>(i & j)) % 2 == 0 ? term : -term;
        }
        truth /= root;
        const double error = relative * magnitude / root;
        output.add(load_double(y.data, y.dtype, row * dim + j), truth,
                   error + rounding.unit * (std::abs(truth) + error) + rounding.least,
                   [&] { return fmt::format("row {} channel {}", row, j); });
      }
    }
    return {output.comparison()};
  }

  Cost cost() const override {
    const auto elements = static_cast<double>(args_.input.elements());
    return {elements * (std::log2(static_cast<double>(last_extent(args_.input))) + 1),
            elements * static_cast<double>(dtype_bytes(args_.input.dtype) +
                                           dtype_bytes(args_.output.dtype))};
  }

 private:
  Guarded input_, output_;
};

}  // namespace

Operation hadamard_operation() {
  return {
      "hadamard",
      "the rotation of index queries and keys",
      {{"rows", "64", "rows"},
       {"heads", "1", "heads of a row"},
       {"dim", "128", "channels, a power of two"},
       {"dtype", "f32", "of the input", kFloats},
       {"output", "f32", "dtype of the output", kFloats},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<HadamardCase>(p); },
      {"hadamard rows=70 heads=3", "hadamard rows=65 dim=1", "hadamard rows=3 dim=2 output=bf16",
       "hadamard rows=3 dim=4 dtype=bf16 output=f16", "hadamard rows=5 dim=8 dtype=f16",
       "hadamard rows=5 dim=16 dtype=bf16 output=bf16", "hadamard rows=3 dim=1024 output=f16",
       "hadamard rows=4 dim=64 dtype=f64 output=f64", "hadamard rows=4 dim=32 dtype=f64",
       "hadamard rows=4 dim=32 dtype=f64 output=bf16", "hadamard rows=0"},
      {"hadamard rows=4096 heads=64 dtype=bf16 output=bf16", "hadamard rows=65536"}};
}

}  // namespace winnow::bench
