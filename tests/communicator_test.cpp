// The group of one, the rules that every engine shares, and what a build without MPI says. Several
// ranks are in tests/mpi.
#include "winnow/communicator.h"

#include <vector>

#include "comm/collectives.h"
#include "tests/files.h"

namespace winnow {
namespace {

TEST(Communicator, TheGroupOfOneGivesBackWhatItIsGiven) {
  const std::unique_ptr<Communicator> one = single_communicator();
  EXPECT_EQ(one->size(), 1);
  EXPECT_EQ(one->rank(), 0);
  const std::vector<float> mine = {1, -0.0f, 3};
  std::vector<float> all(3);
  comm::all_gather<float>(*one, mine, all);
  EXPECT_EQ(all, mine);
  std::fill(all.begin(), all.end(), 0.0f);
  one->all_to_all(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  EXPECT_EQ(all, mine);
  one->broadcast(std::as_writable_bytes(std::span(all)), 0);
  comm::sum(*one, all);
  EXPECT_EQ(all, mine);
  std::vector<float> part(3);
  comm::reduce_scatter_sum(*one, mine, part);
  EXPECT_EQ(part, mine);
  one->barrier();
  EXPECT_EQ(one->split(3, 9)->size(), 1);
}

TEST(Communicator, WrongSizesAndRootsAreErrors) {
  const std::unique_ptr<Communicator> one = single_communicator();
  std::vector<std::byte> some(12), more(13);
  const auto refused = [](auto&& call) { return error_of(Status::kInvalidArgument, call); };
  EXPECT_TRUE(has(refused([&] { one->all_gather(some, more); }),
                  "[communicator] all_gather of 12 bytes must have room for 1 times as many"));
  EXPECT_TRUE(
      has(refused([&] { one->all_to_all(some, more); }), "as it sends, 12, got room for 13"));
  EXPECT_TRUE(has(refused([&] { one->all_gather(some, some); }), "must not overlap"));
  EXPECT_TRUE(has(refused([&] { one->broadcast(some, 1); }), "a rank from 0 to 0, got 1"));
  EXPECT_TRUE(has(refused([&] { one->split(-1, 0); }), "color must be from 0"));
  EXPECT_TRUE(has(refused([&] { one->split(0, std::int64_t{1} << 31); }), "key must be from 0"));
}

TEST(Communicator, ABuildWithoutMpiSaysHowToGetIt) {
  if (mpi_refusal().empty()) GTEST_SKIP() << "this build has MPI";
  EXPECT_TRUE(has(error_of(Status::kUnsupported, [] { mpi_communicator(); }), "libopenmpi-dev"));
}

}  // namespace
}  // namespace winnow
