// Text as training data: bytes are tokens, and the end of the text is held out.
//
// A step reads sequences of `context` rows. Without documents a sequence is one stretch of the text,
// which begins anywhere. With documents it is a pack of whole documents (winnow/packing.h): each
// attends to itself alone, and what they do not fill is padding. A document of n bytes takes n - 1
// rows, since its last byte is a target only; one of more than context + 1 bytes is cut into pieces
// that are read as documents, and every byte but the first stays a target.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "model/transformer.h"
#include "train/config.h"
#include "winnow/packing.h"

namespace winnow::train {

// Rows that read the bytes from `begin` on, each with the next byte as its target.
struct Piece {
  std::size_t begin = 0;
  std::int64_t rows = 0;
};
using PackedPieces = std::vector<Piece>;

class TextData {
 public:
  // A text too short for one training sequence and one held-out window is an error that says what
  // is needed.
  explicit TextData(const DataConfig& config);

  // Sequences [first, first + count) of a step. What they hold is a function of (seed, step, their
  // number) alone, so a resumed run sees what an unbroken one sees, however the step is cut.
  model::Batch training_batch(std::uint64_t seed, std::int64_t step, std::int64_t first,
                              std::int64_t count) const;
  // Rows of a whole step with a target `ahead` rows further on in their document: what the sums of
  // its losses are divided by. With 0 they are its real rows, all of which have a target.
  std::int64_t training_targets(std::uint64_t seed, std::int64_t step, std::int64_t ahead) const;

  // Windows of held-out text, of `context` rows: stretches that lie end to end, or packs, of which
  // window 0 holds the longest document.
  std::int64_t validation_windows() const;
  model::Batch validation_batch(std::int64_t first, std::int64_t count) const;

  std::span<const std::uint8_t> training() const { return bytes().first(training_bytes_); }
  std::span<const std::uint8_t> validation() const { return bytes().subspan(training_bytes_); }
  std::uint64_t fingerprint() const { return fingerprint_; }  // of all bytes, and of which file

 private:
  std::span<const std::uint8_t> bytes() const;
  void read(const DataConfig& config);
  void split(const DataConfig& config);
  void split_documents(const DataConfig& config);
  std::vector<PackedPieces> packs_of(std::span<const std::size_t> ends, std::size_t begin) const;
  PackedPieces training_pack(std::uint64_t seed, std::int64_t step, std::int64_t number) const;
  model::Batch batch_of(std::span<const PackedPieces> packs) const;

  std::string text_;
  std::vector<std::size_t> file_ends_;  // in the text
  std::size_t training_bytes_ = 0;
  PackShape shape_;
  std::int64_t batch_sequences_ = 0;
  bool documents_ = false;
  std::vector<PackedPieces> training_packs_, validation_packs_;  // with documents
  std::uint64_t fingerprint_ = 0;
};

}  // namespace winnow::train
