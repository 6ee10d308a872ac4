// What ranks of a parallel group are handed: the same input on each, rows that are padding alone,
// requests of which a rank holds no key.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "bench/data.h"
#include "tests/attention_call.h"
#include "tests/each.h"
#include "tests/scored_keys.h"
#include "winnow/attention_target.h"
#include "winnow/ids.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"
#include "winnow/layout.h"
#include "winnow/merge_attention.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;

// FNV-1a over ids, slot by slot.
std::uint64_t digest(const std::vector<Ids>& rows) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const Ids& ids : rows) {
    for (const std::int32_t id : ids)
      hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x100000001b3u;
    hash = (hash ^ 0xffffffffu) * 0x100000001b3u;
  }
  return hash;
}

ScoredKeys rows_of_a_rank() {
  bench::Random random(31);
  Floats keys;
  for (int i = 0; i < 20000; ++i) keys.push_back(static_cast<float>(random.below(50)));
  Ids from, to;
  for (std::int32_t i = 0; i < 24; ++i) {
    from.push_back(i * 100);
    to.push_back(20000 - i);
  }
  return {keys, from, to, 700, 64};
}

// Run by the test below, as a process of its own.
TEST(Ranks, DISABLED_PrintsWhatItSelects) {
  std::printf("selected %llx\n", static_cast<unsigned long long>(digest(rows_of_a_rank().run())));
}

// J1: ranks of a model run the same indexer, on threads of one process or in processes of their
// own, with whatever number of threads: the same ids in the same slots.
TEST(Ranks, J1SelectTheSameKeysInTheSameSlots) {
  const std::uint64_t want = digest(rows_of_a_rank().run());
  std::vector<std::uint64_t> got(2);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const ScoredKeys mine = rows_of_a_rank();
      std::uint64_t all = 0;
      for (int repeat = 0; repeat < 20; ++repeat) {
        const std::uint64_t now = digest(mine.run());
        all = repeat == 0 || now == all ? now : ~now;
      }
      got[rank] = all;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(got, (std::vector<std::uint64_t>{want, want}));
  char self[4096] = {};
  ASSERT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
  for (const char* threads : {"1", "3"}) {
    const std::string command = std::string("WINNOW_NUM_THREADS=") + threads + " '" + self +
                                "' --gtest_also_run_disabled_tests"
                                " --gtest_filter=Ranks.DISABLED_PrintsWhatItSelects";
    FILE* rank = popen(command.c_str(), "r");
    ASSERT_NE(rank, nullptr);
    unsigned long long printed = 0;
    bool found = false;
    for (char line[256]; std::fgets(line, sizeof line, rank) != nullptr;)
      found |= std::sscanf(line, "selected %llx", &printed) == 1;
    EXPECT_EQ(pclose(rank), 0);
    EXPECT_TRUE(found);
    EXPECT_EQ(printed, want) << threads << " threads";
  }
}

template <class Args>
void call(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
          const Args& args) {
  Scratch scratch;
  operation(args, scratch.get(bytes(args)));
}

// D7: two documents of 5 and 7 tokens in a pack of 16 rows, on 4 ranks of 4 rows each: the rows of
// the last rank are padding alone. They select nothing, attend to nothing, cost nothing and give
// no gradient, whatever their inputs hold.
TEST(Ranks, D7ASliceOfPaddingAlone) {
  constexpr std::int64_t kRows = 4, kKeys = 16, kHeads = 2, kDim = 8, kTopk = 3;
  const std::int32_t documents[] = {0, 5, 12};
  const RowRanges pack = packed_ranges(documents, 16);
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    AttentionCall x(kRows, kKeys, kHeads, 1, kDim, kDim);
    Array weights(DType::kF32, {kRows, kHeads}), index_key(DType::kF32, {kKeys, kDim}),
        scores(DType::kF32, {kRows, kTopk}), target(DType::kF32, {kRows, kTopk}),
        kl(DType::kF32, {kRows}), d_scores(DType::kF32, {kRows, kTopk}),
        dq(DType::kF32, {kRows, kHeads, kDim}), dk(DType::kF32, {kKeys, kDim}),
        dw(DType::kF32, {kRows, kHeads});
    bench::Random random(3);
    bench::fill_gauss(weights, random);
    bench::fill_gauss(index_key, random);
    x.ids = Array(DType::kI32, {kRows, kTopk});
    x.lengths = Array(DType::kI32, {kRows});
    const auto first = static_cast<std::size_t>(rank * kRows);
    const Ids starts(pack.starts.begin() + rank * kRows, pack.starts.begin() + rank * kRows + 4),
        ends(pack.ends.begin() + rank * kRows, pack.ends.begin() + rank * kRows + 4);
    int real = 0;
    for (std::int64_t i = 0; i < kRows; ++i) {
      x.see(i, starts[static_cast<std::size_t>(i)], ends[static_cast<std::size_t>(i)]);
      const bool padding = first + static_cast<std::size_t>(i) >= 12;
      real += padding ? 0 : 1;
      for (std::int64_t c = 0; c < kHeads * kDim && padding; ++c)
        x.query.as<float>()[i * kHeads * kDim + c] = std::nanf("");
    }
    EXPECT_EQ(row_blocks(starts, ends, 4).empty(), rank == 3);
    const IndexTopkArgs topk = {x.query, index_key, weights,   x.starts, x.ends,
                                true,    x.ids,     x.lengths, scores};
    for_each_implementation(topk, [&](const std::string&) {
      bench::poison(x.ids);
      call(index_topk, index_topk_workspace_bytes, topk);
      x.forward();
      x.backward();
      const AttentionTargetArgs target_args = {x.query,  x.key,  x.lse,   x.ids,
                                               x.starts, x.ends, x.scale, target};
      call(attention_target, attention_target_workspace_bytes, target_args);
      const IndexScoresAtArgs at_args = {x.query,  index_key, weights, x.ids,
                                         x.starts, x.ends,    true,    scores};
      call(index_scores_at, index_scores_at_workspace_bytes, at_args);
      const IndexLossArgs loss = {target, scores, x.ids, x.starts, x.ends, 1, kl, d_scores};
      call(index_loss, index_loss_workspace_bytes, loss);
      const IndexScoresAtBackwardArgs back = {x.query, index_key, weights, x.ids, x.starts, x.ends,
                                              true,    d_scores,  dq,      dk,    dw};
      call(index_scores_at_backward, index_scores_at_backward_workspace_bytes, back);
      for (std::int64_t i = 0; i < kRows; ++i) {
        const bool padding = i >= real;
        EXPECT_EQ(x.lengths.as<std::int32_t>()[i] == 0, padding) << rank << " " << i;
        EXPECT_EQ(std::isinf(at(x.lse, i * kHeads)), padding) << rank << " " << i;
        for (std::int64_t s = 0; s < kTopk && padding; ++s) {
          EXPECT_EQ(x.ids.as<std::int32_t>()[i * kTopk + s], -1);
          EXPECT_EQ(at(d_scores, i * kTopk + s), 0);
        }
        EXPECT_TRUE(!padding || at(kl, i) == 0);
        for (std::int64_t c = 0; c < kHeads * kDim && padding; ++c) {
          EXPECT_EQ(at(x.output, i * kHeads * kDim + c), 0);
          EXPECT_EQ(at(x.d_query, i * kHeads * kDim + c), 0);
          EXPECT_EQ(at(dq, i * kHeads * kDim + c), 0);
        }
      }
      if (real > 0) return;
      for (const Array* gradient : {&x.d_key, &dk})
        for (std::int64_t n = 0; n < gradient->elements(); ++n) EXPECT_EQ(at(*gradient, n), 0);
    });
  }
}

// F7: requests of 3 and of 20 tokens on 8 ranks: five ranks hold no token of the first. They list
// length 0 for it, every token is on one rank, and what the ranks make of it together is what one
// rank makes of all.
TEST(Ranks, F7ARankMayHoldNothingOfARequest) {
  constexpr std::int64_t kRanks = 8, kHeads = 2, kDim = 8;
  const std::int32_t lengths[] = {3, 20};
  for (const std::int32_t length : lengths) {
    const AttentionCall whole(1, length, kHeads, 1, kDim, kDim);
    whole.forward();
    const Array part_output(DType::kF32, {kRanks, 1, kHeads, kDim}),
        part_lse(DType::kF32, {kRanks, 1, kHeads}), output(DType::kF32, {1, kHeads, kDim}),
        lse(DType::kF32, {1, kHeads});
    Ids owners(static_cast<std::size_t>(length), 0);
    for (std::int64_t rank = 0; rank < kRanks; ++rank) {
      const Shard shard = {rank, kRanks, 1};
      const std::int64_t held = shard_length(shard, length);
      EXPECT_EQ(held == 0, rank >= length) << rank;
      AttentionCall mine(1, 4, kHeads, 1, kDim, kDim);  // room for more keys than it holds
      std::memcpy(mine.query.as<void>(), whole.query.as<void>(), kHeads * kDim * 4);
      for (std::int64_t n = 0; n < mine.key.elements(); ++n) mine.key.as<float>()[n] = NAN;
      for (std::int32_t j = 0; j < held; ++j) {
        const Array id = ints({1, 1}, {j});
        from_shard(RequestIds{id}, shard, RequestIds{id});
        const std::int32_t position = id.as<std::int32_t>()[0];
        ASSERT_GE(position, 0);
        ASSERT_LT(position, length);
        ++owners[static_cast<std::size_t>(position)];
        std::memcpy(mine.key.as<float>() + j * kDim, whole.key.as<float>() + position * kDim,
                    kDim * 4);
      }
      mine.see(0, 0, static_cast<std::int32_t>(held));
      mine.output = Array(DType::kF32, {1, kHeads, kDim});
      mine.forward();
      std::memcpy(part_output.as<float>() + rank * kHeads * kDim, mine.output.as<void>(),
                  kHeads * kDim * 4);
      std::memcpy(part_lse.as<float>() + rank * kHeads, mine.lse.as<void>(), kHeads * 4);
    }
    EXPECT_EQ(owners, Ids(static_cast<std::size_t>(length), 1));
    call(merge_attention, merge_attention_workspace_bytes,
         MergeAttentionArgs{part_output, part_lse, output, lse});
    // A weighted mean of at most 20 values of |v| < 4, summed in another order.
    for (std::int64_t n = 0; n < kHeads * kDim; ++n)
      EXPECT_NEAR(at(output, n), at(whole.output, n), 4 * 64 * 0x1p-24) << n;
    for (std::int64_t h = 0; h < kHeads; ++h)
      EXPECT_NEAR(at(lse, h), at(whole.lse, h), 4 * 64 * 0x1p-24) << h;
  }
}

}  // namespace
}  // namespace winnow::testing
