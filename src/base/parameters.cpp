#include "base/parameters.h"

#include "base/check.h"

namespace winnow {

Parameter& ParameterList::add(std::string name, std::initializer_list<std::int64_t> shape,
                              DType dtype) {
  WINNOW_CHECK("parameters", find(name) == nullptr, "names must be unique, got \"{}\" twice", name);
  all_.push_back(std::make_unique<Parameter>());
  Parameter& p = *all_.back();
  p.name = std::move(name);
  p.value = Array(dtype, shape);
  p.grad = Array(dtype, shape);
  p.decay = shape.size() > 1;
  return p;
}

Parameter* ParameterList::find(const std::string& name) {
  for (const std::unique_ptr<Parameter>& p : all_) {
    if (p->name == name) return p.get();
  }
  return nullptr;
}

void ParameterList::zero_grad() {
  for (const std::unique_ptr<Parameter>& p : all_) p->grad.zero();
}

std::int64_t ParameterList::elements() const {
  std::int64_t n = 0;
  for (const std::unique_ptr<Parameter>& p : all_) n += p->value.elements();
  return n;
}

}  // namespace winnow
