// Sharder's passes: what the one before left behind goes when the next begins; what they have cost.
#include <tenure/core/error.h>
#include <tenure/shard/sharder.h>

#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace tenure::shard {

void Sharder::begin_pass() {
  const std::lock_guard lock(mutex_);
  if (!held_) {
    start_pass();
  }
}

void Sharder::give_up_pass() {
  const std::lock_guard lock(mutex_);
  if (held_) {
    return;
  }
  for (auto& unit : units_) {
    if (std::exchange(unit.users, 0) != 0) {
      stop_using(unit);
    }
    if (unit.life == Life::ready) {
      try {
        release(unit, "the end of a pass that failed");
      } catch (const MutationError&) {  // NOLINT(bugprone-empty-catch) its own exception was told
      }
    }
  }
}

void Sharder::start_pass() {
  order_.end_pass();
  ++passes_;
  finish_sums();
  done_.clear();
  coming_.clear();
  std::exception_ptr written;
  for (uint32_t i = 0; i < units_.size(); ++i) {
    auto& unit = units_[i];
    if (unit.life == Life::gathering) {
      finish_gather(unit, {i, Phase::forward});
    }
    unit.users = 0;
    if (unit.life == Life::ready) {
      try {
        release(unit, "the begin of the next pass");
      } catch (const MutationError&) {  // the others go all the same
        written = std::current_exception();
      }
    }
  }
  needed_bytes_ = 0;
  last_ = std::exchange(current_, {});
  if (written) {
    std::rethrow_exception(written);
  }
}

std::optional<Stats> Sharder::pass() const {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    return std::nullopt;
  }
  auto out = current_;
  out.passes = passes_;
  out.gathered_bytes = gathered_bytes_;
  return out;
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
