// What every comparison with golden vectors needs: one file by one implementation, in one dtype.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "apps/winnow/golden.h"
#include "base/array.h"
#include "bench/bounds.h"
#include "bench/guarded.h"
#include "bench/placement.h"
#include "winnow/implementations.h"

namespace winnow::app {

// A call whose tensors, which are dense, lie in Guarded memory: what has twins on a device.
template <class Args>
struct GuardedCall {
  explicit GuardedCall(const Args& original) : args(original) {
    auto move = [&](const auto& tensors) {
      for (const ops::Named& t : tensors) {
        if (t.tensor.empty() || t.tensor.elements() == 0) continue;
        bench::Guarded& copy = copies.emplace_back(t.tensor.dtype, std::array{t.tensor.elements()});
        originals.push_back(t.tensor.data);
        const_cast<Tensor&>(t.tensor).data = copy.view().data;  // of `args`, which are ours
      }
    };
    move(ops::inputs_of(args));
    move(ops::outputs_of(args));
    each([](void* there, void* here, std::size_t bytes) { std::memcpy(here, there, bytes); });
  }
  void bring_back() {
    each([](void* there, void* here, std::size_t bytes) { std::memcpy(there, here, bytes); });
  }

  Args args;

 private:
  template <class Visit>
  void each(Visit visit) {
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const Tensor& t = copies[i].view();
      visit(originals[i], t.data, static_cast<std::size_t>(t.elements() * dtype_bytes(t.dtype)));
    }
  }
  std::vector<bench::Guarded> copies;
  std::vector<void*> originals;
};

class GoldenComparer {
 public:
  GoldenComparer(DType dtype, std::string implementation)
      : dtype_(dtype), implementation_(std::move(implementation)) {}

 protected:
  // Runs an operation by this implementation, or by the first that accepts if it refuses; only the
  // former counts. Where problems run on a GPU, so does this.
  template <class Args>
  void call(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
            const Args& args) {
    if (bench::Placement::current() != nullptr) {
      GuardedCall<Args> guarded(args);
      const Args there = bench::brought(guarded.args);
      const auto pin = pin_for(there);
      bench::run_once(bytes(there), [&](Workspace workspace) { operation(there, workspace); });
      return guarded.bring_back();
    }
    const auto pin = pin_for(args);
    operation(args, scratch_.get(bytes(args)));
  }

  template <class Args>
  bench::PinGuard pin_for(const Args& args) {
    const Explanation explanation = explain(args);
    const std::string& name = explanation.operation;
    counts_[name] = false;
    for (const Verdict& v : explanation.verdicts)
      counts_[name] |= v.implementation == implementation_ && v.refusal.empty();
    return {name, counts_[name] ? implementation_ : explanation.chosen()};
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
