// Validation mode: each rule on the values of integer inputs and scales, in every operation that it
// holds for.
#include "winnow/validation.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>
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

// index_scores and index_topk in FP8 (a scale per key) or MXFP8 (dim 64: two groups), over pages or
// in one piece: 3 rows that see [0, 9), [2, 7) and nothing, of 12 keys.
struct Quantised {
  bool paged;
  Array q{DType::kE4M3, {kRows, kHeads, 64}}, k{DType::kE4M3, {12, 64}},
      w{DType::kF32, {kRows, kHeads}}, scores{DType::kF32, {kRows, 12}},
      ids{DType::kI32, {kRows, kTopk}}, lengths{DType::kI32, {kRows}};
  Array table = ints({2, 4}, {3, 1, 2, 0, 2, 1, 3, 0}), request = ints({kRows}, {1, 1, 0});
  Array starts = ints({kRows}, {0, 2, 5}), ends = ints({kRows}, {9, 7, 5});
  Array query_scale, key_scale;
  Scratch scratch;

  Quantised(bool mxfp8, bool in_pages)
      : paged(in_pages),
        query_scale(DType::kE8M0, {mxfp8 ? kRows : 0, kHeads, 2}),
        key_scale(mxfp8 ? DType::kE8M0 : DType::kF32, {12, mxfp8 ? 2 : 1}) {}

  std::vector<std::string> messages() {
    const bool mxfp8 = key_scale.view().dtype == DType::kE8M0;
    const Tensor scale = paged ? key_scale.view().reshape({4, 3, mxfp8 ? 2 : 1}) : key_scale.view();
    const KeyView keys =
        paged ? KeyView(k.view().reshape({4, 3, 64}), table, request) : KeyView(k.view());
    IndexScoresArgs a = {q, keys, w, starts, ends, true, scores};
    IndexTopkArgs b = {q, keys, w, starts, ends, true, ids, lengths, {}};
    if (mxfp8) a.index_query_scale = b.index_query_scale = query_scale;
    a.index_key_scale = b.index_key_scale = mxfp8   ? scale
                                            : paged ? key_scale.view().reshape({4, 3})
                                                    : key_scale.view().reshape({12});
    return {error_of([&] { index_scores(a, scratch.get(index_scores_workspace_bytes(a))); }),
            error_of([&] { index_topk(b, scratch.get(index_topk_workspace_bytes(b))); })};
  }
  void expect(const std::string& rule) {
    const std::vector<std::string> got = messages();
    for (const std::string& message : got) EXPECT_EQ(rule_of(message), rule);
    if (rule.empty()) return;
    EXPECT_EQ(got[0], "[index_scores] " + rule);
    EXPECT_EQ(got[1], "[index_topk] " + rule);
  }
};

TEST(Validation, ScalesOfKeysInFp8) {
  const ValidationGuard on;
  for (const bool paged : {false, true}) {
    // Request 1 has the pages 2, 1, 3; no row sees page 0.
    const std::int64_t key_4 = 4, unseen = paged ? 0 : 11;
    Quantised x(false, paged);  // all scales 0
    x.expect("");
    float* scale = x.key_scale.as<float>();
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -0.5f}) {
      scale[key_4] = bad;
      x.expect(fmt::format(
          "index_key_scale must be finite and not negative, got {} for key 4 of row 0", bad));
      scale[key_4] = 1;
      scale[unseen] = bad;
      x.expect("");
    }
    // The first row that sees the key, whatever the order of the rows.
    scale[key_4] = -1;
    x.ends.as<std::int32_t>()[0] = 3;
    x.expect("index_key_scale must be finite and not negative, got -1 for key 4 of row 1");
    x.ends.as<std::int32_t>()[1] = 4;
    x.expect("");
  }
}

TEST(Validation, ScalesOfMxfp8) {
  const ValidationGuard on;
  for (const bool paged : {false, true}) {
    Quantised x(true, paged);
    x.expect("");
    auto* key = x.key_scale.as<std::uint8_t>();
    auto* query = x.query_scale.as<std::uint8_t>();
    const std::int64_t key_7 = paged ? 3 * 3 + 1 : 7;  // page 3, slot 1
    key[2 * key_7 + 1] = 254;
    x.expect("");
    key[2 * key_7 + 1] = 255;
    x.expect("index_key_scale must be a power of two, got 255 (NaN) for key 7 group 1 of row 0");
    key[2 * key_7 + 1] = 0;
    query[(2 * kHeads + 1) * 2] = 255;  // row 2 sees nothing
    x.expect("");
    query[(1 * kHeads + 1) * 2] = 255;
    x.expect("index_query_scale must be a power of two, got 255 (NaN) in row 1 head 1 group 0");
  }
}

// Without the mode a NaN scale is data: its key scores NaN.
TEST(Validation, OffAScaleIsData) {
  Quantised x(true, true);
  std::memset(x.key_scale.as<void>(), 0xff, static_cast<std::size_t>(x.key_scale.bytes()));
  x.expect("");
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
