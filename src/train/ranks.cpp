#include "train/ranks.h"

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "comm/agree.h"

namespace winnow::train {
namespace {

constexpr const char* kOperation = "train";

}  // namespace

Ranks::Ranks()
    : alone_(single_communicator()), world_(alone_.get()), context_(world_->split(0, 0)) {}

Ranks::Ranks(Communicator& world, const ParallelConfig& parallel)
    : world_(&world), context_(world.split(world.rank() / parallel.cp, world.rank())) {}

TrainConfig for_ranks(TrainConfig config, std::int64_t ranks) {
  ParallelConfig& p = config.parallel;
  if (p.dp == 0) {
    WINNOW_CHECK(kOperation, ranks % p.cp == 0,
                 "parallel.cp must divide the {} processes that were started, got {}: start a "
                 "multiple of {} (mpirun -n {})",
                 ranks, p.cp, p.cp, p.cp);
    p.dp = ranks / p.cp;
  }
  WINNOW_CHECK(kOperation, p.cp * p.dp == ranks,
               "parallel.cp x parallel.dp = {} x {} needs {} processes, got {}: start as many "
               "(mpirun -n {} winnow train ...), or leave parallel.dp out, which is then what fits",
               p.cp, p.dp, p.cp * p.dp, ranks, p.cp * p.dp);
  Rules strict;
  check_parallel(config, strict);
  return config;
}

void check_same_run(const Ranks& ranks, const TrainConfig& config, std::uint64_t text_fingerprint,
                    int begin) {
  nlohmann::json mine = write_train_config(config);
  mine["data"].erase("path");
  mine["--resume"] = begin;
  mine["the text of data.path"] = text_fingerprint;
  const std::string first = comm::text_of_first(ranks.world(), mine.dump());
  comm::together(ranks.world(), [&] {
    const std::string difference = first_difference(nlohmann::json::parse(first), mine);
    WINNOW_CHECK(kOperation, difference.empty(),
                 "{} differs from that of rank 0: start all ranks alike, with the same file",
                 difference);
  });
}

}  // namespace winnow::train
