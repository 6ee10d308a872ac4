// A stable radix sort of entries by key, 8 bits at a time, and sums over runs of equal keys.
//
//   list      a block per row: key and number of every entry; what does not count gets a key past
//             all others; the keys of a group of rows lie past those of the group before
//   count     a block per kTile entries: how often each digit occurs
//   scan      a block per digit: where each block's begin among the entries of that digit
//   move      a block per kTile entries: a warp takes 256 entries one after the other, 32 at a
//             time; equal digits of 32 lanes find their places by a match
//   add       a warp per entry; those that begin a run of equal keys walk it, 8 channels in each
//             lane
//
// Floor: 8 bytes read twice and written once per entry and pass, and the rows of numbers read once.
// For less than a million entries the latency of 3 launches per pass bounds the sort, 10 us each;
// the sums are bound by memory.
#include "cuda/key_order.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWarpEntries = 256, kTile = kWarps * kWarpEntries;
constexpr int kDigits = 256;
constexpr int kLaneChannels = 8;

__global__ void __launch_bounds__(kThreads)
    list_kernel(const SlotLists lists, std::int64_t first, std::int64_t slots, std::uint32_t none,
                std::int64_t group_rows, std::uint32_t* keys, std::uint32_t* entries,
                std::int32_t* counts) {
  const std::int64_t row = blockIdx.x;
  const std::uint32_t group_keys = static_cast<std::uint32_t>(row / group_rows) * (none + 1);
  const RowSlots list = lists[first + row];
  const std::int64_t count = trimmed_count(list);
  if (threadIdx.x == 0) counts[row] = static_cast<std::int32_t>(count);
  for (std::int64_t s = threadIdx.x; s < slots; s += kThreads) {
    const std::int64_t id = s < count ? list[s] : -1;
    keys[row * slots + s] = group_keys + (id < 0 ? none : static_cast<std::uint32_t>(id));
    entries[row * slots + s] = static_cast<std::uint32_t>(row % group_rows * slots + s);
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const std::uint32_t* keys, std::int64_t entries, int shift,
                 std::uint32_t* digits) {
  __shared__ std::uint32_t counts[kDigits];
  counts[threadIdx.x] = 0;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTile;
  for (std::int64_t e = first + threadIdx.x; e < min(entries, first + kTile); e += kThreads) {
    atomicAdd(&counts[keys[e] >> shift & (kDigits - 1)], 1u);  // integers: any order, one result
  }
  __syncthreads();
  digits[static_cast<std::int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = counts[threadIdx.x];
}

// Exclusive sum over the threads of a block; all call it. `warps` holds all sums of warps then.
__device__ std::uint32_t scan_block(std::uint32_t x, std::uint32_t (&warps)[kWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t inclusive = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t below = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive += below;
  }
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  std::uint32_t before = 0;
  for (int w = 0; w < warp; ++w) before += warps[w];
  return before + inclusive - x;
}

// Exclusive sums in place, and the total.
__global__ void __launch_bounds__(kThreads)
    scan_kernel(std::uint32_t* digits, std::int64_t blocks, std::uint32_t* totals) {
  __shared__ std::uint32_t warps[kWarps];
  std::uint32_t* counts = digits + blockIdx.x * blocks;
  std::uint32_t before = 0;
  for (std::int64_t first = 0; first < blocks; first += kThreads) {
    const std::int64_t i = first + threadIdx.x;
    const std::uint32_t x = i < blocks ? counts[i] : 0;
    const std::uint32_t sum = before + scan_block(x, warps);
    if (i < blocks) counts[i] = sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) before += warps[w];
    __syncthreads();
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

__global__ void __launch_bounds__(kThreads)
    move_kernel(const std::uint32_t* keys, const std::uint32_t* numbers, std::int64_t entries,
                int shift, const std::uint32_t* digits, const std::uint32_t* totals,
                std::uint32_t* to_keys, std::uint32_t* to_numbers) {
  static_assert(kThreads == kDigits);
  __shared__ std::uint32_t next[kWarps][kDigits];  // place of a warp's next entry of a digit
  __shared__ std::uint32_t warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = lane; d < kDigits; d += 32) next[warp][d] = 0;
  __syncwarp();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTile + warp * kWarpEntries;
  const std::int64_t last = min(entries, first + kWarpEntries);
  for (std::int64_t e = first + lane; e < last; e += 32) {
    atomicAdd(&next[warp][keys[e] >> shift & (kDigits - 1)], 1u);
  }
  __syncthreads();
  std::uint32_t place = digits[static_cast<std::int64_t>(threadIdx.x) * gridDim.x + blockIdx.x];
  place += scan_block(totals[threadIdx.x], warps);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const std::uint32_t own = next[w][threadIdx.x];
    next[w][threadIdx.x] = place;
    place += own;
  }
  __syncthreads();
  for (std::int64_t base = first; base < last; base += 32) {
    const std::int64_t e = base + lane;
    const bool here = e < last;
    const std::uint32_t key = here ? keys[e] : 0;
    const std::uint32_t digit = here ? key >> shift & (kDigits - 1) : kDigits;
    const unsigned equal = __match_any_sync(0xffffffffu, digit);
    const int rank = __popc(equal & ((1u << lane) - 1));
    if (here) {
      const std::uint32_t at = next[warp][digit] + rank;
      to_keys[at] = key;
      to_numbers[at] = numbers[e];
    }
    __syncwarp();
    if (here && rank == 0) next[warp][digit] += __popc(equal);
    __syncwarp();
  }
}

// begins[key] = the number of sorted entries with keys below.
__global__ void __launch_bounds__(kThreads)
    find_kernel(const std::uint32_t* sorted, std::int64_t entries, std::int64_t keys,
                std::uint32_t* begins) {
  const std::int64_t key = block_index() * kThreads + threadIdx.x;
  if (key >= keys) return;
  std::int64_t low = 0;
  for (std::int64_t left = entries; left > 0;) {
    const std::int64_t half = left / 2;
    const bool below = sorted[low + half] < key;
    low = below ? low + half + 1 : low;
    left = below ? left - half - 1 : half;
  }
  begins[key] = static_cast<std::uint32_t>(low);
}

__device__ float* place_of(const KeyOrder::Sums& sums, std::int64_t key, int channel) {
  const int g = channel / sums.channels, c = channel % sums.channels;
  if (c < sums.split) return sums.a + key * sums.a_key + g * sums.a_head + c;
  return sums.b + key * sums.b_key + g * sums.b_head + c - sums.split;
}

__global__ void __launch_bounds__(kThreads)
    add_kernel(const std::uint32_t* keys, const std::uint32_t* numbers, std::int64_t entries,
               std::uint32_t none, const float* rows, const KeyOrder::Sums sums) {
  const int lane = threadIdx.x % 32, width = sums.heads * sums.channels;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (first >= entries) return;
  const std::uint32_t key = keys[first];
  if (key == none || (first > 0 && keys[first - 1] == key)) return;
  for (int c0 = 0; c0 < width; c0 += 32 * kLaneChannels) {
    float sum[kLaneChannels];
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      const int c = c0 + 32 * j + lane;
      sum[j] = c < width ? *place_of(sums, key, c) : 0;
    }
    int run = 32;
    for (std::int64_t base = first; run == 32; base += 32) {
      const bool mine = base + lane < entries && keys[base + lane] == key;
      run = __popc(__ballot_sync(0xffffffffu, mine));  // equal keys lie side by side
      const std::uint32_t number = mine ? numbers[base + lane] : 0;
#pragma unroll 4
      for (int i = 0; i < run; ++i) {
        const float* row = rows + __shfl_sync(0xffffffffu, number, i) * std::int64_t{width};
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j) {
          const int c = c0 + 32 * j + lane;
          if (c < width) sum[j] += row[c];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      const int c = c0 + 32 * j + lane;
      if (c < width) *place_of(sums, key, c) = sum[j];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(std::int64_t keys, const KeyOrder::Sums sums) {
  const int width = sums.heads * sums.channels;
  for (std::int64_t key = block_index(); key < keys; key += std::int64_t{gridDim.x} * gridDim.y) {
    for (int c = threadIdx.x; c < width; c += kThreads) *place_of(sums, key, c) = 0;
  }
}

const Kernel kList{list_kernel};
const Kernel kCount{count_kernel};
const Kernel kScan{scan_kernel};
const Kernel kMove{move_kernel};
const Kernel kFind{find_kernel};
const Kernel kAdd{add_kernel};
const Kernel kClear{clear_kernel};

}  // namespace

KeyOrder::KeyOrder(Carve& carve, std::int64_t rows, std::int64_t slots, std::int64_t keys,
                   std::int64_t group_rows)
    : slots_(slots),
      keys_(keys),
      group_rows_(group_rows > 0 ? group_rows : rows > 0 ? rows : 1),
      blocks_(ceil_div(rows * slots, kTile)) {
  for (int i = 0; i < 2; ++i) {
    key_[i] = carve.take<std::uint32_t>(rows * slots);
    entry_[i] = carve.take<std::uint32_t>(rows * slots);
  }
  digits_ = carve.take<std::uint32_t>(kDigits * blocks_);
  totals_ = carve.take<std::uint32_t>(kDigits);
  counts_ = carve.take<std::int32_t>(rows);
}

void KeyOrder::sort(const char* operation, const SlotLists& lists, std::int64_t first,
                    std::int64_t rows, cudaStream_t stream) {
  entries_ = rows * slots_;
  sorted_keys_ = ceil_div(rows, group_rows_) * (keys_ + 1);
  const std::int64_t blocks = ceil_div(entries_, kTile);
  const Launch per_tile{
      .grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .stream = stream};
  kList.launch(
      operation,
      {.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kThreads), .stream = stream}, lists,
      first, slots_, static_cast<std::uint32_t>(keys_), group_rows_, key_[0], entry_[0], counts_);
  if (entries_ == 0) return;
  for (int shift = 0; (sorted_keys_ - 1) >> shift > 0; shift += 8) {
    kCount.launch(operation, per_tile, key_[0], entries_, shift, digits_);
    kScan.launch(operation,
                 {.grid = dim3(kDigits), .block = dim3(kThreads), .stream = stream}, digits_, blocks,
                 totals_);
    kMove.launch(operation, per_tile, key_[0], entry_[0], entries_, shift, digits_, totals_, key_[1],
                 entry_[1]);
    for (auto* pair : {key_, entry_}) {
      std::uint32_t* const moved = pair[1];
      pair[1] = pair[0];
      pair[0] = moved;
    }
  }
}

void KeyOrder::find_keys(const char* operation, std::uint32_t* begins,
                         cudaStream_t stream) const {
  kFind.launch(operation,
               {.grid = grid_of(ceil_div(sorted_keys_, kThreads)),
                .block = dim3(kThreads),
                .stream = stream},
               key_[0], entries_, sorted_keys_, begins);
}

void KeyOrder::add(const char* operation, const float* rows, const Sums& sums,
                   cudaStream_t stream) const {
  kAdd.launch(operation,
              {.grid = dim3(static_cast<unsigned>(ceil_div(entries_, kWarps))),
               .block = dim3(kThreads),
               .stream = stream},
              key_[0], entry_[0], entries_, static_cast<std::uint32_t>(keys_), rows, sums);
}

void KeyOrder::clear(const char* operation, std::int64_t keys, const Sums& sums,
                     cudaStream_t stream) {
  kClear.launch(operation, {.grid = grid_of(keys), .block = dim3(kThreads), .stream = stream}, keys,
                sums);
}

}  // namespace winnow::cuda
