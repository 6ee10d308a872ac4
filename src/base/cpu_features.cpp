#include "base/cpu_features.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "base/check.h"

namespace winnow {
namespace {

#if defined(__x86_64__)
// Tile data live in a large register state that Linux hands out on request, once per process.
bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

CpuFeatures detect() {
  CpuFeatures f;
  std::ifstream info("/proc/cpuinfo");
  std::string flags;
  for (std::string line; flags.empty() && std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (f.model.empty() && line.rfind("model name", 0) == 0) f.model = line.substr(colon + 2);
    if (line.rfind("flags", 0) == 0) flags = line.substr(colon + 1) + " ";
  }
#if defined(__x86_64__)
  auto has = [&](std::initializer_list<std::string_view> names) {
    return std::all_of(names.begin(), names.end(), [&](std::string_view name) {
      return flags.find(fmt::format(" {} ", name)) != std::string::npos;
    });
  };
  f.avx2 = has({"avx2", "fma", "f16c", "bmi1", "bmi2"});
  f.avx512 = f.avx2 && has({"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  f.avx512_bf16 = f.avx512 && has({"avx512_bf16"});
  f.amx = f.avx512 && has({"amx_tile", "amx_bf16"}) && ask_for_tiles();
#endif
  return f;
}

constexpr std::string_view kLevels[] = {"portable", "avx2", "avx512", "amx"};

// The place of a level in kLevels; their number if there is none of that name.
std::ptrdiff_t place(std::string_view level) {
  return std::find(std::begin(kLevels), std::end(kLevels), level) - std::begin(kLevels);
}

std::ptrdiff_t limit_from_environment() {
  const char* text = std::getenv("WINNOW_CPU");
  if (text == nullptr || *text == '\0') return std::ssize(kLevels) - 1;
  const std::ptrdiff_t limit = place(text);
  WINNOW_CHECK("cpu", limit < std::ssize(kLevels),
               "WINNOW_CPU must be portable, avx2, avx512 or amx, got \"{}\"", text);
  return limit;
}

}  // namespace

std::vector<std::string> CpuFeatures::names() const {
  std::vector<std::string> names;
  if (avx2) names.emplace_back("avx2");
  if (avx512) names.emplace_back("avx512");
  if (avx512_bf16) names.emplace_back("avx512_bf16");
  if (amx) names.emplace_back("amx");
  return names;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Refusal refuse_instruction_set(std::string_view level) {
  static const std::ptrdiff_t limit = limit_from_environment();
  const CpuFeatures& cpu = cpu_features();
  if (level == "avx2" && !cpu.avx2) return "this processor lacks AVX2, FMA, F16C or BMI2";
  if (level == "avx512" && !cpu.avx512) return "this processor lacks AVX-512 F, BW, DQ or VL";
  if (level == "amx" && !cpu.amx) return "this processor lacks AMX tiles with BF16 products";
  if (place(level) > limit) return "WINNOW_CPU limits the instruction sets";
  return {};
}

}  // namespace winnow
