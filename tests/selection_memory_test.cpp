// The memory of index_topk: asked before, within its budget, never exceeded, and without influence
// on what is selected. Every allocation of the process is counted while a call runs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "bench/case.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "tests/each.h"
#include "winnow/chunks.h"
#include "winnow/index_topk.h"
#include "winnow/select_topk.h"

// The C library's allocator, counted. operator new calls it too.
#if defined(__has_feature)
#define WINNOW_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WINNOW_SANITIZED 1
#else
#define WINNOW_SANITIZED 0
#endif
#if defined(__GLIBC__) && !WINNOW_SANITIZED
#define WINNOW_COUNTS_ALLOCATIONS 1
namespace {
std::atomic<bool> watching{false};
std::atomic<int> allocations{0};
}  // namespace
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void* malloc(std::size_t bytes) noexcept {
  if (watching) ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) noexcept {
  if (watching) ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* p, std::size_t bytes) noexcept {
  if (watching) ++allocations;
  return __libc_realloc(p, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  if (watching) ++allocations;
  return __libc_memalign(alignment, bytes);
}
}
#endif

namespace winnow::testing {
namespace {

using bench::Guarded;
constexpr std::int64_t kMiB = 1 << 20;

// A call with outputs between guard pages. Every `sparse`-th row sees all keys, the others a few,
// so that large shapes stay quick; memory is planned from shapes alone.
struct Call {
  Array query, key, weights, starts, ends;
  Guarded indices, lengths, scores;

  Call(std::int64_t rows, std::int64_t keys, std::int64_t topk, std::int64_t sparse,
       std::int64_t dim = 1)
      : query(DType::kF32, {rows, 1, dim}),
        key(DType::kF32, {keys, dim}),
        weights(DType::kF32, {rows, 1}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}),
        indices(DType::kI32, {rows, topk}),
        lengths(DType::kI32, {rows}),
        scores(DType::kF32, {rows, topk}) {
    bench::Random random(9);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    for (std::int64_t i = 0; i < rows; ++i) {
      weights.as<float>()[i] = i % 2 == 0 ? 1 : -1;
      const std::int64_t first = i % sparse == 0 ? 0 : random.below(keys);
      starts.as<std::int32_t>()[i] = static_cast<std::int32_t>(first);
      ends.as<std::int32_t>()[i] = static_cast<std::int32_t>(
          i % sparse == 0 ? keys : std::min(keys, first + random.below(300)));
    }
  }
  IndexTopkArgs args(std::int64_t budget) const {
    IndexTopkArgs a = {query, key, weights, starts, ends, true, indices, lengths, scores};
    a.workspace_budget = budget;
    return a;
  }
  // Runs in a workspace of exactly the bytes that were asked for; returns how many these are.
  std::int64_t run(std::int64_t budget) const {
    for (const Tensor& t : {indices.view(), lengths.view(), scores.view()}) bench::poison(t);
    const std::int64_t bytes = index_topk_workspace_bytes(args(budget));
    const Guarded workspace(DType::kU8, {bytes});
    index_topk(args(budget), {workspace.view().data, bytes});
    return bytes;
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const Tensor& t : {indices.view(), lengths.view(), scores.view()})
      all.insert(all.end(), t.as<char>(), t.as<char>() + t.elements() * 4);
    return all;
  }
  // The least budget that works, by the words of the error.
  std::int64_t least() const {
    const std::string message = error_of([&] { index_topk_workspace_bytes(args(1)); });
    const std::string begin = "[index_topk] workspace_budget must be at least ";
    EXPECT_EQ(message.substr(0, begin.size()), begin);
    return std::strtoll(message.c_str() + begin.size(), nullptr, 10);
  }
};

TEST(SelectionMemory, ManyRowsOverALongContextIn256MiB) {
  const Call call(4096, 200000, 2048, 64);
  call.run(0);
  const std::vector<char> want = call.outputs();
  for (const int count : {1, 2, 17, 64}) {
    const ThreadsGuard threads(count);
    for (const std::int64_t budget : {256 * kMiB, 8 * kMiB, call.least()}) {
      EXPECT_LE(call.run(budget), budget);
      EXPECT_EQ(call.outputs(), want) << count << " threads, " << budget;
    }
  }
}

TEST(SelectionMemory, FewRowsOverAMillionKeysIn64MiB) {
  const Call call(16, 1000000, 2048, 1);
  call.run(0);
  const std::vector<char> want = call.outputs();
  for (const int count : {1, 2, 17, 64}) {
    const ThreadsGuard threads(count);
    for (const std::int64_t budget : {64 * kMiB, 3 * kMiB, call.least()}) {
      EXPECT_LE(call.run(budget), budget);
      EXPECT_EQ(call.outputs(), want) << count << " threads, " << budget;
    }
  }
}

// Any k, with keys that stay and without: every budget and thread count, and each row alone.
TEST(SelectionMemory, BudgetsThreadsAndBatchesChangeNothing) {
  for (const std::int64_t topk : {1, 100, 3000}) {
    const Call call(70, 3000, topk, 3, 3);
    call.run(0);
    const std::vector<char> want = call.outputs();
    const std::int64_t least = call.least();
    for (const int count : {1, 2, 17, 64}) {
      const ThreadsGuard threads(count);
      for (const std::int64_t budget :
           {least, least + 1, 2 * least, 5 * least + 777, 40 * least, kMiB * 1024}) {
        EXPECT_LE(call.run(budget), budget);
        EXPECT_EQ(call.outputs(), want) << count << " threads, " << budget;
      }
    }
    const Call alone(1, 3000, topk, 1, 3);
    for (std::int64_t i = 0; i < 70; i += 23) {
      IndexTopkArgs a = call.args(least);
      a.index_query = a.index_query.rows(i, 1);
      a.index_weights = a.index_weights.rows(i, 1);
      a.starts = a.starts.rows(i, 1);
      a.ends = a.ends.rows(i, 1);
      a.topk_indices = alone.indices;
      a.topk_lengths = alone.lengths;
      a.topk_scores = alone.scores;
      Scratch scratch;
      index_topk(a, scratch.get(index_topk_workspace_bytes(a)));
      EXPECT_EQ(std::memcmp(alone.indices.view().data, want.data() + i * topk * 4,
                            static_cast<std::size_t>(topk) * 4),
                0);
    }
  }
}

// K5: chunks of a prompt, small and large, under a small budget and a large one, at the beginning
// of a prompt and late in a long one: no combination fails, and all select the same.
TEST(SelectionMemory, K5EveryChunkOfEveryPromptUnderEveryBudget) {
  constexpr std::int64_t kRows = 2048;
  for (const std::int64_t length : {std::int64_t{2048}, std::int64_t{15360}}) {
    const Call call(kRows, length, 64, 1);
    for (std::int64_t i = 0; i < kRows; ++i) {
      call.starts.as<std::int32_t>()[i] = 0;
      call.ends.as<std::int32_t>()[i] = static_cast<std::int32_t>(length - kRows + i + 1);
    }
    call.run(0);
    const std::vector<char> want = call.outputs();
    for (const std::int64_t chunk : {64, 128, 256, 512}) {
      for (const std::int64_t budget : {std::int64_t{128} << 10, 64 * kMiB}) {
        for (const Tensor& t : {call.indices.view(), call.lengths.view(), call.scores.view()})
          bench::poison(t);
        for (std::int64_t first = 0; first < kRows; first += chunk) {
          IndexTopkArgs a = call.args(budget);
          for (Tensor* t : {&a.index_query, &a.index_weights, &a.starts, &a.ends, &a.topk_indices,
                            &a.topk_lengths, &a.topk_scores})
            *t = t->rows(first, chunk);
          const std::int64_t bytes = index_topk_workspace_bytes(a);
          EXPECT_LE(bytes, budget);
          const Guarded workspace(DType::kU8, {bytes});
          index_topk(a, {workspace.view().data, bytes});
        }
        EXPECT_EQ(call.outputs(), want) << length << " in chunks of " << chunk;
      }
    }
  }
}

TEST(SelectionMemory, ATooSmallBudgetNamesTheLeast) {
  const Call call(20, 500, 64, 1);
  for_each_implementation(call.args(0), [&](const std::string& name) {
    const std::int64_t least = call.least();
    EXPECT_GT(least, 0);
    EXPECT_EQ(call.run(least), least);
    const std::string want =
        fmt::format("[index_topk] workspace_budget must be at least {} bytes for {}, got {}", least,
                    name, least - 1);
    EXPECT_EQ(error_of([&] { index_topk_workspace_bytes(call.args(least - 1)); }), want);
    Scratch scratch;
    EXPECT_EQ(error_of([&] { index_topk(call.args(least - 1), scratch.get(least)); }), want);
  });
  EXPECT_EQ(error_of([&] { index_topk_workspace_bytes(call.args(-1)); }),
            "[index_topk] workspace_budget must not be negative, got -1");
}

// A budget is of a call: the next call has its own.
TEST(SelectionMemory, EveryCallObeysItsOwnBudget) {
  const ThreadsGuard threads(64);
  const Call call(2000, 300, 250, 1);
  const std::int64_t large = call.run(1024 * kMiB), small = call.run(2 * kMiB);
  EXPECT_GT(large, 2 * kMiB);
  EXPECT_LE(small, 2 * kMiB);
  EXPECT_EQ(call.run(1024 * kMiB), large);
}

// Shapes of public models, asked before memory exists: a score matrix would be 64 GiB, or with its
// heads 128 GiB.
TEST(SelectionMemory, IsAskedBeforeMemoryExists) {
  auto asked = [](std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t budget) {
    auto t = [](DType dtype, std::initializer_list<std::int64_t> shape) {
      return make_tensor(nullptr, dtype, shape);
    };
    IndexTopkArgs a = {t(DType::kBF16, {rows, heads, 128}),
                       t(DType::kBF16, {keys, 128}),
                       t(DType::kF32, {rows, heads}),
                       t(DType::kI32, {rows}),
                       t(DType::kI32, {rows}),
                       true,
                       t(DType::kI32, {rows, 2048}),
                       t(DType::kI32, {rows}),
                       t(DType::kF32, {rows, 2048})};
    a.workspace_budget = budget;
    return index_topk_workspace_bytes(a);
  };
  const ThreadsGuard threads(1024);
  EXPECT_LE(asked(16384, 1048576, 64, 256 * kMiB), 256 * kMiB);
  EXPECT_LE(asked(16384, 1048576, 64, 2 * kMiB), 2 * kMiB);
  EXPECT_LE(asked(32768, 32768, 32, 64 * kMiB), 64 * kMiB);
  EXPECT_LE(asked(4096, 200000, 64, 256 * kMiB), 256 * kMiB);
  EXPECT_LE(asked(16, 1000000, 64, 64 * kMiB), 64 * kMiB);
  // What a matrix in chunks would take: spec of a public planner, 3.05 GiB unchunked.
  EXPECT_EQ(row_chunks(4096, 200000, DType::kF32, 256 * kMiB).rows, 167);
  // It does not grow with the keys.
  EXPECT_EQ(asked(16, 1000000, 64, 0), asked(16, 2000000000, 64, 0));
}

#if defined(WINNOW_COUNTS_ALLOCATIONS)
TEST(SelectionMemory, NoCallAllocates) {
  const Call call(40, 3000, 200, 1);
  for_each_implementation(call.args(0), [&](const std::string& name) {
    if (explain(call.args(0)).verdicts.front().implementation != name) return;  // refusals are text
    for (const std::int64_t budget : {std::int64_t{0}, call.least()}) {
      const IndexTopkArgs a = call.args(budget);
      Scratch scratch;
      const Workspace workspace = scratch.get(index_topk_workspace_bytes(a));
      index_topk(a, workspace);  // threads start, once
      allocations = 0;
      watching = true;
      index_topk(a, workspace);
      index_topk_workspace_bytes(a);
      watching = false;
      EXPECT_EQ(allocations, 0) << budget;
    }
  });
  // The counter counts.
  allocations = 0;
  watching = true;
  void* volatile p = std::malloc(7);
  std::free(p);
  watching = false;
  EXPECT_GE(allocations, 1);
}
#endif

}  // namespace
}  // namespace winnow::testing
