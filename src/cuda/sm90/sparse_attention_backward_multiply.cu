// The main kernel of sparse_attention_backward on compute capability 9.0: of every item (a row and 64 of
// its heads) the gradient of its queries, and for every slot the partial row
//   2^k (sum_h dz[h] query[h, :] + sum_h p[h] d_output[h, :])   in f16,
// from p, dp, delta and 2^k of the first kernel.
//
// Tiles: 64 heads x 64 slots. dz = scale p (dp - delta); p and dz, times 2^k, as bf16 to shared memory;
// then d_query += dz keys in registers over all tiles, and the partial rows of the tile, 64 channels
// at a time, from registers to memory.
// Roles: three warpgroups multiply, each a third of the channels, so that one stores while others
// multiply. One prepares the next tile meanwhile: gathers its keys, reads its p and dp and rounds them
// into registers; they are written when the last tile is no longer multiplied.
// Shared memory: query 72 KiB, d_output 64, keys 72, p 8, dz 8. One block per SM, persistent.
// Order: sums over slots and heads ascend, 16 at a time in the matrix units' order; in a partial row the
// part of dz before that of p.
//
// Floor (H200, 4096 items x 2048 slots, 576/512): 1.79 TFLOP, 2.3 ms at 790 TFLOP/s; 9.7 GB of partial
// rows and 4.3 GB of p and dp, 3.2 ms.
#include "cuda/sm90/sparse_attention_backward.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr int kGroups = 2, kFirstSlabs = 4;  // that multiply; slabs of 64 channels of the first
constexpr int kMultiplying = kGroups * 128, kThreads = kMultiplying + 128;
constexpr int kValueSlabs = kValueChannels / 64;
constexpr int kItem = 1;  // a barrier

template <int kDim>
struct Memory {
  unsigned char query[kDim / 64 * kSlabBytes];       // [slab][head]
  unsigned char d_output[kValueSlabs * kSlabBytes];  // the same
  unsigned char keys[kDim / 64 * kSlabBytes];        // [slab][slot]
  unsigned char p[kSlabBytes], dz[kSlabBytes];       // [head][slot]
  std::uint64_t full, keys_empty, weights_empty;
};

// kSlabs slabs of 64 heads, zeros of those that do not exist, by all threads that multiply.
template <int kSlabs, class T>
__device__ void load_heads(unsigned char* to, const T* rows, std::int64_t head_stride, int heads,
                           bool vectors) {
  for (int i = threadIdx.x; i < kBlockHeads * kSlabs * 8; i += kMultiplying) {
    const int head = i / (kSlabs * 8), unit = i % (kSlabs * 8);
    const uint4 eight =
        head < heads ? load_eight(rows + head * head_stride + unit * 8, vectors) : uint4{};
    *reinterpret_cast<uint4*>(to + unit / 8 * kSlabBytes + swizzled(head, unit % 8)) = eight;
  }
}

template <int kDim>
__device__ void load_item(Memory<kDim>& m, const BackwardItems& b, const Item& item) {
  meet<kMultiplying>(kItem);  // nobody multiplies the last one any more
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
  fence_to_products();
  meet<kMultiplying>(kItem);
}

// ---- products: addresses in shared memory; [64 heads or slots][64] += ----------------------------
// d[head, channel]: slots are summed.
template <int kSums>
__device__ void add_slots(float (&d)[kSums], std::uint32_t dz, std::uint32_t keys) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_bf16<0, 1>(d, descriptor(dz + k * 32), transposed_descriptor(keys + k * 2048), 1);
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
__device__ void store_partial(const float (&d)[kSums], std::uint16_t* rows, int slab) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  auto halves = [](float a, float b) {
    std::uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint16_t* out = rows + (row + 8 * half) * kDim + slab * 64 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < kSums / 16; ++c) {
      const float* s = d + 16 * c + 2 * half;
      __stcs(reinterpret_cast<uint4*>(out + 32 * c),
             make_uint4(halves(s[0], s[1]), halves(s[4], s[5]), halves(s[8], s[9]),
                        halves(s[12], s[13])));
    }
  }
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
__device__ void set_to_zero(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) d[i] = 0;
}

// ---- p and dz -------------------------------------------------------------------------------------
// A thread's share of a tile, of two heads, 8 apart, 16 slots each: p and dz as they are multiplied.
class Weights {
 public:
  __device__ Weights(const BackwardItems& b, std::int64_t item)
      : power_(b.power[item]), scale_(b.scale * power_) {
    const float* of_item = b.delta + item * kBlockHeads + threadIdx.x / 32 % 4 * 16;
    delta_[0] = of_item[threadIdx.x % 32 / 4];
    delta_[1] = of_item[threadIdx.x % 32 / 4 + 8];
  }
  __device__ void read(const BackwardItems& b, std::int64_t item, int tile) {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const std::int64_t at = b.weights_at(item, tile, q, threadIdx.x % 128);
      const float4 p = __ldcs(reinterpret_cast<const float4*>(b.p + at));
      const float4 dp = __ldcs(reinterpret_cast<const float4*>(b.dp + at));
      p_[2 * q] = pack<BF16>(p.x * power_, p.y * power_);
      p_[2 * q + 1] = pack<BF16>(p.z * power_, p.w * power_);
      dz_[2 * q] = pack<BF16>(dz(p.x, dp.x, 0), dz(p.y, dp.y, 0));
      dz_[2 * q + 1] = pack<BF16>(dz(p.z, dp.z, 1), dz(p.w, dp.w, 1));
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)  // here, not where they are written
      asm volatile("" : "+r"(p_[i]), "+r"(dz_[i])::"memory");
  }
  __device__ void write(unsigned char* p, unsigned char* dz) const {
    const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const std::uint32_t at = swizzled(head + i % 2 * 8, i / 2) + 4 * c;
      *reinterpret_cast<std::uint32_t*>(p + at) = p_[i];
      *reinterpret_cast<std::uint32_t*>(dz + at) = dz_[i];
    }
  }

 private:
  __device__ float dz(float p, float dp, int half) const {
    return signbit(p) ? 0 : scale_ * (p * (dp - delta_[half]));
  }

  float power_, scale_, delta_[2];
  std::uint32_t p_[16], dz_[16];  // pairs of slots
};

template <int kDim>
__device__ void prepare(Memory<kDim>& m, const BackwardItems& b) {
  unsigned parity = 1;
  for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
    const Item item(b, i);
    const RowSlots slots = b.slots[item.row];
    Weights weights(b, i);
    for (int t = 0; t < item.tiles; ++t, parity ^= 1) {
      {
        const TilePlaces places(b, slots, item.count, t);
        wait(shared_address(&m.keys_empty), parity);
        places.copy<kDim / 64>(m.keys, nullptr, b.vectors);
      }
      copies_commit();
      weights.read(b, i, t);
      wait(shared_address(&m.weights_empty), parity);
      weights.write(m.p, m.dz);
      copies_wait<0>();
      fence_to_products();
      arrive(shared_address(&m.full));
    }
  }
}

// What both warpgroups that multiply do with their slabs from kFirst on, kStep at a time;
// `query.add(dz, keys)` sums d_query.
template <int kDim, int kFirst, int kSlabs, int kStep, class Query>
__device__ void multiply_slabs(Memory<kDim>& m, const BackwardItems& b, Query&& query_sums) {
  const std::uint32_t keys = shared_address(m.keys) + kFirst * kSlabBytes,
                      query = shared_address(m.query) + kFirst * kSlabBytes,
                      d_output = shared_address(m.d_output) + kFirst * kSlabBytes,
                      p = shared_address(m.p), dz = shared_address(m.dz);
  const bool leads = threadIdx.x % 32 == 0;  // a warp
  float d[kStep * 32] = {};
  unsigned parity = 0;
  for (std::int64_t i = blockIdx.x; i < b.items(); i += gridDim.x) {
    const Item item(b, i);
    load_item(m, b, item);
    query_sums.clear();
    for (int t = 0; t < item.tiles; ++t, parity ^= 1) {
      std::uint16_t* rows = b.partial + (i * b.padded + t * kTileSlots) * kDim;
      wait(shared_address(&m.full), parity);
      pin(d);
      products_begin();
      query_sums.add(dz, keys);
      products_commit();
#pragma unroll
      for (int s = 0; s < kSlabs; s += kStep) {
        if (s > 0) {
          pin(d);
          products_begin();
        }
        add_heads(d, dz, query + s * kSlabBytes, 0);
        if (kFirst + s < kValueSlabs) add_heads(d, p, d_output + s * kSlabBytes, 1);
        products_commit();
        if (s == 0) {
          products_wait_but<1>();
          if (leads) arrive(shared_address(&m.keys_empty));
        }
        products_wait();
        pin(d);
        if (s + kStep >= kSlabs && leads) arrive(shared_address(&m.weights_empty));
        store_partial<kDim>(d, rows, kFirst + s);
      }
    }
    query_sums.store(b, item, 1 / b.power[i]);
  }
}

// Sums of d_query over channels from kFirst on, in one or two products.
template <int kFirst, int kSums>
struct QuerySums {
  float d[kSums];
  __device__ void clear() { set_to_zero(d); }
  __device__ void add(std::uint32_t dz, std::uint32_t keys) { add_slots(d, dz, keys); }
  __device__ void store(const BackwardItems& b, const Item& item, float down) {
    pin(d);
    store_query(d, b, item, kFirst, down);
  }
};
template <int kFirst, int kSums, int kRest>
struct TwoQuerySums {
  QuerySums<kFirst, kSums> one;
  QuerySums<kFirst + kSums / 32, kRest> two;
  __device__ void clear() {
    one.clear();
    two.clear();
  }
  __device__ void add(std::uint32_t dz, std::uint32_t keys) {
    one.add(dz, keys);
    two.add(dz, keys + kSums / 32 * kSlabBytes);
  }
  __device__ void store(const BackwardItems& b, const Item& item, float down) {
    one.store(b, item, down);
    two.store(b, item, down);
  }
};

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_kernel(const __grid_constant__ BackwardItems b) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& m = *reinterpret_cast<Memory<kDim>*>(bytes);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&m.full), 128);
    barrier_init(shared_address(&m.keys_empty), kGroups * 4);
    barrier_init(shared_address(&m.weights_empty), kGroups * 4);
    barriers_visible();
  }
  __syncthreads();
  const int group = uniform(threadIdx.x / 128);
  if (group == kGroups) {
    give_registers<88>();
    prepare(m, b);
  } else if (group == 0) {
    take_registers<192>();
    multiply_slabs<kDim, 0, kFirstSlabs, 1>(m, b, QuerySums<0, kFirstSlabs * 32>{});
  } else {
    take_registers<224>();
    constexpr int kRest = kDim / 64 - kFirstSlabs;  // 5 or 4
    multiply_slabs<kDim, kFirstSlabs, kRest, 1>(
        m, b, TwoQuerySums<kFirstSlabs, 96, (kRest - 3) * 32>{});
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
