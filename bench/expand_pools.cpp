// Problems of expand_pools.
#include "winnow/expand_pools.h"

#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/selection.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

class ExpandPoolsCase : public OperationCase<expand_pools, expand_pools_workspace_bytes> {
 public:
  explicit ExpandPoolsCase(const Problem& p)
      : rows_(p.number("rows")), pool_size_(p.number("pool_size")) {
    const std::int64_t keys = p.number("keys"), topk = p.number("topk"), phase = p.number("phase");
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    const std::int64_t selected = topk / pool_size_, pools = keys / pool_size_ + 1;
    starts_ = Guarded(DType::kI32, {rows_});
    ends_ = Guarded(DType::kI32, {rows_});
    pools_ = Guarded(DType::kI32, {rows_, selected});
    fill_ranges(p.word("range"), keys, topk, starts_, ends_, random);
    // Pools that the row sees in whole or in part, or not at all.
    const Guarded first(DType::kI32, {rows_}), last(DType::kI32, {rows_});
    for (std::int64_t i = 0; i < rows_ && !ShapesOnly::on(); ++i) {
      const auto size = static_cast<std::int32_t>(pool_size_);
      first.view().as<std::int32_t>()[i] = starts_.view().as<std::int32_t>()[i] / size - 1;
      last.view().as<std::int32_t>()[i] = ends_.view().as<std::int32_t>()[i] / size + 1;
    }
    fill_indices(p.word("ids"), pools, first, last, pools_, random);
    if (phase >= 0) {
      bases_ = Guarded(DType::kI32, {pools});
      for (std::int64_t m = 0; m < pools && !ShapesOnly::on(); ++m)
        bases_.view().as<std::int32_t>()[m] = static_cast<std::int32_t>(phase + m * pool_size_);
    }
    const bool tail = p.flag("tail");
    const std::int64_t width = topk + (tail ? pool_size_ - 1 : 0);
    output_ = SelectionOutput(rows_, width, DType::kF32, false);
    truth_ = SelectionOutput(rows_, width, DType::kF32, false);
    args_ = {pools_, bases_, starts_, ends_, pool_size_, tail, output_.indices, output_.lengths};
  }

  std::vector<Tensor> outputs() const override { return output_.tensors(); }

  std::vector<Comparison> compare() override {
    ExpandPoolsArgs args = args_;
    args.topk_indices = truth_.indices;
    args.topk_lengths = truth_.lengths;
    ref::expand_pools_implementation.run(args, {});
    std::vector<Comparison> all = compare_selections(output_, truth_);
    all.pop_back();  // there are no scores
    return all;
  }

  // Pool ids and their bases are read, tokens written.
  Cost cost() const override {
    const auto ids = static_cast<double>(pools_.view().elements());
    return {0, 4 * (ids * (bases_.view().empty() ? 1 : 2) +
                    static_cast<double>(output_.indices.view().elements()))};
  }

 private:
  std::int64_t rows_, pool_size_;
  Guarded starts_, ends_, pools_, bases_;
  SelectionOutput output_, truth_;
};

}  // namespace

Operation expand_pools_operation() {
  return {"expand_pools",
          "from selected pools to the tokens that attention reads",
          {{"rows", "16", "query rows"},
           {"keys", "32768", "tokens"},
           {"topk", "2048", "tokens to select, without the tail"},
           {"pool_size", "4", "tokens of a pool", kPositive},
           {"tail", "1", "0: without the tokens of no complete pool", kFlag},
           {"phase", "0", "token of the first pool; -1: pool_bases is left out", kDefaulted},
           {"ids", "ascending", "", kIds},
           {"range", "full", "", kRanges},
           {"seed", "1", "of the data"}},
          [](const Problem& p) -> std::unique_ptr<Case> {
            return std::make_unique<ExpandPoolsCase>(p);
          },
          {"expand_pools rows=60 keys=200 topk=64 range=awkward",
           "expand_pools rows=60 keys=200 topk=64 range=awkward ids=scattered",
           "expand_pools rows=60 keys=200 topk=64 range=awkward ids=scattered tail=0 phase=-1",
           "expand_pools rows=70 keys=71 topk=16 range=causal phase=-1",
           "expand_pools rows=70 keys=71 topk=16 range=causal phase=3 tail=0",
           "expand_pools rows=50 keys=300 topk=66 pool_size=11 range=packed",
           "expand_pools rows=30 keys=300 topk=64 pool_size=64 range=awkward",
           "expand_pools rows=30 keys=90 topk=7 pool_size=1 range=awkward ids=scattered",
           "expand_pools rows=5 keys=40 topk=9 pool_size=3 range=causal",
           "expand_pools rows=5 keys=0 topk=8", "expand_pools rows=0 keys=64 topk=8"},
          {"expand_pools rows=64", "expand_pools rows=4096 phase=-1 range=causal"}};
}

}  // namespace winnow::bench
