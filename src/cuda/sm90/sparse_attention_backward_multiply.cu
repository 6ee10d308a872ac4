// The main kernel of sparse_attention_backward on compute capability 9.0: of every item (a row and 64 of
// its heads) the gradient of its queries, and for every slot the partial row
//   2^k (sum_h dz[h] query[h, :] + sum_h p[h] d_output[h, :])   in f16,
// from p, dp, delta and 2^k of the first kernel.
//
// Tiles: 64 heads x 64 slots x half of the channels, 4 or 5 slabs of 64: the halves of an item are
// units of their own, so that everything that comes from memory is there a tile ahead. dz = scale p
// (dp - delta); p and dz, times 2^k, as bf16 to shared memory; then d_query += dz keys in registers
// over all tiles, and the partial rows of the tile from registers to memory.
// Roles: two warpgroups multiply, each 2 or 3 slabs: while the partial rows of a tile are stored,
// d_query of the next is multiplied. One warpgroup prepares tiles: gathers keys, reads p and dp a
// tile ahead, and rounds them.
// Shared memory: query 40 KiB, d_output 32, keys 2 x 40, p and dz 2 x 16. One block per SM,
// persistent; an SM takes first and second halves in turn.
// Order: sums over slots and heads ascend, 16 at a time in the matrix units' order; in a partial row the
// part of dz before that of p.
//
// Floor (H200, 4096 items x 2048 slots, 576/512): 1.79 TFLOP, 2.3 ms at 790 TFLOP/s; 9.7 GB of partial
// rows and 4.3 GB of p and dp, 3.2 ms.
#include "cuda/sm90/sparse_attention_backward.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr int kThreads = 384, kMultiplying = 256, kStages = 2;
constexpr int kHalfSlabs = 4;  // of the first half
constexpr int kItem = 1;       // a barrier
constexpr int kRegisters[] = {160, 224, 120};  // of a thread of each warpgroup
// setmaxnreg waits forever for registers that the block was not launched with.
static_assert(kRegisters[0] + kRegisters[1] + kRegisters[2] <= 3 * (65536 / kThreads / 8 * 8));

template <int kDim>
struct Memory {
  static constexpr int kSlabs = kDim / 64 - kHalfSlabs;  // of the larger half
  unsigned char query[kSlabs * kSlabBytes];              // [slab][head]
  unsigned char d_output[kHalfSlabs * kSlabBytes];       // the same
  unsigned char keys[kStages][kSlabs * kSlabBytes];      // [slab][slot]
  unsigned char p[kStages][kSlabBytes], dz[kStages][kSlabBytes];  // [head][slot]
  std::uint64_t full[kStages], keys_empty[kStages], weights_empty[kStages];
};

// Half an item: units in the order in which blocks take them, grids being even.
struct Unit {
  std::int64_t item;
  int half;
  __device__ explicit Unit(std::int64_t number)
      : item(number / 2), half(static_cast<int>((number + number / gridDim.x) % 2)) {}
};

// Of the tiles that a block goes through, the n-th.
struct Stage {
  int index;
  std::uint32_t parity;
  __device__ explicit Stage(unsigned n) : index(n % kStages), parity(n / kStages & 1) {}
};

// kSlabs slabs of 64 heads, zeros of those that do not exist, by all threads that multiply.
template <int kSlabs, class T>
__device__ void load_heads(unsigned char* to, const T* rows, std::int64_t head_stride, int heads,
                           bool vectors) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kBlockHeads * kSlabs * 8; i += kMultiplying) {
    const int head = i / (kSlabs * 8), unit = i % (kSlabs * 8);
    const bool exists = head < heads;
    const T* from = rows + (exists ? head : 0) * head_stride + unit * 8;
    unsigned char* at = to + unit / 8 * kSlabBytes + swizzled(head, unit % 8);
    if (std::is_same_v<T, BF16> && vectors) {
      copy_async(at, from, exists ? 16 : 0);
    } else {
      *reinterpret_cast<uint4*>(at) = exists ? load_eight(from, vectors) : uint4{};
    }
  }
}

template <int kSlabs, int kDim>
__device__ void load_unit(Memory<kDim>& m, const BackwardItems& b, const Item& item, int channel) {
  constexpr int kValues = kSlabs < kHalfSlabs ? kSlabs : kHalfSlabs;
  meet<kMultiplying>(kItem);  // nobody multiplies the last one any more
  load_heads<kSlabs>(m.query,
                     b.query + item.row * b.query_row + item.first_head * b.query_head + channel,
                     b.query_head, item.heads, b.vectors);
  const std::int64_t at =
      item.row * b.output_row + item.first_head * b.output_head + channel;
  if (b.wide) {
    load_heads<kValues>(m.d_output, static_cast<const float*>(b.d_output) + at, b.output_head,
                        item.heads, b.vectors);
  } else {
    load_heads<kValues>(m.d_output, static_cast<const BF16*>(b.d_output) + at, b.output_head,
                        item.heads, b.vectors);
  }
  copies_commit();
  copies_wait<0>();
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
  // On the way then, until they are written.
  __device__ void read(const BackwardItems& b, std::int64_t item, int tile) {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const std::int64_t at = b.weights_at(item, tile, q, threadIdx.x % 128);
      p_[q] = *reinterpret_cast<const float4*>(b.p + at);
      dp_[q] = *reinterpret_cast<const float4*>(b.dp + at);
    }
  }
  __device__ void write(unsigned char* p, unsigned char* dz) const {
    const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const std::uint32_t at = swizzled(head, q) + 4 * c;  // that of the other head is 1024 further
      put(p + at, p_[q].x * power_, p_[q].y * power_);
      put(p + at + 1024, p_[q].z * power_, p_[q].w * power_);
      put(dz + at, this->dz(p_[q].x, dp_[q].x, 0), this->dz(p_[q].y, dp_[q].y, 0));
      put(dz + at + 1024, this->dz(p_[q].z, dp_[q].z, 1), this->dz(p_[q].w, dp_[q].w, 1));
    }
  }

 private:
  __device__ static void put(unsigned char* to, float a, float b) {
    *reinterpret_cast<std::uint32_t*>(to) = pack<BF16>(a, b);
  }
  __device__ float dz(float p, float dp, int half) const {
    return signbit(p) ? 0 : scale_ * (p * (dp - delta_[half]));
  }

  float power_, scale_, delta_[2];
  float4 p_[8], dp_[8];
};

template <int kSlabs, int kDim>
__device__ void gather(Memory<kDim>& m, const BackwardItems& b, const TilePlaces& places,
                       Stage stage) {
  wait(shared_address(&m.keys_empty[stage.index]), stage.parity ^ 1);
  places.copy<kSlabs>(m.keys[stage.index], nullptr, b.vectors);
  copies_commit();
}

template <int kDim>
__device__ void prepare(Memory<kDim>& m, const BackwardItems& b) {
  unsigned n = 0;
  for (std::int64_t u = blockIdx.x; u < 2 * b.items(); u += gridDim.x) {
    const Unit unit(u);
    const Item item(b, unit.item);
    if (item.tiles == 0) continue;
    const RowSlots slots = b.slots[item.row];
    const int channel = unit.half * kHalfSlabs * 64;
    Weights weights(b, unit.item);
    weights.read(b, unit.item, 0);
    TilePlaces places(b, slots, item.count, 0, channel);
    for (int t = 0; t < item.tiles; ++t, ++n) {
      const Stage stage(n);
      unit.half == 0 ? gather<kHalfSlabs>(m, b, places, stage)
                     : gather<Memory<kDim>::kSlabs>(m, b, places, stage);
      wait(shared_address(&m.weights_empty[stage.index]), stage.parity ^ 1);
      weights.write(m.p[stage.index], m.dz[stage.index]);
      if (t + 1 < item.tiles) {
        weights.read(b, unit.item, t + 1);
        places = TilePlaces(b, slots, item.count, t + 1, channel);
      }
      copies_wait<0>();
      fence_to_products();
      arrive(shared_address(&m.full[stage.index]));
    }
  }
}

// What a warpgroup does with kSlabs slabs of a unit from kLocal on, the `slab`-th of all; kValues of
// them belong to the value, too.
template <int kDim, int kLocal, int kSlabs, int kValues>
__device__ void multiply_unit(Memory<kDim>& m, const BackwardItems& b, std::int64_t index,
                              const Item& item, int slab, unsigned& n) {
  constexpr int kAt = kLocal * kSlabBytes;
  const bool leads = threadIdx.x % 32 == 0;  // a warp
  float dq[kSlabs * 32], d[kSlabs * 32] = {};
  set_to_zero(dq);
  auto add_query = [&](int stage) {
    pin(dq);
    products_begin();
    add_slots(dq, shared_address(m.dz[stage]), shared_address(m.keys[stage]) + kAt);
    products_commit();
  };
  auto done_with = [&](std::uint64_t& barrier) {
    if (leads) arrive(shared_address(&barrier));
  };
  if (item.tiles > 0) {
    const Stage stage(n);
    wait(shared_address(&m.full[stage.index]), stage.parity);
    add_query(stage.index);
    products_wait();
    pin(dq);
    done_with(m.keys_empty[stage.index]);
  }
  for (int t = 0; t < item.tiles; ++t, ++n) {
    const Stage stage(n), next(n + 1);
    const bool more = t + 1 < item.tiles;
    pin(d);
    products_begin();
    add_heads(d, shared_address(m.dz[stage.index]), shared_address(m.query) + kAt, 0);
    add_heads(reinterpret_cast<float(&)[kValues * 32]>(d), shared_address(m.p[stage.index]),
              shared_address(m.d_output) + kAt, 1);
    products_commit();
    if (more) {
      wait(shared_address(&m.full[next.index]), next.parity);
      add_query(next.index);
      products_wait_but<1>();
    } else {
      products_wait();
    }
    pin(d);
    done_with(m.weights_empty[stage.index]);
    store_partial<kDim>(d, b.partial + (index * b.padded + t * kTileSlots) * kDim, slab);
    __syncwarp();  // or ptxas would let the stores wait, too
    products_wait();
    pin(dq);
    if (more) done_with(m.keys_empty[next.index]);
  }
  store_query(dq, b, item, slab, 1 / b.power[index]);
}

// Group 0 has the first two slabs of a half, group 1 the others.
template <int kDim, int kGroup>
__device__ void multiply_units(Memory<kDim>& m, const BackwardItems& b) {
  constexpr int kLocal = 2 * kGroup, kMost = Memory<kDim>::kSlabs;
  unsigned n = 0;
  for (std::int64_t u = blockIdx.x; u < 2 * b.items(); u += gridDim.x) {
    const Unit unit(u);
    const Item item(b, unit.item);
    if (unit.half == 0) {
      load_unit<kHalfSlabs>(m, b, item, 0);
      multiply_unit<kDim, kLocal, 2, 2>(m, b, unit.item, item, kLocal, n);
    } else {
      load_unit<kMost>(m, b, item, kHalfSlabs * 64);
      multiply_unit<kDim, kLocal, kGroup == 0 ? 2 : kMost - 2, 2>(m, b, unit.item, item,
                                                                  kHalfSlabs + kLocal, n);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_kernel(const __grid_constant__ BackwardItems b) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& m = *reinterpret_cast<Memory<kDim>*>(bytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&m.full[s]), 128);
      barrier_init(shared_address(&m.keys_empty[s]), kMultiplying / 32);
      barrier_init(shared_address(&m.weights_empty[s]), kMultiplying / 32);
    }
    barriers_visible();
  }
  __syncthreads();
  const int group = uniform(threadIdx.x / 128);
  if (group == 2) {
    give_registers<kRegisters[2]>();
    prepare(m, b);
  } else if (group == 0) {
    give_registers<kRegisters[0]>();
    multiply_units<kDim, 0>(m, b);
  } else {
    take_registers<kRegisters[1]>();
    multiply_units<kDim, 1>(m, b);
  }
}

template <int kDim>
const Kernel kMultiply{multiply_kernel<kDim>, sizeof(Memory<kDim>)};

template <int kDim>
void launch(const char* operation, const BackwardItems& b, cudaStream_t stream) {
  const std::int64_t most = processors() > 1 ? processors() / 2 * 2 : 2;
  const std::int64_t blocks = 2 * b.items() < most ? 2 * b.items() : most;
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
