// Ranks that go on together or fail together.
#include "comm/agree.h"

#include <gtest/gtest.h>

#include <new>

#include "comm/launch.h"
#include "tests/files.h"
#include "tests/mpi/world.h"
#include "winnow/threads.h"

namespace winnow::comm {
namespace {

std::string group_error(Status status, const std::function<void()>& body) {
  try {
    together(world(), body);
  } catch (const GroupError& error) {
    EXPECT_EQ(error.status(), status);
    return error.what();
  }
  ADD_FAILURE() << "no GroupError";
  return "";
}

class Agree : public testing::Test {
 protected:
  void SetUp() override {
    if (ranks_ == 1) GTEST_SKIP() << "needs two ranks";
  }
  std::int64_t ranks_ = world().size(), me_ = world().rank();
};

TEST_F(Agree, OneRanksFailureIsEverybodysAndHasItsName) {
  const std::string error = group_error(Status::kCorrupt, [&] {
    if (me_ == ranks_ - 1) throw Error(Status::kCorrupt, "[test] must be whole, got half");
  });
  EXPECT_EQ(error,
            fmt::format("rank {} of {}: [test] must be whole, got half", ranks_ - 1, ranks_));
  EXPECT_EQ(group_error(Status::kIo,
                        [&] {
                          if (me_ == 1) throw std::bad_alloc();
                        }),
            fmt::format("rank 1 of {}: out of memory", ranks_));
}

TEST_F(Agree, TheFirstOfSeveralIsNamed) {
  EXPECT_EQ(group_error(Status::kIo,
                        [&] {
                          if (me_ > 0) throw Error(Status::kIo, fmt::format("by {}", me_));
                        }),
            fmt::format("rank 1 of {}: by 1", ranks_));
}

TEST_F(Agree, WhatAllRanksSayHasNoName) {
  EXPECT_EQ(group_error(Status::kInvalidArgument,
                        [] { throw Error(Status::kInvalidArgument, "[config] no"); }),
            "[config] no");
}

TEST_F(Agree, ResultsComeThrough) {
  EXPECT_EQ(together(world(), [&] { return std::to_string(me_); }), std::to_string(me_));
  EXPECT_EQ(text_of_first(world(), fmt::format("text of {}{}", me_, std::string(me_, 'x'))),
            "text of 0");
  for (std::int64_t r = 0; r < ranks_; ++r) EXPECT_TRUE(any(world(), me_ == r));
  EXPECT_FALSE(any(world(), false));
}

TEST_F(Agree, RanksOnTheSameProcessorsShareThem) {
  set_num_threads(1000);
  share_threads(world());
  EXPECT_GE(num_threads(), 1);
  EXPECT_LE(num_threads() * ranks_, std::max<std::int64_t>(ranks_, sysconf(_SC_NPROCESSORS_ONLN)));
  EXPECT_EQ(launch().ranks, ranks_);
  EXPECT_EQ(launch().rank, me_);
}

}  // namespace
}  // namespace winnow::comm
