// Selection by a block out of lists of candidates (cuda/select_block.h), as index_topk calls it: lists
// of any length, several of them, several rows by one block. Skips where there is no GPU.
#include "cuda/select_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "cuda/kernel.h"
#include "winnow/device.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;

struct Lists {
  const Candidate* candidates;  // of all rows, in two lists each
  const int* begins;            // [2 * rows + 1]
  int rows, k, capacity, words;
  U32 last;
};

__global__ void __launch_bounds__(kThreads) select_lists_kernel(Lists lists, TopkOutput output) {
  const Selection sel{lists.capacity};
  for (int i = static_cast<int>(blockIdx.x); i < lists.rows; i += static_cast<int>(gridDim.x)) {
    begin_selection<kThreads>(sel);
    for (int part = 2 * i; part < 2 * i + 2; ++part) {
      const int begin = lists.begins[part];
      offer_candidates<kThreads>(sel, lists.k, lists.candidates + begin,
                                 lists.begins[part + 1] - begin);
    }
    finish_selection<kThreads>(sel, lists.k, 0, lists.last, lists.words, output.row(i, 0));
  }
}

const Kernel kSelectLists{select_lists_kernel, selection_bytes(6144, kMaxMapWords)};

// Device memory with a copy of a vector.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : size_(host.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(T) + 1), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> copy(size_);
    EXPECT_EQ(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return copy;
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

struct Chosen {
  std::int32_t id;
  float score;
  bool operator==(const Chosen&) const = default;
};

// The rule once more: kept first, then larger scores, then lower ids; in the order of ids.
std::vector<Chosen> best(std::vector<Candidate> list, std::size_t k) {
  auto score = [](const Candidate& c) { return std::bit_cast<float>(c.x); };
  std::sort(list.begin(), list.end(), [&](const Candidate& a, const Candidate& b) {
    const bool kept_a = (a.y & kKept) != 0, kept_b = (b.y & kKept) != 0;
    if (kept_a != kept_b) return kept_a;
    if (!kept_a && score(a) != score(b)) return score(a) > score(b);
    return (a.y & ~kKept) < (b.y & ~kKept);
  });
  list.resize(std::min(list.size(), k));
  std::vector<Chosen> chosen;
  for (const Candidate& c : list)
    chosen.push_back({static_cast<std::int32_t>(c.y & ~kKept), score(c)});
  std::sort(chosen.begin(), chosen.end(),
            [](const Chosen& a, const Chosen& b) { return a.id < b.id; });
  return chosen;
}

void check(int k, int capacity, int words, U32 last) {
  std::mt19937 random(static_cast<unsigned>(k + capacity));
  const int lengths[] = {0, 1, k - 1, k, k + 1, capacity, capacity + 1, 3 * k, 5 * capacity};
  std::vector<Candidate> all;
  std::vector<int> begins = {0};
  std::vector<std::vector<Chosen>> want;
  for (int i = 0; i < 36; ++i) {
    const int length = lengths[i % 9], levels = i < 9 ? 1 << 30 : i < 18 ? 40 : 1;
    std::vector<Candidate> list;
    // Distinct ids out of all of the row: one in each of `length` pieces, in random order.
    for (int c = 0; c < length; ++c) {
      const U32 piece = last / static_cast<U32>(length);
      const U32 id = static_cast<U32>(c) * piece + random() % piece;
      float x = static_cast<float>(static_cast<int>(random() % levels)) - 20;
      if (x == -19 && random() % 2 != 0) x = -0.f;
      if (i >= 27 && random() % 9 == 0) x = std::numeric_limits<float>::infinity();
      const bool kept = i >= 27 && c < k / 4;
      list.push_back(make_uint2(std::bit_cast<U32>(x), kept ? id | kKept : id));
    }
    std::shuffle(list.begin(), list.end(), random);
    begins.push_back(static_cast<int>(all.size()) + length / 3);
    all.insert(all.end(), list.begin(), list.end());
    begins.push_back(static_cast<int>(all.size()));
    want.push_back(best(list, static_cast<std::size_t>(k)));
  }
  const int rows = static_cast<int>(want.size()), topk = k + 3;
  const OnDevice<Candidate> candidates(all);
  const OnDevice<int> list_begins(begins);
  const auto slots = static_cast<std::size_t>(rows * topk);
  const OnDevice<std::int32_t> ids(std::vector<std::int32_t>(slots, 77));
  const OnDevice<std::int32_t> counts(std::vector<std::int32_t>(want.size(), 77));
  const OnDevice<float> scores(std::vector<float>(slots, 77));
  const Device device{Device::Kind::kCuda, 0};
  const TopkOutput output(make_tensor(ids.data(), DType::kI32, {rows, topk}, device),
                          make_tensor(counts.data(), DType::kI32, {rows}, device),
                          make_tensor(scores.data(), DType::kF32, {rows, topk}, device));
  kSelectLists.launch("test",
                      {.grid = dim3(5),
                       .block = dim3(kThreads),
                       .shared_bytes = selection_bytes(capacity, words)},
                      {candidates.data(), list_begins.data(), rows, k, capacity, words, last},
                      output);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto got_ids = ids.host(), got_counts = counts.host();
  const auto got_scores = scores.host();
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(got_counts[i], static_cast<int>(want[i].size())) << "row " << i;
    for (std::size_t s = 0; s < static_cast<std::size_t>(topk); ++s) {
      const std::size_t at = i * static_cast<std::size_t>(topk) + s;
      const Chosen expected = s < want[i].size()
                                  ? want[i][s]
                                  : Chosen{-1, -std::numeric_limits<float>::infinity()};
      ASSERT_TRUE((Chosen{got_ids[at], got_scores[at]} == expected))
          << "row " << i << " slot " << s << " id " << got_ids[at] << " score " << got_scores[at]
          << ", want " << expected.id << " " << expected.score;
    }
  }
}

TEST(GpuSelectBlock, ListsOfAnyLength) {
  if (!cuda_refusal().empty()) GTEST_SKIP() << "no GPU: " << cuda_refusal();
  constexpr U32 kAll = 0x7fffffffu;
  check(1, 512, 1536, 40000);
  check(33, 600, 1536, 131072);
  check(512, 512, 2048, 65536);
  check(2048, 5120, 4096, 1 << 20);
  check(4096, 6144, 1664, 300001);
  check(100, 2048, 4096, kAll);
}

}  // namespace
}  // namespace winnow::cuda
