// Text as training data: bytes are tokens, the end of the file is held out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "model/transformer.h"
#include "train/config.h"

namespace winnow::train {

class TextData {
 public:
  // A file too short for one training sequence and one held-out window is an error that says how
  // many bytes are needed.
  explicit TextData(const DataConfig& config);

  // Sequences [first, first + count) of a step. Where each begins is a function of (seed, step, its
  // number) alone, so a resumed run sees what an unbroken one sees, however the step is cut.
  model::Batch training_batch(std::uint64_t seed, std::int64_t step, std::int64_t first,
                              std::int64_t count) const;

  // Windows of `context` tokens that lie end to end in the held-out bytes.
  std::int64_t validation_windows() const;
  model::Batch validation_batch(std::int64_t first, std::int64_t count) const;

  std::span<const std::uint8_t> training() const { return bytes().first(training_bytes_); }
  std::span<const std::uint8_t> validation() const { return bytes().subspan(training_bytes_); }
  std::uint64_t fingerprint() const { return fingerprint_; }  // of all bytes

 private:
  std::span<const std::uint8_t> bytes() const;
  model::Batch batch_of(std::span<const std::size_t> begins) const;

  std::string text_;
  std::size_t training_bytes_ = 0, context_ = 0;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace winnow::train
