// Problems of pool_keys.
#include "winnow/pool_keys.h"

#include <algorithm>
#include <limits>

#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/pooling.h"
#include "winnow/pools.h"

namespace winnow::bench {
namespace {

constexpr int kOverlapping = 70;  // awkward pools at random places

// How many pools bases_of gives.
std::int64_t pool_count(const std::string& kind, std::int64_t keys, std::int64_t pool_size) {
  if (kind == "grid") return keys / pool_size;
  if (kind == "awkward") return 8 + kOverlapping;
  const std::int64_t first = keys / 2, second = keys / 8;
  return first / pool_size + second / pool_size + (keys - first - second) / pool_size;
}

// First tokens of pools, by the word of "pools": see the parameter.
std::vector<std::int32_t> bases_of(const std::string& kind, std::int64_t keys,
                                   std::int64_t pool_size, Random& random) {
  const auto last = static_cast<std::int32_t>(keys);
  if (kind == "grid") return pool_layout(packed_spans(std::vector{0, last}), pool_size).bases;
  if (kind == "packed") {
    const std::vector cuts{0, last / 2, last / 2, last / 2 + last / 8, last};
    return pool_layout(packed_spans(cuts), pool_size).bases;
  }
  WINNOW_CHECK("problem", kind == "awkward", "pools have no kind \"{}\"", kind);
  const auto size = static_cast<std::int32_t>(pool_size);
  std::vector<std::int32_t> bases = {last - size,
                                     0,
                                     last - size + 1,
                                     -1,
                                     last,
                                     -size,
                                     std::numeric_limits<std::int32_t>::max(),
                                     std::numeric_limits<std::int32_t>::min()};
  for (int n = 0; n < kOverlapping; ++n)
    bases.push_back(
        static_cast<std::int32_t>(random.below(keys + 1)));  // overlapping, in any order
  return bases;
}

class PoolKeysCase : public OperationCase<pool_keys, pool_keys_workspace_bytes> {
 public:
  explicit PoolKeysCase(const Problem& p)
      : random_(static_cast<std::uint64_t>(p.number("seed"))), data_(p, p.number("keys"), random_) {
    const std::string& pools = p.word("pools");
    const std::int64_t keys = p.number("keys"), pool_size = p.number("pool_size");
    bases_ = Guarded(DType::kI32, {pool_count(pools, keys, pool_size)});
    if (!ShapesOnly::on())
      std::ranges::copy(bases_of(pools, keys, pool_size, random_),
                        bases_.view().as<std::int32_t>());
    pooled_ = Guarded(p.dtype(), {bases_.view().shape[0], p.number("index_dim")});
    args_ = {data_.key, data_.gate, data_.ape, bases_, pool_rounding(p), pooled_};
  }

  std::vector<Tensor> outputs() const override { return {pooled_}; }

  std::vector<Comparison> compare() override {
    Worst pooled("pooled_key"), absent("absent pools");
    const std::int64_t keys = args_.index_key.shape[0], dim = args_.index_key.shape[1],
                       pool_size = args_.ape.shape[0];
    std::vector<PooledTerm> terms(static_cast<std::size_t>(pool_size));
    for (std::int64_t m = 0; m < bases_.view().shape[0]; ++m) {
      const std::int64_t base = bases_.view().as<std::int32_t>()[m];
      for (std::int64_t d = 0; d < dim; ++d) {
        auto where = [&] { return fmt::format("pool {} channel {}", m, d); };
        if (base < 0 || base + pool_size > keys) {
          absent.add_exact(ref::get(pooled_, m, d) == 0, where);
          continue;
        }
        for (std::int64_t t = 0; t < pool_size; ++t) {
          terms[static_cast<std::size_t>(t)] = {ref::get(data_.key, base + t, d),
                                                ref::get(data_.gate, base + t, d),
                                                ref::get(data_.ape, t, d)};
        }
        pooled_interval(terms, args_.index_key.dtype, args_.rounding)
            .add_to(&pooled, ref::get(pooled_, m, d), where);
      }
    }
    return {pooled.comparison(), absent.comparison()};
  }

  // Keys and gates of the pools are read once, pooled keys written.
  Cost cost() const override {
    const auto channels = static_cast<double>(pooled_.view().elements());
    const auto pool_size = static_cast<double>(args_.ape.shape[0]);
    return {2 * channels * pool_size, channels * (2 * pool_size + 1) *
                                          static_cast<double>(dtype_bytes(args_.index_key.dtype))};
  }

 private:
  Random random_;
  PoolData data_;
  Guarded bases_, pooled_;
};

}  // namespace

Operation pool_keys_operation() {
  return {
      "pool_keys",
      "one index key for every pool of tokens",
      {{"keys", "4096", "tokens", kInt32},
       {"index_dim", "128", "channels of a key"},
       {"pool_size", "4", "tokens of a pool", {1, kInt32.most}},
       {"pools", "grid", "",
        words({"grid (one sequence)", "packed (four sequences, one of them empty)",
               "awkward (any order, overlapping, absent)"})},
       {"rounding", "once", "", words({"once", "key (weights and products too)"})},
       {"data", "gauss", "", words({"gauss", "flat", "sharp", "special (NaN, inf)"})},
       {"dtype", "f32", "", kFloats},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<PoolKeysCase>(p); },
      {"pool_keys keys=515 index_dim=128",
       "pool_keys keys=515 index_dim=128 dtype=bf16",
       "pool_keys keys=515 index_dim=128 dtype=f16",
       "pool_keys keys=200 index_dim=17 pools=awkward dtype=bf16 rounding=key",
       "pool_keys keys=200 index_dim=9 pools=awkward dtype=f16 rounding=key",
       "pool_keys keys=200 index_dim=31 pools=awkward rounding=key",
       "pool_keys keys=300 index_dim=16 pool_size=3 pools=packed data=sharp",
       "pool_keys keys=300 index_dim=16 pool_size=3 pools=packed data=sharp dtype=bf16",
       "pool_keys keys=300 index_dim=16 pool_size=3 pools=packed data=sharp dtype=f16 "
       "rounding=key",
       "pool_keys keys=130 index_dim=40 pool_size=8 pools=awkward data=special",
       "pool_keys keys=130 index_dim=40 pool_size=8 pools=awkward data=special dtype=bf16",
       "pool_keys keys=40 index_dim=24 pool_size=1 dtype=bf16",
       "pool_keys keys=40 index_dim=1 pool_size=2 data=flat dtype=f16",
       "pool_keys keys=640 index_dim=32 pool_size=64 dtype=bf16",
       "pool_keys keys=200 index_dim=8 pool_size=65",
       "pool_keys keys=120 index_dim=7 pools=awkward dtype=f64",
       "pool_keys keys=120 index_dim=7 pools=packed dtype=f64 rounding=key",
       "pool_keys keys=3 index_dim=16",
       "pool_keys keys=0 index_dim=16",
       "pool_keys keys=0 index_dim=16 pools=awkward"},
      {"pool_keys keys=131072 dtype=bf16", "pool_keys keys=131072",
       "pool_keys keys=131072 dtype=bf16 rounding=key", "pool_keys keys=4096 dtype=bf16"}};
}

}  // namespace winnow::bench
