// The processes of a run and what each has to do with the others.
//
// cp x dp ranks: rank r is number r % cp of a context group, whose members hold the rows of one
// micro-batch between them, and belongs to share r / cp of a step's sequences. Every rank has the
// whole model. Gradients and losses are sums over all ranks, in their order, so every rank makes
// the same step and has the same weights, bit for bit.
#pragma once

#include <memory>

#include "train/config.h"
#include "winnow/communicator.h"

namespace winnow::train {

class Ranks {
 public:
  Ranks();  // this process alone
  // `world` must outlive it and have cp x dp ranks (for_ranks).
  Ranks(Communicator& world, const ParallelConfig& parallel);

  Communicator& world() const { return *world_; }
  Communicator& context() const { return *context_; }
  std::int64_t shares() const { return world_->size() / context_->size(); }
  std::int64_t share() const { return world_->rank() / context_->size(); }
  bool first() const { return world_->rank() == 0; }  // the one that writes

 private:
  std::unique_ptr<Communicator> alone_;
  Communicator* world_;
  std::unique_ptr<Communicator> context_;
};

// The configuration as these ranks run it: parallel.dp is set where it was left open. Ranks that do
// not fit it are an error.
TrainConfig for_ranks(TrainConfig config, std::int64_t ranks);

// Throws on all ranks (comm::GroupError), naming one that differs from rank 0, unless all have the
// same configuration and text and begin alike. data.path may differ: the text is what counts.
void check_same_run(const Ranks& ranks, const TrainConfig& config, std::uint64_t text_fingerprint,
                    int begin);

}  // namespace winnow::train
