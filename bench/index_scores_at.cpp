// Problems of index_scores_at.
#include "winnow/index_scores_at.h"

#include "bench/loss_bounds.h"
#include "bench/loss_data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"

namespace winnow::bench {
namespace {

class IndexScoresAtCase : public OperationCase<index_scores_at, index_scores_at_workspace_bytes> {
 public:
  explicit IndexScoresAtCase(const Problem& p)
      : random_(static_cast<std::uint64_t>(p.number("seed"))),
        lists_(p, random_, true),
        indexer_(p, random_),
        scores_(wide_of(p.dtype()), {lists_.rows, lists_.topk}) {
    args_ = {indexer_.query, indexer_.key, indexer_.weights, lists_.indices,
             lists_.starts,  lists_.ends,  p.flag("relu"),   scores_};
  }
  std::vector<Tensor> outputs() const override { return {scores_}; }

  std::vector<Comparison> compare() override {
    Worst scores("topk_scores");
    for (std::int64_t i = 0; i < lists_.rows; ++i) {
      for (std::int64_t s = 0; s < lists_.topk; ++s) {
        const std::int64_t j = lists_.id(i, s);
        Approximate truth{-INFINITY, 0};
        if (j >= 0) {
          truth = approximate_score(args_.index_query, args_.index_key, args_.index_weights,
                                    args_.relu, i, j);
        }
        scores.add(ref::get(scores_, i, s), truth.value, truth.error,
                   [&] { return fmt::format("row {} slot {}", i, s); });
      }
    }
    return {scores.comparison()};
  }

  Cost cost() const override {
    const double slots = lists_.slots();
    const Tensor& key = indexer_.key;
    return {2 * slots * indexer_.head_channels(),
            bytes_of_tensor(indexer_.query) + 8 * slots +
                slots * static_cast<double>(key.shape[1] * dtype_bytes(key.dtype))};
  }

 private:
  Random random_;
  ListData lists_;
  IndexerData indexer_;
  Guarded scores_;
};

}  // namespace

Operation index_scores_at_operation() {
  return {
      "index_scores_at",
      "the indexer's scores of given keys",
      {{"rows", "16", "query rows"},
       {"keys", "8192", "keys of the key space"},
       {"index_heads", "64", "indexer heads"},
       {"index_dim", "128", "channels of a head"},
       {"topk", "2048", "slots of a row"},
       {"ids", "ascending", "", kIds},
       {"dtype", "f32", "", kFloats},
       {"weights", "f32", "", words({"f32", "bf16"})},
       {"range", "full", "", kRanges},
       {"relu", "1", "0: identity", kFlag},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<IndexScoresAtCase>(p);
      },
      {"index_scores_at rows=7 keys=300 index_heads=16 index_dim=32 topk=128",
       "index_scores_at rows=5 keys=257 index_heads=64 topk=70 range=causal dtype=bf16",
       "index_scores_at rows=26 keys=200 index_heads=3 index_dim=17 topk=19 range=awkward "
       "ids=scattered",
       "index_scores_at rows=25 keys=90 index_heads=1 index_dim=1 topk=16 range=awkward dtype=f16",
       "index_scores_at rows=30 keys=80 index_heads=5 index_dim=40 topk=33 range=packed relu=0",
       "index_scores_at rows=11 keys=170 index_heads=9 index_dim=24 topk=50 dtype=bf16 "
       "weights=bf16",
       "index_scores_at rows=2 keys=700 index_heads=8 index_dim=16 topk=600 ids=scattered",
       "index_scores_at rows=6 keys=50 index_heads=4 index_dim=8 topk=9 dtype=f64 ids=popular",
       "index_scores_at rows=0 keys=64 index_heads=8 index_dim=16 topk=8",
       "index_scores_at rows=3 keys=0 index_heads=8 index_dim=16 topk=8"},
      {"index_scores_at dtype=bf16", "index_scores_at",
       "index_scores_at rows=512 keys=1024 index_heads=16 index_dim=32 topk=128 range=causal"}};
}

}  // namespace winnow::bench
