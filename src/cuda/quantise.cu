// quantise on GPUs: a warp for each row; its lanes share out the groups, four channels a lane.
//
// Magnitudes compare as integers like the numbers they are, NaN above infinity. The exponent of a
// power-of-two scale comes from the bits of amax: amax = 2^E * f with f in [1, 2), 448 = 2^8 *
// 1.75, so ceil(log2(amax / 448)) is E - 8, plus 1 where f > 1.75. A group is read twice, out of
// the cache the second time. Bytes: 2 to 4 in, 1 out a channel: memory bounds it.
#include "winnow/quantise.h"

#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 8;  // of a block, a row each
constexpr int kChunk = 4;  // channels that a lane takes at a time

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

__global__ void __launch_bounds__(32 * kWarps) quantise_rows(Quantiser q) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= q.rows) return;
  const int lane = threadIdx.x % 32, member = lane % q.lanes, at_once = 32 / q.lanes;
  const std::int64_t from = q.in_rows.offset(row), to = q.data_rows.offset(row),
                     scale_to = q.scale_rows.offset(row);
  for (int first = 0; first < q.groups; first += at_once) {  // every lane takes every turn
    const int group = first + lane / q.lanes;
    const bool mine = group < q.groups;
    const int channel = group * q.size, end = mine ? channel + q.size : channel;
    std::int32_t most = __float_as_int(q.amax_floor);
    for (int d = channel + member * kChunk; d < end; d += q.lanes * kChunk) {
#pragma unroll
      for (int c = 0; c < kChunk; ++c) {
        if (d + c >= end) break;
        const std::int32_t bits =
            __float_as_int(load_float(q.input, q.in_type, from + d + c)) & 0x7fffffff;
        most = bits > most ? bits : most;
      }
    }
    for (int step = 1; step < q.lanes; step *= 2) {
      const std::int32_t other = __shfl_xor_sync(0xffffffffu, most, step);
      most = other > most ? other : most;
    }
    const Scale scale = scale_of(most, q.power_of_two);
    if (mine && member == 0) {
      if (q.bytes) {
        static_cast<E8M0*>(q.scale)[scale_to + group] = E8M0{scale.byte};
      } else {
        static_cast<float*>(q.scale)[scale_to + group] = scale.value;
      }
    }
    for (int d = channel + member * kChunk; d < end; d += q.lanes * kChunk) {
#pragma unroll
      for (int c = 0; c < kChunk; ++c) {
        if (d + c >= end) break;
        q.data[to + d + c] = encode(load_float(q.input, q.in_type, from + d + c), scale);
      }
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
                    static_cast<float>(a.amax_floor)};
  kQuantise.launch("quantise",
                   {.grid = dim3(static_cast<unsigned>(ceil_div(q.rows, kWarps))),
                    .block = dim3(32 * kWarps),
                    .stream = stream_of(workspace)},
                   q);
}

}  // namespace

extern const Implementation<QuantiseArgs> quantise_implementation;
const Implementation<QuantiseArgs> quantise_implementation = {"cuda.portable", refuse,
                                                              workspace_bytes, run};

}  // namespace winnow::cuda
