// Problems that are only asked about: any size, at once, without memory; and no value of a parameter
// that ends the program.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <limits>
#include <memory>

#include "bench/allocations.h"
#include "bench/case.h"
#include "bench/guarded.h"
#include "winnow/error.h"

namespace winnow::bench {
namespace {

// Everything that `winnow why` asks. Whether the operation accepts the problem.
bool ask(const std::string& text) {
  try {
    const Problem problem = Problem::parse(text);
    const std::unique_ptr<Case> c = make_shapes(problem);
    for (const Verdict& v : c->explain().verdicts) {
      if (!v.refusal.empty()) continue;
      const PinGuard pin(problem.operation(), v.implementation);
      EXPECT_GE(c->workspace_bytes(), 0) << text << ": " << v.implementation;
    }
    EXPECT_GE(c->tensor_bytes().inputs, 0) << text;
    EXPECT_GE(c->tensor_bytes().outputs, 0) << text;
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The least and the largest numbers, and those around the ends of ranges.
constexpr std::int64_t kNumbers[] = {0,
                                     -1,
                                     1,
                                     3,
                                     (std::int64_t{1} << 31) - 1,
                                     std::int64_t{1} << 31,
                                     std::numeric_limits<std::int64_t>::max(),
                                     std::numeric_limits<std::int64_t>::min()};

TEST(Shapes, NoValueOfAParameterEndsTheProgram) {
  int accepted = 0, refused = 0;
  for (const Operation& operation : operations()) {
    for (const Parameter& first : operation.parameters) {
      for (const std::int64_t x : kNumbers) {
        const std::string text = fmt::format("{} {}={}", operation.name, first.name, x);
        ++(ask(text) ? accepted : refused);
        for (const Parameter& second : operation.parameters) {  // a large size beside it
          if (second.name == first.name || second.values.most < kNumbers[4]) continue;
          ++(ask(fmt::format("{} {}={}", text, second.name, kNumbers[4])) ? accepted : refused);
        }
      }
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

// With data: what is divided by, counted down from, or drawn from an empty range.
TEST(Shapes, NoSmallValueOfAParameterEndsTheProgram) {
  int made = 0;
  for (const Operation& operation : operations()) {
    for (const Parameter& p : operation.parameters) {
      for (const std::int64_t x : {0, -1, 1, 3}) {
        const std::string text = fmt::format("{} {}={}", operation.check_problems[0], p.name, x);
        try {
          make_case(Problem::parse(text))->explain();
          ++made;
        } catch (const Error&) {  // the words of a rule
        }
      }
    }
  }
  EXPECT_GT(made, 200);
}

// Bytes of address space that this process has.
rlim_t address_space() {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

// A limit on the address space while one lives.
class AddressLimit {
 public:
  explicit AddressLimit(rlim_t more) {
    getrlimit(RLIMIT_AS, &before_);
    const rlimit limit{address_space() + more, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~AddressLimit() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

TEST(Shapes, TheLargestProblemsTakeNoMemory) {
  for (const char* text :
       {"index_topk rows=16384 keys=1048576 dtype=bf16",
        "index_topk rows=4 keys=2147483647",
        "index_topk rows=16 keys=2000000000 page=64 dtype=mxfp8",
        "index_scores rows=16384 keys=1048576",
        "select_topk rows=16384 width=1048576",
        "select_topk width=2147483647 topk=65536",
        "dense_index_loss rows=65536 keys=65536",
        "sparse_attention rows=100000000 keys=2000000000",
        "sparse_attention rows=100000000 keys=2000000000 page=64 lengths=1 value=1",
        "sparse_attention_backward rows=262144 keys=262144",
        "index_scores_at_backward rows=2000000000 keys=2000000000",
        "attention_target rows=2000000000 keys=2000000000",
        "index_loss rows=2000000000 keys=2000000000",
        "pool_keys keys=2000000000",
        "append_pools requests=2000000 tokens=1000 index_dim=128",
        "expand_pools rows=2000000000 keys=2000000000",
        "merge_attention rows=2000000000",
        "quantise rows=2000000000 edges=1",
        "dequantise rows=2000000000",
        "hadamard rows=2000000000",
        "tile_scales tokens=200000000 sequences=2000000",
        "matmul m=2000000000",
        "training_step layers=61 hidden=7168 heads=128 q_lora=1536 kv_lora=512 context=131072"}) {
    ask(text);  // what is made once is made
    const AddressLimit limit(64 << 20);
    const std::int64_t before = allocations();
    EXPECT_TRUE(ask(text)) << text;
    EXPECT_LT(allocations() - before, 2000) << text;  // text of the verdicts, whatever the size
  }
}

TEST(Shapes, AnExtentBeyond31BitsIsTheOperationsOwnError) {
  auto message = [](const char* text) {
    try {
      make_shapes(Problem::parse(text))->explain();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message("index_topk keys=2147483648"),
            "[index_topk] index_key must have extents of at most 2147483647, got f32 [2147483648, "
            "128]");
  EXPECT_EQ(message("sparse_attention rows=2147483648"),
            "[sparse_attention] query must have extents of at most 2147483647, got f32 "
            "[2147483648, 64, 576]");
}

TEST(Shapes, OnlyWhileTheScopeLives) {
  {
    const ShapesOnly shapes;
    const Guarded t(DType::kF32, {3, 5});
    EXPECT_EQ(t.view().data, nullptr);
    EXPECT_EQ(t.view().elements(), 15);
    EXPECT_EQ(t.view().strides[0], 5);
  }
  EXPECT_NE(Guarded(DType::kF32, {3, 5}).view().data, nullptr);
}

// A case that allocates as often as it is told.
class Greedy : public Case {
 public:
  explicit Greedy(bool says_so) : says_so_(says_so) {}
  Explanation explain() const override { return {}; }
  std::int64_t workspace_bytes() const override { return 0; }
  TensorBytes tensor_bytes() const override { return {}; }
  bool keeps_own_memory() const override { return says_so_; }
  void run(Workspace) override { memory_ = std::make_unique<int>(7); }
  std::vector<Tensor> outputs() const override { return {}; }
  std::vector<Comparison> compare() override { return {}; }
  Cost cost() const override { return {}; }

 private:
  bool says_so_;
  std::unique_ptr<int> memory_;
};

TEST(Harness, AnAllocationIsAFailureUnlessItIsSaid) {
  Greedy silent(false), honest(true);
  try {
    run_counted(silent, {});
    ADD_FAILURE() << "it was not noticed";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[problem] an operation must allocate nothing, got 1 allocations");
  }
  EXPECT_NO_THROW(run_counted(honest, {}));
}

}  // namespace
}  // namespace winnow::bench
