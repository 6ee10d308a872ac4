// Text as training data: splits, reproducible sequences, files that are no text.
#include "train/data.h"

#include <set>

#include "tests/files.h"
#include "tests/tiny_run.h"

namespace winnow::train {
namespace {

class Data : public FolderTest {
 protected:
  DataConfig config_of(const std::string& text, std::int64_t context, double fraction) const {
    DataConfig c;
    c.path = write("text.txt", text);
    c.context = context;
    c.validation_fraction = fraction;
    return c;
  }
};

TEST_F(Data, TheTailIsHeldOutAndNeverTrainedOn) {
  std::string text(1000, 't');
  for (std::size_t i = 750; i < 1000; ++i) text[i] = 'v';
  const TextData data(config_of(text, 10, 0.25));
  EXPECT_EQ(data.training().size(), 750u);
  EXPECT_EQ(data.validation().size(), 250u);
  for (std::int64_t step = 0; step < 200; ++step) {
    const model::Batch batch = data.training_batch(3, step, 0, 4);
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      ASSERT_EQ(batch.tokens[i], 't');
      ASSERT_EQ(batch.targets[i], 't');
    }
  }
  ASSERT_EQ(data.validation_windows(), 24);  // 24 x 10 tokens and one last target
  const model::Batch all = data.validation_batch(0, 24);
  for (std::size_t i = 0; i < all.tokens.size(); ++i) ASSERT_EQ(all.targets[i], 'v');
  error_of(Status::kInvalidArgument, [&] { data.validation_batch(20, 5); });
}

TEST_F(Data, BytesAreTokensOfEveryValueAndTargetsTheNextOnes) {
  std::string text;
  for (int i = 0; i < 4096; ++i) text += static_cast<char>(i * 7 + i / 256);
  const TextData data(config_of(text, 16, 0.1));
  const model::Batch batch = data.training_batch(1, 5, 0, 3);
  ASSERT_EQ(batch.tokens.size(), 48u);
  EXPECT_EQ(batch.ranges.rows(), 48);
  for (std::size_t i = 0; i < 48; ++i) {
    EXPECT_EQ(batch.positions[i], static_cast<std::int32_t>(i % 16));
    EXPECT_EQ(batch.ranges.starts[i], static_cast<std::int32_t>(i / 16 * 16));
    EXPECT_EQ(batch.ranges.ends[i], static_cast<std::int32_t>(i + 1));
    if (i % 16 != 15) {
      EXPECT_EQ(batch.targets[i], batch.tokens[i + 1]);
    }
    EXPECT_GE(batch.tokens[i], 0);
    EXPECT_LE(batch.tokens[i], 255);
  }
}

TEST_F(Data, SequencesDependOnSeedStepAndNumberOnly) {
  const TextData data(config_of(tiny_text(5000), 16, 0.1));
  const model::Batch whole = data.training_batch(7, 11, 0, 6);
  std::vector<std::int32_t> parts;
  for (std::int64_t first : {0, 2, 4}) {
    const model::Batch part = data.training_batch(7, 11, first, 2);
    parts.insert(parts.end(), part.tokens.begin(), part.tokens.end());
  }
  EXPECT_EQ(whole.tokens, parts);
  EXPECT_NE(whole.tokens, data.training_batch(7, 12, 0, 6).tokens);
  EXPECT_NE(whole.tokens, data.training_batch(8, 11, 0, 6).tokens);
}

TEST_F(Data, EveryPlaceIsDrawn) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += static_cast<char>('A' + i);
  const TextData data(config_of(text, 4, 0.2));
  std::set<std::int32_t> begins;
  for (std::int64_t step = 0; step < 2000; ++step) {
    begins.insert(data.training_batch(1, step, 0, 1).tokens[0]);
  }
  EXPECT_EQ(begins.size(), 44u);  // 48 bytes of training, of which a sequence reads 5
}

TEST_F(Data, ShortFilesSayHowManyBytesAreNeeded) {
  for (std::int64_t context : {1, 7, 64}) {
    for (double fraction : {0.03, 0.2, 0.5, 0.9}) {
      const std::string message =
          error_of(Status::kInvalidArgument, [&] { TextData{config_of("", context, fraction)}; });
      const std::string lead = "must hold at least ";
      const std::size_t at = message.find(lead);
      ASSERT_NE(at, std::string::npos) << message;
      EXPECT_TRUE(has(message, "got 0"));
      const std::size_t needed = std::stoul(message.substr(at + lead.size()));
      // Exactly so many are enough.
      const TextData data(config_of(std::string(needed, 'x'), context, fraction));
      EXPECT_GE(data.validation_windows(), 1);
      data.training_batch(1, 1, 0, 1);
      error_of(Status::kInvalidArgument,
               [&] { TextData{config_of(std::string(needed - 1, 'x'), context, fraction)}; });
    }
  }
}

TEST_F(Data, WhatIsNoTextFileIsNamed) {
  DataConfig config;
  config.context = 8;
  config.path = folder_ / "none.txt";
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { TextData{config}; }), "No such file"));
  config.path = folder_;
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { TextData{config}; }), "is a folder"));
}

TEST_F(Data, FingerprintSeesEveryByte) {
  std::string text = tiny_text(500);
  const std::uint64_t before = TextData(config_of(text, 8, 0.1)).fingerprint();
  EXPECT_EQ(TextData(config_of(text, 8, 0.1)).fingerprint(), before);
  text[250] = static_cast<char>(text[250] ^ 1);
  EXPECT_NE(TextData(config_of(text, 8, 0.1)).fingerprint(), before);
}

}  // namespace
}  // namespace winnow::train
