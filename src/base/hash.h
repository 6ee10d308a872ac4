// A hash of words, one after the other: FNV-1a, whose words are bytes.
#pragma once

#include <cstdint>

namespace winnow {

inline constexpr std::uint64_t kHashBegin = 0xcbf29ce484222325u;  // a usual state to begin with

constexpr std::uint64_t hash_with(std::uint64_t state, std::uint64_t word) {
  return (state ^ word) * 0x100000001b3u;
}

}  // namespace winnow
