#include "plan/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace winnow::plan {
namespace {

using nlohmann::ordered_json;

// "1.23 P": a number with the prefix that leaves one to three digits before the point.
std::string scaled(double value, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E", "Z", "Y"};
  std::size_t prefix = 0;
  while (value >= 999.5 && prefix + 1 < std::size(kPrefixes)) {
    value /= 1000;
    ++prefix;
  }
  return fmt::format("{:.3g} {}{}", value, kPrefixes[prefix], unit);
}

// "754 billion", "1.22 million"
std::string count_text(double count) {
  if (count >= 1e9) return fmt::format("{:.3g} billion", count / 1e9);
  return count >= 1e6 ? fmt::format("{:.3g} million", count / 1e6) : fmt::format("{:.0f}", count);
}

// "1 rank", "8 ranks"
std::string counted(std::int64_t count, const char* word) {
  return fmt::format("{} {}{}", count, word, count == 1 ? "" : "s");
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} s", seconds);
}

// "1 to 10", "E, 1 to 10", "m*7, L"
std::string layers_text(const Stage& stage) {
  std::vector<std::string> parts;
  if (stage.embedding) parts.emplace_back("E");
  if (stage.layers == 1) parts.push_back(fmt::format("{}", stage.first_layer));
  if (stage.layers > 1) {
    parts.push_back(
        fmt::format("{} to {}", stage.first_layer, stage.first_layer + stage.layers - 1));
  }
  if (stage.mtp_depths > 0) parts.push_back(fmt::format("m*{}", stage.mtp_depths));
  if (stage.loss) parts.emplace_back("L");
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text.empty() ? "nothing" : text;
}

// "1 2 3 7 11", or "all" where every layer of the stage does.
std::string computing_text(const PlannedStage& planned) {
  const Stage& stage = planned.stage;
  const auto count = static_cast<std::int64_t>(planned.computing.size());
  if (count == 0) return "-";
  if (count > 8 && count == stage.layers + (stage.mtp_depths > 0 ? 1 : 0)) return "all";
  std::string text;
  for (const std::int64_t layer : planned.computing) {
    text += fmt::format("{}{}", text.empty() ? "" : " ", layer);
  }
  return text;
}

std::string head_text(const PlanConfig& c, const Plan& plan) {
  double parameters = 0;
  for (const PlannedStage& planned : plan.stages) parameters += planned.memory.parameters;
  std::string text = counted(c.model.layers, "layer");
  if (c.model.mtp_depths > 0) {
    text += fmt::format(", {} of multi-token prediction", counted(c.model.mtp_depths, "depth"));
  }
  text += fmt::format("; {} parameters on {} of a pipeline, {}\n", count_text(parameters),
                      counted(c.pp, "rank"), dtype_name(c.dtype));
  text += fmt::format(
      "step: {} of {} tokens, {} at a time; {} (pp {}, cp {}, dp {}, ep {}); stage "
      "\"{}\"\n",
      counted(c.batch_sequences, "sequence"), c.context, c.micro_batch_sequences,
      counted(plan.ranks, "processor"), c.pp, c.cp, c.dp, c.ep, c.mode().name);
  return text + fmt::format("layout: {}\n", layout_text(plan.layout));
}

// Who needs more memory than the machine has, and what would help; "" if nobody does.
std::string memory_text(const PlanConfig& c, const Plan& plan, const Machine& machine) {
  if (machine.memory == 0) return "";
  const auto most = std::max_element(plan.rank_memory.begin(), plan.rank_memory.end());
  const auto over = std::count_if(plan.rank_memory.begin(), plan.rank_memory.end(),
                                  [&](double bytes) { return bytes > machine.memory; });
  if (over == 0) return "";
  std::string advice = c.moe.experts > c.ep ? "more ranks (pp, cp, ep)" : "more ranks (pp, cp)";
  if (!c.recompute.full) advice += ", recompute [\"full\"]";
  if (!c.shard_optimizer) advice += ", plan.shard_optimizer";
  return fmt::format(
      "memory: {} of {} need more than the {} of {}, rank {} the most: {}; what helps: {}\n", over,
      counted(plan.layout.ranks, "rank"), size_text(machine.memory), machine.name,
      most - plan.rank_memory.begin(), size_text(*most), advice);
}

std::string foot_text(const PlanConfig& c, const Plan& plan) {
  const Machine& machine = *find_machine(c.machine);
  std::string text;
  if (c.mode().attention != attention::AttentionMode::kDense) {
    text += fmt::format(
        "scores: {} of {} rows at a time, {} for each layer that computes; {} of a budget of "
        "{:.3g} "
        "GiB\n",
        plan.scores.rows, c.rows(),
        plan.scores.count == 1 ? "1 launch" : fmt::format("{} launches", plan.scores.count),
        size_text(static_cast<double>(plan.scores.bytes)), c.score_budget_gib);
  }
  text += fmt::format("step: {}, of which the indexers {}; as Megatron Core reckons, {}\n",
                      scaled(plan.flops.total(), "FLOP"),
                      scaled(plan.flops.index_linear + plan.flops.index_core, "FLOP"),
                      scaled(plan.mean_flops, "FLOP"));
  text += fmt::format(
      "time: {}{} a step on {} ({}), {:.0f} % of it waiting for the pipeline: {:.4g} tokens a "
      "second\n",
      c.efficiency == 1 ? "no less than " : "about ", seconds_text(plan.seconds), machine.name,
      machine.text, 100 * plan.idle, plan.tokens / plan.seconds);
  return text + memory_text(c, plan, machine);
}

}  // namespace

std::string plan_text(const PlanConfig& c, const Plan& plan) {
  std::string text = head_text(c, plan);
  std::size_t layers_width = 6, computing_width = 16;
  for (const PlannedStage& planned : plan.stages) {
    layers_width = std::max(layers_width, layers_text(planned.stage).size());
    computing_width = std::max(computing_width, computing_text(planned).size());
  }
  const auto line = [&](auto... cells) {
    return fmt::format(
        "{:>5} {:>5}  {:<{}}  {:<{}} {:>11} {:>11} {:>11} {:>11} {:>11} {:>10} "
        "{:>9}\n",
        cells...);
  };
  text += "\n" + line("stage", "rank", "layers", layers_width, "computes indices", computing_width,
                      "FLOP", "weights", "optimizer", "activations", "other", "memory", "time");
  for (const PlannedStage& p : plan.stages) {
    const StageMemory& m = p.memory;
    text +=
        line(p.stage.number, p.stage.rank, layers_text(p.stage), layers_width, computing_text(p),
             computing_width, scaled(p.flops.total(), ""), size_text(m.weights),
             size_text(m.gradients + m.optimizer), size_text(m.activations + m.selections),
             size_text(m.temporaries + m.workspace + m.tables), size_text(m.total()),
             seconds_text(p.seconds));
  }
  return text + "\n" + foot_text(c, plan);
}

ordered_json plan_json(const PlanConfig& c, const Plan& plan) {
  const auto flops_json = [](const Flops& f) {
    return ordered_json{{"total", f.total()},
                        {"attention_linear", f.attention_linear},
                        {"attention_core", f.attention_core},
                        {"index_linear", f.index_linear},
                        {"index_core", f.index_core},
                        {"mlp", f.mlp},
                        {"mamba", f.mamba},
                        {"mtp", f.mtp},
                        {"loss", f.loss}};
  };
  ordered_json json = {{"violations", ordered_json::array()},
                       {"layout", layout_text(plan.layout)},
                       {"pp", plan.layout.ranks},
                       {"virtual_stages", plan.layout.virtual_stages},
                       {"mtp_standalone", plan.layout.mtp_standalone()},
                       {"processors", plan.ranks},
                       {"tokens", plan.tokens},
                       {"flops", flops_json(plan.flops)},
                       {"flops_megatron", plan.mean_flops},
                       {"machine", c.machine},
                       {"seconds", plan.seconds},
                       {"idle", plan.idle},
                       {"rank_memory_bytes", plan.rank_memory},
                       {"scores",
                        {{"rows", plan.scores.rows},
                         {"launches", plan.scores.count},
                         {"bytes", plan.scores.bytes},
                         {"budget_gib", c.score_budget_gib}}},
                       {"stages", ordered_json::array()}};
  for (const PlannedStage& p : plan.stages) {
    const StageMemory& m = p.memory;
    std::vector<std::int64_t> layers;
    for (std::int64_t n = 0; n < p.stage.layers; ++n) layers.push_back(p.stage.first_layer + n);
    json["stages"].push_back({{"stage", p.stage.number},
                              {"rank", p.stage.rank},
                              {"virtual_stage", p.stage.virtual_stage},
                              {"embedding", p.stage.embedding},
                              {"layers", layers},
                              {"mtp_depths", p.stage.mtp_depths},
                              {"loss", p.stage.loss},
                              {"computes_indices", p.computing},
                              {"flops", flops_json(p.flops)},
                              {"parameters", m.parameters},
                              {"micro_batches_in_flight", m.in_flight},
                              {"memory_bytes",
                               {{"total", m.total()},
                                {"weights", m.weights},
                                {"gradients", m.gradients},
                                {"optimizer", m.optimizer},
                                {"activations", m.activations},
                                {"selections", m.selections},
                                {"temporaries", m.temporaries},
                                {"workspace", m.workspace},
                                {"tables", m.tables}}},
                              {"seconds", p.seconds}});
  }
  return json;
}

std::string violations_text(const Rules& rules) {
  std::string text;
  for (const Violation& v : rules.violations()) {
    text += fmt::format("{}\n", v.text());
    if (!v.instead.empty()) text += fmt::format("    valid: {}\n", v.instead);
  }
  return text;
}

ordered_json violations_json(const Rules& rules) {
  ordered_json list = ordered_json::array();
  for (const Violation& v : rules.violations()) {
    list.push_back(
        {{"option", v.option}, {"rule", v.rule}, {"value", v.value}, {"valid", v.instead}});
  }
  return {{"violations", list}};
}

}  // namespace winnow::plan
