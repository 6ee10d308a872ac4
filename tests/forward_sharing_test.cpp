// The state by which layers of one forward share: its life, its messages, its certificates.
#include "attention/forward_sharing.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "winnow/error.h"

namespace winnow::attention {
namespace {

// A selection that can be told from others.
Selection selection(std::int32_t* ids, bool nonempty = true) {
  Selection s;
  s.topk_indices = make_tensor(ids, DType::kI32, {1, 1});
  s.rows_nonempty = nonempty;
  return s;
}

template <class F>
std::string message(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ForwardSharing, AConsumerGetsWhatItsSourcePublished) {
  std::int32_t a = 0, b = 0;
  ForwardSharing state({4, 3});
  const ForwardSharing::Scope scope(state);
  state.publish(2, selection(&a));
  state.publish(3, selection(&b, false));
  EXPECT_EQ(state.reused_by(6).topk_indices.data, &b);
  EXPECT_EQ(state.reused_by(2).topk_indices.data, &a);
  EXPECT_TRUE(state.reused_by(2).rows_nonempty);  // the certificate travels, false included
  EXPECT_FALSE(state.reused_by(6).rows_nonempty);
}

TEST(ForwardSharing, AMissingSourceIsNamedWithWhatIsThere) {
  std::int32_t a = 0;
  ForwardSharing state({4, 3});
  const ForwardSharing::Scope scope(state);
  EXPECT_EQ(message([&] { state.reused_by(9); }),
            "[sharing] layer 9 reuses the indices of layer 7 (topk_freq 4, skip_topk_offset 3), "
            "which must run before it in the same forward; this one holds indices of no layer");
  state.publish(2, selection(&a));
  state.publish(3, selection(&a));
  EXPECT_NE(message([&] { state.reused_by(9); }).find("holds indices of layers 2, 3"),
            std::string::npos);
}

// E10: what one forward published is gone in the next, whether that one ended well or not.
TEST(ForwardSharing, E10ScopesClearOnEntryExitAndError) {
  std::int32_t a = 0;
  ForwardSharing state({2, 1});
  {
    const ForwardSharing::Scope scope(state);
    EXPECT_TRUE(state.active());
    state.publish(1, selection(&a));
    EXPECT_FALSE(state.empty());
  }
  EXPECT_FALSE(state.active());
  EXPECT_TRUE(state.empty());
  EXPECT_THROW(
      {
        const ForwardSharing::Scope scope(state);
        state.publish(1, selection(&a));
        throw std::runtime_error("in the middle of a forward");
      },
      std::runtime_error);
  EXPECT_FALSE(state.active());
  EXPECT_TRUE(state.empty());
  const ForwardSharing::Scope scope(state);
  EXPECT_THROW(state.reused_by(2), Error);
}

TEST(ForwardSharing, ANestedScopeJoinsTheOuterOne) {
  std::int32_t a = 0, b = 0;
  ForwardSharing state({2, 1});
  const ForwardSharing::Scope outer(state);
  state.publish(1, selection(&a));
  {
    const ForwardSharing::Scope inner(state);
    EXPECT_EQ(state.reused_by(2).topk_indices.data, &a);
    state.publish(3, selection(&b));
  }
  EXPECT_TRUE(state.active());
  EXPECT_EQ(state.reused_by(2).topk_indices.data, &a);
  EXPECT_EQ(state.reused_by(4).topk_indices.data, &b);
}

TEST(ForwardSharing, NobodySharesOutsideAForward) {
  std::int32_t a = 0;
  KeyCache keys;
  ForwardSharing state({2, 1});
  const std::string text = "layers share inside a forward, and none is running";
  for (const std::string& said :
       {message([&] { state.publish(1, selection(&a)); }), message([&] { state.reused_by(2); }),
        message([&] { state.publish_keys(1, keys); }),
        message([&] { ForwardSharing::Depth(state, 1, 0); })}) {
    EXPECT_NE(said.find(text), std::string::npos) << said;
  }
}

// A copy is private: what happens to either is not seen by the other.
TEST(ForwardSharing, E8ACopyIsIndependent) {
  std::int32_t a = 0, b = 0;
  ForwardSharing live({2, 1});
  const ForwardSharing::Scope scope(live);
  live.publish(1, selection(&a));
  ForwardSharing copy = live;
  const Selection taken = live.reused_by(2);
  live.publish(1, selection(&b));
  EXPECT_EQ(copy.reused_by(2).topk_indices.data, &a);
  EXPECT_EQ(taken.topk_indices.data, &a);
  copy.publish(3, selection(&b));
  EXPECT_FALSE(live.holds(3));
}

// Between depths: depth 0 publishes, later ones take, and the ordinary slot is another one.
TEST(ForwardSharing, DepthsShareBesideTheLayers) {
  std::int32_t a = 0, b = 0;
  KeyCache keys;
  ForwardSharing state({4, 3});
  const ForwardSharing::Scope scope(state);
  state.publish(3, selection(&a));
  {
    const ForwardSharing::Depth depth(state, 4, 0);
    state.publish_selection(4, selection(&b));
    state.publish_keys(4, keys);
    EXPECT_FALSE(state.holds(4));
    EXPECT_EQ(state.reused_by(4).topk_indices.data, &a);
    EXPECT_NE(message([&] { state.shared_selection(4); }).find("depth 0 that takes"),
              std::string::npos);
  }
  const ForwardSharing::Depth depth(state, 4, 2);
  EXPECT_EQ(state.shared_selection(4).topk_indices.data, &b);
  EXPECT_EQ(&state.shared_keys(4), &keys);
  EXPECT_EQ(state.reused_by(4).topk_indices.data, &a);
  EXPECT_NE(message([&] { state.publish_keys(4, keys); }).find("depth 2 that publishes"),
            std::string::npos);
}

TEST(ForwardSharing, DepthsThatCannotShareAreNamed) {
  ForwardSharing state({4, 3});
  const ForwardSharing::Scope scope(state);
  EXPECT_EQ(message([&] { state.shared_keys(4); }), "[sharing] no depth of layer 4 is running");
  const ForwardSharing::Depth depth(state, 4, 1);
  EXPECT_EQ(message([&] { state.shared_selection(4); }),
            "[sharing] depth 1 of layer 4 reuses the indices of depth 0, which published none");
  EXPECT_EQ(message([&] { state.shared_keys(4); }),
            "[sharing] depth 1 of layer 4 reuses the keys of depth 0, which published none");
  EXPECT_EQ(message([&] { ForwardSharing::Depth(state, 4, 2); }),
            "[sharing] layer 4 is being repeated already: its depth 1 has not ended");
}

}  // namespace
}  // namespace winnow::attention
