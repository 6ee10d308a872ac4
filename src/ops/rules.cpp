#include "ops/rules.h"

#include <cmath>
#include <cstdlib>

namespace winnow::ops {
namespace {

// Two elements at one address would be written by two tasks at once: the stride of every axis must
// step over all that the axes of smaller strides reach.
void check_distinct(const char* operation, const char* name, const Tensor& output) {
  for (int axis = 0; axis < output.rank; ++axis) {
    if (output.shape[axis] <= 1) continue;
    const std::int64_t stride = std::abs(output.strides[axis]);
    std::int64_t reach = 0;
    for (int other = 0; other < output.rank; ++other) {
      const std::int64_t step = std::abs(output.strides[other]);
      if (step < stride || (step == stride && other < axis)) {
        reach += (output.shape[other] - 1) * step;
      }
    }
    WINNOW_CHECK(operation, stride > reach || output.elements() == 0,
                 "{} must not overlap itself, got stride {} on axis {}", name, output.strides[axis],
                 axis);
  }
}

// All tensors of a call lie where its first output does.
void check_device(const char* operation, const Named& first, std::span<const Named> tensors) {
  for (const Named& t : tensors) {
    WINNOW_CHECK(operation, t.tensor.empty() || t.tensor.device == first.tensor.device,
                 "{} must lie on {} as {}, got {}", t.name, device_text(first.tensor.device),
                 first.name, device_text(t.tensor.device));
  }
}

void check_not_null(const char* operation, std::span<const Named> tensors) {
  for (const Named& t : tensors) {
    WINNOW_CHECK(operation, t.tensor.data != nullptr || t.tensor.elements() == 0,
                 "{} must have data, got null", t.name);
  }
}

}  // namespace

void check_memory(const char* operation, std::span<const Named> inputs,
                  std::span<const Named> outputs) {
  check_device(operation, outputs[0], inputs);
  check_device(operation, outputs[0], outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [name, output] = outputs[i];
    check_distinct(operation, name, output);
    for (const Named& other : inputs)
      check_no_overlap(operation, name, output, other.name, other.tensor);
    for (const Named& other : outputs.first(i))
      check_no_overlap(operation, name, output, other.name, other.tensor);
  }
}

void check_data(const char* operation, std::span<const Named> inputs,
                std::span<const Named> outputs) {
  check_not_null(operation, inputs);
  check_not_null(operation, outputs);
}

void check_rows(const char* operation, const char* name, const Tensor& t) {
  constexpr char kLayout[] = "[.., dim]";
  switch (t.rank) {
    case 2: return check_shape(operation, name, t, {-1, -1}, kLayout);
    case 3: return check_shape(operation, name, t, {-1, -1, -1}, kLayout);
    case 4: return check_shape(operation, name, t, {-1, -1, -1, -1}, kLayout);
    default: return check_shape(operation, name, t, {-1}, kLayout);
  }
}

void check_same_shape(const char* operation, const char* name, const Tensor& t,
                      const char* like_name, const Tensor& like) {
  check_rows(operation, name, t);
  bool same = t.rank == like.rank;
  for (int axis = 0; same && axis < t.rank; ++axis) same = t.shape[axis] == like.shape[axis];
  WINNOW_CHECK(operation, same, "{} must have the shape of {}, {}, got {}", name, like_name,
               shape_text(like), shape_text(t));
}

void check_group_scale(const char* operation, const char* name, const Tensor& scale,
                       const char* data_name, const Tensor& data) {
  check_rows(operation, name, scale);
  check_dtype(operation, name, scale, {DType::kF32, DType::kE8M0});
  bool leading = scale.rank == data.rank;
  for (int axis = 0; leading && axis < data.rank - 1; ++axis) {
    leading = scale.shape[axis] == data.shape[axis];
  }
  WINNOW_CHECK(operation, leading, "{} must have the leading axes of {}, {}, got {}", name,
               data_name, shape_text(data), shape_text(scale));
  const std::int64_t dim = data.shape[data.rank - 1], groups = scale.shape[scale.rank - 1];
  WINNOW_CHECK(operation, groups >= 1 && dim >= 1 && dim % groups == 0,
               "the groups of {} must divide the {} channels of {}, got {}", name, dim, data_name,
               groups);
}

void check_ranges(const char* operation, const Tensor& starts, const Tensor& ends,
                  std::int64_t rows) {
  check_shape(operation, "starts", starts, {rows}, "[rows]");
  check_shape(operation, "ends", ends, {rows}, "[rows]");
  check_dtype(operation, "starts", starts, {DType::kI32});
  check_dtype(operation, "ends", ends, {DType::kI32});
}

void check_keys(const char* operation, const char* name, const KeyView& keys, DType dtype,
                std::initializer_list<std::int64_t> shape, const char* layout,
                std::initializer_list<std::int64_t> paged_shape, const char* paged_layout,
                std::int64_t rows) {
  check_shape(operation, name, keys.data, keys.paged() ? paged_shape : shape,
              keys.paged() ? paged_layout : layout);
  check_dtype(operation, name, keys.data, {dtype});
  if (!keys.paged()) {
    WINNOW_CHECK(operation, keys.row_request.empty(),
                 "row_request must be left out where block_table is, got {}",
                 shape_text(keys.row_request));
    return;
  }
  WINNOW_CHECK(operation, keys.page_size() >= 1, "a page must hold at least one key, got {}",
               shape_text(keys.data));
  check_tensor(operation, "block_table", keys.block_table, DType::kI32, {-1, -1},
               "[requests, max_pages]");
  check_tensor(operation, "row_request", keys.row_request, DType::kI32, {rows}, "[rows]");
}

namespace {

// What check_indexer and check_scorer have in common.
void check_indexer_shapes(const char* operation, const Tensor& index_query,
                          const KeyView& index_key, const Tensor& index_weights,
                          const Tensor& starts, const Tensor& ends) {
  check_shape(operation, "index_query", index_query, {-1, -1, -1},
              "[rows, index_heads, index_dim]");
  const std::int64_t rows = index_query.shape[0], heads = index_query.shape[1],
                     dim = index_query.shape[2];
  WINNOW_CHECK(operation, heads >= 1 && dim >= 1,
               "index_query needs at least one head and one channel, got {}",
               shape_text(index_query));
  check_keys(operation, "index_key", index_key, index_query.dtype, {-1, dim}, "[keys, index_dim]",
             {-1, -1, dim}, "[pages, page_size, index_dim]", rows);
  check_shape(operation, "index_weights", index_weights, {rows, heads}, "[rows, index_heads]");
  if (index_query.dtype == DType::kF64) {
    check_dtype(operation, "index_weights", index_weights, {DType::kF64});
  } else {
    check_dtype(operation, "index_weights", index_weights, {DType::kF32, DType::kBF16});
  }
  check_ranges(operation, starts, ends, rows);
}

}  // namespace

void check_indexer(const char* operation, const Tensor& index_query, const KeyView& index_key,
                   const Tensor& index_weights, const Tensor& starts, const Tensor& ends) {
  check_dtype(operation, "index_query", index_query,
              {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  check_indexer_shapes(operation, index_query, index_key, index_weights, starts, ends);
}

void check_scorer(const char* operation, const Tensor& index_query, const KeyView& index_key,
                  const Tensor& index_weights, const Tensor& starts, const Tensor& ends,
                  const ScorerScales& scales) {
  const auto& [query_scale, key_scale, dot_scale] = scales;
  check_dtype(operation, "index_query", index_query,
              {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3});
  check_indexer_shapes(operation, index_query, index_key, index_weights, starts, ends);
  WINNOW_CHECK(operation, std::isfinite(dot_scale) && dot_scale > 0,
               "dot_scale must be positive and finite, got {}", dot_scale);
  if (index_query.dtype != DType::kE4M3) {
    WINNOW_CHECK(
        operation, query_scale.empty() && key_scale.empty(),
        "index_query_scale and index_key_scale must be left out where index_query is {}, got "
        "{} and {}",
        dtype_name(index_query.dtype), shape_text(query_scale), shape_text(key_scale));
    return;
  }
  WINNOW_CHECK(operation, !key_scale.empty(),
               "index_query in e4m3 needs index_key_scale: f32 of each key (FP8), or e8m0 of 32 "
               "channels beside index_query_scale (MXFP8), got nothing");
  const std::int64_t dim = index_query.shape[2], groups = dim / 32;
  const auto& keys = index_key.data.shape;
  const char* name = "index_key_scale";
  if (query_scale.empty()) {
    if (index_key.paged()) {
      check_shape(operation, name, key_scale, {keys[0], keys[1]}, "[pages, page_size]");
    } else {
      check_shape(operation, name, key_scale, {keys[0]}, "[keys]");
    }
    check_dtype(operation, name, key_scale, {DType::kF32});
    return;
  }
  WINNOW_CHECK(operation, dim % 32 == 0, "MXFP8 needs index_dim to be a multiple of 32, got {}",
               dim);
  check_tensor(operation, "index_query_scale", query_scale, DType::kE8M0,
               {index_query.shape[0], index_query.shape[1], groups},
               "[rows, index_heads, index_dim / 32]");
  if (index_key.paged()) {
    check_shape(operation, name, key_scale, {keys[0], keys[1], groups},
                "[pages, page_size, index_dim / 32]");
  } else {
    check_shape(operation, name, key_scale, {keys[0], groups}, "[keys, index_dim / 32]");
  }
  check_dtype(operation, name, key_scale, {DType::kE8M0});
}

void check_gated_keys(const char* operation, const Tensor& index_key, const Tensor& gate,
                      const Tensor& ape, const char* layout) {
  check_shape(operation, "index_key", index_key, {-1, -1}, layout);
  check_dtype(operation, "index_key", index_key,
              {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  const std::int64_t keys = index_key.shape[0], dim = index_key.shape[1];
  WINNOW_CHECK(operation, dim >= 1, "index_key needs at least one channel, got {}",
               shape_text(index_key));
  check_tensor(operation, "gate", gate, index_key.dtype, {keys, dim}, layout);
  check_tensor(operation, "ape", ape, wide_dtype(index_key.dtype), {-1, dim},
               "[pool_size, index_dim]");
  WINNOW_CHECK(operation, ape.shape[0] >= 1, "pool_size must be at least 1, got {}", ape.shape[0]);
}

void check_attention(const char* operation, const Tensor& query, const KeyView& key,
                     const Tensor& starts, const Tensor& ends, double softmax_scale) {
  check_shape(operation, "query", query, {-1, -1, -1}, "[rows, heads, dim_qk]");
  check_dtype(operation, "query", query, {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  check_keys(operation, "key", key, query.dtype, {-1, -1, query.shape[2]},
             "[keys, kv_heads, dim_qk]", {-1, -1, -1, query.shape[2]},
             "[pages, page_size, kv_heads, dim_qk]", query.shape[0]);
  const std::int64_t heads = query.shape[1];
  const std::int64_t kv_heads = key.data.shape[static_cast<std::size_t>(key.key_axis())];
  WINNOW_CHECK(operation, heads >= 1 && query.shape[2] >= 1,
               "query needs at least one head and one channel, got {}", shape_text(query));
  WINNOW_CHECK(operation, kv_heads >= 1 && heads % kv_heads == 0,
               "heads must be a multiple of kv_heads, got {} and {}", heads, kv_heads);
  const double scale =
      query.dtype == DType::kF64 ? softmax_scale : static_cast<float>(softmax_scale);
  WINNOW_CHECK(operation, std::isfinite(scale) && scale > 0,
               "softmax_scale must be positive and finite, got {}{}", softmax_scale,
               scale == softmax_scale ? "" : fmt::format(" ({} as f32)", scale));
  check_ranges(operation, starts, ends, query.shape[0]);
}

void check_indices(const char* operation, const Tensor& topk_indices, std::int64_t rows) {
  check_shape(operation, "topk_indices", topk_indices, {rows, -1}, "[rows, topk]");
  check_dtype(operation, "topk_indices", topk_indices, {DType::kI32});
  WINNOW_CHECK(operation, topk_indices.shape[1] >= 1, "topk must be at least 1, got {}",
               topk_indices.shape[1]);
}

void check_slots(const char* operation, const Tensor& topk_indices, const Tensor& topk_lengths,
                 std::int64_t rows) {
  if (!topk_indices.empty()) check_indices(operation, topk_indices, rows);
  if (topk_lengths.empty()) return;
  WINNOW_CHECK(operation, !topk_indices.empty(),
               "topk_lengths must be left out where topk_indices is, got {}",
               shape_text(topk_lengths));
  check_shape(operation, "topk_lengths", topk_lengths, {rows}, "[rows]");
  check_dtype(operation, "topk_lengths", topk_lengths, {DType::kI32});
}

void check_value(const char* operation, const KeyView& view, const Tensor& value,
                 std::int64_t dim_v) {
  const Tensor& key = view.data;
  WINNOW_CHECK(operation, dim_v >= 1, "dim_v must be at least 1, got {}", dim_v);
  if (value.empty()) {
    const std::int64_t dim_qk = key.shape[static_cast<std::size_t>(key.rank - 1)];
    WINNOW_CHECK(operation, dim_v <= dim_qk,
                 "without a value, dim_v must be at most dim_qk, got {} and {}", dim_v, dim_qk);
    return;
  }
  if (view.paged()) {
    check_shape(operation, "value", value, {key.shape[0], key.shape[1], key.shape[2], dim_v},
                "[pages, page_size, kv_heads, dim_v]");
  } else {
    check_shape(operation, "value", value, {key.shape[0], key.shape[1], dim_v},
                "[keys, kv_heads, dim_v]");
  }
  check_dtype(operation, "value", value, {key.dtype});
}

void check_tensor(const char* operation, const char* name, const Tensor& t, DType dtype,
                  std::initializer_list<std::int64_t> shape, const char* layout) {
  check_shape(operation, name, t, shape, layout);
  check_dtype(operation, name, t, {dtype});
}

void check_selection(const char* operation, const Tensor& topk_indices, const Tensor& topk_lengths,
                     const Tensor& topk_scores, DType score_dtype, std::int64_t rows) {
  check_indices(operation, topk_indices, rows);
  check_tensor(operation, "topk_lengths", topk_lengths, DType::kI32, {rows}, "[rows]");
  if (topk_scores.empty()) return;
  check_tensor(operation, "topk_scores", topk_scores, score_dtype, {rows, topk_indices.shape[1]},
               "[rows, topk]");
}

void check_kept(const char* operation, std::int32_t keep_first, std::int32_t keep_last,
                std::int64_t topk) {
  WINNOW_CHECK(operation,
               keep_first >= 0 && keep_last >= 0 && std::int64_t{keep_first} + keep_last <= topk,
               "keep_first and keep_last must be from 0 to topk = {} together, got {} and {}", topk,
               keep_first, keep_last);
}

void check_indexer_gradients(const char* operation, const Tensor& index_query,
                             const Tensor& index_key, const Tensor& d_index_query,
                             const Tensor& d_index_key, const Tensor& d_index_weights) {
  const std::int64_t rows = index_query.shape[0], heads = index_query.shape[1];
  const DType wide = wide_dtype(index_query.dtype);
  check_tensor(operation, "d_index_query", d_index_query, wide, {rows, heads, index_query.shape[2]},
               "[rows, index_heads, index_dim]");
  check_tensor(operation, "d_index_key", d_index_key, wide,
               {index_key.shape[0], index_key.shape[1]}, "[keys, index_dim]");
  check_tensor(operation, "d_index_weights", d_index_weights, wide, {rows, heads},
               "[rows, index_heads]");
}

}  // namespace winnow::ops
