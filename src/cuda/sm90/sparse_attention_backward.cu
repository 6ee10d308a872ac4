// sparse_attention_backward on compute capability 9.0: MLA in bf16, 576 or 512 channels of which the
// first 512 are the value, up to 128 heads. In chunks of rows whose scratch fits 2.5 GiB:
//
//   sort       the chunk's entries (row, slot) by key (key_order.h), and where each key's begin
//   weigh      p, dp, delta, and a power of two per row and 64 heads (.._weigh.cu)
//   multiply   d_query, and a partial row in f16 per entry and 64 heads (.._multiply.cu)
//   reduce     here: d_key += the partial rows of each key's entries, in f32
//
// Order of d_key: entries by row, then slot, then block of heads; a key with up to kAlone entries in a
// chunk is one chain, a longer list is cut into eight equal parts, whose sums are added in order. Chunks
// follow in order of rows, their size from shapes alone. No atomics, and no bit depends on the number of
// SMs.
//
// Error: beside p and dz, which are rounded to bf16 before they are multiplied, a partial row is rounded
// to f16 under its power of two: 2^-11 of a number, and 2^-39 of the row's bound (.._weigh.cu).
//
// Floor (H200, 4096 rows x 64 heads x 2048 slots, 576/512): 2.95 TFLOP of the formulas, 3.75 ms at 790
// TFLOP/s, beside 2 x 9.7 GB of partial rows and 2 x 4.3 GB of p and dp, 6.4 ms at 4.4 TB/s.
#include "base/implementation.h"
#include "cuda/key_order.h"
#include "cuda/sm90/sparse_attention_backward.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr char kName[] = "sparse_attention_backward";
constexpr std::int64_t kBudget = std::int64_t{5} << 29;  // bytes of a chunk's scratch
constexpr std::int64_t kSorted = std::int64_t{1} << 28;  // of the entries that are sorted at a time
constexpr std::int64_t kWave = 132;                      // rows that an H100 or H200 takes at a time
constexpr int kMostHeads = 128;

using Args = SparseAttentionBackwardArgs;

struct Reduction {
  const std::uint16_t* partial;
  const float* power;
  std::int64_t padded;
  int blocks;                   // of heads
  const std::uint32_t* begins;  // [keys + 1]
  const std::uint32_t* entries;
  std::int64_t keys;
  float* d_key;
  std::int64_t d_key_row;
  bool first;  // the sums begin with 0
};

constexpr int kReduceThreads = 256, kReduceWarps = kReduceThreads / 32;
constexpr std::uint32_t kAlone = 128;  // entries that one warp adds up

__device__ float2 from_halves(std::uint32_t pair) {
  float2 x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}\n"
      : "=f"(x.x), "=f"(x.y)
      : "r"(pair));
  return x;
}

// A lane's numbers of a partial row: places [8 lane, + 8), [256 + 8 lane, + 8), then two from
// 512 + 2 lane.
template <int kDim>
struct LaneSum {
  float sum[kDim / 32] = {};

  __device__ static int place(int i) {  // of sum[i]
    const int lane = threadIdx.x % 32;
    return i < 16 ? i / 8 * 256 + lane * 8 + i % 8 : 512 + lane * 2 + i % 8;
  }
  // Adds the rows of entries [begin, end), as many in flight as registers hold.
  __device__ void add(const Reduction& r, std::uint32_t begin, std::uint32_t end) {
    constexpr int kFlight = 8;
    const int lane = threadIdx.x % 32, several = r.blocks - 1;  // blocks are 1 or 2
    for (std::uint32_t base = begin; base < end; base += 32) {
      const int count = static_cast<int>(min(32u, end - base));
      const std::uint32_t entry = r.entries[base + (lane < count ? lane : 0)];
      const std::uint32_t local = entry / static_cast<std::uint32_t>(r.padded);
      const std::int64_t number = entry + local * several * r.padded;  // of the row of block 0
      const float down = 1 / r.power[local * r.blocks];                // exact
      const float down_too = 1 / r.power[local * r.blocks + several];
      const int rows = count << several;
      for (int j = 0; j < rows; j += kFlight) {
        uint4 x[kFlight], y[kFlight];
        std::uint32_t z[kFlight];
#pragma unroll
        for (int u = 0; u < kFlight; ++u) {
          const int at = min(j + u, rows - 1), block = at & several;
          const std::int64_t row =
              __shfl_sync(0xffffffffu, number, at >> several) + block * r.padded;
          const std::uint16_t* p = r.partial + row * kDim;
          x[u] = __ldcs(reinterpret_cast<const uint4*>(p + lane * 8));
          y[u] = __ldcs(reinterpret_cast<const uint4*>(p + 256 + lane * 8));
          if (kDim > 512) z[u] = __ldcs(reinterpret_cast<const std::uint32_t*>(p + 512 + lane * 2));
        }
#pragma unroll
        for (int u = 0; u < kFlight; ++u) {
          const int at = min(j + u, rows - 1);
          const float one = __shfl_sync(0xffffffffu, down, at >> several);
          const float two = __shfl_sync(0xffffffffu, down_too, at >> several);
          if (j + u >= rows) break;
          const float scale = (at & several) == 0 ? one : two;
          const std::uint32_t words[9] = {x[u].x, x[u].y, x[u].z, x[u].w, y[u].x,
                                          y[u].y, y[u].z, y[u].w, z[u]};
#pragma unroll
          for (int i = 0; i < kDim / 64; ++i) {
            const float2 pair = from_halves(words[i]);
            sum[2 * i] = fmaf(pair.x, scale, sum[2 * i]);
            sum[2 * i + 1] = fmaf(pair.y, scale, sum[2 * i + 1]);
          }
        }
      }
    }
  }
};

__device__ void add_to(const Reduction& r, std::int64_t key, int place, float x) {
  float* out = r.d_key + key * r.d_key_row + stored_channel(place);
  *out = r.first ? x : *out + x;
}

// A warp has a key; lists that are longer are the whole block's, one after the other.
template <int kDim>
__global__ void __launch_bounds__(kReduceThreads, 2) reduce_kernel(const Reduction r) {
  __shared__ float parts[kReduceWarps][kDim];
  const int warp = threadIdx.x / 32;
  const std::int64_t first_key = static_cast<std::int64_t>(blockIdx.x) * kReduceWarps;
  for (int k = 0; k < kReduceWarps && first_key + k < r.keys; ++k) {
    const std::uint32_t begin = r.begins[first_key + k], count = r.begins[first_key + k + 1] - begin;
    if (count <= kAlone) continue;
    auto cut = [&](int part) {
      return begin + static_cast<std::uint32_t>(std::uint64_t{count} * part / kReduceWarps);
    };
    LaneSum<kDim> part;
    part.add(r, cut(warp), cut(warp + 1));
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) parts[warp][part.place(i)] = part.sum[i];
    __syncthreads();
    for (int place = threadIdx.x; place < kDim; place += kReduceThreads) {
      float sum = parts[0][place];
#pragma unroll
      for (int w = 1; w < kReduceWarps; ++w) sum += parts[w][place];
      add_to(r, first_key + k, place, sum);
    }
    __syncthreads();
  }
  const std::int64_t key = first_key + warp;
  if (key >= r.keys) return;
  const std::uint32_t begin = r.begins[key], end = r.begins[key + 1];
  if (end - begin > kAlone || (begin == end && !r.first)) return;
  LaneSum<kDim> all;
  all.add(r, begin, end);
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) add_to(r, key, all.place(i), all.sum[i]);
}

template <int kDim>
const Kernel kReduce{reduce_kernel<kDim>};

// Rows of a chunk follow from the shapes alone.
struct Scratch {
  std::int64_t padded, blocks;
  std::int64_t rows, sorted;  // of a chunk; of the chunks that are sorted at a time
  Carve carve;
  KeyOrder order;
  std::uint32_t* begins;
  float *delta, *power, *p, *dp;
  std::uint16_t* partial;

  Scratch(const Args& a, void* memory)
      : padded(ceil_div(a.topk_indices.empty() ? a.key.shape[0] : a.topk_indices.shape[1],
                        kTileSlots) *
               kTileSlots),
        blocks(ceil_div(a.query.shape[1], kBlockHeads)),
        rows(rows_of(a)),
        sorted(sorted_of(a)),
        carve(memory),
        order(carve, sorted, padded, a.key.shape[0], rows),
        begins(carve.take<std::uint32_t>(chunks() * (a.key.shape[0] + 1))),
        delta(carve.take<float>(rows * blocks * kBlockHeads)),
        power(carve.take<float>(rows * blocks)),
        p(carve.take<float>(rows * blocks * padded * kBlockHeads)),
        dp(carve.take<float>(rows * blocks * padded * kBlockHeads)),
        partial(carve.take<std::uint16_t>(rows * blocks * padded * a.query.shape[2])) {}

 private:
  std::int64_t chunks() const { return rows == 0 ? 0 : ceil_div(sorted, rows); }
  std::int64_t rows_of(const Args& a) const {
    const std::int64_t of_row =
        padded * blocks * (a.query.shape[2] * 2 + kBlockHeads * 8) +
        blocks * 4 * (kBlockHeads + 1) + 4;
    const std::int64_t all = a.query.shape[0], fit = kBudget / of_row;
    if (all <= fit) return all;
    return fit >= kWave ? fit / kWave * kWave : fit > 1 ? fit : 1;
  }
  std::int64_t sorted_of(const Args& a) const {
    if (rows == 0 || padded == 0) return rows;
    const std::int64_t of_chunk = rows * padded * KeyOrder::kEntryBytes;
    const std::int64_t numbers = (std::int64_t{1} << 32) / (a.key.shape[0] + 1);  // of 32 bits
    const std::int64_t most = kSorted / of_chunk < numbers ? kSorted / of_chunk : numbers;
    const std::int64_t fit = most > 1 ? most : 1;
    return a.query.shape[0] < fit * rows ? a.query.shape[0] : fit * rows;
  }
};

Refusal refuse(const Args& a) {
  if (a.query.dtype != DType::kBF16) return "only bf16 is multiplied here";
  if (!a.value.empty()) return "a value of its own is left to cuda.portable";
  if (a.key.shape[1] != 1) return "more than one key head is left to cuda.portable";
  if (a.query.shape[2] != 576 && a.query.shape[2] != 512) return "dim_qk must be 576 or 512";
  if (a.d_output.shape[2] != kValueChannels) return "dim_v must be 512";
  if (a.query.shape[1] > kMostHeads) return "heads must be at most 128";
  for (const Tensor* t : {&a.query, &a.key, &a.d_output, &a.d_query, &a.d_key}) {
    if (!has_unit_stride(*t)) return "channels must have stride 1";
  }
  for (const Tensor* t : {&a.query, &a.key, &a.d_output}) {
    for (int axis = 0; axis < t->rank - 1; ++axis) {
      if (t->strides[axis] % 8 != 0) return "strides of rows and heads must be multiples of 8";
    }
  }
  return {};
}

std::int64_t workspace_bytes(const Args& a) { return Scratch(a, nullptr).carve.bytes_to_ask(); }

void run(const Args& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  Scratch scratch(a, workspace.data);
  const int dim_qk = static_cast<int>(a.query.shape[2]);
  const std::int64_t keys = a.key.shape[0];
  BackwardItems b{};
  b.query = a.query.as<BF16>();
  b.key = a.key.as<BF16>();
  b.d_output = a.d_output.data;
  b.wide = a.d_output.dtype == DType::kF32;
  b.vectors = has_vector_rows(a.query) && has_vector_rows(a.key) && has_vector_rows(a.d_output);
  b.query_row = a.query.strides[0];
  b.query_head = a.query.strides[1];
  b.key_row = a.key.strides[0];
  b.output_row = a.d_output.strides[0];
  b.output_head = a.d_output.strides[1];
  b.lse = a.lse.as<float>();
  b.lse_row = a.lse.strides[0];
  b.lse_head = a.lse.strides[1];
  b.slots = SlotLists(a.topk_indices, a.topk_lengths, a.starts, a.ends, keys);
  b.scale = static_cast<float>(a.softmax_scale);
  b.heads = static_cast<int>(a.query.shape[1]);
  b.blocks = static_cast<int>(scratch.blocks);
  b.padded = scratch.padded;
  b.delta = scratch.delta;
  b.power = scratch.power;
  b.p = scratch.p;
  b.dp = scratch.dp;
  b.d_query = a.d_query.as<float>();
  b.d_query_row = a.d_query.strides[0];
  b.d_query_head = a.d_query.strides[1];
  b.d_query_pairs = reinterpret_cast<std::uintptr_t>(b.d_query) % 8 == 0 &&
                    b.d_query_row % 2 == 0 && b.d_query_head % 2 == 0;
  b.partial = scratch.partial;
  Reduction r{};
  r.partial = scratch.partial;
  r.power = scratch.power;
  r.padded = scratch.padded;
  r.blocks = b.blocks;
  r.keys = keys;
  r.d_key = a.d_key.as<float>();
  r.d_key_row = a.d_key.strides[0];
  r.first = true;
  if (a.query.shape[0] == 0) {
    const KeyOrder::Sums sums{r.d_key, nullptr, r.d_key_row, 0, 0, 0, 1, dim_qk, dim_qk};
    KeyOrder::clear(kName, keys, sums, stream);
  }
  const std::int64_t all = a.query.shape[0];
  for (std::int64_t first = 0; first < all; first += scratch.sorted) {
    const std::int64_t last = first + scratch.sorted < all ? first + scratch.sorted : all;
    scratch.order.sort(kName, b.slots, first, last - first, stream);
    scratch.order.find_keys(kName, scratch.begins, stream);
    r.entries = scratch.order.entries();
    r.begins = scratch.begins;
    for (b.first = first; b.first < last; b.first += scratch.rows) {
      b.rows = last - b.first < scratch.rows ? last - b.first : scratch.rows;
      b.counts = scratch.order.counts() + (b.first - first);
      weigh(kName, dim_qk, b, stream);
      multiply(kName, dim_qk, b, stream);
      const Launch launch{.grid = grid_of(ceil_div(keys, kReduceWarps)),
                          .block = dim3(kReduceThreads),
                          .stream = stream};
      dim_qk == 576 ? kReduce<576>.launch(kName, launch, r) : kReduce<512>.launch(kName, launch, r);
      r.begins += keys + 1;
      r.first = false;
    }
  }
}

}  // namespace

extern const Implementation<Args> sparse_attention_backward_implementation;
const Implementation<Args> sparse_attention_backward_implementation = {"cuda.sm90", refuse,
                                                                       workspace_bytes, run};

}  // namespace winnow::cuda::sm90
