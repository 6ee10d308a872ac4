#include "base/cpu_features.h"

#include <cstdlib>
#include <fstream>

#include "base/check.h"

namespace winnow {
namespace {

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__x86_64__)
  __builtin_cpu_init();
  f.avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
           __builtin_cpu_supports("bmi") != 0 && __builtin_cpu_supports("bmi2") != 0;
  f.avx512_bf16 =
      f.avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bf16") != 0;
#endif
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (const std::size_t colon = line.find(": ");
        f.model.empty() && line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      f.model = line.substr(colon + 2);
    }
    if (line.rfind("flags", 0) == 0) {
      f.amx_bf16 = f.avx512_bf16 && line.find(" amx_bf16") != std::string::npos;
      f.avx2 = f.avx2 && line.find(" f16c") != std::string::npos;
      break;
    }
  }
  return f;
}

std::string limit_from_environment() {
  const char* text = std::getenv("WINNOW_CPU");
  const std::string limit = text != nullptr ? text : "";
  WINNOW_CHECK("cpu", limit.empty() || limit == "portable" || limit == "avx2",
               "WINNOW_CPU must be portable or avx2, got \"{}\"", limit);
  return limit;
}

}  // namespace

std::vector<std::string> CpuFeatures::names() const {
  std::vector<std::string> names;
  if (avx2) names.emplace_back("avx2");
  if (avx512_bf16) names.emplace_back("avx512_bf16");
  if (amx_bf16) names.emplace_back("amx_bf16");
  return names;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Refusal refuse_instruction_set(std::string_view level) {
  static const std::string limit = limit_from_environment();
  if (level == "avx2") {
    if (!cpu_features().avx2) return "this processor lacks AVX2, FMA, F16C or BMI2";
    if (limit == "portable") return "WINNOW_CPU=portable allows portable code only";
  }
  return {};
}

}  // namespace winnow
