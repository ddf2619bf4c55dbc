// What holds of every schedule that can run, by name or not, against machines that are too simple
// to be wrong; and that damage to one is found wherever it is.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/bound.h>
#include <tenure/pipeline/check.h>
#include <tenure/pipeline/csv.h>
#include <tenure/pipeline/messages.h>
#include <tenure/pipeline/timeline.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tenure::pipeline {
namespace {

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

class Dice {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  uint32_t below(size_t end) {
    return static_cast<uint32_t>(std::uniform_int_distribution<size_t>(0, end - 1)(random_));
  }
  bool coin() { return below(2) == 0; }

 private:
  std::mt19937 random_;
};

// A result: output of a forward ('F'), gradient of an input ('I') or of weights ('W').
using Result = std::tuple<uint32_t, uint32_t, char>;

std::vector<Result> needs(const Schedule& schedule, const Action& action) {
  const auto [stage, microbatch, kind] = action;
  if (kind == Kind::forward) {
    return stage == 0 ? std::vector<Result>{} : std::vector<Result>{{stage - 1, microbatch, 'F'}};
  }
  if (kind == Kind::weight_backward) {
    return {{stage, microbatch, 'I'}};
  }
  std::vector<Result> out{{stage, microbatch, 'F'}};
  if (stage + 1 < schedule.stages()) {
    out.emplace_back(stage + 1, microbatch, 'I');
  }
  return out;
}

Result result_of(const Action& action) {
  const auto letter = letter_of(action.kind);
  return {action.stage, action.microbatch, letter == 'B' ? 'I' : letter};
}

// The rank that waits for a result, if it is another one than the action's.
std::optional<uint32_t> receiver(const Schedule& schedule, const Action& action) {
  std::optional<uint32_t> stage;
  if (action.kind == Kind::forward && action.stage + 1 < schedule.stages()) {
    stage = action.stage + 1;
  } else if (gives_input_gradient(action.kind) && action.stage > 0) {
    stage = action.stage - 1;
  }
  const auto own = schedule.rank_of_stage[action.stage];
  if (!stage || schedule.rank_of_stage[*stage] == own) {
    return std::nullopt;
  }
  return schedule.rank_of_stage[*stage];
}

// Goes round the ranks for as long as one of them can do something. A send is done when its
// receiver begins the action that needs it; a rank has so many under way to another one in one
// direction, and waits for the oldest.
bool comes_to_its_end(const Schedule& schedule, size_t slots = kNoLimit) {
  std::vector<size_t> at(schedule.ranks());
  std::set<Result> done;
  std::set<Result> taken;
  std::map<std::tuple<uint32_t, uint32_t, char>, std::vector<Result>> sent;
  const auto step = [&](uint32_t rank) {
    if (at[rank] == schedule.actions[rank].size()) {
      return false;
    }
    const auto& action = schedule.actions[rank][at[rank]];
    const auto needed = needs(schedule, action);
    if (!std::ranges::all_of(needed, [&](const Result& one) { return done.contains(one); })) {
      return false;
    }
    const auto before = taken.size();
    std::ranges::copy_if(needed, std::inserter(taken, taken.end()), [&](const Result& one) {
      return std::get<0>(one) != action.stage;  // what is of the stage itself is not sent
    });
    if (const auto to = receiver(schedule, action)) {
      auto& line = sent[{rank, *to, std::get<char>(result_of(action))}];
      const auto oldest =
          std::ranges::find_if(line, [&](const Result& one) { return !taken.contains(one); });
      if (static_cast<size_t>(line.end() - oldest) >= slots) {
        return taken.size() != before;
      }
      line.push_back(result_of(action));
    }
    done.insert(result_of(action));
    ++at[rank];
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      while (step(rank)) {
        moved = true;
      }
    }
  }
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    if (at[rank] != schedule.actions[rank].size()) {
      return false;
    }
  }
  return true;
}

// Stages anywhere, and whichever action can run next.
Schedule random_schedule(Dice& dice) {
  Schedule out;
  const auto ranks = 1 + dice.below(4);
  out.name = "random";
  out.microbatches = 1 + dice.below(4);
  out.actions.resize(ranks);
  for (uint32_t stage = 0; stage < ranks; ++stage) {
    out.rank_of_stage.push_back(stage);
  }
  for (auto more = dice.below(4); more > 0; --more) {
    out.rank_of_stage.push_back(dice.below(ranks));
  }
  for (auto i = out.rank_of_stage.size(); i > 1; --i) {
    std::swap(out.rank_of_stage[i - 1], out.rank_of_stage[dice.below(i)]);
  }
  std::vector<Action> left;
  for (uint32_t stage = 0; stage < out.stages(); ++stage) {
    for (uint32_t microbatch = 0; microbatch < out.microbatches; ++microbatch) {
      left.push_back({stage, microbatch, Kind::forward});
      if (dice.coin()) {
        left.push_back({stage, microbatch, Kind::backward});
      } else {
        left.push_back({stage, microbatch, Kind::input_backward});
        left.push_back({stage, microbatch, Kind::weight_backward});
      }
    }
  }
  std::set<Result> done;
  while (!left.empty()) {
    const auto i = dice.below(left.size());
    const auto action = left[i];
    if (std::ranges::all_of(needs(out, action),
                            [&](const Result& one) { return done.contains(one); })) {
      out.actions[out.rank_of_stage[action.stage]].push_back(action);
      done.insert(result_of(action));
      left.erase(left.begin() + i);
    }
  }
  return out;
}

const std::vector<Schedule>& schedules() {
  static const auto* all = [] {
    auto* out = new std::vector<Schedule>;
    for (const auto& name : schedule_names()) {
      for (const uint32_t ranks : {1, 2, 3, 5}) {
        for (const uint32_t microbatches : {1, 2, 3, 6, 10}) {
          try {
            out->push_back(make_schedule(name, ranks, microbatches));
          } catch (const InputError&) {
            continue;  // it cannot have these sizes
          }
        }
      }
    }
    Dice dice(1);
    for (int i = 0; i < 300; ++i) {
      out->push_back(random_schedule(dice));
    }
    return out;
  }();
  return *all;
}

std::string shown(const Schedule& schedule) { return schedule.name + "\n" + to_csv(schedule); }

TEST(AnySchedule, PassesTheCheck) {
  for (const auto& schedule : schedules()) {
    ASSERT_TRUE(comes_to_its_end(schedule)) << shown(schedule);
    EXPECT_NO_THROW(check(schedule)) << shown(schedule);
  }
}

TEST(AnySchedule, IsTheSameFromItsCsv) {
  for (const auto& schedule : schedules()) {
    const auto again = from_csv(to_csv(schedule), schedule.name);
    EXPECT_EQ(again.actions, schedule.actions) << shown(schedule);
    EXPECT_EQ(again.rank_of_stage, schedule.rank_of_stage) << shown(schedule);
    EXPECT_EQ(again.microbatches, schedule.microbatches) << shown(schedule);
  }
}

TEST(AnySchedule, RunsEachActionAsSoonAsItCan) {
  const Costs costs{.forward = 3, .input_backward = 5, .weight_backward = 4, .message = 7};
  for (const auto& schedule : schedules()) {
    const auto found = timeline(schedule, costs);
    std::map<Result, double> there;
    for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      ASSERT_EQ(found.spans[rank].size(), schedule.actions[rank].size());
      for (size_t i = 0; i < found.spans[rank].size(); ++i) {
        there[result_of(schedule.actions[rank][i])] = found.spans[rank][i].end;
      }
    }
    for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      double free = 0;
      for (size_t i = 0; i < found.spans[rank].size(); ++i) {
        const auto& action = schedule.actions[rank][i];
        auto begin = free;
        for (const auto& one : needs(schedule, action)) {
          const auto far = schedule.rank_of_stage[std::get<0>(one)] != rank;
          begin = std::max(begin, there[one] + (far ? costs.message : 0));
        }
        EXPECT_EQ(found.spans[rank][i].begin, begin) << action.text() << "\n" << shown(schedule);
        free = begin + costs.of(action.kind);
        EXPECT_EQ(found.spans[rank][i].end, free) << action.text() << "\n" << shown(schedule);
      }
      EXPECT_GE(found.length, free);
    }
  }
}

TEST(AnySchedule, HasTheLevelsOfWhatItsRanksHold) {
  Dice dice(2);
  for (const auto& schedule : schedules()) {
    for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      std::vector<MicrobatchBytes> bytes;
      std::map<uint32_t, MicrobatchBytes> of_stage;
      for (const auto stage : schedule.stages_of(rank)) {
        bytes.push_back({.whole = dice.below(1000), .waiting = dice.below(1000)});
        of_stage[stage] = bytes.back();
      }
      std::map<std::pair<uint32_t, uint32_t>, int64_t> held;
      std::vector<int64_t> want;
      for (const auto& action : schedule.actions[rank]) {
        auto& one = held[{action.stage, action.microbatch}];
        const auto& size = of_stage[action.stage];
        one = action.kind == Kind::forward          ? size.whole
              : action.kind == Kind::input_backward ? size.waiting
                                                    : 0;
        int64_t now = 0;
        for (const auto& [key, each] : held) {
          now += each;
        }
        want.push_back(now);
      }
      EXPECT_EQ(levels(schedule, rank, bytes), want) << shown(schedule);
      EXPECT_EQ(peak_bytes(schedule, rank, bytes), std::ranges::max(want)) << shown(schedule);
    }
  }
}

using Plans = std::vector<MessagePlan>;

Plans plans_of(const Schedule& schedule) {
  Plans out;
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    out.push_back(plan_messages(schedule, rank));
  }
  return out;
}

// What `from` sends to `to`, in its order, as the receiver sees it.
std::vector<Message> sent(const Plans& plans, uint32_t from, uint32_t to) {
  std::vector<Message> out;
  for (const auto& step : plans[from].steps) {
    if (step.send && step.send->peer == to) {
      out.push_back(*step.send);
      out.back().peer = from;
    }
  }
  return out;
}

template <class Of>
std::vector<Message> received(const MessagePlan& plan, uint32_t from, const Of& messages_of) {
  std::vector<Message> out;
  for (const auto& step : plan.steps) {
    for (const auto& one : messages_of(step)) {
      if (one.peer == from) {
        out.push_back(one);
      }
    }
  }
  return out;
}

std::vector<Message> need_of(const MessagePlan::Step& step) {
  return step.need ? std::vector{*step.need} : std::vector<Message>{};
}

std::vector<Message> sorted(std::vector<Message> messages) {
  std::ranges::sort(messages, {}, [](const Message& one) {
    return std::tuple(one.to_stage, one.cargo, one.microbatch, one.from_stage, one.peer);
  });
  return messages;
}

template <class Function>
void for_each_pair(const Function& function) {
  for (const auto& schedule : schedules()) {
    const auto plans = plans_of(schedule);
    for (uint32_t from = 0; from < schedule.ranks(); ++from) {
      for (uint32_t to = 0; to < schedule.ranks(); ++to) {
        function(schedule, plans, from, to);
      }
    }
  }
}

TEST(AnySchedule, SendsEachMessageThatIsNeededOnce) {
  for_each_pair([](const Schedule& schedule, const Plans& plans, uint32_t from, uint32_t to) {
    EXPECT_EQ(sorted(sent(plans, from, to)), sorted(received(plans[to], from, need_of)))
        << from << " to " << to << " in " << shown(schedule);
  });
}

TEST(AnySchedule, AsksForMessagesInTheOrderInWhichTheyAreSent) {
  for_each_pair([](const Schedule& schedule, const Plans& plans, uint32_t from, uint32_t to) {
    const auto posted =
        received(plans[to], from, [](const MessagePlan::Step& step) { return step.post; });
    EXPECT_EQ(posted, sent(plans, from, to)) << from << " to " << to << " in " << shown(schedule);
  });
}

TEST(AnySchedule, AsksForAMessageBeforeTheActionBeforeTheOneThatNeedsIt) {
  for (const auto& schedule : schedules()) {
    for (const auto& plan : plans_of(schedule)) {
      std::vector<Message> asked;
      for (size_t i = 0; i < plan.steps.size(); ++i) {
        asked.insert(asked.end(), plan.steps[i].post.begin(), plan.steps[i].post.end());
        const auto next = i + 1 < plan.steps.size() ? plan.steps[i + 1].need : std::nullopt;
        for (const auto& need : {plan.steps[i].need, next}) {
          EXPECT_TRUE(!need || std::ranges::find(asked, *need) != asked.end())
              << "step " << i << " of " << shown(schedule);
        }
      }
    }
  }
}

TEST(AnySchedule, KnowsHowManyMessagesAreAskedForAtMost) {
  for (const auto& schedule : schedules()) {
    for (const auto& plan : plans_of(schedule)) {
      size_t most = 0;
      size_t open = 0;
      for (const auto& step : plan.steps) {
        open += step.post.size();
        most = std::max(most, open);
        open -= step.need ? 1 : 0;
      }
      EXPECT_EQ(plan.most_posted, most) << shown(schedule);
    }
  }
}

TEST(AnySchedule, HasTheFewestSlotsWithWhichItRuns) {
  int more_than_one = 0;
  for (const auto& schedule : schedules()) {
    const auto slots = least_send_slots(schedule);
    EXPECT_TRUE(comes_to_its_end(schedule, slots)) << slots << " slots: " << shown(schedule);
    if (slots > 1) {
      ++more_than_one;
      EXPECT_FALSE(comes_to_its_end(schedule, slots - 1)) << slots << " slots: " << shown(schedule);
    }
  }
  EXPECT_GT(more_than_one, 20) << "of these it is tested that fewer are not enough";
}

// Schedules with so much in them that any damage is one.
template <class Function>
void for_each_broken(const Function& function) {
  Dice dice(3);
  for (const auto& schedule : schedules()) {
    if (schedule.stages() < 2 || schedule.microbatches < 2) {
      continue;
    }
    for (int i = 0; i < 10; ++i) {
      const auto rank = dice.below(schedule.ranks());
      const auto position = dice.below(schedule.actions[rank].size());
      function(dice, schedule, rank, position);
    }
  }
}

std::string refusal(const Schedule& schedule) {
  try {
    check(schedule);
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

std::string cell(const Schedule& schedule, uint32_t rank, size_t position) {
  return text("rank ", rank, ", cell ", position, " (", schedule.actions[rank][position].text(),
              ")");
}

TEST(BrokenSchedule, WithoutACellSaysWhatIsMissingOnWhichRank) {
  for_each_broken([](Dice&, Schedule broken, uint32_t rank, uint32_t position) {
    const auto gone = broken.actions[rank][position];
    broken.actions[rank].erase(broken.actions[rank].begin() + position);
    EXPECT_TRUE(refusal(broken).starts_with(text("rank ", rank, " has no ", gone.text())))
        << gone.text() << " of " << shown(broken) << refusal(broken);
  });
}

TEST(BrokenSchedule, WithACellTwiceNamesTheSecond) {
  for_each_broken([](Dice& dice, Schedule broken, uint32_t rank, uint32_t position) {
    auto& row = broken.actions[rank];
    const auto again = position + 1 + dice.below(row.size() - position);
    row.insert(row.begin() + again, row[position]);
    EXPECT_TRUE(refusal(broken).starts_with(cell(broken, rank, again) + " repeats"))
        << shown(broken) << refusal(broken);
  });
}

TEST(BrokenSchedule, WithACellOnAnotherRankNamesItThere) {
  for_each_broken([](Dice& dice, Schedule broken, uint32_t rank, uint32_t position) {
    if (broken.ranks() == 1) {
      return;
    }
    const auto other = (rank + 1 + dice.below(broken.ranks() - 1)) % broken.ranks();
    const auto moved = broken.actions[rank][position];
    broken.actions[rank].erase(broken.actions[rank].begin() + position);
    auto& row = broken.actions[other];
    const auto to = dice.below(row.size() + 1);
    row.insert(row.begin() + to, moved);
    EXPECT_TRUE(refusal(broken).starts_with(cell(broken, other, to) + " is of stage"))
        << shown(broken) << refusal(broken);
  });
}

TEST(BrokenSchedule, WithAnotherMicrobatchInACellIsRefused) {
  for_each_broken([](Dice& dice, Schedule broken, uint32_t rank, uint32_t position) {
    auto& action = broken.actions[rank][position];
    action.microbatch =
        (action.microbatch + 1 + dice.below(broken.microbatches - 1)) % broken.microbatches;
    EXPECT_NE(refusal(broken), "") << shown(broken);
  });
}

TEST(BrokenSchedule, WithAnotherKindInACellIsRefused) {
  for_each_broken([](Dice& dice, Schedule broken, uint32_t rank, uint32_t position) {
    auto& action = broken.actions[rank][position];
    action.kind = static_cast<Kind>((static_cast<uint8_t>(action.kind) + 1 + dice.below(3)) % 4);
    EXPECT_NE(refusal(broken), "") << shown(broken);
  });
}

TEST(BrokenSchedule, WithTwoCellsSwappedIsRefusedIfItCannotRun) {
  static const std::regex names_a_cell(R"(rank \d+, cell \d+ \(\d+[FBIW]\d+\))");
  int refused = 0;
  int passed = 0;
  for_each_broken([&](Dice& dice, Schedule broken, uint32_t rank, uint32_t position) {
    auto& row = broken.actions[rank];
    std::swap(row[position], row[dice.below(row.size())]);
    const auto said = refusal(broken);
    ASSERT_EQ(said.empty(), comes_to_its_end(broken)) << shown(broken) << said;
    ++(said.empty() ? passed : refused);
    EXPECT_TRUE(said.empty() || std::regex_search(said, names_a_cell)) << said;
  });
  EXPECT_GT(refused, 500);
  EXPECT_GT(passed, 100);
}

}  // namespace
}  // namespace tenure::pipeline
