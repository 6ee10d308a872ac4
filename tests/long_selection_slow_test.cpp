// index_topk over rows of the largest length that there is, scored to the last key: keys in one
// piece that exist only where something was written, keys that are all the same one (stride 0), and
// pages that are all the same page. fused_selection_test.cpp has windows of such rows.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/numbers.h"
#include "tests/scored_keys.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr double kInf = std::numeric_limits<double>::infinity();

// By the implementation that runs unasked: the others would take minutes.
void expect_selected(const ScoredKeys& keyed, const std::vector<Ids>& want) {
  EXPECT_NE(explain(keyed.args).chosen(), "reference");
  EXPECT_EQ(keyed.run(), want);
}

// A page of zeros behind every key that was not written.
TEST(LongSelection, TwoToThe31KeysInOnePiece) {
  constexpr std::size_t kBytes = std::size_t{kMax} * 2;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  ScoredKeys keyed(DType::kBF16, {0}, {kMax}, 6);
  keyed.args.index_key = make_tensor(memory, DType::kBF16, {kMax, 1});
  const auto set = [&](std::int64_t key, double x) { store_double(memory, DType::kBF16, key, x); };
  set(0, std::nan(""));
  set(1, -1);
  set(5, 2);
  set(1 << 30, 4);
  set((1 << 30) + 7, kInf);
  set(kMax - 2, -kInf);
  set(kMax - 1, 3);
  expect_selected(keyed, {{2, 3, 5, 1 << 30, (1 << 30) + 7, kMax - 1}});
  munmap(memory, kBytes);
}

// All keys are one: a tie of 2^31 - 1, which the lowest ids win, and kept keys at both ends.
TEST(LongSelection, TwoToThe31TimesTheSameKey) {
  bench::Guarded key(DType::kBF16, {1, 1});
  store_double(key.view().data, DType::kBF16, 0, 1.5);
  ScoredKeys keyed(DType::kBF16, {0}, {kMax}, 5);
  keyed.args.index_key = make_tensor(key.view().data, DType::kBF16, {kMax, 1});
  keyed.args.index_key.data.strides[0] = 0;
  keyed.args.keep_first = 1;
  keyed.args.keep_last = 2;
  expect_selected(keyed, {{0, 1, 2, kMax - 2, kMax - 1}});
}

// 2^31 - 64 keys by a table whose columns name one page, but for the last one, which names another.
TEST(LongSelection, TwoToThe31KeysInPages) {
  constexpr std::int64_t kPage = 64, kColumns = (std::int64_t{1} << 31) / kPage - 1;
  constexpr std::int32_t kKeys = static_cast<std::int32_t>(kColumns * kPage);
  bench::Guarded pages(DType::kBF16, {2, kPage, 1});
  for (std::int64_t i = 0; i < 2 * kPage; ++i) store_double(pages.view().data, DType::kBF16, i, 0);
  store_double(pages.view().data, DType::kBF16, 5, 1);           // of every 64 keys, the sixth
  store_double(pages.view().data, DType::kBF16, kPage + 63, 2);  // of all keys, the last
  ScoredKeys keyed(DType::kBF16, {0}, {kKeys}, 4);
  keyed.table = bench::Guarded(DType::kI32, {1, kColumns});
  auto* table = keyed.table.view().as<std::int32_t>();
  for (std::int64_t c = 0; c < kColumns; ++c) table[c] = c + 1 == kColumns ? 1 : 0;
  keyed.row_request.view().as<std::int32_t>()[0] = 0;
  keyed.args.index_key = KeyView(pages, keyed.table, keyed.row_request);
  expect_selected(keyed, {{5, 69, 133, kKeys - 1}});
}

}  // namespace
}  // namespace winnow::testing
