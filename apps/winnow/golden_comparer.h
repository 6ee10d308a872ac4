// What every comparison with golden vectors needs: one file by one implementation, in one dtype.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "apps/winnow/golden.h"
#include "base/array.h"
#include "bench/bounds.h"
#include "winnow/implementations.h"

namespace winnow::app {

class GoldenComparer {
 public:
  GoldenComparer(DType dtype, std::string implementation)
      : dtype_(dtype), implementation_(std::move(implementation)) {}

 protected:
  // Runs an operation by this implementation, or by the first that accepts if it refuses; only the
  // former counts.
  template <class Args>
  void call(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
            const Args& args) {
    const Explanation explanation = explain(args);
    const std::string& name = explanation.operation;
    counts_[name] = false;
    for (const Verdict& v : explanation.verdicts)
      counts_[name] |= v.implementation == implementation_ && v.refusal.empty();
    const bench::PinGuard pin(name, counts_[name] ? implementation_ : explanation.chosen());
    operation(args, scratch_.get(bytes(args)));
  }

  // The worst element of a tensor; null if the last call of the operation does not count.
  bench::Worst* worst(const std::string& operation, const std::string& tensor) {
    if (!counts_[operation]) return nullptr;
    return &worst_[operation].try_emplace(tensor, tensor).first->second;
  }

  // One result for each operation that counted.
  std::vector<GoldenResult> results() const {
    std::vector<GoldenResult> all;
    for (const auto& [operation, tensors] : worst_) {
      bench::CheckResult result{"", label(), {}, ""};
      for (const auto& [name, worst] : tensors) {
        const bench::Comparison& x = worst.comparison();
        result.comparisons.push_back(x);
        if (!x.ok() && result.failure.empty())
          result.failure = fmt::format("{}: {:.3g} x the bound at {}", x.output, x.error, x.where);
      }
      all.push_back({operation, std::move(result)});
    }
    return all;
  }

  const DType dtype_;

 private:
  std::string label() const {
    return dtype_ == DType::kF64 ? implementation_ + " f64" : implementation_;
  }

  std::string implementation_;
  Scratch scratch_;
  std::map<std::string, bool> counts_;  // did this implementation run the operation
  std::map<std::string, std::map<std::string, bench::Worst>> worst_;  // operation, tensor
};

}  // namespace winnow::app
