// Problems of index_scores_at_backward.
#include "winnow/index_scores_at_backward.h"

#include "base/array.h"
#include "bench/loss_bounds.h"
#include "bench/loss_data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

class IndexScoresAtBackwardCase
    : public OperationCase<index_scores_at_backward, index_scores_at_backward_workspace_bytes> {
 public:
  explicit IndexScoresAtBackwardCase(const Problem& p)
      : random_(static_cast<std::uint64_t>(p.number("seed"))),
        lists_(p, random_, true),
        indexer_(p, random_) {
    const DType wide = wide_of(p.dtype());
    const Tensor& q = indexer_.query;
    d_scores_ = Guarded(wide, {lists_.rows, lists_.topk});
    d_query_ = Guarded(wide, {q.shape[0], q.shape[1], q.shape[2]});
    d_key_ = Guarded(wide, {lists_.keys, q.shape[2]});
    d_weights_ = Guarded(wide, {q.shape[0], q.shape[1]});
    fill_gauss(d_scores_, random_);
    for (std::int64_t i = 0; i < lists_.rows && !ShapesOnly::on();
         ++i) {  // NaN shows that nobody looked
      for (std::int64_t s = 0; s < lists_.topk; ++s) {
        if (lists_.id(i, s) < 0) ref::set(d_scores_, i, s, NAN);
      }
    }
    args_ = {indexer_.query, indexer_.key, indexer_.weights, lists_.indices,
             lists_.starts,  lists_.ends,  p.flag("relu"),   d_scores_,
             d_query_,       d_key_,       d_weights_};
  }
  std::vector<Tensor> outputs() const override { return {d_query_, d_key_, d_weights_}; }

  std::vector<Comparison> compare() override {
    const Tensor& q = args_.index_query;
    const Array query(DType::kF64, {q.shape[0], q.shape[1], q.shape[2]}),
        key(DType::kF64, {lists_.keys, q.shape[2]}), weights(DType::kF64, {q.shape[0], q.shape[1]});
    IndexScoresAtBackwardArgs truth = args_;
    truth.d_index_query = query;
    truth.d_index_key = key;
    truth.d_index_weights = weights;
    const auto& reference = ref::index_scores_at_backward_implementation;
    Scratch scratch;
    reference.run(truth, scratch.get(reference.workspace_bytes(truth)));
    BackwardBounds bounds(q, args_.index_key, args_.index_weights, args_.relu);
    for (std::int64_t i = 0; i < lists_.rows; ++i) {
      for (std::int64_t s = 0; s < lists_.topk; ++s) {
        const std::int64_t j = lists_.id(i, s);
        if (j >= 0) bounds.add(i, j, {ref::get(d_scores_, i, s), 0});
      }
    }
    return compare_indexer_gradients(bounds, {d_query_, d_key_, d_weights_}, {query, key, weights});
  }

  Cost cost() const override {
    const double slots = lists_.slots();
    const Tensor& key = indexer_.key;
    return {6 * slots * indexer_.head_channels(),
            bytes_of_tensor(indexer_.query) + bytes_of_tensor(d_query_) + bytes_of_tensor(d_key_) +
                8 * slots + slots * static_cast<double>(key.shape[1] * dtype_bytes(key.dtype))};
  }

 private:
  Random random_;
  ListData lists_;
  IndexerData indexer_;
  Guarded d_scores_, d_query_, d_key_, d_weights_;
};

}  // namespace

Operation index_scores_at_backward_operation() {
  return {
      "index_scores_at_backward",
      "gradients of selected scores by the indexer's inputs",
      {{"rows", "64", "query rows"},
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
        return std::make_unique<IndexScoresAtBackwardCase>(p);
      },
      {"index_scores_at_backward rows=9 keys=300 index_heads=16 index_dim=32 topk=128",
       "index_scores_at_backward rows=5 keys=257 index_heads=7 index_dim=24 topk=70 range=causal "
       "dtype=bf16 ids=popular",
       "index_scores_at_backward rows=26 keys=200 index_heads=3 index_dim=17 topk=19 range=awkward "
       "ids=scattered",
       "index_scores_at_backward rows=25 keys=90 index_heads=1 index_dim=1 topk=16 range=awkward "
       "dtype=f16",
       "index_scores_at_backward rows=30 keys=80 index_heads=5 index_dim=40 topk=33 range=packed "
       "relu=0",
       "index_scores_at_backward rows=11 keys=170 index_heads=9 index_dim=24 topk=50 dtype=bf16 "
       "weights=bf16 ids=popular",
       "index_scores_at_backward rows=9 keys=120 index_heads=6 index_dim=16 topk=40 weights=bf16",
       // several owners, several chunks of rows, a list out of order
       "index_scores_at_backward rows=40 keys=3000 index_heads=70 index_dim=5 topk=400 "
       "ids=scattered",
       "index_scores_at_backward rows=6 keys=50 index_heads=4 index_dim=8 topk=9 dtype=f64",
       "index_scores_at_backward rows=0 keys=64 index_heads=8 index_dim=16 topk=8",
       "index_scores_at_backward rows=3 keys=0 index_heads=8 index_dim=16 topk=8"},
      {"index_scores_at_backward dtype=bf16", "index_scores_at_backward",
       "index_scores_at_backward rows=1024 keys=1024 index_heads=16 index_dim=32 topk=128 "
       "range=causal"}};
}

}  // namespace winnow::bench
