// Tokens whose keys are pooled and then selected, for the tests of that.
#pragma once

#include <vector>

#include "base/array.h"
#include "bench/data.h"

namespace winnow::testing {

using Ids = std::vector<std::int32_t>;

inline Tensor ids_of(const Ids& ids) {
  return make_tensor(ids.data(), DType::kI32, {std::ssize(ids)});
}

inline constexpr std::int64_t kHeads = 4, kDim = 16;
// Tokens that are rows and keys at once.
struct Tokens {
  Array query, weights, key, gate, ape;
  Tokens(std::int64_t count, std::int64_t pool_size, std::uint64_t seed)
      : query(DType::kF32, {count, kHeads, kDim}),
        weights(DType::kF32, {count, kHeads}),
        key(DType::kF32, {count, kDim}),
        gate(DType::kF32, {count, kDim}),
        ape(DType::kF32, {pool_size, kDim}) {
    bench::Random random(seed);
    for (const Array* a : {&query, &weights, &key, &gate, &ape}) bench::fill_gauss(*a, random);
  }
  std::int64_t count() const { return key.view().shape[0]; }
};

}  // namespace winnow::testing
