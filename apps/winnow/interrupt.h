// Ctrl-C asks a long command to stop at the next good moment; a second one stops it at once.
#pragma once

namespace winnow::app {

// While it lives, SIGINT, SIGTERM and SIGUSR1, which mpirun passes on to its ranks, are a request.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  static bool asked();
};

}  // namespace winnow::app
