// Inputs of problems: reproducible numbers, row ranges and index lists of the awkward kinds.
#pragma once

#include <cstdint>
#include <string>

#include "bench/guarded.h"
#include "winnow/tensor.h"

namespace winnow::bench {

// A counter-based generator: the same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * kStep + 0x632be59bd9b4e019u) {}
  std::uint64_t bits();
  double uniform();  // [0, 1)
  double gauss();
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
  }
  // As it will be after so many numbers.
  Random after(std::int64_t numbers) const {
    Random later = *this;
    later.state_ += kStep * static_cast<std::uint64_t>(numbers);
    return later;
  }

 private:
  static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;
  std::uint64_t state_;
};

inline double bytes_of_tensor(const Tensor& t) {
  return static_cast<double>(t.elements() * dtype_bytes(t.dtype));
}

// What fills a tensor leaves one without data as it is (ShapesOnly).

// Gaussian numbers times `scale`, rounded to the tensor's dtype.
void fill_gauss(const Tensor& t, Random& random, double scale = 1);

// Row ranges, by word:
//   full     every row sees all keys
//   causal   bottom-right: row i sees keys - rows + i + 1
//   packed   three sequences laid end to end, of about 1/2, 1/8 and 3/8 of the keys
//   awkward  lengths -1, 0, 1, k-1, k, k+1, 15, 16, 17, 63, 64, 65 in turn, at random starts; every
//            fourth range sticks out of the key space on one side
void fill_ranges(const std::string& kind, std::int64_t keys, std::int64_t topk,
                 const Tensor& starts, const Tensor& ends, Random& random);

// Distinct random ids of each row's clamped range, by word:
//   ascending  as select_topk gives them: ascending, -1 after the last
//   scattered  in random order, with -1, keys, INT_MIN, INT_MAX and ids just outside the range
//   between popular    ascending; every row holds the first keys of its range
void fill_indices(const std::string& kind, std::int64_t keys, const Tensor& starts,
                  const Tensor& ends, const Tensor& topk_indices, Random& random);

}  // namespace winnow::bench
