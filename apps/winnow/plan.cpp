// winnow plan: is a configuration possible, and what does it cost? Asks no device.
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/winnow/commands.h"
#include "base/check.h"
#include "base/text.h"
#include "plan/check.h"
#include "plan/report.h"
#include "plan/shapes.h"
#include "train/config.h"

namespace winnow::app {
namespace {

using nlohmann::json;

constexpr const char* kFooter =
    R"(CONFIG is a training configuration (docs/training.md), with an object "plan" beside the rest for what a
single process has no use for: ranks, layout, recomputation, experts, machine (docs/planning.md). Options
of the command line stand for keys and win over the file. Without CONFIG the sizes are a public model's.

Every rule is checked, and all that are broken are said at once, each with a valid value. Otherwise: a line
per pipeline stage with its layers, which of them compute indices, floating-point operations of a step,
memory and the least time; then the score budget, and the whole step.

Layouts: E embedding, t layer, m depth of multi-token prediction, L loss, | next stage; x*n and (text)*n repeat.

Examples:
  winnow plan examples/demo.json
  winnow plan examples/plan_1m_tokens_cp64.json --svg layout.svg
  winnow plan --layers 78 --mtp-depths 7 --topk-freq 4 --skip-topk-offset 3 --pp 8 \
    --layout 'Et*10|t*12|t*12|t*12|t*12|t*12|t*8|m*7L'
  winnow plan --model deepseek-v3.2 --pp 16 --dp 8 --ep 8 --context 131072 --json | jq .stages

Exit status: 0 possible, 1 not (the rules that are broken stand on standard output).)";

struct Options {
  std::string config, model = "glm-5.2", svg;
  bool as_json = false;
  json keys = json::object();  // JSON pointer -> value, from the command line
};

// A configuration for a public model: what is planned when there is no file.
json shape_config(const std::string& name) {
  const plan::Shape* shape = plan::find_shape(name);
  if (shape == nullptr) {
    std::vector<std::string> names;
    for (const plan::Shape& s : plan::shapes()) names.push_back(s.name);
    throw UsageError(fmt::format("--model: there is no \"{}\"; {}", name, name_hint(name, names)));
  }
  json object;
  object["model"] = model::write_model_config(shape->model);
  object["data"] = {{"context", 32768}, {"batch_sequences", 64}, {"micro_batch_sequences", 1}};
  object["stages"] = json::array(
      {{{"name", "sparse"}, {"attention", "sparse"}, {"index_loss_coefficient", 0.01}}});
  object["plan"] = {{"dtype", "bf16"},
                    {"moe",
                     {{"experts", shape->moe.experts},
                      {"experts_per_token", shape->moe.experts_per_token},
                      {"shared_experts", shape->moe.shared_experts},
                      {"intermediate_size", shape->moe.intermediate_size},
                      {"dense_layers", shape->moe.dense_layers}}}};
  return object;
}

// Experts in all layers but the first few, where the model has fewer layers than that.
void fit_dense_layers(json& object) {
  const json& layers = object["model"]["layers"];
  json& dense = object["plan"]["moe"]["dense_layers"];
  if (layers.is_number_integer() && layers.get<std::int64_t>() >= 0) {
    dense = std::min(dense.get<std::int64_t>(), layers.get<std::int64_t>());
  }
}

json config_object(const Options& options) {
  json object = options.config.empty() ? shape_config(options.model)
                                       : train::read_config_file(options.config);
  if (!object.is_object()) return object;  // its reader says so
  for (const auto& [pointer, value] : options.keys.items()) {
    const json::json_pointer at(pointer);
    json& parent = object[at.parent_pointer()];
    if (parent.is_object() || parent.is_null()) parent[at.back()] = value;
  }
  if (options.config.empty()) fit_dense_layers(object);
  return object;
}

plan::PlanConfig read_config(const json& object, Rules& rules) {
  const train::TrainConfig run = train::read_train_config(object, train::Purpose::kPlan, rules);
  plan::PlanConfig config;
  config.model = run.model;
  config.recompute = run.recompute;
  config.context = run.data.context;
  config.batch_sequences = run.data.batch_sequences;
  config.micro_batch_sequences = sequences_at_once(run);
  config.cp = run.parallel.cp;
  config.dp = std::max<std::int64_t>(1, run.parallel.dp);
  for (const train::StageConfig& stage : run.stages) {
    config.stages.push_back({stage.name, stage.attention, stage.index_loss_coefficient > 0,
                             stage.mtp_loss_coefficient > 0});
  }
  if (config.stages.empty()) config.stages.emplace_back();  // said by the stages' own rules
  config.stage = config.stages.size() - 1;
  if (object.is_object() && object.contains("plan")) {
    plan::read_plan_options(object["plan"], config, rules);
  }
  return config;
}

void write_picture(const std::string& path, const std::string& picture) {
  std::ofstream out(path);
  out << picture;
  out.close();
  if (!out) fail(Status::kIo, "plan", "cannot write {}", path);
}

void run(const Options& options) {
  Rules rules(Rules::Mode::kCollect);
  const plan::PlanConfig config = read_config(config_object(options), rules);
  const plan::PipelineLayout layout = plan::check(config, rules);
  if (!rules.kept()) {
    const std::size_t count = rules.violations().size();
    if (options.as_json) {
      fmt::print("{}\n", plan::violations_json(rules).dump(2));
    } else {
      fmt::print("{}", plan::violations_text(rules));
    }
    fail(Status::kInvalidArgument, "plan", "{} broken: {}{}",
         count == 1 ? "a rule is" : fmt::format("{} rules are", count),
         rules.violations().front().text(), count == 1 ? "" : "; ...");
  }
  const plan::Plan planned = plan::make_plan(config, layout);
  if (!options.svg.empty()) write_picture(options.svg, plan::layout_picture(config, layout));
  if (options.as_json) {
    fmt::print("{}\n", plan::plan_json(config, planned).dump(2));
    return;
  }
  if (options.config.empty()) fmt::print("sizes of {}: ", options.model);
  fmt::print("{}", plan::plan_text(config, planned));
}

// An option of the command line that stands for a key.
template <class Value>
CLI::Option* add_key(CLI::App* command, const std::shared_ptr<Options>& options, const char* name,
                     const char* pointer, const char* help) {
  return command->add_option_function<Value>(
      name, [options, pointer](const Value& value) { options->keys[pointer] = value; }, help);
}

// The same for a list: "a,b", or the option twice. What follows it is no part of the list.
void add_list(CLI::App* command, const std::shared_ptr<Options>& options, const char* name,
              const char* pointer, const char* help) {
  add_key<std::vector<std::string>>(command, options, name, pointer, help)
      ->delimiter(',')
      ->allow_extra_args(false);
}

}  // namespace

void add_plan(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("plan", "checks a configuration and says what it costs, without a device");
  command->add_option("config", options->config, "configuration file");
  std::vector<std::string> names;
  for (const plan::Shape& shape : plan::shapes()) names.push_back(shape.name);
  command->add_option(
      "--model", options->model,
      "sizes of a public model, without CONFIG: " + choice_text(names) + " (default: glm-5.2)");
  using Whole = std::int64_t;
  add_key<Whole>(command, options, "--layers", "/model/layers", "decoder layers");
  add_key<Whole>(command, options, "--mtp-depths", "/model/mtp_depths",
                 "depths of multi-token prediction");
  add_list(command, options, "--mtp-shared", "/model/mtp_shared_components",
           "what later depths reuse: sparse_attention_index, latent_kv");
  add_key<Whole>(command, options, "--topk-freq", "/model/topk_freq",
                 "every how many layers indices are computed");
  add_key<Whole>(command, options, "--skip-topk-offset", "/model/skip_topk_offset",
                 "first layers that all compute");
  add_key<Whole>(command, options, "--context", "/data/context", "tokens of a sequence");
  add_key<Whole>(command, options, "--batch", "/data/batch_sequences", "sequences of a step");
  add_key<Whole>(command, options, "--micro-batch", "/data/micro_batch_sequences",
                 "sequences at a time");
  add_key<Whole>(command, options, "--pp", "/plan/pp", "pipeline ranks");
  add_key<Whole>(command, options, "--cp", "/plan/cp", "context parallel ranks");
  add_key<Whole>(command, options, "--dp", "/plan/dp", "data parallel ranks");
  add_key<Whole>(command, options, "--ep", "/plan/ep", "ranks that share the experts");
  add_key<Whole>(command, options, "--virtual-stages", "/plan/virtual_stages",
                 "stages of each pipeline rank");
  add_key<std::string>(command, options, "--layout", "/plan/layout", "layers of each stage");
  add_list(command, options, "--recompute", "/recompute",
           "full, core_attention, norms, mlp, query_up_projection");
  add_key<std::string>(command, options, "--stage", "/plan/stage",
                       "which of the configuration's stages (default: the last)");
  add_key<std::string>(command, options, "--dtype", "/plan/dtype", "f32 or bf16");
  add_key<double>(command, options, "--score-budget-gib", "/plan/score_budget_gib",
                  "memory for scores that wait for their selection");
  add_key<std::string>(command, options, "--machine", "/plan/machine",
                       "h200, h100, a100 or cpu-core");
  add_key<double>(command, options, "--efficiency", "/plan/efficiency",
                  "share of the machine's peak that is reached (default: 1, the least time)");
  command->add_flag_callback(
      "--reuse-checkpoint-topk", [options] { options->keys["/reuse_checkpoint_topk"] = true; },
      "a replay attends to the selection of the first call");
  command->add_flag_callback(
      "--shard-optimizer", [options] { options->keys["/plan/shard_optimizer"] = true; },
      "the optimizer's state is spread over the dp x cp ranks");
  command->add_option("--svg", options->svg, "also draws the layout into a file")
      ->type_name("FILE");
  command->add_flag("--json", options->as_json, "one JSON object instead of text");
  add_threads_option(*command);
  command->footer(kFooter);
  command->callback([options] { run(*options); });
}

}  // namespace winnow::app
