#include "bench/data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "base/parallel.h"

namespace winnow::bench {

std::uint64_t Random::bits() {  // splitmix64
  std::uint64_t z = (state_ += kStep);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::gauss() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.283185307179586 * uniform());
}

void fill_gauss(const Tensor& t, Random& random, double scale) {
  if (t.data == nullptr) return;
  constexpr std::int64_t kRun = 1 << 14;
  const std::int64_t elements = t.elements();
  parallel_for(ceil_div(elements, kRun), [&](std::int64_t run, int) {
    const std::int64_t first = run * kRun, last = std::min(elements, first + kRun);
    Random own = random.after(2 * first);  // gauss() takes two
    for (std::int64_t i = first; i < last; ++i)
      store_double(t.data, t.dtype, i, scale * own.gauss());
  });
  random = random.after(2 * elements);
}

void fill_ranges(const std::string& kind, std::int64_t keys, std::int64_t topk,
                 const Tensor& starts, const Tensor& ends, Random& random) {
  if (starts.data == nullptr) return;
  const std::int64_t rows = starts.shape[0];
  const std::int64_t lengths[] = {-1, 0, 1, topk - 1, topk, topk + 1, 15, 16, 17, 63, 64, 65};
  for (std::int64_t i = 0; i < rows; ++i) {
    std::int64_t start = 0, end = keys;
    if (kind == "causal") {
      end = keys - rows + i + 1;
    } else if (kind == "packed") {
      const std::int64_t cuts[] = {0, keys / 2, keys / 2 + keys / 8, keys};
      const std::int64_t position = rows > 0 ? i * keys / rows : 0;
      const int g = position < cuts[1] ? 0 : position < cuts[2] ? 1 : 2;
      start = cuts[g];
      end = position + 1;
    } else if (kind == "awkward") {
      const std::int64_t length = lengths[i % 12];
      start = keys > 0 ? random.below(std::max<std::int64_t>(
                             1, keys - std::max<std::int64_t>(0, length) + 1))
                       : 0;
      if (i % 4 == 3)
        start = i % 8 == 3 ? -random.below(5) : std::max<std::int64_t>(0, keys - length / 2);
      end = start + length;
    } else {
      WINNOW_CHECK("problem", kind == "full", "range has no kind \"{}\"", kind);
    }
    starts.as<std::int32_t>()[i] = static_cast<std::int32_t>(start);
    ends.as<std::int32_t>()[i] = static_cast<std::int32_t>(end);
  }
}

void fill_indices(const std::string& kind, std::int64_t keys, const Tensor& starts,
                  const Tensor& ends, const Tensor& topk_indices, Random& random) {
  if (topk_indices.data == nullptr) return;
  WINNOW_CHECK("problem", kind == "ascending" || kind == "scattered" || kind == "popular",
               "ids have no kind \"{}\"", kind);
  const std::int64_t topk = topk_indices.shape[1];
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> pool;
  for (std::int64_t i = 0; i < topk_indices.shape[0]; ++i) {
    const std::int64_t first = std::max<std::int64_t>(0, starts.as<std::int32_t>()[i]);
    const std::int64_t last = std::min<std::int64_t>(keys, ends.as<std::int32_t>()[i]);
    pool.resize(static_cast<std::size_t>(std::max<std::int64_t>(0, last - first)));
    std::iota(pool.begin(), pool.end(), static_cast<std::int32_t>(first));
    const auto size = static_cast<std::int64_t>(pool.size());
    const std::int64_t n = std::min(topk, size);
    const std::int64_t kept = kind == "popular" ? std::min<std::int64_t>(n, 8) : 0;
    for (std::int64_t s = kept; s < n; ++s) {  // a partial shuffle: n distinct ids
      std::swap(pool[static_cast<std::size_t>(s)],
                pool[static_cast<std::size_t>(s + random.below(size - s))]);
    }
    if (kind != "scattered") std::sort(pool.begin(), pool.begin() + n);
    std::int32_t* ids = topk_indices.as<std::int32_t>() + i * topk;
    for (std::int64_t s = 0; s < topk; ++s) ids[s] = s < n ? pool[static_cast<std::size_t>(s)] : -1;
    if (kind == "scattered") {
      const std::int32_t outside[] = {
          -1,   static_cast<std::int32_t>(keys),  kMin,
          kMax, starts.as<std::int32_t>()[i] - 1, ends.as<std::int32_t>()[i]};
      for (std::int64_t s = i % 3; s < topk; s += 5) ids[s] = outside[random.below(6)];
      for (std::int64_t s = 0; s < std::min<std::int64_t>(topk - 1, i % 5 == 0 ? 70 : 0); ++s)
        ids[s] = -1;
    }
  }
}

}  // namespace winnow::bench
