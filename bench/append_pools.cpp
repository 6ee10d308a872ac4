// Problems of append_pools: requests of awkward lengths, some of them padding, slots in any order.
#include "winnow/append_pools.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/pooling.h"

namespace winnow::bench {
namespace {

// How many new tokens the first requests have: `tokens` each, or awkward counts if negative.
std::int64_t new_tokens(std::int64_t requests, std::int64_t tokens, std::int64_t pool_size) {
  if (tokens >= 0) return requests * tokens;
  const std::int64_t counts[] = {1, 0, pool_size, pool_size - 1, 2 * pool_size + 1, 70, 1, 0};
  const std::int64_t all = std::accumulate(std::begin(counts), std::end(counts), std::int64_t{0});
  return requests / 8 * all + std::accumulate(counts, counts + requests % 8, std::int64_t{0});
}

class AppendPoolsCase : public OperationCase<append_pools, append_pools_workspace_bytes> {
 public:
  explicit AppendPoolsCase(const Problem& p)
      : requests_(p.number("requests")),
        pool_size_(p.number("pool_size")),
        random_(static_cast<std::uint64_t>(p.number("seed"))),
        cut_(new_tokens(requests_, p.number("tokens"), pool_size_)),
        tokens_(cut_ + (p.flag("padding") ? 3 : 0)),  // the last three are nobody's
        data_(p, tokens_, random_) {
    const std::int64_t dim = p.number("index_dim"), rings = requests_ + 2;
    const std::int64_t per_page = std::max<std::int64_t>(1, p.number("page_size") / pool_size_);
    const std::int64_t pages = tokens_ / per_page + 2;
    cu_seqlens_ = Guarded(DType::kI32, {requests_ + 1});
    context_ = Guarded(DType::kI32, {requests_});
    rings_ = Guarded(DType::kI32, {requests_});
    slots_ = Guarded(DType::kI32, {tokens_});
    for (Guarded* open : {&open_key_, &open_gate_, &old_key_, &old_gate_})
      *open = Guarded(p.dtype(), {rings, pool_size_ - 1, dim});
    pooled_ = p.number("page_size") > 0 ? Guarded(p.dtype(), {pages, per_page, dim})
                                        : Guarded(p.dtype(), {pages * per_page, dim});
    args_ = {data_.key,        data_.gate, data_.ape,  cu_seqlens_,
             context_,         rings_,     slots_,     p.number("page_size"),
             pool_rounding(p), open_key_,  open_gate_, pooled_};
    if (ShapesOnly::on()) return;
    fill_requests(p, rings);
    fill_slots(p.flag("padding"), pages * per_page);
    fill_gauss(old_key_, random_);
    fill_gauss(old_gate_, random_, 2);
    restore();
  }

  // The rings are inputs as well: after poisoning they get back what they held.
  void run(Workspace workspace) override {
    if (open_key_.view().elements() > 0 && is_poison(open_key_, 0)) restore();
    append_pools(brought(args_), workspace);
  }
  std::vector<Tensor> outputs() const override { return {pooled_, open_key_, open_gate_}; }

  std::vector<Comparison> compare() override {
    Worst pooled("pooled_key"), untouched("other slots"), rings("open_key, open_gate");
    std::vector<bool> written(static_cast<std::size_t>(slot_count()), false);
    std::vector<std::vector<std::int64_t>> kept(  // the new token at each place of a ring
        static_cast<std::size_t>(open_key_.view().shape[0]),
        std::vector<std::int64_t>(static_cast<std::size_t>(pool_size_ - 1), -1));
    for (std::int64_t r = 0; r < requests_; ++r) {
      const std::int64_t ring = id(rings_, r), before = id(context_, r);
      if (ring < 0 || ring >= open_key_.view().shape[0] || before < 0) continue;
      const std::int64_t first = id(cu_seqlens_, r), last = id(cu_seqlens_, r + 1);
      for (std::int64_t i = first; i < last; ++i) {
        const std::int64_t place = (before + i - first) % pool_size_;
        if (place < pool_size_ - 1) {
          // In the end only if no later token of the request completes its pool.
          if (i + (pool_size_ - 1 - place) >= last)
            kept[static_cast<std::size_t>(ring)][static_cast<std::size_t>(place)] = i;
          continue;
        }
        const std::int64_t slot = id(slots_, i);
        if (slot < 0 || slot >= slot_count()) continue;
        written[static_cast<std::size_t>(slot)] = true;
        compare_pool(i, first, ring, slot, &pooled);
      }
    }
    for (std::int64_t slot = 0; slot < slot_count(); ++slot) {
      for (std::int64_t d = 0; !written[static_cast<std::size_t>(slot)] && d < dim(); ++d) {
        untouched.add_exact(is_poison(pooled_, slot * dim() + d),
                            [&] { return fmt::format("slot {} channel {}", slot, d); });
      }
    }
    for (std::int64_t e = 0; e < open_key_.view().elements(); ++e) {
      const std::int64_t row = e / dim(), d = e % dim();
      const std::int64_t token = kept[static_cast<std::size_t>(row / (pool_size_ - 1))]
                                     [static_cast<std::size_t>(row % (pool_size_ - 1))];
      const bool fresh = token >= 0;
      const bool equal =
          same(open_key_, e, fresh ? data_.key : old_key_, fresh ? token * dim() + d : e) &&
          same(open_gate_, e, fresh ? data_.gate : old_gate_, fresh ? token * dim() + d : e);
      rings.add_exact(equal, [&] { return fmt::format("element {}", e); });
    }
    return {pooled.comparison(), untouched.comparison(), rings.comparison()};
  }

  // The new tokens are read once; a pool that began before the call reads what is open of it.
  Cost cost() const override {
    double pools = 0, open = 0;
    for (std::int64_t r = 0; r < requests_; ++r) {
      const std::int64_t before = id(context_, r), n = id(cu_seqlens_, r + 1) - id(cu_seqlens_, r);
      if (before < 0) continue;
      const std::int64_t finished = (before + n) / pool_size_ - before / pool_size_;
      pools += static_cast<double>(finished);
      open += static_cast<double>(before % pool_size_ + n >= pool_size_ ? before % pool_size_ : 0);
    }
    const auto tokens = static_cast<double>(cut_);
    return {2 * pools * static_cast<double>(pool_size_ * dim()),
            (2 * (tokens + open) + pools) *
                static_cast<double>(dim() * dtype_bytes(data_.key.view().dtype))};
  }

 private:
  static std::int64_t id(const Tensor& t, std::int64_t i) { return t.as<std::int32_t>()[i]; }
  static bool same(const Tensor& a, std::int64_t i, const Tensor& b, std::int64_t j) {
    const std::int64_t size = dtype_bytes(a.dtype);
    return std::memcmp(a.as<char>() + i * size, b.as<char>() + j * size,
                       static_cast<std::size_t>(size)) == 0;
  }
  std::int64_t dim() const { return data_.key.view().shape[1]; }
  std::int64_t slot_count() const { return pooled_.view().elements() / dim(); }

  // Their tokens, what they had before, and their rings, in any order.
  void fill_requests(const Problem& p, std::int64_t rings) {
    for (std::int64_t r = 0; r <= requests_; ++r)
      cu_seqlens_.view().as<std::int32_t>()[r] =
          static_cast<std::int32_t>(new_tokens(r, p.number("tokens"), pool_size_));
    std::vector<std::int32_t> context, ring(static_cast<std::size_t>(rings));
    std::iota(ring.begin(), ring.end(), 0);
    shuffle(&ring);
    ring.resize(static_cast<std::size_t>(requests_));
    for (std::int64_t r = 0; r < requests_; ++r)
      context.push_back(static_cast<std::int32_t>(random_.below(p.number("context") + 1)));
    if (p.flag("padding")) {
      const std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
      for (std::size_t r = 0; r < ring.size(); r += 9) {
        if (r % 2 == 0) ring[r] = r % 4 == 0 ? -1 : r % 3 == 0 ? kMost : requests_ + 2;
        if (r % 2 == 1) context[r] = -1;
      }
    }
    std::ranges::copy(context, context_.view().as<std::int32_t>());
    std::ranges::copy(ring, rings_.view().as<std::int32_t>());
  }

  void fill_slots(bool padding, std::int64_t count) {
    std::vector<std::int32_t> slots(static_cast<std::size_t>(count));
    std::iota(slots.begin(), slots.end(), 0);
    shuffle(&slots);
    slots.resize(static_cast<std::size_t>(tokens_));
    for (std::size_t i = 5; padding && i < slots.size(); i += 11)
      slots[i] = i % 2 == 0 ? -1 : static_cast<std::int32_t>(count);
    std::ranges::copy(slots, slots_.view().as<std::int32_t>());
  }

  void shuffle(std::vector<std::int32_t>* list) {
    for (std::size_t n = list->size(); n > 1; --n)
      std::swap((*list)[n - 1],
                (*list)[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(n)))]);
  }

  void restore() {
    const auto bytes =
        static_cast<std::size_t>(old_key_.view().elements() * dtype_bytes(old_key_.view().dtype));
    if (bytes == 0) return;
    std::memcpy(open_key_.view().data, old_key_.view().data, bytes);
    std::memcpy(open_gate_.view().data, old_gate_.view().data, bytes);
  }

  // The pool whose last token is i; the request's new tokens begin at `first`.
  void compare_pool(std::int64_t i, std::int64_t first, std::int64_t ring, std::int64_t slot,
                    Worst* worst) const {
    std::vector<PooledTerm> terms(static_cast<std::size_t>(pool_size_));
    for (std::int64_t d = 0; d < dim(); ++d) {
      for (std::int64_t t = 0; t < pool_size_; ++t) {
        const std::int64_t j = i - (pool_size_ - 1) + t;
        const double ape = ref::get(data_.ape, t, d);
        terms[static_cast<std::size_t>(t)] =
            j >= first
                ? PooledTerm{ref::get(data_.key, j, d), ref::get(data_.gate, j, d), ape}
                : PooledTerm{ref::get(old_key_, ring, t, d), ref::get(old_gate_, ring, t, d), ape};
      }
      const double actual =
          load_double(pooled_.view().data, pooled_.view().dtype, slot * dim() + d);
      pooled_interval(terms, data_.key.view().dtype, args_.rounding).add_to(worst, actual, [&] {
        return fmt::format("token {} channel {}", i, d);
      });
    }
  }

  std::int64_t requests_, pool_size_;
  Random random_;
  std::int64_t cut_, tokens_;  // new tokens of the requests; of the call
  PoolData data_;
  Guarded cu_seqlens_, context_, rings_, slots_;
  Guarded open_key_, open_gate_, old_key_, old_gate_, pooled_;
};

}  // namespace

Operation append_pools_operation() {
  return {
      "append_pools",
      "pooled keys of sequences that grow",
      {{"requests", "16", "requests of the call"},
       {"tokens", "-1", "new tokens of each; -1: none, one, a few, many", kDefaulted},
       {"context", "100", "most tokens that a request had before", kInt32},
       {"index_dim", "128", "channels of a key"},
       {"pool_size", "4", "tokens of a pool", kPositive},
       {"page_size", "0", "tokens of a page; 0: pooled keys have no pages"},
       {"padding", "0", "1: requests, tokens and slots that are none", kFlag},
       {"rounding", "once", "", words({"once", "key (weights and products too)"})},
       {"data", "gauss", "", words({"gauss", "flat", "sharp", "special (NaN, inf)"})},
       {"dtype", "f32", "", kFloats},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<AppendPoolsCase>(p);
      },
      {"append_pools requests=40 index_dim=24", "append_pools requests=40 index_dim=24 padding=1",
       "append_pools requests=40 index_dim=17 page_size=16 padding=1 dtype=bf16",
       "append_pools requests=24 index_dim=9 page_size=20 dtype=f16 rounding=key",
       "append_pools requests=24 index_dim=8 pool_size=3 page_size=3 rounding=key dtype=bf16",
       "append_pools requests=24 index_dim=8 pool_size=1 padding=1",
       "append_pools requests=30 index_dim=8 pool_size=64 context=1000 data=sharp",
       "append_pools requests=9 index_dim=4 pool_size=65 context=200",
       "append_pools requests=20 index_dim=16 pool_size=5 data=special dtype=bf16",
       "append_pools requests=16 index_dim=5 dtype=f64 padding=1",
       "append_pools requests=200 tokens=1 index_dim=16 dtype=bf16",
       "append_pools requests=1 tokens=700 index_dim=16 dtype=bf16", "append_pools requests=0"},
      {"append_pools requests=64 tokens=1 dtype=bf16 page_size=64",
       "append_pools requests=1 tokens=131072 context=0 dtype=bf16 page_size=64"}};
}

}  // namespace winnow::bench
