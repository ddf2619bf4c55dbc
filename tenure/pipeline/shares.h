// Shares: how much of a batch each microbatch is. A mean over the batch's rows is made of those
// over its microbatches'. One thread.
#pragma once

#include <tenure/pipeline/header.h>

#include <cstdint>
#include <vector>

namespace tenure::pipeline {

class Shares {
 public:
  // Rows by microbatch, of what this rank was given; empty where that has none.
  Shares(uint32_t microbatches, const std::vector<int64_t>& batch,
         const std::vector<int64_t>& target);

  // Of the batch, which another rank may have.
  const Share& of(uint32_t microbatch) const { return batch_[microbatch]; }
  void learn(uint32_t microbatch, const Share& share) { batch_[microbatch] = share; }

  // In the loss.
  double weight_of(uint32_t microbatch) const;
  // Throws InputError for a target that is split in other proportions than the batch.
  void check_target(uint32_t microbatch) const;

 private:
  std::vector<Share> batch_;
  std::vector<Share> target_;
};

}  // namespace tenure::pipeline
