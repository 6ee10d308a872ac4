// The one exception type. Its message reads "[operation] rule, actual value".
#pragma once

#include <stdexcept>
#include <string>

namespace winnow {

enum class Status {
  kInvalidArgument,  // the call breaks a rule of the operation: shapes, dtypes, options
  kUnsupported,      // no implementation accepts the call; the message lists every refusal
  kCorrupt,          // a file does not hold what its format promises
  kIo,               // the system refused: missing file, full disk, read-only folder
  kDevice,           // a GPU reported an error
  kInterrupted,      // the user asked to stop
};

class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

}  // namespace winnow
