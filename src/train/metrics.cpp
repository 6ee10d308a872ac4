#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"

namespace winnow::train {
namespace {

using nlohmann::json;

constexpr const char* kOperation = "metrics";

// Calls body(line, end) for every whole line that is a JSON object with a step; stops at the first
// that is not, or where body returns false.
template <class Body>
void for_lines(const std::string& text, const Body& body) {
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) return;
    const json line = json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                  text.begin() + static_cast<std::ptrdiff_t>(end), nullptr, false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) return;
    if (!body(line, end + 1)) return;
    begin = end + 1;
  }
}

}  // namespace

MetricsLog::MetricsLog(std::filesystem::path path, std::int64_t step) : path_(std::move(path)) {
  file_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (file_.get() < 0) {
    fail(Status::kIo, kOperation, "cannot write {}: {}", path_.string(), system_reason(errno));
  }
  std::size_t kept = 0;
  if (step > 0) {
    for_lines(read_file(kOperation, path_), [&](const json& line, std::size_t end) {
      if (line["step"].get<std::int64_t>() > step) return false;
      kept = end;
      return true;
    });
  }
  if (file_size(kOperation, path_, file_.get()) > kept &&
      ::ftruncate(file_.get(), static_cast<off_t>(kept)) != 0) {
    fail(Status::kIo, kOperation, "cannot cut {}: {}", path_.string(), system_reason(errno));
  }
}

void MetricsLog::append(const nlohmann::ordered_json& line) {
  const std::string text = line.dump() + "\n";
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(file_.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      fail(Status::kIo, kOperation, "cannot write {}: {}", path_.string(), system_reason(errno));
    }
    done += static_cast<std::size_t>(n);
  }
}

void MetricsLog::sync() {
  if (::fsync(file_.get()) != 0) {
    fail(Status::kIo, kOperation, "cannot write {}: {}", path_.string(), system_reason(errno));
  }
}

std::vector<json> read_metrics(const std::filesystem::path& path) {
  std::vector<json> lines;
  for_lines(read_file(kOperation, path), [&](const json& line, std::size_t) {
    lines.push_back(line);
    return true;
  });
  return lines;
}

}  // namespace winnow::train
