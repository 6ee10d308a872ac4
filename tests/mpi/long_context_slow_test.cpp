// The example of long contexts in reduced size, on as many ranks as there are: it trains, and its
// curve is that of one process.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "comm/agree.h"
#include "tests/files.h"
#include "tests/mpi/world.h"
#include "train/trainer.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

TEST(MpiLongContext, TheExampleTrainsAsOneProcessDoes) {
  const fs::path source = WINNOW_SOURCE_DIR;
  const fs::path folder = comm::text_of_first(
      world(), (fs::temp_directory_path() / fmt::format("winnow_long_{}", getpid())).string());
  json config = read_config_file(source / "examples/long_context.json");
  EXPECT_EQ(config["data"]["context"], 32768);
  EXPECT_EQ(config["parallel"]["cp"], 4);
  config["data"]["path"] = source / "data/kjv.txt";
  config["data"]["context"] = 2048;
  config["stages"][0]["steps"] = 4;
  config["stages"][0]["warmup_steps"] = 1;
  config["validate_every"] = 4;
  config["health_every"] = 2;
  const auto run = [&](std::int64_t cp, Communicator& ranks) {
    config["parallel"]["cp"] = cp;
    config["output"] = folder / std::to_string(cp);
    return Trainer(read_train_config(config), Begin::kOver, ranks).run({});
  };
  if (world().rank() == 0) {
    const std::unique_ptr<Communicator> alone = single_communicator();
    EXPECT_TRUE(run(1, *alone));
  }
  world().barrier();
  EXPECT_TRUE(run(world().size(), world()));
  if (world().rank() == 0) {
    const auto curve = [&](std::int64_t cp) {
      return read_metrics(folder / std::to_string(cp) / "metrics.jsonl");
    };
    const std::vector<json> one = curve(1), all = curve(world().size());
    ASSERT_EQ(all.size(), one.size());
    std::vector<double> losses;
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(all[i].contains("health"), one[i].contains("health"));
      EXPECT_EQ(all[i].contains("validation"), one[i].contains("validation"));
      if (!one[i].contains("loss")) continue;
      // The first step has the weights of one process, and rows with the same bits. From then on
      // weights differ by the rounding of gradients, 1e-5 of them at most, and steps of Adam with
      // them: the loss moves by less than 1e-3 of what a step changes it, which is below 1.
      losses.push_back(all[i]["loss"]);
      EXPECT_NEAR(losses.back(), one[i]["loss"].get<double>(), losses.size() == 1 ? 1e-12 : 1e-3);
    }
    ASSERT_EQ(losses.size(), 4u);
    EXPECT_LT(losses.back(), losses.front());
    fs::remove_all(folder);
  }
  world().barrier();
}

}  // namespace
}  // namespace winnow::train
