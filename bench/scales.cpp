#include "bench/scales.h"

#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"

namespace winnow::bench {
namespace {

// Around 2^-4: bytes from 119 to 126, and now and then one of the special ones.
void fill_scales(const Tensor& t, bool specials, Random& random) {
  if (t.data == nullptr) return;
  constexpr std::uint8_t kSpecial[] = {0, 127, 130, 255};
  for (std::int64_t i = 0; i < t.elements(); ++i) {
    E8M0 byte{static_cast<std::uint8_t>(119 + random.below(8))};
    const bool special = specials && random.below(20) == 0;
    if (special) byte.bits = kSpecial[random.below(4)];
    if (t.dtype == DType::kE8M0) {
      t.as<E8M0>()[i] = byte;
    } else {
      const double fraction = special ? 1 : 1 + random.uniform();
      t.as<float>()[i] = static_cast<float>(byte.bits == 0 ? 0 : to_double(byte) * fraction);
    }
  }
}

}  // namespace

DType data_dtype(const std::string& format) {
  for (const DType d : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3}) {
    if (format == dtype_name(d)) return d;
  }
  if (format == "mxfp8") return DType::kE4M3;
  fail(Status::kInvalidArgument, "problem",
       "dtype must be f64, f32, bf16, f16, e4m3 or mxfp8, got \"{}\"", format);
}

Scales::Scales(const std::string& format, const Tensor& query, const KeyView& keys, bool specials,
               Random& random) {
  if (data_dtype(format) != DType::kE4M3) return;
  std::vector<std::int64_t> shape(keys.data.shape.begin(),
                                  keys.data.shape.begin() + keys.key_axis());
  if (format == "mxfp8") {
    const std::int64_t groups = query.shape[2] / 32;
    query_ = Guarded(DType::kE8M0, {query.shape[0], query.shape[1], groups});
    fill_scales(query_, false, random);
    shape.push_back(groups);
  }
  key_ = Guarded(format == "mxfp8" ? DType::kE8M0 : DType::kF32, shape);
  fill_scales(key_, specials, random);
}

}  // namespace winnow::bench
