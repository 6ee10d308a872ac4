// Problems of dense_index_loss.
#include "winnow/dense_index_loss.h"

#include "base/array.h"
#include "bench/loss_bounds.h"
#include "bench/loss_data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

class DenseIndexLossCase
    : public OperationCase<dense_index_loss, dense_index_loss_workspace_bytes> {
 public:
  explicit DenseIndexLossCase(const Problem& p)
      : random_(static_cast<std::uint64_t>(p.number("seed"))),
        lists_(p, random_, false),
        indexer_(p, random_),
        attention_(p, lists_, random_) {
    const DType wide = wide_of(p.dtype());
    const Tensor& q = indexer_.query;
    kl_ = Guarded(wide, {lists_.rows});
    d_query_ = Guarded(wide, {q.shape[0], q.shape[1], q.shape[2]});
    d_key_ = Guarded(wide, {lists_.keys, q.shape[2]});
    d_weights_ = Guarded(wide, {q.shape[0], q.shape[1]});
    args_ = {indexer_.query,
             indexer_.key,
             indexer_.weights,
             p.flag("relu"),
             attention_.query,
             attention_.key,
             attention_.lse,
             attention_.scale,
             lists_.starts,
             lists_.ends,
             0.75,
             {},
             kl_,
             d_query_,
             d_key_,
             d_weights_};
  }
  std::vector<Tensor> outputs() const override { return {kl_, d_query_, d_key_, d_weights_}; }

  std::vector<Comparison> compare() override {
    const Tensor& q = args_.index_query;
    const Array kl(DType::kF64, {lists_.rows}),
        query(DType::kF64, {q.shape[0], q.shape[1], q.shape[2]}),
        key(DType::kF64, {lists_.keys, q.shape[2]}), weights(DType::kF64, {q.shape[0], q.shape[1]});
    DenseIndexLossArgs truth = args_;
    truth.kl = kl;
    truth.d_index_query = query;
    truth.d_index_key = key;
    truth.d_index_weights = weights;
    const auto& reference = ref::dense_index_loss_implementation;
    Scratch scratch;
    reference.run(truth, scratch.get(reference.workspace_bytes(truth)));

    Worst worst_kl("kl");
    BackwardBounds bounds(q, args_.index_key, args_.index_weights, args_.relu);
    for (std::int64_t i = 0; i < lists_.rows; ++i) {
      std::vector<Approximate> target, score;
      const RowRange range = lists_.range(i);
      for (std::int64_t j = range.start; j < range.end; ++j) {
        target.push_back(
            approximate_target(args_.query, args_.key, args_.lse, args_.softmax_scale, i, j));
        score.push_back(
            approximate_score(q, args_.index_key, args_.index_weights, args_.relu, i, j));
      }
      const RowBounds row = row_bounds(q.dtype, target, score, args_.d_kl);
      worst_kl.add(ref::get(kl_, i), ref::get(kl, i), row.kl.error,
                   [&] { return fmt::format("row {}", i); });
      for (std::int64_t j = range.start; j < range.end; ++j)
        bounds.add(i, j, row.gradient[static_cast<std::size_t>(j - range.start)]);
    }
    std::vector<Comparison> all =
        compare_indexer_gradients(bounds, {d_query_, d_key_, d_weights_}, {query, key, weights});
    all.insert(all.begin(), worst_kl.comparison());
    return all;
  }

  Cost cost() const override {  // without the dots that are computed a second time
    const double pairs = lists_.pairs();
    return {pairs * (2 * attention_.head_channels() + 6 * indexer_.head_channels()),
            bytes_of_tensor(indexer_.query) + bytes_of_tensor(indexer_.key) +
                bytes_of_tensor(attention_.query) + bytes_of_tensor(attention_.key) +
                bytes_of_tensor(d_query_) + bytes_of_tensor(d_key_)};
  }

 private:
  Random random_;
  ListData lists_;
  IndexerData indexer_;
  AttentionData attention_;
  Guarded kl_, d_query_, d_key_, d_weights_;
};

}  // namespace

Operation dense_index_loss_operation() {
  return {
      "dense_index_loss",
      "the indexer loss over all visible keys and its gradients, streamed",
      {{"rows", "256", "query rows"},
       {"keys", "2048", "keys of the key space"},
       {"index_heads", "64", "indexer heads"},
       {"index_dim", "128", "channels of an indexer head"},
       {"heads", "64", "attention heads"},
       {"kv_heads", "1", "key heads", kPositive},
       {"dim_qk", "576", "channels of an attention head"},
       {"dtype", "f32", "", kFloats},
       {"weights", "f32", "", words({"f32", "bf16"})},
       {"range", "causal", "", kRanges},
       {"relu", "1", "0: identity", kFlag},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<DenseIndexLossCase>(p);
      },
      {"dense_index_loss rows=20 keys=150 index_heads=16 index_dim=32 heads=4 dim_qk=40",
       "dense_index_loss rows=75 keys=200 index_heads=3 index_dim=17 heads=6 kv_heads=2 dim_qk=9 "
       "range=awkward",
       "dense_index_loss rows=70 keys=140 index_heads=5 index_dim=8 heads=2 kv_heads=2 dim_qk=8 "
       "range=packed dtype=bf16",
       "dense_index_loss rows=9 keys=90 index_heads=7 index_dim=40 heads=1 dim_qk=24 dtype=f16 "
       "range=full",
       "dense_index_loss rows=25 keys=90 index_heads=1 index_dim=1 heads=7 dim_qk=1 relu=0 "
       "range=awkward",
       "dense_index_loss rows=40 keys=90 index_heads=9 index_dim=24 heads=4 dim_qk=24 dtype=bf16 "
       "weights=bf16",
       "dense_index_loss rows=19 keys=70 index_heads=6 index_dim=16 heads=2 dim_qk=12 weights=bf16",
       "dense_index_loss rows=3 keys=1100 index_heads=4 index_dim=8 heads=2 dim_qk=8 range=full",
       "dense_index_loss rows=6 keys=30 index_heads=4 index_dim=8 heads=4 kv_heads=2 dim_qk=6 "
       "dtype=f64",
       "dense_index_loss rows=33 keys=17500 index_heads=1 index_dim=2 heads=2 dim_qk=2",
       "dense_index_loss rows=0 keys=64 index_heads=8 index_dim=16 heads=2 dim_qk=8",
       "dense_index_loss rows=3 keys=0 index_heads=8 index_dim=16 heads=2 dim_qk=8 range=full"},
      {"dense_index_loss dtype=bf16", "dense_index_loss",
       "dense_index_loss rows=1024 keys=1024 index_heads=16 index_dim=32 heads=4 dim_qk=80"}};
}

}  // namespace winnow::bench
