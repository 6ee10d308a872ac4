#include "base/callback.h"

namespace winnow {

bool has_callback(const std::function<void(Tensor)>& callback) {
  return static_cast<bool>(callback);
}

void call_back(const std::function<void(Tensor)>& callback, const Tensor& tensor) {
  callback(tensor);
}

}  // namespace winnow
