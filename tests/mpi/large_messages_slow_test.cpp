// Messages of more than 2^31 bytes, which MPI cannot count in one call. Takes 4 GiB a rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/mpi/world.h"

namespace winnow {
namespace {

constexpr std::size_t kPart = (std::size_t{1} << 30) + 12345;

// A byte at every place, which tells ranks and pieces apart; as words, for speed.
void fill(std::span<std::byte> data, std::uint64_t from, std::uint64_t to) {
  std::uint64_t word = from * 1000003 + to * 7919 + 1;
  for (std::size_t i = 0; i < data.size(); i += 8) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    const auto* bytes = reinterpret_cast<const std::byte*>(&word);
    std::copy_n(bytes, std::min<std::size_t>(8, data.size() - i), data.data() + i);
  }
}

bool holds(std::span<const std::byte> data, std::uint64_t from, std::uint64_t to) {
  std::vector<std::byte> expected(data.size());
  fill(expected, from, to);
  return std::equal(data.begin(), data.end(), expected.begin());
}

class LargeMessages : public testing::Test {
 protected:
  void SetUp() override {
    if (world().size() != 2) GTEST_SKIP() << "for two ranks";
  }
  std::uint64_t me_ = static_cast<std::uint64_t>(world().rank());
};

TEST_F(LargeMessages, AreGathered) {
  std::vector<std::byte> mine(kPart), all(2 * kPart);
  fill(mine, me_, 0);
  world().all_gather(mine, all);
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_TRUE(holds(std::span(all).subspan(r * kPart, kPart), r, 0)) << r;
  }
}

TEST_F(LargeMessages, AreExchanged) {
  std::vector<std::byte> send(2 * kPart), receive(2 * kPart);
  for (std::size_t r = 0; r < 2; ++r) fill(std::span(send).subspan(r * kPart, kPart), me_, r);
  world().all_to_all(send, receive);
  send = {};
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_TRUE(holds(std::span(receive).subspan(r * kPart, kPart), r, me_)) << r;
  }
}

TEST_F(LargeMessages, AreBroadcast) {
  std::vector<std::byte> data(2 * kPart);
  fill(data, me_, 5);
  world().broadcast(data, 1);
  EXPECT_TRUE(holds(data, 1, 5));
}

}  // namespace
}  // namespace winnow
