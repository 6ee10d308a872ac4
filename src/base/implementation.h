// An implementation of an operation: who it is, what it refuses, what it needs, how it runs. Who is
// asked in which order stands in base/run_first.h.
#pragma once

#include <cstdint>

#include "base/refusal.h"
#include "winnow/tensor.h"

namespace winnow {

// A refusal depends on shapes, dtypes, strides and the device only, never on an address or a value,
// so it can be asked before memory exists.
template <class Args>
struct Implementation {
  const char* name;  // "cpu.avx2"
  Refusal (*refuse)(const Args&);
  std::int64_t (*workspace_bytes)(const Args&);  // exact need of run; pointers may be null here
  // Arguments are checked, the workspace is large enough and, on a GPU, its device is the current
  // one.
  void (*run)(const Args&, Workspace workspace);
};

}  // namespace winnow
