// From the hidden state to the query, key and value of the attention, and from its output back:
// where MLA and GQA differ. Everything between the two ends is in layer.cpp.
#pragma once

#include <memory>
#include <string>

#include "attention/activations.h"
#include "base/parameters.h"

namespace winnow::attention {

class Projection {
 public:
  virtual ~Projection() = default;

  // x [rows, hidden]. What the query comes from.
  virtual void query_latent(const Tensor& x, const Kept& kept) const = 0;
  // kept.query.query [rows, heads, dim_qk], from the former.
  virtual void query(const Tensor& x, const Rows& rows, const Kept& kept) const = 0;
  // The rows' keys (and values), into the cache.
  virtual void keys(const Tensor& x, const Rows& rows, const Kept& kept) const = 0;
  // What the indexer's queries come from: the normed query latent, or x where there is none.
  virtual Tensor indexer_input(const Tensor& x, const Kept& kept) const = 0;
  // What the output comes from, of kept.core.attended [rows, heads, dim_v].
  virtual void heads(const Kept& kept) const = 0;
  // output [rows, hidden], from the former.
  virtual void output(const Kept& kept, const Tensor& output) const = 0;

  // All add to the gradients of the parameters; the gradients that come in may be used as scratch.
  virtual void output_backward(const Kept& kept, const Tensor& d_output, const Tensor& d_attended,
                               Memory& memory) const = 0;
  // Overwrites d_x.
  virtual void query_backward(const Tensor& x, const Rows& rows, const Kept& kept,
                              const Tensor& d_query, const Tensor& d_x, Memory& memory) const = 0;
  // Adds to d_x.
  virtual void keys_backward(const Tensor& x, const Rows& rows, const Kept& kept,
                             const Tensor& d_key, const Tensor& d_value, const Tensor& d_x,
                             Memory& memory) const = 0;
};

// Adds the parameters under `prefix` ("model.layers.0.self_attn.").
std::unique_ptr<Projection> make_mla(const AttentionConfig& config, const nn::RopeTable& rope,
                                     ParameterList& parameters, const std::string& prefix,
                                     DType dtype);
std::unique_ptr<Projection> make_gqa(const AttentionConfig& config, const nn::RopeTable& rope,
                                     ParameterList& parameters, const std::string& prefix,
                                     DType dtype);

}  // namespace winnow::attention
