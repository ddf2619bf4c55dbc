#include <tenure/pipeline/csv.h>

#include "says.h"
#include <tenure/core/error.h>
#include <tenure/pipeline/check.h>

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>

namespace tenure::pipeline {
namespace {

using std::string_view_literals::operator""sv;

// What is said of it; empty if it is a schedule.
std::string refusal(std::string_view csv) {
  try {
    from_csv(csv, "mine");
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

const std::string kTwoRanks = "0F0,0B0\n1F0,1B0\n";

TEST(Csv, WhatIsWrittenIsReadAgain) {
  for (const auto& name : schedule_names()) {
    const auto schedule = make_schedule(name, 3, 6);
    const auto again = from_csv(to_csv(schedule), name);
    EXPECT_EQ(again.name, schedule.name);
    EXPECT_EQ(again.microbatches, schedule.microbatches) << name;
    EXPECT_EQ(again.rank_of_stage, schedule.rank_of_stage) << name;
    EXPECT_EQ(again.actions, schedule.actions) << name;
  }
}

TEST(Csv, IsARowARankAndACellAnAction) {
  EXPECT_EQ(to_csv(make_schedule("zb-h1", 2, 2)),
            "0F0,0F1,0I0,0W0,0I1,0W1\n"
            "1F0,1I0,1F1,1I1,1W0,1W1\n");
}

TEST(Csv, EmptyCellsAreWaiting) {
  EXPECT_EQ(to_csv(from_csv("0F0,,,0B0\n,1F0,1B0,\n", "")), kTwoRanks);
}

TEST(Csv, BlanksAreLeftOut) {
  EXPECT_EQ(to_csv(from_csv(" 0F0 ,\t0B0 \n 1F0,  1B0", "")), kTwoRanks);
}

TEST(Csv, EmptyLinesAreNoRanks) {
  EXPECT_EQ(to_csv(from_csv("\n0F0,0B0\n\n \n1F0,1B0\n\n", "")), kTwoRanks);
}

TEST(Csv, LinesMayEndAsOnWindows) {
  EXPECT_EQ(to_csv(from_csv("0F0,0B0\r\n1F0,1B0\r\n\r\n", "")), kTwoRanks);
}

TEST(Csv, CellsMayBeQuoted) {
  EXPECT_EQ(to_csv(from_csv("\"0F0\",\"0B0\"\r\n\"1F0\",\"\",1B0\r\n", "")), kTwoRanks);
}

TEST(Csv, OverlappedActionsAreOneAfterTheOther) {
  const auto schedule = from_csv("0F0,0F1,(0B0;0F2)OVERLAP_F_B,\"(0B1; 0B2)OVERLAP_F_B\"", "");
  EXPECT_EQ(to_csv(schedule), "0F0,0F1,0B0,0F2,0B1,0B2\n");
}

TEST(Csv, WhatFollowsFromAScheduleIsPassedOver) {
  EXPECT_EQ(to_csv(from_csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
                            "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n",
                            "")),
            kTwoRanks);
}

TEST(Csv, AScheduleThatCannotRunIsRefusedWithItsCell) {
  EXPECT_TRUE(says(refusal("0F0,0B0\n1B0,1F0"), "rank 1, cell 0 (1B0)"));
  EXPECT_TRUE(says(refusal("0F0,0B0\n1F0,1F0,1B0"), "rank 1, cell 1 (1F0)"));
  EXPECT_TRUE(says(refusal("0F0,0B0\n1F0,0B0"), "rank 1, cell 1 (0B0)"));
}

TEST(Csv, StagesThatNobodyHasAreNamed) {
  EXPECT_TRUE(says(refusal("0F0,0B0\n2F0,2B0"), "no rank has anything of stage 1"));
}

TEST(Csv, NothingIsNoSchedule) {
  for (const auto* csv : {"", "\n", "\r\n\r\n", ",,,\n,,", "0SEND_F0\n1RECV_F0"}) {
    EXPECT_TRUE(says(refusal(csv), "no action")) << csv;
  }
}

TEST(Csv, ACellThatIsNoActionIsNamedWithItsRow) {
  for (const auto* cell : {"F0",        "1F",
                           "1",         "F",
                           "1X0",       "1f0",
                           "1FB0",      "1F0x",
                           "1 F0",      "1F-1",
                           "-1F0",      "1F0.5",
                           "+1F0",      "0x1F0",
                           "SEND_F",    "1SEND_X0",
                           "1SEND_Fx0", "None",
                           "é",         "1F0;1B0",
                           "(1F0;1B0)", "(1F0;1B0)OVERLAP",
                           "(1F0;1B0",  "()x",
                           "1F0)",      "((1F0)OVERLAP_F_B"}) {
    const auto said = refusal("0F0,0B0\n1F0," + std::string(cell) + "\n");
    EXPECT_TRUE(says(said, "row 1, cell 1", "'")) << cell;
  }
}

TEST(Csv, EmptyCellsCountInTheNumberOfACell) {
  EXPECT_TRUE(says(refusal("0F0,,,x"), "row 0, cell 3: 'x'"));
}

TEST(Csv, ActionsThatOverlapAreOneCell) {
  EXPECT_TRUE(says(refusal("(0F0;0F1)OVERLAP_F_B,x"), "row 0, cell 1: 'x'"));
}

TEST(Csv, AnActionInsideACellIsNamedWithThatCell) {
  EXPECT_TRUE(says(refusal("0F0,(0F1;x)OVERLAP_F_B"), "row 0, cell 1: 'x'"));
}

TEST(Csv, ACellOfAScheduleThatCannotRunIsCountedAsInTheFile) {
  EXPECT_TRUE(says(refusal("0F0,,,0B0\n,1B0,1F0,"), "rank 1, cell 1 (1B0)"));
}

TEST(Csv, WhatASpreadsheetPutsInFrontIsNoPartOfACell) {
  const auto csv = to_csv(make_schedule("1f1b", 2, 4));
  EXPECT_EQ(to_csv(from_csv("\xef\xbb\xbf" + csv, "")), csv);
}

TEST(Csv, AZeroByteDoesNotCutWhatIsSaid) {
  EXPECT_TRUE(says(refusal("0F0,x\0y"sv), "is no action"));
}

TEST(Csv, NumbersBeyondAnyScheduleAreNoActions) {
  for (const auto* cell : {"1048576F0", "0F1048576", "4294967296F0", "0F4294967296",
                           "99999999999999999999999F0", "0F99999999999999999999999"}) {
    EXPECT_TRUE(says(refusal("0F0,0B0," + std::string(cell)), "row 0, cell 2")) << cell;
  }
}

TEST(Csv, AFewActionsOfAHugeScheduleTakeNoMemory) {
  EXPECT_TRUE(says(refusal("0F0,0F1048575"), "most are missing"));
  EXPECT_TRUE(says(refusal("0F0,1048575F0"), "no rank has anything of stage 1"));
}

TEST(Csv, ALongCellIsShownByItsFront) {
  const auto said = refusal("0F0," + std::string(100'000, 'x'));
  EXPECT_LT(said.size(), 300);
  EXPECT_TRUE(says(said, "row 0, cell 1: 'xxxx"));
}

TEST(Csv, ALongCellIsNotCutInsideACharacter) {
  std::string cell = "x";
  for (int i = 0; i < 100; ++i) {
    cell += "é";
  }
  const auto said = refusal(cell);
  EXPECT_TRUE(says(said, "é'")) << "39 bytes, as the 40th is the first half of one";
}

TEST(Csv, DamagedTextIsAScheduleThatRunsOrAnInputError) {
  std::mt19937 random(20260101);
  const auto pick = [&](size_t below) {
    return std::uniform_int_distribution<size_t>(0, below - 1)(random);
  };
  constexpr auto kAlphabet = "0123456789FBIW,;()\n\r\"\t -_OVERLAP_F_BSEND\0\xff\xc3"sv;
  int good = 0;
  for (int i = 0; i < 4000; ++i) {
    auto csv = to_csv(make_schedule(schedule_names()[pick(schedule_names().size())], 2, 4));
    for (auto left = 1 + pick(3); left > 0; --left) {
      const auto at = pick(csv.size());
      switch (pick(3)) {
        case 0:
          csv[at] = kAlphabet[pick(kAlphabet.size())];
          break;
        case 1:
          csv.erase(at, 1 + pick(4));
          break;
        default:
          csv.insert(at, 1, kAlphabet[pick(kAlphabet.size())]);
      }
    }
    try {
      check(from_csv(csv, ""));
      ++good;
    } catch (const InputError& error) {
      EXPECT_NE(std::string_view(error.what()), "") << csv;
    }
  }
  EXPECT_GT(good, 0) << "all were refused: the damage is too large to tell anything";
}

}  // namespace
}  // namespace tenure::pipeline
