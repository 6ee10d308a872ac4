// Ordered implementation lists: who runs an operation, and why the others do not.
//
// Each folder that implements an operation exports one `Implementation<Args>`; src/ops lists them
// in order and calls `run_first`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/device.h"
#include "base/implementation.h"
#include "base/log.h"
#include "base/parallel.h"
#include "winnow/implementations.h"

namespace winnow {

// The prohibitions in force, those of WINNOW_FORBID included: operation or "*", implementation.
std::vector<std::pair<std::string, std::string>> forbidden_implementations();

// What the templates below have in common.

namespace detail {
// The instruction set of "cpu.avx2" and the like, asked before any of that code runs: even a
// refusal compiled for AVX-512 may hold its instructions.
Refusal refuse_by_processor(std::string_view implementation);
// Whether no pin, no prohibition and no environment is against it. Allocates nothing.
bool user_allows(std::string_view operation, std::string_view implementation);
// The same as a sentence; "" if it is allowed.
std::string refuse_by_user(std::string_view operation, std::string_view implementation);
// The error of a call that nobody accepts: every refusal, or that the pin names nobody.
[[noreturn]] void fail_without_implementation(const Explanation& refusals);
void note_run(std::string_view operation, const Explanation* refusals, const char* implementation);
}  // namespace detail

// Every function below asks for the device of the call's tensors.

template <class Args, std::size_t N>
Explanation explain_call(const char* operation, const Implementation<Args>* const (&list)[N],
                         Device device, const Args& args) {
  Explanation explanation{operation, {}};
  for (const Implementation<Args>* candidate : list) {
    std::string refusal = detail::refuse_by_user(operation, candidate->name);
    if (refusal.empty()) refusal = refuse_device(candidate->name, device).sentence();
    if (refusal.empty()) refusal = detail::refuse_by_processor(candidate->name).sentence();
    if (refusal.empty()) refusal = candidate->refuse(args).sentence();
    explanation.verdicts.push_back({candidate->name, std::move(refusal)});
  }
  return explanation;
}

// The first implementation that accepts; throws kUnsupported with every refusal if none does.
template <class Args, std::size_t N>
const Implementation<Args>& first_accepting(const char* operation,
                                            const Implementation<Args>* const (&list)[N],
                                            Device device, const Args& args) {
  for (const Implementation<Args>* candidate : list) {
    if (detail::user_allows(operation, candidate->name) &&
        refuse_device(candidate->name, device).empty() &&
        detail::refuse_by_processor(candidate->name).empty() && candidate->refuse(args).empty()) {
      return *candidate;
    }
  }
  detail::fail_without_implementation(explain_call(operation, list, device, args));
}

template <class Args, std::size_t N>
std::int64_t workspace_bytes_of(const char* operation, const Implementation<Args>* const (&list)[N],
                                Device device, const Args& args) {
  return first_accepting(operation, list, device, args).workspace_bytes(args);
}

// Runs the first that accepts. Arguments must have been checked before.
template <class Args, std::size_t N>
void run_first(const char* operation, const Implementation<Args>* const (&list)[N], Device device,
               const Args& args, Workspace workspace) {
  const Implementation<Args>& chosen = first_accepting(operation, list, device, args);
  const SteadyThreads steady;  // what is asked for here is what run lays out
  const std::int64_t need = chosen.workspace_bytes(args);
  WINNOW_CHECK(operation, workspace.bytes >= need && (need == 0 || workspace.data != nullptr),
               "workspace must hold {} bytes for {}, got {}", need, chosen.name, workspace.bytes);
  if (&chosen != list[0] && log_enabled()) {
    const Explanation explanation = explain_call(operation, list, device, args);
    detail::note_run(operation, &explanation, chosen.name);
  } else {
    detail::note_run(operation, nullptr, chosen.name);
  }
  const DeviceScope scope(device);
  chosen.run(args, workspace);
}

}  // namespace winnow
