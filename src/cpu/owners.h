// Slots in order of who adds up the gradient of their key: owner o has keys [o * owned_keys, ...).
#pragma once

#include "base/refusal.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

// A row keeps `numbers` floats for each of its heads until its keys' owners add them up. The sizes of
// the workspace are 64-bit numbers.
inline Refusal refuse_uncountable(std::int64_t heads, std::int64_t numbers) {
  if (static_cast<double>(heads) * static_cast<double>(numbers) > 0x1p48)
    return "what a row keeps for its keys must be less than 2^50 bytes";
  return {};
}

// A stable counting sort: owner o has the slots order[first[o] .. first[o + 1]), ascending. `first`
// holds owners + 1 numbers, `order` count.
inline void order_by_owner(const std::int32_t* ids, std::int64_t count, std::int64_t owned_keys,
                           std::int64_t owners, std::int32_t* first, std::int32_t* order) {
  for (std::int64_t o = 0; o <= owners; ++o) first[o] = 0;
  for (std::int64_t s = 0; s < count; ++s) ++first[ids[s] / owned_keys];
  std::int32_t sum = 0;
  for (std::int64_t o = 0; o <= owners; ++o) first[o] = (sum += first[o]);
  for (std::int64_t s = count; s-- > 0;)  // from the back: each owner's end becomes its begin
    order[--first[ids[s] / owned_keys]] = static_cast<std::int32_t>(s);
}

}  // namespace winnow::cpu::WINNOW_ISA
