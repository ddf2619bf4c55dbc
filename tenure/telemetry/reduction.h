// Reduction: the one collective of an interval, a maximum over all ranks' words, on groups of its
// own. The job's groups are left alone, for on one group the order of collectives is part of the
// agreement, and this one's is decided by a thread that the job knows nothing of.
//
// Note [Levels]
// Gloo connects every pair of a group, so no group has more than kMostMembers ranks. Level 0 is a
// rank's neighbours, ranks of one node as far as they fit; the first member of each group is a
// member at the next level, until one group is left. Words go up by a maximum at each level and
// come down by a broadcast. With no more than kMostMembers ranks that is one collective.
//
// Threading: one thread at a time.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <vector>

namespace at {
class Tensor;
}
namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace tenure::telemetry {

inline constexpr size_t kMostMembers = 64;

class Reduction {
 public:
  using Group = c10::intrusive_ptr<c10d::Backend>;

  // `mine`: the groups that this rank is in, from level 0 up; `levels`: how many there are in all.
  Reduction(std::vector<Group> mine, size_t levels);
  ~Reduction();
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  // Leaves the maximum of all ranks' words in `words`, int64 on the CPU. False: asked to stop
  // before the others came; then nothing else may be reduced. Throws CollectiveError when a rank
  // is gone; then this one has left, too, so that all know.
  bool reduce(const at::Tensor& words, const std::stop_token& stop);

  // Collectives issued so far by this rank.
  uint64_t collectives() const { return collectives_; }

 private:
  bool finished(const c10::intrusive_ptr<c10d::Work>& work, const std::stop_token& stop);

  std::vector<Group> mine_;
  size_t levels_;
  uint64_t collectives_ = 0;
  bool broken_ = false;
};

}  // namespace tenure::telemetry
