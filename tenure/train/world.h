// World: what all ranks of a job tell each other besides tensors of the model. Over a group of the
// host. All ranks make the same calls; one thread.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace tenure::train {

class World {
 public:
  World(c10::intrusive_ptr<c10d::ProcessGroup> host, std::chrono::milliseconds timeout);
  ~World();

  int64_t rank() const { return rank_; }
  int64_t ranks() const { return ranks_; }

  // Every rank's figures, by rank; all have as many. Throws CollectiveError, naming what was done,
  // if a rank has ended or does not come.
  std::vector<std::vector<double>> share(const std::vector<double>& own, const std::string& doing);

  // Throws CollectiveError on the ranks that are well if any is not.
  void require_all(bool well, const std::string& doing);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> host_;
  std::chrono::milliseconds timeout_;
  int64_t rank_;
  int64_t ranks_;
};

}  // namespace tenure::train
