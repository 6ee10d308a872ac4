// The trainable tensors of a model by name, each with its gradient.
#pragma once

#include <string>
#include <vector>

#include "base/array.h"

namespace winnow {

struct Parameter {
  std::string name;  // as in checkpoints: "model.layers.0.self_attn.q_a_proj.weight"
  Array value;
  Array grad;            // same shape; the backward adds to it
  bool decay = true;     // weight decay applies: matrices, not norms and biases
  bool indexer = false;  // belongs to an indexer: the only ones that the warm-up trains
};

// Pointers stay valid while the list lives: it is filled once, at construction of the model.
class ParameterList {
 public:
  Parameter& add(std::string name, std::initializer_list<std::int64_t> shape, DType dtype);
  Parameter* find(const std::string& name);
  std::vector<std::unique_ptr<Parameter>>& all() { return all_; }
  const std::vector<std::unique_ptr<Parameter>>& all() const { return all_; }
  void zero_grad();
  std::int64_t elements() const;

 private:
  std::vector<std::unique_ptr<Parameter>> all_;
};

}  // namespace winnow
