// The NCCL engine with one rank, and sums over parts that lie on a GPU. Skips where there is no GPU or
// no NCCL. Several ranks need as many GPUs.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/device.h"
#include "comm/collectives.h"
#include "comm/group_memory.h"
#include "comm/nccl.h"
#include "tests/files.h"

namespace winnow {
namespace {

constexpr Device kGpu{Device::Kind::kCuda, 0};

template <class T>
class OnGpu {
 public:
  explicit OnGpu(const std::vector<T>& values)
      : count_(values.size()), memory_(kGpu, static_cast<std::int64_t>(values.size() * sizeof(T))) {
    copy_to_device(kGpu, memory_.data(), values.data(), memory_.bytes());
  }
  std::span<T> span() const { return {static_cast<T*>(memory_.data()), count_}; }
  std::vector<T> values() const {
    std::vector<T> all(count_);
    copy_to_host(kGpu, all.data(), memory_.data(), memory_.bytes());
    return all;
  }

 private:
  std::size_t count_;
  DeviceMemory memory_;
};

template <class T>
std::vector<T> numbers(std::size_t count) {
  std::vector<T> all;
  const T scale[] = {1, static_cast<T>(1e8), static_cast<T>(-1e8), static_cast<T>(1e-3)};
  for (std::size_t i = 0; i < count; ++i) {
    all.push_back(scale[(i / 7) % 4] * (1 + static_cast<T>(i % 97) / 64) / 3);
  }
  return all;
}

TEST(GpuNccl, WithoutItTheReasonIsSaid) {
  if (nccl_refusal().empty()) GTEST_SKIP() << comm::nccl_version() << " is there";
  const std::unique_ptr<Communicator> host = single_communicator();
  EXPECT_FALSE(
      error_of(comm::nccl_version().empty() ? Status::kUnsupported : Status::kInvalidArgument, [&] {
        nccl_communicator(*host, kGpu);
      }).empty());
}

TEST(GpuNccl, OneRankMovesAndAddsOnTheDevice) {
  if (!nccl_refusal().empty()) GTEST_SKIP() << nccl_refusal();
  const std::unique_ptr<Communicator> host = single_communicator();
  const std::unique_ptr<Communicator> group = nccl_communicator(*host, kGpu);
  EXPECT_EQ(group->size(), 1);
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->device(), kGpu);
  for (const std::size_t count : {std::size_t{1}, std::size_t{1001}, std::size_t{3'000'001}}) {
    const std::vector<float> values = numbers<float>(count);
    const OnGpu<float> mine(values), all(std::vector<float>(count, -1.0f));
    comm::all_gather<float>(*group, mine.span(), all.span());
    EXPECT_EQ(all.values(), values);
    const OnGpu<float> received(std::vector<float>(count, -1.0f));
    group->all_to_all(std::as_bytes(mine.span()), std::as_writable_bytes(received.span()));
    EXPECT_EQ(received.values(), values);
    group->broadcast(std::as_writable_bytes(mine.span()), 0);
    comm::sum(*group, mine.span());
    EXPECT_EQ(mine.values(), values);
    const OnGpu<float> part(std::vector<float>(count, -1.0f));
    comm::reduce_scatter_sum(*group, mine.span(), part.span());
    group->barrier();
    EXPECT_EQ(part.values(), values);
  }
  const std::unique_ptr<Communicator> same = group->split(4, 2);
  EXPECT_EQ(same->size(), 1);
  EXPECT_EQ(same->device(), kGpu);
  same->barrier();
}

TEST(GpuNccl, WrongSizesAndRootsAreErrors) {
  if (!nccl_refusal().empty()) GTEST_SKIP() << nccl_refusal();
  const std::unique_ptr<Communicator> host = single_communicator();
  const std::unique_ptr<Communicator> group = nccl_communicator(*host, kGpu);
  const OnGpu<float> some(std::vector<float>(3)), more(std::vector<float>(4));
  const auto refused = [](auto&& call) { return error_of(Status::kInvalidArgument, call); };
  EXPECT_TRUE(has(refused([&] { comm::all_gather<float>(*group, some.span(), more.span()); }),
                  "all_gather of 12 bytes"));
  EXPECT_TRUE(has(refused([&] { group->broadcast(std::as_writable_bytes(some.span()), 1); }),
                  "a rank from 0 to 0"));
  EXPECT_TRUE(has(refused([&] {
                    nccl_communicator(*host, {Device::Kind::kCuda, 1000});
                  }),
                  "device must be one of the"));
  EXPECT_TRUE(has(refused([&] { nccl_communicator(*host, {}); }), "device must be one of the"));
}

template <class T>
void adds_in_order(DType dtype) {
  const std::int64_t parts = 4, count = 100'003;
  const std::vector<T> values = numbers<T>(static_cast<std::size_t>(parts * count));
  std::vector<T> expected(values.begin(), values.begin() + count);
  for (std::int64_t r = 1; r < parts; ++r) {
    for (std::int64_t i = 0; i < count; ++i) {
      expected[static_cast<std::size_t>(i)] += values[static_cast<std::size_t>(r * count + i)];
    }
  }
  const OnGpu<T> data(values), sums(std::vector<T>(static_cast<std::size_t>(count)));
  const std::unique_ptr<comm::GroupMemory> memory = comm::gpu_memory(kGpu, {});
  memory->add_parts(dtype, reinterpret_cast<const std::byte*>(data.span().data()), parts, count,
                    reinterpret_cast<std::byte*>(sums.span().data()));
  EXPECT_EQ(sums.values(), expected);
}

// Bit for bit what a CPU adds up in the order of the parts.
TEST(GpuNccl, PartsAreAddedInTheirOrder) {
#if defined(WINNOW_CUDA)
  if (!cuda_refusal().empty()) GTEST_SKIP() << "no GPU: " << cuda_refusal();
  adds_in_order<float>(DType::kF32);
  adds_in_order<double>(DType::kF64);
#else
  GTEST_SKIP() << "no GPU: " << cuda_refusal();
#endif
}

}  // namespace
}  // namespace winnow
