// What a person sees of a run: a bar that is redrawn on a terminal, a line now and then elsewhere.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "train/trainer.h"

namespace winnow::train {

class Progress {
 public:
  // `out` is not owned. A terminal gets the bar.
  Progress(std::FILE* out, const TrainConfig& config);

  void step(const StepReport& report);
  void message(const std::string& text);  // a line of its own, above the bar
  void finish();                          // leaves the last state of the bar standing

 private:
  std::string bar(const StepReport& report) const;
  double seconds_left(const StepReport& report) const;
  void clear();

  std::FILE* out_;
  bool terminal_;
  TrainConfig config_;
  std::string stage_;
  std::string drawn_;            // the bar on the screen
  double seconds_per_step_ = 0;  // recent mean, of this stage
  double loss_ = 0;              // recent mean
  std::chrono::steady_clock::time_point last_line_{};
};

std::string duration_text(double seconds);  // "3:07", "1:02:33"

}  // namespace winnow::train
