#include "apps/winnow/interrupt.h"

#include <atomic>
#include <csignal>

namespace winnow::app {
namespace {

std::atomic<bool> stop_asked{false};

void handle(int signal) {
  stop_asked = true;
  std::signal(signal, SIG_DFL);  // the next one ends the program
}

}  // namespace

InterruptGuard::InterruptGuard() {
  stop_asked = false;
  std::signal(SIGINT, handle);
  std::signal(SIGTERM, handle);
  std::signal(SIGUSR1, handle);
}

InterruptGuard::~InterruptGuard() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGUSR1, SIG_DFL);
}

bool InterruptGuard::asked() { return stop_asked; }

}  // namespace winnow::app
