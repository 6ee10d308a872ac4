#include "attention/forward_sharing.h"

#include "base/check.h"

namespace winnow::attention {
namespace {

constexpr char kName[] = "sharing";

}  // namespace

ForwardSharing::Scope::Scope(ForwardSharing& state) : state_(state), outermost_(!state.active_) {
  if (!outermost_) return;
  state_.clear();
  state_.active_ = true;
}

ForwardSharing::Scope::~Scope() {
  if (!outermost_) return;
  state_.clear();
  state_.active_ = false;
}

ForwardSharing::Depth::Depth(ForwardSharing& state, std::int64_t layer, std::int64_t depth)
    : state_(state), layer_(layer) {
  state_.check_active();
  const bool fresh = state_.depths_.emplace(layer, depth).second;
  WINNOW_CHECK(kName, fresh, "layer {} is being repeated already: its depth {} has not ended",
               layer, state_.depths_.at(layer));
}

ForwardSharing::Depth::~Depth() { state_.depths_.erase(layer_); }

void ForwardSharing::clear() {
  by_layer_.clear();
  by_depth_.clear();
  depths_.clear();
}

void ForwardSharing::check_active() const {
  WINNOW_CHECK(kName, active_, "layers share inside a forward, and none is running");
}

void ForwardSharing::publish(std::int64_t layer, const Selection& selection) {
  check_active();
  by_layer_[layer] = selection;
}

Selection ForwardSharing::reused_by(std::int64_t layer) const {
  check_active();
  const std::int64_t source = index_source(rule_, layer);
  const auto found = by_layer_.find(source);
  if (found != by_layer_.end()) return found->second;
  std::string present;
  for (const auto& [number, selection] : by_layer_) {
    present += fmt::format("{}{}", present.empty() ? "" : ", ", number);
  }
  fail(
      Status::kInvalidArgument, kName,
      "layer {} reuses the indices of layer {} (topk_freq {}, skip_topk_offset {}), which must run "
      "before it in the same forward; this one holds indices of {}",
      layer, source, rule_.topk_freq, rule_.skip_topk_offset,
      present.empty() ? "no layer" : "layers " + present);
}

void ForwardSharing::check_depth(std::int64_t layer, bool source) const {
  check_active();
  const auto found = depths_.find(layer);
  WINNOW_CHECK(kName, found != depths_.end(), "no depth of layer {} is running", layer);
  WINNOW_CHECK(kName, (found->second == 0) == source,
               "depth 0 of layer {} publishes and later depths take, got depth {} that {}", layer,
               found->second, source ? "publishes" : "takes");
}

void ForwardSharing::publish_selection(std::int64_t layer, const Selection& selection) {
  check_depth(layer, true);
  by_depth_[layer].selection = selection;
}

void ForwardSharing::publish_keys(std::int64_t layer, KeyCache& keys) {
  check_depth(layer, true);
  by_depth_[layer].keys = &keys;
}

const ForwardSharing::Repeated& ForwardSharing::taken_from(std::int64_t layer) const {
  static const Repeated nothing;
  check_depth(layer, false);
  const auto found = by_depth_.find(layer);
  return found == by_depth_.end() ? nothing : found->second;
}

Selection ForwardSharing::shared_selection(std::int64_t layer) const {
  Selection selection = taken_from(layer).selection;
  WINNOW_CHECK(kName, !selection.empty(),
               "depth {} of layer {} reuses the indices of depth 0, which published none",
               depths_.at(layer), layer);
  return selection;
}

KeyCache& ForwardSharing::shared_keys(std::int64_t layer) const {
  KeyCache* keys = taken_from(layer).keys;
  WINNOW_CHECK(kName, keys != nullptr,
               "depth {} of layer {} reuses the keys of depth 0, which published none",
               depths_.at(layer), layer);
  return *keys;
}

}  // namespace winnow::attention
