// Problems of index_loss.
#include "winnow/index_loss.h"

#include "bench/loss_bounds.h"
#include "bench/loss_data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"

namespace winnow::bench {
namespace {

class IndexLossCase : public OperationCase<index_loss, index_loss_workspace_bytes> {
 public:
  explicit IndexLossCase(const Problem& p)
      : random_(static_cast<std::uint64_t>(p.number("seed"))),
        lists_(p, random_, true),
        target_(p.dtype(), {lists_.rows, lists_.topk}),
        scores_(p.dtype(), {lists_.rows, lists_.topk}),
        kl_(p.dtype(), {lists_.rows}),
        d_scores_(p.dtype(), {lists_.rows, lists_.topk}) {
    const auto spread = static_cast<double>(p.number("spread"));
    fill_gauss(target_, random_, spread);
    fill_gauss(scores_, random_, spread);
    for (std::int64_t i = 0; i < lists_.rows && !ShapesOnly::on(); ++i) {
      for (std::int64_t s = 0; s < lists_.topk; ++s) {
        const bool none = i % 6 == 5 || random_.below(8) == 0;
        ref::set(target_, i, s, none ? 0 : std::exp(ref::get(target_, i, s)));
        if (lists_.id(i, s) >= 0) continue;
        // Inside the row's range but past the key space: what attention_target and index_scores_at
        // give. Outside of both, NaN shows that nobody looked.
        const bool inside = row_range(lists_.starts, lists_.ends, i, INT64_MAX)
                                .contains(ref::get_id(lists_.indices, i, s));
        ref::set(target_, i, s, inside ? 0 : NAN);
        ref::set(scores_, i, s, inside ? -INFINITY : NAN);
      }
    }
    args_ = {target_, scores_, lists_.indices, lists_.starts, lists_.ends, 0.75, kl_, d_scores_};
  }
  std::vector<Tensor> outputs() const override { return {kl_, d_scores_}; }

  std::vector<Comparison> compare() override {
    Worst kl("kl"), d_scores("d_scores");
    for (std::int64_t i = 0; i < lists_.rows; ++i) {
      std::vector<Approximate> target, score;
      std::vector<std::int64_t> slot;
      for (std::int64_t s = 0; s < lists_.topk; ++s) {
        if (lists_.id(i, s) < 0) {
          d_scores.add(ref::get(d_scores_, i, s), 0, 0,
                       [&] { return fmt::format("row {} slot {}", i, s); });
          continue;
        }
        target.push_back({ref::get(target_, i, s), 0});
        score.push_back({ref::get(scores_, i, s), 0});
        slot.push_back(s);
      }
      const RowBounds row = row_bounds(args_.kl.dtype, target, score, args_.d_kl);
      kl.add(ref::get(kl_, i), row.kl.value, row.kl.error,
             [&] { return fmt::format("row {}", i); });
      for (std::size_t n = 0; n < slot.size(); ++n) {
        d_scores.add(ref::get(d_scores_, i, slot[n]), row.gradient[n].value, row.gradient[n].error,
                     [&] { return fmt::format("row {} slot {}", i, slot[n]); });
      }
    }
    return {kl.comparison(), d_scores.comparison()};
  }

  Cost cost() const override {  // two exponentials and a logarithm, counted as 20 each
    const double slots = lists_.slots();
    return {60 * slots, bytes_of_tensor(lists_.indices) + bytes_of_tensor(d_scores_) + 8 * slots};
  }

 private:
  Random random_;
  ListData lists_;
  Guarded target_, scores_, kl_, d_scores_;
};

}  // namespace

Operation index_loss_operation() {
  return {
      "index_loss",
      "the sparse indexer loss and its gradient by the selected scores",
      {{"rows", "256", "query rows"},
       {"keys", "8192", "keys of the key space"},
       {"topk", "2048", "slots of a row"},
       {"ids", "ascending", "", kIds},
       {"dtype", "f32", "", words({"f64", "f32"})},
       {"range", "full", "", kRanges},
       {"spread", "2", "standard deviation of scores and log-targets"},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<IndexLossCase>(p); },
      {"index_loss rows=30 keys=400 topk=128", "index_loss rows=7 keys=3000 topk=2048 range=causal",
       "index_loss rows=50 keys=200 topk=67 range=awkward ids=scattered",
       "index_loss rows=20 keys=200 topk=65 range=packed spread=30",
       "index_loss rows=20 keys=78 topk=40 ids=scattered spread=100",
       "index_loss rows=9 keys=64 topk=1 ids=scattered",
       "index_loss rows=12 keys=100 topk=33 dtype=f64 ids=scattered",
       "index_loss rows=0 keys=64 topk=8", "index_loss rows=3 keys=0 topk=8"},
      {"index_loss", "index_loss rows=1024 keys=1024 topk=128 range=causal"}};
}

}  // namespace winnow::bench
