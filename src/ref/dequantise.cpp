// output[.., d] = data[.., d] * scale[.., group of d], in double, rounded to f32.
#include "base/numbers.h"
#include "base/row_offset.h"
#include "ref/implementations.h"

namespace winnow::ref {
namespace {

void run(const DequantiseArgs& a, Workspace) {
  const std::int64_t dim = last_extent(a.data), size = dim / last_extent(a.scale);
  const int last = a.data.rank - 1;
  for (std::int64_t row = 0; row < row_count(a.data); ++row) {
    for (std::int64_t d = 0; d < dim; ++d) {
      const double data = load_double(a.data.data, a.data.dtype,
                                      row_offset(a.data, row) + d * a.data.strides[last]);
      const double scale = load_double(a.scale.data, a.scale.dtype,
                                       row_offset(a.scale, row) + d / size * a.scale.strides[last]);
      store_double(a.output.data, a.output.dtype,
                   row_offset(a.output, row) + d * a.output.strides[last], data * scale);
    }
  }
}

}  // namespace

const Implementation<DequantiseArgs> dequantise_implementation = {"reference", accept, no_workspace,
                                                                  run};

}  // namespace winnow::ref
