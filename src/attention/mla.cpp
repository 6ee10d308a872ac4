// Multi-head latent attention in its absorbed form: every head attends to one latent key.
//
//   c_q = rms(x . q_a^T)                    q[h] = [nope | rope] of c_q . q_b^T, its end rotated
//   [c | k_rope] = x . kv_a^T               latent = [rms(c) | rotated k_rope]
//   query[h] = [q_nope[h] . W_uk[h] | q_rope[h]]
//   heads[h] = attended[h] . W_uv[h]^T      output = heads . o^T
//
// W_uk[h] and W_uv[h] are the first qk_nope_head_dim and the last v_head_dim rows of head h in
// kv_b_proj. They multiply on the query's and the output's side, so keys and values are never
// expanded.
#include "attention/projection.h"
#include "attention/views.h"
#include "nn/matmul.h"
#include "nn/norm.h"

namespace winnow::attention {
namespace {

class Mla final : public Projection {
 public:
  Mla(const AttentionConfig& config, const nn::RopeTable& rope, ParameterList& parameters,
      const std::string& prefix, DType dtype)
      : c_(config), rope_(rope), dtype_(dtype) {
    const std::int64_t head_dim = nope() + rotated();
    const auto add = [&](const char* name, std::initializer_list<std::int64_t> shape) {
      return &parameters.add(prefix + name, shape, dtype);
    };
    if (c_.q_lora_rank > 0) {
      q_down_ = add("q_a_proj.weight", {c_.q_lora_rank, c_.hidden_size});
      q_norm_ = add("q_a_layernorm.weight", {c_.q_lora_rank});
      q_up_ = add("q_b_proj.weight", {c_.heads * head_dim, c_.q_lora_rank});
    } else {
      q_up_ = add("q_proj.weight", {c_.heads * head_dim, c_.hidden_size});
    }
    kv_down_ = add("kv_a_proj_with_mqa.weight", {latent() + rotated(), c_.hidden_size});
    kv_norm_ = add("kv_a_layernorm.weight", {latent()});
    kv_up_ = add("kv_b_proj.weight", {c_.heads * (nope() + c_.v_head_dim), latent()});
    output_ = add("o_proj.weight", {c_.hidden_size, c_.heads * c_.v_head_dim});
  }

  void query_latent(const Tensor& x, const Kept& kept) const override {
    if (c_.q_lora_rank == 0) return;
    LatentActivations& a = kept.latents;
    const std::int64_t n = x.shape[0];
    a.q_down_out.fit(dtype_, {n, c_.q_lora_rank});
    a.q_latent.fit(dtype_, {n, c_.q_lora_rank});
    nn::linear(x, q_down_->value, a.q_down_out);
    nn::rms_norm(a.q_down_out, q_norm_->value, c_.latent_norm_epsilon, a.q_latent,
                 a.q_scale.fit(dtype_, {n}));
  }

  void query(const Tensor& x, const Rows& rows, const Kept& kept) const override {
    const std::int64_t n = rows.count();
    const Tensor& q = kept.query.q.fit(dtype_, {n, c_.heads, nope() + rotated()});
    const Tensor& query = kept.query.query.fit(dtype_, {n, c_.heads, latent() + rotated()});
    nn::linear(indexer_input(x, kept), q_up_->value, join_heads(q));
    for (std::int64_t h = 0; h < c_.heads; ++h) {
      nn::matmul(q_nope(q, h), key_up(kv_up_->value, h), latent_part(query, h));
    }
    if (rotated() == 0) return;
    const Tensor q_rope = q.channels(nope(), rotated());
    nn::rope(q_rope, rows.positions, rope_, c_.rope_pairing);
    copy(q_rope, query.channels(latent(), rotated()));
  }

  void keys(const Tensor& x, const Rows& rows, const Kept& kept) const override {
    LatentActivations& a = kept.latents;
    const std::int64_t n = rows.count();
    const Tensor key = join_heads(kept.cache.key.view().rows(rows.first_key, n));
    nn::matmul(x, kv_down_->value.view().rows(0, latent()).transposed(),
               a.latent_in.fit(dtype_, {n, latent()}));
    nn::rms_norm(a.latent_in, kv_norm_->value, c_.latent_norm_epsilon, key.channels(0, latent()),
                 a.latent_scale.fit(dtype_, {n}));
    if (rotated() == 0) return;
    const Tensor k_rope = key.channels(latent(), rotated());
    nn::matmul(x, kv_down_->value.view().rows(latent(), rotated()).transposed(), k_rope);
    nn::rope(as_one_head(k_rope), rows.positions, rope_, c_.rope_pairing);
  }

  Tensor indexer_input(const Tensor& x, const Kept& kept) const override {
    return c_.q_lora_rank > 0 ? kept.latents.q_latent.view() : x;
  }

  void heads(const Kept& kept) const override {
    const Tensor& attended = kept.core.attended;
    kept.core.heads.fit(dtype_, {attended.shape[0], c_.heads, c_.v_head_dim});
    for (std::int64_t h = 0; h < c_.heads; ++h) {
      nn::matmul(head(attended, h), value_up(kv_up_->value, h).transposed(),
                 head(kept.core.heads, h));
    }
  }

  void output(const Kept& kept, const Tensor& output) const override {
    nn::linear(join_heads(kept.core.heads), output_->value, output);
  }

  void output_backward(const Kept& kept, const Tensor& d_output, const Tensor& d_attended,
                       Memory& memory) const override {
    const Tensor& attended = kept.core.attended;
    const Tensor& d_heads =
        memory.d_heads.fit(dtype_, {attended.shape[0], c_.heads, c_.v_head_dim});
    nn::linear_backward(join_heads(kept.core.heads), output_->value, d_output, join_heads(d_heads),
                        output_->grad);
    for (std::int64_t h = 0; h < c_.heads; ++h) {
      const Tensor d_head = head(d_heads, h);
      nn::matmul(d_head, value_up(kv_up_->value, h), head(d_attended, h));
      nn::matmul(d_head.transposed(), head(attended, h), value_up(kv_up_->grad, h), true);
    }
  }

  void query_backward(const Tensor& x, const Rows& rows, const Kept& kept, const Tensor& d_query,
                      const Tensor& d_x, Memory& memory) const override {
    const Tensor& q = kept.query.q;
    const Tensor& d_q = memory.d_q.fit(dtype_, {rows.count(), c_.heads, nope() + rotated()});
    for (std::int64_t h = 0; h < c_.heads; ++h) {
      const Tensor d_latent = latent_part(d_query, h);
      nn::matmul(d_latent, key_up(kv_up_->value, h).transposed(), q_nope(d_q, h));
      nn::matmul(q_nope(q, h).transposed(), d_latent, key_up(kv_up_->grad, h), true);
    }
    if (rotated() > 0) {
      const Tensor d_q_rope = d_q.channels(nope(), rotated());
      copy(d_query.channels(latent(), rotated()), d_q_rope);
      nn::rope(d_q_rope, rows.positions, rope_, c_.rope_pairing, true);
    }
    if (c_.q_lora_rank == 0) {
      nn::linear_backward(x, q_up_->value, join_heads(d_q), d_x, q_up_->grad);
      return;
    }
    const LatentActivations& a = kept.latents;
    const Tensor& d_q_latent = memory.d_q_latent.fit(dtype_, {rows.count(), c_.q_lora_rank});
    const Tensor& d_q_down = memory.d_q_down.fit(dtype_, {rows.count(), c_.q_lora_rank});
    nn::linear_backward(a.q_latent, q_up_->value, join_heads(d_q), d_q_latent, q_up_->grad);
    nn::rms_norm_backward(a.q_down_out, q_norm_->value, a.q_scale, d_q_latent, d_q_down,
                          q_norm_->grad);
    nn::linear_backward(x, q_down_->value, d_q_down, d_x, q_down_->grad);
  }

  void keys_backward(const Tensor& x, const Rows& rows, const Kept& kept, const Tensor& d_key,
                     const Tensor&, const Tensor& d_x, Memory& memory) const override {
    const LatentActivations& a = kept.latents;
    const Tensor d_latent = join_heads(d_key);
    const Tensor& d_latent_in = memory.d_latent.fit(dtype_, {rows.count(), latent()});
    nn::rms_norm_backward(a.latent_in, kv_norm_->value, a.latent_scale,
                          d_latent.channels(0, latent()), d_latent_in, kv_norm_->grad);
    nn::linear_backward(x, kv_down_->value.view().rows(0, latent()), d_latent_in, d_x,
                        kv_down_->grad.view().rows(0, latent()), true);
    if (rotated() == 0) return;
    const Tensor d_k_rope = d_latent.channels(latent(), rotated());
    nn::rope(as_one_head(d_k_rope), rows.positions, rope_, c_.rope_pairing, true);
    nn::linear_backward(x, kv_down_->value.view().rows(latent(), rotated()), d_k_rope, d_x,
                        kv_down_->grad.view().rows(latent(), rotated()), true);
  }

 private:
  std::int64_t nope() const { return c_.qk_nope_head_dim; }
  std::int64_t rotated() const { return c_.qk_rope_head_dim; }
  std::int64_t latent() const { return c_.kv_lora_rank; }

  Tensor q_nope(const Tensor& q, std::int64_t h) const { return head(q, h).channels(0, nope()); }
  Tensor latent_part(const Tensor& query, std::int64_t h) const {
    return head(query, h).channels(0, latent());
  }
  // [qk_nope_head_dim, kv_lora_rank] and [v_head_dim, kv_lora_rank] of head h in kv_b_proj.
  Tensor key_up(const Tensor& kv_up, std::int64_t h) const {
    return kv_up.rows(h * (nope() + c_.v_head_dim), nope());
  }
  Tensor value_up(const Tensor& kv_up, std::int64_t h) const {
    return kv_up.rows(h * (nope() + c_.v_head_dim) + nope(), c_.v_head_dim);
  }

  const AttentionConfig c_;
  const nn::RopeTable& rope_;
  const DType dtype_;
  Parameter *q_down_ = nullptr, *q_norm_ = nullptr, *q_up_ = nullptr, *kv_down_ = nullptr,
            *kv_norm_ = nullptr, *kv_up_ = nullptr, *output_ = nullptr;
};

}  // namespace

std::unique_ptr<Projection> make_mla(const AttentionConfig& config, const nn::RopeTable& rope,
                                     ParameterList& parameters, const std::string& prefix,
                                     DType dtype) {
  return std::make_unique<Mla>(config, rope, parameters, prefix, dtype);
}

}  // namespace winnow::attention
