// Room: whether there is room for more bytes, asked before they are allocated: beyond a control
// group's limit or the machine's memory the kernel does not refuse, it kills. And the count of what
// is held, which a Charge gives back when it ends.
//
// Torch-free. Threading: any thread. Lives as long as a Charge does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace tenure::store {

class Charge;

// What others leave free, in bytes. Absent: no limit there, or none that can be read.
struct Vacancy {
  std::optional<uint64_t> group;    // under the limit of the memory control group
  std::optional<uint64_t> machine;  // MemAvailable
};
using Probe = std::function<Vacancy()>;
// Asks the kernel about the calling process. Cached files that it would drop count as free. Keeps
// its files open, so that it can still see when there are no descriptors left.
Probe kernel_probe();

// Left free for everything else: stacks, sockets, the allocator's own.
inline constexpr uint64_t kRoomReserve = uint64_t{32} << 20;

class Room : public std::enable_shared_from_this<Room> {
 public:
  // `cap` of 0: none but the group's and the machine's. `probe` is asked from any thread.
  static std::shared_ptr<Room> make(uint64_t cap, Probe probe = kernel_probe());
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  Room(Room&&) = delete;
  Room& operator=(Room&&) = delete;
  ~Room();

  // `bytes` that the caller is about to fill. No room: none, and `lack` says how much there is.
  std::optional<Charge> take(uint64_t bytes, std::string& lack);

  [[nodiscard]] uint64_t held() const;

 private:
  friend class Charge;
  struct State;
  Room(uint64_t cap, Probe probe);
  void give_back(uint64_t bytes, uint64_t unfilled);

  std::unique_ptr<State> state_;
};

// Bytes held. Move-only.
class Charge {
 public:
  Charge() = default;
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge();

  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  // The bytes are filled: from here on the kernel's own figures include them.
  void settle();
  // Takes over what `other` holds of the same room.
  void add(Charge&& other);

 private:
  friend class Room;
  Charge(std::shared_ptr<Room> room, uint64_t bytes)
      : room_(std::move(room)), bytes_(bytes), unfilled_(bytes) {}

  std::shared_ptr<Room> room_;
  uint64_t bytes_ = 0;
  uint64_t unfilled_ = 0;
};

}  // namespace tenure::store
