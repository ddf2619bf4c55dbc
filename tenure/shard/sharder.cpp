#include <tenure/shard/sharder.h>

#include <tenure/core/error.h>
#include <tenure/core/names.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace tenure::shard {

uint64_t Sharder::Unit::bytes() const {
  uint64_t out = 0;
  for (const auto& flat : flats) {
    out += flat.gathered_bytes();
  }
  return out;
}

uint64_t Sharder::Unit::moving_bytes() const {
  uint64_t out = 0;
  for (const auto& flat : flats) {
    out += flat.why_stuck().empty() ? flat.gathered_bytes() : 0;
  }
  return out;
}

uint64_t Sharder::Unit::values() const {
  uint64_t out = 0;
  for (const auto& flat : flats) {
    out += flat.values();
  }
  return out;
}

bool Sharder::Unit::has_gradients() const {
  const auto some = [](const Gradients& one) { return !one.empty(); };
  return std::ranges::any_of(gradients, some) ||
         (!adds_put_off && std::ranges::any_of(put_off, some));
}

void Sharder::Unit::take_turn() {
  if (!has_streams) {
    return;
  }
  for (const auto& flat : flats) {
    turn.take(flat.whole().storage());
  }
}

void Sharder::Unit::become(Life next) {
  if (!may_become(life, next)) {
    throw Error(text("unit '", name, "' is ", shard::name_of(life), " and cannot become ",
                     shard::name_of(next), ": this is a defect of Tenure"));
  }
  life = next;
}

Sharder::Sharder(Collectives collectives, Agreement agreement, Options options)
    : collectives_(std::move(collectives)), agreement_(std::move(agreement)), options_(options) {}

// A message that goes before it has come leaves its other end, and what the group does next,
// waiting in vain: so what was gathered ahead comes first, unless a rank does not answer.
Sharder::~Sharder() {
  static constexpr std::chrono::milliseconds patience{3000};
  const auto await = [](const Pending& pending) {
    try {
      pending.wait(patience, [] { return "what was under way"; });
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch) nobody is there to be told
    }
  };
  for (const auto& unit : units_) {
    std::ranges::for_each(unit.gathering, await);
  }
  for (const auto& adding : sums_) {
    await(adding.sum.pending);
  }
}

uint32_t Sharder::add(const std::string& name, const std::vector<std::vector<std::string>>& names,
                      const std::vector<std::vector<at::Tensor>>& values, Stay stay) {
  const std::lock_guard lock(mutex_);
  if (held_) {
    throw InputError(text("unit '", name, "' comes while the model is held: end the hold before"));
  }
  Unit unit;
  unit.name = name;
  unit.stay = stay;
  std::exception_ptr failed;
  try {
    for (size_t i = 0; i < names.size(); ++i) {
      const auto own = values[i].front().scalar_type();
      const auto gathered = at::isFloatingType(own) ? options_.gathered.value_or(own) : own;
      unit.flats.emplace_back(name, names[i], values[i], gathered, options_.pieces, collectives_);
    }
  } catch (...) {
    failed = std::current_exception();
  }
  // Others would wait in the collective for a rank that has no memory, say.
  require_none_failed(failed, name);
  for (auto& flat : unit.flats) {
    flat.share(name, collectives_);
  }
  unit.has_streams = !values.empty() && !values.front().front().is_cpu();
  unit.gradients.resize(unit.flats.size());
  unit.put_off.resize(unit.flats.size());
  unit.stats.name = name;
  unit.stats.bytes = unit.bytes();
  units_.push_back(std::move(unit));
  return static_cast<uint32_t>(units_.size() - 1);
}

void Sharder::require_none_failed(const std::exception_ptr& failed, const std::string& unit) {
  std::vector<uint8_t> flags{failed ? uint8_t{1} : uint8_t{0}};
  agreement_.share(flags, text("taking over unit '", unit, "'"));
  if (failed) {
    std::rethrow_exception(failed);
  }
  if (flags.front() != 0) {
    throw CollectiveError(
        text("another rank could not take over unit '", unit, "': its own error says why"));
  }
}

uint32_t Sharder::count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<uint32_t>(units_.size());
}

void Sharder::keep_first(uint32_t count) {
  const std::lock_guard lock(mutex_);
  units_.erase(units_.begin() + count, units_.end());
}

std::string Sharder::tell(const Use& use) const {
  const auto name = use.unit < units_.size() ? units_[use.unit].name : std::string("?");
  switch (use.phase) {
    case Phase::forward:
    case Phase::backward:
      return text("gathering unit '", name, "' for ", name_of(use.phase));
    case Phase::reduce:
      return text("adding up gradients of unit '", name, "'");
    case Phase::end:
      return "at the end of backward";
    case Phase::hold:
      return "gathering all units to hold them";
  }
  return {};
}

std::string Sharder::tell(const Place& place) const {
  return text(tell(place.use), " (use ", place.position, " of pass ", place.pass, ")");
}

void Sharder::agree(Use use) {
  if (order_.use(use)) {
    return;
  }
  auto own = tell(here(use));
  if (const auto instead = order_.instead()) {
    own +=
        text(", after it went another way than the pass before, which was there ", tell(*instead));
  }
  agreement_.require(here(use), own, [this](const Place& place) { return tell(place); });
}

void Sharder::wait(const Pending& pending, const Place& place) {
  try {
    pending.wait(options_.timeout,
                 [&] { return text(tell(place), " on rank ", agreement_.rank()); });
  } catch (const CollectiveError& error) {
    throw CollectiveError(text(error.what(), "; ", agreement_.others(tell(place))));
  }
}

void Sharder::start_gather(Unit& unit) {
  unit.become(Life::gathering);
  unit.gather_began = ticks();
  gathered_bytes_ += unit.moving_bytes();
  try {
    for (auto& flat : unit.flats) {
      unit.gathering.push_back(flat.gather(collectives_));
    }
    unit.take_turn();
  } catch (...) {
    abandon(unit);
    throw;
  }
  ++unit.stats.gathers;
  current_.moved_bytes += unit.stats.bytes;
  current_.peak_gathered = std::max(current_.peak_gathered, gathered_bytes_);
}

void Sharder::finish_gather(Unit& unit, Use use) {
  const auto begin = ticks();
  try {
    for (const auto& pending : unit.gathering) {
      wait(pending, here(use));
    }
  } catch (...) {
    abandon(unit);
    throw;
  }
  unit.gathering.clear();
  unit.become(Life::ready);
  const auto waited = seconds_between(begin, ticks());
  unit.stats.waited += waited;
  current_.waited += waited;
  unit.stats.moving += seconds_between(unit.gather_began, ticks());
}

void Sharder::abandon(Unit& unit) {
  auto begun = std::exchange(unit.gathering, {});
  unit.become(Life::released);
  for (size_t i = 0; i < begun.size(); ++i) {
    unit.flats[i].abandon(begun[i].give_up());
  }
  gathered_bytes_ -= unit.moving_bytes();
}

uint64_t Sharder::enter(uint32_t number, Phase phase) {
  const std::lock_guard lock(mutex_);
  auto& unit = units_.at(number);
  const auto values = unit.values();
  if (held_ || (unit.stay == Stay::whole_pass && unit.users != 0)) {
    ++unit.users;
    return values;
  }
  agree({number, phase});
  if (unit.life == Life::gathering) {
    ++unit.stats.ahead;
  } else if (unit.life != Life::ready) {
    start_gather(unit);
  }
  if (unit.life == Life::gathering) {
    finish_gather(unit, {number, phase});
  }
  begin_use(unit);
  prefetch();
  return values;
}

void Sharder::require_values(uint32_t number, uint64_t values) const {
  const std::lock_guard lock(mutex_);
  if (const auto& unit = units_.at(number); unit.values() != values) {
    throw written_too_early(unit);
  }
}

MutationError Sharder::written_too_early(const Unit& unit) {
  return MutationError(text("the parameters of unit '", unit.name,
                            "' were written to between a forward and its backward, by an "
                            "optimizer's step, say: run backward before it"));
}

void Sharder::begin_use(Unit& unit) {
  unit.take_turn();
  if (unit.users++ == 0) {
    unit.users += unit.stay == Stay::whole_pass ? 1 : 0;  // the pass is a user too
    needed_bytes_ += unit.stats.bytes;
    current_.peak_needed = std::max(current_.peak_needed, needed_bytes_);
  }
}

void Sharder::gather(uint32_t number, Phase phase) {
  const std::lock_guard lock(mutex_);
  auto& unit = units_.at(number);
  if (held_) {
    return;
  }
  agree({number, phase});
  // What autograd saved of a forward before the last one knows by itself.
  if (phase == Phase::backward && std::ranges::any_of(unit.flats, &Flat::pieces_written)) {
    throw written_too_early(unit);
  }
  if (unit.life != Life::gathering && unit.life != Life::ready) {
    start_gather(unit);
  }
}

void Sharder::use(uint32_t number, Phase phase) {
  const std::lock_guard lock(mutex_);
  auto& unit = units_.at(number);
  if (unit.life == Life::gathering) {
    finish_gather(unit, {number, phase});
  }
  if (unit.life != Life::ready) {
    throw Error(text("unit '", unit.name, "' is ", shard::name_of(unit.life),
                     " where a graph reads it: this is a defect of Tenure"));
  }
  begin_use(unit);
}

void Sharder::prefetch() {
  for (const auto number : order_.ahead(options_.prefetch)) {
    auto& unit = units_[number];
    if (unit.life == Life::gathering || unit.life == Life::ready) {
      continue;
    }
    if (gathered_bytes_ + unit.stats.bytes > options_.prefetch_bytes) {
      return;
    }
    start_gather(unit);
  }
}

void Sharder::leave(uint32_t number, Phase phase) {
  const std::lock_guard lock(mutex_);
  auto& unit = units_.at(number);
  if (unit.users == 0 || (held_ && unit.users == 1)) {
    return;  // the pass it belonged to was given up
  }
  if (unit.life == Life::ready) {
    unit.take_turn();
  }
  if (--unit.users != 0) {
    return;
  }
  stop_using(unit);
  if (phase == Phase::forward && options_.after_forward == AfterForward::keep) {
    return;
  }
  const auto next = order_.next();
  const bool comes = next && next->unit == number &&
                     (next->phase == Phase::forward ||
                      (next->phase == Phase::backward && at::GradMode::is_enabled()));
  if (comes) {
    return;  // needed again before any other
  }
  release(unit, text("the end of the ", name_of(phase)));
}

void Sharder::stop_using(Unit& unit) {
  needed_bytes_ -= unit.stats.bytes;
  unit.last_use = std::max(unit.last_use, ticks());
}

void Sharder::release(Unit& unit, const std::string& when) {
  unit.become(Life::released);
  const auto lag = seconds_between(unit.last_use, ticks());
  unit.stats.lag += lag;
  current_.lag += lag;
  const Releaser by{"shard", text(when, " of unit '", unit.name, "'")};
  std::exception_ptr written;
  for (auto& flat : unit.flats) {
    try {
      flat.release(by);
    } catch (const MutationError&) {  // the others go all the same
      written = std::current_exception();
    }
  }
  gathered_bytes_ -= unit.moving_bytes();
  if (written) {
    std::rethrow_exception(written);
  }
}

std::vector<std::string> Sharder::stuck() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  for (const auto& unit : units_) {
    for (const auto& flat : unit.flats) {
      if (!flat.why_stuck().empty()) {
        out.push_back(text("unit '", unit.name, "' stays gathered: ", flat.why_stuck()));
      }
    }
  }
  return out;
}

void Sharder::touch(uint32_t unit) {
  const std::lock_guard lock(mutex_);
  units_.at(unit).last_use = ticks();
}

std::vector<at::Tensor> Sharder::join(uint32_t number, uint32_t index,
                                      const std::vector<at::Tensor>& pieces) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto& flat = units_.at(number).flats.at(index);
  return flat.join(pieces, [&](const at::Tensor& whole) {
    collectives_.gather(whole).wait(options_.timeout, [&] {
      return text("joining the pieces of unit '", units_[number].name, "'");
    });
  });
}

}  // namespace tenure::shard
