// What the layers of one forward hand to later ones of the same forward:
//
// - the indices of a layer that computes them, to the layers that reuse them
//   (layout/index_sharing.h);
// - between the depths of the repeated layer of multi-token prediction: the indices that its first
//   depth attended to, wherever they came from, and its keys. These lie beside the former and
//   neither replace nor alias them.
//
// Selections travel with their certificate. The state holds views; the pass owns the memory. A
// state belongs to one forward of one micro-batch: whoever has several in flight has several
// states. What a call takes it takes as a copy, which its replay uses: later changes of the state
// never reach it.
#pragma once

#include <map>

#include "attention/activations.h"
#include "layout/index_sharing.h"

namespace winnow::attention {

class ForwardSharing {
 public:
  explicit ForwardSharing(const IndexSharing& rule = {}) : rule_(rule) {}

  // The life of what is published. The outermost scope clears the state when it begins and when it
  // ends, however it ends; a scope inside another joins it.
  class Scope {
   public:
    explicit Scope(ForwardSharing& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ForwardSharing& state_;
    const bool outermost_;
  };

  // One application of the repeated layer; depth 0 publishes, the others take.
  class Depth {
   public:
    Depth(ForwardSharing& state, std::int64_t layer, std::int64_t depth);
    ~Depth();
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    ForwardSharing& state_;
    const std::int64_t layer_;
  };

  bool active() const { return active_; }
  bool empty() const { return by_layer_.empty() && by_depth_.empty(); }

  // Layers count from 1.
  void publish(std::int64_t layer, const Selection& selection);
  bool holds(std::int64_t layer) const { return by_layer_.contains(layer); }
  // What `layer` attends to by the rule: its source's selection. Throws, with layer, source and
  // what is there, if the source has published nothing in this forward.
  Selection reused_by(std::int64_t layer) const;

  // Inside a Depth of `layer`.
  void publish_selection(std::int64_t layer, const Selection& selection);
  void publish_keys(std::int64_t layer, KeyCache& keys);
  Selection shared_selection(std::int64_t layer) const;
  KeyCache& shared_keys(std::int64_t layer) const;

 private:
  struct Repeated {  // what depth 0 has published so far
    Selection selection;
    KeyCache* keys = nullptr;
  };
  void clear();
  void check_active() const;
  void check_depth(std::int64_t layer, bool source) const;
  const Repeated& taken_from(std::int64_t layer) const;

  IndexSharing rule_;
  bool active_ = false;
  std::map<std::int64_t, Selection> by_layer_;
  std::map<std::int64_t, Repeated> by_depth_;
  std::map<std::int64_t, std::int64_t> depths_;  // layer -> its depth that runs
};

}  // namespace winnow::attention
