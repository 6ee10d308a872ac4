// Runs of the trainer in a folder of their own: a text, a run to some step, the curve that it left.
#pragma once

#include "tests/files.h"
#include "tests/tiny_run.h"
#include "train/trainer.h"

namespace winnow::train {

class TrainTest : public FolderTest {
 protected:
  using json = nlohmann::json;

  TrainTest() { text_ = write("text.txt", tiny_text(4000)); }

  // Runs to the end, or until `steps` are done in this call.
  static bool run(const json& config, Begin begin, std::int64_t steps = 1 << 30) {
    Trainer trainer(read_train_config(config), begin);
    Observer observer;
    observer.stop = [&] { return --steps <= 0; };
    return trainer.run(observer);
  }

  // All that metrics say but the time.
  std::vector<json> curve(const std::string& output) const {
    std::vector<json> lines = read_metrics(folder_ / output / "metrics.jsonl");
    for (json& line : lines) line.erase("timing");
    return lines;
  }

  std::string text_;
};

}  // namespace winnow::train
