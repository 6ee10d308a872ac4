#include "plan/plan.h"

#include <algorithm>

namespace winnow::plan {
namespace {

double number(std::int64_t n) { return static_cast<double>(n); }

// A step of one rank: tokens, and pairs of each layer. Zigzag gives every rank the same.
struct Share {
  double tokens = 0;
  Pairs pairs;
};

std::vector<std::int64_t> lengths_of(const PlanConfig& c) {
  return c.lengths.empty() ? std::vector<std::int64_t>{c.context} : c.lengths;
}

Share share_of_rank(const PlanConfig& c) {
  const std::vector<std::int64_t> lengths = lengths_of(c);
  const double part = number(c.batch_sequences) / number(c.dp * c.cp);
  Share share;
  for (const std::int64_t length : lengths) share.tokens += number(length) * part;
  share.pairs = exact_pairs(lengths, c.model.attention.indexer);
  share.pairs.visible *= part;
  share.pairs.scored *= part;
  share.pairs.selected *= part;
  return share;
}

Flops stage_flops(const PlanConfig& c, const Stage& stage, const Share& share) {
  Flops flops;
  if (stage.loss) flops += loss_flops(c, share.tokens);
  for (std::int64_t n = 0; n < stage.layers; ++n) {
    flops += layer_flops(c, stage.first_layer + n, 0, share.tokens, share.pairs);
  }
  for (std::int64_t d = 0; d < std::min(stage.mtp_depths, depths_run(c)); ++d) {
    flops += depth_flops(c, share.tokens);
    for (std::int64_t n = 1; n <= mtp_layers(c); ++n) {
      flops += layer_flops(c, c.model.layers + n, d, share.tokens, share.pairs);
    }
  }
  return flops;
}

std::vector<std::int64_t> computing_layers(const PlanConfig& c, const Stage& stage) {
  std::vector<std::int64_t> computing;
  const auto add = [&](std::int64_t layer) {
    if (c.is_dsa(layer) && computes_indices(c.model.sharing, layer)) computing.push_back(layer);
  };
  for (std::int64_t n = 0; n < stage.layers; ++n) add(stage.first_layer + n);
  for (std::int64_t n = 1; stage.mtp_depths > 0 && n <= mtp_layers(c); ++n) add(c.model.layers + n);
  return computing;
}

double stage_seconds(const PlanConfig& c, const PlannedStage& stage) {
  const Machine& machine = *find_machine(c.machine);
  // Weights are read forward and twice backward, for every micro-batch.
  const double bytes = 3 * stage.memory.weights * number(c.micro_batches());
  return std::max(stage.flops.total() / machine.flops(c.dtype), bytes / machine.bandwidth) /
         c.efficiency;
}

}  // namespace

Plan make_plan(const PlanConfig& c, const PipelineLayout& layout) {
  Plan plan;
  plan.layout = layout;
  plan.scores = score_chunks(c);
  plan.ranks = c.pp * c.cp * c.dp;
  const Share share = share_of_rank(c);
  const double everywhere = number(c.dp * c.cp);
  plan.tokens = share.tokens * everywhere;

  std::vector<double> seconds(static_cast<std::size_t>(layout.ranks));
  std::vector<double> shared(seconds.size());  // what the stages of a rank use in turns
  plan.rank_memory.resize(seconds.size());
  for (const Stage& stage : layout.stages) {
    PlannedStage planned;
    planned.stage = stage;
    planned.computing = computing_layers(c, stage);
    planned.flops = stage_flops(c, stage, share);
    planned.memory = stage_memory(c, layout, stage);
    planned.seconds = stage_seconds(c, planned);
    const auto rank = static_cast<std::size_t>(stage.rank);
    seconds[rank] += planned.seconds;
    const double in_turns = planned.memory.temporaries + planned.memory.workspace;
    shared[rank] = std::max(shared[rank], in_turns);
    plan.rank_memory[rank] += planned.memory.total() - in_turns;
    plan.flops += planned.flops;
    plan.stages.push_back(std::move(planned));
  }
  for (std::size_t r = 0; r < shared.size(); ++r) plan.rank_memory[r] += shared[r];
  plan.flops *= everywhere;

  double squares = 0;
  for (const std::int64_t length : lengths_of(c)) squares += number(length) * number(length);
  squares *= number(c.batch_sequences);
  plan.mean_flops =
      model_flops(c, plan.tokens, mean_pairs(plan.tokens, squares, c.model.attention.indexer))
          .total();

  // One forward and one backward in turns: the pipeline fills and empties once a step.
  const double slowest = *std::max_element(seconds.begin(), seconds.end());
  const double rounds = number(c.micro_batches() * layout.virtual_stages);
  plan.seconds = slowest * (1 + number(layout.ranks - 1) / rounds);
  plan.idle = 1 - slowest / plan.seconds;
  return plan;
}

}  // namespace winnow::plan
