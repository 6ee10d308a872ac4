#include "train/data.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/hash.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOperation = "data";

// One round of splitmix64: all bits of the result depend on all bits of x.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The place of i in a permutation of the numbers below n that depends on the key: a Feistel network
// on the next even power of two, applied until the result is below n.
std::uint64_t permuted(std::uint64_t i, std::uint64_t n, std::uint64_t key) {
  const int half = std::max(1, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  constexpr std::uint64_t kRounds = 8;
  do {
    std::uint64_t left = i >> half, right = i & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      left ^= mix(mix(key + round) ^ right) & mask;
      std::swap(left, right);
    }
    i = left << half | right;
  } while (i >= n);
  return i;
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

// The files in a folder and in folders inside it, by name; hidden ones are passed over.
std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().rfind('.', 0) == 0) {
      entry.disable_recursion_pending();
    } else if (!entry->is_directory()) {
      files.push_back(entry->path());
    }
  }
  if (error) {
    fail(Status::kIo, kOperation, "cannot read {}: {}", folder.string(),
         system_reason(error.value()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Where the documents of a text end. A separator belongs to the document that it ends, and so do
// those that follow at once.
std::vector<std::size_t> document_ends(const std::string& text,
                                       std::span<const std::size_t> file_ends,
                                       const std::string& separator) {
  std::vector<std::size_t> ends;
  std::size_t begin = 0;
  for (const std::size_t file_end : file_ends) {
    while (begin < file_end) {
      std::size_t end = separator.empty() ? std::string::npos : text.find(separator, begin);
      while (end < file_end && text.compare(end, separator.size(), separator) == 0) {
        end += separator.size();
      }
      ends.push_back(std::min(end, file_end));
      begin = ends.back();
    }
  }
  return ends;
}

}  // namespace

TextData::TextData(const DataConfig& config)
    : batch_sequences_(config.batch_sequences), documents_(config.documents.has_value()) {
  read(config);
  fingerprint_ = text_.size();
  for (const std::uint8_t byte : bytes()) fingerprint_ = hash_with(fingerprint_, byte);
  for (std::size_t i = 0; i + 1 < file_ends_.size(); ++i) {
    fingerprint_ = mix(fingerprint_ ^ file_ends_[i]);
  }
  if (documents_) {
    split_documents(config);
  } else {
    split(config);
  }
}

void TextData::read(const DataConfig& config) {
  std::error_code error;
  if (!documents_ || !fs::is_directory(config.path, error)) {
    text_ = read_file(kOperation, config.path);
    file_ends_ = {text_.size()};
    return;
  }
  for (const fs::path& file : files_in(config.path)) {
    text_ += read_file(kOperation, file);
    file_ends_.push_back(text_.size());
  }
}

void TextData::split(const DataConfig& config) {
  shape_ = {config.context, 1, 1};
  const std::size_t needed =
      bytes_needed(static_cast<std::size_t>(config.context), config.validation_fraction);
  WINNOW_CHECK(
      kOperation, text_.size() >= needed,
      "{} must hold at least {} bytes for a context of {} with a share of {} held out, got "
      "{}: use more text or a shorter context",
      config.path, needed, config.context, config.validation_fraction, text_.size());
  training_bytes_ = text_.size() - held_out(text_.size(), config.validation_fraction);
}

// Whole documents are held out, with at least the share of the bytes that is asked for.
void TextData::split_documents(const DataConfig& config) {
  const DocumentsConfig& documents = *config.documents;
  shape_ = {config.context, documents.max_documents, documents.length_multiple};
  const std::vector<std::size_t> ends = document_ends(text_, file_ends_, documents.separator);
  const std::size_t most = text_.size() - held_out(text_.size(), config.validation_fraction);
  std::size_t training = 0;
  while (training + 1 < ends.size() && ends[training] <= most) ++training;
  training_bytes_ = training == 0 ? 0 : ends[training - 1];
  const std::span<const std::size_t> all = ends;
  training_packs_ = packs_of(all.first(training), 0);
  validation_packs_ = packs_of(all.subspan(training), training_bytes_);
  WINNOW_CHECK(kOperation, !training_packs_.empty() && !validation_packs_.empty(),
               "{} must hold documents of at least 2 bytes to train on, and others to hold out a "
               "share of {}, got {} documents in {} bytes: use more text, or another "
               "data.documents.separator",
               config.path, config.validation_fraction, ends.size(), text_.size());
}

// The documents that end at `ends`, the first of which begins at `begin`.
std::vector<PackedPieces> TextData::packs_of(std::span<const std::size_t> ends,
                                             std::size_t begin) const {
  PackedPieces pieces;
  std::vector<std::int64_t> lengths;
  for (const std::size_t end : ends) {
    while (begin + 1 < end) {
      const std::int64_t rows = std::min(static_cast<std::int64_t>(end - begin - 1), shape_.rows);
      pieces.push_back({begin, rows});
      lengths.push_back(rows);
      begin += static_cast<std::size_t>(rows);
    }
    begin = end;
  }
  std::vector<PackedPieces> packs;
  for (const std::vector<std::int64_t>& pack : pack_documents(lengths, shape_)) {
    packs.emplace_back();
    for (const std::int64_t n : pack) packs.back().push_back(pieces[static_cast<std::size_t>(n)]);
  }
  return packs;
}

std::span<const std::uint8_t> TextData::bytes() const {
  return {reinterpret_cast<const std::uint8_t*>(text_.data()), text_.size()};
}

// Packs are read epoch by epoch, each in an order of its own.
PackedPieces TextData::training_pack(std::uint64_t seed, std::int64_t step,
                                     std::int64_t number) const {
  if (!documents_) {
    const std::uint64_t places = training_bytes_ - static_cast<std::size_t>(shape_.rows);
    const std::uint64_t key =
        mix(mix(mix(seed) ^ static_cast<std::uint64_t>(step)) ^ static_cast<std::uint64_t>(number));
    return {{key % places, shape_.rows}};
  }
  const std::uint64_t packs = training_packs_.size();
  const auto n = static_cast<std::uint64_t>(step * batch_sequences_ + number);
  return training_packs_[permuted(n % packs, packs, mix(mix(seed) ^ (n / packs)))];
}

model::Batch TextData::training_batch(std::uint64_t seed, std::int64_t step, std::int64_t first,
                                      std::int64_t count) const {
  std::vector<PackedPieces> packs;
  for (std::int64_t i = first; i < first + count; ++i) {
    packs.push_back(training_pack(seed, step, i));
  }
  return batch_of(packs);
}

std::int64_t TextData::training_targets(std::uint64_t seed, std::int64_t step,
                                        std::int64_t ahead) const {
  std::int64_t targets = 0;
  for (std::int64_t i = 0; i < batch_sequences_; ++i) {
    for (const Piece& piece : training_pack(seed, step, i)) {
      targets += std::max<std::int64_t>(0, piece.rows - ahead);
    }
  }
  return targets;
}

std::int64_t TextData::validation_windows() const {
  if (documents_) return static_cast<std::int64_t>(validation_packs_.size());
  return static_cast<std::int64_t>((validation().size() - 1) /
                                   static_cast<std::size_t>(shape_.rows));
}

// The first packs stand for all: behind that of the longest document they come in an order that is
// mixed, and always the same.
model::Batch TextData::validation_batch(std::int64_t first, std::int64_t count) const {
  WINNOW_CHECK(kOperation, first >= 0 && count >= 0 && first + count <= validation_windows(),
               "windows [{}, {}) must lie in [0, {})", first, first + count, validation_windows());
  std::vector<PackedPieces> packs;
  for (std::int64_t i = first; i < first + count; ++i) {
    const auto n = static_cast<std::uint64_t>(i);
    if (!documents_) {
      packs.push_back({{training_bytes_ + n * static_cast<std::size_t>(shape_.rows), shape_.rows}});
    } else if (i == 0) {
      packs.push_back(validation_packs_[0]);
    } else {
      packs.push_back(validation_packs_[1 + permuted(n - 1, validation_packs_.size() - 1, 0)]);
    }
  }
  return batch_of(packs);
}

model::Batch TextData::batch_of(std::span<const PackedPieces> packs) const {
  const std::span<const std::uint8_t> all = bytes();
  model::Batch batch;
  batch.cu_seqlens = {0};
  for (const PackedPieces& pieces : packs) {
    std::vector<std::int64_t> lengths;
    for (const Piece& piece : pieces) lengths.push_back(piece.rows);
    const Pack pack = lay_out_pack(lengths, shape_);
    const auto offset = static_cast<std::int32_t>(batch.tokens.size());
    for (std::size_t row = 0; row < pack.real.size(); ++row) {
      const bool real = pack.real[row] != 0;
      batch.ranges.starts.push_back(real ? offset + pack.ranges.starts[row] : 0);
      batch.ranges.ends.push_back(real ? offset + pack.ranges.ends[row] : 0);
    }
    batch.positions.insert(batch.positions.end(), pack.positions.begin(), pack.positions.end());
    batch.tokens.resize(batch.positions.size(), 0);
    batch.targets.resize(batch.positions.size(), -1);
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      const auto row = static_cast<std::size_t>(offset + pack.cu_seqlens[n]);
      for (std::size_t t = 0; t < static_cast<std::size_t>(pieces[n].rows); ++t) {
        batch.tokens[row + t] = all[pieces[n].begin + t];
        batch.targets[row + t] = all[pieces[n].begin + t + 1];
      }
    }
    for (std::size_t g = 1; g < pack.cu_seqlens.size(); ++g) {
      batch.cu_seqlens.push_back(offset + pack.cu_seqlens[g]);
    }
  }
  return batch;
}

}  // namespace winnow::train
