// A layer with random weights and inputs, for tests that call one by itself; what it computes stays in
// the fields.
#pragma once

#include "attention/layer.h"
#include "tests/tiny_models.h"

namespace winnow::attention {

struct LayerTrial {
  AttentionConfig config;
  DType dtype;
  ParameterList parameters;
  RopeTables ropes;
  Layer layer;
  Activations activations;
  Memory memory;
  Parameter x;  // [rows, hidden]
  std::vector<std::int32_t> positions;
  RowRanges ranges;

  LayerTrial(const AttentionConfig& c, std::int64_t rows, DType type)
      : config(c),
        dtype(type),
        ropes(c, type),
        layer(c, ropes, parameters, "", type),
        positions(static_cast<std::size_t>(rows)) {
    for (const auto& p : parameters.all()) model::fill_normal(*p, 0.5, 1);
    x.name = "x";
    x.value = Array(type, {rows, c.hidden_size});
    model::fill_normal(x, 1, 2);
  }
};

}  // namespace winnow::attention
