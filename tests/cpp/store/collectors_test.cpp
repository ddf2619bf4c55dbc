#include <tenure/store/collectors.h>

#include <gtest/gtest.h>

namespace tenure::store {
namespace {

TEST(Collectors, TextSaysWhoFits) {
  EXPECT_EQ(collector_text({.role = "trainer", .rank = 3}), "trainer 3");
  EXPECT_EQ(collector_text({.role = "trainer", .rank = {}}), "any trainer");
  EXPECT_EQ(collector_text({.role = "", .rank = 3}), "rank 3");
  EXPECT_EQ(collector_text({.role = "", .rank = {}}), "anyone");
}

TEST(Collectors, AnEmptyListAndACountOfZeroAreNobody) {
  using enum Collectors::Kind;
  EXPECT_FALSE((Collectors{.kind = anyone, .listed = {}, .count = 0}.nobody()));
  EXPECT_TRUE((Collectors{.kind = listed, .listed = {}, .count = 5}.nobody()));
  EXPECT_FALSE((Collectors{.kind = listed, .listed = {{}}, .count = 0}.nobody()));
  EXPECT_TRUE((Collectors{.kind = counted, .listed = {{}}, .count = 0}.nobody()));
}

}  // namespace
}  // namespace tenure::store
