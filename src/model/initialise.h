// First weights, a function of the seed and the parameter's name: the same on every machine.
#pragma once

#include <cstdint>

#include "base/parameters.h"

namespace winnow::model {

// Close to N(0, deviation^2): each number is a sum of twelve uniform ones, so within six
// deviations. Made of integers and one product, hence free of the mathematics library of a machine.
void fill_normal(Parameter& parameter, double deviation, std::uint64_t seed);
void fill_constant(Parameter& parameter, double value);

// Bits number `counter` of the stream `seed`.
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t counter);

}  // namespace winnow::model
