// Messages about choices the library makes, each distinct one once. Silent unless a sink is set
// (winnow::set_log) or WINNOW_LOG=1 sends them to standard error.
#pragma once

#include <string>

#include "winnow/log.h"

namespace winnow {

bool log_enabled();
void log_once(const std::string& message);

}  // namespace winnow
