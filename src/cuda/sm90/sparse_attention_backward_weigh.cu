// The first kernel of sparse_attention_backward on compute capability 9.0: of every item (a row and 64
// of its heads) p = exp(scale query . key - lse) and dp = d_output . value in f32, delta = sum p dp,
// and the power of two under which its partial rows fit f16.
//
// Tiles: 64 heads x 64 slots x dim_qk (p) and x 512 (dp); two tiles of keys in flight.
// Roles: one warpgroup gathers keys; one has the queries in registers and forms p; one has d_output in
// registers, forms dp, takes p through shared memory (f32, two tiles), and sends both to memory by
// bulk copies.
// Shared memory: keys 2 x 72 KiB, p and dp 2 x 16 KiB each. One block per SM, persistent.
// Order: a lane adds its 16 slots of a tile ascending, tile after tile; then four lanes in a tree.
//
// The power: a partial row sum_h dz q + p d_output is at most
//   bound = sum_h max_s p (scale (max_s |dp| + |delta|) max_c |q| + max_c |d_output|),
// maxima over the slots that count; 2^k bound lies in [2^14, 2^15), so that nothing reaches f16's
// 65504 and 29 octaves below the bound keep their 11 bits.
//
// Floor (H200, 4096 items x 2048 slots, 576): 1.17 TFLOP, 1.48 ms at 790 TFLOP/s; 4.3 GB of p and dp,
// 1.0 ms.
#include "cuda/sm90/sparse_attention_backward.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr int kStages = 2, kBuffers = 2;
constexpr int kThreads = 384, kPair = 256;  // all; the two warpgroups that multiply
constexpr int kValueSteps = kValueChannels / 16;
constexpr float kLog2E = 1.44269504f;

enum Barrier { kFullP = 1, kFreeP = kFullP + kBuffers, kTops = kFreeP + kBuffers, kTopsRead, kSums };

template <int kDim>
struct WeighMemory {
  unsigned char keys[kStages][kDim / 64 * kSlabBytes];
  float4 p[kBuffers][8][128], dp[kBuffers][8][128];  // [sums of a thread][thread], as in memory
  std::uint16_t masks[kStages][4];
  float top_p[kBlockHeads], top_query[kBlockHeads], bound[kBlockHeads];
  std::uint64_t full[kStages], empty[kStages];
};

// log2(e) lse; -inf: a head without weight, or one that does not exist.
__device__ float scaled_lse(const BackwardItems& b, const Item& item, int head) {
  if (head >= item.heads) return -INFINITY;
  return b.lse[item.row * b.lse_row + (item.first_head + head) * b.lse_head] * kLog2E;
}

// Operand a of `kSteps` products of 16 channels: 64 heads of an item, zeros of those that do not exist.
// Also the largest magnitude in each of the thread's two heads.
template <int kSteps, class T>
__device__ void load_heads(std::uint32_t (&a)[kSteps][4], float (&top)[2], const T* rows,
                           std::int64_t head_stride, int heads, bool vectors) {
  const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  auto pair = [&](const T* p) -> std::uint32_t {
    if constexpr (sizeof(T) == 4) return pack<BF16>(p[0], p[1]);
    else if (vectors) return *reinterpret_cast<const std::uint32_t*>(p);
    else return p[0].bits | static_cast<std::uint32_t>(p[1].bits) << 16;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = head + 8 * half < heads;
    const T* row = rows + (exists ? head + 8 * half : 0) * head_stride + 2 * c;
    top[half] = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::uint32_t x = exists ? pair(row + 16 * k + 8 * e) : 0;
        a[k][2 * e + half] = x;
        top[half] = fmaxf(top[half], fmaxf(fabsf(__uint_as_float(x << 16)),
                                           fabsf(__uint_as_float(x & 0xffff0000u))));
      }
    }
  }
}

template <int kSteps>
__device__ void products(float (&d)[32], const std::uint32_t (&a)[kSteps][4], std::uint32_t keys) {
  pin(d);
  products_begin();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    multiply_bf16(d, a[k], descriptor(keys + k / 4 * kSlabBytes + k % 4 * 32), k);
  products_commit();
  products_wait();
  pin(d);
}

// Of a tile of p or dp, by one thread, in a group of copies; all who wrote it have fenced and met.
__device__ void store_weights(float* to, const float4 (&weights)[8][128], const BackwardItems& b,
                              std::int64_t item, int tile) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   to + b.weights_at(item, tile, 0, 0)),
               "r"(shared_address(&weights)), "n"(sizeof(weights))
               : "memory");
}
__device__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what they store may be written again.
__device__ void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) weigh_kernel(const __grid_constant__ BackwardItems b) {
  constexpr int kSlabs = kDim / 64;
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& m = *reinterpret_cast<WeighMemory<kDim>*>(bytes);
  const std::uint32_t keys = shared_address(m.keys), full = shared_address(m.full),
                      empty = shared_address(m.empty);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 128);
      barrier_init(empty + 8 * s, 8);
    }
    barriers_visible();
  }
  __syncthreads();
  const int group = uniform(threadIdx.x / 128), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int head = warp * 16 + lane / 4;  // and the one 8 further
  unsigned tile = 0;                      // of all that this block goes through
  auto stage_of = [](unsigned t) { return static_cast<int>(t % kStages); };
  auto parity_of = [](unsigned t) { return t / kStages & 1; };

  if (group == 2) {
    give_registers<40>();
    auto finish = [&](unsigned t) {
      fence_to_products();
      arrive(full + 8 * stage_of(t));
    };
    for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
      const Item item(b, i);
      const RowSlots slots = b.slots[item.row];
      for (int t = 0; t < item.tiles; ++t, ++tile) {
        const TilePlaces places(b, slots, item.count, t);
        wait(empty + 8 * stage_of(tile), parity_of(tile) ^ 1);
        places.copy<kSlabs>(m.keys[stage_of(tile)], m.masks[stage_of(tile)], b.vectors);
        copies_commit();
        if (tile == 0) continue;
        copies_wait<1>();
        finish(tile - 1);
      }
    }
    copies_wait<0>();
    if (tile > 0) finish(tile - 1);
  } else if (group == 0) {  // p
    take_registers<232>();
    std::uint32_t query[kDim / 16][4];
    float s[32] = {};
    const float scale = b.scale * kLog2E;
    for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
      const Item item(b, i);
      float top_query[2], top_p[2] = {}, lse[2];
      load_heads(query, top_query, b.query + item.row * b.query_row + item.first_head * b.query_head,
                 b.query_head, item.heads, b.vectors);
      for (int half = 0; half < 2; ++half) lse[half] = scaled_lse(b, item, head + 8 * half);
      for (int t = 0; t < item.tiles; ++t, ++tile) {
        const int stage = stage_of(tile), buffer = static_cast<int>(tile % kBuffers);
        wait(full + 8 * stage, parity_of(tile));
        products(s, query, keys + stage * kSlabs * kSlabBytes);
        const std::uint64_t mask = *reinterpret_cast<const std::uint64_t*>(m.masks[stage]);
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
        const std::uint64_t mine = mask >> lane % 4 * 2;
        meet<kPair>(kFreeP + buffer);
#pragma unroll
        for (int e = 0; e < 32; ++e) {
          const int half = e / 2 % 2;
          const bool counts = (mine >> (e / 4 * 8 + e % 2) & 1) != 0 && lse[half] != -INFINITY;
          s[e] = counts ? exp2f(fmaf(s[e], scale, -lse[half])) : -0.f;
          top_p[half] = fmaxf(top_p[half], s[e]);
          if (e % 4 == 3) {
            m.p[buffer][e / 4][threadIdx.x] = make_float4(s[e - 3], s[e - 2], s[e - 1], s[e]);
          }
        }
        fence_to_products();
        announce<kPair>(kFullP + buffer);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float p = quad_max(top_p[half]), q = quad_max(top_query[half]);
        if (lane % 4 != 0) continue;
        m.top_p[head + 8 * half] = p;
        m.top_query[head + 8 * half] = q;
      }
      meet<kPair>(kTops);
      meet<kPair>(kTopsRead);
    }
    meet<kPair>(kFreeP + static_cast<int>(tile % kBuffers));
  } else {  // dp, delta
    take_registers<232>();
    const int thread = threadIdx.x - 128;
    std::uint32_t d_output[kValueSteps][4];
    float dp[32] = {};
    announce<kPair>(kFreeP);
    for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
      const Item item(b, i);
      float top_output[2], top_dp[2] = {}, delta[2] = {};
      bool live[2];
      const std::int64_t at = item.row * b.output_row + item.first_head * b.output_head;
      if (b.wide) {
        load_heads(d_output, top_output, static_cast<const float*>(b.d_output) + at, b.output_head,
                   item.heads, b.vectors);
      } else {
        load_heads(d_output, top_output, static_cast<const BF16*>(b.d_output) + at, b.output_head,
                   item.heads, b.vectors);
      }
      for (int half = 0; half < 2; ++half)
        live[half] = scaled_lse(b, item, head + 8 * half) != -INFINITY;
      for (int t = 0; t < item.tiles; ++t, ++tile) {
        const int stage = stage_of(tile), buffer = static_cast<int>(tile % kBuffers);
        wait(full + 8 * stage, parity_of(tile));
        products(dp, d_output, keys + stage * kSlabs * kSlabBytes);
        const std::uint64_t mask = *reinterpret_cast<const std::uint64_t*>(m.masks[stage]);
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
        const std::uint64_t mine = mask >> lane % 4 * 2;
        if (thread == 0) stores_wait_read();  // of the last tile: its buffers are free
        announce<kPair>(kFreeP + (buffer ^ 1));
        meet<kPair>(kFullP + buffer);
        if (thread == 0) store_weights(b.p, m.p[buffer], b, i, t);
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          const float4 four = m.p[buffer][q][thread];
          const float p[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int e = 4 * q; e < 4 * q + 4; ++e) {
            const int half = e / 2 % 2;
            const bool counts = (mine >> (q * 8 + e % 2) & 1) != 0 && live[half];
            if (!counts) dp[e] = 0;
            delta[half] = fmaf(p[e % 4], dp[e], delta[half]);
            top_dp[half] = fmaxf(top_dp[half], fabsf(dp[e]));
          }
          m.dp[buffer][q][thread] =
              make_float4(dp[4 * q], dp[4 * q + 1], dp[4 * q + 2], dp[4 * q + 3]);
        }
        fence_to_products();
        meet<128>(kSums);
        if (thread == 0) {
          store_weights(b.dp, m.dp[buffer], b, i, t);
          stores_commit();
        }
      }
      meet<kPair>(kTops);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        delta[half] += __shfl_xor_sync(0xffffffffu, delta[half], 1);
        delta[half] += __shfl_xor_sync(0xffffffffu, delta[half], 2);
        const float top = quad_max(top_dp[half]), output = quad_max(top_output[half]);
        const int h = head + 8 * half;
        if (lane % 4 != 0) continue;
        b.delta[i * kBlockHeads + h] = delta[half];
        m.bound[h] =
            m.top_p[h] * (b.scale * (top + fabsf(delta[half])) * m.top_query[h] + output);
      }
      meet<kPair>(kTopsRead);
      meet<128>(kSums);
      if (warp == 0) {
        float bound = m.bound[lane] + m.bound[lane + 32];
        for (int distance = 16; distance > 0; distance /= 2)
          bound += __shfl_xor_sync(0xffffffffu, bound, distance);
        // No bound (0, or no number): any power will do.
        const int exponent = static_cast<int>(__float_as_uint(bound) >> 23 & 255) - 127;
        const int k = bound > 0 ? max(-100, min(100, 14 - exponent)) : 0;
        if (lane == 0) b.power[i] = __uint_as_float(static_cast<std::uint32_t>(127 + k) << 23);
      }
      meet<128>(kSums);
    }
    if (thread == 0) stores_wait();
  }
}

template <int kDim>
const Kernel kWeigh{weigh_kernel<kDim>, sizeof(WeighMemory<kDim>)};

template <int kDim>
void launch(const char* operation, const BackwardItems& b, cudaStream_t stream) {
  const std::int64_t blocks = b.items() < processors() ? b.items() : processors();
  kWeigh<kDim>.launch(operation,
                      {.grid = dim3(static_cast<unsigned>(blocks)),
                       .block = dim3(kThreads),
                       .shared_bytes = sizeof(WeighMemory<kDim>),
                       .stream = stream},
                      b);
}

}  // namespace

void weigh(const char* operation, int dim_qk, const BackwardItems& b, cudaStream_t stream) {
  dim_qk == 576 ? launch<576>(operation, b, stream) : launch<512>(operation, b, stream);
}

}  // namespace winnow::cuda::sm90
