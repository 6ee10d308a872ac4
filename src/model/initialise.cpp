#include "model/initialise.h"

#include <cmath>

#include "base/hash.h"
#include "base/numbers.h"

namespace winnow::model {
namespace {

// SplitMix64's finaliser: every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t hash(const std::string& text) {
  std::uint64_t h = kHashBegin;
  for (const char c : text) h = hash_with(h, static_cast<unsigned char>(c));
  return h;
}

}  // namespace

std::uint64_t random_bits(std::uint64_t seed, std::uint64_t counter) {
  return mix(mix(seed + 0x9e3779b97f4a7c15u) + (counter + 1) * 0x9e3779b97f4a7c15u);
}

void fill_normal(Parameter& parameter, double deviation, std::uint64_t seed) {
  const Tensor& t = parameter.value;
  const std::uint64_t stream = mix(seed) ^ hash(parameter.name);
  for (std::int64_t i = 0; i < t.elements(); ++i) {
    std::int64_t sum = 0;  // of twelve 32-bit integers: variance 2^64
    for (std::uint64_t part = 0; part < 6; ++part) {
      const std::uint64_t bits = random_bits(stream, 6 * static_cast<std::uint64_t>(i) + part);
      sum += static_cast<std::int64_t>((bits >> 32) + (bits & 0xffffffffu));
    }
    sum -= 6 * ((std::int64_t{1} << 32) - 1);
    store_double(t.data, t.dtype, i, std::ldexp(static_cast<double>(sum), -32) * deviation);
  }
}

void fill_constant(Parameter& parameter, double value) {
  const Tensor& t = parameter.value;
  for (std::int64_t i = 0; i < t.elements(); ++i) store_double(t.data, t.dtype, i, value);
}

}  // namespace winnow::model
