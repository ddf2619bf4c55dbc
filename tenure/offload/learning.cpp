// How a session learns: where a step begins and ends, and what is made of it afterwards.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/offload/state.h>

#include <algorithm>
#include <tuple>

namespace tenure::offload {
namespace {

// Allocators round up, CUDA's by up to 1 MiB an allocation and not always alike: so much of the
// budget stays free.
constexpr double kBudgetMargin = 0.005;
constexpr double kMostMargin = 0.02;
constexpr int64_t kNearOfMargin = 4;
constexpr int64_t kRounding = int64_t{16} << 20;
// Without a budget: how far above the least peak copies may run ahead, and how far above that a
// step may come before its plan is made again.
constexpr double kAheadOfLeast = 0.035;
constexpr double kSlack = 0.01;
constexpr uint64_t kLeastRoom = uint64_t{64} << 20;
// A level that rose so often is one that rises.
constexpr uint32_t kRisesOften = 3;
// In the first steps, and every so many after, copies and waits are timed.
constexpr uint64_t kTimedFirst = 4;
constexpr uint64_t kTimedEvery = 32;
// After each of the first steps, and every so many after, host memory that was not used is freed.
constexpr uint64_t kShrinkFirst = 4;
constexpr uint64_t kShrinkEvery = 4;
// Of autograd's alone.
size_t saves_of(const Known& known) {
  return known.followed != nullptr ? known.followed->saves : known.timeline.saved.size();
}

std::pair<uint64_t, double> timed(const Moved& moved) { return {moved.timed_bytes, moved.seconds}; }

}  // namespace

void State::begin() {
  std::lock_guard lock(mutex_);
  if (active_) {
    throw InputError(options.recompute
                         ? "this Fit is entered already: leave it first"
                         : "this Offload is entered already: leave it first, or make a second one "
                           "for a nested block");
  }
  if (open_) {
    finish_step();
  }
  if (options.recompute) {
    watch_calls(shared_from_this());
  }
  ++step_;
  active_ = open_ = true;
  stepper_ = std::this_thread::get_id();
  recorder_.begin(meter_.get());
  order_.clear();
  counted_.clear();
  position_ = fetched_upto_ = 0;
  ahead_ = largest_ = alone_ = 0;
  now_ = {};
  if (disk_ != nullptr) {
    disk_->begin_step();
  }
  choose_mode();
  fits_.assign(all_known_.size(), true);
  opened_ = !options.recompute;
  if (options.recompute) {
    proving_ = false;
    kept_profiled_.clear();
    profile_.begin();
    calls_before_ = 0;
    opening_ = 0;
    follow();
  }
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
  unwatch_calls(*this);
  std::lock_guard lock(mutex_);
  active_ = false;
  meet(recorder_.end());
  lineage_.let_go();  // no call comes any more of which it would be a source
  forget_dead();
  if (recorder_.any_needed() || table_.empty()) {
    finish_step();
  }
}

void State::abandon() {
  unwatch_calls(*this);
  std::lock_guard lock(mutex_);
  active_ = open_ = inside_call_ = false;
  lineage_.let_go();
  forget_dead();
  report();
}

void State::forget_dead() {
  for (auto& [storage, entries] : table_) {
    std::erase_if(entries, [](const auto& entry) { return entry.expired(); });
  }
  std::erase_if(table_, [](const auto& known) { return known.second.empty(); });
}

void State::meet(std::vector<StorageRef> alive) {
  std::erase_if(met_, [](const auto& met) { return !met.first.alive(); });
  for (auto& storage : alive) {
    ++met_[std::move(storage)];
  }
}

// Under a budget none: what the step will need is not known.
uint64_t State::following_room() const {
  return options.budget ? 0 : std::max(kLeastRoom, 2 * largest_);
}

void State::finish_step() {
  open_ = false;
  const auto& timeline = recorder_.timeline();
  lineage_.let_go();
  if (mode_ == Mode::planned && timeline.saved.size() != saves_of(*known_)) {
    mode_ = Mode::following;  // it ended early
    lineage_.lose("it ended early");
  }
  for (const auto& [device, lane] : lanes_) {
    lane->copier.collect();
  }
  report();
  saves_nothing_ = timeline.saved.empty();
  if (timeline.saved.empty() || !recorder_.any_needed()) {
    return;  // nothing to learn from a forward alone
  }
  remember(shape());
  if (mode_ == Mode::measuring) {
    options.recompute ? learn_fit() : learn();
  } else if (mode_ == Mode::planned) {
    if (options.recompute) {
      finish_fit();
    }
    check_peak();
    std::ranges::rotate(all_known_, std::ranges::find(all_known_, known_));
    check_lives_on();
  }
}

// Where a plan keeps for others what they do not hold any more, the next step is measured; ever
// more rarely, for that costs time.
void State::check_lives_on() {
  if (alone_ == 0 || step_ < doubt_from_) {
    return;
  }
  doubt_from_ = step_ + doubt_pause_;
  doubt_pause_ *= 2;
  std::erase(all_known_, known_);
}

void State::learn() {
  auto known = std::make_shared<Known>();
  known->most = recorder_.peak();
  known->timeline = recorder_.timeline();
  known->shape = shape_of(known->timeline);
  std::erase_if(all_known_,
                [&](const auto& old) { return !options.budget && old->shape == known->shape; });
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
  add_known(std::move(known));
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
  if (meter_ == nullptr || proving_) {
    return;
  }
  const auto most = options.budget
                        ? static_cast<int64_t>(*options.budget)
                        : cap_for(known_->timeline) + part_of(least_peak(known_->timeline), kSlack);
  // A device's allocator does not round up alike in each step: near it is as good as over it.
  const auto near =
      known_->followed != nullptr && !of_cpu_ ? (most - cap_of(most) - margin_) / kNearOfMargin : 0;
  const auto over = recorder_.peak() + near - most;
  const bool can_do_less = known_->plan.peak > least_of(*known_);
  if (over <= 0 || !can_do_less) {
    return;
  }
  if (known_->followed != nullptr) {
    // No lower than there is a plan: what others had, garbage say, the next step may be free of.
    const auto room = cap_of(most) - least_of(*known_);
    if (room > 0) {
      margin_ += std::min(std::max(over, near), room);
      make_fit(*known_);
    }
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
  last_.mode = mode_ == Mode::planned && proving_ ? Mode::proving : mode_;
  last_.peak = recorder_.peak();
  last_.promised = mode_ == Mode::planned ? known_->plan.peak : 0;
  last_.budget = static_cast<int64_t>(options.budget.value_or(0));
  if (mode_ == Mode::planned && known_->lifts >= kRisesOften) {
    last_.risen = recorder_.timeline().at_begin - known_->began_at;
  }
  last_.remade = lineage_.made();
  last_.audited = audited_;
  if (mode_ == Mode::following && options.recompute && now_.saved.count > 0) {
    last_.diverged = lineage_.lost();
  }
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
  if (disk_ != nullptr) {  // next to which copies in memory take no time
    std::tie(out.out.timed_bytes, out.out.seconds) = timed(disk_->written());
    std::tie(out.back.timed_bytes, out.back.seconds) = timed(disk_->read_back());
    out.exposed += disk_->waited_seconds();
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
