// Gradients of one flat, as they come in a backward: each is copied to where its parameter lies, so
// that no more than one lives twice and one collective adds up all. One thread at a time.
#pragma once

#include <tenure/shard/layout.h>
#include <tenure/shard/part.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace tenure::shard {

class Gradients {
 public:
  // Copies it, or adds it to what came for that parameter before. In the dtype `type`, or its own.
  void take(const Layout& layout, size_t parameter, const at::Tensor& gradient,
            std::optional<c10::ScalarType> type, OwnerId owner);

  bool empty() const { return came_.empty(); }
  // All of them, zero for parameters that had none, and which had one. Empty afterwards.
  std::pair<at::Tensor, std::vector<bool>> hand_over(const Layout& layout);
  void drop() { *this = {}; }

 private:
  Alias all_;
  std::vector<bool> came_;  // by parameter; empty: nothing came
};

}  // namespace tenure::shard
