// Which layers a pipeline stage holds: the layout grammar, its rules, and the rule of index sharing.
//
//   E embedding    t decoder layer    m depth of multi-token prediction    L loss    | next stage
//   x*n repeats one character, (text)*n a group, which may hold |; commas are ignored
//
// "Et*2|(t|)*2t*2mL" is E t t | t | t | t t m L. Stages are numbered in the order of execution: with
// `ranks` pipeline ranks, stage s is virtual stage s / ranks of rank s % ranks. Decoder layers are
// numbered from 1 in that order, and all depths of multi-token prediction are layer layers + 1.
// Stages may be empty.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/rules.h"
#include "layout/index_sharing.h"

namespace winnow::plan {

// What one rank holds of one virtual stage.
struct Stage {
  std::int64_t number = 0, rank = 0, virtual_stage = 0;
  bool embedding = false, loss = false;
  std::int64_t first_layer = 0, layers = 0;  // decoder layers [first_layer, first_layer + layers)
  std::int64_t mtp_depths = 0;

  bool mtp_only() const { return layers == 0 && mtp_depths > 0; }
};

struct PipelineLayout {
  std::int64_t ranks = 1, virtual_stages = 1;
  std::vector<Stage> stages;  // [virtual_stages * ranks], in the order of execution

  const Stage& at(std::int64_t rank, std::int64_t virtual_stage) const {
    return stages[static_cast<std::size_t>(virtual_stage * ranks + rank)];
  }
  // Multi-token prediction lies on another rank than the loss.
  bool mtp_standalone() const;
};

// The text with every repetition written out and commas removed: "Ett|t|t|ttmL".
std::string expand_layout(const std::string& text, Rules& rules);

// The shortest text of a layout: "Et*10|t*12|m*7L".
std::string layout_text(const PipelineLayout& layout);

// Reads a layout and notes every rule that it breaks under the option "plan.layout". Where one is broken
// the stages are those that could be read, and may be none.
PipelineLayout parse_layout(const std::string& text, std::int64_t ranks, std::int64_t layers,
                            std::int64_t mtp_depths, Rules& rules);

// Layers spread as evenly as they go, the embedding in the first stage, multi-token prediction and
// the loss in the last.
PipelineLayout even_layout(std::int64_t ranks, std::int64_t virtual_stages, std::int64_t layers,
                           std::int64_t mtp_depths);

// Indices never cross stages: in every stage, a DSA layer that reuses indices must find their source
// in the same stage. `is_dsa` says which layers are DSA layers (all, if left out); a depth of
// multi-token prediction is the layers from layers + 1 on. Names the stage, the layer and its
// source, and a layout that moves the least.
void check_index_sharing(const PipelineLayout& layout, const IndexSharing& sharing,
                         std::int64_t layers, Rules& rules,
                         const std::function<bool(std::int64_t)>& is_dsa = {},
                         std::int64_t mtp_layers = 1);

}  // namespace winnow::plan
