// Problems of merge_attention.
#include "winnow/merge_attention.h"

#include <algorithm>
#include <cmath>

#include "bench/attention.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "ref/reader.h"

namespace winnow::bench {
namespace {

// Parts whose lse is -inf hold NaN. By word:
//   gauss  lse of some spread, every third (part, row, head) empty, all parts of every fifth row
//   far    lse from -3e38 to 3e38, so that most weights vanish
void fill_parts(const std::string& kind, const Tensor& output, const Tensor& lse, Random& random) {
  if (lse.data == nullptr) return;
  fill_gauss(output, random);
  const std::int64_t rows = lse.shape[1], heads = lse.shape[2], dim_v = output.shape[3];
  for (std::int64_t e = 0; e < lse.elements(); ++e) {
    const double x = 3 * random.gauss();
    const bool empty = random.below(3) == 0 || e / heads % rows % 5 == 4;
    const double far[] = {3e38 * (x < 0 ? -1 : 1), 1e4 * x, x};
    const double value = kind == "far" ? far[e % 3] : x;
    store_double(lse.data, lse.dtype, e, empty ? -INFINITY : value);
    for (std::int64_t c = 0; c < dim_v && empty; ++c)
      store_double(output.data, output.dtype, e * dim_v + c, NAN);
  }
}

class MergeAttentionCase : public OperationCase<merge_attention, merge_attention_workspace_bytes> {
 public:
  explicit MergeAttentionCase(const Problem& p) {
    const std::int64_t parts = p.number("parts"), rows = p.number("rows"),
                       heads = p.number("heads"), dim_v = p.number("dim_v");
    const DType dtype = p.dtype(), wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    part_output_ = Guarded(dtype, {parts, rows, heads, dim_v});
    part_lse_ = Guarded(wide, {parts, rows, heads});
    output_ =
        Guarded(p.flag("wide") && dtype != DType::kF64 ? DType::kF32 : dtype, {rows, heads, dim_v});
    lse_ = Guarded(wide, {rows, heads});
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    fill_parts(p.word("lse"), part_output_, part_lse_, random);
    args_ = {part_output_, part_lse_, output_, lse_};
  }

  std::vector<Tensor> outputs() const override { return {output_, lse_}; }

  // Bounds. Let d_p = lse_p - m, w_p = exp(d_p) and q_p = w_p / sum w; n parts contribute. Relative
  // to itself, w_p is off by delta_p = u |d_p| (the rounded difference) + 2u (exp), absolutely by
  // 2^-149 more where it is subnormal. The sum adds n - 1 roundings, its inverse and the product
  // with it 2, the chain of the channel n. One part alone: exact but for the storage.
  std::vector<Comparison> compare() override {
    Worst outputs("output"), lses("lse");
    const Tensor& in = part_output_;
    const DType dtype = in.dtype;
    const std::int64_t parts = in.shape[0];
    for (std::int64_t i = 0; i < in.shape[1]; ++i) {
      for (std::int64_t h = 0; h < in.shape[2]; ++h) {
        double maximum = -INFINITY, sum = 0, mean_delta = 0, n = 0;
        for (std::int64_t p = 0; p < parts; ++p) maximum = std::max(maximum, lse(p, i, h));
        for (std::int64_t p = 0; p < parts; ++p) {
          if (lse(p, i, h) == -INFINITY) continue;
          sum += std::exp(lse(p, i, h) - maximum);
          n += 1;
        }
        const auto delta = [&](std::int64_t p) {
          return n == 1 ? 0 : gamma_of(dtype, std::min(maximum - lse(p, i, h), 1e3) + 2);
        };
        for (std::int64_t p = 0; p < parts; ++p) {
          const double w = std::exp(lse(p, i, h) - maximum);
          if (w > 0) mean_delta += (w * delta(p) + (n == 1 ? 0 : 0x1p-148)) / sum;
        }
        const double sum_error = n <= 1 ? 0 : mean_delta + gamma_of(dtype, n - 1);
        const double truth = n == 0 ? -INFINITY : maximum + std::log(sum);
        // The logarithm: 2u of itself, then the sum with m.
        lses.add(ref::get(lse_, i, h), truth,
                 sum_error + (n <= 1 ? 0
                                     : gamma_of(dtype, 2 * std::log(sum)) +
                                           gamma_of(dtype, 1) * std::abs(truth)),
                 [&] { return fmt::format("row {} head {}", i, h); });
        for (std::int64_t c = 0; c < in.shape[3]; ++c) {
          double weighted = 0, bound = 0;
          for (std::int64_t p = 0; p < parts; ++p) {
            if (lse(p, i, h) == -INFINITY) continue;
            const double q = std::exp(lse(p, i, h) - maximum) / sum, x = ref::get(in, p, i, h, c);
            weighted += q * x;
            if (n > 1) bound += std::abs(x) * (q * (delta(p) + gamma_of(dtype, n)) + 0x1p-148);
          }
          if (n > 1) bound += std::abs(weighted) * (sum_error + gamma_of(dtype, 2));
          if (n > 1) bound += storage_error(output_.view().dtype, std::abs(weighted) + bound);
          outputs.add(ref::get(output_, i, h, c), weighted, bound,
                      [&] { return fmt::format("row {} head {} channel {}", i, h, c); });
        }
      }
    }
    return {outputs.comparison(), lses.comparison()};
  }

  Cost cost() const override {
    const auto bytes = [](const Tensor& t) {
      return static_cast<double>(t.elements() * dtype_bytes(t.dtype));
    };
    return {2 * static_cast<double>(part_output_.view().elements()),
            bytes(part_output_) + bytes(part_lse_) + bytes(output_) + bytes(lse_)};
  }

 private:
  double lse(std::int64_t p, std::int64_t i, std::int64_t h) const {
    return ref::get(part_lse_, p, i, h);
  }

  Guarded part_output_, part_lse_, output_, lse_;
};

}  // namespace

Operation merge_attention_operation() {
  return {
      "merge_attention",
      "one attention out of partial ones over disjoint sets of keys",
      {{"parts", "4", "partial attentions"},
       {"rows", "64", "query rows"},
       {"heads", "64", "query heads"},
       {"dim_v", "512", "channels of the output"},
       {"lse", "gauss", "", words({"gauss", "far"})},
       {"dtype", "f32", "", kFloats},
       {"wide", "0", "1: f32 outputs also for 16-bit parts", kFlag},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<MergeAttentionCase>(p);
      },
      {"merge_attention rows=7 heads=3 dim_v=33", "merge_attention parts=1 rows=9 heads=5 dim_v=16",
       "merge_attention parts=2 rows=70 heads=2 dim_v=7 dtype=bf16",
       "merge_attention parts=17 rows=5 heads=4 dim_v=24 dtype=f16 wide=1",
       "merge_attention parts=9 rows=11 heads=3 dim_v=5 lse=far",
       "merge_attention parts=3 rows=11 heads=2 dim_v=20 dtype=f16 lse=far",
       "merge_attention parts=5 rows=6 heads=2 dim_v=9 dtype=f64",
       "merge_attention parts=0 rows=3 heads=2 dim_v=17", "merge_attention rows=0 heads=2 dim_v=8"},
      {"merge_attention", "merge_attention parts=8 dtype=bf16"}};
}

}  // namespace winnow::bench
