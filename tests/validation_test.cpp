// Validation mode: each rule on the values of integer inputs, in every operation that it holds for.
#include "winnow/validation.h"

#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "tests/attention_call.h"
#include "tests/each.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"
#include "winnow/select_topk.h"

namespace winnow::testing {
namespace {

class ValidationGuard {
 public:
  ValidationGuard() : before_(validation()) { set_validation(true); }
  ~ValidationGuard() { set_validation(before_); }
  ValidationGuard(const ValidationGuard&) = delete;
  ValidationGuard& operator=(const ValidationGuard&) = delete;

 private:
  bool before_;
};

constexpr std::int64_t kRows = 3, kKeys = 9, kHeads = 2, kDim = 4, kTopk = 4;

// Inputs of all operations: three rows that see the keys [0, 9), [2, 7) and none.
struct Inputs {
  Array starts = ints({kRows}, {0, 2, 5}), ends = ints({kRows}, {9, 7, 5});
  Array ids = ints({kRows, kTopk}, {0, 8, -1, -1, 6, -1, 2, 3, -1, -1, -1, -1});
  Array lengths = ints({kRows}, {2, 4, 0});
  Array q{DType::kF32, {kRows, kHeads, kDim}}, k{DType::kF32, {kKeys, kDim}},
      key{DType::kF32, {kKeys, 1, kDim}}, w{DType::kF32, {kRows, kHeads}},
      row{DType::kF32, {kRows}}, list{DType::kF32, {kRows, kTopk}},
      list2{DType::kF32, {kRows, kTopk}}, list3{DType::kF32, {kRows, kTopk}},
      scores{DType::kF32, {kRows, kKeys}}, out{DType::kF32, {kRows, kHeads, kDim}},
      d_q{DType::kF32, {kRows, kHeads, kDim}}, d_k{DType::kF32, {kKeys, kDim}},
      d_key{DType::kF32, {kKeys, 1, kDim}}, d_w{DType::kF32, {kRows, kHeads}},
      new_ids{DType::kI32, {kRows, kTopk}}, new_lengths{DType::kI32, {kRows}};
  Scratch scratch;

  template <class Args>
  std::string call(void (*run)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
                   const Args& args) {
    return error_of([&] { run(args, scratch.get(bytes(args))); });
  }
  SparseAttentionArgs forward() const {
    return {q, key, {}, ids, lengths, starts, ends, 0.5, out, d_w};
  }
  SparseAttentionBackwardArgs backward() const {
    return {q, key, {}, ids, lengths, starts, ends, 0.5, out, w, out, d_q, d_key, {}};
  }

  // The messages of every operation that reads ranges, and of those that read lists.
  std::vector<std::string> of_ranges() {
    std::vector<std::string> all = of_lists();
    all.push_back(call<IndexScoresArgs>(index_scores, index_scores_workspace_bytes,
                                        {q, k, w, starts, ends, true, scores}));
    all.push_back(call<IndexTopkArgs>(index_topk, index_topk_workspace_bytes,
                                      {q, k, w, starts, ends, true, new_ids, new_lengths, {}}));
    all.push_back(call<DenseIndexLossArgs>(
        dense_index_loss, dense_index_loss_workspace_bytes,
        {q, k, w, true, q, key, d_w, 0.5, starts, ends, 1, {}, row, d_q, d_k, list_of_heads_}));
    return all;
  }
  std::vector<std::string> of_lists() {
    return {call(sparse_attention, sparse_attention_workspace_bytes, forward()),
            call(sparse_attention_backward, sparse_attention_backward_workspace_bytes, backward()),
            call<AttentionTargetArgs>(attention_target, attention_target_workspace_bytes,
                                      {q, key, w, ids, starts, ends, 0.5, list}),
            call<IndexScoresAtArgs>(index_scores_at, index_scores_at_workspace_bytes,
                                    {q, k, w, ids, starts, ends, true, list}),
            call<IndexScoresAtBackwardArgs>(
                index_scores_at_backward, index_scores_at_backward_workspace_bytes,
                {q, k, w, ids, starts, ends, true, list, d_q, d_k, d_w})};
  }
  std::string of_index_loss() {
    return call<IndexLossArgs>(index_loss, index_loss_workspace_bytes,
                               {list, list2, ids, starts, ends, 1, row, list3});
  }
  std::string of_select_topk() {
    return call<SelectTopkArgs>(select_topk, select_topk_workspace_bytes,
                                {scores, starts, ends, new_ids, new_lengths, {}});
  }

 private:
  Array list_of_heads_{DType::kF32, {kRows, kHeads}};
};

// The part of a message behind "[operation] ".
std::string rule_of(const std::string& message) {
  const std::size_t end = message.find("] ");
  return end == std::string::npos ? message : message.substr(end + 2);
}

TEST(Validation, ValidInputsPassAndTheModeIsOffByDefault) {
  EXPECT_FALSE(validation());
  const ValidationGuard on;
  Inputs x;
  for (const std::string& message : x.of_ranges()) EXPECT_EQ(message, "");
  EXPECT_EQ(x.of_index_loss(), "");
  EXPECT_EQ(x.of_select_topk(), "");
}

TEST(Validation, OffNothingIsReported) {
  Inputs x;
  x.ends.as<std::int32_t>()[1] = -4;
  x.ids.as<std::int32_t>()[0] = 17;
  x.ids.as<std::int32_t>()[1] = 17;
  x.lengths.as<std::int32_t>()[0] = -2;
  for (const std::string& message : x.of_ranges()) EXPECT_EQ(message, "");
  EXPECT_EQ(x.of_index_loss(), "");
  EXPECT_EQ(x.of_select_topk(), "");
}

TEST(Validation, ANegativeLength) {
  const ValidationGuard on;
  Inputs x;
  x.ends.as<std::int32_t>()[1] = -4;
  const char* rule = "ends must not be below starts, got -4 and 2 in row 1";
  for (const std::string& message : x.of_ranges()) EXPECT_EQ(rule_of(message), rule);
  EXPECT_EQ(x.of_index_loss(), std::string("[index_loss] ") + rule);
  EXPECT_EQ(x.of_select_topk(), std::string("[select_topk] ") + rule);
}

TEST(Validation, ARangeOutsideTheKeySpace) {
  const ValidationGuard on;
  Inputs x;
  x.ends.as<std::int32_t>()[0] = 10;
  for (const std::string& message : x.of_ranges())
    EXPECT_EQ(rule_of(message), "a row's range must lie within 9 keys, got [0, 10) in row 0");
  EXPECT_EQ(x.of_index_loss(), "");  // knows no key space
  x.ends.as<std::int32_t>()[0] = 9;
  x.starts.as<std::int32_t>()[0] = -1;
  for (const std::string& message : x.of_ranges())
    EXPECT_EQ(rule_of(message), "a row's range must lie within 9 keys, got [-1, 9) in row 0");
  EXPECT_EQ(rule_of(x.of_index_loss()),
            "a row's range must lie within 2147483647 keys, got [-1, 9) in row 0");
}

TEST(Validation, AnIdOutsideTheRange) {
  const ValidationGuard on;
  for (const std::int32_t id : {-2, 1, 7, 9, INT32_MIN, INT32_MAX}) {
    Inputs x;
    x.ids.as<std::int32_t>()[6] = id;
    const std::string rule = fmt::format(
        "topk_indices must be -1 or in the row's range [2, 7), got {} in row 1 slot 2", id);
    for (const std::string& message : x.of_lists()) EXPECT_EQ(rule_of(message), rule);
    EXPECT_EQ(x.of_index_loss(), "[index_loss] " + rule);
  }
}

TEST(Validation, AnIdThatStandsTwice) {
  const ValidationGuard on;
  Inputs x;
  x.ids.as<std::int32_t>()[7] = 6;
  const std::string rule = "an id must stand in topk_indices once, got 6 twice in row 1";
  for (const std::string& message : x.of_lists()) EXPECT_EQ(rule_of(message), rule);
  EXPECT_EQ(x.of_index_loss(), "[index_loss] " + rule);
}

TEST(Validation, LengthsOutsideTheList) {
  const ValidationGuard on;
  for (const std::int32_t length : {-1, 5, INT32_MAX}) {
    Inputs x;
    x.lengths.as<std::int32_t>()[2] = length;
    const std::string rule =
        fmt::format("topk_lengths must be from 0 to topk = 4, got {} in row 2", length);
    EXPECT_EQ(x.call(sparse_attention, sparse_attention_workspace_bytes, x.forward()),
              "[sparse_attention] " + rule);
    EXPECT_EQ(
        x.call(sparse_attention_backward, sparse_attention_backward_workspace_bytes, x.backward()),
        "[sparse_attention_backward] " + rule);
  }
}

// What stands behind topk_lengths is not looked at.
TEST(Validation, SlotsBehindTheLengthMayHoldAnything) {
  const ValidationGuard on;
  Inputs x;
  x.ids.as<std::int32_t>()[2] = 8;
  x.ids.as<std::int32_t>()[3] = 100;
  EXPECT_EQ(x.call(sparse_attention, sparse_attention_workspace_bytes, x.forward()), "");
}

TEST(Validation, PagesAndRequestsThatAreNotThere) {
  const ValidationGuard on;
  Inputs x;
  const Array table = ints({2, 3}, {0, 1, 2, 2, 0, 1}), request = ints({kRows}, {0, 1, 7});
  const auto messages = [&] {
    SparseAttentionArgs a = x.forward();
    a.key = KeyView(x.key.view().reshape({3, 3, 1, kDim}), table, request);
    const KeyView index_key(x.k.view().reshape({3, 3, kDim}), table, request);
    return std::vector<std::string>{
        x.call(sparse_attention, sparse_attention_workspace_bytes, a),
        x.call<IndexScoresArgs>(index_scores, index_scores_workspace_bytes,
                                {x.q, index_key, x.w, x.starts, x.ends, true, x.scores}),
        x.call<IndexTopkArgs>(
            index_topk, index_topk_workspace_bytes,
            {x.q, index_key, x.w, x.starts, x.ends, true, x.new_ids, x.new_lengths, {}})};
  };
  for (const std::string& message : messages()) EXPECT_EQ(message, "");  // row 2 is empty
  request.as<std::int32_t>()[1] = 2;
  for (const std::string& message : messages())
    EXPECT_EQ(rule_of(message), "row_request must be from 0 to 1, got 2 in row 1");
  request.as<std::int32_t>()[1] = 1;
  for (const std::int32_t page : {-1, 3}) {
    table.as<std::int32_t>()[4] = page;
    for (const std::string& message : messages()) {
      EXPECT_EQ(
          rule_of(message),
          fmt::format("block_table must hold pages from 0 to 2, got {} for request 1 column 1",
                      page));
    }
  }
}

TEST(Validation, ACertificateThatIsNotTrue) {
  const ValidationGuard on;
  Inputs x;
  SparseAttentionBackwardArgs a = x.backward();
  a.rows_nonempty = true;
  EXPECT_EQ(x.call(sparse_attention_backward, sparse_attention_backward_workspace_bytes, a),
            "[sparse_attention_backward] with rows_nonempty every row must have a valid slot, got "
            "none in row 2");
  x.ends.as<std::int32_t>()[2] = 6;
  x.lengths.as<std::int32_t>()[2] = 2;
  x.ids.as<std::int32_t>()[9] = 5;
  EXPECT_EQ(x.call(sparse_attention_backward, sparse_attention_backward_workspace_bytes, a), "");
}

TEST(Validation, BeforeTheFirstWrite) {
  const ValidationGuard on;
  Inputs x;
  x.ids.as<std::int32_t>()[7] = 6;
  std::memset(x.out.as<void>(), 0x7f, static_cast<std::size_t>(x.out.bytes()));
  const Array before = x.out.clone();
  EXPECT_NE(x.call(sparse_attention, sparse_attention_workspace_bytes, x.forward()), "");
  EXPECT_TRUE(same_bits(before, x.out));
}

}  // namespace
}  // namespace winnow::testing
