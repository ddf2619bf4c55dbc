// Gradients of one flat, as they come in a backward. They stay what they are until all are there
// and the unit's parameters have gone: only then is there a buffer for one collective to add up
// all, and each goes as it has been copied there. One thread at a time.
#pragma once

#include <tenure/shard/layout.h>
#include <tenure/shard/part.h>
#include <tenure/shard/turn.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tenure::shard {

// Whose memory a gradient has.
enum class Memory : uint8_t {
  given,  // nobody else writes to it
  lent,   // its owner's, who uses it again
};

class Gradients {
 public:
  // Keeps or copies it, or adds it to what came for that parameter before. In the dtype `type`, or
  // its own.
  void take(const Layout& layout, size_t parameter, const at::Tensor& gradient, Memory memory,
            std::optional<c10::ScalarType> type, OwnerId owner);

  bool empty() const { return came_.empty(); }
  // All of them with those of `before`, zero for parameters that had none, and which had one. Empty
  // afterwards; `before` is as it was.
  std::pair<at::Tensor, std::vector<bool>> hand_over(const Layout& layout, Gradients& before);
  void drop() { *this = {}; }

 private:
  void begin(const Layout& layout, c10::TensorOptions options, OwnerId owner);
  at::Tensor all(const Layout& layout);
  at::Tensor one(const Layout& layout, size_t parameter);

  c10::TensorOptions options_;  // of all of them together
  OwnerId owner_{};
  std::vector<Alias> kept_;  // by parameter, those that were not copied
  Alias all_;                // once one was
  Turn turn_;                // gradients come on the streams of the nodes that made them
  std::vector<bool> came_;   // by parameter; empty: nothing came
};

}  // namespace tenure::shard
