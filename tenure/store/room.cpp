#include <tenure/store/room.h>

#include <tenure/core/cgroup.h>
#include <tenure/core/kernel_file.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <utility>

namespace tenure::store {
namespace {

using Steady = std::chrono::steady_clock;

// Asking the kernel costs up to 0.2 ms: one answer serves small objects for a while.
constexpr auto kAnswerLasts = std::chrono::milliseconds(50);
constexpr uint64_t kMostGranted = uint64_t{64} << 20;

uint64_t less(uint64_t whole, uint64_t part) { return whole > part ? whole - part : 0; }

struct Bound {
  uint64_t free;
  std::string text;
};

}  // namespace

Probe kernel_probe() {
  struct Files {
    std::optional<MemoryCgroup> group = MemoryCgroup::of_this_process();
    KernelFile memory{"/proc/meminfo"};
  };
  return [files = std::make_shared<const Files>()] {
    Vacancy out;
    const auto sample = files->group ? files->group->sample() : std::nullopt;
    if (sample && sample->headroom) {
      const auto cached = files->group->inactive_file().value_or(0);
      out.group = static_cast<uint64_t>(*sample->headroom + std::max<int64_t>(0, cached));
    }
    std::array<char, 4096> buffer{};
    if (const auto available = bytes_after("MemAvailable:", files->memory.read(buffer))) {
      out.machine = static_cast<uint64_t>(*available);
    }
    return out;
  };
}

struct Room::State {
  uint64_t cap = 0;
  Probe probe;
  mutable std::mutex mutex;
  uint64_t held = 0;
  uint64_t unfilled = 0;  // promised, and not yet in the kernel's figures
  uint64_t granted = 0;   // may be taken without asking, until then
  Steady::time_point until;

  [[nodiscard]] Bound tightest() const {
    const auto now = probe();
    Bound out{~uint64_t{0}, {}};
    const auto consider = [&](const std::optional<uint64_t>& free, const char* where) {
      if (free && less(*free, kRoomReserve + unfilled) < out.free) {
        out.free = less(*free, kRoomReserve + unfilled);
        out.text = where;
      }
    };
    consider(now.group, "under the limit of the memory control group");
    consider(now.machine, "on this machine");
    return out;
  }
};

Room::Room(uint64_t cap, Probe probe) : state_(std::make_unique<State>()) {
  state_->cap = cap;
  state_->probe = std::move(probe);
}

Room::~Room() = default;

std::shared_ptr<Room> Room::make(uint64_t cap, Probe probe) {
  return std::shared_ptr<Room>(new Room(cap, std::move(probe)));
}

std::optional<Charge> Room::take(uint64_t bytes, std::string& lack) {
  auto& state = *state_;
  std::lock_guard lock(state.mutex);
  if (state.cap != 0 && bytes > less(state.cap, state.held)) {
    lack = text("the cap is ", bytes_text(state.cap), ", of which ", bytes_text(state.held),
                " are held");
    return std::nullopt;
  }
  const auto now = Steady::now();
  if (bytes > state.granted || now > state.until) {
    const auto bound = state.tightest();
    if (bytes > bound.free) {
      lack = text(bytes_text(bound.free), " are free ", bound.text, " beside a reserve of ",
                  bytes_text(kRoomReserve), ", and ", bytes_text(state.held), " are held");
      return std::nullopt;
    }
    state.granted = std::min(kMostGranted, (bound.free - bytes) / 16) + bytes;
    state.until = now + kAnswerLasts;
  }
  state.granted -= bytes;
  state.held += bytes;
  state.unfilled += bytes;
  return Charge(shared_from_this(), bytes);
}

uint64_t Room::held() const {
  std::lock_guard lock(state_->mutex);
  return state_->held;
}

void Room::give_back(uint64_t bytes, uint64_t unfilled) {
  std::lock_guard lock(state_->mutex);
  state_->held -= bytes;
  state_->unfilled -= unfilled;
}

Charge::Charge(Charge&& other) noexcept
    : room_(std::move(other.room_)),
      bytes_(std::exchange(other.bytes_, 0)),
      unfilled_(std::exchange(other.unfilled_, 0)) {}

Charge& Charge::operator=(Charge&& other) noexcept {
  Charge former(std::move(*this));
  room_ = std::move(other.room_);
  bytes_ = std::exchange(other.bytes_, 0);
  unfilled_ = std::exchange(other.unfilled_, 0);
  return *this;
}

Charge::~Charge() {
  if (room_ && bytes_ != 0) {
    room_->give_back(bytes_, unfilled_);
  }
}

void Charge::settle() {
  if (room_ && unfilled_ != 0) {
    room_->give_back(0, std::exchange(unfilled_, 0));
  }
}

void Charge::add(Charge&& other) {
  if (!room_) {
    *this = std::move(other);
    return;
  }
  bytes_ += std::exchange(other.bytes_, 0);
  unfilled_ += std::exchange(other.unfilled_, 0);
}

}  // namespace tenure::store
