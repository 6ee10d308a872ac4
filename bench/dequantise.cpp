// Problems of dequantise. Every implementation gives the bits of the reference.
#include "winnow/dequantise.h"

#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/quantised.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

class DequantiseCase : public OperationCase<dequantise, dequantise_workspace_bytes> {
 public:
  explicit DequantiseCase(const Problem& p) {
    const std::int64_t rows = p.number("rows"), heads = p.number("heads"), dim = p.number("dim"),
                       groups = p.number("groups");
    data_ = Guarded(DType::kE4M3, {rows, heads, dim});
    scale_ = Guarded(p.dtype("scale"), {rows, heads, groups});
    output_ = Guarded(DType::kF32, {rows, heads, dim});
    want_ = Guarded(DType::kF32, {rows, heads, dim});
    args_ = {data_, scale_, output_};
    if (ShapesOnly::on()) return;
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    for (std::int64_t i = 0; i < data_.view().elements(); ++i) {  // every code, NaN included
      data_.view().as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random.below(256));
    }
    fill_gauss(scale_, random);
    if (scale_.view().dtype == DType::kE8M0) {  // every byte: 0 is 2^-127, 255 is NaN
      for (std::int64_t i = 0; i < scale_.view().elements(); ++i) {
        scale_.view().as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random.below(256));
      }
    }
  }

  std::vector<Tensor> outputs() const override { return {output_}; }

  std::vector<Comparison> compare() override {
    DequantiseArgs want = args_;
    want.output = want_;
    ref::dequantise_implementation.run(want, {});
    return {equal_numbers("output", output_, want_)};
  }

  Cost cost() const override {
    return {static_cast<double>(data_.view().elements()),
            bytes_of_tensor(data_) + bytes_of_tensor(scale_) + bytes_of_tensor(output_)};
  }

 private:
  Guarded data_, scale_, output_, want_;
};

}  // namespace

Operation dequantise_operation() {
  return {
      "dequantise",
      "the numbers that E4M3 data and their scales stand for",
      {{"rows", "64", "rows"},
       {"heads", "1", "heads of a row"},
       {"dim", "128", "channels"},
       {"groups", "1", "scales of a head; divides dim"},
       {"scale", "f32", "dtype of the scales", words({"f32", "e8m0"})},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<DequantiseCase>(p); },
      {"dequantise rows=70 heads=2", "dequantise rows=9 dim=100 groups=4",
       "dequantise rows=200 dim=64 groups=2 scale=e8m0",
       "dequantise rows=30 dim=21 groups=3 scale=e8m0", "dequantise rows=9 dim=5 groups=5",
       "dequantise rows=0"},
      {"dequantise rows=4096 heads=64 groups=4 scale=e8m0"}};
}

}  // namespace winnow::bench
