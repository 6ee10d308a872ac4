// Documents in a text of their own, and what a batch of packs reads back.
#pragma once

#include <algorithm>

#include "tests/train_fixture.h"

namespace winnow::train {

inline constexpr const char* kSeparator = "|\n";

class PackedDocumentsTest : public TrainTest {
 protected:
  // 60 documents of 3 to 62 bytes, separators included, of words.
  PackedDocumentsTest() {
    const std::string words = tiny_text(4000);
    std::size_t at = 0;
    for (std::size_t i = 0; i < 60; ++i) {
      const std::size_t length = 1 + (i * i * 7 + i * 3) % 60;
      documents_.push_back(words.substr(at, length) + kSeparator);
      at += length;
    }
    for (const std::string& document : documents_) joined_ += document;
    text_ = write("documents.txt", joined_);
  }

  json run_of(const std::string& output) const {
    json run = tiny_run(text_, folder_ / output);
    run["data"]["documents"] = {{"separator", kSeparator}};
    return run;
  }
  TextData data_of(const json& run) const { return TextData(read_train_config(run).data); }

  // The documents as pieces of at most context + 1 bytes, each beginning with the last byte of the
  // one before it.
  static std::vector<std::string> pieces_of(const std::vector<std::string>& documents,
                                            std::size_t context) {
    std::vector<std::string> pieces;
    for (const std::string& document : documents) {
      for (std::size_t begin = 0; begin + 1 < document.size(); begin += context) {
        pieces.push_back(document.substr(begin, context + 1));
      }
    }
    return pieces;
  }

  // Every sequence of a batch that has rows, with its last target.
  static std::vector<std::string> read_back(const model::Batch& batch) {
    std::vector<std::string> all;
    for (std::size_t g = 0; g + 1 < batch.cu_seqlens.size(); ++g) {
      std::string text;
      for (auto row = static_cast<std::size_t>(batch.cu_seqlens[g]);
           row < static_cast<std::size_t>(batch.cu_seqlens[g + 1]) && batch.targets[row] >= 0;
           ++row) {
        if (text.empty()) text += static_cast<char>(batch.tokens[row]);
        EXPECT_EQ(static_cast<char>(batch.tokens[row]), text.back());
        text += static_cast<char>(batch.targets[row]);
      }
      if (!text.empty()) all.push_back(text);
    }
    return all;
  }

  // Of how many documents the training part consists.
  std::size_t trained(const TextData& data) const {
    std::size_t bytes = 0, n = 0;
    while (bytes < data.training().size()) bytes += documents_[n++].size();
    EXPECT_EQ(bytes, data.training().size());
    return n;
  }

  std::vector<std::string> documents_;
  std::string joined_;
};

inline std::vector<std::string> sorted(std::vector<std::string> all) {
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace winnow::train
