#include "comm/collectives.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "comm/group_memory.h"

namespace winnow::comm {
namespace {

constexpr const char* kOperation = "sum";
constexpr std::int64_t kBlockBytes = std::int64_t{16} << 20;  // on their way at a time
constexpr std::int64_t kSmallBytes = std::int64_t{64} << 10;

using Bytes = std::span<std::byte>;

Bytes at_most(std::byte* data, std::int64_t bytes) {
  return {data, static_cast<std::size_t>(bytes)};
}

// Arrays as one, which a reader and a writer go through from begin to end.
class Chain {
 public:
  explicit Chain(std::span<const Bytes> arrays) : arrays_(arrays) {
    for (const Bytes& array : arrays) bytes_ += std::ssize(array);
  }
  std::int64_t bytes() const { return bytes_; }

  void read(GroupMemory& memory, std::byte* to, std::int64_t bytes) {
    reader_.advance(arrays_, bytes, [&](Bytes piece) {
      memory.copy(to, piece.data(), std::ssize(piece));
      to += piece.size();
    });
  }
  void write(GroupMemory& memory, const std::byte* from, std::int64_t bytes) {
    writer_.advance(arrays_, bytes, [&](Bytes piece) {
      memory.copy(piece.data(), from, std::ssize(piece));
      from += piece.size();
    });
  }

 private:
  struct Cursor {
    std::size_t array = 0, byte = 0;

    template <class Body>
    void advance(std::span<const Bytes> arrays, std::int64_t bytes, const Body& body) {
      for (auto left = static_cast<std::size_t>(bytes); left > 0;) {
        const Bytes rest = arrays[array].subspan(byte);
        const std::size_t n = std::min(left, rest.size());
        if (n > 0) body(rest.first(n));
        left -= n;
        byte += n;
        if (n == rest.size()) {
          ++array;
          byte = 0;
        }
      }
    }
  };

  std::span<const Bytes> arrays_;
  std::int64_t bytes_ = 0;
  Cursor reader_, writer_;
};

// Rank r adds up the r-th part of a block, and all gather the parts. Where messages are small it
// takes less time that all add up everything.
void sum_arrays(Communicator& group, DType dtype, std::span<const Bytes> arrays) {
  if (group.size() == 1) return;
  Chain chain(arrays);
  const std::unique_ptr<GroupMemory> memory = memory_of(group);
  const std::int64_t ranks = group.size(), element = dtype_bytes(dtype), all = chain.bytes();
  if (all * ranks <= kSmallBytes) {
    std::byte *mine = memory->allocate(all), *theirs = memory->allocate(all * ranks);
    chain.read(*memory, mine, all);
    group.all_gather(at_most(mine, all), at_most(theirs, all * ranks));
    memory->add_parts(dtype, theirs, ranks, all / element, mine);
    chain.write(*memory, mine, all);
    return;
  }
  const auto part_of = [&](std::int64_t bytes) {
    return ceil_div(bytes / element, ranks) * element;
  };
  const std::int64_t block = part_of(std::min(kBlockBytes, all)) * ranks;
  std::byte *mine = memory->allocate(block), *theirs = memory->allocate(block);
  for (std::int64_t first = 0; first < all; first += block) {
    const std::int64_t bytes = std::min(block, all - first), part = part_of(bytes);
    chain.read(*memory, mine, bytes);
    memory->zero(mine + bytes, part * ranks - bytes);
    group.all_to_all(at_most(mine, part * ranks), at_most(theirs, part * ranks));
    memory->add_parts(dtype, theirs, ranks, part / element, mine);
    group.all_gather(at_most(mine, part), at_most(theirs, part * ranks));
    chain.write(*memory, theirs, bytes);
  }
}

void reduce_scatter(Communicator& group, DType dtype, std::span<const std::byte> parts,
                    Bytes mine) {
  const auto ranks = static_cast<std::size_t>(group.size());
  WINNOW_CHECK(kOperation, parts.size() % ranks == 0 && parts.size() / ranks == mine.size(),
               "reduce_scatter_sum gives each of {} ranks as many of {} bytes, got room for {}",
               ranks, parts.size(), mine.size());
  const std::unique_ptr<GroupMemory> memory = memory_of(group);
  std::byte* received = memory->allocate(std::ssize(parts));
  group.all_to_all(parts, at_most(received, std::ssize(parts)));
  memory->add_parts(dtype, received, group.size(), std::ssize(mine) / dtype_bytes(dtype),
                    mine.data());
}

template <class T>
Bytes bytes_of(std::span<T> data) {
  return std::as_writable_bytes(data);
}

}  // namespace

void sum(Communicator& group, std::span<float> data) {
  const Bytes array = bytes_of(data);
  sum_arrays(group, DType::kF32, {&array, 1});
}
void sum(Communicator& group, std::span<double> data) {
  const Bytes array = bytes_of(data);
  sum_arrays(group, DType::kF64, {&array, 1});
}
void sum(Communicator& group, std::span<const std::span<float>> arrays) {
  std::vector<Bytes> bytes;
  for (const std::span<float>& array : arrays) bytes.push_back(bytes_of(array));
  sum_arrays(group, DType::kF32, bytes);
}

void reduce_scatter_sum(Communicator& group, std::span<const float> parts, std::span<float> mine) {
  reduce_scatter(group, DType::kF32, std::as_bytes(parts), bytes_of(mine));
}
void reduce_scatter_sum(Communicator& group, std::span<const double> parts,
                        std::span<double> mine) {
  reduce_scatter(group, DType::kF64, std::as_bytes(parts), bytes_of(mine));
}

}  // namespace winnow::comm
