#include "base/log.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

namespace winnow {
namespace {

struct Log {
  std::mutex mutex;
  std::function<void(const std::string&)> sink;
  std::set<std::string> said;
  Log() {
    const char* wanted = std::getenv("WINNOW_LOG");
    if (wanted != nullptr && std::string(wanted) == "1") {
      sink = [](const std::string& message) {
        std::fprintf(stderr, "winnow: %s\n", message.c_str());
      };
    }
  }
};
Log& log() {
  static Log instance;
  return instance;
}

}  // namespace

void set_log(std::function<void(const std::string&)> sink) {
  const std::lock_guard lock(log().mutex);
  log().sink = std::move(sink);
  log().said.clear();
}

bool log_enabled() {
  const std::lock_guard lock(log().mutex);
  return static_cast<bool>(log().sink);
}

void log_once(const std::string& message) {
  const std::lock_guard lock(log().mutex);
  if (log().sink && log().said.insert(message).second) log().sink(message);
}

}  // namespace winnow
