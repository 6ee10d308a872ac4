// Problems of select_topk.
#include "winnow/select_topk.h"

#include <limits>
#include <vector>

#include "base/numbers.h"
#include "base/parallel.h"
#include "base/row_range.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/selection.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

// One score, by the word of the kind: see the parameter "data".
double score(const std::string& kind, std::int64_t i, Random& random) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kSpecial[] = {kNan, -kNan,    kInf,      -kInf,   0.,     -0.,
                                 1.,   0x1p-149, -0x1p-149, 0x1p-24, 3.4e38, -3.4e38};
  const auto x = static_cast<double>(i);
  if (kind == "gauss") return random.gauss();
  if (kind == "ties") return to_float(to_bf16(static_cast<float>(random.gauss())));
  if (kind == "zeros") return i % 167 == 3 ? x + 1 : random.below(2) == 0 ? 0. : -0.;
  if (kind == "equal") return -3.25;
  if (kind == "ascending") return x;
  if (kind == "descending") return -x;
  if (kind == "special") return kSpecial[random.below(12)];
  if (kind == "invalid") return i % 3 == 0 ? kNan : -kInf;
  if (kind == "few") return random.below(100) == 0 ? random.gauss() : -kInf;
  if (kind == "near")  // all distinct in f32, one f16 bucket
    return 1 + 0x1p-11 + static_cast<double>(1 + 2731 * i % 8000) * 0x1p-23;
  if (kind == "low") return -1e5 - x;
  if (kind == "hidden") return i % 512 < 496 ? random.gauss() : x + 10;  // large ones in runs
  WINNOW_CHECK("problem", kind == "bits", "data has no kind \"{}\"", kind);
  return std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
}

class SelectTopkCase : public OperationCase<select_topk, select_topk_workspace_bytes> {
 public:
  explicit SelectTopkCase(const Problem& p)
      : rows_(p.number("rows")), width_(p.number("width")), topk_(p.number("topk")) {
    const std::int64_t seed = p.number("seed");
    Random random(static_cast<std::uint64_t>(seed));
    const std::int64_t keys = p.number("keys") < 0 ? width_ : p.number("keys");
    const DType wide = p.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
    const std::int64_t step = p.number("step");
    scores_ = Guarded(p.dtype(), {rows_, width_ * step});
    starts_ = Guarded(DType::kI32, {rows_});
    ends_ = Guarded(DType::kI32, {rows_});
    const std::string kind = p.word("data");
    parallel_for(ShapesOnly::on() ? 0 : rows_, [&](std::int64_t i, int) {
      Random of_row(seed + 1000003 * static_cast<std::uint64_t>(i));
      for (std::int64_t t = 0; t < width_; ++t) {
        store_double(scores_.view().data, scores_.view().dtype, (i * width_ + t) * step,
                     score(kind, t, of_row));
      }
    });
    fill_ranges(p.word("range"), keys, topk_, starts_, ends_, random);
    output_ = SelectionOutput(rows_, topk_, wide, p.flag("scores"));
    truth_ = SelectionOutput(rows_, topk_, wide, p.flag("scores"));
    args_ = {scores_, starts_, ends_, output_.indices, output_.lengths, output_.scores};
    args_.scores = args_.scores.channels(0, width_ * step);
    args_.scores.shape[1] = width_;
    args_.scores.strides[1] = step;
    args_.keep_minus_inf = p.flag("keep_minus_inf");
    args_.keep_first = static_cast<std::int32_t>(p.number("keep_first"));
    args_.keep_last = static_cast<std::int32_t>(p.number("keep_last"));
  }

  std::vector<std::pair<std::string, std::int64_t>> counts() const override {
    return {{"repairs", last_selection_statistics().repairs}};
  }
  std::vector<Tensor> outputs() const override { return output_.tensors(); }

  std::vector<Comparison> compare() override {
    SelectTopkArgs args = args_;
    args.topk_indices = truth_.indices;
    args.topk_lengths = truth_.lengths;
    args.topk_scores = truth_.scores;
    std::vector<unsigned char> memory(
        static_cast<std::size_t>(ref::select_topk_implementation.workspace_bytes(args)));
    ref::select_topk_implementation.run(args,
                                        {memory.data(), static_cast<std::int64_t>(memory.size())});
    return compare_selections(output_, truth_);
  }

  // Every score is read once; no arithmetic.
  Cost cost() const override {
    double visible = 0;
    for (std::int64_t i = 0; i < rows_; ++i)
      visible +=
          static_cast<double>(std::min(row_range(starts_, ends_, i, kMaxKeys).length(), width_));
    return {0, visible * static_cast<double>(dtype_bytes(args_.scores.dtype)) +
                   static_cast<double>(rows_ * topk_ * (args_.topk_scores.empty() ? 4 : 8))};
  }

 private:
  static constexpr std::int64_t kMaxKeys = std::numeric_limits<std::int32_t>::max();
  std::int64_t rows_, width_, topk_;
  Guarded scores_, starts_, ends_;
  SelectionOutput output_, truth_;
};

std::vector<std::string> check_problems() {
  std::vector<std::string> list = {
      "select_topk rows=36 width=200 topk=16 range=awkward",
      "select_topk rows=24 width=64 keys=300 topk=7 range=awkward data=ties",
      "select_topk rows=24 width=300 topk=64 range=awkward dtype=bf16",
      "select_topk rows=24 width=300 topk=65 range=awkward dtype=f16 data=special",
      "select_topk rows=9 width=90 topk=5 dtype=f64 data=special",
      "select_topk rows=70 width=80 topk=9 range=packed",
      "select_topk rows=3 width=5 topk=2048 scores=0",
      "select_topk rows=0 width=64 topk=4",
      "select_topk rows=3 width=0 topk=4",
      "select_topk rows=1 width=131072 topk=2048 dtype=bf16",
      "select_topk rows=1 width=40000 topk=1 dtype=f16 data=ties",
      "select_topk rows=1 width=70000 topk=65536",
      "select_topk rows=1 width=262144 topk=2048 data=ties",
      "select_topk rows=36 width=200 topk=16 range=awkward keep_first=3 keep_last=5 data=special",
      "select_topk rows=24 width=300 topk=64 range=awkward keep_first=64 data=bits dtype=f16",
      "select_topk rows=9 width=90 topk=50 dtype=f64 data=special keep_last=20 keep_minus_inf=1",
      "select_topk rows=36 width=300 topk=65 range=awkward data=few keep_minus_inf=1",
      "select_topk rows=2 width=33001 topk=2047 data=few keep_minus_inf=1 keep_first=1 keep_last=1",
      "select_topk rows=2 width=33001 topk=2047 data=invalid keep_minus_inf=1 dtype=bf16",
      "select_topk rows=24 width=300 topk=33 range=awkward step=3 keep_first=2",
      "select_topk rows=2 width=20000 topk=512 step=2 data=ascending dtype=bf16",
      "select_topk rows=1 width=530000 topk=3000 data=hidden keep_first=4 keep_last=128"};
  for (const char* kind : {"gauss", "ties", "zeros", "equal", "ascending", "descending", "special",
                           "invalid", "few", "near", "low", "hidden", "bits"}) {
    for (const char* size :
         {"width=705 topk=257", "width=5000 topk=512", "width=33001 topk=2047"}) {
      list.push_back(fmt::format("select_topk rows=2 {} data={}", size, kind));
    }
  }
  return list;
}

}  // namespace

Operation select_topk_operation() {
  const char* sizes = "select_topk rows=1 width=131072 topk=2048";
  return {
      "select_topk",
      "the k best keys of every row, by given scores",
      {{"rows", "16", "query rows"},
       {"width", "32768", "columns of the score matrix"},
       {"keys", "-1", "keys of the key space, for the ranges; -1: width", kDefaulted},
       {"topk", "2048", "keys to select"},
       {"dtype", "f32", "", kFloats},
       {"range", "full", "", kRanges},
       {"data", "gauss", "",
        words({"gauss", "ties", "zeros (a plateau)", "equal", "ascending", "descending",
               "special (NaN, inf, denormals)", "invalid (NaN and -inf only)", "few (1 % valid)",
               "near (one f16 bucket)", "low (below -1e5)", "hidden (from samples)",
               "bits (random)"})},
       {"scores", "1", "0: topk_scores is left out", kFlag},
       {"keep_minus_inf", "0", "1: scores of -inf are candidates, the lowest", kFlag},
       {"keep_first", "0", "first keys of a row that are always selected", kInt32},
       {"keep_last", "0", "last keys of a row that are always selected", kInt32},
       {"step", "1", "distance of neighbouring columns", kPositive},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<SelectTopkCase>(p); },
      check_problems(),
      {sizes, fmt::format("{} dtype=bf16", sizes), fmt::format("{} data=ties", sizes),
       fmt::format("{} data=zeros", sizes), fmt::format("{} data=equal", sizes),
       fmt::format("{} data=ascending", sizes), fmt::format("{} data=descending", sizes),
       fmt::format("{} data=hidden", sizes), "select_topk rows=16 width=32768 topk=2048"}};
}

}  // namespace winnow::bench
