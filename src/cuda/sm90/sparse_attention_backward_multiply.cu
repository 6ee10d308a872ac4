// The main kernel of sparse_attention_backward on compute capability 9.0: of every item (a row and 64 of
// its heads) the gradient of its queries, and for every slot the partial row
//   2^k (sum_h dz[h] query[h, :] + sum_h p[h] d_output[h, :])   in f16, k by the first kernel.
//
// Tiles: 64 heads x 64 slots. p and dz as the first kernel forms them; then d_query += dz^T keys in
// registers over all tiles, and the partial rows of the tile, 64 or 128 channels at a time, from
// registers to memory.
// Roles: one warpgroup gathers keys; one forms p, then d_query and partial rows of channels 0-255; one
// forms dp and dz, then the same of the other channels. p goes from one to the other exactly: rounded to
// bf16 in the tile that is multiplied, and its low 16 bits where dz will lie.
// Shared memory: query 72 KiB, d_output 64, keys 72, p 8, dz 8. One block per SM, persistent.
// Order: sums over channels, slots and heads ascend, 16 at a time in the matrix units' order; dz before
// p in a partial row, or after it in the first 128 channels.
//
// 2^k multiplies p from the start, so that all that is stored comes scaled; d_query is scaled back.
//
// Floor (H200, 4096 items x 2048 slots, 576/512): 2.95 TFLOP, 3.75 ms at 790 TFLOP/s; 9.7 GB of partial
// rows, 2.2 ms, beside it. The warpgroups' own chain bounds it: conversion and stores of one piece do
// not hide behind the product of the next.
#include "cuda/sm90/sparse_attention_backward.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr int kThreads = 384, kPair = 256;
constexpr int kValueSlabs = kValueChannels / 64, kFirstSlabs = 4;  // of the first warpgroup

enum Barrier { kLoad = 1, kP, kOwnP, kDz, kTileDone };

template <int kDim>
struct Memory {
  unsigned char query[kDim / 64 * kSlabBytes];       // [slab][head]
  unsigned char d_output[kValueSlabs * kSlabBytes];  // the same
  unsigned char keys[kDim / 64 * kSlabBytes];        // [slab][slot]
  unsigned char p[kSlabBytes], dz[kSlabBytes];       // [head][slot]
  float exponent[kBlockHeads], delta[kBlockHeads];   // lse log2(e) - k; -inf: no weight
  std::uint16_t mask[4];                             // slots of the tile that count
  std::uint64_t full, empty;
};

// kSlabs slabs of 64 heads, zeros of those that do not exist, by 256 threads.
template <int kSlabs, class T>
__device__ void load_heads(unsigned char* to, const T* rows, std::int64_t head_stride, int heads,
                           bool vectors) {
  for (int i = threadIdx.x; i < kBlockHeads * kSlabs * 8; i += kPair) {
    const int head = i / (kSlabs * 8), unit = i % (kSlabs * 8);
    const uint4 eight =
        head < heads ? load_eight(rows + head * head_stride + unit * 8, vectors) : uint4{};
    *reinterpret_cast<uint4*>(to + unit / 8 * kSlabBytes + swizzled(head, unit % 8)) = eight;
  }
}

template <int kDim>
__device__ void load_item(Memory<kDim>& m, const BackwardItems& b, const Item& item,
                          std::int64_t index) {
  meet<kPair>(kLoad);  // nobody multiplies the last one any more
  load_heads<kDim / 64>(m.query,
                        b.query + item.row * b.query_row + item.first_head * b.query_head,
                        b.query_head, item.heads, b.vectors);
  const std::int64_t at = item.row * b.output_row + item.first_head * b.output_head;
  if (b.wide) {
    load_heads<kValueSlabs>(m.d_output, static_cast<const float*>(b.d_output) + at, b.output_head,
                            item.heads, b.vectors);
  } else {
    load_heads<kValueSlabs>(m.d_output, static_cast<const BF16*>(b.d_output) + at, b.output_head,
                            item.heads, b.vectors);
  }
  const int h = threadIdx.x;
  if (h < kBlockHeads) {
    const int k = static_cast<int>(__float_as_uint(b.power[index]) >> 23) - 127;
    m.exponent[h] = scaled_lse(b, item, h) - static_cast<float>(k);
    m.delta[h] = b.delta[index * kBlockHeads + h];
  }
  fence_to_products();
  meet<kPair>(kLoad);
}

// ---- products: addresses in shared memory; [64 heads or slots][64] += ----------------------------
// d[head, slot] of one slab of channels.
__device__ void add_channels(float (&d)[32], std::uint32_t heads, std::uint32_t keys, int slab) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_bf16<0, 0>(d, descriptor(heads + slab * kSlabBytes + k * 32),
                        descriptor(keys + slab * kSlabBytes + k * 32), slab | k);
  }
}
// d[head, channel]: slots are summed.
template <int kSums>
__device__ void add_slots(float (&d)[kSums], std::uint32_t dz, std::uint32_t keys, int accumulate) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_bf16<0, 1>(d, descriptor(dz + k * 32), transposed_descriptor(keys + k * 2048),
                        accumulate | k);
  }
}
// d[slot, channel]: heads are summed.
template <int kSums>
__device__ void add_heads(float (&d)[kSums], std::uint32_t weights, std::uint32_t heads,
                          int accumulate) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_bf16<1, 1>(d, transposed_descriptor(weights + k * 2048),
                        transposed_descriptor(heads + k * 2048), accumulate | k);
  }
}

// ---- what leaves registers ------------------------------------------------------------------------
// Channels from `slab` on of 64 partial rows. A lane writes 16 bytes, four lanes 64.
template <int kDim, int kSums>
__device__ void store_partial(const float (&d)[kSums], std::uint16_t* tile, int slab) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  auto halves = [](float a, float b) {
    std::uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint16_t* out = tile + (row + 8 * half) * kDim + slab * 64 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < kSums / 16; ++c) {
      const float* s = d + 16 * c + 2 * half;
      __stcs(reinterpret_cast<uint4*>(out + 32 * c),
             make_uint4(halves(s[0], s[1]), halves(s[4], s[5]), halves(s[8], s[9]),
                        halves(s[12], s[13])));
    }
  }
}

// A piece of the partial rows: kSums / 32 slabs of channels from `slab` on.
template <int kDim, int kSums>
__device__ void form_partial(float (&d)[kSums], const Memory<kDim>& m, std::uint16_t* tile,
                             int slab) {
  pin(d);
  products_begin();
  add_heads(d, shared_address(m.dz), shared_address(m.query) + slab * kSlabBytes, 0);
  if (slab < kValueSlabs)
    add_heads(d, shared_address(m.p), shared_address(m.d_output) + slab * kSlabBytes, 1);
  products_commit();
  products_wait();
  pin(d);
  store_partial<kDim>(d, tile, slab);
}

template <int kSums>
__device__ void store_query(const float (&d)[kSums], const BackwardItems& b, const Item& item,
                            int slab, float down) {
  const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int h = head + 8 * half;
    if (h >= item.heads) continue;
    float* out = b.d_query + item.row * b.d_query_row + (item.first_head + h) * b.d_query_head +
                 slab * 64 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const float x = d[4 * j + 2 * half] * down, y = d[4 * j + 2 * half + 1] * down;
      if (b.d_query_pairs) {
        *reinterpret_cast<float2*>(out + j * 8) = {x, y};
      } else {
        out[j * 8] = x;
        out[j * 8 + 1] = y;
      }
    }
  }
}
template <int kSums>
__device__ void clear(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) d[i] = 0;
}

// ---- p and dz -------------------------------------------------------------------------------------
// visit(where in a tile of bf16, sums of two neighbouring slots, half, whether each counts).
template <class Visit>
__device__ void visit_pairs(std::uint64_t mask, const float (&exponent)[2], Visit&& visit) {
  const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const bool all = mask == ~std::uint64_t{0} && exponent[0] != -INFINITY && exponent[1] != -INFINITY;
  auto every = [&](auto counts) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        visit(swizzled(head + 8 * half, j) + c * 4, 4 * j + 2 * half, half, counts(half, 8 * j),
              counts(half, 8 * j + 1));
      }
    }
  };
  if (all) return every([](int, int) { return std::true_type{}; });
  const std::uint64_t mine = mask >> 2 * c;
  every([&](int half, int slot) { return (mine >> slot & 1) != 0 && exponent[half] != -INFINITY; });
}

// p splits into bf16, halves away from zero, and the 16 bits that correct it.
struct SplitPair {
  std::uint32_t rounded, low;
};
__device__ SplitPair split(float a, float b) {
  auto bits = [](float p) { return min(__float_as_uint(p), 0x7fc00000u); };  // one NaN
  const std::uint32_t x = bits(a), y = bits(b);
  return {__byte_perm(x + 0x8000, y + 0x8000, 0x7632), __byte_perm(x, y, 0x5410)};
}
__device__ float2 join(SplitPair pair) {
  const auto low = static_cast<std::int32_t>(pair.low << 16) >> 16;
  const auto high = static_cast<std::int32_t>(pair.low) >> 16;
  return {__uint_as_float((pair.rounded << 16) + low),
          __uint_as_float((pair.rounded & 0xffff0000u) + high)};
}

template <int kDim>
__device__ void run_first(Memory<kDim>& m, const BackwardItems& b) {
  const std::uint32_t query = shared_address(m.query), d_output = shared_address(m.d_output),
                      keys = shared_address(m.keys), p_tile = shared_address(m.p),
                      dz_tile = shared_address(m.dz);
  const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const float scale = b.scale * kLog2E;
  float d_query[128], s[32] = {}, d[64] = {};
  unsigned parity = 0;
  for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
    const Item item(b, i);
    load_item(m, b, item, i);
    const float exponent[2] = {m.exponent[head], m.exponent[head + 8]};
    if (item.tiles == 0) clear(d_query);
    for (int t = 0; t < item.tiles; ++t, parity ^= 1) {
      std::uint16_t* tile = b.partial + (i * b.padded + t * kTileSlots) * kDim;
      wait(shared_address(&m.full), parity);
      products_begin();
#pragma unroll
      for (int slab = 0; slab < kDim / 64; ++slab) add_channels(s, query, keys, slab);
      products_commit();
      products_wait();
      pin(s);
      meet<kPair>(kTileDone);  // the last tile's p and dz are no longer multiplied
      visit_pairs(*reinterpret_cast<const std::uint64_t*>(m.mask), exponent,
                  [&](std::uint32_t at, int e, int half, auto counts, auto counts_too) {
                    const float x = exp2f(fmaf(s[e], scale, -exponent[half]));
                    const float y = exp2f(fmaf(s[e + 1], scale, -exponent[half]));
                    const SplitPair pair = split(counts ? x : 0, counts_too ? y : 0);
                    *reinterpret_cast<std::uint32_t*>(m.p + at) = pair.rounded;
                    *reinterpret_cast<std::uint32_t*>(m.dz + at) = pair.low;
                  });
      fence_to_products();
      announce<kPair>(kP);
      meet<128>(kOwnP);
      products_begin();
      add_heads(d, p_tile, d_output, 0);
      products_commit();
      meet<kPair>(kDz);
      add_slots(d_query, dz_tile, keys, t);
      products_commit();
      add_heads(d, dz_tile, query, 1);
      products_commit();
      products_wait_but<1>();
      if (lane == 0) arrive(shared_address(&m.empty));
      products_wait();
      pin(d);
      store_partial<kDim>(d, tile, 0);
      form_partial(d, m, tile, 2);
    }
    pin(d_query);
    store_query(d_query, b, item, 0, 1 / b.power[i]);
  }
  meet<kPair>(kTileDone);
}

template <int kDim>
__device__ void run_second(Memory<kDim>& m, const BackwardItems& b) {
  constexpr int kSlabs = kDim / 64, kMiddle = kFirstSlabs + 3;
  const std::uint32_t query = shared_address(m.query), d_output = shared_address(m.d_output),
                      keys = shared_address(m.keys), p_tile = shared_address(m.p),
                      dz_tile = shared_address(m.dz);
  const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float d_query[96], d_query_rest[(kSlabs - kMiddle) * 32], dp[32] = {}, d[32] = {};
  unsigned parity = 0;
  announce<kPair>(kTileDone);
  for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
    const Item item(b, i);
    load_item(m, b, item, i);
    const float exponent[2] = {m.exponent[head], m.exponent[head + 8]};
    const float delta[2] = {m.delta[head], m.delta[head + 8]};
    if (item.tiles == 0) {
      clear(d_query);
      clear(d_query_rest);
    }
    for (int t = 0; t < item.tiles; ++t, parity ^= 1) {
      std::uint16_t* tile = b.partial + (i * b.padded + t * kTileSlots) * kDim;
      wait(shared_address(&m.full), parity);
      products_begin();
#pragma unroll
      for (int slab = 0; slab < kValueSlabs; ++slab) add_channels(dp, d_output, keys, slab);
      products_commit();
      products_wait();
      pin(dp);
      meet<kPair>(kP);
      visit_pairs(*reinterpret_cast<const std::uint64_t*>(m.mask), exponent,
                  [&](std::uint32_t at, int e, int half, auto counts, auto counts_too) {
                    auto* dz = reinterpret_cast<std::uint32_t*>(m.dz + at);
                    const float2 p =
                        join({*reinterpret_cast<const std::uint32_t*>(m.p + at), *dz});
                    const float x = b.scale * (p.x * (dp[e] - delta[half]));
                    const float y = b.scale * (p.y * (dp[e + 1] - delta[half]));
                    *dz = pack(counts ? x : 0, counts_too ? y : 0);
                  });
      fence_to_products();
      meet<kPair>(kDz);
      products_begin();
      add_slots(d_query, dz_tile, keys + kFirstSlabs * kSlabBytes, t);
      add_slots(d_query_rest, dz_tile, keys + kMiddle * kSlabBytes, t);
      products_commit();
      add_heads(d, dz_tile, query + kFirstSlabs * kSlabBytes, 0);
      add_heads(d, p_tile, d_output + kFirstSlabs * kSlabBytes, 1);
      products_commit();
      products_wait_but<1>();
      if (lane == 0) arrive(shared_address(&m.empty));
      products_wait();
      pin(d);
      store_partial<kDim>(d, tile, kFirstSlabs);
#pragma unroll
      for (int slab = kFirstSlabs + 1; slab < kSlabs; ++slab) form_partial(d, m, tile, slab);
      announce<kPair>(kTileDone);
    }
    pin(d_query);
    pin(d_query_rest);
    const float down = 1 / b.power[i];
    store_query(d_query, b, item, kFirstSlabs, down);
    store_query(d_query_rest, b, item, kMiddle, down);
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_kernel(const __grid_constant__ BackwardItems b) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& m = *reinterpret_cast<Memory<kDim>*>(bytes);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&m.full), 128);
    barrier_init(shared_address(&m.empty), 8);
    barriers_visible();
  }
  __syncthreads();
  const int group = uniform(threadIdx.x / 128);
  if (group == 2) {
    give_registers<40>();
    unsigned parity = 1;
    for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
      const Item item(b, i);
      const RowSlots slots = b.slots[item.row];
      for (int t = 0; t < item.tiles; ++t, parity ^= 1) {
        const TilePlaces places(b, slots, item.count, t);
        wait(shared_address(&m.empty), parity);
        places.copy<kDim / 64>(m.keys, m.mask, b.vectors);
        copies_commit();
        copies_wait<0>();
        fence_to_products();
        arrive(shared_address(&m.full));
      }
    }
  } else if (group == 0) {
    take_registers<232>();
    run_first(m, b);
  } else {
    take_registers<232>();
    run_second(m, b);
  }
}

template <int kDim>
const Kernel kMultiply{multiply_kernel<kDim>, sizeof(Memory<kDim>)};

template <int kDim>
void launch(const char* operation, const BackwardItems& b, cudaStream_t stream) {
  const std::int64_t blocks = b.items() < processors() ? b.items() : processors();
  kMultiply<kDim>.launch(operation,
                         {.grid = dim3(static_cast<unsigned>(blocks)),
                          .block = dim3(kThreads),
                          .shared_bytes = sizeof(Memory<kDim>),
                          .stream = stream},
                         b);
}

}  // namespace

void multiply(const char* operation, int dim_qk, const BackwardItems& b, cudaStream_t stream) {
  dim_qk == 576 ? launch<576>(operation, b, stream) : launch<512>(operation, b, stream);
}

}  // namespace winnow::cuda::sm90
