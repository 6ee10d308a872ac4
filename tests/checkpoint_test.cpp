// Checkpoints and metrics as files: whole or not there, newest two kept, damage named.
#include "train/checkpoint.h"

#include <sys/mount.h>

#include <cmath>
#include <cstring>

#include "tests/files.h"
#include "tests/tiny_run.h"
#include "train/metrics.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;

class CheckpointTest : public FolderTest {
 protected:
  CheckpointTest()
      : model_(read_train_config(tiny_run("t", "o")).model, DType::kF32, 5),
        optimizer_(model_.parameters(), {}) {
    state_.config = read_train_config(tiny_run("t", "o"));
    state_.text_fingerprint = 0xfedcba9876543210u;
    state_.train_seconds = 1.0 / 3;
  }

  fs::path save(std::int64_t step) {
    // Something to remember in every tensor.
    for (const auto& p : model_.parameters().all()) {
      for (std::int64_t i = 0; i < p->grad.elements(); ++i) {
        p->grad.as<float>()[i] = static_cast<float>(std::sin(static_cast<double>(i + step)));
      }
    }
    optimizer_.step(0.01, {});
    state_.step = step;
    return save_checkpoint(folder_, state_, model_.parameters(), optimizer_);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_ / "checkpoints")) {
      all.push_back(entry.path().filename());
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  std::optional<Checkpoint> newest() {
    damaged_.clear();
    return newest_checkpoint(folder_, damaged_);
  }

  model::Transformer model_;
  AdamW optimizer_;
  TrainerState state_;
  std::vector<std::string> damaged_;
};

void expect_same(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(
      std::memcmp(a.data, b.data, static_cast<std::size_t>(a.elements() * dtype_bytes(a.dtype))),
      0);
}

TEST_F(CheckpointTest, EverythingComesBackBitForBit) {
  save(3);
  const std::optional<Checkpoint> found = newest();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->state.step, 3);
  EXPECT_EQ(found->state.text_fingerprint, state_.text_fingerprint);
  EXPECT_EQ(found->state.train_seconds, state_.train_seconds);
  EXPECT_EQ(first_difference(found->state.config, state_.config), "");

  model::Transformer other(state_.config.model, DType::kF32, 99);
  AdamW other_optimizer(other.parameters(), {});
  load_parameters(found->folder / "model.safetensors", other.parameters());
  load_optimizer(found->folder / "optimizer.safetensors", other_optimizer);
  for (const auto& p : model_.parameters().all()) {
    expect_same(p->value, other.parameters().find(p->name)->value);
  }
  for (std::size_t i = 0; i < optimizer_.state().size(); ++i) {
    expect_same(optimizer_.state()[i].tensor, other_optimizer.state()[i].tensor);
  }
  // For generation: by the run's folder or the checkpoint's own.
  for (const fs::path& place : {folder_, found->folder}) {
    model::Transformer loaded = load_model(find_checkpoint(place, damaged_));
    for (const auto& p : model_.parameters().all()) {
      expect_same(p->value, loaded.parameters().find(p->name)->value);
    }
  }
}

TEST_F(CheckpointTest, TheNewestTwoAreKept) {
  for (std::int64_t step : {2, 4, 10, 12}) save(step);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000010", "step-00000012"}));
  save(12);  // once more, after a resume
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000010", "step-00000012"}));
}

TEST_F(CheckpointTest, WhatIsNotWholeIsNotFound) {
  fs::create_directories(folder_ / "checkpoints" / ".writing");  // killed during the first one
  EXPECT_FALSE(holds_run(folder_));
  EXPECT_FALSE(newest());
  save(2);
  save(4);
  // What a kill leaves behind: a folder that was being written, or being removed.
  fs::copy(folder_ / "checkpoints" / "step-00000004", folder_ / "checkpoints" / ".writing");
  fs::copy(folder_ / "checkpoints" / "step-00000004", folder_ / "checkpoints" / ".deleting");
  EXPECT_TRUE(holds_run(folder_));
  EXPECT_EQ(newest()->state.step, 4);
  save(6);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000004", "step-00000006"}));
}

TEST_F(CheckpointTest, ADamagedOneIsPassedOverAndNamed) {
  save(2);
  const fs::path last = save(4);
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json"}) {
    SCOPED_TRACE(file);
    const std::string whole = read(last / file);
    std::ofstream(last / file) << whole.substr(0, whole.size() / 2);
    const std::optional<Checkpoint> found = newest();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->state.step, 2);
    ASSERT_EQ(damaged_.size(), 1u);
    EXPECT_TRUE(has(damaged_[0], (last / file).string()));
    std::ofstream(last / file) << whole;
  }
  EXPECT_EQ(newest()->state.step, 4);
}

// The kind: a bit that flips on a disk, where every header is whole. One in each tensor is found,
// named, and the checkpoint before it taken.
TEST_F(CheckpointTest, AFlippedByteOfAWeightIsFoundAndItsTensorNamed) {
  save(2);
  const fs::path last = save(4);
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string whole = read(last / name);
    const model::SafetensorsFile file(last / name);
    const std::uint64_t data = whole.size() - file.entries().back().end;
    for (const model::SafetensorsEntry& entry : file.entries()) {
      std::string flipped = whole;
      const std::size_t at = data + entry.begin + (entry.end - entry.begin) * 2 / 3;
      flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
      std::ofstream(last / name, std::ios::binary) << flipped;
      const std::optional<Checkpoint> found = newest();
      ASSERT_TRUE(found);
      EXPECT_EQ(found->state.step, 2);
      ASSERT_EQ(damaged_.size(), 1u);
      EXPECT_TRUE(has(damaged_[0], "the data of tensor \"" + entry.name + "\" is not what was"));
      damaged_.clear();
      EXPECT_EQ(find_checkpoint(folder_, damaged_), found->folder);
      EXPECT_EQ(damaged_.size(), 1u);
      if (name == std::string("model.safetensors")) {
        EXPECT_TRUE(has(error_of(Status::kCorrupt, [&] { load_model(last); }), entry.name));
      }
    }
    std::ofstream(last / name, std::ios::binary) << whole;
    EXPECT_EQ(newest()->state.step, 4);
  }
}

TEST_F(CheckpointTest, AForeignModelIsRefusedByTensor) {
  const fs::path folder = save(2);
  model::ModelConfig other = state_.config.model;
  other.layers = 1;
  model::Transformer small(other, DType::kF32, 1);
  EXPECT_TRUE(
      has(error_of(Status::kCorrupt,
                   [&] { load_parameters(folder / "model.safetensors", small.parameters()); }),
          "belongs to another configuration"));
  other.layers = 3;
  model::Transformer large(other, DType::kF32, 1);
  EXPECT_TRUE(
      has(error_of(Status::kCorrupt,
                   [&] { load_parameters(folder / "model.safetensors", large.parameters()); }),
          "there is no tensor"));
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { find_checkpoint(folder_ / "nowhere", damaged_); }),
                  "name the output folder of a run"));
}

TEST_F(CheckpointTest, AFullDiskKeepsTheOlderOnes) {
  if (::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=240k") != 0) {
    GTEST_SKIP() << "needs the right to mount a small file system";
  }
  std::string message;
  std::int64_t step = 1;
  for (; step < 5 && message.empty(); ++step) {
    try {
      save(step);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kIo);
      message = error.what();
    }
  }
  EXPECT_TRUE(has(message, "free some space"));
  EXPECT_EQ(newest()->state.step, step - 2);
  EXPECT_FALSE(fs::exists(folder_ / "checkpoints" / ".writing"));
  ::umount(folder_.c_str());
}

// A mount point cannot be renamed: the error must outlive the tidying after it.
TEST_F(CheckpointTest, AnOldOneThatCannotBeRemovedIsNamed) {
  const fs::path held = save(2);
  if (::mount("tmpfs", held.c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP() << "needs the right to mount a small file system";
  }
  save(4);
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { save(6); }), "cannot remove " + held.string()));
  EXPECT_EQ(newest()->state.step, 6);
  ::umount(held.c_str());
}

TEST_F(CheckpointTest, AFolderThatCannotBeMadeIsNamed) {
  folder_ /= "file";
  std::ofstream(folder_) << "x";
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { save(1); }), "cannot create the folder"));
  folder_ = folder_.parent_path();
}

class Metrics : public FolderTest {};

TEST_F(Metrics, AResumedRunContinuesAfterItsStep) {
  const fs::path path = folder_ / "metrics.jsonl";
  {
    MetricsLog log(path, 0);
    for (int step = 1; step <= 5; ++step) log.append({{"step", step}, {"loss", 1.0 / step}});
    log.append({{"step", 5}, {"validation", 2}});
  }
  std::ofstream(path, std::ios::app) << "{\"step\": 6, \"lo";  // killed while writing
  {
    MetricsLog log(path, 5);
    log.append({{"step", 6}});
  }
  EXPECT_EQ(read_metrics(path).size(), 7u);
  {
    MetricsLog log(path, 3);
    log.append({{"step", 4}, {"again", true}});
  }
  const std::vector<nlohmann::json> lines = read_metrics(path);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[2]["loss"].get<double>(), 1.0 / 3);  // every bit of a double
  EXPECT_TRUE(lines[3]["again"].get<bool>());
  MetricsLog fresh(path, 0);
  EXPECT_TRUE(read_metrics(path).empty());
}

TEST_F(Metrics, AFileThatCannotBeWrittenIsNamed) {
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { MetricsLog("/proc/metrics.jsonl", 0); }),
                  "/proc/metrics.jsonl"));
  MetricsLog log("/dev/full", 0);
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { log.append({{"step", 1}}); }), "free some space"));
}

}  // namespace
}  // namespace winnow::train
