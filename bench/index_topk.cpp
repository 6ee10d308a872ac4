// Problems of index_topk. The truth is the rule of select_topk on the scores that index_scores of
// the same implementation gives, so the comparison is exact in every precision.
#include "winnow/index_topk.h"

#include <vector>

#include "base/numbers.h"
#include "base/row_range.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/keys.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/scales.h"
#include "bench/selection.h"
#include "ref/implementations.h"
#include "winnow/index_scores.h"

namespace winnow::bench {
namespace {

class IndexTopkCase : public OperationCase<index_topk, index_topk_workspace_bytes> {
 public:
  explicit IndexTopkCase(const Problem& p)
      : rows_(p.number("rows")), keys_(p.number("keys")), topk_(p.number("topk")) {
    const std::int64_t heads = p.number("index_heads"), dim = p.number("index_dim");
    const DType dtype = data_dtype(p.word("dtype"));
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    query_ = Guarded(dtype, {rows_, heads, dim});
    weights_ = Guarded(dtype == DType::kF64 ? wide : p.dtype("weights"), {rows_, heads});
    starts_ = Guarded(DType::kI32, {rows_});
    ends_ = Guarded(DType::kI32, {rows_});
    fill_gauss(query_, random);
    key_ = Keys(dtype, rows_, keys_, {dim}, p.number("page"), random);
    fill_gauss(weights_, random, 1 / std::sqrt(static_cast<double>(heads * dim)));
    fill_ranges(p.word("range"), keys_, topk_, starts_, ends_, random);
    if (p.flag("specials") && dim > 0 && !ShapesOnly::on()) add_specials(random);
    scales_ = Scales(p.word("dtype"), query_, key_.view(), p.flag("specials"), random);
    output_ = SelectionOutput(rows_, topk_, wide, p.flag("scores"));
    truth_ = SelectionOutput(rows_, topk_, wide, p.flag("scores"));
    args_ = {query_,         key_.view(),     weights_,        starts_,       ends_,
             p.flag("relu"), output_.indices, output_.lengths, output_.scores};
    args_.index_query_scale = scales_.query();
    args_.index_key_scale = scales_.key();
    if (p.flag("dot_scale")) args_.dot_scale = 0.3;
    args_.keep_minus_inf = p.flag("keep_minus_inf");
    args_.keep_first = static_cast<std::int32_t>(p.number("keep_first"));
    args_.keep_last = static_cast<std::int32_t>(p.number("keep_last"));
    args_.workspace_budget = p.number("budget");
  }

  std::vector<std::pair<std::string, std::int64_t>> counts() const override {
    return {{"repairs", last_selection_statistics().repairs}};
  }
  std::vector<Tensor> outputs() const override { return output_.tensors(); }

  std::vector<Comparison> compare() override {
    const Guarded scores(query_.view().dtype == DType::kF64 ? DType::kF64 : DType::kF32,
                         {rows_, key_.count()});
    IndexScoresArgs score_args = {query_, key_.view(), weights_, starts_,
                                  ends_,  args_.relu,  scores};
    score_args.index_query_scale = scales_.query();
    score_args.index_key_scale = scales_.key();
    score_args.dot_scale = args_.dot_scale;
    pin_implementation("index_scores", last_implementation("index_topk"));
    try {
      run_once(index_scores_workspace_bytes(placed(score_args)),
               [&](Workspace workspace) { index_scores(brought(score_args), workspace); });
    } catch (...) {
      pin_implementation("index_scores", "");
      throw;
    }
    pin_implementation("index_scores", "");
    // select_topk knows no key space: the ranges end with the keys.
    const Guarded ends(DType::kI32, {rows_});
    for (std::int64_t i = 0; i < rows_; ++i) {
      ends.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(
          std::min<std::int64_t>(key_.count(), ends_.view().as<std::int32_t>()[i]));
    }
    const SelectTopkArgs args = {scores,
                                 starts_,
                                 ends,
                                 truth_.indices,
                                 truth_.lengths,
                                 truth_.scores,
                                 args_.keep_minus_inf,
                                 args_.keep_first,
                                 args_.keep_last};
    const Guarded workspace(DType::kU8, {ref::select_topk_implementation.workspace_bytes(args)});
    ref::select_topk_implementation.run(args, {workspace.view().data, workspace.view().elements()});
    return compare_selections(output_, truth_);
  }

  Cost cost() const override {
    double pairs = 0;
    for (std::int64_t i = 0; i < rows_; ++i)
      pairs += static_cast<double>(row_range(starts_, ends_, i, key_.count()).length());
    const Tensor& q = query_;
    const auto input =
        static_cast<double>((q.elements() + keys_ * q.shape[2]) * dtype_bytes(q.dtype));
    return {2 * pairs * static_cast<double>(q.shape[1] * q.shape[2]),
            input + static_cast<double>(rows_ * topk_ * (args_.topk_scores.empty() ? 4 : 8))};
  }

 private:
  // Keys with a NaN, an infinity, zeros, and copies of their neighbour (exact ties).
  void add_specials(Random& random) {
    const Tensor& k = key_.data();
    const std::int64_t dim = k.shape[k.rank - 1];
    for (std::int64_t j = 1; j < k.elements() / dim; ++j) {
      const std::int64_t kind = random.below(10), channel = random.below(dim);
      auto at = [&](std::int64_t d) { return j * dim + d; };
      if (kind == 0) store_double(k.data, k.dtype, at(channel), NAN);
      if (kind == 1) store_double(k.data, k.dtype, at(channel), INFINITY);
      for (std::int64_t d = 0; d < dim; ++d) {
        if (kind == 2) store_double(k.data, k.dtype, at(d), 0);
        if (kind >= 8)
          store_double(k.data, k.dtype, at(d), load_double(k.data, k.dtype, at(d) - dim));
      }
    }
  }

  std::int64_t rows_, keys_, topk_;
  Keys key_;
  Scales scales_;
  Guarded query_, weights_, starts_, ends_;
  SelectionOutput output_, truth_;
};

}  // namespace

Operation index_topk_operation() {
  return {
      "index_topk",
      "scoring and exact selection in one pass, without a score matrix",
      {{"rows", "16", "query rows"},
       {"keys", "1024", "keys of the key space"},
       {"index_heads", "64", "indexer heads"},
       {"index_dim", "128", "channels of a head"},
       {"topk", "64", "keys to select"},
       {"dtype", "f32", "", kScorerDtypes},
       {"weights", "f32", "", words({"f32", "bf16"})},
       {"dot_scale", "0", "1: a factor before ReLU", kFlag},
       {"range", "full", "", kRanges},
       {"page", "0", "keys of a page, three requests; 0: keys in one piece"},
       {"relu", "1", "0: identity", kFlag},
       {"specials", "0", "1: keys with NaN, inf, zeros, and equal neighbours", kFlag},
       {"scores", "1", "0: topk_scores is left out", kFlag},
       {"keep_minus_inf", "0", "1: scores of -inf are candidates, the lowest", kFlag},
       {"keep_first", "0", "first keys of a row that are always selected", kInt32},
       {"keep_last", "0", "last keys of a row that are always selected", kInt32},
       {"budget", "0", "bytes of workspace at most; 0: no limit", kBytes},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<IndexTopkCase>(p); },
      {"index_topk rows=7 keys=300 index_heads=16 index_dim=32",
       "index_topk rows=5 keys=257 index_heads=64 topk=31 range=causal dtype=bf16",
       "index_topk rows=24 keys=200 index_heads=3 index_dim=17 topk=16 range=awkward",
       "index_topk rows=37 keys=90 index_heads=1 index_dim=1 topk=5 range=awkward dtype=f16",
       "index_topk rows=70 keys=80 index_heads=5 index_dim=40 topk=9 range=packed relu=0",
       "index_topk rows=3 keys=5000 index_heads=2 index_dim=3 topk=700 specials=1",
       "index_topk rows=20 keys=9000 index_heads=1 index_dim=8 topk=257 range=packed "
       "specials=1 dtype=bf16",
       "index_topk rows=1 keys=30000 index_heads=2 index_dim=5 topk=2048",
       "index_topk rows=300 keys=300 index_heads=2 index_dim=4 topk=33 range=causal",
       "index_topk rows=36 keys=200 index_heads=3 index_dim=17 topk=16 range=awkward page=16",
       "index_topk rows=20 keys=9000 index_heads=1 index_dim=8 topk=257 range=packed "
       "specials=1 dtype=bf16 page=64",
       "index_topk rows=1 keys=30000 index_heads=2 index_dim=5 topk=2048 page=37",
       "index_topk rows=37 keys=90 index_heads=1 index_dim=1 topk=5 range=awkward dtype=f64 page=1",
       "index_topk rows=6 keys=50 index_heads=4 index_dim=8 topk=8 dtype=f64 range=causal",
       "index_topk rows=4 keys=64 index_heads=4 index_dim=8 topk=70000 scores=0",
       "index_topk rows=36 keys=200 index_heads=3 index_dim=17 topk=16 range=awkward dtype=e4m3",
       "index_topk rows=20 keys=5000 index_heads=1 index_dim=32 topk=257 range=packed specials=1 "
       "dtype=mxfp8 weights=bf16",
       "index_topk rows=20 keys=900 index_heads=2 index_dim=64 topk=33 specials=1 dtype=e4m3 "
       "page=64",
       "index_topk rows=1 keys=9000 index_heads=2 index_dim=64 topk=300 dtype=mxfp8 page=37 "
       "dot_scale=1",
       "index_topk rows=36 keys=200 index_heads=3 index_dim=17 topk=16 range=awkward specials=1 "
       "keep_first=3 keep_last=5",
       "index_topk rows=2 keys=5000 index_heads=2 index_dim=3 topk=700 specials=1 keep_first=300 "
       "keep_last=400",
       "index_topk rows=20 keys=900 index_heads=1 index_dim=8 topk=100 range=packed specials=1 "
       "dtype=bf16 page=64 keep_minus_inf=1 keep_first=80 keep_last=10",
       "index_topk rows=37 keys=90 index_heads=1 index_dim=1 topk=64 range=awkward dtype=f64 "
       "page=16 keep_first=64 keep_minus_inf=1",
       "index_topk rows=70 keys=3000 index_heads=2 index_dim=4 topk=300 range=causal budget=200000",
       "index_topk rows=3 keys=9000 index_heads=2 index_dim=4 topk=600 budget=60000 specials=1",
       "index_topk rows=2 keys=70000 index_heads=1 index_dim=8 topk=65536 specials=1",
       "index_topk rows=3 keys=70000 index_heads=1 index_dim=8 topk=65536 specials=1 page=64",
       "index_topk rows=21 keys=150 index_heads=32 topk=20 range=packed dtype=e4m3 specials=1",
       "index_topk rows=21 keys=150 index_heads=32 topk=20 range=awkward dtype=bf16 specials=1",
       "index_topk rows=0 keys=64 index_heads=8 index_dim=16",
       "index_topk rows=3 keys=0 index_heads=8 index_dim=16"},
      {"index_topk rows=16 keys=32768 topk=2048 dtype=bf16",
       "index_topk rows=1 keys=32768 topk=2048 dtype=bf16",
       "index_topk rows=16 keys=32768 topk=2048 dtype=bf16 page=64",
       "index_topk rows=16 keys=32768 topk=2048 dtype=mxfp8"}};
}

}  // namespace winnow::bench
