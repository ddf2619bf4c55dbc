#include <tenure/store/patience.h>

namespace tenure::store {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLeast{250};  // a busy process's moment
constexpr std::chrono::seconds kSilence{10};

}  // namespace

std::optional<Patience::Time> Patience::until(uint64_t owner, uint64_t bytes) {
  const auto now = steady_clock::now();
  const std::scoped_lock lock(mutex_);
  if (const auto found = silent_.find(owner); found != silent_.end() && now < found->second) {
    return std::nullopt;
  }
  // A copy takes a nanosecond for each byte, or less.
  return now + kLeast + std::chrono::nanoseconds(bytes);
}

void Patience::ran_out(uint64_t owner) {
  const auto now = steady_clock::now();
  const std::scoped_lock lock(mutex_);
  std::erase_if(silent_, [&](const auto& entry) { return entry.second <= now; });
  silent_[owner] = now + kSilence;
}

}  // namespace tenure::store
