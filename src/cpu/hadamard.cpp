// hadamard on CPUs: sums and differences of pairs at distance 1, 2, 4, ..., then the scale.
//
// The first three distances lie inside a vector of eight; the others pair whole vectors. A row is
// worked on in a buffer, so the output may be the input. dim * log2(dim) additions against 4 to 8
// bytes of memory per channel: at 128 channels bound by loads and stores of the buffer in L1.
#include "winnow/hadamard.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "base/row_offset.h"
#include "cpu/narrow.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskRows = 64;

Refusal refuse(const HadamardArgs& a) {
  if (a.input.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.input) || !has_unit_stride(a.output)) {
    return "input and output must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t worker_bytes(const HadamardArgs& a) {
  Carve carve(nullptr);
  carve.take<float>(last_extent(a.input));
  return carve.used();
}

std::int64_t workspace_bytes(const HadamardArgs& a) { return worker_bytes(a) * num_threads() + 63; }

// Lane j becomes x[j] + x[j + half], or x[j - half] - x[j] where j has the bit `half`.
template <int half>
WINNOW_INLINE F8 pairs_of_lanes(F8 x) {
  constexpr int kSign = INT32_MIN;
  if constexpr (half == 1) {
    const F8 other = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
    return other + bits_as_float(bits_as_int(x) ^ I8{0, kSign, 0, kSign, 0, kSign, 0, kSign});
  } else if constexpr (half == 2) {
    const F8 other = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    return other + bits_as_float(bits_as_int(x) ^ I8{0, 0, kSign, kSign, 0, 0, kSign, kSign});
  } else {
    const F8 other = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    return other + bits_as_float(bits_as_int(x) ^ I8{0, 0, 0, 0, kSign, kSign, kSign, kSign});
  }
}

// Distances `half` and up between elements of the buffer, for half >= 8 in vectors.
WINNOW_INLINE void pairs_of_vectors(float* x, std::int64_t dim) {
  for (std::int64_t half = 8; half < dim; half *= 2) {
    for (std::int64_t block = 0; block < dim; block += 2 * half) {
      for (std::int64_t j = block; j < block + half; j += 8) {
        const F8 a = load(x + j), b = load(x + j + half);
        store(x + j, a + b);
        store(x + j + half, a - b);
      }
    }
  }
}

template <class In, class Out>
void rotate(const In* input, std::int64_t dim, float scale, float* x, Out* output) {
  if (dim < 8) {
    for (std::int64_t j = 0; j < dim; ++j) x[j] = to_float(input[j]);
    for (std::int64_t half = 1; half < dim; half *= 2) {
      for (std::int64_t j = 0; j < dim; ++j) {
        if ((j & half) != 0) continue;
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
    }
    for (std::int64_t j = 0; j < dim; ++j) output[j] = from_double<Out>(x[j] * scale);
    return;
  }
  for (std::int64_t j = 0; j < dim; j += 8) {
    store(x + j, pairs_of_lanes<4>(pairs_of_lanes<2>(pairs_of_lanes<1>(load(input + j)))));
  }
  pairs_of_vectors(x, dim);
  for (std::int64_t j = 0; j < dim; j += 8) store_as(output + j, load(x + j) * splat(scale));
}

void run(const HadamardArgs& a, Workspace workspace) {
  const std::int64_t rows = row_count(a.input), dim = last_extent(a.input);
  const std::int64_t own_bytes = worker_bytes(a);
  const auto scale = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(dim)));
  Carve carve(workspace.data);
  auto* buffers = carve.take<unsigned char>(own_bytes * num_threads());
  parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int worker) {
    auto* x = reinterpret_cast<float*>(buffers + worker * own_bytes);
    for (std::int64_t i = task * kTaskRows; i < min64(rows, (task + 1) * kTaskRows); ++i) {
      with_element(a.input.dtype, [&]<class In>(const In*) {
        with_element(a.output.dtype, [&]<class Out>(const Out*) {
          rotate(a.input.as<In>() + row_offset(a.input, i), dim, scale, x,
                 a.output.as<Out>() + row_offset(a.output, i));
        });
      });
    }
  });
}

}  // namespace

extern const Implementation<HadamardArgs> hadamard_implementation;
const Implementation<HadamardArgs> hadamard_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                              workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
