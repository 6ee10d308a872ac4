// The MPI engine on 1, 2 and 4 ranks, with messages whole and cut into pieces.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "comm/collectives.h"
#include "comm/mpi.h"
#include "tests/files.h"
#include "tests/mpi/world.h"
#include "winnow/validation.h"

namespace winnow {
namespace {

// Byte `at` of the message that `from` has for `to`.
std::byte byte_of(std::int64_t from, std::int64_t to, std::int64_t at) {
  return static_cast<std::byte>((from * 31 + to * 7 + at * 13 + 5) % 251);
}

std::vector<std::byte> message(std::int64_t from, std::int64_t to, std::int64_t bytes) {
  std::vector<std::byte> all;
  for (std::int64_t i = 0; i < bytes; ++i) all.push_back(byte_of(from, to, i));
  return all;
}

void append(std::vector<std::byte>& all, const std::vector<std::byte>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

void moves(Communicator& group, std::int64_t bytes) {
  const std::int64_t ranks = group.size(), me = group.rank();
  std::vector<std::byte> expected, send;
  for (std::int64_t r = 0; r < ranks; ++r) append(expected, message(r, 0, bytes));
  std::vector<std::byte> received(expected.size());
  group.all_gather(message(me, 0, bytes), received);
  EXPECT_EQ(received, expected);

  expected.clear();
  for (std::int64_t r = 0; r < ranks; ++r) {
    append(send, message(me, r, bytes));
    append(expected, message(r, me, bytes));
  }
  group.all_to_all(send, received);
  EXPECT_EQ(received, expected);

  for (std::int64_t root = 0; root < ranks; ++root) {
    std::vector<std::byte> data = message(me, 3, bytes);
    group.broadcast(data, root);
    EXPECT_EQ(data, message(root, 3, bytes));
  }
}

TEST(MpiCommunicator, MovesBytesInTheOrderOfRanks) {
  for (const std::int64_t bytes : {0, 1, 5, 64, 1000, 100'000}) moves(world(), bytes);
}

// Pieces of 7 bytes: what messages of more than 2^30 bytes go through.
TEST(MpiCommunicator, LargeMessagesGoInPieces) {
  const std::unique_ptr<Communicator> group = comm::mpi_communicator(7);
  for (const std::int64_t bytes : {1, 6, 7, 8, 14, 100}) moves(*group, bytes);
}

TEST(MpiCommunicator, SplitsByColorInTheOrderOfKeys) {
  const std::int64_t ranks = world().size(), me = world().rank();
  const std::unique_ptr<Communicator> half = world().split(me % 2, ranks - me);
  EXPECT_EQ(half->size(), ranks / 2 + (me % 2 == 0 ? ranks % 2 : 0));
  const std::int64_t mine[] = {me};
  std::vector<std::int64_t> members(static_cast<std::size_t>(half->size()));
  comm::all_gather<std::int64_t>(*half, mine, members);
  for (std::size_t i = 0; i < members.size(); ++i) {
    EXPECT_EQ(members[i] % 2, me % 2);
    if (i > 0) {
      EXPECT_LT(members[i], members[i - 1]);
    }
  }
  EXPECT_EQ(members[static_cast<std::size_t>(half->rank())], me);
  moves(*half, 100);
}

TEST(MpiCommunicator, WrongSizesAndRootsAreErrors) {
  const std::int64_t ranks = world().size();
  std::vector<std::byte> some(static_cast<std::size_t>(12 * ranks)), more(some.size() + 1);
  const auto refused = [](auto&& call) { return error_of(Status::kInvalidArgument, call); };
  EXPECT_TRUE(has(refused([&] { world().all_gather(std::span(some).first(12), more); }),
                  "[communicator] all_gather of 12 bytes must have room for"));
  EXPECT_TRUE(has(refused([&] { world().all_to_all(some, more); }), "as it sends"));
  if (ranks > 1) {
    std::vector<std::byte> other = more;
    EXPECT_TRUE(has(refused([&] { world().all_to_all(more, other); }), "as many bytes to each"));
  }
  EXPECT_TRUE(has(refused([&] { world().all_to_all(some, some); }), "must not overlap"));
  for (const std::int64_t root : {std::int64_t{-1}, ranks}) {
    EXPECT_TRUE(has(refused([&] { world().broadcast(some, root); }), "must be a rank from 0 to"));
  }
  EXPECT_TRUE(has(refused([&] { world().split(-1, 0); }), "color must be from 0"));
}

TEST(MpiCommunicator, ValidationNamesTheRankWhoseCallDiffers) {
  if (world().size() == 1) GTEST_SKIP() << "needs two ranks";
  set_validation(true);
  std::vector<std::byte> data(world().rank() == 1 ? 8 : 16);
  const std::string error = error_of(Status::kInvalidArgument, [&] { world().broadcast(data, 0); });
  EXPECT_TRUE(has(error, "broadcast of 16 bytes from 0 on rank 0"));
  EXPECT_TRUE(has(error, "broadcast of 8 bytes from 0 on rank 1"));
  const std::string other = error_of(Status::kInvalidArgument, [&] {
    if (world().rank() == 0) {
      world().barrier();
    } else {
      world().broadcast(data, 0);
    }
  });
  EXPECT_TRUE(has(other, "barrier on rank 0"));
  moves(world(), 10);
  set_validation(false);
}

// Summands of very different sizes, so that another order gives other bits.
template <class T>
T summand(std::int64_t rank, std::int64_t i) {
  const T scale[] = {1, static_cast<T>(1e8), static_cast<T>(-1e8), static_cast<T>(1e-3)};
  return scale[(rank + i) % 4] * (static_cast<T>(1) + static_cast<T>(i % 97) / 64) / 3;
}

template <class T>
T sum_in_order(std::int64_t ranks, std::int64_t i) {
  T sum = summand<T>(0, i);
  for (std::int64_t r = 1; r < ranks; ++r) sum += summand<T>(r, i);
  return sum;
}

template <class T>
void sums(std::int64_t count) {
  const std::int64_t ranks = world().size(), me = world().rank();
  std::vector<T> data, expected;
  for (std::int64_t i = 0; i < count; ++i) {
    data.push_back(summand<T>(me, i));
    expected.push_back(sum_in_order<T>(ranks, i));
  }
  comm::sum(world(), std::span(data));
  EXPECT_EQ(data, expected);
}

TEST(MpiCommunicator, SumsInTheOrderOfRanks) {
  if (world().size() == 4) {  // the order matters: it would not be noticed otherwise
    int differ = 0;
    for (std::int64_t i = 0; i < 100; ++i) {
      const float other = (summand<float>(3, i) + summand<float>(2, i)) +
                          (summand<float>(1, i) + summand<float>(0, i));
      differ += other != sum_in_order<float>(4, i) ? 1 : 0;
    }
    EXPECT_GT(differ, 20);
  }
  // Small, with every remainder, and more than a block that is on its way at a time.
  for (const std::int64_t count : {0, 1, 2, 3, 4, 5, 1001, 70'003, 4'200'003}) sums<float>(count);
  for (const std::int64_t count : {1, 7, 70'003}) sums<double>(count);
}

TEST(MpiCommunicator, SumsManyArraysAsOne) {
  std::vector<std::vector<float>> arrays;
  std::vector<std::span<float>> views;
  std::int64_t i = 0;
  for (const std::size_t count : {3u, 0u, 70'001u, 1u, 500u}) {
    arrays.emplace_back(count);
    for (float& x : arrays.back()) x = summand<float>(world().rank(), i++);
  }
  views.assign(arrays.begin(), arrays.end());
  comm::sum(world(), views);
  i = 0;
  for (const std::vector<float>& array : arrays) {
    for (const float x : array) ASSERT_EQ(x, sum_in_order<float>(world().size(), i++)) << i;
  }
}

TEST(MpiCommunicator, ReduceScatterGivesEachItsPartOfTheSum) {
  const std::int64_t ranks = world().size(), me = world().rank(), part = 1237;
  std::vector<float> parts, mine(static_cast<std::size_t>(part)), expected;
  for (std::int64_t i = 0; i < part * ranks; ++i) parts.push_back(summand<float>(me, i));
  comm::reduce_scatter_sum(world(), parts, mine);
  for (std::int64_t i = 0; i < part; ++i) {
    expected.push_back(sum_in_order<float>(ranks, me * part + i));
  }
  EXPECT_EQ(mine, expected);
  EXPECT_TRUE(has(error_of(Status::kInvalidArgument,
                           [&] {
                             comm::reduce_scatter_sum(world(), std::span<const float>(parts),
                                                      std::span(mine).first(3));
                           }),
                  "[sum] reduce_scatter_sum"));
}

}  // namespace
}  // namespace winnow
