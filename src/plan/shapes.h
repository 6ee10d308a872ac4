// Public models by name: the sizes to plan with where no configuration is given.
#pragma once

#include <string>
#include <vector>

#include "plan/config.h"

namespace winnow::plan {

struct Shape {
  std::string name;
  model::ModelConfig model;
  MoeConfig moe;
};

const std::vector<Shape>& shapes();
const Shape* find_shape(const std::string& name);  // null if there is none

}  // namespace winnow::plan
