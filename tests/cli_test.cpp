// The program itself: what it prints, and how it ends.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tiny_run.h"

namespace {

struct Outcome {
  int status = -1;
  std::string out, err;
};

std::string read_all(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Runs winnow with arguments (and environment before them) as a shell takes them.
Outcome winnow(const std::string& arguments, const std::string& environment = "") {
  const std::string base = fmt::format("{}/winnow_cli_{}", testing::TempDir(), getpid());
  const int status = std::system(fmt::format("env {} {} {} >{}.out 2>{}.err", environment,
                                             WINNOW_PROGRAM, arguments, base, base)
                                     .c_str());
  Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : 128, read_all(base + ".out"),
                  read_all(base + ".err")};
  std::filesystem::remove(base + ".out");
  std::filesystem::remove(base + ".err");
  return outcome;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// One line "winnow: ..." on standard error, nothing on standard output, and the status.
void expect_failure(const Outcome& o, int status, const std::string& part) {
  EXPECT_EQ(o.status, status) << o.err;
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(lines_of(o.err).size(), 1u) << o.err;
  EXPECT_EQ(o.err.rfind("winnow: ", 0), 0u) << o.err;
  EXPECT_TRUE(has(o.err, part)) << o.err;
}

TEST(Cli, HelpShowsEveryCommandWithExamples) {
  const Outcome help = winnow("--help");
  EXPECT_EQ(help.status, 0);
  for (const char* command : {"info", "why", "check", "bench", "plan"}) {
    EXPECT_TRUE(has(help.out, fmt::format("  {}", command))) << command;
    const Outcome of_command = winnow(fmt::format("{} --help", command));
    EXPECT_EQ(of_command.status, 0);
    EXPECT_TRUE(has(of_command.out, fmt::format("Examples:\n  winnow {}", command))) << command;
  }
  EXPECT_EQ(winnow("").status, 2);
  EXPECT_EQ(winnow("--version").out.rfind("winnow ", 0), 0u);
}

// The kind: a fallback that nobody hears of. The newest checkpoint has a bad byte in a weight.
TEST(Cli, GenerateSaysWhenItReadsAnOlderCheckpoint) {
  namespace fs = std::filesystem;
  const fs::path folder = fmt::format("{}/winnow_cli_run_{}", testing::TempDir(), getpid());
  fs::create_directories(folder);
  std::ofstream(folder / "text.txt") << winnow::train::tiny_text(4000);
  nlohmann::json run = winnow::train::tiny_run(folder / "text.txt", folder / "out");
  run["checkpoint_every"] = 6;
  std::ofstream(folder / "run.json") << run.dump();
  EXPECT_EQ(winnow(fmt::format("train {}", (folder / "run.json").string())).status, 0);
  const std::string generate =
      fmt::format("generate {} --prompt the --max-tokens 4", (folder / "out").string());
  const Outcome whole = winnow(generate);
  EXPECT_EQ(whole.status, 0);
  EXPECT_EQ(whole.err, "");
  const fs::path newest = folder / "out/checkpoints/step-00000013/model.safetensors";
  std::string bytes = read_all(newest);
  bytes[bytes.size() - 100] = static_cast<char>(bytes[bytes.size() - 100] ^ 1);
  std::ofstream(newest, std::ios::binary) << bytes;
  const Outcome older = winnow(generate);
  EXPECT_EQ(older.status, 0);
  EXPECT_TRUE(has(older.err, "passed over a damaged checkpoint: [safetensors] " + newest.string()))
      << older.err;
  EXPECT_TRUE(has(older.err, "step-00000012\n")) << older.err;
  fs::remove_all(folder);
}

TEST(Cli, MistakesNameTheNearestValidWord) {
  expect_failure(winnow("chek"), 2, "no command \"chek\"; did you mean \"check\"?");
  expect_failure(winnow("bench --jsno"), 2, "no option --jsno; did you mean --json?");
  expect_failure(winnow("check index_score"), 2, "did you mean \"index_scores\"?");
  expect_failure(winnow("why index_scores rws=3"), 2, "did you mean \"rows\"?");
  expect_failure(winnow("bench index_scores rows=many"), 2, "rows must be a whole number");
  expect_failure(winnow("bench --operation index_scor"), 2, "did you mean \"index_scores\"?");
  expect_failure(winnow("bench --threads 0"), 2, "--threads");
  expect_failure(winnow("check", "WINNOW_PIN=index_scor=reference"), 2, "WINNOW_PIN");
  expect_failure(winnow("info", "WINNOW_PIN=nonsense"), 1, "WINNOW_PIN must read");
  expect_failure(winnow("info", "WINNOW_PIN=index_scores="), 1, "WINNOW_PIN must read");
  expect_failure(winnow("info", "WINNOW_CPU=mmx"), 1, "WINNOW_CPU must be");
  for (const char* command : {"info", "why matmul", "check matmul", "bench matmul"})
    expect_failure(winnow(command, "WINNOW_NUM_THREADS=none"), 1, "WINNOW_NUM_THREADS must be");
  expect_failure(winnow("info", "WINNOW_FORBID=nonsense"), 1, "WINNOW_FORBID must read");
  expect_failure(winnow("why", "WINNOW_FORBID=index_scor=reference"), 2, "WINNOW_FORBID");
  expect_failure(winnow("why \"sparse_attention rows\""), 2, "must read name=value, got \"rows\"");
  expect_failure(winnow("why matmul flibble"), 2,
                 "no operation \"flibble\"; there are index_scores,");
  expect_failure(winnow("why \"\""), 2, "must begin with an operation");
  expect_failure(winnow("check \"\""), 2, "must begin with an operation");
}

// A name that no list has would pin or forbid nothing, silently.
TEST(Cli, UnknownImplementationsAreNamedWithThoseThatExist) {
  for (const char* command : {"why index_scores", "check index_scores", "info"}) {
    expect_failure(
        winnow(command, "WINNOW_PIN=index_scores=abacus"), 2,
        "WINNOW_PIN: index_scores has no implementation \"abacus\" in this build; there are ");
    expect_failure(winnow(command, "WINNOW_FORBID='*=abacus'"), 2,
                   "WINNOW_FORBID: no operation has an implementation \"abacus\"");
  }
}

TEST(Cli, MoreThanMemoryIsAnErrorAndNoCrash) {
  const Outcome check = winnow("check index_scores rows=2000000000 index_heads=16");
  EXPECT_EQ(check.status, 1);
  EXPECT_TRUE(has(check.out, "do not fit into memory; use smaller sizes"));
  EXPECT_TRUE(has(lines_of(check.out).back(), "0 passed, "));
  expect_failure(winnow("bench --json index_scores rows=2000000000 index_heads=16"), 1,
                 "this does not fit into memory; use smaller sizes in the problem");
  expect_failure(winnow("check index_scores rows=-1"), 2, "rows must be a whole number from 0");
  expect_failure(winnow("check select_topk step=0"), 2, "step must be a whole number from 1");
  expect_failure(winnow("check append_pools context=-1"), 2, "context must be");
  expect_failure(winnow("check tile_scales tokens=-1"), 2, "tokens must be");
}

TEST(Cli, InfoIsOneJsonObject) {
  const Outcome o = winnow("info --json", "WINNOW_NUM_THREADS=3 WINNOW_CPU=portable");
  EXPECT_EQ(o.status, 0);
  const nlohmann::json info = nlohmann::json::parse(o.out);
  EXPECT_EQ(info.at("threads"), 3);
  EXPECT_FALSE(info.at("version").get<std::string>().empty());
  EXPECT_FALSE(info.at("build").at("compiler").get<std::string>().empty());
  EXPECT_TRUE(info.at("cpu").at("features").is_array());
  EXPECT_TRUE(info.at("libraries").contains("fmt"));
  EXPECT_EQ(info.at("processes")[0].at("kind"), "mpi");
  for (const auto& set : info.at("instruction_sets"))
    EXPECT_EQ(set.at("usable"), set.at("name") == "portable");
  for (const auto& device : info.at("devices"))
    EXPECT_TRUE(device.at("kind") != "cpu" || device.at("usable") == true);
  EXPECT_TRUE(has(winnow("info").out, "device cuda"));  // usable or not, and why
}

TEST(Cli, WhyNamesWhoRunsAndWhyOthersRefuse) {
  const Outcome list = winnow("why");
  EXPECT_EQ(list.status, 0);
  EXPECT_TRUE(has(list.out, "index_scores: "));
  EXPECT_TRUE(has(list.out, "  index_heads     64 "));
  const Outcome f64 = winnow("why index_scores rows=2 keys=9 dtype=f64");
  EXPECT_EQ(f64.status, 0);
  EXPECT_TRUE(has(f64.out, "cpu.portable      refuses: "));
  EXPECT_TRUE(has(f64.out, "reference         runs"));
  const Outcome pinned = winnow("why index_scores", "WINNOW_PIN=index_scores=reference");
  EXPECT_TRUE(has(pinned.out, "WINNOW_PIN allows only reference"));
  EXPECT_TRUE(has(pinned.out, "cpu.portable      refuses: index_scores is pinned to reference"));
  const Outcome nobody =
      winnow("why index_scores dtype=f64", "WINNOW_PIN=index_scores=cpu.portable");
  EXPECT_EQ(nobody.status, 1);
  EXPECT_TRUE(has(nobody.out, "reference         refuses: index_scores is pinned to cpu.portable"));
  const Outcome forbidden =
      winnow("why index_scores", "WINNOW_FORBID='*=cpu.portable,index_scores=reference'");
  EXPECT_TRUE(has(forbidden.out, "cpu.portable      refuses: it is forbidden for all operations"));
  EXPECT_TRUE(has(forbidden.out, "reference         refuses: it is forbidden for index_scores"));
}

TEST(Cli, WhySaysWhatACallCostsInMemory) {
  const Outcome o = winnow("why --threads 3 index_topk rows=2 keys=70000 index_heads=1 index_dim=2",
                           "WINNOW_CPU=portable");
  EXPECT_EQ(o.status, 0) << o.err;
  const std::int64_t inputs = 4 * (2 * 2 + 70000 * 2 + 2 + 2 + 2), outputs = 4 * (2 * 64 * 2 + 2);
  EXPECT_TRUE(has(o.out, fmt::format("  inputs            547 KiB ({} bytes)\n", inputs))) << o.out;
  EXPECT_TRUE(has(o.out, fmt::format("  outputs           1.0 KiB ({} bytes)\n", outputs)))
      << o.out;
  EXPECT_TRUE(has(o.out, "  threads           3\n")) << o.out;
  EXPECT_TRUE(has(o.out, "cpu.portable      runs; workspace ")) << o.out;
  EXPECT_TRUE(has(o.out, "reference         accepts, but stands after cpu.portable; workspace "))
      << o.out;
  const Outcome budget = winnow("why index_topk rows=2 keys=70000 budget=1000000");
  EXPECT_TRUE(has(budget.out, "  budget            977 KiB (1000000 bytes)")) << budget.out;
  const Outcome little = winnow("why index_topk rows=2 keys=70000 budget=100");
  EXPECT_EQ(little.status, 1);
  EXPECT_TRUE(has(little.out, "workspace_budget must be at least ")) << little.out;
  const Outcome step = winnow("why training_step", "WINNOW_CPU=portable");
  EXPECT_TRUE(has(step.out, "cpu.portable      runs; its memory is not counted")) << step.out;
  EXPECT_TRUE(has(step.out, "  inside: index_topk                cpu.portable")) << step.out;
}

// Within 200 MB of address space, of which the program itself takes most; with the kernels and the
// libraries of GPUs it is larger.
TEST(Cli, WhyAnswersAtAnySize) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer reserves more";
#endif
#if defined(WINNOW_CUDA)
  constexpr int kKilobytes = 2000000;
#else
  constexpr int kKilobytes = 200000;
#endif
  for (const char* problem :
       {"index_topk rows=16384 keys=1048576 dtype=bf16", "index_scores rows=16384 keys=1048576",
        "dense_index_loss rows=65536 keys=65536 dtype=bf16",
        "sparse_attention rows=100000000 keys=2000000000"}) {
    const int status = std::system(fmt::format("ulimit -v {}; {} why \"{}\" >/dev/null 2>&1",
                                               kKilobytes, WINNOW_PROGRAM, problem)
                                       .c_str());
    EXPECT_EQ(WEXITSTATUS(status), 0) << problem;
  }
}

TEST(Cli, CheckEndsInACount) {
  const Outcome o = winnow("check \"index_scores rows=3 keys=40 index_heads=4 index_dim=8\"");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  const std::vector<std::string> lines = lines_of(o.out);
  ASSERT_FALSE(lines.empty());
  int passed = 0;
  ASSERT_EQ(std::sscanf(lines.back().c_str(), "%d passed", &passed), 1);
  EXPECT_EQ(lines.back(), fmt::format("{} passed, 0 failed", passed));
  EXPECT_GE(passed, 2);
  EXPECT_TRUE(has(o.out, "reference"));
  const Outcome one = winnow("check index_scores rows=3 keys=40 index_heads=4 index_dim=8",
                             "WINNOW_PIN=index_scores=reference");
  EXPECT_EQ(lines_of(one.out).back(), "1 passed, 0 failed");
}

TEST(Cli, CheckWithNothingToCheckFails) {
  const Outcome o =
      winnow("check index_scores rows=3 dtype=f64", "WINNOW_PIN=index_scores=cpu.portable");
  EXPECT_EQ(o.status, 1);
  EXPECT_EQ(lines_of(o.out).back(), "0 passed, 0 failed");
  const std::filesystem::path empty =
      std::filesystem::path(testing::TempDir()) / fmt::format("winnow_empty_{}", getpid());
  std::filesystem::create_directories(empty);
  // Before anything runs: all operations would take their time.
  for (const std::string& place : {std::string("/no/such/place"), empty.string()}) {
    const Outcome missing = winnow("check --golden " + place);
    EXPECT_EQ(missing.status, 1);
    EXPECT_EQ(missing.out, "0 passed, 0 failed\n");
    EXPECT_TRUE(has(missing.err, place)) << missing.err;
  }
  std::filesystem::remove_all(empty);
}

// One stream for both: what was printed before the error stands before it.
TEST(Cli, TheErrorComesLast) {
  const std::string path = fmt::format("{}/winnow_both_{}", testing::TempDir(), getpid());
  std::system(
      fmt::format("{} check --golden /no/such/place >{} 2>&1", WINNOW_PROGRAM, path).c_str());
  const std::vector<std::string> lines = lines_of(read_all(path));
  std::filesystem::remove(path);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "0 passed, 0 failed");
  EXPECT_EQ(lines[1].rfind("winnow: [golden]", 0), 0u);
}

TEST(Cli, FilesWithoutAnEndAreRefusedByName) {
  const std::string base = fmt::format("{}/winnow_pipe_{}", testing::TempDir(), getpid());
  ASSERT_EQ(std::system(fmt::format("mkfifo {}", base).c_str()), 0);
  expect_failure(winnow("train " + base), 1, base + ": it is a pipe, a file is needed; write what");
  expect_failure(winnow("train /dev/zero"), 1,
                 "/dev/zero: it is a device, a file is needed; write");
  expect_failure(winnow("train " + testing::TempDir()), 1, "it is a folder, a file is needed");
  std::filesystem::remove(base);
}

TEST(Cli, CheckComparesGoldenVectors) {
  const std::string golden = WINNOW_SOURCE_DIR "/tests/golden";
  const Outcome o =
      winnow("check index_scores rows=1 keys=4 index_heads=1 index_dim=4 --golden " + golden);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(has(o.out, "reference f64"));
  EXPECT_TRUE(has(lines_of(o.out).back(), " passed, 0 failed"));
}

// What was skipped stands on a line of its own: the last line is for machines.
TEST(Cli, CheckEndsInTheCountWhereFilesWereSkipped) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / fmt::format("winnow_golden_{}", getpid());
  std::filesystem::create_directories(folder / "models/tiny");
  std::ofstream(folder / "models/tiny/expected.safetensors") << "";
  const Outcome o = winnow(
      "check index_scores rows=1 keys=4 index_heads=1 index_dim=4 --golden " + folder.string(),
      "WINNOW_PIN=index_scores=reference");
  std::filesystem::remove_all(folder);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  const std::vector<std::string> lines = lines_of(o.out);
  ASSERT_GE(lines.size(), 2u);
  EXPECT_EQ(lines[lines.size() - 2], "1 skipped");
  EXPECT_EQ(lines.back(), "1 passed, 0 failed");
}

constexpr char kSharing[] = "--layers 78 --mtp-depths 7 --topk-freq 4 --skip-topk-offset 3 ";

TEST(Cli, PlanTellsWhatALayoutCosts) {
  const Outcome o = winnow(std::string("plan ") + kSharing +
                           "--pp 8 --layout 'Et*10|t*12|t*12|t*12|t*12|t*12|t*8|m*7L'");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(has(o.out, "    0     0  E, 1 to 10  1 2 3 7 ")) << o.out;
  EXPECT_TRUE(has(o.out, "    7     7  m*7, L      79 ")) << o.out;
  EXPECT_EQ(
      winnow(std::string("plan ") + kSharing + "--pp 4 --layout 'Et*18|t*24|t*24|t*12m*7L'").status,
      0);
}

// A stage that would begin on a layer that reuses indices.
TEST(Cli, PlanNamesTheLayerThatLosesItsSource) {
  const std::string command =
      std::string("plan ") + kSharing + "--pp 4 --layout 'Et*17|t*24|t*24|t*13m*7L'";
  const Outcome o = winnow(command);
  EXPECT_EQ(o.status, 1);
  EXPECT_TRUE(has(o.out,
                  "layer 18 in stage 1 (rank 1, virtual stage 0) without its source: it "
                  "reuses the indices of layer 15"));
  EXPECT_TRUE(has(o.out, "valid: Et*18|t*24|t*24|t*12m*7L"));
  EXPECT_EQ(lines_of(o.err).size(), 1u);
  EXPECT_TRUE(has(o.err, "winnow: [plan] 3 rules are broken: plan.layout")) << o.err;

  const Outcome json = winnow(command + " --json");
  EXPECT_EQ(json.status, 1);
  const nlohmann::json violations = nlohmann::json::parse(json.out).at("violations");
  ASSERT_EQ(violations.size(), 3u);
  EXPECT_EQ(violations[0].at("option"), "plan.layout");
  EXPECT_EQ(violations[0].at("valid"), "Et*18|t*24|t*24|t*12m*7L");
}

TEST(Cli, PlanReadsWhatTrainReads) {
  const Outcome o = winnow("plan --json " WINNOW_SOURCE_DIR "/examples/demo.json");
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  const nlohmann::json plan = nlohmann::json::parse(o.out);
  EXPECT_EQ(plan.at("processors"), 1);
  EXPECT_EQ(plan.at("tokens"), 1024);
  EXPECT_EQ(plan.at("stages").at(0).at("computes_indices"), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_GT(plan.at("stages").at(0).at("parameters").get<double>(), 1.2e6);
}

TEST(Cli, PlanExamplesAreValidAndDrawn) {
  const std::filesystem::path picture =
      std::filesystem::path(testing::TempDir()) / fmt::format("winnow_plan_{}.svg", getpid());
  for (const char* example : {"plan_78_layers.json", "plan_1m_tokens_cp64.json"}) {
    const Outcome o = winnow(
        fmt::format("plan {}/examples/{} --svg {}", WINNOW_SOURCE_DIR, example, picture.string()));
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    EXPECT_TRUE(has(read_all(picture.string()), "layer 18 reuses those of 15"));
    std::filesystem::remove(picture);
  }
  // One million tokens on 64 ranks: 256 of 16384 rows at a time under 2 GiB.
  const Outcome million = winnow("plan " WINNOW_SOURCE_DIR "/examples/plan_1m_tokens_cp64.json");
  EXPECT_TRUE(has(million.out, "scores: 256 of 16384 rows at a time, 64 launches")) << million.out;
}

// Of a file and of the command line, all at once.
TEST(Cli, PlanSaysEverythingThatIsWrong) {
  const Outcome o = winnow("plan " WINNOW_SOURCE_DIR
                           "/examples/demo.json --layers 0 --topk-freq 0 --cp 3 --recompute full "
                           "--recompute mlp --machine tpu --stage sparsely");
  EXPECT_EQ(o.status, 1);
  for (const char* part :
       {"layers must be from 1 to 1024, got 0\n    valid: 1\n", "topk_freq must be from 1",
        "data.context must be a multiple of 2 x plan.cp = 6", "\"full\" makes everything again",
        "plan.machine must be one of h200, h100, a100 or cpu-core, got \"tpu\"",
        "plan.stage must be the name of one of the stages, got \"sparsely\"\n    valid: sparse"}) {
    EXPECT_TRUE(has(o.out, part)) << part << "\n" << o.out;
  }
  expect_failure(winnow("plan --model glm-5"), 2, "did you mean \"glm-5.2\"?");
  expect_failure(winnow("plan --laout x"), 2, "did you mean --layout?");
  expect_failure(winnow("plan no/such.json"), 1, "no/such.json");
  EXPECT_EQ(winnow("plan --svg /no/such/folder/x.svg").status, 1);
}

// The help quotes the program's own words.
TEST(Cli, WhyRefusesInTheWordsOfItsHelp) {
  const std::string refusal = "cpu.portable      refuses: f64 is left to the reference";
  EXPECT_TRUE(has(winnow("why --help").out, refusal));
  EXPECT_TRUE(has(winnow("why \"index_scores keys=4096 dtype=f64\"").out, refusal));
}

TEST(Cli, BenchWritesJsonLines) {
  const std::string problem = "index_scores rows=2 keys=64 index_heads=4 index_dim=16";
  const Outcome o =
      winnow(fmt::format("bench --json --all --threads 2 --repeat 3 \"{}\"", problem));
  EXPECT_EQ(o.status, 0) << o.err;
  std::vector<std::string> implementations;
  for (const std::string& text : lines_of(o.out)) {
    const nlohmann::json line = nlohmann::json::parse(text);
    EXPECT_EQ(line.at("operation"), "index_scores");
    EXPECT_EQ(line.at("problem"), problem);
    EXPECT_EQ(line.at("device"), "cpu");
    EXPECT_EQ(line.at("threads"), 2);
    EXPECT_EQ(line.at("runs"), 3);
    EXPECT_EQ(line.at("flops"), 2.0 * 2 * 64 * 4 * 16);
    EXPECT_GT(line.at("ms").get<double>(), 0);
    EXPECT_GT(line.at("floor_ms").get<double>(), 0);
    EXPECT_GT(line.at("bytes").get<double>(), 0);
    EXPECT_GE(line.at("workspace_bytes").get<std::int64_t>(), 0);
    implementations.push_back(line.at("implementation"));
  }
  EXPECT_GE(implementations.size(), 2u);
  EXPECT_EQ(implementations.back(), "reference");
}

TEST(Cli, BenchGivesNoNumberForMemoryThatNobodyCounts) {
  const Outcome o = winnow(
      "bench --json --threads 1 --repeat 1 training_step layers=1 hidden=16 heads=2 "
      "intermediate=16 "
      "context=16 topk=4");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(nlohmann::json::parse(o.out).at("workspace_bytes").is_null());
}

TEST(Cli, BenchPrintsTheMachineFirst) {
  const Outcome o = winnow("bench --threads 1 index_scores rows=2 keys=64 index_heads=4");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(o.out.rfind("machine, 1 thread, measured now:\n  multiply-add", 0), 0u) << o.out;
  EXPECT_TRUE(has(o.out, "index_scores rows=2 keys=64 index_heads=4"));
}

// Sharing runs fewer indexers, and a kept selection takes them out of replays.
TEST(Cli, BenchTrainCountsTheIndexersOfAStep) {
  const Outcome o =
      winnow("bench train --layers 8 --context 64 --topk 8 --repeat 1 --threads 1 --json");
  EXPECT_EQ(o.status, 0) << o.err;
  std::vector<std::pair<int, int>> counts;
  std::istringstream lines(o.out);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json json = nlohmann::json::parse(line);
    counts.emplace_back(json.at("index_runs_forward"), json.at("index_runs_replay"));
    EXPECT_GT(json.at("indexer_ms").get<double>(), 0) << line;
    EXPECT_LT(json.at("indexer_ms").get<double>(), json.at("step_ms").get<double>()) << line;
  }
  EXPECT_EQ(counts, (std::vector<std::pair<int, int>>{{8, 0}, {4, 0}, {2, 0}, {8, 8}, {8, 0}}));
  EXPECT_EQ(winnow("bench train --layers 0").status, 2);
}

#ifdef WINNOW_MPIRUN
// Four ranks that share a context do the arithmetic of one, replays or not; 65 tokens need padding.
TEST(Cli, BenchTrainCountsTheArithmeticOfRanks) {
  for (const int context : {64, 65}) {
    const Outcome o = winnow(
        fmt::format("bench train --layers 2 --context {} --topk 8 --repeat 1 --json", context),
        "WINNOW_NUM_THREADS=1 " WINNOW_MPIRUN " -n 4");
    EXPECT_EQ(o.status, 0) << o.err;
    std::vector<nlohmann::json> lines;
    for (const std::string& line : lines_of(o.out)) lines.push_back(nlohmann::json::parse(line));
    ASSERT_EQ(lines.size(), 4u) << o.out;
    EXPECT_EQ(lines[0]["ranks"], 1);
    EXPECT_GT(lines[0]["flops"].get<double>(), 1e6);
    EXPECT_EQ(lines[1]["ranks"], 4);
    if (context == 64) {
      EXPECT_EQ(lines[1]["flops"], lines[0]["flops"]);
    } else {
      EXPECT_GT(lines[1]["flops"].get<double>(), lines[0]["flops"].get<double>());
      EXPECT_LE(lines[1]["flops_share_of_first"].get<double>(), 1.15);
    }
    EXPECT_EQ(lines[2]["index_runs_replay"], 2);
    EXPECT_EQ(lines[3]["index_runs_replay"], 0);
  }
}
#endif

TEST(Cli, AFullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const int status = std::system(WINNOW_PROGRAM " info >/dev/full 2>/dev/null");
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
