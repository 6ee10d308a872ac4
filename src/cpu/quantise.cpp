// quantise on CPUs: the largest magnitude of a group, as an integer, then the codes, eight at a
// time.
//
// Magnitudes compare as integers like the numbers they are, NaN above infinity. The exponent of a
// power-of-two scale comes from the bits of amax: amax = 2^E * f with f in [1, 2), and
// 448 = 2^8 * 1.75, so ceil(log2(amax / 448)) is E - 8, plus 1 where f > 1.75. Two passes over a
// group that is in L1; bound by about ten integer operations per eight channels.
#include "winnow/quantise.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "base/row_offset.h"
#include "cpu/narrow.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskRows = 64;

Refusal refuse(const QuantiseArgs& a) {
  if (!has_unit_stride(a.input) || !has_unit_stride(a.data) || !has_unit_stride(a.scale)) {
    return "input, data and scale must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const QuantiseArgs&) { return 0; }

// The largest magnitude of `size` numbers, as the bits of a float.
template <class T>
WINNOW_INLINE std::int32_t largest_bits(const T* x, std::int64_t size) {
  I8 most = splat(0);
  std::int64_t d = 0;
  for (; d + 8 <= size; d += 8) {
    const I8 m = magnitude_bits(load(x + d));
    most = select(m > most, m, most);
  }
  std::int32_t all = 0;
  for (int lane = 0; lane < 8; ++lane) all = most[lane] > all ? most[lane] : all;
  for (; d < size; ++d) {
    const float value = to_float(x[d]);
    std::int32_t m;
    __builtin_memcpy(&m, &value, sizeof m);
    m &= 0x7fffffff;
    all = m > all ? m : all;
  }
  return all;
}

WINNOW_INLINE float float_of_bits(std::int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

struct Scale {
  float value;
  float inverse;  // of a power of two, or 0 for none
  std::uint8_t byte;
};

WINNOW_INLINE Scale scale_of(std::int32_t amax_bits, bool power_of_two) {
  if (!power_of_two) return {float_of_bits(amax_bits) / kLargestE4M3, 0, 0};
  const int exponent = (amax_bits >> 23) - 8 + ((amax_bits & 0x7fffff) > 0x600000 ? 1 : 0);
  const int byte = exponent > 0 ? exponent : 0;
  const E8M0 scale{static_cast<std::uint8_t>(byte)};
  return {to_float(scale), float_of_bits((254 - byte) << 23), scale.bits};
}

template <class T>
void encode(const T* x, std::int64_t size, const Scale& scale, E4M3* out) {
  const bool divide = scale.inverse == 0 && scale.value > 0;
  const float by = divide ? scale.value : scale.inverse;  // neither: x * 0 keeps the sign
  std::int64_t d = 0;
  for (; d + 8 <= size; d += 8) {
    const F8 value = load(x + d);
    store_as(out + d, divide ? value / splat(by) : value * splat(by));
  }
  for (; d < size; ++d) {
    const float value = to_float(x[d]);
    out[d] = to_e4m3(divide ? value / by : value * by);
  }
}

template <class T>
void quantise_row(const QuantiseArgs& a, std::int64_t row) {
  const std::int64_t groups = last_extent(a.scale), size = last_extent(a.input) / groups;
  const T* x = a.input.as<T>() + row_offset(a.input, row);
  E4M3* out = a.data.as<E4M3>() + row_offset(a.data, row);
  const std::int64_t to = row_offset(a.scale, row);
  const auto floor = static_cast<float>(a.amax_floor);
  std::int32_t floor_bits;
  __builtin_memcpy(&floor_bits, &floor, sizeof floor_bits);
  for (std::int64_t g = 0; g < groups; ++g, x += size, out += size) {
    const std::int32_t most = largest_bits(x, size);
    Scale scale{__builtin_nanf(""), 0, 0xff};
    if (most >= 0x7f800000) {
      for (std::int64_t d = 0; d < size; ++d) out[d] = E4M3{0x7f};
    } else {
      scale = scale_of(most > floor_bits ? most : floor_bits, a.power_of_two);
      encode(x, size, scale, out);
    }
    if (a.scale.dtype == DType::kE8M0) {
      a.scale.as<E8M0>()[to + g] = E8M0{scale.byte};
    } else {
      a.scale.as<float>()[to + g] = scale.value;
    }
  }
}

void run(const QuantiseArgs& a, Workspace) {
  const std::int64_t rows = row_count(a.input);
  parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int) {
    with_element(a.input.dtype, [&]<class T>(const T*) {
      for (std::int64_t i = task * kTaskRows; i < min64(rows, (task + 1) * kTaskRows); ++i) {
        quantise_row<T>(a, i);
      }
    });
  });
}

}  // namespace

extern const Implementation<QuantiseArgs> quantise_implementation;
const Implementation<QuantiseArgs> quantise_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                              workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
