// How a session learns: which mode a step runs in, and what is made of it afterwards.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/offload/state.h>

#include <algorithm>

namespace tenure::offload {
namespace {

// Plans remembered, one for each shape of step.
constexpr size_t kMostKnown = 8;
// Steps of one unknown shape in a row before one is measured again.
constexpr size_t kUnknownInARow = 2;
// What a copy costs the host: below the bytes that move meanwhile a storage is not worth one.
constexpr double kCopyOverhead = 10e-6;
// Allocators round up, CUDA's by up to 1 MiB an allocation and not always alike: so much of the
// budget stays free.
constexpr double kBudgetMargin = 0.005;
constexpr double kMostMargin = 0.02;
constexpr int64_t kRounding = int64_t{16} << 20;
// Without a budget: how far above the least peak copies may run ahead, and how far above that a
// step may come before its plan is made again.
constexpr double kAheadOfLeast = 0.035;
constexpr double kSlack = 0.01;
constexpr uint64_t kLeastRoom = uint64_t{64} << 20;
// In the first steps, and every so many after, copies and waits are timed.
constexpr uint64_t kTimedFirst = 4;
constexpr uint64_t kTimedEvery = 32;
// After each of the first steps, and every so many after, host memory that was not used is freed.
constexpr uint64_t kShrinkFirst = 4;
constexpr uint64_t kShrinkEvery = 4;
// Levels at the begin of a step that differ by less than this part of the budget are the same.
constexpr double kSameLevel = 0.005;

int64_t part_of(int64_t bytes, double part) {
  return static_cast<int64_t>(static_cast<double>(bytes) * part);
}

uint64_t shape_of(const Timeline& timeline) {
  uint64_t hash = 1469598103934665603U;
  for (const auto& saved : timeline.saved) {
    hash = (hash ^ saved.bytes) * 1099511628211U;
  }
  return hash;
}

}  // namespace

void State::begin() {
  std::lock_guard lock(mutex_);
  if (active_) {
    throw InputError(
        "this Offload is entered already: leave it first, or make a second one for a nested block");
  }
  if (open_) {
    finish_step();
  }
  ++step_;
  active_ = open_ = true;
  recorder_.begin(meter_.get());
  order_.clear();
  counted_.clear();
  position_ = fetched_upto_ = 0;
  ahead_ = largest_ = 0;
  now_ = {};
  if (disk_ != nullptr) {
    disk_->begin_step();
  }
  choose_mode();
  const bool timed = mode_ == Mode::measuring || step_ <= kTimedFirst || step_ % kTimedEvery == 0;
  for (const auto& [device, lane] : lanes_) {
    lane->copier.collect();
    if (step_ <= kShrinkFirst || step_ % kShrinkEvery == 0) {
      lane->pool->shrink();  // now, and not at the end of a step, when copies are under way
    }
    if (timed) {
      lane->copier.start_measuring();
    } else {
      lane->copier.stop_measuring();
    }
  }
}

void State::end() {
  std::lock_guard lock(mutex_);
  active_ = false;
  recorder_.end();
  forget_dead();
  if (recorder_.any_needed() || table_.empty()) {
    finish_step();
  }
}

void State::abandon() {
  std::lock_guard lock(mutex_);
  active_ = open_ = false;
  forget_dead();
  report();
}

void State::forget_dead() {
  for (auto& [storage, entries] : table_) {
    std::erase_if(entries, [](const auto& entry) { return entry.expired(); });
  }
  std::erase_if(table_, [](const auto& known) { return known.second.empty(); });
}

void State::choose_mode() {
  mode_ = Mode::measuring;
  known_ = nullptr;
  if (all_known_.empty()) {
    return;
  }
  if (!options.budget) {
    known_ = all_known_.front();
  } else {
    const auto slack = part_of(static_cast<int64_t>(*options.budget), kSameLevel);
    const auto same = std::ranges::find_if(all_known_, [&](const auto& known) {
      return std::abs(known->timeline.at_begin - recorder_.timeline().at_begin) <= slack;
    });
    known_ = same == all_known_.end() ? nullptr : *same;
  }
  if (unknown_in_a_row_ >= kUnknownInARow) {
    known_ = nullptr;
  }
  if (known_ != nullptr) {
    mode_ = Mode::planned;
  }
}

// The step is not the one that was planned: another plan may fit what was saved so far.
void State::lose_plan() {
  const auto& now = recorder_.timeline().saved;
  const auto fits = [&](const auto& known) {
    const auto& then = known->timeline.saved;
    return then.size() >= now.size() &&
           std::equal(now.begin(), now.end(), then.begin(),
                      [](const auto& a, const auto& b) { return a.bytes == b.bytes; });
  };
  const auto other = std::ranges::find_if(all_known_, fits);
  if (now.size() == 1 && other != all_known_.end()) {
    known_ = *other;
    return;
  }
  mode_ = Mode::following;
}

// Under a budget none: what the step will need is not known.
uint64_t State::following_room() const {
  return options.budget ? 0 : std::max(kLeastRoom, 2 * largest_);
}

void State::finish_step() {
  open_ = false;
  const auto& timeline = recorder_.timeline();
  if (mode_ == Mode::planned && timeline.saved.size() != known_->timeline.saved.size()) {
    mode_ = Mode::following;  // it ended early
  }
  for (const auto& [device, lane] : lanes_) {
    lane->copier.collect();
  }
  report();
  if (timeline.saved.empty() || !recorder_.any_needed()) {
    return;  // nothing to learn from a forward alone
  }
  if (mode_ == Mode::following) {
    const auto shape = shape_of(timeline);
    unknown_in_a_row_ = shape == shape_of_last_ ? unknown_in_a_row_ + 1 : 1;
    shape_of_last_ = shape;
    return;
  }
  unknown_in_a_row_ = 0;
  if (mode_ == Mode::measuring) {
    learn();
  } else {
    check_peak();
    std::ranges::rotate(all_known_, std::ranges::find(all_known_, known_));
  }
}

void State::learn() {
  auto known = std::make_shared<Known>();
  known->timeline = recorder_.timeline();
  const auto shape = shape_of(known->timeline);
  std::erase_if(all_known_, [&](const auto& old) {
    return !options.budget && shape_of(old->timeline) == shape;
  });
  last_.least = least_peak(known->timeline);
  const auto cap = cap_for(known->timeline);
  if (options.budget && last_.least > cap) {
    const auto least = least_budget(last_.least);
    throw BudgetError(text("the budget of ", bytes_text(*options.budget),
                           " cannot be met: with every saved activation on the host a step still "
                           "needs ",
                           bytes_text(least), ". Give at least ", least,
                           " bytes, checkpoint, or use a smaller batch"));
  }
  if (!options.min_bytes) {
    const auto bandwidth = std::min(last_.out_bandwidth, last_.in_bandwidth);
    known->small = small_size(known->timeline, bandwidth, kCopyOverhead);
  }
  known->plan = plan_for(*known);
  all_known_.insert(all_known_.begin(), std::move(known));
  if (all_known_.size() > kMostKnown) {
    all_known_.pop_back();
  }
}

// The least budget whose cap is that level.
uint64_t State::least_budget(int64_t level) const {
  auto budget = level;
  while (cap_of(budget) < level) {
    budget += level - cap_of(budget);
  }
  return static_cast<uint64_t>(budget);
}

// Without a meter a budget is for the saved activations alone, which are counted exactly.
int64_t State::cap_of(int64_t budget) const {
  const auto rounding =
      std::max(part_of(budget, kBudgetMargin), std::min(kRounding, part_of(budget, kMostMargin)));
  return meter_ == nullptr ? budget : budget - margin_ - rounding;
}

int64_t State::cap_for(const Timeline& timeline) const {
  if (options.budget) {
    return cap_of(static_cast<int64_t>(*options.budget));
  }
  const auto least = least_peak(timeline);
  if (meter_ == nullptr) {
    return least + static_cast<int64_t>(2 * largest_);
  }
  return least + std::max<int64_t>(part_of(least, kAheadOfLeast) - margin_, 0);
}

Plan State::plan_for(const Known& known) const {
  const auto cap = cap_for(known.timeline);
  return options.budget ? plan_within(known.timeline, cap, known.small)
                        : plan_all(known.timeline, cap, known.small);
}

// A plan that was exceeded is made again with more caution.
void State::check_peak() {
  if (meter_ == nullptr) {
    return;
  }
  const auto most = options.budget
                        ? static_cast<int64_t>(*options.budget)
                        : cap_for(known_->timeline) + part_of(least_peak(known_->timeline), kSlack);
  const auto over = recorder_.peak() - most;
  const bool can_do_less = known_->plan.peak > least_peak(known_->timeline);
  if (over <= 0 || !can_do_less) {
    return;
  }
  margin_ += over;
  if (least_peak(known_->timeline) <= cap_for(known_->timeline)) {
    known_->plan = plan_for(*known_);
  }
}

void State::report() {
  const auto least = last_.least;
  last_ = now_;
  last_.least = least;
  last_.steps = step_;
  last_.mode = mode_;
  last_.peak = recorder_.peak();
  last_.promised = mode_ == Mode::planned ? known_->plan.peak : 0;
  last_.budget = static_cast<int64_t>(options.budget.value_or(0));
  const auto moved = totals();
  last_.moved_out.bytes = moved.out.bytes - before_.out.bytes;
  last_.moved_in.bytes = moved.back.bytes - before_.back.bytes;
  before_ = moved;
  last_.out_bandwidth = moved.out.bandwidth();
  last_.in_bandwidth = moved.back.bandwidth();
}

State::Totals State::totals() const {
  Totals out;
  const auto add = [](Moved& sum, const Moved& more) {
    sum.bytes += more.bytes;
    sum.timed_bytes += more.timed_bytes;
    sum.seconds += more.seconds;
  };
  for (const auto& [device, lane] : lanes_) {
    add(out.out, lane->copier.moved_out());
    add(out.back, lane->copier.moved_back());
    out.exposed += lane->copier.exposed_seconds();
  }
  return out;
}

Stats State::stats() {
  std::lock_guard lock(mutex_);
  forget_dead();
  if (open_ && !active_ && table_.empty() && recorder_.any_needed() && !options.budget) {
    finish_step();  // its backward came after end()
  }
  auto out = last_;
  out.tracked = table_.size();
  if (disk_ != nullptr) {
    out.disk_bytes = disk_->bytes();
    out.file_bytes = disk_->file_bytes();
  }
  for (const auto& [device, lane] : lanes_) {
    lane->copier.collect();
    out.host_bytes += lane->pool->held();
    out.pinned_bytes += lane->pool->pinned();
    out.slabs_taken += lane->pool->slabs_taken();
  }
  const auto moved = totals();
  out.out_bandwidth = moved.out.bandwidth();
  out.in_bandwidth = moved.back.bandwidth();
  out.exposed_seconds = moved.exposed;
  return out;
}

}  // namespace tenure::offload
