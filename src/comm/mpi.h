// The MPI engine, for programs that mpirun starts and for tests of its inside.
#pragma once

#include "winnow/communicator.h"

namespace winnow::comm {

// Calls of MPI count in int: larger messages go in pieces of at most this many bytes.
inline constexpr std::int64_t kMessageBytes = std::int64_t{1} << 30;

// mpi_communicator() with another limit.
std::unique_ptr<Communicator> mpi_communicator(std::int64_t message_bytes);

// Ends all processes of the run, this one with them. For the program that owns them; what is to be
// said has been said.
[[noreturn]] void mpi_abort(int status);

const std::string& mpi_version();  // "Open MPI v4.1.4"; "" in a build without it

}  // namespace winnow::comm
