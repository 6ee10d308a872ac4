// sparse_attention on compute capability 9.0: MLA in bf16, keys of 576 or 512 channels whose first 512
// are the value; any number of heads, slots and pages.
//
// A block takes one row and up to 64 heads (what is missing is zeros) and walks the row's slots in tiles
// of 64 keys, two tiles at a time:
//
//   feed    one warpgroup gathers the keys by cp.async, 16 bytes per lane, into slabs of 64 channels with
//           the 128-byte swizzle; slots that do not count become zeros and a bit that is not set. A tile
//           comes and goes in two halves, channels 0..255 and the rest, each with barriers of its own.
//   even    tile 0 of a pair: S = Q K^T, weights P; then O[:, 0..255] += P V of tile 0, of tile 1
//   odd     tile 1 of a pair: the same; O[:, 256..511] += P V of tile 0 (while it weighs tile 1), of tile 1
//
// Each warpgroup holds half of the channels of O in registers (128 per thread), multiplies its own P
// from registers and leaves it in shared memory for the other, beside the maximum and the factor. The
// products read a tile as it lies: K along channels, V across them.
//
// Shared memory: Q and two tiles of 72 KB each, 8 KB for the odd P; the even one takes the place of the
// last 64 channels of its own tile, which only S needs. 226 KB.
//
// Order: S as the tensor core adds channels ascending; tiles ascending, for both halves of O; the sum of
// the weights of a head: 16 of a lane (4 chains, a tree), even and odd tiles apart, a tree over 4 lanes,
// then both. Nothing of it depends on other rows or on where keys lie.
//
// Floor (H200, 4096 rows x 64 heads x 2048 slots of 32768, 576/512): 1168 GFLOP, 1.48 ms at 790 TFLOP/s;
// 9.7 GB gathered, 1.1 ms out of L2; through shared memory 296 KB per tile, 2370 clocks, of which the
// products alone take 2180.
// Measured: 2.31-2.33 ms. Two tiles take 6500 clocks in the middle of a row (one row alone: 6670, so it is
// not the L2). S of both takes 2800, bound by shared memory: m64n64k16 reads as much of Q as of the keys.
// Then each warpgroup weighs, 580 clocks alone and 1060 to 1490 beside products, the odd one after the
// even one, whose maximum it needs; then 1300 for the last products.

#include "base/implementation.h"
#include "cuda/sm90/tma.h"
#include "cuda/sm90/wgmma_attention.h"
#include "cuda/sparse_attention.h"

namespace winnow::cuda {

extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;

namespace sm90 {
namespace {

constexpr int kHeads = 64, kKeys = 64, kValueSlabs = 8, kHalfSlabs = 4;
constexpr int kThreads = 3 * 128, kFeedRegisters = 56, kMathRegisters = 224;
static_assert(kFeedRegisters + 2 * kMathRegisters <= 65536 / 128);  // setmaxnreg would wait forever

using Call = Attention<BF16>;

// What two warpgroups tell each other, by row: heads.
struct Exchange {
  float maximum[2][kHeads], factor[2][kHeads], sum[2][kHeads];
  std::uint16_t counts[2][4];  // bits of the slots of a tile
  std::uint64_t barriers[11];
};
constexpr int kTileBytes = 9 * kSlabBytes;
constexpr int kWeightsAt = 3 * kTileBytes, kExchangeAt = kWeightsAt + kSlabBytes;
constexpr int kBytes = kExchangeAt + static_cast<int>(sizeof(Exchange));
static_assert(kBytes <= 232448 - 1024);  // what is static beside it

struct Memory {
  std::uint32_t query;  // addresses
  Exchange* exchange;

  __device__ std::uint32_t tile(int i) const { return query + (1 + i) * kTileBytes; }
  // Of P: in place of what only S needs of its tile, or on its own.
  __device__ std::uint32_t weights(int i) const {
    return i == 0 ? tile(0) + kValueSlabs * kSlabBytes : query + kWeightsAt;
  }
  __device__ std::uint32_t barrier(int i) const {
    return query + kExchangeAt + static_cast<int>(offsetof(Exchange, barriers)) + 8 * i;
  }
  __device__ std::uint32_t full(int tile, int half) const { return barrier(2 * tile + half); }
  __device__ std::uint32_t empty(int tile, int half) const { return barrier(4 + 2 * tile + half); }
  __device__ std::uint32_t weighed(int tile) const { return barrier(8 + tile); }
  __device__ std::uint32_t query_full() const { return barrier(10); }
};

__device__ void prepare(const Memory& memory) {
  for (int tile = 0; tile < 2; ++tile) {
    barrier_init(memory.full(tile, 0), 128);
    barrier_init(memory.full(tile, 1), 128 + 4);  // the bits, by each warp
    barrier_init(memory.empty(tile, 0), 4);
    barrier_init(memory.empty(tile, 1), 4);
    barrier_init(memory.weighed(tile), 4);
  }
  barrier_init(memory.query_full(), 128);
  barriers_visible();
}

// ---- feed -----------------------------------------------------------------------------------------
// Arrives when all copies of this thread so far have come.
__device__ void arrive_with_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// This lane's part of 16 rows of 64 that its warp copies: rows lane / 8 + 4 i, 16 bytes of each slab.
struct Part {
  const BF16* from[4];
  int bytes[4];
  std::uint32_t even, odd;  // where the rows of even i and of odd i go, in slab 0

  __device__ explicit Part(std::uint32_t to) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 8, unit = threadIdx.x % 8;
    even = to + swizzled(row, unit);
    odd = to + swizzled(row + 4, unit);
  }
  // The lane that looks after row r of the warp is lane r; offset -1: zeros.
  __device__ void set(const BF16* data, std::int64_t offset) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = __shfl_sync(~0u, offset, threadIdx.x % 32 / 8 + 4 * i);
      from[i] = data + (at < 0 ? 0 : at) + threadIdx.x % 8 * 8;
      bytes[i] = at < 0 ? 0 : 16;
    }
  }
  template <int kFirst, int kLast>
  __device__ void copy(std::uint32_t tile) const {
#pragma unroll
    for (int slab = kFirst; slab < kLast; ++slab) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy_async(tile + (i % 2 == 0 ? even : odd) + slab * kSlabBytes + i / 2 * 1024,
                      from[i] + slab * 64, bytes[i]);
      }
    }
  }
};

template <int kSlabs>
__device__ void feed(const Memory& memory, const Call& a, std::int64_t row, int first_head,
                     const RowSlots& slots, int tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Part part(0);
  const int head = 16 * warp + lane;
  part.set(a.query + row * a.query_row + first_head * a.query_head,
           lane < 16 && first_head + head < a.group ? head * a.query_head : -1);
  part.template copy<0, kSlabs>(memory.query);
  arrive_with_copies(memory.query_full());

  // Lane l < 16 looks after this warp's l-th slot of a tile, in steps that each wait for memory.
  std::int64_t id = -1, at = -1;
  auto read_id = [&](int tile) {
    const std::int64_t slot = static_cast<std::int64_t>(tile) * kKeys + 16 * warp + lane;
    id = lane < 16 && slot < slots.count ? slots.raw(slot) : -1;
  };
  auto locate = [&] { at = slots.range.contains(id) ? a.key_places.offset(row, id) : -1; };
  read_id(0);
  locate();
  read_id(1);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    const std::uint32_t parity = tile / 2 % 2;
    part.set(a.key, at);
    const unsigned bits = __ballot_sync(~0u, at >= 0);
    wait(memory.empty(stage, 0), parity ^ 1);
    part.template copy<0, kHalfSlabs>(memory.tile(stage));
    arrive_with_copies(memory.full(stage, 0));
    wait(memory.empty(stage, 1), parity ^ 1);
    part.template copy<kHalfSlabs, kSlabs>(memory.tile(stage));
    arrive_with_copies(memory.full(stage, 1));
    if (lane == 0) {
      memory.exchange->counts[stage][warp] = static_cast<std::uint16_t>(bits);
      arrive(memory.full(stage, 1));
    }
    locate();
    read_id(tile + 2);
  }
}

// ---- products -------------------------------------------------------------------------------------
// S of a tile: 64 heads x 64 keys.
template <int kSlabs>
__device__ void score(float (&s)[32], const Memory& memory, int stage, std::uint32_t parity) {
  auto slabs = [&](int first, int last) {
#pragma unroll
    for (int slab = first; slab < last; ++slab) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const std::uint32_t at = slab * kSlabBytes + k * 32;
        multiply_bf16<0, 0>(s, descriptor(memory.query + at), descriptor(memory.tile(stage) + at),
                            slab + k);
      }
    }
  };
  wait(memory.full(stage, 0), parity);
  fence_to_products();
  pin(s);
  products_begin();
  slabs(0, kHalfSlabs);
  wait(memory.full(stage, 1), parity);
  fence_to_products();
  products_begin();
  slabs(kHalfSlabs, kSlabs);
  products_commit();
  products_wait();
  pin(s);
}

// O += P V of a tile, of this warpgroup's half of the channels.
__device__ void add_values(float (&o)[128], const std::uint32_t (&p)[4][4], std::uint32_t values) {
  pin(o);
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_bf16_transposed(o, p[k], transposed_descriptor(values + k * 2048), 1);
  }
  products_commit();
}
__device__ void add_values(float (&o)[128], std::uint32_t weights, std::uint32_t values) {
  pin(o);
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_bf16<0, 1>(o, descriptor(weights + k * 32), transposed_descriptor(values + k * 2048),
                        1);
  }
  products_commit();
}

// ---- softmax --------------------------------------------------------------------------------------
// 2^x; below 2^-126 it is 0.
__device__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of two heads, g and g + 8 of a warp's 16; four lanes hold 16 slots of a tile each. The maximum is of
// q . k; `scale` takes it to base 2.
struct HeadPair {
  float scale;
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this warpgroup's tiles, of this lane's slots
  float factor[2];        // of what was summed before

  // s becomes the weights; p the same, rounded.
  __device__ void step(float (&s)[32], std::uint32_t (&p)[4][4], std::uint64_t counts) {
    if (counts != ~std::uint64_t{0}) {
      counts >>= threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if ((counts >> (i / 4 * 8 + i % 2) & 1) == 0) s[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -INFINITY;  // NaN never is the maximum
#pragma unroll
      for (int b = 0; b < 8; ++b) top = fmaxf(top, fmaxf(s[4 * b + 2 * r], s[4 * b + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, maximum[r]);
      const float base = top == -INFINITY ? 0 : top * scale;  // the weights are 0 then, and NaN stays
      factor[r] = maximum[r] == top ? (top == INFINITY ? NAN : 1)
                                    : power_of_2(maximum[r] * scale - base);
      maximum[r] = top;
      float added[4];
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        float &low = s[4 * b + 2 * r], &high = s[4 * b + 2 * r + 1];
        low = power_of_2(fmaf(low, scale, -base));
        high = power_of_2(fmaf(high, scale, -base));
        added[b % 4] = b < 4 ? low + high : added[b % 4] + (low + high);
        p[b / 2][b % 2 * 2 + r] = pack<BF16>(low, high);
      }
      sum[r] = fmaf(sum[r], factor[r], (added[0] + added[1]) + (added[2] + added[3]));
    }
  }
  // For the other warpgroup, which has the same heads in the same threads.
  __device__ void tell(Exchange& exchange, int tile, int head) const {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      exchange.maximum[tile][head + 8 * r] = maximum[r];
      exchange.factor[tile][head + 8 * r] = factor[r];
    }
  }
  __device__ void hear(const Exchange& exchange, int tile, int head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = exchange.maximum[tile][head + 8 * r];
      factor[r] = exchange.factor[tile][head + 8 * r];
      sum[r] *= factor[r];
    }
  }
  __device__ void scale_sums(float (&o)[128]) const {
    if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
  }
};

// ---- roles ----------------------------------------------------------------------------------------
template <int kSlabs>
struct Worker {
  const Memory& memory;
  int head;  // the first of this thread's two
  HeadPair heads;
  float o[128] = {};

  __device__ std::uint64_t counts(int tile) const {
    return *reinterpret_cast<const std::uint64_t*>(memory.exchange->counts[tile]);
  }
  // The weights of this warpgroup's tile and what belongs to them are there for the other.
  __device__ void publish(int tile, const std::uint32_t (&p)[4][4]) const {
    const int unit_word = threadIdx.x % 4 * 4;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(memory.weights(tile) +
                                                     swizzled(head + 8 * r, b) + unit_word),
                     "r"(p[b / 2][b % 2 * 2 + r])
                     : "memory");
      }
    }
    heads.tell(*memory.exchange, tile, head);
    fence_to_products();
    arrive_warp(memory.weighed(tile));
  }
  __device__ void arrive_warp(std::uint32_t barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
  }
  __device__ void finish_values(int tile, int half) {
    products_wait();
    pin(o);
    arrive_warp(memory.empty(tile, half));
  }

  template <bool kPair>
  __device__ void even(std::uint32_t parity) {
    float s[32];
    std::uint32_t p[4][4];
    score<kSlabs>(s, memory, 0, parity);
    heads.step(s, p, counts(0));
    publish(0, p);
    heads.scale_sums(o);
    add_values(o, p, memory.tile(0));
    finish_values(0, 0);
    if constexpr (kPair) {
      wait(memory.weighed(1), parity);
      heads.hear(*memory.exchange, 1, head);
      heads.scale_sums(o);
      add_values(o, memory.weights(1), memory.tile(1));
      finish_values(1, 0);
    }
  }
  template <bool kPair>
  __device__ void odd(std::uint32_t parity) {
    float s[32];
    std::uint32_t p[4][4];
    if constexpr (kPair) score<kSlabs>(s, memory, 1, parity);
    wait(memory.weighed(0), parity);
    heads.hear(*memory.exchange, 0, head);
    heads.scale_sums(o);
    add_values(o, memory.weights(0), memory.tile(0) + kHalfSlabs * kSlabBytes);
    if constexpr (kPair) {
      heads.step(s, p, counts(1));
      publish(1, p);
    }
    finish_values(0, 1);
    if constexpr (kPair) {
      heads.scale_sums(o);
      add_values(o, p, memory.tile(1) + kHalfSlabs * kSlabBytes);
      finish_values(1, 1);
    }
  }
};

// Four lanes hold words j of blocks 0..3; afterwards lane c holds block c.
__device__ uint4 transpose(std::uint32_t (&w)[4]) {
  const bool bit0 = threadIdx.x % 2 != 0, bit1 = threadIdx.x / 2 % 2 != 0;
  auto exchange = [](std::uint32_t& low, std::uint32_t& high, bool upper, int lanes) {
    const std::uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, lanes);
    (upper ? low : high) = got;
  };
  exchange(w[0], w[1], bit0, 1);
  exchange(w[2], w[3], bit0, 1);
  exchange(w[0], w[2], bit1, 2);
  exchange(w[1], w[3], bit1, 2);
  return {w[0], w[1], w[2], w[3]};
}

__device__ void store(const Call& a, std::int64_t row, int head, int first_channel,
                      const float (&o)[128], int r, float inverse, bool vectors) {
  // A head whose weights are all 0 has output 0, whatever its values hold.
  auto number = [&](int i) { return inverse == 0 ? 0 : inverse * o[i]; };
  const int c = threadIdx.x % 4;
  const bool stored = head < a.group;
#pragma unroll
  for (int q = 0; q < 8; ++q) {  // 32 channels each
    if (vectors && !a.wide) {
      std::uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * q + j) + 2 * r;
        w[j] = pack<BF16>(number(i), number(i + 1));
      }
      const uint4 words = transpose(w);
      if (!stored) continue;
      BF16* to = static_cast<BF16*>(a.output) + row * a.output_row + head * a.output_head;
      *reinterpret_cast<uint4*>(to + first_channel + 32 * q + 8 * c) = words;
      continue;
    }
    if (!stored) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int b = 4 * q + j, i = 4 * b + 2 * r;
      a.store(row, head, first_channel + 8 * b + 2 * c, number(i));
      a.store(row, head, first_channel + 8 * b + 2 * c + 1, number(i + 1));
    }
  }
}

template <int kSlabs>
__device__ void attend(const Memory& memory, const Call& a, std::int64_t row, int first_head,
                       int tiles, float scale, bool vectors) {
  const int group = uniform(threadIdx.x / 128 - 1);  // 0: even
  Worker<kSlabs> worker{memory,
                        static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
                        {scale}};
  wait(memory.query_full(), 0);
  if (group == 0) {
    for (int pair = 0; pair < tiles / 2; ++pair) worker.template even<true>(pair % 2);
    if (tiles % 2 != 0) worker.template even<false>(tiles / 2 % 2);
  } else {
    for (int pair = 0; pair < tiles / 2; ++pair) worker.template odd<true>(pair % 2);
    if (tiles % 2 != 0) worker.template odd<false>(tiles / 2 % 2);
  }
  HeadPair& heads = worker.heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    heads.sum[r] += __shfl_xor_sync(~0u, heads.sum[r], 1);
    heads.sum[r] += __shfl_xor_sync(~0u, heads.sum[r], 2);
    if (threadIdx.x % 4 == 0) memory.exchange->sum[group][worker.head + 8 * r] = heads.sum[r];
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_block = worker.head + 8 * r, head = first_head + in_block;
    const float sum = memory.exchange->sum[0][in_block] + memory.exchange->sum[1][in_block];
    if (group == 0 && threadIdx.x % 4 == 0 && head < a.group) {
      constexpr double kLn2 = 0.6931471805599453;
      // The weights are of this maximum in base 2: its rounding moves no result.
      a.lse[row * a.lse_row + head * a.lse_head] =
          sum == 0 ? -INFINITY
                   : static_cast<float>(kLn2 * (heads.maximum[r] * scale) +
                                        static_cast<double>(logf(sum)));
    }
    store(a, row, head, group * 256, worker.o, r, sum == 0 ? 0 : 1 / sum, vectors);
  }
}

template <int kSlabs>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Call a, float scale, bool vectors) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const int base = uniform(static_cast<int>(shared_address(bytes)));
  const Memory memory{static_cast<std::uint32_t>(base),
                      reinterpret_cast<Exchange*>(bytes + kExchangeAt)};
  const int head_blocks = (a.group + kHeads - 1) / kHeads;
  const std::int64_t row = block_index() / head_blocks;
  if (row >= a.rows) return;
  const int first_head = static_cast<int>(block_index() % head_blocks) * kHeads;
  if (threadIdx.x == 0) prepare(memory);
  RowSlots slots = a.slots[row];
  __syncthreads();
  slots.count = trimmed_count(slots);
  const int tiles = uniform(static_cast<int>((slots.count + kKeys - 1) / kKeys));
  if (threadIdx.x < 128) {
    give_registers<kFeedRegisters>();
    feed<kSlabs>(memory, a, row, first_head, slots, tiles);
  } else {
    take_registers<kMathRegisters>();
    attend<kSlabs>(memory, a, row, first_head, tiles, scale, vectors);
  }
}

// ---- the host -------------------------------------------------------------------------------------
template <int kSlabs>
const Kernel kAttention{attention_kernel<kSlabs>, kBytes};

Refusal refuse(const SparseAttentionArgs& a) {
  if (a.query.dtype != DType::kBF16) return "takes bf16";
  if (!a.value.empty()) return "takes keys whose first channels are the value";
  if (a.key.data.shape[a.key.key_axis()] != 1) return "takes one key head";
  const std::int64_t dim_qk = a.query.shape[2];
  if ((dim_qk != 512 && dim_qk != 576) || a.output.shape[2] != 512) {
    return "takes 512 or 576 channels, 512 of the value";
  }
  if (!has_unit_stride(a.query) || !has_unit_stride(a.key.data) || !has_unit_stride(a.output)) {
    return "channels must have stride 1";
  }
  auto steps_by_vectors = [](const Tensor& t) {
    for (int axis = 0; axis < t.rank - 1; ++axis) {
      if (t.strides[axis] % 8 != 0) return false;
    }
    return true;
  };
  if (!steps_by_vectors(a.query) || !steps_by_vectors(a.key.data)) {
    return "rows, heads and keys must lie at multiples of 16 bytes";
  }
  return {};
}

std::int64_t workspace_bytes(const SparseAttentionArgs&) { return 0; }

void run(const SparseAttentionArgs& args, Workspace workspace) {
  const Call a(args);
  // Memory that does not begin at a multiple of 16 bytes.
  if (!a.query_vectors || !a.key_vectors) {
    return cuda::sparse_attention_implementation.run(args, workspace);
  }
  const auto scale = static_cast<float>(args.softmax_scale * 1.4426950408889634);  // log2 e
  const auto& kernel = args.query.shape[2] == 512 ? kAttention<8> : kAttention<9>;
  kernel.launch("sparse_attention",
                {.grid = grid_of(a.rows * ceil_div(a.group, kHeads)),
                 .block = dim3(kThreads),
                 .shared_bytes = kBytes,
                 .stream = stream_of(workspace)},
                a, scale, has_vector_rows(args.output));
}

}  // namespace

extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;
const Implementation<SparseAttentionArgs> sparse_attention_implementation = {"cuda.sm90", refuse,
                                                                             workspace_bytes, run};

}  // namespace sm90
}  // namespace winnow::cuda
