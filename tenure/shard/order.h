// Order: in which order a pass uses its units, as the last pass did it, so that the next ones can be
// gathered ahead. A pass that goes another way is followed no further, and becomes what is expected
// of the next. Plain data; one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenure::shard {

enum class Phase : uint8_t { forward, backward };

struct Use {
  uint32_t unit = 0;
  Phase phase = Phase::forward;

  bool operator==(const Use&) const = default;
};

class Order {
 public:
  void use(Use use);
  // The pass is over; the next use is the first of another one.
  void end_pass();

  // What comes next, as far as the last pass tells and this one has gone the same way. At most
  // `count`, nearest first.
  std::vector<Use> ahead(size_t count) const;

  // Passes that went another way than the one before.
  uint64_t changes() const { return changes_; }

 private:
  // A program that never comes back to where passes begin is not remembered for ever.
  static constexpr size_t kLongest = 1 << 16;

  std::vector<Use> known_;
  std::vector<Use> current_;
  bool following_ = false;
  uint64_t changes_ = 0;
};

}  // namespace tenure::shard
