// Order: what a pass does with its units, as the pass before did it, so that the next ones can be
// gathered ahead and all ranks know without asking that they do the same. A pass that goes another
// way is followed no further, and becomes what is expected of the next. Plain data; one thread at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace tenure::shard {

enum class Phase : uint8_t {
  forward,   // the unit is needed
  backward,  // the same
  reduce,    // its gradients are added up over ranks
  end,       // of a backward: nothing that comes after it is gathered before it
  hold,      // all units are needed, until the hold ends
};

std::string_view name_of(Phase phase);

struct Use {
  uint32_t unit = 0;
  Phase phase = Phase::forward;

  bool operator==(const Use&) const = default;
};

class Order {
 public:
  // Whether all ranks surely do the same: the pass goes the way of the one before, this use
  // included. The first use after a pass that went another way is not sure, for another rank may
  // still be in that one.
  bool use(Use use);
  // The pass is over; the next use is the first of another one.
  void end_pass();

  // Which units are needed next, as far as the last pass tells and this one has gone the same way.
  // At most `count`, nearest first.
  std::vector<uint32_t> ahead(size_t count) const;

  // What comes next, on the same terms.
  std::optional<Use> next() const;

  // What the pass before did where this one went another way; nothing if it had ended or none did.
  std::optional<Use> instead() const { return instead_; }

  // How many uses this pass has had.
  size_t position() const { return current_.size(); }
  // Passes that went another way than the one before.
  uint64_t changes() const { return changes_; }

 private:
  // A program that never comes back to where passes begin is not remembered for ever.
  static constexpr size_t kLongest = 1 << 16;

  std::vector<Use> known_;
  std::vector<Use> current_;
  bool following_ = false;
  bool changed_ = false;  // the pass before
  std::optional<Use> instead_;
  uint64_t changes_ = 0;
};

}  // namespace tenure::shard
