// Ids of the key space and positions inside requests: the converter, written once more by hand.
#include "winnow/ids.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "tests/each.h"
#include "winnow/index_topk.h"
#include "winnow/select_topk.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();

Ids values(const Array& a) { return {a.as<std::int32_t>(), a.as<std::int32_t>() + a.elements()}; }

// Three packed requests, one query each: the ranges [0, 5), [5, 12), [12, 14).
TEST(Ids, ThereAndBackIsTheSameForEveryRow) {
  const Array base = ints({3}, {0, 5, 12}), length = ints({3}, {5, 7, 2});
  const Array keys = ints({3, 3}, {0, 4, -1, 5, 8, 11, 12, 13, -1});
  const Array positions(DType::kI32, {3, 3}), back(DType::kI32, {3, 3});
  convert_ids(KeyIds{keys}, {base, length}, RequestIds{positions});
  EXPECT_EQ(values(positions), (Ids{0, 4, -1, 0, 3, 6, 0, 1, -1}));
  convert_ids(RequestIds{positions}, {base, length}, KeyIds{back});
  EXPECT_EQ(values(back), values(keys));
}

TEST(Ids, OutsideTheRowsRequestIsNoId) {
  const Array base = ints({3}, {0, 5, 12}), length = ints({3}, {5, 7, 2});
  const Array keys = ints({3, 4}, {5, 4, kMax, kMin, 4, 12, 5, -2, 11, 14, 12, 0});
  const Array positions(DType::kI32, {3, 4});
  convert_ids(KeyIds{keys}, {base, length}, RequestIds{positions});
  EXPECT_EQ(values(positions), (Ids{-1, 4, -1, -1, -1, -1, 0, -1, -1, -1, 0, -1}));
  const Array inside = ints({3, 4}, {4, 5, -1, kMin, 6, 7, kMax, 0, 1, 2, -7, 0});
  const Array out(DType::kI32, {3, 4});
  convert_ids(RequestIds{inside}, {base, length}, KeyIds{out});
  EXPECT_EQ(values(out), (Ids{4, -1, -1, -1, 11, -1, -1, 5, 13, -1, -1, 12}));
}

// A padding row, a negative length, and bases at the end of what an id can say.
TEST(Ids, EmptyRequestsAndTheLargestIds) {
  const Array base = ints({4}, {3, 3, kMax - 4, kMax - 4}), length = ints({4}, {0, -5, 10, 3});
  const Array keys = ints({4, 2}, {3, 4, 3, -1, kMax - 4, kMax - 1, kMax - 2, kMax - 1});
  const Array positions(DType::kI32, {4, 2}), back(DType::kI32, {4, 2});
  convert_ids(KeyIds{keys}, {base, length}, RequestIds{positions});
  EXPECT_EQ(values(positions), (Ids{-1, -1, -1, -1, 0, 3, 2, -1}));
  const Array far = ints({4, 2}, {0, 0, 0, 0, 3, 4, 2, 3});
  convert_ids(RequestIds{far}, {base, length}, KeyIds{back});
  // 2^31 - 1 is an extent, not an id.
  EXPECT_EQ(values(back), (Ids{-1, -1, -1, -1, kMax - 1, -1, kMax - 2, -1}));
}

TEST(Ids, InPlaceAndStrided) {
  const Array base = ints({2}, {10, 20}), length = ints({2}, {5, 5});
  const Array ids = ints({2, 4}, {12, 99, 14, 99, 21, 99, 25, 99});
  Tensor every_second = ids.view();
  every_second.shape[1] = 2;
  every_second.strides[1] = 2;
  convert_ids(KeyIds{every_second}, {base, length}, RequestIds{every_second});
  EXPECT_EQ(values(ids), (Ids{2, 99, 4, 99, 1, 99, -1, 99}));
  convert_ids(RequestIds{every_second}, {base, length}, KeyIds{every_second});
  EXPECT_EQ(values(ids), (Ids{12, 99, 14, 99, 21, 99, -1, 99}));
}

// A row that starts at key 100: the call's ids are of the key space, and 103 is position 3.
TEST(Ids, SelectionGivesKeySpaceIds) {
  const Array scores = floats(DType::kF32, {1, 8}, {0, 1, 2, 9, 4, 5, 6, 7});
  const Array starts = ints({1}, {100}), ends = ints({1}, {108});
  const Array ids(DType::kI32, {1, 1}), lengths(DType::kI32, {1}), local(DType::kI32, {1, 1});
  const SelectTopkArgs args = {scores, starts, ends, ids, lengths, {}};
  for_each_implementation(args, [&](const std::string&) {
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    EXPECT_EQ(values(ids), Ids{103});
    convert_ids(KeyIds{ids}, {starts, ints({1}, {8})}, RequestIds{local});
    EXPECT_EQ(values(local), Ids{3});
  });
}

// Keys dealt to two ranks: {0, 3, 4, 9} of 10.
TEST(Ids, ShardsOwnTheirPositions) {
  const Array ids = ints({1, 4}, {0, 3, 4, 9});
  const Array local(DType::kI32, {1, 4}), back(DType::kI32, {1, 4});
  auto part = [&](const Shard& shard) {
    to_shard(RequestIds{ids}, shard, RequestIds{local});
    from_shard(RequestIds{local}, shard, RequestIds{back});
    return std::pair{values(local), values(back)};
  };
  EXPECT_EQ(part({0, 2, 1}), std::pair(Ids({0, -1, 2, -1}), Ids({0, -1, 4, -1})));
  EXPECT_EQ(part({1, 2, 1}), std::pair(Ids({-1, 1, -1, 4}), Ids({-1, 3, -1, 9})));
  EXPECT_EQ(part({0, 2, 4}), std::pair(Ids({0, 3, -1, 5}), Ids({0, 3, -1, 9})));
  EXPECT_EQ(part({1, 2, 4}), std::pair(Ids({-1, -1, 0, -1}), Ids({-1, -1, 4, -1})));
  EXPECT_EQ(shard_length({0, 2, 4}, 10), 6);
  EXPECT_EQ(shard_length({1, 2, 4}, 10), 4);
}

// Every position belongs to one rank, and positions of a rank are 0, 1, 2, ... in order.
TEST(Ids, ShardsCoverEveryPositionOnce) {
  for (const std::int64_t ranks : {1, 2, 3, 8}) {
    for (const std::int64_t interleave : {1, 3, 4, 64}) {
      for (const std::int32_t length : {0, 1, 3, 20, 63, 64, 65, 500}) {
        std::vector<std::int64_t> next(static_cast<std::size_t>(ranks), 0);
        for (std::int32_t j = 0; j < length; ++j) {
          std::int64_t owners = 0;
          for (std::int64_t rank = 0; rank < ranks; ++rank) {
            const Array id = ints({1, 1}, {j});
            to_shard(RequestIds{id}, {rank, ranks, interleave}, RequestIds{id});
            if (values(id)[0] < 0) continue;
            ++owners;
            EXPECT_EQ(values(id)[0], next[static_cast<std::size_t>(rank)]++);
            from_shard(RequestIds{id}, {rank, ranks, interleave}, RequestIds{id});
            EXPECT_EQ(values(id)[0], j);
          }
          EXPECT_EQ(owners, 1);
        }
        for (std::int64_t rank = 0; rank < ranks; ++rank)
          EXPECT_EQ(shard_length({rank, ranks, interleave}, length),
                    next[static_cast<std::size_t>(rank)]);
      }
    }
  }
}

TEST(Ids, Errors) {
  const Array base = ints({2}, {0, 5}), length = ints({2}, {5, 5});
  const Array ids(DType::kI32, {2, 3}), out(DType::kI32, {2, 3}), narrow(DType::kI32, {2, 2});
  auto message = [&](const Tensor& in, const RequestRows& rows, const Tensor& to) {
    return error_of([&] { convert_ids(KeyIds{in}, rows, RequestIds{to}); });
  };
  EXPECT_EQ(message(ids, {base, length}, out), "");
  EXPECT_EQ(message(ids, {base, length}, narrow),
            "[ids] out must be [rows, topk] = [2, 3], got i32 [2, 2]");
  EXPECT_EQ(message(ids, {base, {}}, out), "[ids] length must be [rows] = [2], got nothing");
  EXPECT_EQ(message(ids, {base, length}, ids.view().transposed()),
            "[ids] out must be [rows, topk] = [2, 3], got i32 [3, 2]");
  Tensor shifted = ids;
  shifted.strides[0] = 2;
  EXPECT_EQ(message(ids, {base, length}, shifted),
            "[ids] out must not share memory with ids, but they overlap");
  EXPECT_EQ(error_of([] {
              shard_length({2, 2, 1}, 5);
            }),
            "[ids] rank must be from 0 to ranks - 1, got 2 of 2");
  EXPECT_EQ(error_of([] {
              shard_length({0, 2, 0}, 5);
            }),
            "[ids] interleave must be at least 1, got 0");
}

}  // namespace
}  // namespace winnow::testing
