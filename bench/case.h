// One problem of one operation: its buffers, its truth and its cost. Tests, `winnow check` and
// `winnow bench` run the same cases.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/problem.h"
#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow::bench {

// How one output compares with the double-precision reference.
struct Comparison {
  std::string output;
  double error = 0;    // the largest |difference| / bound over the elements; selections: misses
  bool exact = false;  // compared for equality
  std::string where;   // the worst element, its value and the reference's; "" if all is well
  bool ok() const { return exact ? error == 0 : error <= 1; }
};

// What the mathematics needs, for floors: FLOPs are 2 x multiply-adds; bytes read and written once.
struct Cost {
  double flops = 0;
  double bytes = 0;
};

// Bytes of all that a call reads and writes; memory that a stride steps over does not count.
struct TensorBytes {
  std::int64_t inputs = 0, outputs = 0;
};

class Case {
 public:
  virtual ~Case() = default;
  // What can be asked of shapes alone (ShapesOnly), too.
  virtual Explanation explain() const = 0;
  virtual std::int64_t workspace_bytes() const = 0;
  virtual TensorBytes tensor_bytes() const = 0;
  virtual std::int64_t budget() const { return 0; }  // of the workspace; 0: none
  // Whether it allocates while it runs, beside the workspace, what nobody has counted.
  virtual bool keeps_own_memory() const { return false; }
  // The operations inside, each with who runs it; none for an operation itself.
  virtual std::vector<std::pair<std::string, std::string>> parts() const { return {}; }

  virtual void run(Workspace workspace) = 0;  // the public operation
  virtual std::vector<Tensor> outputs() const = 0;
  // Compares what the last run left with the reference, elements that must not be written included.
  virtual std::vector<Comparison> compare() = 0;
  virtual Cost cost() const = 0;
  virtual std::int64_t tokens() const { return 0; }  // of a training step; else 0
  // What the last run counted, by name: "repairs".
  virtual std::vector<std::pair<std::string, std::int64_t>> counts() const { return {}; }
};

struct Operation {
  const char* name;
  const char* summary;
  std::vector<Parameter> parameters;
  std::unique_ptr<Case> (*make)(const Problem&);
  std::vector<std::string>
      check_problems;  // the shared list: awkward shapes, every dtype, every branch
  std::vector<std::string> bench_problems;
};

const std::vector<Operation>& operations();
std::vector<std::string> all_check_problems();
// The benchmarks of an operation at the sizes that GPUs are for.
std::vector<std::string> gpu_bench_problems(const std::string& operation);
const Operation& find_operation(const std::string& name);  // throws with the valid names
std::unique_ptr<Case> make_case(const Problem& problem);
std::unique_ptr<Case> make_shapes(const Problem& problem);  // of shapes alone, at once at any size

// One line per implementation that accepts the problem. Each runs into poisoned outputs between
// guard pages, with one thread and with several (bitwise equal), and is compared with the
// reference.
struct CheckResult {
  std::string problem, implementation;
  std::vector<Comparison> comparisons;
  std::string failure;  // "" if it passed
};
// On a GPU it runs twice in place of one and several threads, and fences of poison stand for the
// guard pages.
std::vector<CheckResult> check_problem(const std::string& text, Device device = {});

// Runs a case on the CPU. Throws if it allocates, unless it says so.
void run_counted(Case& c, Workspace workspace);

// Pins an operation while it lives, then restores the user's pin.
class PinGuard {
 public:
  PinGuard(const std::string& operation, const std::string& implementation);
  ~PinGuard();
  PinGuard(const PinGuard&) = delete;
  PinGuard& operator=(const PinGuard&) = delete;

 private:
  std::string operation_, before_;
};

// The bit pattern of poison: 0x7f7f7f7f is 3.4e38 as a float, far outside every result.
void poison(const Tensor& t);
bool is_poison(const Tensor& t, std::int64_t element);

}  // namespace winnow::bench
