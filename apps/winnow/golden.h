// Golden vectors: inputs and results of other implementations, in a directory that holds any subset
// of ops/, kpool/, models/ and layouts.json. This version compares all but models/.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/case.h"

namespace winnow::app {

struct GoldenResult {
  std::string operation;
  bench::CheckResult result;  // problem: the file
};

struct GoldenReport {
  std::vector<GoldenResult> results;
  std::vector<std::string> skipped;  // what is there and not compared, with the reason
};

// What a directory holds of the kind.
struct GoldenDirectory {
  std::filesystem::path path;
  std::vector<std::filesystem::path> ops, kpool, layouts;
  std::vector<std::string> skipped;
};

// Throws if it does not exist or holds nothing of the kind.
GoldenDirectory find_golden(const std::filesystem::path& directory);

// A file that cannot be read is a failed result.
GoldenReport check_golden(const GoldenDirectory& directory);

// One file of ops/: every operation by every implementation that accepts it, in f32; and all of it
// by the reference in f64.
std::vector<GoldenResult> check_golden_ops(const std::filesystem::path& path);

// One file of kpool/: pooled keys, pools and their tokens, by the same implementations.
std::vector<GoldenResult> check_golden_kpool(const std::filesystem::path& path);

// layouts.json: context parallel tables, and which layers compute indices.
std::vector<GoldenResult> check_golden_layouts(const std::filesystem::path& path);

}  // namespace winnow::app
