// Keys in pages: index_scores and index_topk give what they give for the same keys in one piece,
// and touch nothing that a block table names wrongly.
#include "winnow/key_view.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "bench/case.h"
#include "tests/each.h"
#include "tests/paged_keys.h"
#include "tests/selection_oracle.h"
#include "winnow/index_scores.h"
#include "winnow/index_topk.h"
#include "winnow/layout.h"
#include "winnow/select_topk.h"
#include "winnow/validation.h"

namespace winnow::testing {
namespace {

using bench::Guarded;
using Ids = std::vector<std::int32_t>;
using Ids64 = std::vector<std::int64_t>;

Guarded int_row(const Ids& values) {
  Guarded t(DType::kI32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), t.view().as<std::int32_t>());
  return t;
}

// Rows of a step that mixes requests, with room for both outputs.
struct Step {
  std::int64_t rows, width, topk;
  Guarded query, weights, request, starts, ends;
  Guarded scores, indices, lengths, topk_scores;

  Step(DType dtype, std::int64_t heads, std::int64_t dim, std::int64_t columns, std::int64_t k,
       const Ids& requests, const Ids& from, const Ids& to)
      : rows(static_cast<std::int64_t>(requests.size())),
        width(columns),
        topk(k),
        query(dtype, {rows, heads, dim}),
        weights(DType::kF32, {rows, heads}),
        request(int_row(requests)),
        starts(int_row(from)),
        ends(int_row(to)),
        scores(DType::kF32, {rows, width}),
        indices(DType::kI32, {rows, topk}),
        lengths(DType::kI32, {rows}),
        topk_scores(DType::kF32, {rows, topk}) {
    bench::Random random(5);
    bench::fill_gauss(query, random);
    bench::fill_gauss(weights, random);
  }
  IndexScoresArgs scores_args(const KeyView& keys) const {
    return {query, keys, weights, starts, ends, true, scores};
  }
  IndexTopkArgs topk_args(const KeyView& keys) const {
    return {query, keys, weights, starts, ends, true, indices, lengths, topk_scores};
  }
  // Both operations, into poisoned outputs.
  void run(const KeyView& keys, const std::string& implementation) const {
    for (const Tensor& t : {scores.view(), indices.view(), lengths.view(), topk_scores.view()})
      bench::poison(t);
    const IndexScoresArgs a = scores_args(keys);
    const IndexTopkArgs b = topk_args(keys);
    const bench::PinGuard scorer("index_scores", implementation),
        both("index_topk", implementation);
    const Guarded first(DType::kU8, {index_scores_workspace_bytes(a)}),
        second(DType::kU8, {index_topk_workspace_bytes(b)});
    index_scores(a, {first.view().data, first.view().elements()});
    index_topk(b, {second.view().data, second.view().elements()});
  }
  // The same for one row alone.
  Step row(std::int64_t i, DType dtype) const {
    const Tensor& q = query;
    Step alone(dtype, q.shape[1], q.shape[2], width, topk, {request.view().as<std::int32_t>()[i]},
               {starts.view().as<std::int32_t>()[i]}, {ends.view().as<std::int32_t>()[i]});
    const auto query_bytes = static_cast<std::size_t>(q.strides[0] * dtype_bytes(dtype));
    std::memcpy(alone.query.view().data, q.as<char>() + static_cast<std::size_t>(i) * query_bytes,
                query_bytes);
    std::memcpy(alone.weights.view().data, weights.view().as<float>() + i * q.shape[1],
                static_cast<std::size_t>(q.shape[1]) * 4);
    return alone;
  }
  Ids ids(std::int64_t i) const {
    const std::int32_t* p = indices.view().as<std::int32_t>() + i * topk;
    return {p, p + lengths.view().as<std::int32_t>()[i]};
  }
  float score(std::int64_t i, std::int64_t t) const {
    return scores.view().as<float>()[i * width + t];
  }
};

::testing::AssertionResult same_row(const Guarded& a, std::int64_t i, const Guarded& b) {
  const auto bytes = static_cast<std::size_t>(a.view().strides[0] * dtype_bytes(a.view().dtype));
  return std::memcmp(a.view().as<char>() + static_cast<std::size_t>(i) * bytes, b.view().data,
                     bytes) == 0
             ? ::testing::AssertionSuccess()
             : ::testing::AssertionFailure() << "row " << i << " differs";
}

// Decoding rows, a chunk of a prompt, rows of one request that are not neighbours.
TEST(KeyView, PagesOfEverySizeEqualOnePieceBitForBit) {
  const Ids requests = {0, 1, 1, 1, 1, 2, 0, 2, 3, 1}, starts = {0, 0, 0, 3, 0, 7, 5, 250, 0, 0},
            ends = {300, 31, 32, 33, 34, 517, 299, 517, 1, 0};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t page : {1, 2, 7, 15, 16, 17, 32, 64, 100, 128, 256, 257, 600}) {
      const PagedKeys keys(dtype, {300, 34, 517, 1}, 19, page);
      const Step step(dtype, 3, 19, 520, 40, requests, starts, ends);
      for_each_implementation(
          step.topk_args(keys.view(step.request)), [&](const std::string& name) {
            SCOPED_TRACE(fmt::format("{} page {}", dtype_name(dtype), page));
            step.run(keys.view(step.request), name);
            for (std::int64_t i = 0; i < step.rows; ++i) {
              const Step alone = step.row(i, dtype);
              const auto request = static_cast<std::size_t>(requests[static_cast<std::size_t>(i)]);
              alone.run(keys.alone[request].view(), name);
              EXPECT_TRUE(same_row(step.scores, i, alone.scores));
              EXPECT_TRUE(same_row(step.indices, i, alone.indices));
              EXPECT_TRUE(same_row(step.lengths, i, alone.lengths));
              EXPECT_TRUE(same_row(step.topk_scores, i, alone.topk_scores));
            }
          });
    }
  }
}

// A20: the last store of a row ends with the row, whatever the length is beside a page or a vector:
// behind the matrix lies an unreadable page. Small whole numbers, so that every score is exact.
TEST(KeyView, A20NoStoreBeyondTheRow) {
  for (const std::int32_t length : {1, 63, 64, 65, 4095, 4096, 4097}) {
    PagedKeys keys(DType::kF32, {length}, 3, 64);
    const Step step(DType::kF32, 2, 3, length, length, {0}, {0}, {length});
    Ids want_ids(static_cast<std::size_t>(length));
    std::iota(want_ids.begin(), want_ids.end(), 0);
    const float query[] = {1, 2, -1, 0, 1, 3}, weights[] = {2, -1};
    std::memcpy(step.query.view().data, query, sizeof query);
    std::memcpy(step.weights.view().data, weights, sizeof weights);
    std::vector<float> want;
    for (std::int32_t j = 0; j < length; ++j) {
      const float key[] = {static_cast<float>(j % 17 - 8), static_cast<float>(j % 5 - 2),
                           static_cast<float>(j % 11 - 5)};
      std::memcpy(keys.key(keys.entry(0, j / 64), j % 64), key, sizeof key);
      std::memcpy(keys.alone[0].view().as<float>() + 3 * j, key, sizeof key);
      want.push_back(2 * std::max(0.f, key[0] + 2 * key[1] - key[2]) -
                     std::max(0.f, key[1] + 3 * key[2]));
    }
    for (const KeyView& view : {keys.view(step.request), KeyView(keys.alone[0].view())}) {
      for_each_implementation(step.topk_args(view), [&](const std::string& name) {
        step.run(view, name);
        for (std::int32_t t = 0; t < length; ++t)
          ASSERT_EQ(step.score(0, t), want[static_cast<std::size_t>(t)]) << length << " " << t;
        EXPECT_EQ(step.ids(0), want_ids);
      });
    }
  }
}

// C4: any number of new tokens per request, up to eight and mixed in one step: row j of a request
// with n new tokens and `length` keys sees length - n + j + 1 of them, bit for bit as alone.
TEST(KeyView, C4AnyNumberOfNewTokensPerRequest) {
  const Ids64 lengths = {5, 130, 64, 17};
  std::vector<Ids> steps = {{1, 3, 2, 5}};
  for (std::int32_t n = 1; n <= 8; ++n) steps.push_back({std::min(n, 5), n, n, n});
  const PagedKeys keys(DType::kBF16, lengths, 19, 16);
  for (const Ids& counts : steps) {
    Ids requests, ends;
    for (std::size_t q = 0; q < 4; ++q) {
      const RowRanges rows = causal_ranges(counts[q], lengths[q], CausalAlignment::kBottomRight);
      requests.insert(requests.end(), rows.ends.size(), static_cast<std::int32_t>(q));
      ends.insert(ends.end(), rows.ends.begin(), rows.ends.end());
      for (std::int32_t j = 0; j < counts[q]; ++j)
        EXPECT_EQ(rows.ends[static_cast<std::size_t>(j)], lengths[q] - counts[q] + j + 1);
    }
    const Step all(DType::kBF16, 3, 19, 130, 130, requests, Ids(ends.size(), 0), ends);
    const Step few(DType::kBF16, 3, 19, 130, 7, requests, Ids(ends.size(), 0), ends);
    for_each_implementation(all.topk_args(keys.view(all.request)), [&](const std::string& name) {
      all.run(keys.view(all.request), name);
      few.run(keys.view(few.request), name);
      for (std::int64_t i = 0; i < all.rows; ++i) {
        const auto r = static_cast<std::size_t>(i);
        Ids visible(static_cast<std::size_t>(ends[r]));
        std::iota(visible.begin(), visible.end(), 0);
        EXPECT_EQ(all.ids(i), visible) << i;
        const Step alone = few.row(i, DType::kBF16);
        alone.run(keys.alone[static_cast<std::size_t>(requests[r])].view(), name);
        EXPECT_TRUE(same_row(few.scores, i, alone.scores));
        EXPECT_TRUE(same_row(few.indices, i, alone.indices));
        const float* scores = few.scores.view().as<float>() + i * 130;
        EXPECT_EQ(few.ids(i), test::best_ids({scores, scores + ends[r]}, 7)) << i;
      }
    });
  }
}

// A page id that names no page: its keys score NaN, are never selected and never read (the pool
// ends at an unreadable page).
TEST(KeyView, KeysOfBadPageIdsAreMissing) {
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
  for (const std::int64_t page : {1, 5, 16, 64, 300}) {
    const PagedKeys keys(DType::kF32, {640, 640}, 8, page);
    const Ids bad = {-1, static_cast<std::int32_t>(keys.pages), kMax, kMin};
    std::vector<bool> missing(640, false);
    for (std::int64_t slot = 1; slot * page < 640; slot += 3) {
      keys.entry(1, slot) = bad[static_cast<std::size_t>(slot / 3) % 4];
      for (std::int64_t j = slot * page; j < std::min<std::int64_t>(640, (slot + 1) * page); ++j)
        missing[static_cast<std::size_t>(j)] = true;
    }
    const Step step(DType::kF32, 2, 8, 640, 640, {0, 1, 1, 1}, {0, 0, 2, 639},
                    {640, 640, 640, 640});
    for_each_implementation(step.topk_args(keys.view(step.request)), [&](const std::string& name) {
      SCOPED_TRACE(page);
      step.run(keys.view(step.request), name);
      const std::int32_t starts[] = {0, 0, 2, 639};
      for (std::int64_t i = 0; i < step.rows; ++i) {
        const Step alone = step.row(i, DType::kF32);
        alone.run(keys.alone[i == 0 ? 0 : 1].view(), name);
        Ids want;
        for (std::int32_t j = starts[i]; j < 640; ++j) {
          const std::int64_t t = j - starts[i];
          const bool gone = i > 0 && missing[static_cast<std::size_t>(j)];
          EXPECT_EQ(std::isnan(step.score(i, t)), gone) << i << " " << j;
          if (gone) continue;
          EXPECT_EQ(step.score(i, t), alone.score(0, t)) << i << " " << j;
          want.push_back(j);
        }
        EXPECT_EQ(step.ids(i), want) << i;
      }
    });
  }
}

// Rows of padding may name a request that does not exist: no table row is read for them.
TEST(KeyView, RowsOfRequestsThatDoNotExistSelectNothing) {
  const PagedKeys keys(DType::kF32, {20, 30}, 4, 8);
  const Ids requests = {0, 1, 2, 7, -1, std::numeric_limits<std::int32_t>::max(), 1};
  const Step step(DType::kF32, 2, 4, 30, 6, requests, Ids(7, 0), {20, 30, 30, 30, 30, 30, 30});
  for_each_implementation(step.topk_args(keys.view(step.request)), [&](const std::string& name) {
    step.run(keys.view(step.request), name);
    for (std::int64_t i = 0; i < step.rows; ++i) {
      const bool real = i < 2 || i == 6;
      EXPECT_EQ(step.ids(i).size(), real ? 6u : 0u) << i;
      EXPECT_EQ(std::isnan(step.score(i, 0)), !real) << i;
      for (std::int64_t s = 0; s < 6 && !real; ++s)
        EXPECT_EQ(step.indices.view().as<std::int32_t>()[i * 6 + s], -1);
    }
  });
}

// The table may be narrower than what `ends` claims (the key space ends with it), or wider.
TEST(KeyView, TheBlockTableBoundsTheKeySpace) {
  for (const std::int64_t spare : {-2, 0, 5}) {
    const PagedKeys keys(DType::kF32, {64}, 4, 8, spare);
    const std::int64_t there = std::min<std::int64_t>(64, keys.max_pages * 8);
    const Step step(DType::kF32, 2, 4, 200, 200, {0, 0}, {0, 60}, {131072, 200});
    for_each_implementation(step.topk_args(keys.view(step.request)), [&](const std::string& name) {
      SCOPED_TRACE(spare);
      step.run(keys.view(step.request), name);
      Ids want(static_cast<std::size_t>(there));
      std::iota(want.begin(), want.end(), 0);
      EXPECT_EQ(step.ids(0), want);
      EXPECT_EQ(step.ids(1), there == 64 ? (Ids{60, 61, 62, 63}) : Ids{});
      for (std::int64_t t = keys.max_pages * 8; t < 200; ++t)
        EXPECT_TRUE(bench::is_poison(step.scores, t)) << t;  // past the key space: not written
    });
  }
}

// Packed score rows and page lookups are two things: scores of both requests in one matrix.
TEST(KeyView, ColumnsOfScoresAreNotPositionsInPages) {
  const PagedKeys keys(DType::kF32, {6, 9}, 4, 4);
  const Step step(DType::kF32, 2, 4, 4, 2, {0, 1, 1}, {3, 2, 6}, {6, 9, 9});
  for_each_implementation(step.topk_args(keys.view(step.request)), [&](const std::string& name) {
    step.run(keys.view(step.request), name);
    for (std::int64_t i = 0; i < 3; ++i) {
      const Step alone = step.row(i, DType::kF32);
      alone.run(keys.alone[i == 0 ? 0 : 1].view(), name);
      EXPECT_TRUE(same_row(step.scores, i, alone.scores));
      EXPECT_EQ(step.ids(i), alone.ids(0));
    }
  });
}

// Pages beyond 2^31 and 2^32 bytes, in memory that exists only where it is touched.
TEST(KeyView, PagesFartherApartThan32BitsReach) {
  constexpr std::int64_t kStride = 8448 / 4, kPages = 520000;  // 8448 bytes a page
  const auto bytes = static_cast<std::size_t>(kStride * kPages * 4);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
  const PagedKeys keys(DType::kF32, {128}, 8, 64, 0);
  KeyView far = keys.view({});
  far.data = make_tensor(memory, DType::kF32, {kPages, 64, 8});
  far.data.strides[0] = kStride;
  const Ids table = {254201, 519999};
  for (std::int64_t j = 0; j < 128; ++j) {
    std::memcpy(
        far.data.as<float>() + table[static_cast<std::size_t>(j / 64)] * kStride + j % 64 * 8,
        keys.alone[0].view().as<float>() + j * 8, 32);
  }
  const Step step(DType::kF32, 2, 8, 128, 10, {0}, {0}, {128}),
      alone(DType::kF32, 2, 8, 128, 10, {0}, {0}, {128});
  far.block_table = make_tensor(table.data(), DType::kI32, {1, 2});
  far.row_request = step.request;
  for_each_implementation(step.topk_args(far), [&](const std::string& name) {
    step.run(far, name);
    alone.run(keys.alone[0].view(), name);
    EXPECT_TRUE(same_row(step.scores, 0, alone.scores));
    EXPECT_TRUE(same_row(step.indices, 0, alone.indices));
  });
  munmap(memory, bytes);
}

// Four requests decode side by side, each with a key at position 0 that answers its query: all four
// are selected, and so by the request alone.
TEST(KeyView, TheNeedleOfEveryRequestIsSelected) {
  constexpr std::int64_t kLength = 4096, kDim = 16;
  const PagedKeys keys(DType::kF32, Ids64(4, kLength), kDim, 64);
  const Step step(DType::kF32, 1, kDim, kLength, 64, {3, 0, 2, 1}, Ids(4, 0), Ids(4, kLength));
  for (std::int64_t i = 0; i < 4; ++i) {
    const std::int64_t request = step.request.view().as<std::int32_t>()[i];
    step.weights.view().as<float>()[i] = 1;
    auto* needle = reinterpret_cast<float*>(keys.key(keys.entry(request, 0), 0));
    for (std::int64_t d = 0; d < kDim; ++d)
      needle[d] = 3 * step.query.view().as<float>()[i * kDim + d];
  }
  for_each_implementation(step.topk_args(keys.view(step.request)), [&](const std::string& name) {
    step.run(keys.view(step.request), name);
    for (std::int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(step.ids(i).size(), 64u);
      EXPECT_EQ(step.ids(i)[0], 0) << i;
    }
  });
}

// An idle step of padding alone: no request, no page, no key.
TEST(KeyView, AStepWithoutRequestsIsFine) {
  const Step step(DType::kF32, 2, 4, 8, 3, {0, -1, 5, 0}, Ids(4, 0), {0, 0, 8, -1});
  const Guarded pool(DType::kF32, {0, 16, 4}), table(DType::kI32, {0, 2}),
      none(DType::kI32, {0, 0});
  for (const Tensor& t : {table.view(), none.view()}) {
    const KeyView keys(pool, t, step.request);
    for_each_implementation(step.topk_args(keys), [&](const std::string& name) {
      step.run(keys, name);
      for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(step.ids(i), Ids{});
    });
  }
}

TEST(KeyView, ValidationNamesBadPagesAndRequests) {
  const PagedKeys keys(DType::kF32, {20, 30}, 4, 8);
  const Step step(DType::kF32, 2, 4, 40, 6, {0, 1, 9}, {0, 8, 0}, {20, 30, 0});
  set_validation(true);
  auto message = [&] {
    const IndexTopkArgs args = step.topk_args(keys.view(step.request));
    Scratch scratch;
    return error_of([&] { index_topk(args, scratch.get(index_topk_workspace_bytes(args))); });
  };
  EXPECT_EQ(message(), "");
  keys.entry(1, 0) = -7;  // outside row 1's range
  EXPECT_EQ(message(), "");
  keys.entry(1, 3) = static_cast<std::int32_t>(keys.pages);
  EXPECT_EQ(message(),
            "[index_topk] block_table must hold pages from 0 to 8, got 9 for request 1 column 3");
  step.request.view().as<std::int32_t>()[0] = 2;
  EXPECT_EQ(message(), "[index_topk] row_request must be from 0 to 1, got 2 in row 0");
  set_validation(false);
  EXPECT_EQ(message(), "");
}

TEST(KeyView, Errors) {
  const PagedKeys keys(DType::kF32, {20, 30}, 4, 8);
  const Step step(DType::kF32, 2, 4, 30, 6, {0, 1}, {0, 0}, {20, 30});
  auto message = [&](auto&& change) {
    KeyView view = keys.view(step.request);
    change(view);
    return error_of([&] { index_topk_workspace_bytes(step.topk_args(view)); });
  };
  EXPECT_EQ(message([](KeyView&) {}), "");
  EXPECT_EQ(message([](KeyView& v) { v.data = v.data.channels(0, 3); }),
            "[index_topk] index_key must be [pages, page_size, index_dim] = [any, any, 4], got f32 "
            "[9, 8, 3]");
  EXPECT_EQ(message([](KeyView& v) { v.data.shape[1] = 0; }),
            "[index_topk] a page must hold at least one key, got f32 [9, 0, 4]");
  EXPECT_EQ(message([](KeyView& v) { v.block_table = {}; }),
            "[index_topk] index_key must be [keys, index_dim] = [any, 4], got f32 [9, 8, 4]");
  EXPECT_EQ(message([](KeyView& v) { v.block_table.dtype = DType::kI64; }),
            "[index_topk] block_table must be of dtype i32, got i64");
  EXPECT_EQ(message([](KeyView& v) { v.row_request = {}; }),
            "[index_topk] row_request must be [rows] = [2], got nothing");
  EXPECT_EQ(message([](KeyView& v) { v.row_request.shape[0] = 3; }),
            "[index_topk] row_request must be [rows] = [2], got i32 [3]");
  KeyView piece = keys.alone[0].view();
  piece.row_request = step.request;
  EXPECT_EQ(error_of([&] { index_topk_workspace_bytes(step.topk_args(piece)); }),
            "[index_topk] row_request must be left out where block_table is, got i32 [2]");
  IndexTopkArgs args = step.topk_args(keys.view(step.request));
  args.topk_lengths.data = args.index_key.row_request.data;
  EXPECT_EQ(error_of([&] { index_topk_workspace_bytes(args); }),
            "[index_topk] topk_lengths must not share memory with row_request, but they overlap");
}

}  // namespace
}  // namespace winnow::testing
