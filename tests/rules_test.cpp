// Rules of a configuration: the first one throws, or all are noted.
#include "base/rules.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/config.h"
#include "tests/tiny_models.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using nlohmann::json;

std::vector<std::string> broken_rules(const json& object) {
  Rules rules(Rules::Mode::kCollect);
  model::read_model_config(object, rules);
  std::vector<std::string> texts;
  for (const Violation& v : rules.violations()) texts.push_back(v.text());
  return texts;
}

TEST(Rules, TheFirstThrowsOrAllAreNoted) {
  Rules strict;
  try {
    strict.require(false, "a.b", 3, 4, "must be even, at most {}", 8);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[config] a.b must be even, at most 8, got 3");
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
  }
  Rules all(Rules::Mode::kCollect);
  all.require(true, "a", 1, 1, "is well");
  EXPECT_TRUE(all.kept());
  all.require(false, "a.b", 3, 4, "must be even");
  all.require(false, "a.c", "", "", "is required");
  ASSERT_EQ(all.violations().size(), 2u);
  EXPECT_EQ(all.violations()[0].instead, "4");
  EXPECT_EQ(all.violations()[1].text(), "a.c is required");
}

// What a rule says of a value that could not be read would be about nothing.
TEST(Rules, NothingFollowsFromWhatCouldNotBeRead) {
  Rules all(Rules::Mode::kCollect);
  all.unread("a.b");
  all.require(false, "a.b", 0, 1, "must be positive");
  all.require(false, "a.b.c", 0, 1, "must be positive");
  all.require(false, "a.d", 5, 0, "must be at most a.b = 0");
  EXPECT_TRUE(all.kept());
  all.require(false, "a.bc", 0, 1, "must be positive");
  all.require(false, "a", 0, 1, "must be positive");
  EXPECT_EQ(all.violations().size(), 2u);
}

TEST(Rules, AModelIsToldEverythingThatIsWrongAtOnce) {
  json object = model::write_model_config(model::tiny_model(model::tiny_mla()));
  EXPECT_TRUE(broken_rules(object).empty());
  object["layers"] = 0;
  object["layerz"] = 2;
  object["topk_freq"] = 0;
  object["attention"].erase("heads");
  object["attention"]["kv_heads"] = 2;
  object["attention"]["qk_rope_head_dim"] = 3;
  object["attention"]["indexer"]["topk"] = "many";
  object["attention"]["indexer"]["index_dim"] = 12;
  EXPECT_EQ(broken_rules(object),
            (std::vector<std::string>{
                "attention.heads is required and has no default",
                "attention.kv_heads belongs to kind \"gqa\", kind is \"mla\", got 2",
                "attention.indexer.topk must be an integer of 64 bit, got \"many\"",
                "\"layerz\" is not an option; did you mean layers?",
                "layers must be from 1 to 1024, got 0",
                "attention.qk_rope_head_dim must be even, since RoPE turns pairs, got 3",
                "attention.indexer.index_dim must be a power of two with "
                "attention.indexer.hadamard, got 12",
                "topk_freq must be from 1 to 1024, got 0"}));
  object.erase("attention");
  for (const std::string& text : broken_rules(object)) {
    EXPECT_TRUE(text.find("attention.") == std::string::npos) << text;
  }
}

}  // namespace
}  // namespace winnow
