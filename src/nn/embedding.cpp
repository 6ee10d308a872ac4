#include "nn/embedding.h"

#include <algorithm>

#include "nn/rows.h"

namespace winnow::nn {
namespace {

// table [tokens of the vocabulary, width], y [rows, width], one token per row.
void check(const char* operation, const char* table_name, const Tensor& table,
           std::span<const std::int32_t> tokens, const char* y_name, const Tensor& y) {
  check_real(operation, table_name, table);
  WINNOW_CHECK(operation, table.rank == 2, "{} must be [vocabulary, width], got {}", table_name,
               shape_text(table));
  check_shape(operation, y_name, y, {std::ssize(tokens), table.shape[1]}, "[tokens, width]");
  check_dtypes(operation, y_name, y, table_name, table);
  check_unit_stride(operation, table_name, table);
  check_unit_stride(operation, y_name, y);
  for (const std::int32_t token : tokens) {
    WINNOW_CHECK(operation, token >= 0 && token < table.shape[0],
                 "tokens must be from 0 to {}, got {}", table.shape[0] - 1, token);
  }
}

constexpr std::int64_t kTaskColumns = 64;

}  // namespace

void embedding(const Tensor& table, std::span<const std::int32_t> tokens, const Tensor& y) {
  check("embedding", "table", table, tokens, "y", y);
  with_real(table.dtype, [&]<class T>(T) {
    for_rows(std::ssize(tokens), [&](std::int64_t i) {
      std::copy_n(row<T>(table, tokens[static_cast<std::size_t>(i)]), table.shape[1], row<T>(y, i));
    });
  });
}

void embedding_backward(std::span<const std::int32_t> tokens, const Tensor& d_y,
                        const Tensor& d_table) {
  check("embedding_backward", "d_table", d_table, tokens, "d_y", d_y);
  const std::int64_t width = d_table.shape[1];
  with_real(d_table.dtype, [&]<class T>(T) {
    // Tasks own columns: two rows with the same token then meet in one task, in order.
    parallel_for(ceil_div(width, kTaskColumns), [&](std::int64_t task, int) {
      const std::int64_t first = task * kTaskColumns, end = std::min(width, first + kTaskColumns);
      for (std::int64_t i = 0; i < std::ssize(tokens); ++i) {
        const T* from = row<T>(d_y, i);
        T* to = row<T>(d_table, tokens[static_cast<std::size_t>(i)]);
        for (std::int64_t j = first; j < end; ++j) to[j] += from[j];
      }
    });
  });
}

}  // namespace winnow::nn
