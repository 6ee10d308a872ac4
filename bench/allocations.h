// How often C++ code of this process has asked for memory, on any thread: every `new` is counted in
// whatever links this, so that a call can be shown to allocate nothing.
#pragma once

#include <cstdint>

namespace winnow::bench {

std::int64_t allocations();

}  // namespace winnow::bench
