// What is read of packed documents: epochs, held-out documents, folders, separators.
#include <numeric>
#include <set>

#include "tests/packed_documents.h"

namespace winnow::train {
namespace {

using nlohmann::json;

class PackedData : public PackedDocumentsTest {};

TEST_F(PackedData, EveryDocumentIsReadOnceAnEpochInAnOrderOfItsOwn) {
  json run = run_of("out");
  run["data"]["batch_sequences"] = 1;
  const TextData data = data_of(run);
  const std::size_t training = trained(data);
  const std::vector<std::string> pieces = pieces_of(
      {documents_.begin(), documents_.begin() + static_cast<std::ptrdiff_t>(training)}, 24);
  std::vector<std::int64_t> lengths;
  for (const std::string& piece : pieces) {
    lengths.push_back(static_cast<std::int64_t>(piece.size()) - 1);
  }
  const std::int64_t epoch = std::ssize(pack_documents(lengths, {24, 24}));
  ASSERT_GT(epoch, 20);
  std::set<std::vector<std::string>> orders;
  for (std::int64_t n = 0; n < 4; ++n) {
    std::vector<std::string> order;
    for (std::int64_t step = n * epoch; step < (n + 1) * epoch; ++step) {
      const std::vector<std::string> pack = read_back(data.training_batch(5, step, 0, 1));
      order.insert(order.end(), pack.begin(), pack.end());
    }
    EXPECT_EQ(sorted(order), sorted(pieces));
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 4u);
  EXPECT_NE(data.training_batch(5, 0, 0, 1).tokens, data.training_batch(6, 0, 0, 1).tokens);

  // Packs are full: hardly a row in ten is padding.
  std::int64_t real = 0;
  for (std::int64_t step = 0; step < epoch; ++step) real += data.training_targets(5, step, 0);
  EXPECT_EQ(real, std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
  EXPECT_GT(real, epoch * 24 * 9 / 10);
}

TEST_F(PackedData, HeldOutDocumentsAreWholeAndNeverTrainedOn) {
  const TextData data = data_of(run_of("out"));
  const std::size_t training = trained(data);
  EXPECT_GE(data.validation().size() * 5, joined_.size());  // a share of 0.2 at least
  EXPECT_LE((data.validation().size() - documents_[training].size()) * 5, joined_.size());
  const std::int64_t windows = data.validation_windows();
  const model::Batch all = data.validation_batch(0, windows);
  EXPECT_EQ(all.ranges.rows(), windows * 24);
  EXPECT_EQ(
      sorted(read_back(all)),
      sorted(pieces_of(
          {documents_.begin() + static_cast<std::ptrdiff_t>(training), documents_.end()}, 24)));
  // Window 0 has the longest; the others are the same however they are asked for.
  std::size_t longest = 0;
  for (const std::string& piece : read_back(all)) longest = std::max(longest, piece.size());
  EXPECT_EQ(read_back(data.validation_batch(0, 1))[0].size(), longest);
  std::vector<std::int32_t> tokens;
  for (std::int64_t w = 0; w < windows; ++w) {
    const std::vector<std::int32_t> one = data.validation_batch(w, 1).tokens;
    tokens.insert(tokens.end(), one.begin(), one.end());
  }
  EXPECT_EQ(tokens, all.tokens);
}

TEST_F(PackedData, AStepIsTheSameHoweverItIsCut) {
  json run = run_of("out");
  run["data"]["batch_sequences"] = 6;
  run["data"]["documents"]["max_documents"] = 3;
  run["data"]["documents"]["length_multiple"] = 4;
  const TextData data = data_of(run);
  for (const std::int64_t step : {0, 3, 77}) {
    const model::Batch whole = data.training_batch(7, step, 0, 6);
    EXPECT_EQ(whole.cu_seqlens.size(), 6u * 4 + 1);
    EXPECT_EQ(whole.cu_seqlens.back(), 6 * 24);
    for (const std::int64_t boundary : whole.cu_seqlens) EXPECT_EQ(boundary % 4, 0);
    model::Batch joined;
    for (std::int64_t n = 0; n < 6; ++n) {
      const model::Batch part = data.training_batch(7, step, n, 1);
      joined.tokens.insert(joined.tokens.end(), part.tokens.begin(), part.tokens.end());
      joined.targets.insert(joined.targets.end(), part.targets.begin(), part.targets.end());
      joined.positions.insert(joined.positions.end(), part.positions.begin(), part.positions.end());
      for (std::size_t row = 0; row < 24; ++row) {
        const auto shift = part.targets[row] < 0 ? 0 : static_cast<std::int32_t>(n * 24);
        joined.ranges.starts.push_back(part.ranges.starts[row] + shift);
        joined.ranges.ends.push_back(part.ranges.ends[row] + shift);
      }
    }
    EXPECT_EQ(joined.tokens, whole.tokens);
    EXPECT_EQ(joined.targets, whole.targets);
    EXPECT_EQ(joined.positions, whole.positions);
    EXPECT_EQ(joined.ranges.starts, whole.ranges.starts);
    EXPECT_EQ(joined.ranges.ends, whole.ranges.ends);
  }
}

TEST_F(PackedData, AFolderIsReadFileByFile) {
  const std::filesystem::path folder = folder_ / "corpus";
  std::filesystem::create_directories(folder / "b");
  std::filesystem::create_directories(folder / ".hidden");
  write("corpus/c.txt", "third");
  write("corpus/a.txt", "first");
  write("corpus/b/x.txt", "second|other|");
  write("corpus/d.txt", "held out");
  write("corpus/.hidden/y.txt", "never");
  write("corpus/.z", "never");
  json run = run_of("out");
  run["data"]["path"] = folder.string();
  run["data"]["documents"] = json::object();  // each file is a document
  run["data"]["batch_sequences"] = 2;
  const TextData data = data_of(run);
  EXPECT_EQ(sorted(read_back(data.training_batch(1, 0, 0, 1))),
            (std::vector<std::string>{"first", "second|other|", "third"}));
  EXPECT_EQ(read_back(data.validation_batch(0, 1)), (std::vector<std::string>{"held out"}));
  run["data"]["documents"]["separator"] = "|";
  EXPECT_EQ(sorted(read_back(data_of(run).training_batch(1, 0, 0, 1))),
            (std::vector<std::string>{"first", "other|", "second|", "third"}));
  // Where a file ends is part of what a run must find again.
  const std::uint64_t before = data.fingerprint();
  write("corpus/a.txt", "first|");
  write("corpus/b/x.txt", "second|other");
  EXPECT_NE(data_of(run).fingerprint(), before);
  write("corpus/a.txt", "firs");
  write("corpus/b/x.txt", "tsecond|other|");
  EXPECT_NE(data_of(run).fingerprint(), before);

  run["data"].erase("documents");
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { data_of(run); }), "is a folder"));
}

TEST_F(PackedData, SeparatorsBelongToTheDocumentThatTheyEnd) {
  json run = run_of("out");
  run["data"]["path"] = write("gaps.txt", "ab||||c|d||ef|held out").string();
  run["data"]["documents"] = {{"separator", "||"}};
  run["data"]["batch_sequences"] = 1;
  EXPECT_EQ(sorted(read_back(data_of(run).training_batch(1, 0, 0, 1))),
            (std::vector<std::string>{"ab||||", "c|d||"}));
}

TEST_F(PackedData, TooFewDocumentsAreSaid) {
  json run = run_of("out");
  for (const char* text : {"", "one document", "a|b|c|d", "|"}) {
    run["data"]["path"] = write("few.txt", text).string();
    run["data"]["documents"]["separator"] = text == std::string("a|b|c|d") ? "" : "|";
    EXPECT_TRUE(has(error_of(Status::kInvalidArgument, [&] { data_of(run); }),
                    "must hold documents of at least 2 bytes"))
        << text;
  }
}

}  // namespace
}  // namespace winnow::train
