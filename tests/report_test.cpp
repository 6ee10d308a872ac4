// The report of a demo run: a whole page without outside resources, safe for any bytes, and the
// summary that scripts read.
#include "train/report.h"

#include "tests/files.h"
#include "tests/tiny_run.h"
#include "train/svg.h"

namespace winnow::train {
namespace {

class ReportTest : public FolderTest {
 protected:
  Report make(const nlohmann::json& changes = {}) {
    const std::string text = write("text.txt", tiny_text(3000));
    nlohmann::json config = tiny_run(text, folder_ / "out");
    config["validate_every"] = 3;
    if (!changes.is_null()) config.merge_patch(changes);
    Trainer trainer(read_train_config(config), Begin::kNew);
    EXPECT_TRUE(trainer.run({}));
    Report report;
    report.config = trainer.config();
    report.parameters = trainer.model().parameters().elements();
    report.metrics = read_metrics(trainer.metrics_path());
    using attention::AttentionMode;
    report.dense = evaluate(trainer.model(), trainer.data(), AttentionMode::kDense, 4, false);
    report.sparse = evaluate(trainer.model(), trainer.data(), AttentionMode::kSparse, 4, true);
    report.train_seconds = 61.5;
    report.tokens_per_second = 1000;
    report.picture = picture_selection(trainer.model(), trainer.data(), 1, 8);
    report.prompt = "<script>&";
    report.generated_text = "\xff\x01 \"grain\" </pre>";
    return report;
  }
};

TEST_F(ReportTest, ThePageStandsAloneAndEscapesItsText) {
  const Report report = make();
  const std::string page = report_html(report);
  EXPECT_FALSE(has(page, "http"));
  EXPECT_FALSE(has(page, "<script"));
  EXPECT_FALSE(has(page, "nan"));
  EXPECT_TRUE(has(page, "&lt;script&gt;&amp;"));
  EXPECT_TRUE(has(page, "\xc2\xb7\xc2\xb7 &quot;grain&quot; &lt;/pre&gt;"));
  EXPECT_TRUE(has(page, fmt::format("{:.3f}", report.sparse.bits_per_byte)));
  const auto count = [&](const std::string& part) {
    int n = 0;
    for (std::size_t at = page.find(part); at != std::string::npos; at = page.find(part, at + 1)) {
      ++n;
    }
    return n;
  };
  EXPECT_EQ(count("<svg"), count("</svg>"));
  EXPECT_EQ(count("<svg"), 3 + 2);  // loss, divergence, layers; a picture of each layer
  EXPECT_EQ(count("<div"), count("</div>"));
}

// Two more charts, in which a layer that reuses indices has no line of its own selection.
TEST_F(ReportTest, TheHealthOfIndexersIsDrawnWhereItWasMeasured) {
  Report report = make({{"health_every", 2}, {"model", {{"topk_freq", 2}}}});
  const std::string page = report_html(report);
  for (nlohmann::json& line : report.metrics) line.erase("health");
  EXPECT_FALSE(has(report_html(report), "The indexers while they trained"));
  EXPECT_TRUE(has(page, "selected 2 steps before"));
  EXPECT_FALSE(has(page, "nan"));
  const std::string share = page.substr(page.find("The indexers while they trained"));
  const std::string caught = share.substr(0, share.find("</svg>")),
                    kept = share.substr(share.find("</svg>") + 6);
  EXPECT_TRUE(has(caught, ">layer 1<"));
  EXPECT_TRUE(has(kept.substr(0, kept.find("</svg>")), ">layer 0<"));
  EXPECT_FALSE(has(kept.substr(0, kept.find("</svg>")), ">layer 1<"));
}

TEST_F(ReportTest, TheSummaryHoldsWhatWasMeasured) {
  const Report report = make();
  const nlohmann::ordered_json summary = summary_json(report);
  EXPECT_EQ(summary.at("dense_bits_per_byte").get<double>(), report.dense.bits_per_byte);
  EXPECT_EQ(summary.at("sparse_bits_per_byte").get<double>(), report.sparse.bits_per_byte);
  EXPECT_EQ(summary.at("keys_read_fraction").get<double>(), 0.25);
  EXPECT_EQ(summary.at("train_seconds").get<double>(), 61.5);
  const auto& mass = report.sparse.attention_mass_caught;
  EXPECT_DOUBLE_EQ(summary.at("attention_mass_caught").get<double>(), (mass[0] + mass[1]) / 2);
  EXPECT_EQ(summary.at("generated_text"), "\xc2\xb7\xc2\xb7 \"grain\" </pre>");
  EXPECT_TRUE(has(summary_table(report), "1:02"));
}

TEST_F(ReportTest, ThePictureShowsTheSelectionOfTheLastRows) {
  const SelectionPicture picture = make().picture;
  EXPECT_EQ(picture.text.size(), 24u);
  EXPECT_EQ(picture.first_row, 16);
  ASSERT_EQ(picture.layers.size(), 2u);
  for (const auto& layer : picture.layers) {
    ASSERT_EQ(layer.size(), 8u);
    for (std::size_t r = 0; r < layer.size(); ++r) {
      EXPECT_EQ(layer[r].size(), 6u);
      EXPECT_LE(layer[r].back(), 16 + static_cast<int>(r));
    }
  }
}

TEST(Svg, ChartsOfNothingAndOfConstantsAreDrawn) {
  EXPECT_FALSE(has(line_chart({}, {}, "x", "y"), "nan"));
  EXPECT_FALSE(has(line_chart({{"a", "flat", {1, 2}, {3, 3}, false}}, {}, "x", "y"), "nan"));
  EXPECT_FALSE(has(line_chart({{"a", "one", {1}, {0}, true}}, {}, "x", "y"), "nan"));
  const std::vector<int> widths = {4};
  EXPECT_TRUE(has(cell_picture({{0, 1, 3}}, widths, 4), "M0 0h2v3h-2zM3 0h1v3h-1z"));
}

}  // namespace
}  // namespace winnow::train
