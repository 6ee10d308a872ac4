// quantise on GPUs: a group takes a few lanes, eight channels each; up to 256 channels stay in
// registers between the two steps, longer groups are read twice.
//
// Magnitudes compare as integers like the numbers they are, NaN above infinity. The exponent of a
// power-of-two scale comes from the bits of amax: amax = 2^E * f with f in [1, 2), 448 = 2^8 *
// 1.75, so ceil(log2(amax / 448)) is E - 8, plus 1 where f > 1.75. Bytes: 2 to 4 in, 1 out a
// channel: memory bounds it.
#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "winnow/quantise.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // channels that a lane takes at a time

struct Quantiser {
  const void* input;
  E4M3* data;
  void* scale;
  DType in_type;
  bool bytes;  // e8m0 scales
  bool power_of_two;
  Rows in_rows, data_rows, scale_rows;
  std::int64_t rows;
  int groups, size;  // channels of a group
  int lanes;         // of a group: a power of two
  int block_rows;    // rows of a block
  float amax_floor;
};

struct Scale {
  float value;
  float inverse;  // of a power of two, or 0 for none
  std::uint8_t byte;
};

__device__ Scale scale_of(std::int32_t amax_bits, bool power_of_two) {
  if (amax_bits >= 0x7f800000) return {__int_as_float(0x7fc00000), 0, 0xff};
  if (!power_of_two) return {__fdiv_rn(__int_as_float(amax_bits), kLargestE4M3), 0, 0};
  const int exponent = (amax_bits >> 23) - 8 + ((amax_bits & 0x7fffff) > 0x600000 ? 1 : 0);
  const int byte = exponent > 0 ? exponent : 0;
  const E8M0 scale{static_cast<std::uint8_t>(byte)};
  return {to_float(scale), __int_as_float((254 - byte) << 23), scale.bits};
}

__device__ E4M3 encode(float x, const Scale& scale) {
  if (scale.byte == 0xff) return E4M3{0x7f};
  // Neither an inverse nor a scale: x * 0 keeps the sign.
  const bool divide = scale.inverse == 0 && scale.value > 0;
  return to_e4m3(divide ? __fdiv_rn(x, scale.value) : __fmul_rn(x, scale.inverse));
}

// The largest magnitude of a group, as bits; `x` holds the lane's last channels.
__device__ std::int32_t largest(const Quantiser& q, std::int64_t from, int member, bool mine,
                                float (&x)[kChunk]) {
  std::int32_t most = __float_as_int(q.amax_floor);
  for (int d = member * kChunk; mine && d < q.size; d += q.lanes * kChunk) {
    load_floats(q.input, q.in_type, from + d, q.size - d, x);
#pragma unroll
    for (int c = 0; c < kChunk; ++c) {
      const std::int32_t bits = __float_as_int(x[c]) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
  }
  for (int step = 1; step < q.lanes; step *= 2) {
    const std::int32_t other = __shfl_xor_sync(0xffffffffu, most, step);
    most = other > most ? other : most;
  }
  return most;
}

__device__ void store_codes(E4M3* out, int limit, const float (&x)[kChunk], const Scale& scale) {
  std::uint32_t words[2] = {};
#pragma unroll
  for (int c = 0; c < kChunk; ++c)
    words[c / 4] |= std::uint32_t{encode(x[c], scale).bits} << (c % 4 * 8);
  if (limit >= kChunk && reinterpret_cast<std::uintptr_t>(out) % 8 == 0) {
    *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    return;
  }
#pragma unroll
  for (int c = 0; c < kChunk; ++c)
    if (c < limit) out[c] = E4M3{static_cast<std::uint8_t>(words[c / 4] >> (c % 4 * 8))};
}

__global__ void __launch_bounds__(kThreads) quantise_rows(Quantiser q) {
  const int member = threadIdx.x % q.lanes, unit = threadIdx.x / q.lanes;
  const int units = kThreads / q.lanes;                       // groups at a time
  for (int n = 0; n < q.block_rows * q.groups; n += units) {  // every lane takes every turn
    const int at = n + unit, group = at % q.groups;
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * q.block_rows + at / q.groups;
    const bool mine = at < q.block_rows * q.groups && row < q.rows;
    const std::int64_t channel = static_cast<std::int64_t>(group) * q.size;
    const std::int64_t from = mine ? q.in_rows.offset(row) + channel : 0;
    float x[kChunk] = {};
    const Scale scale = scale_of(largest(q, from, member, mine, x), q.power_of_two);
    if (!mine) continue;
    E4M3* out = q.data + q.data_rows.offset(row) + channel;
    for (int d = member * kChunk; d < q.size; d += q.lanes * kChunk) {
      if (q.size > q.lanes * kChunk) load_floats(q.input, q.in_type, from + d, q.size - d, x);
      store_codes(out + d, q.size - d, x, scale);
    }
    if (member != 0) continue;
    const std::int64_t to = q.scale_rows.offset(row) + group;
    if (q.bytes) {
      static_cast<E8M0*>(q.scale)[to] = E8M0{scale.byte};
    } else {
      static_cast<float*>(q.scale)[to] = scale.value;
    }
  }
}

const Kernel kQuantise{quantise_rows};

Refusal refuse(const QuantiseArgs& a) {
  if (!has_unit_stride(a.input) || !has_unit_stride(a.data) || !has_unit_stride(a.scale)) {
    return "input, data and scale must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const QuantiseArgs&) { return 0; }

void run(const QuantiseArgs& a, Workspace workspace) {
  const auto groups = static_cast<int>(a.scale.shape[a.scale.rank - 1]);
  const int size = static_cast<int>(a.input.shape[a.input.rank - 1]) / groups;
  int lanes = 1;
  while (lanes < 32 && lanes * kChunk < size) lanes *= 2;
  const int block_rows = kThreads / lanes > groups ? kThreads / lanes / groups : 1;
  const Rows rows(a.input);
  const Quantiser q{a.input.data,
                    a.data.as<E4M3>(),
                    a.scale.data,
                    a.input.dtype,
                    a.scale.dtype == DType::kE8M0,
                    a.power_of_two,
                    rows,
                    Rows(a.data),
                    Rows(a.scale),
                    rows.count(),
                    groups,
                    size,
                    lanes,
                    block_rows,
                    static_cast<float>(a.amax_floor)};
  kQuantise.launch("quantise",
                   {.grid = dim3(static_cast<unsigned>(ceil_div(q.rows, block_rows))),
                    .block = dim3(kThreads),
                    .stream = stream_of(workspace)},
                   q);
}

}  // namespace

extern const Implementation<QuantiseArgs> quantise_implementation;
const Implementation<QuantiseArgs> quantise_implementation = {"cuda.portable", refuse,
                                                              workspace_bytes, run};

}  // namespace winnow::cuda
