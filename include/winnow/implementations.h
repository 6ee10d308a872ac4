// Who runs an operation. Every operation has an ordered list of implementations; the first that
// does not refuse runs, and the list ends in the double-precision reference, which never refuses.
// For the answer to one concrete call see `explain(const ...Args&)` beside each operation.
//
// Every operation is called in one way:
// - A call that breaks a rule throws winnow::Error (error.h) before anything is written.
// - `..._workspace_bytes(args)` and `explain(args)` accept tensors whose data is null, so both can
//   be asked before memory exists. For shapes, dtypes and options they throw what the call would.
// - The call allocates nothing. It takes a workspace of at least that many bytes (tensor.h).
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace winnow {

struct Verdict {
  std::string implementation;  // "cpu.avx2", "cpu.portable", "reference"
  std::string refusal;         // why it does not run; empty: it would
};

// The list of an operation, in order, with what each says of one call. The first without a refusal
// runs.
struct Explanation {
  std::string operation;
  std::vector<Verdict> verdicts;
  std::string chosen() const;  // empty: nobody accepts
};

// Only `implementation` may run `operation` from now on, in this process; "" lifts the pin.
// A call that the pinned implementation refuses is an error, never a silent change of path.
void pin_implementation(std::string_view operation, std::string_view implementation);

// `implementation` may not run `operation` ("*": any operation) until allowed again.
void forbid_implementation(std::string_view operation, std::string_view implementation);
void allow_implementation(std::string_view operation, std::string_view implementation);

// The pins in force, those of WINNOW_PIN included: operation -> implementation.
std::map<std::string, std::string> pinned_implementations();

// Which implementation ran the last call of `operation` on this thread; "" before the first.
// The environment does both: WINNOW_PIN="index_topk=reference", WINNOW_FORBID="a=cpu.amx,*=cpu.avx2".
std::string last_implementation(std::string_view operation);

}  // namespace winnow
