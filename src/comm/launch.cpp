#include "comm/launch.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "base/check.h"
#include "comm/agree.h"
#include "comm/collectives.h"
#include "comm/mpi.h"
#include "winnow/threads.h"

namespace winnow::comm {
namespace {

// Which environment variables a launcher sets: Open MPI; MPICH, Intel MPI and srun --mpi=pmi2;
// srun --mpi=pmix.
constexpr std::array<std::array<const char*, 2>, 3> kLaunchers = {{
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
    {"PMI_SIZE", "PMI_RANK"},
    {"SLURM_STEP_NUM_TASKS", "PMIX_RANK"},
}};

// Where a rank runs: its machine and the processors that it may use there.
struct Place {
  std::array<char, 256> machine{};
  cpu_set_t processors{};
  bool operator==(const Place& other) const {
    return machine == other.machine && CPU_EQUAL(&processors, &other.processors);
  }
};

int exit_status(Status status) { return status == Status::kInterrupted ? 130 : 1; }

}  // namespace

Launch launch() {
  for (const auto& [ranks, rank] : kLaunchers) {
    const char *all = std::getenv(ranks), *mine = std::getenv(rank);
    if (all == nullptr || mine == nullptr) continue;
    return {std::max(1l, std::strtol(all, nullptr, 10)), std::strtol(mine, nullptr, 10)};
  }
  return {};
}

int run_ranks(const std::function<int(Communicator&)>& body,
              const std::function<void(const std::string&)>& say) {
  const Launch started = launch();
  if (started.ranks == 1) return body(*single_communicator());
  if (!mpi_refusal().empty()) {  // nobody can be waited for: each ends by itself
    if (started.rank == 0) {
      say(fmt::format("[mpi] {} processes were started together, but {}; or start one",
                      started.ranks, mpi_refusal()));
    }
    return 1;
  }
  const std::unique_ptr<Communicator> world = winnow::mpi_communicator();
  int status = 0;
  try {
    status = body(*world);
  } catch (const GroupError& e) {
    status = exit_status(e.status());
    if (world->rank() == 0) say(e.what());
  } catch (...) {
    const std::string who = name_of(*world, world->rank());
    say(fmt::format("{}: {}", who, message_of(std::current_exception())));
    mpi_abort(1);
  }
  world->barrier();  // the first process that ends with an error takes the others with it
  return status;
}

void share_threads(Communicator& world) {
  Place mine;
  ::gethostname(mine.machine.data(), mine.machine.size() - 1);
  if (::sched_getaffinity(0, sizeof mine.processors, &mine.processors) != 0) return;
  std::vector<Place> all(static_cast<std::size_t>(world.size()));
  all_gather<Place>(world, std::span(&mine, 1), all);
  const auto sharers = static_cast<int>(std::count(all.begin(), all.end(), mine));
  set_num_threads(std::max(1, CPU_COUNT(&mine.processors) / sharers));
}

}  // namespace winnow::comm
