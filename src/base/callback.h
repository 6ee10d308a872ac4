// Calls of std::function from src/cpu, which must not instantiate the standard library itself.
#pragma once

#include <functional>

#include "winnow/tensor.h"

namespace winnow {

bool has_callback(const std::function<void(Tensor)>& callback);
void call_back(const std::function<void(Tensor)>& callback, const Tensor& tensor);

}  // namespace winnow
