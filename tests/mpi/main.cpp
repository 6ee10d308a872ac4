// Runs the tests of a file on every rank at once. Rank 0 reports; of the others only what failed.
#include <gtest/gtest.h>

#include <cstdio>

#include "comm/mpi.h"
#include "tests/mpi/world.h"

namespace winnow {
namespace {

std::unique_ptr<Communicator> started;

// One line for each failure, with the rank's name.
class Failures : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", static_cast<int>(started->rank()),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
    std::fflush(stderr);
  }
};

}  // namespace

Communicator& world() { return *started; }

}  // namespace winnow

int main(int argc, char** argv) {
  winnow::started = winnow::mpi_communicator();
  testing::InitGoogleTest(&argc, argv);
  if (winnow::started->rank() > 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new winnow::Failures);
  }
  const int status = RUN_ALL_TESTS();
  winnow::started.reset();
  return status;
}
