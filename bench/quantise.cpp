// Problems of quantise. Every implementation gives the bits of the reference.
#include "winnow/quantise.h"

#include <limits>

#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/quantised.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

class QuantiseCase : public OperationCase<quantise, quantise_workspace_bytes> {
 public:
  explicit QuantiseCase(const Problem& p) {
    const std::int64_t rows = p.number("rows"), heads = p.number("heads"), dim = p.number("dim"),
                       groups = p.number("groups");
    const DType scale = p.dtype("scale");
    input_ = Guarded(p.dtype(), {rows, heads, dim});
    data_ = Guarded(DType::kE4M3, {rows, heads, dim});
    scale_ = Guarded(scale, {rows, heads, groups});
    want_data_ = Guarded(DType::kE4M3, {rows, heads, dim});
    want_scale_ = Guarded(scale, {rows, heads, groups});
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    fill_gauss(input_, random, 3);
    if (p.flag("edges") && !ShapesOnly::on()) fill_edges(input_, random);
    args_ = {input_, p.flag("power_of_two"), p.flag("floor") ? 1e-4 : 0, data_, scale_};
  }

  std::vector<Tensor> outputs() const override { return {data_, scale_}; }

  std::vector<Comparison> compare() override {
    QuantiseArgs want = args_;
    want.data = want_data_;
    want.scale = want_scale_;
    ref::quantise_implementation.run(want, {});
    return {equal_numbers("data", data_, want_data_), equal_numbers("scale", scale_, want_scale_)};
  }

  Cost cost() const override {
    const Tensor& x = input_;
    return {4 * static_cast<double>(x.elements()),
            bytes_of_tensor(x) + bytes_of_tensor(data_) + bytes_of_tensor(scale_)};
  }

 private:
  // Powers of two times 448, one unit more, one less, in groups of their own; and what is no
  // number.
  static void fill_edges(const Tensor& t, Random& random) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const double kinds[] = {448, 448 * (1 + 0x1p-7), 448 * (1 - 0x1p-8), 0,  0x1p-24, 0x1p-9,
                            464, kInfinity,          -kInfinity,         NAN};
    for (std::int64_t i = 0; i < t.elements(); i += 1 + random.below(20)) {
      const double x = kinds[random.below(i % 3 == 0 ? 10 : 7)];
      store_double(t.data, t.dtype, i, std::ldexp(x, static_cast<int>(random.below(9)) - 4));
    }
    for (std::int64_t i = 0; i < t.elements() / 4; ++i)
      store_double(t.data, t.dtype, i, i % 2 ? -0. : 0.);
  }

  Guarded input_, data_, scale_, want_data_, want_scale_;
};

}  // namespace

Operation quantise_operation() {
  return {
      "quantise",
      "numbers to E4M3 with a scale for each group of channels",
      {{"rows", "64", "rows"},
       {"heads", "1", "heads of a row"},
       {"dim", "128", "channels"},
       {"groups", "1", "scales of a head; divides dim"},
       {"dtype", "f32", "of the input", words({"f32", "bf16", "f16"})},
       {"scale", "f32", "dtype of the scales", words({"f32", "e8m0"})},
       {"power_of_two", "0", "1: scales are powers of two, rounded up", kFlag},
       {"floor", "0", "1: amax is at least 1e-4", kFlag},
       {"edges", "0", "1: powers of two times 448, their neighbours, zeros, NaN, infinities",
        kFlag},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<QuantiseCase>(p); },
      {"quantise rows=70 heads=2", "quantise rows=9 dim=100 groups=4 dtype=bf16",
       "quantise rows=9 dim=37 dtype=f16 power_of_two=1", "quantise rows=9 dim=5 groups=5 edges=1",
       "quantise rows=30 dim=128 groups=4 scale=e8m0 power_of_two=1 dtype=bf16",
       "quantise rows=200 dim=64 groups=2 scale=e8m0 power_of_two=1 edges=1",
       "quantise rows=200 dim=64 groups=2 scale=e8m0 power_of_two=1 edges=1 dtype=bf16",
       "quantise rows=200 dim=64 groups=2 edges=1 dtype=f16",
       "quantise rows=200 dim=40 edges=1 floor=1 power_of_two=1", "quantise rows=0",
       "quantise rows=40 dim=33 groups=3 scale=e8m0 power_of_two=1 edges=1 floor=1"},
      {"quantise rows=4096 heads=64 dtype=bf16 groups=4 scale=e8m0 power_of_two=1",
       "quantise rows=4096 heads=64 dtype=bf16"}};
}

}  // namespace winnow::bench
