// output[j] = dim^-0.5 * sum_i (-1)^popcount(i & j) * input[i], term by term, in double.
#include <bit>
#include <cmath>

#include "base/numbers.h"
#include "base/row_offset.h"
#include "ref/implementations.h"

namespace winnow::ref {
namespace {

std::int64_t workspace_bytes(const HadamardArgs& a) {
  return last_extent(a.input) * static_cast<std::int64_t>(sizeof(double)) + 7;
}

void run(const HadamardArgs& a, Workspace workspace) {
  const std::int64_t dim = last_extent(a.input);
  auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  auto* x =
      reinterpret_cast<double*>((address + 7) / 8 * 8);  // a copy: the output may be the input
  const std::int64_t from = a.input.strides[a.input.rank - 1],
                     to = a.output.strides[a.input.rank - 1];
  for (std::int64_t row = 0; row < row_count(a.input); ++row) {
    for (std::int64_t i = 0; i < dim; ++i) {
      x[i] = load_double(a.input.data, a.input.dtype, row_offset(a.input, row) + i * from);
    }
    for (std::int64_t j = 0; j < dim; ++j) {
      double sum = 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        sum += std::popcount(static_cast<std::uint64_t>(i & j)) % 2 == 0 ? x[i] : -x[i];
      }
      store_double(a.output.data, a.output.dtype, row_offset(a.output, row) + j * to,
                   sum / std::sqrt(static_cast<double>(dim)));
    }
  }
}

}  // namespace

const Implementation<HadamardArgs> hadamard_implementation = {"reference", accept, workspace_bytes,
                                                              run};

}  // namespace winnow::ref
