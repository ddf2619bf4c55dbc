#include <tenure/core/clock.h>

#include <tenure/core/events.h>
#include <tenure/core/fork.h>
#include <tenure/core/ticks.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace tenure {
namespace {

constexpr uint64_t kMostAtOnce = 16;

}  // namespace

Clock::Clock() {
  protect_across_fork(mutex_);
  on_fork_in_child([] {
    std::lock_guard lock(clock().mutex_);
    clock().subscribers_.clear();
  });
}

Clock& clock() {
  static auto* instance = new Clock;
  return *instance;
}

uint64_t Clock::now() const {
  std::lock_guard lock(mutex_);
  return now_;
}

// Note [Who leads]
// Announcers of one step are echoes of each other, so only one of them is counted. A leader that
// fell silent (a loop that ended) gives way to whoever comes twice without it. An optimizer that is
// made anew at every step comes once and never again: after a run of newcomers longer than any
// list of optimizers that one meets, each newcomer leads, until one of them comes again.
// REQUIRES: mutex_.
bool Clock::leads(Source source, uint64_t who) {
  if (source < source_) {
    return false;
  }
  const bool first = !leader_ || source > source_;
  const bool again = leader_ == who;
  newcomers_ = who > newest_ ? newcomers_ + 1 : 0;
  newest_ = std::max(newest_, who);
  if (newcomers_ > kMostAtOnce) {
    replaced_each_step_ = true;
  } else if (again) {
    replaced_each_step_ = false;
  }
  if (first || again || ++since_leader_[who] == 2 || (newcomers_ > 0 && replaced_each_step_)) {
    source_ = source;
    leader_ = who;
    since_leader_.clear();
    return true;
  }
  return false;
}

void Clock::leave(uint64_t who) {
  std::lock_guard lock(mutex_);
  if (leader_ == who) {
    leader_.reset();
    source_ = Source::implicit;
    since_leader_.clear();
  }
}

bool Clock::tick(Source source, uint64_t who, std::optional<uint64_t> number) {
  uint64_t ended = 0;
  std::vector<std::shared_ptr<const std::function<void(uint64_t)>>> told;
  {
    std::lock_guard lock(mutex_);
    if (!leads(source, who)) {
      return false;
    }
    ended = number.value_or(now_);
    now_ = ended + 1;
    told = subscribers_;
  }
  if (events_on()) {
    append({.ticks = ticks(), .type = EventType::step, .value = ended});
  }
  std::exception_ptr thrown;
  for (const auto& fn : told) {
    try {
      (*fn)(ended);
    } catch (...) {
      thrown = thrown ? thrown : std::current_exception();
    }
  }
  if (thrown) {
    std::rethrow_exception(thrown);
  }
  return true;
}

Clock::Subscription Clock::subscribe(std::function<void(uint64_t)> fn) {
  auto kept = std::make_shared<const std::function<void(uint64_t)>>(std::move(fn));
  std::lock_guard lock(mutex_);
  subscribers_.push_back(kept);
  return Subscription(std::move(kept));
}

Clock::Subscription::Subscription(std::shared_ptr<const std::function<void(uint64_t)>> fn)
    : fn_(std::move(fn)) {}

Clock::Subscription& Clock::Subscription::operator=(Subscription&& other) noexcept {
  std::swap(fn_, other.fn_);
  return *this;
}

Clock::Subscription::~Subscription() {
  if (fn_ == nullptr) {
    return;
  }
  std::lock_guard lock(clock().mutex_);
  std::erase(clock().subscribers_, fn_);
}

}  // namespace tenure
