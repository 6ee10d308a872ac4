#include "train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <numbers>

namespace winnow::train {
namespace {

constexpr int kBarWidth = 24;
constexpr double kSecondsBetweenLines = 15;  // where the output is no terminal
constexpr double kMemory = 0.9;              // of running means, per step

}  // namespace

std::string duration_text(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(seconds));
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

Progress::Progress(std::FILE* out, const TrainConfig& config)
    : out_(out), terminal_(::isatty(::fileno(out)) == 1), config_(config) {}

void Progress::step(const StepReport& report) {
  // In the warm-up the loss is the indexers' KL, mean over layers.
  double loss = 0;
  if (report.losses.loss) {
    loss = *report.losses.loss / std::numbers::ln2;
  } else {
    for (double kl : report.losses.index_kl) {
      loss += kl / static_cast<double>(report.losses.index_kl.size());
    }
  }
  const bool first = report.stage != stage_;
  stage_ = report.stage;
  loss_ = first ? loss : kMemory * loss_ + (1 - kMemory) * loss;
  seconds_per_step_ =
      first ? report.seconds : kMemory * seconds_per_step_ + (1 - kMemory) * report.seconds;

  const auto now = std::chrono::steady_clock::now();
  const double waited = std::chrono::duration<double>(now - last_line_).count();
  if (terminal_) {
    clear();
    drawn_ = bar(report);
    fmt::print(out_, "{}", drawn_);
    std::fflush(out_);
  } else if (first || waited >= kSecondsBetweenLines || report.step == report.total_steps) {
    last_line_ = now;
    fmt::print(out_, "{}\n", bar(report));
    std::fflush(out_);
  }
}

double Progress::seconds_left(const StepReport& report) const {
  return seconds_per_step_ * static_cast<double>(report.total_steps - report.step);
}

// "[######------] 120/400  dense  2.413 bits/byte  5213 tokens/s  1:12 left"
std::string Progress::bar(const StepReport& report) const {
  const auto filled = static_cast<std::size_t>(kBarWidth * report.step / report.total_steps);
  const std::string done(filled, '#'), rest(kBarWidth - filled, '-');
  return fmt::format("[{}{}] {}/{}  {}  {:.3f} {}  {:.0f} tokens/s  {} left", done, rest,
                     report.step, report.total_steps, report.stage, loss_,
                     report.losses.loss ? "bits/byte" : "index KL", report.tokens_per_second,
                     duration_text(seconds_left(report)));
}

void Progress::clear() {
  if (!drawn_.empty()) fmt::print(out_, "\r{}\r", std::string(drawn_.size(), ' '));
  drawn_.clear();
}

void Progress::message(const std::string& text) {
  const std::string bar = drawn_;
  clear();
  fmt::print(out_, "{}\n{}", text, bar);
  drawn_ = bar;
  std::fflush(out_);
}

void Progress::finish() {
  if (!drawn_.empty()) fmt::print(out_, "\n");
  drawn_.clear();
}

}  // namespace winnow::train
