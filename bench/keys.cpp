#include "bench/keys.h"

#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/numbers.h"

namespace winnow::bench {

Keys::Keys(DType dtype, std::int64_t rows, std::int64_t keys,
           std::initializer_list<std::int64_t> extents, std::int64_t page, Random& random) {
  if (page == 0) {
    std::vector<std::int64_t> shape = {keys};
    shape.insert(shape.end(), extents);
    data_ = Guarded(dtype, shape);
    fill_gauss(data_, random);
    return;
  }
  constexpr std::int64_t kRequests = 3, kSpare = 2;
  const std::int64_t columns = (keys + page - 1) / page, pages = kRequests * columns + kSpare;
  std::vector<std::int64_t> shape = {pages, page};
  shape.insert(shape.end(), extents);
  data_ = Guarded(dtype, shape);
  table_ = Guarded(DType::kI32, {kRequests, columns});
  request_ = Guarded(DType::kI32, {rows});
  if (ShapesOnly::on()) return;
  fill_gauss(data_, random);

  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  const std::int64_t page_elements = data_.view().strides[0];
  auto forget = [&](std::int32_t id) {
    for (std::int64_t e = id * page_elements; e < (id + 1) * page_elements; ++e)
      store_double(data_.view().data, dtype, e, std::numeric_limits<double>::quiet_NaN());
  };
  const auto none = static_cast<std::int32_t>(pages);
  for (std::int64_t n = 0; n < kRequests * columns; ++n) {
    std::int32_t& entry = table_.view().as<std::int32_t>()[n];
    entry = order[static_cast<std::size_t>(n)];
    if (n / columns != 1 || n % 5 != 4) continue;
    forget(entry);
    entry = n % 2 == 0 ? -1 : none;
  }
  for (std::int64_t n = pages - kSpare; n < pages; ++n) forget(order[static_cast<std::size_t>(n)]);
  for (std::int64_t i = 0; i < rows; ++i)
    request_.view().as<std::int32_t>()[i] = i % 17 == 16 ? 3 : static_cast<std::int32_t>(i / 3 % 3);
}

}  // namespace winnow::bench
