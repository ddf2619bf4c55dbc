// Sharder's holds: all units gathered at once, until they are let go.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/shard/sharder.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace tenure::shard {

void Sharder::hold() {
  const std::lock_guard lock(mutex_);
  if (held_) {
    throw InputError("the model is held already: end that hold before the next");
  }
  start_pass();
  agree({0, Phase::hold});
  try {
    for (auto& unit : units_) {
      start_gather(unit);
    }
    for (uint32_t i = 0; i < units_.size(); ++i) {
      finish_gather(units_[i], {i, Phase::hold});
      units_[i].users = 1;  // the hold
      needed_bytes_ += units_[i].stats.bytes;
    }
  } catch (...) {
    release_held();
    throw;
  }
  current_.peak_needed = needed_bytes_;
  held_ = true;
}

void Sharder::release_held() {
  held_ = false;
  std::exception_ptr written;
  for (auto& unit : units_) {
    if (std::exchange(unit.users, 0) != 0) {
      stop_using(unit);
    }
    if (unit.life == Life::gathering) {
      abandon(unit);
    } else if (unit.life == Life::ready) {
      try {
        release(unit, "the end of the hold");
      } catch (const MutationError&) {
        written = std::current_exception();
      }
    }
  }
  if (written) {
    std::rethrow_exception(written);
  }
}

void Sharder::let_go() {
  const std::lock_guard lock(mutex_);
  if (!held_) {
    return;
  }
  release_held();
  for (const auto& unit : units_) {
    if (std::ranges::any_of(unit.flats, &Flat::pieces_written)) {
      throw MutationError(text("the pieces of unit '", unit.name,
                               "' were written to while it was held, by an optimizer's step, say: "
                               "end the hold before it"));
    }
  }
}

void Sharder::drop_hold() noexcept {
  const std::lock_guard lock(mutex_);
  if (!held_) {
    return;
  }
  try {
    release_held();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch) another exception is under way
  }
  drop_all_gradients();
}

}  // namespace tenure::shard
