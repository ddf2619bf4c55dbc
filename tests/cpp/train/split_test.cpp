#include <tenure/train/split.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <string>

namespace tenure::train {
namespace {

using Ranges = std::vector<LayerRange>;

TEST(SplitLayers, IntoOneStageIsTheWholeModel) {
  EXPECT_EQ(split_layers(12, 1), (Ranges{{0, 12}}));
}

TEST(SplitLayers, EvenlyWhereItGoes) {
  EXPECT_EQ(split_layers(12, 3), (Ranges{{0, 4}, {4, 8}, {8, 12}}));
}

TEST(SplitLayers, TheFirstStagesTakeWhatIsLeftOver) {
  EXPECT_EQ(split_layers(11, 4), (Ranges{{0, 3}, {3, 6}, {6, 9}, {9, 11}}));
}

TEST(SplitLayers, OneLayerAStage) { EXPECT_EQ(split_layers(2, 2), (Ranges{{0, 1}, {1, 2}})); }

std::string refusal(int64_t layers, int64_t stages) {
  try {
    split_layers(layers, stages);
  } catch (const InputError& error) {
    return error.what();
  }
  return "none";
}

TEST(SplitLayers, MoreStagesThanLayersIsRefused) {
  EXPECT_EQ(refusal(4, 5), "more stages than layers: 5 stages, and the model has 4 layers.");
  EXPECT_EQ(refusal(1, 2), "more stages than layers: 2 stages, and the model has 1 layer.");
}

TEST(SplitLayers, NoStageAtAllIsRefused) {
  EXPECT_EQ(refusal(4, 0), "a model is split into 1 stage or more, not 0.");
}

}  // namespace
}  // namespace tenure::train
