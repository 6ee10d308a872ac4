// F17: the indexer losses over the rows that ranks of context parallelism hold. The caller says
// what a row counts (`d_kl`), the same number on every rank: then each row has the bits that it has
// in one piece, and what the ranks give to the keys adds up to what one piece gives. Nothing
// shrinks by the number of ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bench/data.h"
#include "tests/each.h"
#include "winnow/attention_target.h"
#include "winnow/context_parallel.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/layout.h"

namespace winnow::testing {
namespace {

using Positions = std::vector<std::int64_t>;

constexpr std::int64_t kRows = 48, kHeads = 3, kDim = 20, kTopk = 9;
constexpr std::int64_t kSequences[] = {0, 16, 40, kRows};  // packed, each of 2 x 4 chunks at most
constexpr double kScale = 0.3;
constexpr double kRowCounts = 1.0 / kRows;  // the mean over all rows, whoever holds them

Array like(const Tensor& t, std::int64_t rows) {
  if (t.rank == 1) return Array(t.dtype, {rows});
  if (t.rank == 2) return Array(t.dtype, {rows, t.shape[1]});
  return Array(t.dtype, {rows, t.shape[1], t.shape[2]});
}

std::size_t row_bytes(const Tensor& t) {
  return static_cast<std::size_t>(t.elements() / t.shape[0] * dtype_bytes(t.dtype));
}

Array rows_at(const Array& a, const Positions& positions) {
  Array out = like(a, static_cast<std::int64_t>(positions.size()));
  for (std::size_t i = 0; i < positions.size(); ++i)
    std::memcpy(out.as<char>() + i * row_bytes(a),
                a.as<char>() + static_cast<std::size_t>(positions[i]) * row_bytes(a), row_bytes(a));
  return out;
}

// What belongs to rows.
struct Rows {
  Array index_query, weights, query, lse, ids, starts, ends;

  Rows at(const Positions& p) const {
    return {rows_at(index_query, p), rows_at(weights, p), rows_at(query, p), rows_at(lse, p),
            rows_at(ids, p),         rows_at(starts, p),  rows_at(ends, p)};
  }
};

struct Gradients {
  Array kl, query, key, weights;
};

struct Problem {
  Rows rows;
  Array index_key, key;

  explicit Problem(DType dtype)
      : rows{Array(dtype, {kRows, kHeads, kDim}), Array(dtype, {kRows, kHeads}),
             Array(dtype, {kRows, kHeads, kDim}), Array(dtype, {kRows, kHeads}),
             Array(DType::kI32, {kRows, kTopk}),  Array(DType::kI32, {kRows}),
             Array(DType::kI32, {kRows})},
        index_key(dtype, {kRows, kDim}),
        key(dtype, {kRows, 1, kDim}) {
    bench::Random random(17);
    for (const Array* a : {&rows.index_query, &rows.weights, &rows.query, &index_key, &key})
      bench::fill_gauss(*a, random);
    const std::int32_t sequences[] = {0, 16, 40, kRows};
    const RowRanges ranges = packed_ranges(sequences, kRows);
    std::memcpy(rows.starts.as<char>(), ranges.starts.data(), kRows * 4);
    std::memcpy(rows.ends.as<char>(), ranges.ends.data(), kRows * 4);
    bench::fill_indices("scattered", kRows, rows.starts, rows.ends, rows.ids, random);
    for (std::int64_t i = 0; i < kRows * kHeads; ++i)
      store_double(rows.lse.as<char>(), dtype, i, 3 + 0.1 * random.gauss());
  }

  // Of the loss over the selected keys, and of the loss over all.
  Gradients sparse(const Rows& r) const {
    const std::int64_t n = r.starts.elements();
    const Array target = slots(n), scores = slots(n), d_scores = slots(n);
    Gradients g = outputs(r);
    call(attention_target, attention_target_workspace_bytes,
         AttentionTargetArgs{r.query, key, r.lse, r.ids, r.starts, r.ends, kScale, target});
    call(index_scores_at, index_scores_at_workspace_bytes,
         IndexScoresAtArgs{r.index_query, index_key, r.weights, r.ids, r.starts, r.ends, true,
                           scores});
    call(index_loss, index_loss_workspace_bytes,
         IndexLossArgs{target, scores, r.ids, r.starts, r.ends, kRowCounts, g.kl, d_scores});
    call(index_scores_at_backward, index_scores_at_backward_workspace_bytes,
         IndexScoresAtBackwardArgs{r.index_query, index_key, r.weights, r.ids, r.starts, r.ends,
                                   true, d_scores, g.query, g.key, g.weights});
    return g;
  }
  Gradients dense(const Rows& r) const {
    Gradients g = outputs(r);
    const DenseIndexLossArgs a = {r.index_query, index_key, r.weights, true,     r.query,    key,
                                  r.lse,         kScale,    r.starts,  r.ends,   kRowCounts, {},
                                  g.kl,          g.query,   g.key,     g.weights};
    call(dense_index_loss, dense_index_loss_workspace_bytes, a);
    return g;
  }

 private:
  Array slots(std::int64_t n) const { return Array(key.view().dtype, {n, kTopk}); }
  Gradients outputs(const Rows& r) const {
    const std::int64_t n = r.starts.elements();
    return {Array(key.view().dtype, {n}), like(r.index_query, n), like(index_key, kRows),
            like(r.weights, n)};
  }
  template <class Args>
  static void call(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
                   const Args& args) {
    Scratch scratch;
    operation(args, scratch.get(bytes(args)));
  }
};

bool same_bits(const Array& a, const Array& b) {
  return a.bytes() == b.bytes() &&
         std::memcmp(a.as<char>(), b.as<char>(), static_cast<std::size_t>(a.bytes())) == 0;
}

// loss(rows) for every rank of cp = 1, 2, 4 against loss(all rows).
template <class Loss>
void expect_ranks_add_up(const Problem& x, Loss&& loss) {
  const Gradients whole = loss(x.rows);
  double largest = 0, total = 0;
  for (std::int64_t i = 0; i < kRows; ++i) total += at(whole.kl, i) * kRowCounts;
  for (std::int64_t n = 0; n < whole.key.elements(); ++n)
    largest = std::max(largest, std::abs(at(whole.key, n)));
  ASSERT_GT(total, 0.01);
  ASSERT_GT(largest, 0.01);
  for (const std::int64_t cp : {1, 2, 4}) {
    std::vector<double> d_key(static_cast<std::size_t>(whole.key.elements()), 0);
    double sum = 0;
    std::int64_t rows = 0;
    for (std::int64_t rank = 0; rank < cp; ++rank) {
      const Positions held = context_parallel_positions(kSequences, cp, rank, kRows / cp);
      const Gradients mine = loss(x.rows.at(held));
      EXPECT_TRUE(same_bits(mine.kl, rows_at(whole.kl, held))) << rank << " of " << cp;
      EXPECT_TRUE(same_bits(mine.query, rows_at(whole.query, held))) << rank << " of " << cp;
      EXPECT_TRUE(same_bits(mine.weights, rows_at(whole.weights, held))) << rank << " of " << cp;
      for (std::int64_t i = 0; i < mine.kl.elements(); ++i) sum += at(mine.kl, i) * kRowCounts;
      for (std::size_t n = 0; n < d_key.size(); ++n)
        d_key[n] += at(mine.key, static_cast<std::int64_t>(n));
      rows += mine.kl.elements();
    }
    EXPECT_EQ(rows, kRows);
    EXPECT_NEAR(sum, total, 1e-12 * total);
    for (std::size_t n = 0; n < d_key.size(); ++n)
      ASSERT_NEAR(d_key[n], at(whole.key, static_cast<std::int64_t>(n)), 1e-6 * largest)
          << "cp " << cp << " element " << n;
  }
}

TEST(LossOfRanks, F17SparseLossesAddUpToThoseOfOnePiece) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const Problem x(dtype);
    expect_ranks_add_up(x, [&](const Rows& rows) { return x.sparse(rows); });
  }
}

TEST(LossOfRanks, F17DenseLossesAddUpToThoseOfOnePiece) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const Problem x(dtype);
    expect_ranks_add_up(x, [&](const Rows& rows) { return x.dense(rows); });
  }
}

}  // namespace
}  // namespace winnow::testing
