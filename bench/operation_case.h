// What the cases of all operations have in common: the call itself.
#pragma once

#include "bench/case.h"
#include "bench/placement.h"

namespace winnow::bench {

// A case of an operation by its two functions: `OperationCase<index_topk, index_topk_workspace_bytes>`.
template <auto kRun, auto kWorkspaceBytes>
class OperationCase;

template <class Args, void (*kRun)(const Args&, Workspace),
          std::int64_t (*kWorkspaceBytes)(const Args&)>
class OperationCase<kRun, kWorkspaceBytes> : public Case {
 public:
  Explanation explain() const override { return winnow::explain(placed(args_)); }
  std::int64_t workspace_bytes() const override { return kWorkspaceBytes(placed(args_)); }
  void run(Workspace workspace) override { kRun(brought(args_), workspace); }

  TensorBytes tensor_bytes() const override {
    TensorBytes bytes;
    for (const ops::Named& t : ops::inputs_of(args_)) bytes.inputs += bytes_of(t.tensor);
    for (const ops::Named& t : ops::outputs_of(args_)) bytes.outputs += bytes_of(t.tensor);
    return bytes;
  }
  std::int64_t budget() const override {
    if constexpr (requires { args_.workspace_budget; }) return args_.workspace_budget;
    return 0;
  }

 protected:
  Args args_;

 private:
  static std::int64_t bytes_of(const Tensor& t) { return t.elements() * dtype_bytes(t.dtype); }
};

}  // namespace winnow::bench
