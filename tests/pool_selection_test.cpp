// Pool selection from end to end: pool_keys -> index_topk -> expand_pools, and the same with keys
// that were appended, against an oracle in double that scores and sorts pools token by token.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "base/array.h"
#include "bench/allocations.h"
#include "bench/case.h"
#include "tests/each.h"
#include "tests/pool_tokens.h"
#include "winnow/append_pools.h"
#include "winnow/expand_pools.h"
#include "winnow/index_scores.h"
#include "winnow/index_topk.h"
#include "winnow/pool_keys.h"
#include "winnow/pools.h"
#include "winnow/select_topk.h"

namespace winnow::testing {
namespace {

constexpr const char* kOperations[] = {"pool_keys",   "append_pools", "index_topk",
                                       "select_topk", "index_scores", "expand_pools"};

// The score of the pool that begins at token `base`, in double.
double score(const Tokens& in, std::int64_t row, std::int64_t base, std::int64_t pool_size) {
  double total = 0;
  std::vector<double> pooled;
  for (std::int64_t d = 0; d < kDim; ++d) {
    double weight_sum = 0, sum = 0;
    for (std::int64_t t = 0; t < pool_size; ++t) {
      const double weight = std::exp(at(in.gate, (base + t) * kDim + d) + at(in.ape, t * kDim + d));
      weight_sum += weight;
      sum += weight * at(in.key, (base + t) * kDim + d);
    }
    pooled.push_back(sum / weight_sum);
  }
  for (std::int64_t h = 0; h < kHeads; ++h) {
    double dot = 0;
    for (std::int64_t d = 0; d < kDim; ++d)
      dot += at(in.query, (row * kHeads + h) * kDim + d) * pooled[static_cast<std::size_t>(d)];
    total += at(in.weights, row * kHeads + h) * std::max(0.0, dot);
  }
  return total;
}

// What one row selects. It sees the tokens `visible` (ascending); pools begin at `origin`, every
// pool_size tokens, and count if their last token is visible.
Ids oracle(const Tokens& in, std::int64_t row, const std::set<std::int64_t>& visible,
           std::int64_t origin, std::int64_t pool_size, std::int64_t topk, bool tail) {
  if (visible.empty()) return {};
  std::vector<std::pair<double, std::int64_t>> pools;  // -score, base
  for (std::int64_t base = origin; base + pool_size - 1 <= *visible.rbegin(); base += pool_size) {
    if (visible.contains(base + pool_size - 1))
      pools.emplace_back(-score(in, row, base, pool_size), base);
  }
  std::sort(pools.begin(), pools.end());
  const auto kept = static_cast<std::size_t>(topk / pool_size);
  if (pools.size() > kept) {  // the case must not hang on roundings; zeros of ReLU are exact ties
    const double gap = pools[kept].first - pools[kept - 1].first;
    EXPECT_TRUE(gap > 1e-5 || pools[kept - 1].first == 0) << row << " " << gap;
    pools.resize(kept);
  }
  std::set<std::int32_t> chosen;
  for (const auto& [negative, base] : pools) {
    for (std::int64_t t = base; t < base + pool_size; ++t) {
      if (visible.contains(t)) chosen.insert(static_cast<std::int32_t>(t));
    }
  }
  if (tail) {
    const std::int64_t end = *visible.rbegin() + 1;
    for (std::int64_t t = end - (end - origin) % pool_size; t < end; ++t) {
      if (visible.contains(t)) chosen.insert(static_cast<std::int32_t>(t));
    }
  }
  return {chosen.begin(), chosen.end()};
}

// The best pools of every row among those it sees.
void best_pools(const Tensor& query, const KeyView& pooled, const Tensor& weights,
                const RowRanges& seen, const Tensor& found, const Tensor& lengths) {
  IndexTopkArgs best;
  best.index_query = query;
  best.index_key = pooled;
  best.index_weights = weights;
  best.starts = ids_of(seen.starts);
  best.ends = ids_of(seen.ends);
  best.topk_indices = found;
  best.topk_lengths = lengths;
  Scratch scratch;
  index_topk(best, scratch.get(index_topk_workspace_bytes(best)));
}

// The library's answer for every row, with all operations pinned to one implementation.
std::vector<Ids> select(const Tokens& in, const PoolLayout& layout, const RowRanges& rows,
                        std::int64_t topk, bool tail) {
  const std::int64_t pools = std::ssize(layout.bases), selected = topk / layout.pool_size,
                     width = topk + (tail ? layout.pool_size - 1 : 0), n = rows.rows();
  const Array pooled(DType::kF32, {pools, kDim});
  pool_keys({in.key, in.gate, in.ape, ids_of(layout.bases), PoolRounding::kOnce, pooled}, {});
  const RowRanges seen = pool_ranges(layout, rows);
  const Array found(DType::kI32, {n, selected}), lengths(DType::kI32, {n}),
      tokens(DType::kI32, {n, width});
  best_pools(in.query, pooled, in.weights, seen, found, lengths);
  expand_pools({found, ids_of(layout.bases), ids_of(rows.starts), ids_of(rows.ends),
                layout.pool_size, tail, tokens, lengths},
               {});
  std::vector<Ids> lists;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t* list = tokens.as<std::int32_t>() + i * width;
    const std::int32_t length = lengths.as<std::int32_t>()[i];
    lists.emplace_back(list, list + length);
    EXPECT_TRUE(std::is_sorted(list, list + length)) << i;
    for (std::int64_t s = length; s < width; ++s) EXPECT_EQ(list[s], -1) << i;
  }
  return lists;
}

// body(name) with all operations on one implementation.
template <class Body>
void with_each(Body&& body) {
  const Array row(DType::kF32, {1, kDim}), out(DType::kF32, {1, kDim}), base(DType::kI32, {1});
  for (const Verdict& v :
       explain(PoolKeysArgs{row, row, row, base, PoolRounding::kOnce, out}).verdicts) {
    if (!v.refusal.empty()) continue;
    for (const char* operation : kOperations) pin_implementation(operation, v.implementation);
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, v.implementation);
    body();
    for (const char* operation : kOperations) pin_implementation(operation, "");
  }
}

struct Sizes {
  std::int64_t pool, topk;
};

Ids cuts_of(const Ids& lengths) {
  Ids cuts{0};
  for (const std::int32_t length : lengths) cuts.push_back(cuts.back() + length);
  return cuts;
}

std::set<std::int64_t> span(std::int64_t begin, std::int64_t end) {
  std::set<std::int64_t> tokens;
  for (std::int64_t t = begin; t < end; ++t) tokens.insert(t);
  return tokens;
}

TEST(PoolSelection, BelowBudgetIsTheCausalPrefix) {
  for (const Ids& lengths : {Ids{8}, Ids{7}, Ids{3}, Ids{3, 6}, Ids{5, 9, 3}}) {
    const Ids cuts = cuts_of(lengths);
    const Tokens in(cuts.back(), 4, 21);
    const RowRanges rows = packed_ranges(cuts, cuts.back());
    with_each([&] {
      const std::vector<Ids> lists = select(in, pool_layout(packed_spans(cuts), 4), rows, 16, true);
      for (std::size_t i = 0; i < lists.size(); ++i) {
        Ids prefix(static_cast<std::size_t>(rows.ends[i] - rows.starts[i]));
        std::iota(prefix.begin(), prefix.end(), rows.starts[i]);
        EXPECT_EQ(lists[i], prefix) << i;
      }
    });
  }
}

TEST(PoolSelection, AboveBudgetEqualsTheOracle) {
  for (const Ids& lengths : {Ids{61}, Ids{40, 0, 23, 50}, Ids{1, 90}}) {
    for (const Sizes& sizes : {Sizes{4, 16}, {3, 12}, {1, 7}, {8, 8}}) {
      const std::int64_t pool_size = sizes.pool, topk = sizes.topk;
      const Ids cuts = cuts_of(lengths);
      const Tokens in(cuts.back() + 2, pool_size, 22);  // two rows of padding
      const RowRanges rows = packed_ranges(cuts, cuts.back() + 2);
      for (const bool tail : {true, false}) {
        std::vector<Ids> want;
        for (std::size_t i = 0; i < rows.starts.size(); ++i) {
          want.push_back(oracle(in, static_cast<std::int64_t>(i),
                                span(rows.starts[i], rows.ends[i]), rows.starts[i], pool_size, topk,
                                tail));
        }
        with_each([&] {
          EXPECT_EQ(select(in, pool_layout(packed_spans(cuts), pool_size), rows, topk, tail), want);
        });
      }
    }
  }
}

// A batch padded on either side. The oracle follows the other formulation: the key axis is shifted
// left by the phase, first valid token mod pool_size, pools lie on the grid of the shifted axis,
// and tokens that the mask hides are dropped at the end.
TEST(PoolSelection, MasksWithAPhase) {
  constexpr std::int64_t kBatch = 5, kLength = 45, kPool = 4;
  const std::int64_t first[kBatch] = {0, 3, 17, 8, 45}, last[kBatch] = {45, 45, 42, 30, 45};
  std::vector<std::uint8_t> mask, rows_mask;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t s = 0; s < kLength; ++s) mask.push_back(s >= first[b] && s < last[b]);
    for (std::int64_t i = 0; i < kLength; ++i) {
      for (std::int64_t s = 0; s < kLength; ++s)
        rows_mask.push_back(i >= first[b] && i < last[b] && s >= first[b] && s <= i);
    }
  }
  const Tokens in(kBatch * kLength, kPool, 23);
  const TokenSpans spans = valid_spans(mask, kBatch, kLength);
  const RowRanges rows = causal_ranges(spans, kBatch * kLength);
  const MaskedRows masked = masked_rows(rows_mask, kBatch, kLength, kLength);
  EXPECT_EQ(masked.rows.starts, rows.starts);
  EXPECT_EQ(masked.rows.ends, rows.ends);
  for (const bool tail : {true, false}) {
    std::vector<Ids> want;
    for (std::int64_t i = 0; i < kBatch * kLength; ++i) {
      const std::int64_t b = i / kLength, phase = first[b] % kPool;
      std::set<std::int64_t> visible;
      for (std::int64_t s = 0; s < kLength; ++s) {
        if (rows_mask[static_cast<std::size_t>(i * kLength + s)] != 0)
          visible.insert(b * kLength + s);
      }
      want.push_back(oracle(in, i, visible, b * kLength + phase, kPool, 16, tail));
    }
    with_each([&] {
      EXPECT_EQ(select(in, pool_layout(spans, kPool), rows, 16, tail), want);
      EXPECT_EQ(select(in, pool_layout(masked.spans, kPool), masked.rows, 16, tail), want);
    });
  }
}

// Pools that stream by equal pools of a score matrix.
TEST(PoolSelection, StreamingEqualsFullScores) {
  const Tokens in(900, 4, 24);
  const PoolLayout layout = pool_layout(packed_spans(Ids{0, 500, 900}), 4);
  const RowRanges seen = pool_ranges(layout, packed_ranges(Ids{0, 500, 900}, 900));
  const std::int64_t pools = std::ssize(layout.bases);
  const Array pooled(DType::kF32, {pools, kDim}), scores(DType::kF32, {900, pools}),
      streamed(DType::kI32, {900, 16}), full(DType::kI32, {900, 16}), lengths(DType::kI32, {900});
  with_each([&] {
    pool_keys({in.key, in.gate, in.ape, ids_of(layout.bases), PoolRounding::kOnce, pooled}, {});
    best_pools(in.query, pooled, in.weights, seen, streamed, lengths);
    Scratch scratch;
    IndexScoresArgs matrix;
    matrix.index_query = in.query;
    matrix.index_key = pooled;
    matrix.index_weights = in.weights;
    matrix.starts = ids_of(seen.starts);
    matrix.ends = ids_of(seen.ends);
    matrix.index_scores = scores;
    index_scores(matrix, scratch.get(index_scores_workspace_bytes(matrix)));
    SelectTopkArgs choose;
    choose.scores = scores;
    choose.starts = ids_of(seen.starts);
    choose.ends = ids_of(seen.ends);
    choose.topk_indices = full;
    choose.topk_lengths = lengths;
    select_topk(choose, scratch.get(select_topk_workspace_bytes(choose)));
    EXPECT_EQ(
        std::memcmp(streamed.view().data, full.view().data, static_cast<std::size_t>(full.bytes())),
        0);
  });
}

// Keys of earlier chunks stay selectable, single-token steps included: each chunk appends its
// tokens and then selects among all pools so far.
std::vector<Ids> select_in_chunks(const Tokens& in, std::int64_t pool_size, std::int64_t topk,
                                  std::int64_t chunk) {
  const std::int64_t count = in.count(), pools = count / pool_size;
  const Array open_key(DType::kF32, {1, pool_size - 1, kDim}),
      open_gate(DType::kF32, {1, pool_size - 1, kDim}), pooled(DType::kF32, {pools, kDim});
  bench::poison(pooled);
  std::vector<Ids> lists;
  for (std::int64_t first = 0; first < count; first += chunk) {
    const std::int64_t n = std::min(chunk, count - first);
    const Ids cuts{0, static_cast<std::int32_t>(n)}, context{static_cast<std::int32_t>(first)};
    Ids slots;
    for (std::int64_t t = first; t < first + n; ++t)
      slots.push_back(static_cast<std::int32_t>(t / pool_size));
    append_pools({in.key.view().rows(first, n),
                  in.gate.view().rows(first, n),
                  in.ape,
                  ids_of(cuts),
                  ids_of(context),
                  {},
                  ids_of(slots),
                  0,
                  PoolRounding::kOnce,
                  open_key,
                  open_gate,
                  pooled},
                 {});
    const RowRanges rows = winnow::causal_ranges(n, first), seen = pool_ranges(rows, pool_size);
    const std::int64_t width = topk + pool_size - 1;
    const Array found(DType::kI32, {n, topk / pool_size}), lengths(DType::kI32, {n}),
        tokens(DType::kI32, {n, width});
    best_pools(in.query.view().rows(first, n), pooled, in.weights.view().rows(first, n), seen,
               found, lengths);
    expand_pools(
        {found, {}, ids_of(rows.starts), ids_of(rows.ends), pool_size, true, tokens, lengths}, {});
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t* list = tokens.as<std::int32_t>() + i * width;
      lists.emplace_back(list, list + lengths.as<std::int32_t>()[i]);
    }
  }
  return lists;
}

TEST(PoolSelection, ChunkedPrefillAndDecodeEqualOneShot) {
  for (const Sizes& sizes : {Sizes{4, 16}, {3, 9}, {1, 5}}) {
    const std::int64_t pool_size = sizes.pool, topk = sizes.topk;
    const Tokens in(62, pool_size, 25);
    with_each([&] {
      const std::vector<Ids> whole = select(in, pool_layout(packed_spans(Ids{0, 62}), pool_size),
                                            causal_ranges(62), topk, true);
      for (const std::int64_t chunk : {1, 3, 4, 12, 62})
        EXPECT_EQ(select_in_chunks(in, pool_size, topk, chunk), whole) << chunk;
    });
  }
}

// Three requests whose pages lie among each other: mixed steps of prefill chunks and decodes, rows
// of all requests in one call, ids that are positions inside a request.
TEST(PoolSelection, PagedStepsEqualEachRequestAlone) {
  constexpr std::int64_t kRequests = 3, kPool = 4, kPage = 12, kPages = 5, kTopk = 16;
  std::vector<Tokens> requests;
  for (std::uint64_t r = 0; r < kRequests; ++r) requests.emplace_back(kPages * kPage, kPool, 30);
  for (std::uint64_t r = 0; r < kRequests; ++r) {  // one ape for all of them
    bench::Random random(40 + r);
    Tokens& own = requests[r];
    for (const Array* a : {&own.query, &own.weights, &own.key, &own.gate})
      bench::fill_gauss(*a, random);
  }
  Ids table;  // pages of the requests in turn, backwards
  for (std::int32_t r = 0; r < kRequests; ++r) {
    for (std::int32_t p = 0; p < kPages; ++p) table.push_back((kPages - 1 - p) * kRequests + r);
  }
  with_each([&] {
    std::vector<std::vector<Ids>> whole;
    for (const Tokens& own : requests) {
      whole.push_back(select(own, pool_layout(packed_spans(Ids{0, kPages * kPage}), kPool),
                             causal_ranges(kPages * kPage), kTopk, true));
    }
    const Array open_key(DType::kF32, {kRequests, kPool - 1, kDim}),
        open_gate(DType::kF32, {kRequests, kPool - 1, kDim}),
        pooled(DType::kF32, {kRequests * kPages, pools_per_page(kPage, kPool), kDim});
    bench::poison(pooled);
    Ids length(kRequests, 0);
    for (std::int32_t step = 0; step < 30; ++step) {
      Ids cuts{0}, context, slots, request;
      RowRanges rows;
      for (std::int32_t r = 0; r < kRequests; ++r) {
        std::int32_t& have = length[static_cast<std::size_t>(r)];
        const std::int32_t n = std::min<std::int32_t>(step % 3 == r ? 7 : 1, kPages * kPage - have);
        const Ids own = pool_slots(std::span(table).subspan(static_cast<std::size_t>(r * kPages),
                                                            static_cast<std::size_t>(kPages)),
                                   kPage, kPool, have, n);
        slots.insert(slots.end(), own.begin(), own.end());
        context.push_back(have);
        cuts.push_back(cuts.back() + n);
        for (std::int32_t t = 0; t < n; ++t) {
          request.push_back(r);
          rows.starts.push_back(0);
          rows.ends.push_back(have + t + 1);
        }
        have += n;
      }
      const std::int64_t n = cuts.back();
      Tokens in(n, kPool, 1);
      for (std::size_t i = 0; i < request.size(); ++i) {
        const Tokens& own = requests[static_cast<std::size_t>(request[i])];
        const auto copy = [&](const Array& to, const Array& from) {
          const Tensor row = to.view().rows(static_cast<std::int64_t>(i), 1);
          std::memcpy(row.data, from.view().rows(rows.ends[i] - 1, 1).data,
                      static_cast<std::size_t>(row.elements()) * sizeof(float));
        };
        copy(in.query, own.query);
        copy(in.weights, own.weights);
        copy(in.key, own.key);
        copy(in.gate, own.gate);
      }
      append_pools({in.key,
                    in.gate,
                    requests[0].ape,
                    ids_of(cuts),
                    ids_of(context),
                    {},
                    ids_of(slots),
                    kPage,
                    PoolRounding::kOnce,
                    open_key,
                    open_gate,
                    pooled},
                   {});
      const RowRanges seen = pool_ranges(rows, kPool);
      const Array found(DType::kI32, {n, kTopk / kPool}), lengths(DType::kI32, {n}),
          tokens(DType::kI32, {n, kTopk + kPool - 1});
      best_pools(in.query,
                 KeyView(pooled, make_tensor(table.data(), DType::kI32, {kRequests, kPages}),
                         ids_of(request)),
                 in.weights, seen, found, lengths);
      expand_pools(
          {found, {}, ids_of(rows.starts), ids_of(rows.ends), kPool, true, tokens, lengths}, {});
      for (std::size_t i = 0; i < request.size(); ++i) {
        const std::int32_t* list =
            tokens.as<std::int32_t>() + static_cast<std::int64_t>(i) * (kTopk + kPool - 1);
        EXPECT_EQ(
            Ids(list, list + lengths.as<std::int32_t>()[i]),
            whole[static_cast<std::size_t>(request[i])][static_cast<std::size_t>(rows.ends[i] - 1)])
            << "step " << step << " row " << i;
      }
    }
    EXPECT_EQ(length, (Ids{60, 60, 60}));
  });
}

TEST(PoolSelection, AllThreeOperationsAllocateNothing) {
  constexpr std::int64_t kTokens = 400;
  const Tokens in(kTokens, 4, 27);
  const PoolLayout layout = pool_layout(packed_spans(Ids{0, kTokens}), 4);
  const RowRanges rows = causal_ranges(kTokens);
  const Array pooled(DType::kF32, {100, kDim}), open_key(DType::kF32, {1, 3, kDim}),
      open_gate(DType::kF32, {1, 3, kDim}), found(DType::kI32, {kTokens, 4}),
      tokens(DType::kI32, {kTokens, 19}), lengths(DType::kI32, {kTokens});
  const Ids cuts{0, kTokens}, context{0};
  Ids slots(kTokens);
  for (std::int32_t t = 0; t < kTokens; ++t) slots[static_cast<std::size_t>(t)] = t / 4;
  const PoolKeysArgs keys{in.key, in.gate, in.ape, ids_of(layout.bases), PoolRounding::kOnce,
                          pooled};
  const AppendPoolsArgs append{
      in.key,    in.gate,       in.ape, ids_of(cuts),        ids_of(context),
      {},        ids_of(slots), 0,      PoolRounding::kOnce, open_key,
      open_gate, pooled};
  const ExpandPoolsArgs expand{found,  {},     ids_of(rows.starts), ids_of(rows.ends), 4, true,
                               tokens, lengths};
  EXPECT_EQ(pool_keys_workspace_bytes(keys) + append_pools_workspace_bytes(append) +
                expand_pools_workspace_bytes(expand),
            0);
  auto all = [&] {
    pool_keys(keys, {});
    append_pools(append, {});
    expand_pools(expand, {});
  };
  all();  // threads start, once
  const std::int64_t before = bench::allocations();
  all();
  EXPECT_EQ(bench::allocations() - before, 0);
}

// 12 tokens, and one key of an early chunk that the last query points at; all others are
// orthogonal.
TEST(PoolSelection, IndexCacheKeepsEarlierChunks) {
  for (const std::int64_t pool_size : {1, 2}) {
    Tokens in(12, pool_size, 26);
    for (Array* a : {&in.key, &in.gate, &in.ape}) a->zero();
    for (std::int64_t t = 0; t < 12; ++t) in.key.as<float>()[t * kDim + (t == 1 ? 0 : 1)] = 1;
    std::fill_n(in.query.as<float>(), in.query.elements(), 0.f);
    std::fill_n(in.weights.as<float>(), in.weights.elements(), 1.f);
    for (std::int64_t h = 0; h < kHeads; ++h) in.query.as<float>()[(11 * kHeads + h) * kDim] = 1;
    with_each([&] {
      const std::vector<Ids> whole = select_in_chunks(in, pool_size, 2, 12);
      EXPECT_NE(std::find(whole[11].begin(), whole[11].end(), 1), whole[11].end());
      for (const std::int64_t chunk : {1, 3, 4})
        EXPECT_EQ(select_in_chunks(in, pool_size, 2, chunk), whole) << chunk;
    });
  }
}

}  // namespace
}  // namespace winnow::testing
