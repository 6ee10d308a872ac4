// Ordered implementation lists: who runs an operation, and why the others do not.
//
// Each folder that implements an operation exports one `Implementation<Args>`; src/ops lists them
// in order and calls `run_first`. A refusal depends on shapes, dtypes, strides and the device only,
// never on an address or a value, so it can be asked before memory exists.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/refusal.h"
#include "winnow/implementations.h"

namespace winnow {

template <class Args>
struct Implementation {
  const char* name;  // "cpu.avx2"
  Refusal (*refuse)(const Args&);
  std::int64_t (*workspace_bytes)(const Args&);  // exact need of run; pointers may be null here
  void (*run)(const Args&,
              Workspace workspace);  // arguments are checked, workspace is large enough
};

// What the templates below have in common. It allocates only where a pin or a prohibition is in
// force.

namespace detail {
// The instruction set of "cpu.avx2" and the like, asked before any of that code runs: even a refusal
// compiled for AVX-512 may hold its instructions.
Refusal refuse_by_processor(std::string_view implementation);
// Refusal by pin, prohibition or environment; "" if there is none.
std::string refuse_by_user(std::string_view operation, std::string_view implementation);
void note_run(std::string_view operation, const Explanation* refusals, const char* implementation);
}  // namespace detail

template <class Args, std::size_t N>
Explanation explain_call(const char* operation, const Implementation<Args>* const (&list)[N],
                         const Args& args) {
  Explanation explanation{operation, {}};
  for (const Implementation<Args>* candidate : list) {
    std::string refusal = detail::refuse_by_user(operation, candidate->name);
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
                                            const Args& args) {
  for (const Implementation<Args>* candidate : list) {
    if (detail::refuse_by_user(operation, candidate->name).empty() &&
        detail::refuse_by_processor(candidate->name).empty() && candidate->refuse(args).empty()) {
      return *candidate;
    }
  }
  std::string reasons;
  for (const Verdict& v : explain_call(operation, list, args).verdicts) {
    reasons += fmt::format("; {}: {}", v.implementation, v.refusal);
  }
  fail(Status::kUnsupported, operation, "no implementation accepts this call{}", reasons);
}

template <class Args, std::size_t N>
std::int64_t workspace_bytes_of(const char* operation, const Implementation<Args>* const (&list)[N],
                                const Args& args) {
  return first_accepting(operation, list, args).workspace_bytes(args);
}

// Runs the first that accepts. Arguments must have been checked before.
template <class Args, std::size_t N>
void run_first(const char* operation, const Implementation<Args>* const (&list)[N],
               const Args& args, Workspace workspace) {
  const Implementation<Args>& chosen = first_accepting(operation, list, args);
  const SteadyThreads steady;  // what is asked for here is what run lays out
  const std::int64_t need = chosen.workspace_bytes(args);
  WINNOW_CHECK(operation, workspace.bytes >= need && (need == 0 || workspace.data != nullptr),
               "workspace must hold {} bytes for {}, got {}", need, chosen.name, workspace.bytes);
  if (&chosen != list[0] && log_enabled()) {
    const Explanation explanation = explain_call(operation, list, args);
    detail::note_run(operation, &explanation, chosen.name);
  } else {
    detail::note_run(operation, nullptr, chosen.name);
  }
  chosen.run(args, workspace);
}

}  // namespace winnow
