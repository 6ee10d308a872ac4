// A plan for people (a table), for programs (JSON) and for the eye (a picture of the layout).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "plan/plan.h"

namespace winnow::plan {

std::string plan_text(const PlanConfig& config, const Plan& plan);
nlohmann::ordered_json plan_json(const PlanConfig& config, const Plan& plan);

// An SVG: a line per pipeline rank, a box per stage, a cell per layer. Layers that compute indices
// are filled, those that reuse them have the shade of their source.
std::string layout_picture(const PlanConfig& config, const PipelineLayout& layout);

// What is broken, each rule with the value and a valid one.
std::string violations_text(const Rules& rules);
nlohmann::ordered_json violations_json(const Rules& rules);

}  // namespace winnow::plan
