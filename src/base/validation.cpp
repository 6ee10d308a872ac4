#include "winnow/validation.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace winnow {
namespace {

std::atomic<bool>& switch_of_mode() {
  static std::atomic<bool> on = [] {
    const char* wanted = std::getenv("WINNOW_VALIDATE");
    return wanted != nullptr && std::string_view(wanted) == "1";
  }();
  return on;
}

}  // namespace

void set_validation(bool on) { switch_of_mode().store(on, std::memory_order_relaxed); }
bool validation() { return switch_of_mode().load(std::memory_order_relaxed); }

}  // namespace winnow
