// From the hidden state to the query, key and value of the attention, and from its output back:
// where MLA and GQA differ. Everything between the two ends is in layer.cpp.
#pragma once

#include <memory>
#include <string>

#include "attention/pass.h"
#include "base/parameters.h"

namespace winnow::attention {

class Projection {
 public:
  virtual ~Projection() = default;

  // x [rows, hidden]: computes the query and writes the rows' keys (and values) into the cache.
  virtual void forward(const Tensor& x, const Rows& rows, KeyCache& cache) = 0;
  // [rows, heads, dim_qk], of the last forward.
  const Tensor& query() const { return query_; }
  // What the indexer's queries come from: the normed query latent, or x where there is none.
  virtual Tensor indexer_input(const Tensor& x) const = 0;
  // attended [rows, heads, dim_v] -> output [rows, hidden].
  virtual void output(const Tensor& attended, const Tensor& output) = 0;

  // Both add to the gradients of the parameters. d_x is overwritten; the gradients that come in may
  // be used as scratch.
  virtual void output_backward(const Tensor& attended, const Tensor& d_output,
                               const Tensor& d_attended, Memory& memory) = 0;
  virtual void backward(const Tensor& x, const Rows& rows, const Tensor& d_query,
                        const Tensor& d_key, const Tensor& d_value, const Tensor& d_x,
                        Memory& memory) = 0;

 protected:
  Buffer query_;
};

// Adds the parameters under `prefix` ("model.layers.0.self_attn.").
std::unique_ptr<Projection> make_mla(const AttentionConfig& config, const nn::RopeTable& rope,
                                     ParameterList& parameters, const std::string& prefix,
                                     DType dtype);
std::unique_ptr<Projection> make_gqa(const AttentionConfig& config, const nn::RopeTable& rope,
                                     ParameterList& parameters, const std::string& prefix,
                                     DType dtype);

}  // namespace winnow::attention
