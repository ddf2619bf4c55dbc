// Sharder's sums: gradients as they come, and what they are over all ranks.
#include <tenure/core/names.h>
#include <tenure/shard/sharder.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace tenure::shard {

void Sharder::take(uint32_t number, uint32_t index, size_t parameter, const at::Tensor& gradient,
                   Memory memory) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  auto& unit = units_.at(number);
  auto& to = (sums_off_ ? unit.put_off : unit.gradients).at(index);
  if (to.empty()) {
    finish_sums();  // before memory for more: by now the last one is done, or nearly
  }
  const auto owner = intern_owner(OwnerKind::gradient, fitting(unit.name));
  to.take(unit.flats[index].layout(), parameter, gradient, memory, options_.reduced, owner);
}

void Sharder::put_off_sums(bool off) {
  const std::lock_guard lock(mutex_);
  sums_off_ = off;
}

void Sharder::add_up(uint32_t number) {
  const std::lock_guard lock(mutex_);
  start_sums(number);
}

void Sharder::start_sums(uint32_t number) {
  const at::NoGradGuard no_grad;
  auto& unit = units_.at(number);
  if (sums_off_ || held_ || !unit.has_gradients()) {
    return;
  }
  agree({number, Phase::reduce});
  ++unit.stats.reduces;
  finish_sums();  // one unit at a time, so that no more than that is held for it
  Gradients none;
  const bool again = std::exchange(unit.adds_put_off, true);
  for (uint32_t i = 0; i < unit.flats.size(); ++i) {
    auto& before = again ? none : unit.put_off[i];
    if (unit.gradients[i].empty() && before.empty()) {
      continue;
    }
    auto [all, came] = unit.gradients[i].hand_over(unit.flats[i].layout(), before);
    current_.reduced_bytes += all.nbytes();
    if (all.scalar_type() == at::kHalf) {  // whose sum could be more than it can hold
      all.div_(static_cast<double>(collectives_.ranks() * collectives_.replicas()));
    }
    Turn turn;
    turn.take(all.device());
    sums_.push_back({number, i, collectives_.reduce(std::move(all)), std::move(came), turn});
  }
}

// A parameter may have had a gradient on another rank only: the experts of a mixture.
void Sharder::share_came() {
  std::vector<uint8_t> flags;
  for (const auto& one : done_) {
    flags.insert(flags.end(), one.came.begin(), one.came.end());
  }
  agreement_.share(flags, "at the end of backward");
  size_t at = 0;
  for (auto& one : done_) {
    for (auto&& came : one.came) {
      came = flags[at++] != 0;
    }
  }
}

std::vector<Reduced> Sharder::end_backward(Backward which) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  if (held_) {
    return {};
  }
  if (which == Backward::outermost) {
    for (uint32_t i = 0; i < units_.size(); ++i) {
      start_sums(i);  // what was put off, of units that had no part in this backward
    }
  }
  order_.use({0, Phase::end});
  finish_sums();
  share_came();
  for (const auto& fence : std::exchange(coming_, {})) {
    fence.wait();
  }
  for (const auto& one : done_) {
    done_turn_.take(one.mean.storage());
  }
  for (auto& unit : units_) {
    if (std::exchange(unit.adds_put_off, false)) {
      std::ranges::for_each(unit.put_off, &Gradients::drop);
    }
    if (unit.stay == Stay::whole_pass && unit.users == 1) {
      unit.users = 0;
      stop_using(unit);
      release(unit, "the end of the backward");
    }
  }
  return std::exchange(done_, {});
}

void Sharder::drop_gradients() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  drop_all_gradients();
  finish_sums();  // of units that had all of them
  done_.clear();
  coming_.clear();
}

void Sharder::drop_all_gradients() {
  for (auto& unit : units_) {
    std::ranges::for_each(unit.gradients, &Gradients::drop);
    unit.adds_put_off = false;
  }
}

void Sharder::drop_put_off() {
  const std::lock_guard lock(mutex_);
  for (auto& unit : units_) {
    std::ranges::for_each(unit.put_off, &Gradients::drop);
  }
}

void Sharder::finish_sums() {
  const auto ranks = collectives_.ranks() * collectives_.replicas();
  for (auto& adding : std::exchange(sums_, {})) {
    const auto place = here({adding.unit, Phase::reduce});
    wait(adding.sum.pending, place);
    adding.turn.take(adding.sum.own.tensor().storage());
    const auto sum = adding.sum.result();
    wait(collectives_.add_replicas(sum), place);
    const auto& flat = units_[adding.unit].flats[adding.flat];
    const auto kept = sum.to(flat.kept_type());
    if (ranks > 1 && sum.scalar_type() != at::kHalf) {
      kept.div_(static_cast<double>(ranks));
    }
    auto [mean, home] = flat.brought_home(kept);
    if (!home.ready()) {
      coming_.push_back(std::move(home));
    }
    done_turn_.take(sum.device());
    done_.push_back({adding.unit, adding.flat, std::move(mean), std::move(adding.came)});
  }
}

}  // namespace tenure::shard
