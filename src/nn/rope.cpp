#include "nn/rope.h"

#include <cmath>

#include "nn/rows.h"

namespace winnow::nn {

RopeTable::RopeTable(std::int64_t positions, std::int64_t dim, double theta, DType dtype) {
  WINNOW_CHECK("rope", positions >= 0, "positions must be at least 0, got {}", positions);
  WINNOW_CHECK("rope", dim >= 0 && dim % 2 == 0, "dim must be even, got {}", dim);
  WINNOW_CHECK("rope", theta > 0, "theta must be positive, got {}", theta);
  WINNOW_CHECK("rope", dtype == DType::kF32 || dtype == DType::kF64,
               "the table must be f32 or f64, got {}", dtype_name(dtype));
  const std::int64_t pairs = dim / 2;
  cosine = Array(dtype, {positions, pairs});
  sine = Array(dtype, {positions, pairs});
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const double frequency =
        std::pow(theta, -2 * static_cast<double>(pair) / static_cast<double>(dim));
    for (std::int64_t p = 0; p < positions; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      store_double(cosine.view().data, dtype, p * pairs + pair, std::cos(angle));
      store_double(sine.view().data, dtype, p * pairs + pair, std::sin(angle));
    }
  }
}

namespace {

// One head. `next` from a channel to its partner, `step` from a pair to the next.
template <class T>
void rotate(T* x, std::int64_t pairs, std::int64_t step, std::int64_t next, const T* cosine,
            const T* sine, T sign) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    const T a = x[i * step], b = x[i * step + next], c = cosine[i], s = sign * sine[i];
    x[i * step] = a * c - b * s;
    x[i * step + next] = b * c + a * s;
  }
}

}  // namespace

void rope(const Tensor& x, std::span<const std::int32_t> positions, const RopeTable& table,
          RopePairing pairing, bool inverse) {
  constexpr char kName[] = "rope";
  WINNOW_CHECK(kName, x.rank == 3, "x must be [rows, heads, dim], got {}", shape_text(x));
  const std::int64_t rows = x.shape[0], heads = x.shape[1], dim = x.shape[2], pairs = dim / 2;
  WINNOW_CHECK(kName, dim % 2 == 0, "dim must be even, got {}", dim);
  WINNOW_CHECK(kName, std::ssize(positions) == rows, "positions must be [rows = {}], got [{}]",
               rows, positions.size());
  if (dim == 0) return;
  check_real(kName, "x", x);
  check_unit_stride(kName, "x", x);
  const Tensor& cosine = table.cosine;
  check_dtypes(kName, "the table", cosine, "x", x);
  WINNOW_CHECK(kName, cosine.rank == 2 && cosine.shape[1] == pairs,
               "the table must be [positions, dim / 2 = {}], got {}", pairs, shape_text(cosine));
  for (const std::int32_t p : positions) {
    WINNOW_CHECK(kName, p >= 0 && p < cosine.shape[0], "positions must be from 0 to {}, got {}",
                 cosine.shape[0] - 1, p);
  }
  const bool interleaved = pairing == RopePairing::kInterleaved;
  const std::int64_t step = interleaved ? 2 : 1, next = interleaved ? 1 : pairs;
  with_real(x.dtype, [&]<class T>(T) {
    for_rows(rows, [&](std::int64_t i) {
      const std::int64_t at = positions[static_cast<std::size_t>(i)] * pairs;
      for (std::int64_t h = 0; h < heads; ++h) {
        rotate(x.as<T>() + i * x.strides[0] + h * x.strides[1], pairs, step, next,
               table.cosine.as<T>() + at, table.sine.as<T>() + at, T(inverse ? -1 : 1));
      }
    });
  });
}

}  // namespace winnow::nn
