// In which mode a step runs: whose plan it follows, and what tells steps apart.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/offload/state.h>

#include <algorithm>
#include <iterator>
#include <tuple>

namespace tenure::offload {
namespace {

// Steps of one unknown shape before one is measured.
constexpr uint32_t kUnknown = 2;
// Shapes whose succession is remembered; a program with more has no rhythm.
constexpr size_t kMostShapes = 64;
// Levels at the begin of a step that differ by less than this part of the budget are the same.
constexpr double kSameLevel = 0.005;
// A plan that is lifted goes so many times that higher, so that not every step needs another one;
// a level that is so many times that below the plan's gives away too much.
constexpr int64_t kAhead = 4;
constexpr int64_t kFarBelow = 10;

}  // namespace

uint64_t shape_of(const Timeline& timeline) {
  uint64_t hash = 1469598103934665603U;
  for (const auto& saved : timeline.saved) {
    hash = (hash ^ saved.bytes) * 1099511628211U;
  }
  return hash;
}

// Steps come in a rhythm, if in any: what followed the last shape will follow it again.
void State::choose_mode() {
  mode_ = Mode::measuring;
  known_ = nullptr;
  sought_ = std::nullopt;
  if (all_known_.empty()) {
    return;
  }
  const auto next = followed_.find(shape_of_last_);
  const auto expected =
      next == followed_.end() ? std::nullopt : std::optional<uint64_t>(next->second);
  if (expected && is_to_be_measured(*expected)) {
    sought_ = expected;
    return;
  }
  const auto known = best_of(all_known_, expected);
  if (begins_alike(*known) || (known->shape == expected && reaches_begin(*known))) {
    known_ = known;
    mode_ = Mode::planned;
  }
}

// The level tells more than the rhythm, unless it drifts. Else the next higher one, or the next
// lower one.
std::shared_ptr<Known> State::best_of(const std::vector<std::shared_ptr<Known>>& known,
                                      std::optional<uint64_t> expected) const {
  return *std::ranges::min_element(known, {}, [&](const auto& one) {
    const auto above = begins_alike(*one) ? 0 : above_plan(*one);
    const bool is_expected = one->shape == expected;
    const bool told = above == 0 && (is_expected || !one->drifts);
    return std::tuple(!told, !is_expected, above > 0, std::abs(above));
  });
}

// Whether a step that begins so is another than it was taken for: a known one, or to be measured.
bool State::choose_by(uint64_t opening) {
  const auto begins_so = [&](const auto& one) { return one->followed->script.opening == opening; };
  const bool right = mode_ == Mode::planned && begins_so(known_);
  if (right || (mode_ == Mode::measuring && (!sought_ || unknown_[*sought_].opening == opening))) {
    return false;
  }
  std::vector<std::shared_ptr<Known>> such;
  std::ranges::copy_if(all_known_, std::back_inserter(such), begins_so);
  if (such.empty()) {
    return measure_if_due(opening);
  }
  const auto known = best_of(such, such.front()->shape);
  if (!begins_alike(*known) && !reaches_begin(*known)) {
    return false;
  }
  if (sought_) {
    unknown_[*sought_].tried = 0;  // that one has yet to come
  }
  known_ = known;
  mode_ = Mode::planned;
  return true;
}

// Whether steps that begin so are to be measured, and this one is: all of its calls are to come.
bool State::measure_if_due(uint64_t opening) {
  const auto due = [&](const auto& one) {
    return one.second.opening == opening && is_to_be_measured(one.first);
  };
  if (calls_before_ > 0 || mode_ == Mode::measuring || std::ranges::none_of(unknown_, due)) {
    return false;
  }
  known_ = nullptr;
  mode_ = Mode::measuring;
  for (const auto& [device, lane] : lanes_) {
    lane->copier.start_measuring();
  }
  return true;
}

// How far above the level that the plan is made for the step begins.
int64_t State::above_plan(const Known& known) const {
  return recorder_.timeline().at_begin - known.timeline.at_begin;
}

// A budget that nothing comes near says nothing of how exact a level is to be known.
int64_t State::same_level(const Known& known) const {
  return part_of(std::min(static_cast<int64_t>(options.budget.value_or(0)), 2 * known.most),
                 kSameLevel);
}

bool State::begins_alike(const Known& known) const {
  return !options.budget || std::abs(above_plan(known)) <= same_level(known);
}

// Note [Levels that drift]
// What a program keeps from step to step, as a list that grows, lifts all of a step by that. Once a
// step was measured at two levels, its plan is made for others from the same measurement: lifted to
// a higher level, while a plan for a higher level is right for a lower one as it is. Not from the
// first one alone, for what a program makes in its first step, as gradients and an optimizer's
// state, changes more than the level. Where a plan that is far too high gives memory away, the step
// is measured again, ever more rarely.
bool State::reaches_begin(Known& known) {
  if (!known.drifts) {
    return false;
  }
  const auto above = above_plan(known);
  if (above < -kFarBelow * same_level(known) && step_ >= level_from_) {
    level_pause_ *= 2;
    level_from_ = step_ + level_pause_;
    return false;
  }
  return above <= 0 || lift(known, above);
}

// False: there is no plan for that level.
bool State::lift(Known& known, int64_t by) {
  const auto room = cap_for(known.timeline) - least_of(known) - by;
  if (room < 0) {
    return false;
  }
  known.began_at = known.lifts == 0 ? known.timeline.at_begin : known.began_at;
  ++known.lifts;
  by += std::min(room, kAhead * same_level(known));
  known.most += by;
  for (auto* timeline : {&known.timeline, &known.measured}) {
    timeline->at_begin += by;
    for (auto* levels : {&timeline->peak, &timeline->level}) {
      std::ranges::for_each(*levels, [&](int64_t& level) { level += by; });
    }
  }
  if (!options.recompute) {
    known.plan = plan_for(known);
    return true;
  }
  auto& followed = *known.followed;
  followed.keeps_budget = std::ranges::find(followed.proven, true) != followed.proven.end();
  try {
    make_fit(known);
  } catch (const BudgetError&) {  // since then more is held because it did not prove the same
    return false;
  }
  return true;
}

bool State::is_to_be_measured(uint64_t shape) {
  const auto found = unknown_.find(shape);
  if (found == unknown_.end() || found->second.seen < std::max(kUnknown, 2 * found->second.tried)) {
    return false;
  }
  found->second.tried = found->second.seen;
  return true;
}

// Of the step that is over. Steps that save alike may be of different calls: a profiled one knows.
uint64_t State::shape() const {
  if (mode_ == Mode::planned) {
    return known_->shape;
  }
  const auto saved = shape_of(recorder_.timeline());
  if (mode_ == Mode::measuring) {
    return options.recompute ? profile_.shape(saved) : saved;
  }
  const auto alike = std::ranges::find_if(all_known_, [&](const auto& known) {
    return known != known_ && options.recompute && shape_of(known->measured) == saved;
  });
  return alike == all_known_.end() ? saved : (*alike)->shape;
}

void State::add_known(std::shared_ptr<Known> known) {
  known->drifts = std::ranges::any_of(
      all_known_, [&](const auto& other) { return other->shape == known->shape; });
  all_known_.insert(all_known_.begin(), std::move(known));
  if (all_known_.size() > kMostKnown) {
    all_known_.pop_back();
  }
}

void State::remember(uint64_t shape) {
  if (followed_.size() >= kMostShapes || unknown_.size() >= kMostShapes) {
    followed_.clear();
    unknown_.clear();
  }
  followed_[shape_of_last_] = shape;
  shape_of_last_ = shape;
  if (mode_ == Mode::following) {
    auto& unknown = unknown_[shape];
    ++unknown.seen;
    unknown.opening = opening_;
  } else {
    unknown_.erase(shape);
  }
}

// The step is not the one that was planned: another plan may fit what was saved so far.
void State::lose_plan() {
  const auto other = options.recompute ? fits_.end() : std::ranges::find(fits_, true);
  if (other == fits_.end()) {
    if (options.recompute) {
      lineage_.lose(text("save ", order_.size(), " was of another size"));
    }
    mode_ = Mode::following;
    return;
  }
  known_ = all_known_[static_cast<size_t>(other - fits_.begin())];
  fetched_upto_ = 0;
}

// They are of another step than those that come now.
void State::forget_plans() {
  all_known_.clear();
  fits_.clear();
}

}  // namespace tenure::offload
