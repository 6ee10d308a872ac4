// Token embedding: rows of a table.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/tensor.h"

namespace winnow::nn {

// y[i, :] = table[tokens[i], :]. A token outside the table is an error.
void embedding(const Tensor& table, std::span<const std::int32_t> tokens, const Tensor& y);
// d_table[tokens[i], :] += d_y[i, :], in ascending order of i for each token.
void embedding_backward(std::span<const std::int32_t> tokens, const Tensor& d_y,
                        const Tensor& d_table);

}  // namespace winnow::nn
