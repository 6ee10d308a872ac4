// Workspace of a training step: what the operations of a layer ask for, the largest of them.
#pragma once

#include "plan/config.h"

namespace winnow::plan {

// On a CPU what the operations themselves answer for these shapes and num_threads() threads; on
// other machines, which cannot be asked from here, the scores that wait for their selection.
double workspace_bytes(const PlanConfig& config, bool indexes);

}  // namespace winnow::plan
