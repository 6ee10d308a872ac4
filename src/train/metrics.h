// metrics.jsonl: one JSON object a line, in the order of steps. What a line says of time lies in
// its "timing" object; all else is the same in every run of a configuration, resumed or not.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/file.h"

namespace winnow::train {

class MetricsLog {
 public:
  // Opens the file and cuts off what comes after the lines of `step`: a resumed run writes it
  // again. Step 0 begins anew.
  MetricsLog(std::filesystem::path path, std::int64_t step);
  void append(const nlohmann::ordered_json& line);  // has a "step"
  void sync();                                      // to the disk

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
};

// All whole lines of the file.
std::vector<nlohmann::json> read_metrics(const std::filesystem::path& path);

}  // namespace winnow::train
