// Problems of attention_target.
#include "winnow/attention_target.h"

#include "bench/loss_bounds.h"
#include "bench/loss_data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"

namespace winnow::bench {
namespace {

class AttentionTargetCase
    : public OperationCase<attention_target, attention_target_workspace_bytes> {
 public:
  explicit AttentionTargetCase(const Problem& p)
      : random_(static_cast<std::uint64_t>(p.number("seed"))),
        lists_(p, random_, true),
        attention_(p, lists_, random_),
        target_(wide_of(p.dtype()), {lists_.rows, lists_.topk}) {
    args_ = {attention_.query, attention_.key, attention_.lse,   lists_.indices,
             lists_.starts,    lists_.ends,    attention_.scale, target_};
  }
  std::vector<Tensor> outputs() const override { return {target_}; }

  std::vector<Comparison> compare() override {
    Worst target("attention_target");
    for (std::int64_t i = 0; i < lists_.rows; ++i) {
      for (std::int64_t s = 0; s < lists_.topk; ++s) {
        const std::int64_t j = lists_.id(i, s);
        Approximate truth;  // a slot that does not count: 0, exactly
        if (j >= 0) {
          truth = approximate_target(args_.query, args_.key, args_.lse, args_.softmax_scale, i, j);
        }
        target.add(ref::get(target_, i, s), truth.value, truth.error,
                   [&] { return fmt::format("row {} slot {}", i, s); });
      }
    }
    return {target.comparison()};
  }

  Cost cost() const override {
    const double slots = lists_.slots();
    const Tensor& key = attention_.key;
    return {2 * slots * attention_.head_channels(),
            bytes_of_tensor(attention_.query) + 8 * slots +
                slots * static_cast<double>(key.shape[1] * key.shape[2] * dtype_bytes(key.dtype))};
  }

 private:
  Random random_;
  ListData lists_;
  AttentionData attention_;
  Guarded target_;
};

}  // namespace

Operation attention_target_operation() {
  return {
      "attention_target",
      "attention probabilities of the selected keys, summed over heads",
      {{"rows", "16", "query rows"},
       {"keys", "8192", "keys of the key space"},
       {"heads", "64", "attention heads"},
       {"kv_heads", "1", "key heads", kPositive},
       {"dim_qk", "576", "channels of a head"},
       {"topk", "2048", "slots of a row"},
       {"ids", "ascending", "", kIds},
       {"dtype", "f32", "", kFloats},
       {"range", "full", "", kRanges},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<AttentionTargetCase>(p);
      },
      {"attention_target rows=7 keys=90 heads=4 dim_qk=80 topk=40",
       "attention_target rows=26 keys=120 heads=6 kv_heads=2 dim_qk=17 topk=19 range=awkward "
       "ids=scattered",
       "attention_target rows=9 keys=64 heads=13 dim_qk=24 topk=33 range=causal dtype=bf16",
       "attention_target rows=9 keys=64 heads=3 kv_heads=3 dim_qk=8 topk=1 range=packed dtype=f16",
       "attention_target rows=2 keys=700 heads=2 dim_qk=9 topk=600 ids=scattered",
       "attention_target rows=5 keys=40 heads=4 kv_heads=2 dim_qk=6 topk=12 dtype=f64",
       "attention_target rows=0 keys=64 heads=4 dim_qk=8 topk=8",
       "attention_target rows=3 keys=0 heads=4 dim_qk=8 topk=8"},
      {"attention_target rows=8 dtype=bf16", "attention_target rows=8",
       "attention_target rows=512 keys=1024 heads=4 dim_qk=80 topk=128 range=causal"}};
}

}  // namespace winnow::bench
