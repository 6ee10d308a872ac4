// In place of mpi.cpp where CMake finds no MPI.
#include <cstdlib>

#include "base/check.h"
#include "comm/mpi.h"

namespace winnow {
namespace comm {

std::unique_ptr<Communicator> mpi_communicator(std::int64_t) {
  fail(Status::kUnsupported, "mpi", "{}", mpi_refusal());
}

void mpi_abort(int status) { std::_Exit(status); }

const std::string& mpi_version() {
  static const std::string none;
  return none;
}

}  // namespace comm

std::unique_ptr<Communicator> mpi_communicator() {
  return comm::mpi_communicator(comm::kMessageBytes);
}

const std::string& mpi_refusal() {
  static const std::string refusal =
      "this winnow was built without MPI: install it (Debian: libopenmpi-dev and openmpi-bin), "
      "then "
      "configure and build again";
  return refusal;
}

}  // namespace winnow
