// What the library has to say about its choices, such as an implementation that did not run and
// why. Each distinct message comes once. Nothing is printed unless asked for.
#pragma once

#include <functional>
#include <string>

namespace winnow {

// Sends messages to `sink` from now on; an empty function silences them. The default is standard
// error where WINNOW_LOG=1 is set in the environment, and silence elsewhere.
void set_log(std::function<void(const std::string&)> sink);

}  // namespace winnow
