#include "base/check.h"

#include <cstring>
#include <exception>
#include <new>

#include "base/log.h"
#include "base/parallel.h"
#include "base/text.h"
#include "bench/allocations.h"
#include "bench/case.h"
#include "bench/guarded.h"
#include "bench/placement.h"
#include "winnow/threads.h"
#include "winnow/validation.h"

namespace winnow::bench {
namespace {

struct ThreadsGuard {
  int before = num_threads();
  ~ThreadsGuard() { set_num_threads(before); }
};

std::vector<unsigned char> bytes_of(const std::vector<Tensor>& outputs) {
  std::vector<unsigned char> all;
  for (const Tensor& t : outputs) {
    const auto* p = t.as<unsigned char>();
    all.insert(all.end(), p, p + t.elements() * dtype_bytes(t.dtype));
  }
  return all;
}

// One run into poisoned outputs, with exactly the workspace that was asked for, between guard
// pages.
void run_poisoned(Case& c) {
  for (const Tensor& t : c.outputs()) poison(t);
  run_once(c.workspace_bytes(), [&](Workspace workspace) {
    Placement::current() == nullptr ? run_counted(c, workspace) : c.run(workspace);
  });
}

// Results must not depend on the threads, nor on the run.
void run_twice(Case& c, CheckResult* result) {
  const ThreadsGuard threads;
  const bool gpu = Placement::current() != nullptr;
  if (!gpu) set_num_threads(1);
  run_poisoned(c);
  const std::vector<unsigned char> first = bytes_of(c.outputs());
  if (!gpu) {
    set_num_threads(17);
    parallel_for(17, [](std::int64_t, int) {});  // the threads start here, not in the call
  }
  run_poisoned(c);
  if (bytes_of(c.outputs()) != first)
    result->failure = gpu ? "two runs differ" : "1 and 17 threads differ";
}

CheckResult check_implementation(const std::string& text, const std::string& implementation) {
  CheckResult result{text, implementation, {}, ""};
  try {
    const Problem problem = Problem::parse(text);
    const PinGuard pin(problem.operation(), implementation);
    const std::unique_ptr<Case> c = make_case(problem);
    run_twice(*c, &result);
    if (last_implementation(problem.operation()) != implementation) {
      result.failure = "another implementation ran: " + last_implementation(problem.operation());
    }
    result.comparisons = c->compare();
    for (const Comparison& x : result.comparisons) {
      if (!x.ok() && result.failure.empty()) {
        result.failure = fmt::format("{}: {:.3g} x the bound at {}", x.output, x.error, x.where);
      }
    }
  } catch (const std::bad_alloc&) {
    result.failure = "its data do not fit into memory; use smaller sizes";
  } catch (const std::exception& e) {
    result.failure = e.what();
  }
  return result;
}

}  // namespace

void run_counted(Case& c, Workspace workspace) {
  const std::int64_t before = allocations();
  c.run(workspace);
  const std::int64_t made = allocations() - before;
  // Messages of the log and of the validation mode are text.
  WINNOW_CHECK("problem", made == 0 || c.keeps_own_memory() || log_enabled() || validation(),
               "an operation must allocate nothing, got {} allocations", made);
}

std::vector<CheckResult> check_problem(const std::string& text, Device device) {
  const auto placement = place(device);
  const Problem problem = Problem::parse(text);
  std::vector<CheckResult> results;
  for (const Verdict& v : make_shapes(problem)->explain().verdicts) {
    if (v.refusal.empty()) results.push_back(check_implementation(text, v.implementation));
  }
  return results;
}

PinGuard::PinGuard(const std::string& operation, const std::string& implementation)
    : operation_(operation), before_(pinned_implementations()[operation]) {
  pin_implementation(operation, implementation);
}
PinGuard::~PinGuard() { pin_implementation(operation_, before_); }

void poison(const Tensor& t) {
  if (t.elements() > 0) {
    std::memset(t.data, 0x7f, static_cast<std::size_t>(t.elements() * dtype_bytes(t.dtype)));
  }
}

bool is_poison(const Tensor& t, std::int64_t element) {
  const std::int64_t size = dtype_bytes(t.dtype);
  const auto* p = t.as<unsigned char>() + element * size;
  for (std::int64_t i = 0; i < size; ++i) {
    if (p[i] != 0x7f) return false;
  }
  return true;
}

const Operation& find_operation(const std::string& name) {
  std::vector<std::string> names;
  for (const Operation& operation : operations()) {
    if (operation.name == name) return operation;
    names.emplace_back(operation.name);
  }
  fail(Status::kInvalidArgument, "problem", "there is no operation \"{}\"; {}", name,
       name_hint(name, names));
}

std::unique_ptr<Case> make_case(const Problem& problem) {
  return find_operation(problem.operation()).make(problem);
}
std::unique_ptr<Case> make_shapes(const Problem& problem) {
  const ShapesOnly shapes;
  return make_case(problem);
}

}  // namespace winnow::bench
