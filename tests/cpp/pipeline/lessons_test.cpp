#include <tenure/pipeline/lessons.h>

#include <gtest/gtest.h>

#include <initializer_list>
#include <vector>

namespace tenure::pipeline {
namespace {

// One rank with one stage and two microbatches: a forward and a backward of each.
class LessonsTest : public testing::Test {
 protected:
  void begin(std::initializer_list<uint64_t> shapes) {
    lessons_.begin();
    for (const auto number : shapes) {
      lessons_.narrow(number);
    }
  }
  bool end(int64_t bytes) { return lessons_.end({{.whole = bytes, .waiting = 0}}); }
  bool step(std::initializer_list<uint64_t> shapes, int64_t bytes) {
    begin(shapes);
    return end(bytes);
  }

  Schedule schedule_ = make_schedule("gpipe", 1, 2);
  Lessons lessons_{schedule_, 0};
};

TEST_F(LessonsTest, NothingIsKnownAtFirst) {
  lessons_.begin();
  EXPECT_TRUE(lessons_.is_new());
  EXPECT_TRUE(lessons_.bytes().empty());
  EXPECT_EQ(lessons_.highest(), 0);
}

TEST_F(LessonsTest, TheSecondStepSettlesAndTheThirdDoesNotTeach) {
  EXPECT_TRUE(step({1, 2, 3, 4}, 10));
  EXPECT_EQ(lessons_.highest(), 20);
  begin({1, 2});
  EXPECT_FALSE(lessons_.is_settled());
  EXPECT_EQ(lessons_.whole(0), 10);
  EXPECT_EQ(lessons_.level(0), 10);
  EXPECT_EQ(lessons_.level(1), 20);
  EXPECT_FALSE(step({1, 2, 3, 4}, 12));
  begin({1});
  EXPECT_TRUE(lessons_.is_settled());
  EXPECT_EQ(lessons_.whole(0), 12);
  EXPECT_FALSE(step({1, 2, 3, 4}, 99));
  EXPECT_EQ(lessons_.bytes()[0].whole, 12);
}

TEST_F(LessonsTest, EachShapeHasItsFigures) {
  EXPECT_TRUE(step({1, 1, 1, 1}, 10));
  EXPECT_TRUE(step({2, 2, 2, 2}, 30));
  EXPECT_FALSE(step({1, 1, 1, 1}, 11));
  EXPECT_FALSE(step({2, 2, 2, 2}, 31));
  begin({1});
  EXPECT_EQ(lessons_.whole(0), 11);
  begin({2});
  EXPECT_EQ(lessons_.whole(0), 31);
  begin({3});
  EXPECT_TRUE(lessons_.is_new());
}

TEST_F(LessonsTest, WhileItIsLikeSeveralTheMostOfThemIsAllowed) {
  EXPECT_TRUE(step({1, 2, 3, 4}, 10));
  EXPECT_TRUE(step({1, 2, 5, 6}, 30));
  EXPECT_FALSE(step({1, 2, 5, 6}, 30));
  begin({1, 2});
  EXPECT_FALSE(lessons_.is_settled());
  EXPECT_EQ(lessons_.whole(0), 30);
  lessons_.narrow(3);
  EXPECT_EQ(lessons_.whole(0), 10);
  lessons_.narrow(9);
  EXPECT_TRUE(lessons_.is_new());
  EXPECT_TRUE(end(40));
}

TEST_F(LessonsTest, OneThatDidNotEndTeachesNothing) {
  begin({1, 2});
  EXPECT_TRUE(step({1, 2, 3, 4}, 10));
  begin({1, 2});
  begin({1, 2});
  EXPECT_FALSE(lessons_.is_settled());
}

TEST_F(LessonsTest, TheLeastRecentlyUsedIsForgotten) {
  const auto of = [&](uint64_t number) { return step({number, 0, 0, 0}, 10); };
  for (uint64_t number = 0; number < Lessons::kMost; ++number) {
    EXPECT_TRUE(of(number));
  }
  EXPECT_FALSE(of(0));
  EXPECT_TRUE(of(Lessons::kMost));
  EXPECT_FALSE(of(0));
  EXPECT_FALSE(of(2));
  EXPECT_TRUE(of(1));
}

}  // namespace
}  // namespace tenure::pipeline
