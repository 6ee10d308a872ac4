// Problems of index_scores.
#include "winnow/index_scores.h"

#include "base/row_range.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/keys.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/scales.h"
#include "ref/index_score.h"
#include "winnow/implementations.h"

namespace winnow::bench {
namespace {

class IndexScoresCase : public OperationCase<index_scores, index_scores_workspace_bytes> {
 public:
  explicit IndexScoresCase(const Problem& p)
      : rows_(p.number("rows")), keys_(p.number("keys")), width_(p.number("width")) {
    const std::int64_t heads = p.number("index_heads"), dim = p.number("index_dim");
    if (width_ < 0) width_ = keys_;
    const DType dtype = data_dtype(p.word("dtype"));
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    query_ = Guarded(dtype, {rows_, heads, dim});
    weights_ = Guarded(dtype == DType::kF64 ? wide : p.dtype("weights"), {rows_, heads});
    starts_ = Guarded(DType::kI32, {rows_});
    ends_ = Guarded(DType::kI32, {rows_});
    scores_ = Guarded(wide, {rows_, width_});
    fill_gauss(query_, random);
    key_ = Keys(dtype, rows_, keys_, {dim}, p.number("page"), random);
    fill_gauss(weights_, random, 1 / std::sqrt(static_cast<double>(heads * dim)));
    fill_ranges(p.word("range"), keys_, 16, starts_, ends_, random);
    scales_ = Scales(p.word("dtype"), query_, key_.view(), p.flag("specials"), random);
    args_ = {
        query_,         key_.view(), weights_,        starts_,       ends_,
        p.flag("relu"), scores_,     scales_.query(), scales_.key(), p.flag("dot_scale") ? 0.3 : 1};
  }

  std::vector<Tensor> outputs() const override { return {scores_}; }

  std::vector<Comparison> compare() override {
    Worst scores("index_scores"), unwritten("past the range");
    const std::int64_t heads = query_.view().shape[1], dim = query_.view().shape[2];
    // One product and `dim` additions per dot, one product and `heads` additions per score: every
    // term w q k passes at most dim + heads + 2 roundings; one more with a dot_scale, one more with
    // FP8's scale of the key. ReLU is 1-Lipschitz, so it adds none. A rounded operation whose
    // result is subnormal is off by 2^-150 at most instead.
    const bool fp8 = !args_.index_key_scale.empty() && args_.index_query_scale.empty();
    const int more = (args_.dot_scale != 1 ? 1 : 0) + (fp8 ? 1 : 0);
    double relative = args_.index_query.dtype == DType::kF64
                          ? 1e-12
                          : gamma(static_cast<double>(dim + heads + 2 + more));
    // Hopper's FP8 products take 32 channels at a time: 32 terms and the sum so far, aligned to the
    // largest of them, of which each loses what lies below its 2^-13.
    if (last_implementation("index_scores") == "cuda.sm90_fp8")
      relative += static_cast<double>((dim + 31) / 32) * 33 * 0x1p-13;
    for (std::int64_t i = 0; i < rows_; ++i) {
      const RowRange range = row_range(starts_, ends_, i, key_.count());
      for (std::int64_t t = 0; t < width_; ++t) {
        auto where = [&] { return fmt::format("row {} column {}", i, t); };
        if (t >= range.length()) {
          unwritten.add_exact(is_poison(scores_, i * width_ + t), where);
          continue;
        }
        const ref::ScorerKey key(args_, i, range.start + t);
        double magnitude = 0, tiny = static_cast<double>(heads) * 0x1p-150;
        for (std::int64_t h = 0; h < heads && !key.missing(); ++h) {
          double dot = 0;
          for (std::int64_t d = 0; d < dim; ++d) {
            dot += std::abs(ref::query_number(args_, i, h, d) * key.number(d));
          }
          const double weight = std::abs(ref::get(weights_, i, h));
          magnitude += weight * args_.dot_scale * dot;
          tiny += weight * static_cast<double>(dim + 1) * 0x1p-150;
        }
        const double factor = key.missing() ? 1 : std::abs(key.factor());
        scores.add(ref::get(scores_, i, t), ref::index_score_of(args_, i, range.start + t),
                   factor * (relative * magnitude + tiny) + 0x1p-150, where);
      }
    }
    return {scores.comparison(), unwritten.comparison()};
  }

  Cost cost() const override {
    double pairs = 0;
    for (std::int64_t i = 0; i < rows_; ++i)
      pairs += static_cast<double>(row_range(starts_, ends_, i, key_.count()).length());
    const Tensor& q = query_;
    const auto input =
        static_cast<double>((q.elements() + keys_ * q.shape[2]) * dtype_bytes(q.dtype));
    return {2 * pairs * static_cast<double>(q.shape[1] * q.shape[2]), input + 4 * pairs};
  }

 private:
  std::int64_t rows_, keys_, width_;
  Keys key_;
  Scales scales_;
  Guarded query_, weights_, starts_, ends_, scores_;
};

}  // namespace

Operation index_scores_operation() {
  return {
      "index_scores",
      "what the indexer thinks of every visible key",
      {{"rows", "16", "query rows"},
       {"keys", "1024", "keys of the key space"},
       {"index_heads", "64", "indexer heads"},
       {"index_dim", "128", "channels of a head"},
       {"width", "-1", "columns of the score matrix; -1: keys", kDefaulted},
       {"dtype", "f32", "", kScorerDtypes},
       {"weights", "f32", "", words({"f32", "bf16"})},
       {"specials", "0", "1: scales of keys hold 0, 1, 8 and NaN", kFlag},
       {"dot_scale", "0", "1: a factor before ReLU", kFlag},
       {"range", "full", "", kRanges},
       {"page", "0", "keys of a page, three requests; 0: keys in one piece"},
       {"relu", "1", "0: identity", kFlag},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<IndexScoresCase>(p);
      },
      {"index_scores rows=7 keys=300 index_heads=16 index_dim=32",
       "index_scores rows=2 keys=257 index_heads=64 range=causal dtype=bf16",
       "index_scores rows=24 keys=200 index_heads=3 index_dim=17 range=awkward",
       "index_scores rows=25 keys=90 index_heads=1 index_dim=1 range=awkward dtype=f16",
       "index_scores rows=70 keys=80 index_heads=5 index_dim=40 range=packed relu=0",
       "index_scores rows=9 keys=64 index_heads=8 index_dim=16 width=37",
       "index_scores rows=6 keys=50 index_heads=4 index_dim=8 dtype=f64 range=causal",
       "index_scores rows=24 keys=200 index_heads=3 index_dim=17 range=awkward page=16",
       "index_scores rows=35 keys=600 index_heads=2 index_dim=24 range=causal page=7 dtype=bf16",
       "index_scores rows=20 keys=100 index_heads=2 index_dim=8 range=packed page=64 dtype=f64",
       "index_scores rows=19 keys=50 index_heads=2 index_dim=8 page=1 dtype=f16",
       "index_scores rows=5 keys=70 index_heads=3 index_dim=17 dtype=e4m3 range=causal",
       "index_scores rows=40 keys=300 index_heads=2 index_dim=64 dtype=e4m3 specials=1 dot_scale=1",
       "index_scores rows=24 keys=200 index_heads=3 index_dim=32 dtype=mxfp8 range=awkward",
       "index_scores rows=40 keys=300 index_heads=7 index_dim=96 dtype=mxfp8 specials=1 "
       "weights=bf16",
       "index_scores rows=35 keys=200 index_heads=2 index_dim=40 dtype=e4m3 page=16 specials=1",
       "index_scores rows=35 keys=200 index_heads=2 index_dim=64 dtype=mxfp8 page=7 specials=1",
       "index_scores rows=3 keys=80 index_heads=128 index_dim=256 dtype=mxfp8 relu=0",
       "index_scores rows=9 keys=64 index_heads=8 index_dim=16 dtype=bf16 weights=bf16 dot_scale=1",
       "index_scores rows=21 keys=150 index_heads=32 index_dim=128 range=awkward dtype=bf16",
       "index_scores rows=21 keys=150 index_heads=32 range=packed dtype=e4m3 specials=1",
       "index_scores rows=9 keys=150 range=awkward dtype=mxfp8 specials=1 dot_scale=1",
       "index_scores rows=0 keys=64 dtype=mxfp8",
       "index_scores rows=3 keys=0 dtype=e4m3",
       "index_scores rows=0 keys=64 index_heads=8 index_dim=16",
       "index_scores rows=3 keys=0 index_heads=8 index_dim=16"},
      {"index_scores rows=16 keys=32768 dtype=bf16", "index_scores rows=16 keys=32768",
       "index_scores rows=4 keys=32768 dtype=bf16", "index_scores rows=1 keys=32768 dtype=bf16",
       "index_scores rows=16 keys=32768 dtype=bf16 page=64",
       "index_scores rows=16 keys=32768 dtype=e4m3", "index_scores rows=16 keys=32768 dtype=mxfp8",
       "index_scores rows=1 keys=32768 dtype=e4m3", "index_scores rows=1 keys=32768 dtype=mxfp8"}};
}

}  // namespace winnow::bench
