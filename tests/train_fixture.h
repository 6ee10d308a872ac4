// Runs of the trainer in a folder of their own: a text, a run to some step, the curve that it left.
#pragma once

#include "tests/files.h"
#include "tests/tiny_run.h"
#include "train/trainer.h"

namespace winnow::train {

// Runs to the end, or until `steps` are done in this call.
inline bool run_steps(Trainer& trainer, std::int64_t steps = 1 << 30) {
  Observer observer;
  observer.stop = [&] { return --steps <= 0; };
  return trainer.run(observer);
}

// All that the metrics of a run say but the time.
inline std::vector<nlohmann::json> curve_of(const std::filesystem::path& output) {
  std::vector<nlohmann::json> lines = read_metrics(output / "metrics.jsonl");
  for (nlohmann::json& line : lines) line.erase("timing");
  return lines;
}

class TrainTest : public FolderTest {
 protected:
  using json = nlohmann::json;

  TrainTest() { text_ = write("text.txt", tiny_text(4000)); }

  static bool run(const json& config, Begin begin, std::int64_t steps = 1 << 30) {
    Trainer trainer(read_train_config(config), begin);
    return run_steps(trainer, steps);
  }
  std::vector<json> curve(const std::string& output) const { return curve_of(folder_ / output); }

  std::string text_;
};

}  // namespace winnow::train
