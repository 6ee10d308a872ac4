// Grouped-query attention: heads / kv_heads query heads share a key and a value head. RoPE rotates
// the last qk_rope_head_dim channels of query and key heads.
#include "attention/projection.h"
#include "attention/views.h"
#include "nn/matmul.h"

namespace winnow::attention {
namespace {

class Gqa final : public Projection {
 public:
  Gqa(const AttentionConfig& config, const nn::RopeTable& rope, ParameterList& parameters,
      const std::string& prefix, DType dtype)
      : c_(config), rope_(rope), dtype_(dtype) {
    const auto add = [&](const char* name, std::int64_t out, std::int64_t in) {
      return &parameters.add(prefix + name, {out, in}, dtype);
    };
    q_ = add("q_proj.weight", c_.heads * head_dim(), c_.hidden_size);
    k_ = add("k_proj.weight", c_.kv_heads * head_dim(), c_.hidden_size);
    v_ = add("v_proj.weight", c_.kv_heads * c_.v_head_dim, c_.hidden_size);
    output_ = add("o_proj.weight", c_.hidden_size, c_.heads * c_.v_head_dim);
  }

  void query_latent(const Tensor&, const Kept&) const override {}

  void query(const Tensor& x, const Rows& rows, const Kept& kept) const override {
    const Tensor& query = kept.query.query.fit(dtype_, {rows.count(), c_.heads, head_dim()});
    nn::linear(x, q_->value, join_heads(query));
    rotate(query, rows, false);
  }

  void keys(const Tensor& x, const Rows& rows, const Kept& kept) const override {
    const Tensor key = kept.cache.key.view().rows(rows.first_key, rows.count());
    const Tensor value = kept.cache.value.view().rows(rows.first_key, rows.count());
    nn::linear(x, k_->value, join_heads(key));
    nn::linear(x, v_->value, join_heads(value));
    rotate(key, rows, false);
  }

  Tensor indexer_input(const Tensor& x, const Kept&) const override { return x; }

  void heads(const Kept&) const override {}

  void output(const Kept& kept, const Tensor& output) const override {
    nn::linear(join_heads(kept.core.attended), output_->value, output);
  }

  void output_backward(const Kept& kept, const Tensor& d_output, const Tensor& d_attended,
                       Memory&) const override {
    nn::linear_backward(join_heads(kept.core.attended), output_->value, d_output,
                        join_heads(d_attended), output_->grad);
  }

  void query_backward(const Tensor& x, const Rows& rows, const Kept&, const Tensor& d_query,
                      const Tensor& d_x, Memory&) const override {
    rotate(d_query, rows, true);
    nn::linear_backward(x, q_->value, join_heads(d_query), d_x, q_->grad);
  }

  void keys_backward(const Tensor& x, const Rows& rows, const Kept&, const Tensor& d_key,
                     const Tensor& d_value, const Tensor& d_x, Memory&) const override {
    rotate(d_key, rows, true);
    nn::linear_backward(x, k_->value, join_heads(d_key), d_x, k_->grad, true);
    nn::linear_backward(x, v_->value, join_heads(d_value), d_x, v_->grad, true);
  }

 private:
  std::int64_t head_dim() const { return c_.qk_nope_head_dim + c_.qk_rope_head_dim; }

  void rotate(const Tensor& t, const Rows& rows, bool inverse) const {
    if (c_.qk_rope_head_dim == 0) return;
    nn::rope(t.channels(c_.qk_nope_head_dim, c_.qk_rope_head_dim), rows.positions, rope_,
             c_.rope_pairing, inverse);
  }

  const AttentionConfig c_;
  const nn::RopeTable& rope_;
  const DType dtype_;
  Parameter *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *output_ = nullptr;
};

}  // namespace

std::unique_ptr<Projection> make_gqa(const AttentionConfig& config, const nn::RopeTable& rope,
                                     ParameterList& parameters, const std::string& prefix,
                                     DType dtype) {
  return std::make_unique<Gqa>(config, rope, parameters, prefix, dtype);
}

}  // namespace winnow::attention
