// Programs of several processes: how they were started, and how they end.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "winnow/communicator.h"

namespace winnow::comm {

// What a launcher of MPI (mpirun, srun) said in the environment: how many processes it started, and
// which of them this is. One, and the first, where there was none.
struct Launch {
  std::int64_t ranks = 1, rank = 0;
};
Launch launch();

// Runs `body` on all processes that were started together, in a group of one where there was no
// launcher, and ends them all alike. Returns the exit status.
//
// - An error that all ranks share (comm/agree.h) is told to `say` on rank 0, once.
// - Any other exception is told with the rank's name, and ends all processes at once: the others
//   may be waiting for this one for ever.
// - A rank that is killed is named by the launcher, which ends the others.
//
// In a group of one exceptions pass through.
int run_ranks(const std::function<int(Communicator&)>& body,
              const std::function<void(const std::string&)>& say);

// Ranks on the same processors share them: sets each one's threads to its part. What a rank may run
// on is what the launcher bound it to. Results do not depend on it.
void share_threads(Communicator& world);

}  // namespace winnow::comm
