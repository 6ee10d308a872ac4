// winnow info: what was built, and what this machine offers it.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/winnow/commands.h"
#include "base/check.h"
#include "base/cpu_features.h"
#include "comm/mpi.h"
#include "comm/nccl.h"
#include "winnow/communicator.h"
#include "winnow/device.h"
#include "winnow/implementations.h"
#include "winnow/threads.h"

namespace winnow::app {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

// An instruction set that src/cpu is compiled for, and why it must not run here ("" if it may).
struct InstructionSet {
  std::string name, refusal;
};
std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const char* level : {"amx", "avx512", "avx2", "portable"}) {
#if defined(WINNOW_X86)
    sets.push_back({level, refuse_instruction_set(level).sentence()});
#else
    const bool built = std::string_view(level) == "portable";
    sets.push_back({level, built ? "" : "not built for this kind of processor"});
#endif
  }
  return sets;
}

// What connects processes.
nlohmann::ordered_json engine(const char* kind, const std::string& refusal,
                              const std::string& version) {
  nlohmann::ordered_json e = {{"kind", kind}, {"usable", refusal.empty()}, {"reason", refusal}};
  if (!version.empty()) e["name"] = version;
  return e;
}

nlohmann::ordered_json gather() {
  nlohmann::ordered_json info;
  info["version"] = WINNOW_VERSION;
  info["build"] = {
      {"compiler", kCompiler}, {"type", WINNOW_BUILD_TYPE}, {"flags", WINNOW_BUILD_FLAGS}};
  info["cpu"] = {{"model", cpu_features().model}, {"features", cpu_features().names()}};
  info["instruction_sets"] = nlohmann::ordered_json::array();
  for (const InstructionSet& set : instruction_sets()) {
    info["instruction_sets"].push_back(
        {{"name", set.name}, {"usable", set.refusal.empty()}, {"reason", set.refusal}});
  }
  info["threads"] = num_threads();
  info["devices"] = {{{"kind", "cpu"}, {"usable", true}, {"reason", ""}}};
  int index = 0;
  for (const CudaDevice& gpu : cuda_devices()) {
    info["devices"].push_back({{"kind", device_text({Device::Kind::kCuda, index++})},
                               {"usable", true},
                               {"reason", ""},
                               {"name", gpu.name},
                               {"compute_capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
                               {"multiprocessors", gpu.processors},
                               {"memory_bytes", gpu.memory_bytes}});
  }
  if (cuda_devices().empty()) {
    info["devices"].push_back({{"kind", "cuda"}, {"usable", false}, {"reason", cuda_refusal()}});
  }
  info["processes"] = {
      engine("mpi", mpi_refusal(), comm::mpi_version()),
      engine("nccl", nccl_refusal(), comm::nccl_version()),
  };
  info["pins"] = pinned_implementations();
  info["libraries"] = {
      {"fmt",
       fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
      {"nlohmann_json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR,
                                    NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH)},
      {"cli11", CLI11_VERSION}};
  return info;
}

// "usable", or why it is not.
std::string usable(const nlohmann::ordered_json& thing) {
  return thing["usable"].get<bool>() ? "usable"
                                     : "not usable: " + thing["reason"].get<std::string>();
}

void print_text(const nlohmann::ordered_json& info) {
  auto line = [](std::string_view name, std::string_view value) {
    fmt::print("{:<18}{}\n", name, value);
  };
  auto text = [](const nlohmann::ordered_json& value) { return value.get<std::string>(); };
  line("winnow", text(info["version"]));
  line("compiler", text(info["build"]["compiler"]));
  line("build", text(info["build"]["type"]) + ", " + text(info["build"]["flags"]));
  line("cpu", text(info["cpu"]["model"]));
  std::string features;
  for (const auto& name : info["cpu"]["features"])
    features += (features.empty() ? "" : ", ") + text(name);
  line("cpu features", features.empty() ? "none that winnow uses" : features);
  for (const auto& set : info["instruction_sets"]) line("cpu." + text(set["name"]), usable(set));
  line("threads", fmt::format("{}", info["threads"].get<int>()));
  for (const auto& device : info["devices"]) {
    std::string what = usable(device);
    if (device.contains("name")) {
      what += fmt::format(": {}, compute capability {}", text(device["name"]),
                          text(device["compute_capability"]));
    }
    line("device " + text(device["kind"]), what);
  }
  for (const auto& e : info["processes"]) {
    line("processes " + text(e["kind"]),
         usable(e) + (e.contains("name") ? ": " + text(e["name"]) : ""));
  }
  for (const auto& [operation, implementation] : info["pins"].items())
    line("pin", operation + "=" + text(implementation));
  for (const auto& [name, version] : info["libraries"].items()) line(name, text(version));
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "version, build, processor, devices, libraries");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "one JSON object instead of text");
  command->footer(R"(Examples:
  winnow info
  winnow info --json | jq .threads
  WINNOW_CPU=portable winnow info      shows what the limit switches off)");
  command->callback([json] {
    const nlohmann::ordered_json info = gather();
    if (*json) {
      fmt::print("{}\n", info.dump());
    } else {
      print_text(info);
    }
  });
}

}  // namespace winnow::app
