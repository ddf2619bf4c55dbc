#include <tenure/shard/sharder.h>

#include <tenure/core/error.h>
#include <tenure/core/names.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace tenure::shard {
namespace {

std::string_view name_of(Phase phase) {
  return phase == Phase::forward ? "forward" : "backward";
}

at::Tensor part(const at::Tensor& tensor, uint64_t begin, uint64_t end) {
  return tensor.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
}

// Gradients where their parameters lie; zero where there is none.
at::Tensor joined(const Layout& layout, const std::vector<at::Tensor>& gradients,
                  std::optional<c10::ScalarType> type) {
  const auto defined = [](const at::Tensor& gradient) { return gradient.defined(); };
  const auto found = std::find_if(gradients.begin(), gradients.end(), defined);
  if (found == gradients.end()) {
    throw InputError("a unit without gradients has nothing to add up");
  }
  const auto options = found->options().dtype(type.value_or(found->scalar_type()));
  auto all = at::empty({static_cast<int64_t>(layout.size)}, options);
  uint64_t filled = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& range = layout.parameters[i];
    if (!gradients[i].defined()) {
      continue;
    }
    part(all, filled, range.begin).zero_();
    part(all, range.begin, range.end()).view(gradients[i].sizes()).copy_(gradients[i]);
    filled = range.end();
  }
  part(all, filled, layout.size).zero_();
  return all;
}

}  // namespace

uint64_t Sharder::Unit::bytes() const {
  uint64_t out = 0;
  for (const auto& flat : flats) {
    out += flat.gathered_bytes();
  }
  return out;
}

void Sharder::Unit::become(Life next) {
  if (!may_become(life, next)) {
    throw Error(text("unit '", name, "' is ", shard::name_of(life), " and cannot become ",
                     shard::name_of(next), ": this is a defect of Tenure"));
  }
  life = next;
}

Sharder::Sharder(Collectives collectives, Options options)
    : collectives_(std::move(collectives)), options_(options) {}

Sharder::~Sharder() = default;

uint32_t Sharder::add(const std::string& name, const std::vector<std::vector<std::string>>& names,
                      const std::vector<std::vector<at::Tensor>>& values) {
  const std::lock_guard lock(mutex_);
  Unit unit;
  unit.name = name;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto own = values[i].front().scalar_type();
    const auto gathered = at::isFloatingType(own) ? options_.gathered.value_or(own) : own;
    unit.flats.emplace_back(name, names[i], values[i], gathered, collectives_);
  }
  unit.stats.name = name;
  unit.stats.bytes = unit.bytes();
  units_.push_back(std::move(unit));
  return static_cast<uint32_t>(units_.size() - 1);
}

std::string Sharder::what(std::string_view verb, const Unit& unit, Phase phase) const {
  return text(verb, " unit '", unit.name, "' for ", name_of(phase), " in pass ", passes_,
              " on rank ", collectives_.rank(), " of ", collectives_.ranks());
}

void Sharder::begin_pass() {
  const std::lock_guard lock(mutex_);
  order_.end_pass();
  ++passes_;
  if (sum_) {
    finish_sum();
  }
  for (auto& unit : units_) {
    unit.users = 0;
    if (unit.life == Life::gathering) {
      finish_gather(unit, Phase::forward);
    }
    if (unit.life == Life::ready) {
      release(unit, Phase::forward);
    }
  }
  needed_bytes_ = 0;
  last_ = std::exchange(current_, {});
}

void Sharder::start_gather(Unit& unit) {
  unit.become(Life::gathering);
  gathered_bytes_ += unit.stats.bytes;
  try {
    for (auto& flat : unit.flats) {
      unit.gathering.push_back(flat.gather(collectives_));
    }
  } catch (...) {
    abandon(unit);
    throw;
  }
  ++unit.stats.gathers;
  current_.moved_bytes += unit.stats.bytes;
  current_.peak_gathered = std::max(current_.peak_gathered, gathered_bytes_);
}

void Sharder::finish_gather(Unit& unit, Phase phase) {
  const auto begin = ticks();
  try {
    for (auto& pending : unit.gathering) {
      pending.wait(options_.timeout, what("gathering", unit, phase));
    }
  } catch (...) {
    abandon(unit);
    throw;
  }
  unit.gathering.clear();
  unit.become(Life::ready);
  unit.stats.waited += seconds_between(begin, ticks());
}

// A gather failed. What was begun is not waited for: the backend keeps what it writes to.
void Sharder::abandon(Unit& unit) {
  const auto begun = unit.gathering.size();
  unit.gathering.clear();
  unit.become(Life::released);
  gathered_bytes_ -= unit.stats.bytes;
  for (size_t i = 0; i < begun; ++i) {
    unit.flats[i].release({"shard", "a gather that failed"}, {});
  }
}

void Sharder::enter(uint32_t number, Phase phase) {
  const std::lock_guard lock(mutex_);
  auto& unit = units_.at(number);
  order_.use({number, phase});
  if (unit.life == Life::gathering) {
    ++unit.stats.ahead;
  } else if (unit.life != Life::ready) {
    start_gather(unit);
  }
  if (unit.life == Life::gathering) {
    finish_gather(unit, phase);
  }
  if (unit.users++ == 0) {
    needed_bytes_ += unit.stats.bytes;
    current_.peak_needed = std::max(current_.peak_needed, needed_bytes_);
  }
  prefetch();
}

void Sharder::prefetch() {
  for (const auto& use : order_.ahead(options_.prefetch)) {
    auto& unit = units_[use.unit];
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
  if (unit.users == 0) {
    return;  // the pass it belonged to was given up
  }
  if (--unit.users != 0) {
    return;
  }
  needed_bytes_ -= unit.stats.bytes;
  if (phase == Phase::forward && options_.after_forward == AfterForward::keep) {
    return;
  }
  const auto next = order_.ahead(1);
  if (!next.empty() && next.front().unit == number) {
    return;  // needed again before any other
  }
  release(unit, phase);
}

void Sharder::release(Unit& unit, Phase phase) {
  unit.become(Life::released);
  gathered_bytes_ -= unit.stats.bytes;
  const Releaser by{"shard", text("the end of its ", name_of(phase))};
  for (auto& flat : unit.flats) {
    flat.release(by, {});
  }
}

std::optional<Reduced> Sharder::reduce(uint32_t number, uint32_t index,
                                       const std::vector<at::Tensor>& gradients) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  // One at a time, so that no more than one unit's gradients are held for it.
  auto before = finish_sum();
  const auto& unit = units_.at(number);
  const auto& flat = unit.flats.at(index);
  auto all = joined(flat.layout(), gradients, options_.reduced);
  const auto owner = intern_owner(OwnerKind::gradient, fitting(unit.name));
  current_.reduced_bytes += all.nbytes();
  at::Tensor sum;
  auto pending = collectives_.reduce(std::move(all), sum);
  sum_ = Sum{number, index, std::move(pending), Alias(sum, owner)};
  return before;
}

std::optional<Reduced> Sharder::reduced() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  return finish_sum();
}

std::optional<Reduced> Sharder::finish_sum() {
  auto done = std::exchange(sum_, std::nullopt);
  if (!done) {
    return std::nullopt;
  }
  const auto& unit = units_[done->unit];
  done->pending.wait(options_.timeout, what("adding up gradients of", unit, Phase::backward));
  // No larger than it is: a view would keep all of the buffer.
  const auto kept = unit.flats[done->flat].piece().scalar_type();
  auto mean = done->sum.tensor().to(kept, /*non_blocking=*/false, /*copy=*/true);
  return Reduced{done->unit, done->flat, mean.div_(static_cast<double>(collectives_.ranks()))};
}

bool Sharder::is_ready(uint32_t unit) const {
  const std::lock_guard lock(mutex_);
  return units_.at(unit).life == Life::ready;
}

Stats Sharder::stats() const {
  const std::lock_guard lock(mutex_);
  auto out = last_;
  out.passes = passes_;
  out.order_changes = order_.changes();
  out.gathered_bytes = gathered_bytes_;
  out.piece_bytes = 0;
  for (const auto& unit : units_) {
    out.units.push_back(unit.stats);
    for (const auto& flat : unit.flats) {
      out.piece_bytes += flat.piece_bytes();
    }
  }
  return out;
}

}  // namespace tenure::shard
