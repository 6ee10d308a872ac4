#include "apps/winnow/golden.h"

#include <algorithm>

#include "base/check.h"

namespace winnow::app {
namespace {

namespace fs = std::filesystem;

// The safetensors files under a folder, sorted; none if there is no such folder.
std::vector<fs::path> tensor_files(const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::is_directory(folder)) return files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().extension() == ".safetensors")
      files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// One that cannot be read is a failure that names it.
void check_files(const fs::path& directory, const std::vector<fs::path>& files,
                 std::vector<GoldenResult> (*check)(const fs::path&), GoldenReport* report) {
  for (const fs::path& path : files) {
    const std::string name = fs::relative(path, directory).string();
    try {
      for (GoldenResult& result : check(path)) {
        result.result.problem = name;
        report->results.push_back(std::move(result));
      }
    } catch (const std::exception& e) {
      report->results.push_back({"(reading)", {name, "", {}, e.what()}});
    }
  }
}

}  // namespace

GoldenDirectory find_golden(const fs::path& directory) {
  if (!fs::is_directory(directory)) {
    fail(Status::kIo, "golden", "the directory must exist, got \"{}\"", directory.string());
  }
  GoldenDirectory found{
      directory, tensor_files(directory / "ops"), tensor_files(directory / "kpool"), {}, {}};
  for (const fs::path& path : tensor_files(directory / "models")) {
    if (path.filename() == "expected.safetensors") {
      found.skipped.push_back(fs::relative(path, directory).string() +
                              ": this version does not read Hugging Face checkpoints");
    }
  }
  if (fs::exists(directory / "layouts.json")) {
    found.layouts.push_back(directory / "layouts.json");
  }
  if (found.ops.empty() && found.kpool.empty() && found.layouts.empty() && found.skipped.empty()) {
    fail(Status::kInvalidArgument, "golden",
         "the directory must hold ops/*.safetensors, kpool/, models/ or layouts.json, got none of "
         "them in \"{}\"",
         directory.string());
  }
  return found;
}

GoldenReport check_golden(const GoldenDirectory& directory) {
  GoldenReport report{{}, directory.skipped};
  check_files(directory.path, directory.ops, check_golden_ops, &report);
  check_files(directory.path, directory.kpool, check_golden_kpool, &report);
  check_files(directory.path, directory.layouts, check_golden_layouts, &report);
  return report;
}

}  // namespace winnow::app
