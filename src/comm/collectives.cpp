#include "comm/collectives.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"

namespace winnow::comm {
namespace {

constexpr const char* kOperation = "sum";
constexpr std::int64_t kBlockBytes = std::int64_t{16} << 20;  // on their way at a time
constexpr std::int64_t kSmallBytes = std::int64_t{64} << 10;
constexpr std::int64_t kTaskElements = std::int64_t{1} << 15;

// sums[i] = parts[0][i] + parts[1][i] + ..., parts of sums.size() elements that lie end to end.
template <class T>
void add_parts(std::span<const T> parts, std::span<T> sums) {
  const auto count = std::ssize(sums);
  const std::int64_t ranks = count == 0 ? 0 : std::ssize(parts) / count;
  parallel_for(ceil_div(count, kTaskElements), [&](std::int64_t task, int) {
    const std::int64_t first = task * kTaskElements;
    const std::int64_t n = std::min(kTaskElements, count - first);
    T* const sum = sums.data() + first;
    std::copy_n(parts.data() + first, n, sum);
    for (std::int64_t r = 1; r < ranks; ++r) {
      const T* const part = parts.data() + r * count + first;
      for (std::int64_t i = 0; i < n; ++i) sum[i] += part[i];
    }
  });
}

// Arrays as one vector, which copies pass through from its begin to its end.
template <class T>
class Vector {
 public:
  explicit Vector(std::span<const std::span<T>> arrays) : arrays_(arrays) {
    for (const std::span<T>& array : arrays) elements_ += std::ssize(array);
  }
  std::int64_t elements() const { return elements_; }

  void read(std::span<T> to) {
    T* out = to.data();
    reader_.advance(arrays_, std::ssize(to),
                    [&](std::span<T> piece) { out = std::copy(piece.begin(), piece.end(), out); });
  }
  void write(std::span<const T> from) {
    const T* in = from.data();
    writer_.advance(arrays_, std::ssize(from), [&](std::span<T> piece) {
      std::copy_n(in, piece.size(), piece.data());
      in += piece.size();
    });
  }

 private:
  struct Cursor {
    std::size_t array = 0, element = 0;

    template <class Body>
    void advance(std::span<const std::span<T>> arrays, std::int64_t count, const Body& body) {
      for (auto left = static_cast<std::size_t>(count); left > 0;) {
        const std::span<T> rest = arrays[array].subspan(element);
        const std::size_t n = std::min(left, rest.size());
        body(rest.first(n));
        left -= n;
        element += n;
        if (n == rest.size()) ++array, element = 0;
      }
    }
  };

  std::span<const std::span<T>> arrays_;
  std::int64_t elements_ = 0;
  Cursor reader_, writer_;
};

// Rank r adds up the r-th part of a block, and all gather the parts. Where messages are small it
// takes less time that all add up everything.
template <class T>
void sum_arrays(Communicator& group, std::span<const std::span<T>> arrays) {
  if (group.size() == 1) return;
  Vector<T> vector(arrays);
  const std::int64_t ranks = group.size(), all = vector.elements();
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  const auto at_most = [](std::vector<T>& block, std::int64_t elements) {
    return std::span(block).first(static_cast<std::size_t>(elements));
  };
  if (all * ranks * kBytes <= kSmallBytes) {
    std::vector<T> mine(static_cast<std::size_t>(all));
    std::vector<T> theirs(static_cast<std::size_t>(all * ranks));
    vector.read(mine);
    all_gather<T>(group, mine, theirs);
    add_parts<T>(theirs, mine);
    vector.write(mine);
    return;
  }
  const std::int64_t block = ceil_div(std::min(kBlockBytes / kBytes, all), ranks) * ranks;
  std::vector<T> mine(static_cast<std::size_t>(block)), theirs(mine.size());
  for (std::int64_t first = 0; first < all; first += block) {
    const std::int64_t count = std::min(block, all - first), part = ceil_div(count, ranks);
    vector.read(at_most(mine, count));
    std::fill(mine.begin() + count, mine.begin() + part * ranks, T{0});
    group.all_to_all(std::as_bytes(at_most(mine, part * ranks)),
                     std::as_writable_bytes(at_most(theirs, part * ranks)));
    add_parts<T>(at_most(theirs, part * ranks), at_most(mine, part));
    all_gather<T>(group, at_most(mine, part), at_most(theirs, part * ranks));
    vector.write(at_most(theirs, count));
  }
}

template <class T>
void reduce_scatter(Communicator& group, std::span<const T> parts, std::span<T> mine) {
  const auto ranks = static_cast<std::size_t>(group.size());
  WINNOW_CHECK(kOperation, parts.size() % ranks == 0 && parts.size() / ranks == mine.size(),
               "reduce_scatter_sum of {} elements must have a part of {}th of them, got {}",
               parts.size(), ranks, mine.size());
  std::vector<T> received(parts.size());
  group.all_to_all(std::as_bytes(parts), std::as_writable_bytes(std::span(received)));
  add_parts<T>(received, mine);
}

template <class T>
void sum_array(Communicator& group, std::span<T> data) {
  const std::span<T> one[] = {data};
  sum_arrays<T>(group, one);
}

}  // namespace

void sum(Communicator& group, std::span<float> data) { sum_array(group, data); }
void sum(Communicator& group, std::span<double> data) { sum_array(group, data); }
void sum(Communicator& group, std::span<const std::span<float>> arrays) {
  sum_arrays(group, arrays);
}

void reduce_scatter_sum(Communicator& group, std::span<const float> parts, std::span<float> mine) {
  reduce_scatter(group, parts, mine);
}
void reduce_scatter_sum(Communicator& group, std::span<const double> parts,
                        std::span<double> mine) {
  reduce_scatter(group, parts, mine);
}

}  // namespace winnow::comm
