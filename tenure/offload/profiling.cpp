// How a session that may recompute profiles a step and plans the next ones.
#include <tenure/core/error.h>
#include <tenure/core/sample.h>
#include <tenure/core/text.h>
#include <tenure/core/where.h>
#include <tenure/offload/state.h>

#include <algorithm>

namespace tenure::offload {
namespace {

// So many bytes are moved in a profiled step, to time the bus, ...
constexpr uint64_t kTimedBytes = uint64_t{256} << 20;
// ... and what comes when less than this part of the device's memory is free.
constexpr double kSpare = 0.15;
// The least budget that is told, by the least that was found.
constexpr double kLeastSlack = 1.03;

}  // namespace

// Note [Profiling in place]
// What is saved stays on the device while there is room for it, and where it would be away is
// reckoned afterwards: moving all of it would take long, and the host may not have the room. The
// first of it is moved all the same, to time the bus.
bool State::keeps_profiled(const c10::Storage& storage) const {
  if (storage.device().is_cpu()) {
    return true;
  }
  if (options.moves && totals().out.bytes - before_.out.bytes < kTimedBytes) {
    return false;
  }
  for (const auto& sample : sample_devices()) {
    const auto driver = sample.driver.value_or(DriverSample());
    const auto allocator = sample.allocator.value_or(AllocatorSample());
    if (sample.device == storage.device() && driver.total > 0) {
      const auto spare = driver.free + allocator.reserved.current - allocator.allocated.current;
      return static_cast<double>(spare) > kSpare * static_cast<double>(driver.total);
    }
  }
  return !options.moves;
}

// We hold it by a lease, and by each tensor that was given to autograd.
bool State::others_hold_profiled(size_t index, const StorageRef& ref) const {
  const auto entry = index < order_.size() ? order_[index].lock() : nullptr;
  if (entry == nullptr || entry->action != Action::keep || !entry->kept.held()) {
    return ref.alive();
  }
  const auto storage = entry->kept.storage();
  return storage.use_count() > entry->views + 2;
}

// As if all that was kept had been away but when it was used.
Timeline State::profiled_timeline() const {
  auto out = recorder_.timeline();
  const auto take = [&](std::vector<int64_t>& levels, uint64_t bytes, size_t begin, size_t end) {
    for (auto t = begin; t < std::min(end, levels.size()); ++t) {
      levels[t] -= static_cast<int64_t>(bytes);
    }
  };
  for (size_t i = 0; i < out.saved.size() && meter_ != nullptr; ++i) {
    const auto& saved = out.saved[i];
    if (i >= kept_profiled_.size() || !kept_profiled_[i] || saved.needed == kNever) {
      continue;
    }
    take(out.peak, saved.bytes, saved.gone, saved.needed);
    take(out.level, saved.bytes, saved.gone, saved.needed + 1);
    const auto between = std::max(saved.needed + 1, saved.gone);
    take(out.peak, saved.bytes, between, saved.last);
    take(out.level, saved.bytes, between, saved.last + 1);
  }
  return out;
}

void State::call_profiled(const Operator& op, Invocation& invocation) {
  Profile::Before before;
  {
    std::lock_guard lock(mutex_);
    before = profile_.before(op, invocation.arguments(), recorder_.interval());
    inside_call_ = true;
  }
  const bool repeats = !before.arguments.empty() && !denied_.contains({op.name, where().module});
  // See Note [A busy device]. What it takes is not the call's.
  const auto keep_busy = [&] {
    {
      std::lock_guard lock(mutex_);
      recorder_.pause();
    }
    Profile::keep_busy(before.stream);
    std::lock_guard lock(mutex_);
    (void)recorder_.resume();
  };
  if (!repeats) {
    keep_busy();
  }
  Stopwatch watch(before.stream);
  try {
    invocation.run();
  } catch (...) {
    std::lock_guard lock(mutex_);
    inside_call_ = false;
    throw;
  }
  const double seconds = watch.seconds();
  const auto& outputs = invocation.outputs();
  std::optional<Profile::Proof> proof;
  if (repeats) {
    proof.emplace();
    auto again = std::move(before.arguments);
    keep_busy();
    proof->seconds = Profile::repeat(op, again, before.stream);
    {
      std::lock_guard lock(mutex_);
      const auto beyond = recorder_.resume() - Profile::output_bytes(op, again);
      proof->scratch = static_cast<uint64_t>(std::max<int64_t>(beyond, 0));
    }
    proof->same = Profile::same_outputs(op, outputs, again);
    again.clear();
    std::lock_guard lock(mutex_);
    (void)recorder_.resume();
  }
  std::lock_guard lock(mutex_);
  inside_call_ = false;
  profile_.after(op, std::move(before), outputs, recorder_.interval(), where().module, seconds,
                 proof);
  for (const auto& [device, lane] : lanes_) {
    limit_outgoing(*lane);
  }
}

// A tick may have come: who is gone?
void State::follow_ticks() { profile_.notice(recorder_.interval()); }

void State::learn_fit() {
  for (const auto& [device, lane] : lanes_) {
    lane->copier.collect_all();  // what was saved first comes back last
  }
  auto known = std::make_shared<Known>();
  known->most = recorder_.peak();
  known->measured = profiled_timeline();
  known->shape = shape();
  known->followed = std::make_shared<Followed>();
  known->followed->script = profile_.finish(known->measured.ticks());
  known->followed->script.opening = opening_;
  for (auto& value : known->followed->script.trace.values) {
    if (value.saved != kNone) {
      value.gone = known->measured.saved[value.saved].gone;  // by others than us
    }
  }
  const auto bandwidth = std::min(bus().out, bus().back);
  known->small = options.min_bytes.value_or(
      small_size(known->measured, bandwidth, bandwidth > 0 ? kCopyOverhead : 0));
  make_fit(*known);
  add_known(std::move(known));
}

// Throws BudgetError, and forgets it, where there is none.
void State::make_fit(Known& known) {
  auto& followed = *known.followed;
  for (auto& call : followed.script.trace.calls) {
    call.repeatable = call.repeatable && !denied_.contains({call.op, call.module});
  }
  auto way = bus();
  way.small = known.small;
  const auto budget = options.budget.value_or(0);
  const auto cap = cap_of(static_cast<int64_t>(budget));
  auto found = fit(known.measured, followed.script.trace, way, cap);
  last_.least = found ? found->least : least_fit_peak(known.measured, followed.script.trace, way);
  refused_ = !found;
  if (refused_) {
    // Another profile of the same step may come out a little higher.
    const auto least = least_budget(part_of(last_.least, kLeastSlack));
    std::erase_if(all_known_, [&](const auto& other) { return other.get() == &known; });
    throw BudgetError(text("the budget of ", bytes_text(budget),
                           " cannot be met: with all that can go moved or made again a step still "
                           "needs ",
                           bytes_text(least), ". Give at least ", least,
                           " bytes, checkpoint, or use a smaller batch"));
  }
  followed.fit = std::move(*found);
  followed.index();
  known.timeline = followed.fit.timeline;
  known.plan = followed.fit.plan;
}

}  // namespace tenure::offload
