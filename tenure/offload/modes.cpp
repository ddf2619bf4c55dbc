// In which mode a step runs: whose plan it follows, and what tells steps apart.
#include <tenure/core/text.h>
#include <tenure/offload/state.h>

#include <algorithm>

namespace tenure::offload {
namespace {

// Steps of one unknown shape before one is measured.
constexpr uint32_t kUnknown = 2;
// Shapes whose succession is remembered; a program with more has no rhythm.
constexpr size_t kMostShapes = 64;
// Levels at the begin of a step that differ by less than this part of the budget are the same.
constexpr double kSameLevel = 0.005;

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
  const auto next = followed_.find(shape_of_last_);
  if (all_known_.empty() || (next != followed_.end() && is_to_be_measured(next->second))) {
    return;
  }
  for (const auto& known : all_known_) {
    const bool expected = next != followed_.end() && known->shape == next->second;
    if (begins_alike(*known) && (known_ == nullptr || expected)) {
      known_ = known;
      mode_ = Mode::planned;
      if (expected) {
        return;
      }
    }
  }
}

bool State::begins_alike(const Known& known) const {
  if (!options.budget) {
    return true;
  }
  // A budget that nothing comes near says nothing of how exact a level is to be known.
  const auto budget = std::min(static_cast<int64_t>(*options.budget), 2 * known.most);
  return std::abs(known.timeline.at_begin - recorder_.timeline().at_begin) <=
         part_of(budget, kSameLevel);
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

void State::remember(uint64_t shape) {
  if (followed_.size() >= kMostShapes || unknown_.size() >= kMostShapes) {
    followed_.clear();
    unknown_.clear();
  }
  followed_[shape_of_last_] = shape;
  shape_of_last_ = shape;
  if (mode_ == Mode::following) {
    ++unknown_[shape].seen;
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
