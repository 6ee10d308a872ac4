#include "train/data.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/file.h"

namespace winnow::train {
namespace {

// One round of splitmix64: all bits of the result depend on all bits of x.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::size_t held_out(std::size_t bytes, double fraction) {
  return static_cast<std::size_t>(std::floor(static_cast<double>(bytes) * fraction));
}

// Least size whose two parts hold a sequence and its last target each.
std::size_t bytes_needed(std::size_t context, double fraction) {
  const auto part = static_cast<double>(context + 1);
  auto size = static_cast<std::size_t>(std::max(part / fraction, part / (1 - fraction)));
  while (held_out(size, fraction) < context + 1 || size - held_out(size, fraction) < context + 1) {
    ++size;
  }
  return size;
}

}  // namespace

TextData::TextData(const DataConfig& config)
    : text_(read_file("data", config.path)), context_(static_cast<std::size_t>(config.context)) {
  const std::size_t needed = bytes_needed(context_, config.validation_fraction);
  WINNOW_CHECK(
      "data", text_.size() >= needed,
      "{} must hold at least {} bytes for a context of {} with a share of {} held out, got "
      "{}: use more text or a shorter context",
      config.path, needed, context_, config.validation_fraction, text_.size());
  training_bytes_ = text_.size() - held_out(text_.size(), config.validation_fraction);
  fingerprint_ = text_.size();
  for (const std::uint8_t byte : bytes()) fingerprint_ = (fingerprint_ ^ byte) * 0x100000001b3u;
}

std::span<const std::uint8_t> TextData::bytes() const {
  return {reinterpret_cast<const std::uint8_t*>(text_.data()), text_.size()};
}

model::Batch TextData::training_batch(std::uint64_t seed, std::int64_t step, std::int64_t first,
                                      std::int64_t count) const {
  const std::uint64_t places = training_bytes_ - context_;
  std::vector<std::size_t> begins;
  for (std::int64_t i = first; i < first + count; ++i) {
    const std::uint64_t key =
        mix(mix(mix(seed) ^ static_cast<std::uint64_t>(step)) ^ static_cast<std::uint64_t>(i));
    begins.push_back(key % places);
  }
  return batch_of(begins);
}

std::int64_t TextData::validation_windows() const {
  return static_cast<std::int64_t>((validation().size() - 1) / context_);
}

model::Batch TextData::validation_batch(std::int64_t first, std::int64_t count) const {
  WINNOW_CHECK("data", first >= 0 && count >= 0 && first + count <= validation_windows(),
               "windows [{}, {}) must lie in [0, {})", first, first + count, validation_windows());
  std::vector<std::size_t> begins;
  for (std::int64_t i = first; i < first + count; ++i) {
    begins.push_back(training_bytes_ + static_cast<std::size_t>(i) * context_);
  }
  return batch_of(begins);
}

model::Batch TextData::batch_of(std::span<const std::size_t> begins) const {
  const std::span<const std::uint8_t> all = bytes();
  model::Batch batch;
  batch.ranges =
      batched_ranges(static_cast<std::int64_t>(begins.size()), static_cast<std::int64_t>(context_));
  for (const std::size_t begin : begins) {
    for (std::size_t t = 0; t < context_; ++t) {
      batch.tokens.push_back(all[begin + t]);
      batch.targets.push_back(all[begin + t + 1]);
      batch.positions.push_back(static_cast<std::int32_t>(t));
    }
  }
  return batch;
}

}  // namespace winnow::train
