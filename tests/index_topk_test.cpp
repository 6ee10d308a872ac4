// index_topk: equal to select_topk(index_scores), whatever the split, the neighbours and the keys.
#include "winnow/index_topk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "base/array.h"
#include "base/numbers.h"
#include "bench/allocations.h"
#include "bench/data.h"
#include "tests/each.h"
#include "tests/selection_oracle.h"
#include "winnow/error.h"
#include "winnow/index_scores.h"
#include "winnow/select_topk.h"
#include "winnow/threads.h"

namespace winnow {
namespace {

using Ids = std::vector<std::int32_t>;

// All inputs and outputs of one call.
struct Call {
  Array query, key, weights, starts, ends, indices, lengths, scores;

  Call(std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t dim,
       std::int64_t topk, const char* range = "full")
      : query(DType::kF32, {rows, heads, dim}),
        key(DType::kF32, {keys, dim}),
        weights(DType::kF32, {rows, heads}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}),
        indices(DType::kI32, {rows, topk}),
        lengths(DType::kI32, {rows}),
        scores(DType::kF32, {rows, topk}) {
    bench::Random random(17);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_gauss(weights, random);
    bench::fill_ranges(range, keys, topk, starts, ends, random);
  }
  IndexTopkArgs args() const {
    return {query, key, weights, starts, ends, true, indices, lengths, scores};
  }
  void run() const {
    Scratch scratch;
    index_topk(args(), scratch.get(index_topk_workspace_bytes(args())));
  }
  Ids ids(std::int64_t row) const {
    const std::int32_t* first = indices.as<std::int32_t>() + row * indices.view().shape[1];
    return {first, first + lengths.as<std::int32_t>()[row]};
  }
};

std::vector<std::string> implementations(const Call& call) {
  std::vector<std::string> names;
  for (const Verdict& v : explain(call.args()).verdicts) {
    if (v.refusal.empty()) names.push_back(v.implementation);
  }
  return names;
}

struct Pin {
  explicit Pin(const std::string& name) {
    for (const char* operation : kOperations) pin_implementation(operation, name);
  }
  ~Pin() {
    for (const char* operation : kOperations) pin_implementation(operation, "");
  }
  static constexpr const char* kOperations[] = {"index_topk", "index_scores", "select_topk"};
};

TEST(IndexTopk, EqualsSelectTopkOfIndexScoresBitForBit) {
  for (const char* range : {"full", "causal", "packed"}) {
    const Call call(20, 5000, 2, 4, 300, range);
    for (const std::string& name : implementations(call)) {
      const Pin pin(name);
      call.run();
      const Array matrix(DType::kF32, {20, 5000}), indices(DType::kI32, {20, 300}),
          lengths(DType::kI32, {20}), scores(DType::kF32, {20, 300});
      Scratch scratch;
      const IndexScoresArgs a = {call.query, call.key, call.weights, call.starts,
                                 call.ends,  true,     matrix};
      index_scores(a, scratch.get(index_scores_workspace_bytes(a)));
      const SelectTopkArgs b = {matrix, call.starts, call.ends, indices, lengths, scores};
      select_topk(b, scratch.get(select_topk_workspace_bytes(b)));
      auto same = [](const Array& x, const Array& y) {
        return std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(x.bytes())) == 0;
      };
      EXPECT_TRUE(same(indices, call.indices)) << name << " " << range;
      EXPECT_TRUE(same(lengths, call.lengths)) << name << " " << range;
      EXPECT_TRUE(same(scores, call.scores)) << name << " " << range;
    }
  }
}

// Few rows are cut into spans of the keys that they see, for many threads: at equal scores, kept
// keys and rows of any range, no cut shows.
TEST(IndexTopk, SpansFollowTheThreadsAndChangeNothing) {
  for (const char* range : {"full", "causal", "packed", "awkward"}) {
    Call call(40, 9000, 1, 2, 700, range);
    for (std::int64_t i = 0; i < 18000; ++i)  // ties
      call.key.as<float>()[i] = std::nearbyint(2 * call.key.as<float>()[i]);
    IndexTopkArgs args = call.args();
    args.keep_first = 3;
    args.keep_last = 5;
    for (const std::string& name : implementations(call)) {
      if (name == "reference") continue;
      const Pin pin(name);
      std::vector<char> want;
      for (const int count : {1, 2, 3, 16, 64}) {
        const testing::ThreadsGuard threads(count);
        Scratch scratch;
        index_topk(args, scratch.get(index_topk_workspace_bytes(args)));
        EXPECT_EQ(last_selection_statistics().spans, count == 1 ? 1 : std::min(9, 4 * count));
        std::vector<char> got;
        for (const Tensor& t : {call.indices.view(), call.lengths.view(), call.scores.view()})
          got.insert(got.end(), t.as<char>(), t.as<char>() + t.elements() * 4);
        if (want.empty()) want = got;
        EXPECT_TRUE(got == want) << name << " " << range << " " << count;
      }
    }
  }
}

TEST(IndexTopk, ARowAloneEqualsTheRowInTheBatch) {
  const Call call(70, 6000, 1, 3, 1100, "packed");
  call.run();
  for (std::int64_t i = 0; i < 70; i += 3) {
    Call alone(1, 6000, 1, 3, 1100);
    IndexTopkArgs args = call.args();
    args.index_query = args.index_query.rows(i, 1);
    args.index_weights = args.index_weights.rows(i, 1);
    args.starts = args.starts.rows(i, 1);
    args.ends = args.ends.rows(i, 1);
    args.topk_indices = alone.indices;
    args.topk_lengths = alone.lengths;
    args.topk_scores = alone.scores;
    Scratch scratch;
    index_topk(args, scratch.get(index_topk_workspace_bytes(args)));
    EXPECT_EQ(alone.ids(0), call.ids(i)) << i;
    EXPECT_EQ(std::memcmp(alone.scores.as<float>(), call.scores.as<float>() + i * 1100, 4400), 0);
  }
}

TEST(IndexTopk, ThreadsChangeNothing) {
  const Call call(3, 20000, 2, 8, 500);
  const int before = num_threads();
  set_num_threads(1);
  call.run();
  const Array indices = call.indices.clone(), scores = call.scores.clone();
  for (const int threads : {2, 5, 16}) {
    set_num_threads(threads);
    for (int repeat = 0; repeat < 5; ++repeat) {
      call.run();
      EXPECT_EQ(std::memcmp(indices.view().data, call.indices.view().data, 6000), 0);
      EXPECT_EQ(std::memcmp(scores.view().data, call.scores.view().data, 6000), 0);
    }
  }
  set_num_threads(before);
}

TEST(IndexTopk, WorkspaceDoesNotGrowWithTheKeys) {
  const testing::ThreadsGuard threads(4);
  const Call few(4, 100, 2, 8, 64), many(4, 20000, 2, 8, 64);
  EXPECT_LT(index_topk_workspace_bytes(few.args()), index_topk_workspace_bytes(many.args()));
  IndexTopkArgs most = many.args();
  most.index_key.data = make_tensor(nullptr, DType::kF32, {2000000000, 8});
  EXPECT_EQ(index_topk_workspace_bytes(many.args()), index_topk_workspace_bytes(most));
  // Asked before memory exists.
  IndexTopkArgs args = many.args();
  for (Tensor* t : {&args.index_query, &args.index_key.data, &args.index_weights, &args.starts,
                    &args.ends, &args.topk_indices, &args.topk_lengths, &args.topk_scores}) {
    t->data = nullptr;
  }
  EXPECT_EQ(index_topk_workspace_bytes(args), index_topk_workspace_bytes(many.args()));
  EXPECT_EQ(explain(args).chosen(), explain(many.args()).chosen());
}

// A prompt in chunks of rows equals the prompt in one piece: what a row sees follows its position,
// not its place in the call, and keys of earlier chunks stay candidates.
TEST(IndexTopk, ChunksOfAPromptEqualOneCall) {
  for (const std::int64_t length : {12, 2000}) {
    const std::int64_t topk = length == 12 ? 2 : 300;
    const Call whole(length, length, 1, 4, topk, "causal");
    for (std::int64_t d = 0; d < 4; ++d)  // key 1 answers the last query
      whole.key.as<float>()[4 + d] = 9 * whole.query.as<float>()[(length - 1) * 4 + d];
    whole.weights.as<float>()[length - 1] = 1;
    whole.run();
    const Ids last = whole.ids(length - 1);
    EXPECT_TRUE(std::find(last.begin(), last.end(), 1) != last.end());
    for (const std::int64_t chunk : {1, 3, 4, 12, 64, 128, 256, 512}) {
      if (chunk == 1 && length > 100) continue;
      const Call parts(length, length, 1, 4, topk, "causal");
      for (std::int64_t first = 0; first < length; first += chunk) {
        const std::int64_t n = std::min(chunk, length - first);
        IndexTopkArgs args = whole.args();
        for (Tensor* t : {&args.index_query, &args.index_weights, &args.starts, &args.ends})
          *t = t->rows(first, n);
        args.index_key.data = args.index_key.data.rows(0, first + n);  // what is there by then
        args.topk_indices = parts.indices.view().rows(first, n);
        args.topk_lengths = parts.lengths.view().rows(first, n);
        args.topk_scores = parts.scores.view().rows(first, n);
        Scratch scratch;
        index_topk(args, scratch.get(index_topk_workspace_bytes(args)));
      }
      for (std::int64_t i = 0; i < length; ++i) EXPECT_EQ(parts.ids(i), whole.ids(i)) << chunk;
    }
  }
}

// Zigzag: a rank owns an early and a late block of rows; every row keeps its own range.
TEST(IndexTopk, RowsOfARankEqualTheRowsOfTheWhole) {
  const Call whole(16, 16, 2, 4, 5, "causal");
  whole.run();
  const std::vector<std::vector<std::int64_t>> positions = {{0, 1, 2, 3, 12, 13, 14, 15},
                                                            {4, 5, 6, 7, 8, 9, 10, 11}};
  for (const std::vector<std::int64_t>& owned : positions) {
    const Call rank(8, 16, 2, 4, 5);
    std::memcpy(rank.key.view().data, whole.key.view().data, 16 * 4 * 4);
    for (std::int64_t i = 0; i < 8; ++i) {
      const std::int64_t p = owned[static_cast<std::size_t>(i)];
      std::memcpy(rank.query.as<float>() + i * 8, whole.query.as<float>() + p * 8, 32);
      std::memcpy(rank.weights.as<float>() + i * 2, whole.weights.as<float>() + p * 2, 8);
      rank.starts.as<std::int32_t>()[i] = 0;
      rank.ends.as<std::int32_t>()[i] = static_cast<std::int32_t>(p + 1);
    }
    rank.run();
    for (std::int64_t i = 0; i < 8; ++i)
      EXPECT_EQ(rank.ids(i), whole.ids(owned[static_cast<std::size_t>(i)])) << i;
  }
}

// Packed sequences: a row never sees, and never selects, a key of another one.
TEST(IndexTopk, PackedRowsStayInTheirSequence) {
  const Call call(3, 14, 4, 8, 4);
  const std::int32_t starts[] = {0, 5, 12}, ends[] = {5, 12, 14};
  std::memcpy(call.starts.view().data, starts, sizeof starts);
  std::memcpy(call.ends.view().data, ends, sizeof ends);
  // Keys of a neighbour that would win everywhere, and that would poison everything.
  for (std::int64_t d = 0; d < 8; ++d) {
    call.key.as<float>()[5 * 8 + d] = 1e30f;
    call.key.as<float>()[11 * 8 + d] = std::numeric_limits<float>::quiet_NaN();
  }
  for (const std::string& name : implementations(call)) {
    const Pin pin(name);
    call.run();
    for (std::int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(call.ids(i).size(),
                std::min<std::size_t>(4, static_cast<std::size_t>(ends[i] - starts[i])));
      for (std::int32_t id : call.ids(i)) {
        EXPECT_GE(id, starts[i]) << name;
        EXPECT_LT(id, ends[i]) << name;
        EXPECT_NE(id, 11) << name;
      }
    }
  }
}

// One head and ReLU leave half of the keys at exactly 0: the lowest ids among them win.
TEST(IndexTopk, ReluPlateau) {
  const Call call(1, 5000, 1, 1, 2048);
  call.query.as<float>()[0] = call.weights.as<float>()[0] = 1;
  std::vector<float> scores(5000);
  for (std::int64_t j = 0; j < 5000; ++j) {
    call.key.as<float>()[j] = j % 167 == 3 ? static_cast<float>(j) : j % 2 == 0 ? -1.f : -0.f;
    scores[static_cast<std::size_t>(j)] = std::max(0.f, call.key.as<float>()[j]);
  }
  for (const std::string& name : implementations(call)) {
    const Pin pin(name);
    call.run();
    EXPECT_EQ(call.ids(0), test::best_ids(scores, 2048)) << name;
  }
}

TEST(IndexTopk, AllThreeOperationsAllocateNothing) {
  const Call call(18, 5000, 2, 8, 300, "causal");
  const Array matrix(DType::kF32, {18, 5000});
  const IndexScoresArgs score_args = {call.query, call.key, call.weights, call.starts,
                                      call.ends,  true,     matrix};
  const SelectTopkArgs select_args = {matrix,       call.starts,  call.ends,
                                      call.indices, call.lengths, call.scores};
  for (const std::string& name : implementations(call)) {
    const Pin pin(name);
    Scratch scratch;
    const Workspace workspace = scratch.get(
        std::max({index_topk_workspace_bytes(call.args()), index_scores_workspace_bytes(score_args),
                  select_topk_workspace_bytes(select_args)}));
    auto all = [&] {
      index_topk(call.args(), workspace);
      index_scores(score_args, workspace);
      select_topk(select_args, workspace);
    };
    all();  // threads start, once
    const std::int64_t before = bench::allocations();
    all();
    EXPECT_EQ(bench::allocations() - before, 0) << name;
  }
}

TEST(IndexTopk, ErrorsComeBeforeAnyWrite) {
  const Call call(2, 10, 2, 4, 3);
  call.indices.as<std::int32_t>()[0] = 77;
  auto message = [&](auto&& change) {
    IndexTopkArgs args = call.args();
    change(args);
    try {
      Scratch scratch;
      index_topk(args, scratch.get(1 << 22));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message([](IndexTopkArgs& a) { a.index_weights.dtype = DType::kF16; }),
            "[index_topk] index_weights must be of dtype f32, bf16, got f16");
  EXPECT_EQ(message([](IndexTopkArgs& a) { a.topk_indices.dtype = DType::kI64; }),
            "[index_topk] topk_indices must be of dtype i32, got i64");
  EXPECT_EQ(message([](IndexTopkArgs& a) { a.topk_lengths.shape[0] = 5; }),
            "[index_topk] topk_lengths must be [rows] = [2], got i32 [5]");
  EXPECT_EQ(message([](IndexTopkArgs& a) { a.topk_scores.data = a.index_key.data.data; }),
            "[index_topk] topk_scores must not share memory with index_key, but they overlap");
  EXPECT_EQ(call.indices.as<std::int32_t>()[0], 77);
  Scratch scratch;
  EXPECT_THROW(index_topk(call.args(), scratch.get(8)), Error);
}

}  // namespace
}  // namespace winnow
