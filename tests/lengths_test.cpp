// D8: rows of every awkward length, drawn at random, through every operation that reads ranges or
// lists. Each draw must end within ten seconds (a watchdog ends the process), and its selections
// are compared with the oracle.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "bench/data.h"
#include "tests/attention_call.h"
#include "tests/each.h"
#include "tests/scored_keys.h"
#include "tests/selection_oracle.h"
#include "winnow/attention_target.h"
#include "winnow/index_loss.h"
#include "winnow/select_topk.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;

char expired[200];

// Ends the process if it lives for longer than ten seconds.
class Watchdog {
 public:
  explicit Watchdog(const std::string& draw) {
    std::strncpy(expired, ("ten seconds are over: " + draw + "\n").c_str(), sizeof expired - 1);
    std::signal(SIGALRM, [](int) {
      [[maybe_unused]] const auto n = write(STDERR_FILENO, expired, std::strlen(expired));
      _exit(1);
    });
    alarm(10);
  }
  ~Watchdog() { alarm(0); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
};

struct Draw {
  std::int64_t k, page;
  Floats keys;
  Ids from, to;  // as given: a length of -1 is a range that ends before it starts

  explicit Draw(bench::Random& random) {
    constexpr std::int64_t kCounts[] = {1, 2, 7, 16, 33, 64, 100}, kPages[] = {1, 3, 16, 64};
    k = kCounts[random.below(7)];
    page = kPages[random.below(4)];
    const std::int64_t lengths[] = {-1, 0, 1, k - 1, k, k + 1, page - 1, page, page + 1},
                       most = std::max(k, page) + 1, count = most + random.below(40);
    for (std::int64_t j = 0; j < count; ++j)
      keys.push_back(static_cast<float>(std::nearbyint(4 * random.gauss())));  // with ties
    const std::int64_t rows = 1 + random.below(40);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t length = lengths[random.below(9)], start = random.below(count - most + 1);
      from.push_back(static_cast<std::int32_t>(start));
      to.push_back(static_cast<std::int32_t>(start + length));
    }
  }
  std::string text() const {
    return "k " + std::to_string(k) + " page " + std::to_string(page) + " rows " +
           std::to_string(from.size()) + " keys " + std::to_string(keys.size());
  }
  std::vector<Ids> want() const {
    std::vector<Ids> all;
    for (std::size_t i = 0; i < from.size(); ++i) {
      Floats seen;
      for (std::int32_t j = from[i]; j < to[i]; ++j)
        seen.push_back(keys[static_cast<std::size_t>(j)]);
      all.push_back(test::best_ids(seen, k, from[i]));
    }
    return all;
  }
};

void expect_selections(const Draw& draw, const std::vector<Ids>& want) {
  const auto rows = static_cast<std::int64_t>(draw.from.size()),
             count = static_cast<std::int64_t>(draw.keys.size());
  for (const std::int64_t page : {std::int64_t{0}, draw.page}) {
    const ScoredKeys keyed(draw.keys, draw.from, draw.to, draw.k, page);
    for_each_implementation(keyed.args,
                            [&](const std::string&) { EXPECT_EQ(keyed.run(), want) << page; });
  }
  // Scores that are given: column t of a row is key from + t.
  const Array scores(DType::kF32, {rows, count}), ids(DType::kI32, {rows, draw.k}),
      lengths(DType::kI32, {rows});
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t j = draw.from[static_cast<std::size_t>(i)] + t;
      scores.as<float>()[i * count + t] = j < count ? draw.keys[static_cast<std::size_t>(j)] : NAN;
    }
  }
  const SelectTopkArgs args = {scores,
                               make_tensor(draw.from.data(), DType::kI32, {rows}),
                               make_tensor(draw.to.data(), DType::kI32, {rows}),
                               ids,
                               lengths,
                               {}};
  for_each_implementation(args, [&](const std::string&) {
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int32_t* id = ids.as<std::int32_t>() + i * draw.k;
      EXPECT_EQ(Ids(id, id + lengths.as<std::int32_t>()[i]), want[static_cast<std::size_t>(i)]);
    }
  });
}

// What reads the lists: every implementation ends, and rows that selected nothing are empty.
void expect_consumers(const Draw& draw, const std::vector<Ids>& want) {
  const auto rows = static_cast<std::int64_t>(draw.from.size()),
             count = static_cast<std::int64_t>(draw.keys.size());
  AttentionCall x(rows, count, 2, 1, 8, 8);
  Ids all;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto r = static_cast<std::size_t>(i);
    x.see(i, draw.from[r], draw.to[r]);
    for (std::int64_t s = 0; s < draw.k; ++s) {
      const auto at = static_cast<std::size_t>(s);
      all.push_back(at < want[r].size() ? want[r][at] : -1);
    }
  }
  x.list(draw.k, all);
  with_each(explain(x.forward_args()), [&](const std::string&) {
    x.forward();
    for (std::int64_t i = 0; i < rows; ++i)
      EXPECT_EQ(std::isinf(at(x.lse, 2 * i)), want[static_cast<std::size_t>(i)].empty()) << i;
  });
  with_each(explain(x.backward_args()), [&](const std::string&) {
    x.backward();
    for (std::int64_t i = 0; i < rows; ++i) {
      double size = 0;
      for (std::int64_t c = 0; c < 16; ++c) size += std::abs(at(x.d_query, i * 16 + c));
      const std::size_t selected = want[static_cast<std::size_t>(i)].size();
      EXPECT_TRUE(selected != 0 || size == 0) << i;
      EXPECT_TRUE(selected <= 1 || size > 0) << i;  // of one key the softmax is constant
    }
  });
  const Array target(DType::kF32, {rows, draw.k}), scores(DType::kF32, {rows, draw.k}),
      kl(DType::kF32, {rows}), d_scores(DType::kF32, {rows, draw.k});
  const AttentionTargetArgs a = {x.query, x.key, x.lse, x.ids, x.starts, x.ends, x.scale, target};
  for_each_implementation(a, [&](const std::string&) {
    Scratch scratch;
    attention_target(a, scratch.get(attention_target_workspace_bytes(a)));
  });
  const IndexLossArgs b = {target, scores, x.ids, x.starts, x.ends, 1, kl, d_scores};
  for_each_implementation(b, [&](const std::string&) {
    Scratch scratch;
    index_loss(b, scratch.get(index_loss_workspace_bytes(b)));
    for (std::int64_t i = 0; i < rows; ++i) EXPECT_TRUE(std::isfinite(at(kl, i))) << i;
  });
}

TEST(Lengths, D8EveryDrawEndsAndSelectsWhatTheOracleSays) {
  bench::Random random(41);
  for (int n = 0; n < 60; ++n) {
    const Draw draw(random);
    const Watchdog watchdog(draw.text());
    SCOPED_TRACE(draw.text());
    const ThreadsGuard threads(1 + n % 3 * 8);
    const std::vector<Ids> want = draw.want();
    expect_selections(draw, want);
    expect_consumers(draw, want);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace winnow::testing
