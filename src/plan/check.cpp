#include "plan/check.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "plan/flops.h"
#include "plan/machine.h"

namespace winnow::plan {
namespace {

using attention::AttentionMode;

constexpr std::int64_t kMaxRanks = 65536;
// Counts beyond this are refused by their own rules; here they would overflow.
constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;

bool is_count(std::int64_t value) { return value >= 1 && value <= kMaxCount; }

bool check_ranks(const PlanConfig& c, Rules& rules) {
  bool kept = true;
  const auto count = [&](const char* option, std::int64_t value, std::int64_t least) {
    const bool fits = value >= least && value <= kMaxRanks;
    rules.require(fits, option, value, std::clamp(value, least, kMaxRanks), "must be from {} to {}",
                  least, kMaxRanks);
    kept = kept && fits;
  };
  count("plan.pp", c.pp, 1);
  count("plan.cp", c.cp, 1);
  count("plan.dp", c.dp, 1);
  count("plan.ep", c.ep, 1);
  count("plan.virtual_stages", c.virtual_stages, 0);
  return kept;
}

// Every sequence is cut into 2 cp chunks, of which a rank has the r-th and the r-th from the end.
void check_context_parallel(const PlanConfig& c, Rules& rules) {
  if (!is_count(c.context)) return;
  std::int64_t sum = 0;
  for (const std::int64_t length : c.lengths) {
    rules.require(length >= 0 && length <= c.context, "plan.lengths", length,
                  std::clamp<std::int64_t>(length, 0, c.context),
                  "must hold lengths from 0 to data.context = {}", c.context);
    sum += std::clamp<std::int64_t>(length, 0, c.context);
  }
  rules.require(sum <= c.context, "plan.lengths", fmt::format("a sum of {}", sum),
                fmt::format("data.context {}", sum), "must fit into data.context = {}", c.context);
  if (c.cp <= 1) return;
  const std::int64_t chunks = 2 * c.cp;
  rules.require(
      c.context % chunks == 0, "data.context", c.context, multiple_above(c.context, chunks),
      "must be a multiple of 2 x plan.cp = {}, since a rank holds a chunk of either half", chunks);
  for (std::size_t i = 0; i < c.lengths.size() && sum <= c.context; ++i) {
    rules.require(c.lengths[i] % chunks == 0, fmt::format("plan.lengths[{}]", i), c.lengths[i],
                  multiple_above(c.lengths[i], chunks),
                  "must be padded to a multiple of 2 x plan.cp = {}", chunks);
  }
}

void check_batch(const PlanConfig& c, Rules& rules) {
  if (!is_count(c.batch_sequences) || !is_count(c.micro_batch_sequences)) return;
  const std::int64_t at_once = c.micro_batch_sequences * c.dp;
  rules.require(c.batch_sequences % at_once == 0, "data.batch_sequences", c.batch_sequences,
                multiple_above(c.batch_sequences, at_once),
                "must be a multiple of data.micro_batch_sequences x plan.dp = {} x {}",
                c.micro_batch_sequences, c.dp);
}

void check_experts(const PlanConfig& c, Rules& rules) {
  const MoeConfig& moe = c.moe;
  const bool asked = moe.experts != 0 || moe.experts_per_token != 0;
  if (!asked) {
    rules.require(c.ep == 1, "plan.ep", c.ep, 1, "must be 1 without plan.moe");
    return;
  }
  constexpr std::int64_t kMax = 1 << 16, kMaxSize = 1 << 24;
  const auto range = [&](const char* option, std::int64_t value, std::int64_t least,
                         std::int64_t most) {
    rules.require(value >= least && value <= most, option, value, std::clamp(value, least, most),
                  "must be from {} to {}", least, most);
  };
  range("plan.moe.experts", moe.experts, 1, kMax);
  range("plan.moe.experts_per_token", moe.experts_per_token, 1,
        std::clamp<std::int64_t>(moe.experts, 1, kMax));
  range("plan.moe.intermediate_size", moe.intermediate_size, 1, kMaxSize);
  range("plan.moe.shared_experts", moe.shared_experts, 0, kMax);
  range("plan.moe.dense_layers", moe.dense_layers, 0, std::max<std::int64_t>(c.model.layers, 0));
  if (moe.experts < 1) return;
  rules.require(moe.experts % c.ep == 0, "plan.ep", c.ep, divisor_below(moe.experts, c.ep),
                "must divide plan.moe.experts = {}", moe.experts);
  const std::int64_t ranks = c.dp * c.cp;
  rules.require(ranks % c.ep == 0, "plan.ep", c.ep, divisor_below(ranks, c.ep),
                "must divide plan.dp x plan.cp = {} x {}, whose ranks share the experts", c.dp,
                c.cp);
}

// What each letter of a hybrid model needs.
bool check_pattern(const PlanConfig& c, Rules& rules) {
  if (!c.hybrid()) return true;
  constexpr char kOption[] = "plan.layer_pattern";
  const std::string pattern = c.layer_pattern.substr(0, 60);
  const std::size_t wrong = c.layer_pattern.find_first_not_of("M*-ED/");
  const bool letters = wrong == std::string::npos;
  rules.require(letters, kOption, letters ? "" : std::string(1, c.layer_pattern[wrong]), "D-",
                "may hold M, *, D, -, E and /");
  if (!letters) return false;
  const std::string decoder = c.letters(), depth = c.mtp_letters();
  const auto length = static_cast<std::int64_t>(decoder.size());
  rules.require(length == c.model.layers, kOption, fmt::format("{} letters", length),
                fmt::format("layers {}", length), "must have a letter for each of layers = {}",
                c.model.layers);
  const auto slashes = std::count(c.layer_pattern.begin(), c.layer_pattern.end(), '/');
  rules.require(slashes <= 1, kOption, slashes, "D-/D-", "must hold one / at the most");
  rules.require((c.model.mtp_depths > 0) == !depth.empty(), kOption, pattern,
                c.model.mtp_depths > 0 ? pattern + "/D-" : decoder,
                "must have letters after / exactly where mtp_depths = {} is more than 0",
                c.model.mtp_depths);
  rules.require(decoder.find('D') != std::string::npos, kOption, pattern, "D-",
                "must hold a D: a model of sparse attention without a DSA layer is none");
  rules.require(c.layer_pattern.find('E') == std::string::npos || c.moe.experts > 0, kOption,
                pattern, "plan.moe", "needs plan.moe for its letter E");
  const MambaConfig& m = c.mamba;
  const bool mamba = m.state_dim >= 1 && m.head_dim >= 1 && m.groups >= 1 && m.expand >= 1;
  rules.require(mamba, "plan.mamba", "a size below 1", "1", "must hold sizes of at least 1");
  rules.require(!c.model.mtp_shared_components.any(), "mtp_shared_components", "", "[]",
                "cannot be combined with plan.layer_pattern: the depths of a hybrid model share "
                "nothing");
  return length == c.model.layers && slashes <= 1 && (c.model.mtp_depths > 0) == !depth.empty();
}

void check_step_graph(const PlanConfig& c, Rules& rules) {
  const std::vector<std::string> known = {"attention", "mlp"};
  for (const std::string& module : c.step_graph.modules) {
    rules.require(std::find(known.begin(), known.end(), module) != known.end(),
                  "plan.step_graph.modules", "\"" + module.substr(0, 40) + "\"",
                  nearest_name(module, known), "may name attention and mlp");
  }
  rules.require(!c.step_graph.captures_attention() || !c.model.mtp_shared_components.any(),
                "plan.step_graph", "", "scope \"step\", or modules [\"mlp\"]",
                "of scope \"layer\" captures attention, which mtp_shared_components forbids: what "
                "the first depth shares would lie outside the graphs of the later ones");
}

void check_machine(const PlanConfig& c, Rules& rules) {
  std::vector<std::string> names;
  for (const Machine& machine : machines()) names.push_back(machine.name);
  rules.require(find_machine(c.machine) != nullptr, "plan.machine",
                "\"" + c.machine.substr(0, 40) + "\"", nearest_name(c.machine, names),
                "must be one of {}", choice_text(names));
  rules.require(c.efficiency > 0 && c.efficiency <= 1, "plan.efficiency", c.efficiency, 1,
                "must be above 0 and at most 1");
  constexpr double kMost = 1 << 20;
  rules.require(c.score_budget_gib > 0 && c.score_budget_gib <= kMost, "plan.score_budget_gib",
                c.score_budget_gib, 2, "must be positive and at most {}", kMost);
}

}  // namespace

PipelineLayout check(const PlanConfig& c, Rules& rules) {
  const bool ranks = check_ranks(c, rules);
  if (ranks) {
    check_context_parallel(c, rules);
    check_batch(c, rules);
    check_experts(c, rules);
  }
  const bool pattern = check_pattern(c, rules);
  check_step_graph(c, rules);
  check_machine(c, rules);

  PipelineLayout layout;
  constexpr std::int64_t kMaxLayers = 1024;
  const bool layers = c.model.layers >= 1 && c.model.layers <= kMaxLayers &&
                      c.model.mtp_depths >= 0 && c.model.mtp_depths <= kMaxLayers;
  if (!ranks || !layers) return layout;
  if (c.layout.empty()) {
    const std::int64_t virtual_stages = std::max<std::int64_t>(c.virtual_stages, 1);
    const bool fits = c.pp * virtual_stages <= kMaxRanks;
    rules.require(fits, "plan.virtual_stages", virtual_stages, kMaxRanks / c.pp,
                  "must make at most {} stages with plan.pp = {}", kMaxRanks, c.pp);
    if (fits) layout = even_layout(c.pp, virtual_stages, c.model.layers, c.model.mtp_depths);
  } else {
    layout = parse_layout(c.layout, c.pp, c.model.layers, c.model.mtp_depths, rules);
    rules.require(
        layout.stages.empty() || c.virtual_stages == 0 || c.virtual_stages == layout.virtual_stages,
        "plan.virtual_stages", c.virtual_stages, layout.virtual_stages,
        "must be the layout's: its {} stages on plan.pp = {} ranks make {}", layout.stages.size(),
        c.pp, layout.virtual_stages);
  }
  const bool sharing = c.model.sharing.topk_freq >= 1 && c.model.sharing.skip_topk_offset >= 0;
  if (sharing && pattern && !layout.stages.empty()) {
    const auto is_dsa = [&](std::int64_t layer) { return c.is_dsa(layer); };
    check_index_sharing(layout, c.model.sharing, c.model.layers, rules,
                        c.hybrid() ? is_dsa : std::function<bool(std::int64_t)>(), mtp_layers(c));
  }
  return layout;
}

}  // namespace winnow::plan
