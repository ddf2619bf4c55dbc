#include <tenure/core/where.h>

#include <gtest/gtest.h>

#include <thread>

namespace tenure {
namespace {

TEST(Where, IsNowhereToBeginWith) {
  EXPECT_EQ(where().phase, Phase::other);
  EXPECT_EQ(where().module, NameId::none);
  EXPECT_EQ(where().op, NameId::none);
}

TEST(Where, IsPutBackWhenABlockEnds) {
  {
    const At outer({.phase = Phase::forward, .module = intern("mlp"), .op = NameId::none});
    {
      const At inner({.phase = Phase::backward, .module = intern("mlp.0"), .op = intern("mm")});
      EXPECT_EQ(where().phase, Phase::backward);
      EXPECT_EQ(name_of(where().module), "mlp.0");
      EXPECT_EQ(name_of(where().op), "mm");
    }
    EXPECT_EQ(where().phase, Phase::forward);
    EXPECT_EQ(name_of(where().module), "mlp");
  }
  EXPECT_EQ(where().phase, Phase::other);
}

TEST(Where, IsEachThreadsOwn) {
  const At here({.phase = Phase::forward, .module = NameId::none, .op = NameId::none});
  std::thread([] { EXPECT_EQ(where().phase, Phase::other); }).join();
}

TEST(Where, PhasesHaveNames) {
  EXPECT_STREQ(phase_name(Phase::other), "other");
  EXPECT_STREQ(phase_name(Phase::forward), "forward");
  EXPECT_STREQ(phase_name(Phase::backward), "backward");
  EXPECT_STREQ(phase_name(Phase::optimizer), "optimizer");
}

}  // namespace
}  // namespace tenure
