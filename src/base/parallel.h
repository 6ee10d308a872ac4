// Parallel loops over tasks of a fixed split.
//
// The caller cuts the work into tasks in a way that does not depend on the number of threads, and
// every output element is owned by one task. Which thread runs a task is open; hence results are
// the same for every thread count. A loop inside a task runs serially. The first loop makes
// threads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "winnow/threads.h"

namespace winnow {

namespace detail {
using TaskFunction = void (*)(void* context, std::int64_t task, int worker);
void run_tasks(std::int64_t tasks, TaskFunction function, void* context);
}  // namespace detail

// body(task, worker) for every task in [0, tasks); worker in [0, min(tasks, num_threads())) names a
// scratch slot that no other running task uses. An exception thrown by a task is rethrown here (one
// of them).
template <class Body>
void parallel_for(std::int64_t tasks, Body&& body) {
  using Plain = std::remove_cv_t<std::remove_reference_t<Body>>;
  detail::run_tasks(
      tasks,
      [](void* context, std::int64_t task, int worker) {
        (*static_cast<Plain*>(context))(task, worker);
      },
      const_cast<Plain*>(&body));
}

// While it lives, num_threads() of the calling thread stands still, whoever sets it: an operation
// lays out its workspace by that number and must run with no more.
class SteadyThreads {
 public:
  SteadyThreads();
  ~SteadyThreads();
  SteadyThreads(const SteadyThreads&) = delete;
  SteadyThreads& operator=(const SteadyThreads&) = delete;

 private:
  int before_;
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace winnow
