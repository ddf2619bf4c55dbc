#include <tenure/core/part.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <sstream>
#include <thread>
#include <vector>

namespace tenure {
namespace {

Part part(std::string name) {
  return {
      .name = std::move(name),
      .kinds = {OwnerKind::host_copy},
      .stats = [] { return std::vector<std::pair<std::string, int64_t>>{{"moved_bytes", 4096}}; },
      .dump = [](std::ostream& out) { out << "state\n"; }};
}

TEST(Part, IsFoundByNameWhileItIsRegistered) {
  EXPECT_EQ(part_named("offload"), nullptr);
  {
    const auto registration = register_part(part("offload"));
    const auto found = part_named("offload");
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->stats()[0].second, 4096);
    std::ostringstream out;
    found->dump(out);
    EXPECT_EQ(out.str(), "state\n");
  }
  EXPECT_EQ(part_named("offload"), nullptr);
}

TEST(Part, TheyComeInOrderOfRegistration) {
  const auto a = register_part(part("b first"));
  const auto b = register_part(part("a second"));
  std::vector<std::string> names;
  for (const auto& known : parts()) {
    names.push_back(known->name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"b first", "a second"}));
}

TEST(Part, ASecondOfTheSameNameIsRefused) {
  const auto registration = register_part(part("offload"));
  EXPECT_THROW(static_cast<void>(register_part(part("offload"))), InputError);
  EXPECT_EQ(parts().size(), 1);
}

TEST(Part, ABadNameIsRefused) {
  EXPECT_THROW(static_cast<void>(register_part(part(""))), InputError);
  EXPECT_THROW(static_cast<void>(register_part(part("a\nb"))), InputError);
  EXPECT_TRUE(parts().empty());
}

TEST(Part, MovingARegistrationKeepsIt) {
  PartRegistration kept;
  {
    auto registration = register_part(part("offload"));
    kept = std::move(registration);
  }
  EXPECT_NE(part_named("offload"), nullptr);
}

TEST(Part, AReplacedRegistrationEnds) {
  auto registration = register_part(part("first"));
  registration = register_part(part("second"));
  EXPECT_EQ(part_named("first"), nullptr);
  EXPECT_NE(part_named("second"), nullptr);
}

TEST(Part, WhoAsksKeepsThePartForItsCall) {
  auto registration = register_part(part("offload"));
  const auto asked = part_named("offload");
  registration = PartRegistration();
  EXPECT_EQ(asked->stats().size(), 1);
}

TEST(Part, MayComeAndGoOnManyThreads) {
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < 200; ++i) {
          const auto mine = register_part(part("part " + std::to_string(t)));
          for (const auto& known : parts()) {
            EXPECT_EQ(known->stats().size(), 1);
          }
        }
      });
    }
  }
  EXPECT_TRUE(parts().empty());
}

}  // namespace
}  // namespace tenure
