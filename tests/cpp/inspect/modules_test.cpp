#include <tenure/inspect/modules.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace tenure::inspect {
namespace {

bool is_unnamed(uint32_t number) {
  return std::ranges::any_of(unnamed_modules(),
                             [&](const auto& unnamed) { return unnamed.first == number; });
}

TEST(Modules, NullIsNoModule) {
  EXPECT_EQ(module_number(nullptr), 0);
  EXPECT_EQ(module_name(0), "");
}

TEST(Modules, AnAddressKeepsItsNumber) {
  const std::array<char, 2> modules{};
  const auto first = module_number(modules.data());
  const auto second = module_number(&modules[1]);
  EXPECT_NE(first, 0);
  EXPECT_NE(first, second);
  EXPECT_EQ(module_number(modules.data()), first);
  forget_module(modules.data());
  forget_module(&modules[1]);
}

TEST(Modules, AreUnnamedWithTheirAddressUntilNamed) {
  const char module = 0;
  const auto number = module_number(&module);
  const auto unnamed = unnamed_modules();
  EXPECT_NE(std::ranges::find(unnamed, std::pair<uint32_t, const void*>(number, &module)),
            unnamed.end());
  EXPECT_EQ(module_name(number), "");
  name_module(number, "model.layers.3.mlp");
  EXPECT_EQ(module_name(number), "model.layers.3.mlp");
  EXPECT_FALSE(is_unnamed(number));
  forget_module(&module);
}

TEST(Modules, AnEmptyNameIsFinal) {
  const char module = 0;
  const auto number = module_number(&module);
  name_module(number, "");
  EXPECT_FALSE(is_unnamed(number));
  forget_module(&module);
}

TEST(Modules, AnotherOneAtTheAddressIsAnotherAndTheFirstKeepsItsName) {
  const char module = 0;
  const auto first = module_number(&module);
  name_module(first, "first");
  forget_module(&module);
  const auto second = module_number(&module);
  EXPECT_NE(second, first);
  EXPECT_EQ(module_name(second), "");
  EXPECT_EQ(module_name(first), "first");
  name_module(second, "second");
  forget_module(&module);
}

TEST(Modules, NumbersNeverGivenHaveNoName) {
  name_module(1'000'000, "nobody");
  EXPECT_EQ(module_name(1'000'000), "");
}

}  // namespace
}  // namespace tenure::inspect
